"""Why a job failed: its first uncaught error, or the end of its log; where memory ran out, with the setting that divides it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.config.degrees import divisors
from octavo.launch import faults

_TAIL_BYTES = 1 << 18
_ERROR = re.compile(
    r"^(?:\[rank\d+\]:\s*)?((?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception|Exit|Interrupt)\b.*|octavo: .*)$", re.M
)
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|out of memory|DefaultCPUAllocator: (?:can't allocate|not enough) memory|Cannot allocate memory|"
    r"MemoryError|std::bad_alloc|ended by SIGKILL"
)
_LONGEST = 1500
"""Characters of a reason: a message of Octavo's names its way at its end."""
_MODULE = re.compile(r"No module named '([\w.]+)'")


def reason(log: Path, job: Mapping[str, Any]) -> str:
    """One sentence without its full stop. job: content of job.json."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    errors = [found.strip().removeprefix("octavo: ").rstrip(".") for found in _ERROR.findall(text)]
    uncaught = faults.first(log.with_name(faults.NAME)).rstrip(".")
    last = next((line for line in errors if _NO_MEMORY.search(line)), uncaught or (errors[-1] if errors else ""))
    what = _shown(last)
    if _NO_MEMORY.search(text):
        return f"out of memory ({what or 'see the log'}). {memory_advice(job)}"
    missing = _MODULE.search(last)
    if (
        missing
        and (Path(job["source"]) / f"{missing[1].partition('.')[0]}.py").is_file()
        and job["estimator"]["source_dir"] is None
    ):
        return f"{what}: its file lies beside the script, and only the script is taken along. Give source_dir"
    if what:
        return what
    written = [line for line in map(str.strip, text.splitlines()) if line]
    # The reason of a script that ends by `sys.exit("…")` is its last line.
    return f"its log ends with: {_shown(written[-1].rstrip('.'))}" if written else "its log is empty"


def _shown(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"


def memory_advice(job: Mapping[str, Any]) -> str:
    """The settings of the estimator that lower the memory of a rank, the next larger degree first."""
    hyperparameters, parameters = job["estimator"]["hyperparameters"] or {}, job["parameters"]
    found = []
    if parameters is not None and job["ranks"]:
        context = parameters.get("context_parallel_degree", 1)
        most = job["ranks"] // parameters.get("tensor_parallel_degree", 1)
        shard = parameters.get("hybrid_shard_degree", 0) or most
        larger = [degree for degree in divisors(shard) if degree > context]
        length = hyperparameters.get("max_context_width")
        if larger:
            tokens = f" of {length} tokens" if length else ""
            degrees = ("a degree of " if len(larger) == 1 else "degrees of ") + _and(larger)
            divide = "divides" if len(larger) == 1 else "divide"
            found.append(
                f"context_parallel_degree = 1 keeps whole sequences{tokens} on each rank: {degrees} {divide} their activations"
                if context == 1
                else f"context_parallel_degree is {context}: {degrees} {divide} activations further"
            )
        if shard < most:
            ranks = "all ranks" if most == job["ranks"] else f"all {most} ranks with the same part of a matrix"
            found.append(f"hybrid_shard_degree = {shard}: {most} shards parameters and states over {ranks}")
    if hyperparameters.get("activation_checkpointing") in (0, "0", False):
        found.append("activation_checkpointing = 1 keeps less for backward")
    if isinstance(size := hyperparameters.get("train_batch_size"), int) and size > 1:
        found.append(f"train_batch_size = {size} can be lower")
    return "; ".join(found) or "Give it fewer sequences, shorter ones, or more ranks"


def _and(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
