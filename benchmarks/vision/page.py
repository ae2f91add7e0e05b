"""The table of speeds and costs in docs/vision.md, from the published figures and the results of the vision suite.

    python -m benchmarks.vision.page docs/vision.md benchmarks/results

rewrites the part of the page between its two markers from every `vision-*.json` of the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import fill

from benchmarks.files import exit_code_of, read_results
from benchmarks.vision.costs import (
    BLOCK_PERCENT,
    FP8_PERCENT,
    PUBLISHED,
    PUBLISHED_SECONDS,
    CostRow,
    figures_of,
    gained_speed,
    measured,
    published,
)
from benchmarks.vision.prices import PUBLISHED_PRICES
from octavo.errors import InputError
from octavo.storage import write_atomic

BEGIN, END = (
    "<!-- The table: python -m benchmarks.vision.page docs/vision.md benchmarks/results -->",
    "<!-- End of the table -->",
)
WIDTH = 128
_DASH = "\N{EN DASH}"
_TITLES = ("figures", "GPUs", "workload", "entry", "batch", "images/s a GPU", "images/s", "$ a million images", "per $")


def generated(results: Path) -> str:
    """The part between the markers: the table, the plots, and the published conclusions beside those of the figures."""
    lines = [f"| {' | '.join(_TITLES)} |", "|---" * len(_TITLES) + "|"]
    lines += [_line("published", row) for row in PUBLISHED]
    pictures = []
    for path in sorted(results.glob("vision-*.json")):
        link = f"[measured](../{results.parent.name}/{results.name}/{path.name})"
        if (picture := path.with_suffix(".png")).is_file():
            pictures.append(f"[{picture.stem}](../{results.parent.name}/{results.name}/{picture.name})")
        lines += [_line(link, row) for row in measured(read_results(path, "vision", "images_per_second", "machine", "prices"))]
    plots = [f"Plots: {', '.join(pictures)}.", ""] if pictures else []
    return "\n".join([*lines, "", *plots, fill(_assumptions(), WIDTH), "", fill(_conclusions(), WIDTH)])


def rewrite(page: str, results: Path) -> str:
    """The text of a page with the part between its markers regenerated.

    Raises:
        InputError: the page does not have both markers, each once, in order.
    """
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended or BEGIN in rest or END in before + after:
        raise InputError(f"the page needs the markers {BEGIN!r} and {END!r}, each once and in this order.")
    return f"{before}{BEGIN}\n\n{generated(results)}\n\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Rewrite PAGE from the results in FOLDER; returns the exit code."""

    def write() -> None:
        if len(arguments) != 2:
            raise InputError("give a page and a folder of results: docs/vision.md benchmarks/results.")
        page, folder = map(Path, arguments)
        if not page.is_file() or not folder.is_dir():
            raise InputError(f"{page} is no file, or {folder} no folder: give docs/vision.md and benchmarks/results.")
        write_atomic(page, rewrite(page.read_text(encoding="utf-8"), folder))

    return exit_code_of(write)


def _line(figures: str, row: CostRow) -> str:
    machine = row.machine.replace(" x ", " \N{MULTIPLICATION SIGN} ")
    entry = row.entry if row.figures == "published" else f"`{row.entry}`"
    numbers = [_DASH if figure == "-" else figure for figure in figures_of(row)]
    return f"| {' | '.join([figures, machine, f'`{row.workload}`', entry, str(row.batch), *numbers])} |"


def _assumptions() -> str:
    seconds = " and ".join(f"{value} s" for value in PUBLISHED_SECONDS.values())
    prices = " and ".join(f"${price.dollars_per_hour}" for price in PUBLISHED_PRICES)
    block = " and ".join(f"{percent}%" for percent in BLOCK_PERCENT.values())
    return (
        "The published figures are the step times of 8 A100s and of 8 H100s with timm's blocks and 64 images a GPU "
        f"({seconds}), the prices of these machines ({prices} an hour), and the gains of Transformer Engine's block ({block}) "
        f"and of FP8 with twice the batch (another {FP8_PERCENT}%). All other published rows are computed from these, with a "
        'gain as a shorter time per image. "Per $" is images per dollar relative to the first row, for workloads with the '
        "published model's number of tokens."
    )


def _conclusions() -> str:
    a100, h100, a100_block, _, fp8 = PUBLISHED
    _, _, other_block, _, other_fp8 = published(gained_speed)
    return (
        f"The published text says that the H100 is 30% worse per dollar; its figures give {_better(h100, a100)}. With "
        "Transformer Engine's block on both and FP8 on the H100 it says that the H100 is 2% better and 3 times as fast; its "
        f"figures give {_better(fp8, a100_block)}, at {fp8.total / a100_block.total:.2f} times the speed, if a gain is a "
        "shorter time, as in the table. If a gain were added speed, they would give "
        f"{_better(other_fp8, other_block)}, at {other_fp8.total / other_block.total:.2f} times the speed."
    )


def _better(row: CostRow, other: CostRow) -> str:
    """Images of a dollar, one row's over another's."""
    assert row.dollars is not None
    assert other.dollars is not None
    percent = 100 * other.dollars / row.dollars - 100
    return f"{abs(percent):.1f}% {'better' if percent > 0 else 'worse'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
