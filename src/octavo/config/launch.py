"""[launch]: timeouts of the watchdog."""

from __future__ import annotations

from pydantic import Field

from octavo.config.section import Section


class LaunchConfig(Section):
    """Timeouts of the watchdog of several ranks."""

    timeout: float = Field(
        600.0,
        gt=0,
        le=1e8,
        description="Seconds without progress of a rank, or of the ranks that wait for it, before the job is ended.",
    )
    grace: float = Field(10.0, ge=0, le=1e8, description="Seconds between the failure of a rank and killing the others.")
