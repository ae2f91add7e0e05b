"""[checkpoint]: when a run is saved, and how many checkpoints are retained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octavo.config.section import Section


class CheckpointConfig(Section):
    """Steps at which the run is saved, and the number of checkpoints to keep."""

    every: int = Field(100, ge=0, description="Steps between checkpoints; 0: only at the end or when stopped.")
    keep: int = Field(2, ge=1, description="Number of newest checkpoints to retain.")
    best: bool | str = Field(
        False,
        description="Also save after each validation with a new lowest loss, and retain that checkpoint. A text: by the "
        'loss of this set in `data.validation`, or by a figure of an evaluation, such as "evaluation/accuracy".',
    )
    best_is: Literal["lowest", "highest"] | None = Field(
        None, description='Which value is best if `best` names a figure of an evaluation: "lowest" or "highest".'
    )
    async_: bool = Field(
        False, alias="async", description="Write in the background: training waits only for the copy to host memory."
    )
