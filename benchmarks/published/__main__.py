"""`python -m benchmarks.published`: measures the rows of published figures on one host, or prints their plan."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.files import exit_code_of
from benchmarks.published.measure import PLANNED_GIB, check_octavo, chosen, measure, memory_of, steps_of
from benchmarks.records import render
from octavo.arguments import names, path
from octavo.bench.results import print_table
from octavo.errors import EXIT_INTERRUPTED, warn
from octavo.hardware import GIB
from octavo.plan.memory import USABLE
from octavo.run.metrics import encode


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published",
        description="Measure Octavo and its peers on the workloads of published figures. Rows with a complete file are "
        "left out, so a repeated command continues; an interrupted row is measured again. On a CPU the models are tiny.",
        epilog="Example: python -m benchmarks.published --gpus 8 --cases A1,S1 --minutes 10 --output benchmarks/results",
    )
    parser.add_argument("--cases", metavar="A,B", help="rows, or first parts of their names such as T3; all if absent")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs that rows may use (on a CPU: ranks); all if absent")
    parser.add_argument("--device", help="a GPU if there is one")
    parser.add_argument("--output", metavar="FOLDER", help="folder of the files, one a row; here if absent")
    parser.add_argument("--minutes", type=float, metavar="M", help="start no row that is planned to end later")
    parser.add_argument("--plan", action="store_true", help="print memory and minutes of each row, and measure nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(arguments)


def _print_plan(cases: list[str] | None, console: Console) -> None:
    lines = []
    for row in chosen(cases):
        memory, how = memory_of(row), steps_of(row)
        room = ["-"] * 2 if memory is None else [f"{memory.total / GIB:.1f}", f"{memory.host / GIB:.1f}"]
        lines.append([row.name, row.case, str(row.gpus), *room, str(how.timed), str(how.warmup), f"{how.minutes:.1f}"])
    title = f"planned for GPUs of 80 GB, of which {USABLE * PLANNED_GIB:.1f} GiB are usable"
    print_table(title, ["row", "case"], ["GPUs", "GiB", "host GiB", "steps", "warm-up", "minutes"], lines, console)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    given = parsed(words)
    console = Console(stderr=given.json)

    def work() -> None:
        cases = names(given.cases, "--cases") or None
        if given.plan:
            _print_plan(cases, console)
            return
        documents = measure(
            cases=cases,
            gpus=given.gpus,
            device=given.device,
            folder=path(given.output, "--output"),
            minutes=given.minutes,
            command=shlex.join(["python", "-m", "benchmarks.published", *words]),
            say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
        )
        for document in documents:
            render(document, console)
        if given.json:
            print(encode({"measured": documents}, indent=2))
        check_octavo(documents)

    try:
        return exit_code_of(work)
    except KeyboardInterrupt:
        warn("interrupted: the next call measures this row again, and leaves out those that are complete.")
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
