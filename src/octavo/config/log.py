"""[log]: progress lines and trackers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octavo.config.section import Section


class LogConfig(Section):
    """What is reported while it runs."""

    every: int = Field(1, ge=1, description="Steps between progress lines; metrics.jsonl has every step.")
    trackers: list[Literal["tensorboard", "trackio", "wandb"]] = Field(
        default_factory=list, description="Experiment trackers that also get the metrics (each an extra to install)."
    )
