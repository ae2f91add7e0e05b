"""Shows that a refactor has changed no bit: the same small trainings by two source trees, or by one and a record.

    python tests/unchanged compare --against ../main        this tree beside another; the honest comparison on any machine
    python tests/unchanged compare                          this tree beside recorded.json, on the machine that recorded it
    python tests/unchanged record                           write recorded.json by this tree; with --only some cases of it

`--only PATTERN` takes some of the cases, `--tree FOLDER` another tree than this file's. Trees are checkouts with `src/octavo`
in them; only public names are used, so that a tree of another inner order runs too. Exit codes: 0 the same, 1 not (or a case
failed), 2 the record is of another machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD = HERE / "recorded.json"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="unchanged", description="Bits that a refactor must keep.")
    parser.add_argument("command", choices=("record", "compare", "run"), help="run: results.json of a tree")
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], help="checkout that is looked at")
    parser.add_argument("--against", type=Path, help="checkout that it is compared with, in place of the record")
    parser.add_argument("--only", default="*", help="pattern of the names of cases")
    parser.add_argument("--folder", type=Path, help="of run, empty")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    given = parser.parse_args()
    if given.command == "run":
        return _run(given.only, given.jobs, given.folder)
    started = time.monotonic()
    if given.command == "record":
        found = _results([given.tree], given.only, given.jobs)[0]
        if faults := _failures(found):
            print("\n".join(faults))
            return 1
        known = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else found
        if known["machine"] == found["machine"]:  # with --only the others stay as they are recorded
            kept = known["cases"] if given.only != "*" else {}
            found["cases"] = kept | found["cases"]
        elif given.only != "*":
            print(f"the record is of {known['machine']}, this machine is {found['machine']}: record without --only")
            return 2
        RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"recorded; {len(found['cases'])} cases in the record, in {time.monotonic() - started:.0f} s")
        return 0
    if given.against is not None:
        before, now = _results([given.against, given.tree], given.only, given.jobs)
    else:
        now = _results([given.tree], given.only, given.jobs)[0]
        before = json.loads(RECORD.read_text(encoding="utf-8"))
        before["cases"] = {name: value for name, value in before["cases"].items() if given.only == "*" or name in now["cases"]}
        if before["machine"] != now["machine"]:
            print(f"the record is of {before['machine']}, this machine is {now['machine']}: use --against FOLDER")
            return 2
    lines = [*_failures(now), *_differences(before["cases"], now["cases"])]
    if lines:
        print("\n".join(lines))
        return 1
    print(f"{len(now['cases'])} cases are the same to the last bit ({time.monotonic() - started:.0f} s)")
    return 0


def _run(only: str, jobs: int, folder: Path) -> int:
    import runner

    import octavo

    if not runner.names(only):
        raise SystemExit(f"no case is called {only}")
    source = Path(os.environ["PYTHONPATH"]).resolve()
    if not Path(octavo.__file__).resolve().is_relative_to(source):
        raise SystemExit(f"octavo was imported from {octavo.__file__}, not from {source}")
    results = folder / "results.json"
    results.write_text(json.dumps(runner.run(runner.names(only), folder, jobs)), encoding="utf-8")
    return 0


def _results(trees: list[Path], only: str, jobs: int) -> list[dict[str, Any]]:
    """Of each tree; several trees run side by side and share the jobs."""
    each = str(max(1, jobs // len(trees)))
    with contextlib.ExitStack() as opened:
        running = []
        for tree in trees:
            source = tree.resolve() / "src"
            if not (source / "octavo").is_dir():
                raise SystemExit(f"{tree} has no src/octavo: give a checkout")
            # Made here: a forked child that ends in an orderly way would remove a folder of the process that it came from.
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory())).resolve()
            environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(source)}
            command = [sys.executable, str(HERE), "run", "--only", only, "--jobs", each, "--folder", str(folder)]
            running.append((subprocess.Popen(command, env=environment), folder))
        codes = [process.wait() for process, _ in running]  # of all, so that none is left
        if any(codes):
            raise SystemExit("the cases could not be run")
        return [json.loads((folder / "results.json").read_text(encoding="utf-8")) for _, folder in running]


def _failures(found: dict[str, Any]) -> list[str]:
    return [f"{name} failed:\n{result['failed']}" for name, result in found["cases"].items() if "failed" in result]


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A row for each value that differs: case, what, step, before, now."""
    rows: list[tuple[str, ...]] = []
    for name in sorted({*before, *now}):
        if name not in before or name not in now:
            rows.append((name, "", "", "present" if name in before else "absent", "present" if name in now else "absent"))
        elif "failed" not in now[name]:
            rows += [(name, *row) for row in _rows(before[name], now[name])]
    if not rows:
        return []
    rows = [("case", "what", "first step", "before", "now"), *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _rows(before: Any, now: Any, what: str = "") -> list[tuple[str, str, str, str]]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [row for key in keys for row in _rows(before.get(key), now.get(key), f"{what} {key}".strip())]
    if before == now:
        return []
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        step = next(index for index, pair in enumerate(zip(before, now, strict=True)) if pair[0] != pair[1])
        return [(what, str(step + 1), _shown(before[step]), _shown(now[step]))]
    return [(what, "", _shown(before), _shown(now))]


def _shown(value: Any) -> str:
    try:
        return repr(float.fromhex(value)) if "0x" in value else str(value)[:16]
    except (TypeError, ValueError):
        return str(value)[:40]


if __name__ == "__main__":
    sys.exit(main())
