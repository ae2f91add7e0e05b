"""[launch]: the patience of the watchdog."""

from __future__ import annotations

from pydantic import Field

from octavo.config.section import Section


class LaunchConfig(Section):
    """How several ranks belong together."""

    timeout: float = Field(
        600.0, gt=0, description="Seconds that a rank may be silent, or the others may wait for it, before the job is ended."
    )
    grace: float = Field(
        10.0, ge=0, description="Seconds that ranks have to end by themselves once one has failed, before they are killed."
    )
