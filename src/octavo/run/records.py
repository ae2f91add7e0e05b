"""Records in the folder of a run, read without torch: JSON files, and the state of the newest checkpoint.

A missing or damaged file is not an error: these values only label a plot or a table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.checkpoint.manifest import STATE, step_folders
from octavo.config.run import RunConfig
from octavo.dtypes import short_name


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it is absent or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def newest_state(run: Path) -> dict[str, Any]:
    """`state.json` of the newest checkpoint of a run; empty without one. The checkpoint is not verified."""
    folders = step_folders(run / "checkpoints")
    state = read_json(folders[0][1] / STATE) if folders else None
    return state if isinstance(state, dict) else {}


def layout_at(run: Path, step: int) -> dict[str, Any] | None:
    """The layout of the start that trained step `step`, from the first checkpoint at or after it; None without one.

    A start continues from a checkpoint, so that checkpoint belongs to the same start, if it still exists.
    """
    later = [folder for at, folder in step_folders(run / "checkpoints") if at >= step]
    state = read_json(later[-1] / STATE) if later else None
    layout = state.get("layout") if isinstance(state, dict) else None
    return layout if isinstance(layout, dict) else None


def label_of(run: Path, config: RunConfig) -> str:
    """Precision of a run: "fp8", or the dtype of its products if none runs in FP8."""
    asked = config.fp8.enabled is not False
    return "fp8" if asked and newest_state(run).get("recipe", True) is not None else short_name(config.model.dtype)
