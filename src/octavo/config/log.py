"""[log]: progress lines and trackers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from octavo.config.section import Section, several


class LogConfig(Section):
    """Progress lines and experiment trackers."""

    every: int = Field(1, ge=1, description="Steps between progress lines; metrics.jsonl has every step.")
    trackers: list[Literal["tensorboard", "trackio", "wandb"]] = several(
        "Experiment trackers that also receive the metrics (each is an extra to install)."
    )

    @field_validator("trackers")
    @classmethod
    def _check_distinct(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError("a tracker is listed twice: list each once")
        return value
