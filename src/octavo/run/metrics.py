"""metrics.jsonl: one JSON object per step.

Each line is one write, so a kill can truncate only the last line. Floats have Python's shortest repr and read back exactly;
JSON has no NaN and infinities, so they are the strings "NaN", "Infinity" and "-Infinity". Lines are synced with each
checkpoint, not with each step: an fsync takes milliseconds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError
from octavo.storage import free_bytes

_NOT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class MetricsFile:
    """Appends steps to `path`; on opening, removes a truncated last line and everything after step `last_step`.

    Raises:
        OctavoError: from every method, when the disk is full or fails.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        with self._explained():
            self.lost = last_step - cut(path, last_step)
            """Number of steps up to `last_step` that are missing at the end of the file."""
            self._file = path.open("ab", buffering=0)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one step."""
        line = encode(record).encode() + b"\n"
        with self._explained():
            while line:  # a full disk accepts a part first, then raises
                line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Sync all lines to disk, before the checkpoint of these steps."""
        with self._explained():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, synced."""
        try:
            self.sync()
        finally:
            self._file.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OctavoError(
                f"{self.path} could not be written: {error.strerror}; {free_bytes(self.path):,} bytes are free. The last "
                "checkpoint is intact: free some space, or move the run's folder and set train.output; then run it again."
            ) from None


def encode(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Valid JSON without a line end; one line unless `indent` is given."""
    return json.dumps(_json_value(record), indent=indent, allow_nan=False)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The record of every complete line of a metrics file; none if there is no file."""
    return [
        {key: _NOT_NUMBERS.get(value, value) if isinstance(value, str) else value for key, value in record.items()}
        for _, record in _whole_lines(path)
        if record is not None
    ]


def lacking(path: Path, steps: int) -> str:
    """The fault of a run's metrics that lack the record of step `steps`, with the remedy."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    damaged = [n for n, line in enumerate(lines, start=1) if not line.endswith(b"\n") or _record(line) is None]
    where = f"line {damaged[-1]} of {path} is cut or damaged" if damaged else f"{path} has {len(lines)} lines"
    checkpoint = path.parent / "checkpoints" / f"step-{steps}"
    return (
        f"{where}, and the record of step {steps} is missing. Restore the file from a copy; or remove {checkpoint}, and "
        "octavo train repeats the steps since the checkpoint before it, or all."
    )


def cut(path: Path, last_step: int) -> int:
    """Remove the lines after `last_step`, and a truncated one; returns the last remaining step, 0 for none."""
    remaining = list(takewhile(lambda line: line[1] is None or line[1]["step"] <= last_step, _whole_lines(path)))
    end = sum(len(line) for line, _ in remaining)
    if path.is_file():
        with path.open("rb+") as file:
            file.truncate(end)
            os.fsync(file.fileno())
    return max((record["step"] for _, record in remaining if record is not None), default=0)


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each complete line with its record; None for a damaged line between complete ones."""
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            return
        yield line, _record(line)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(line)
        int(record["step"])
    except (ValueError, KeyError, TypeError):
        return None
    return record


def _json_value(value: Any) -> Any:
    """A value for JSON: NaN and infinities, also in containers, become "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, Mapping):
        return {key: _json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
