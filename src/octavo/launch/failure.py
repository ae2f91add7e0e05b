"""The reason of a job's failure: its first uncaught error, or the end of its log; advice for an out-of-memory error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
"""Most characters of a reason; long enough for Octavo's messages, whose remedy is at the end."""
_MODULE = re.compile(r"No module named '([\w.]+)'")


def reason(log: Path, job: Mapping[str, Any]) -> str:
    """One sentence without its full stop. job: content of job.json, with its `memory_advice` if it has one."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    errors = [match.strip().removeprefix("octavo: ").rstrip(".") for match in _ERROR.findall(text)]
    uncaught = faults.first(log.with_name(faults.NAME)).rstrip(".")
    last = next((line for line in errors if _NO_MEMORY.search(line)), uncaught or (errors[-1] if errors else ""))
    what = _shown(last)
    if _NO_MEMORY.search(text):
        advice = job.get("memory_advice") or "Give it fewer sequences, shorter ones, or more ranks"
        return f"out of memory ({what or 'see the log'}). {advice}"
    missing = _MODULE.search(last)
    if (
        missing
        and (Path(job["source"]) / f"{missing[1].partition('.')[0]}.py").is_file()
        and job["estimator"]["source_dir"] is None
    ):
        return f"{what}: its file is next to the script, and only the script is copied into the job. Give source_dir"
    if what:
        return what
    written = [line for line in map(str.strip, text.splitlines()) if line]
    # A script that ends with `sys.exit("…")` has its reason in the last line.
    return f"its log ends with: {_shown(written[-1].rstrip('.'))}" if written else "its log is empty"


def _shown(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
