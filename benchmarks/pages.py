"""The generated figures of the README, with its picture, of the results page and of the page on vision, by one command:

    python -m benchmarks.pages

On the results page a block is all between `<!-- Measured: NAME … -->` and `<!-- End of measured -->`, and becomes the table of
the named files of `results/`, with their conditions below it. The files of a block are the newest of their workloads: no
other of the same suite, cases, kind and number of GPUs is newer and has all of their entries. The table of published figures
(`benchmarks.published`) names no files: it has those of its rows.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks import curves, readme
from benchmarks.files import does_not_fit, exit_code_of, read_json
from benchmarks.published import page as published
from benchmarks.readme import LIBRARIES, WIDTH, Row, kernel_of, rate_of, speed, title_of
from benchmarks.vision import page as vision
from octavo.errors import InputError
from octavo.storage import write_atomic

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE, PAIR = ROOT / "docs" / "_static" / "run.svg", ("bf16-seed-3", "fp8-seed-3")
"""Of the README, and the runs whose losses it has: of seven pairs the one whose gap is neither the least nor the largest."""
_BLOCK = re.compile(r"(<!-- Measured: ([\w -]+?) -->\n).*?(<!-- End of measured -->)", re.S)
_DASH, _TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
_PACKAGES = {"transformer-engine": "Transformer Engine", "flash-attn-4": "flash-attn-4", "peft": "PEFT"}
"""Distributions by other names, and those whose version stands beside them."""


def rewrite(text: str, results: Path, folder: Path) -> str:
    """The text of a page with its blocks regenerated. folder: that of the page, for links.

    Raises:
        InputError: a block names a file that is not there, or an older one of its workload; a published row's file is not
            complete.
    """
    text = published.rewrite(text, results, folder)
    return _BLOCK.sub(lambda found: f"{found[1]}{block(found[2].split(), results, folder)}\n{found[3]}", text)


def named(text: str) -> list[str]:
    """The files of all blocks of a page, in order."""
    return [name for found in _BLOCK.finditer(text) for name in found[2].split()]


def block(names: Sequence[str], results: Path, folder: Path) -> str:
    """The table of some files, a line for each entry of each workload, and a paragraph with their conditions.

    Raises:
        InputError: a file is not there, or another of the same workload is newer.
    """
    documents = {name: _read(results / f"{name}.json") for name in names}
    for name in names:
        if newer := _newer(name, results):
            raise InputError(f"{name}.json has the same workload as {newer}.json, which is newer: name that, and delete this.")
    rows = [row for document in documents.values() for row in document["rows"]]
    compared = any(_is_peer(row) for row in rows)
    several = len({row["gpus"] for row in rows if "gpus" in row}) > 1
    exposed = any("exposed_communication_ms" in row for row in rows)
    attention = any(kernel_of(row) for row in rows)
    titles = ["workload", "entry", *["GPUs"] * several, rate_of(rows), "ms a step", *["exposed"] * exposed, "MFU", "peak GiB"]
    titles += [*["attention"] * attention, *[f"{_TIMES} best peer"] * compared]
    table = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, document in documents.items():
        link = Path(os.path.relpath(results / f"{name}.json", folder)).as_posix()
        groups: dict[str, list[Row]] = {}
        for row in document["rows"]:
            groups.setdefault(row["workload"], []).append(row)
        for found in groups.values():
            best = {gpus: _best(found, gpus) for gpus in {row.get("gpus") for row in found}}
            shown = next((row for row in found if "error" not in row), None)
            what = f"{found[0]['workload'] if shown is None else title_of(shown)} ([JSON]({link}))"
            for row in sorted(found, key=speed, reverse=True):
                cells = _cells(row, several=several, exposed=exposed, attention=attention)
                ratio = speed(row) / best[row.get("gpus")] if best[row.get("gpus")] and speed(row) else None
                cells += [_DASH if ratio is None else f"{ratio:.3f}"] * compared
                named_entry = f"`{row['entry']}`"
                table.append(f"| {' | '.join([what, named_entry, *cells])} |")
                what = ""
    return "\n".join([*table, "", fill(conditions(documents.values()), WIDTH, break_on_hyphens=False)])


def conditions(documents: Iterable[Mapping[str, Any]]) -> str:
    """Date, machine, versions and order of some documents, a sentence for those that share them."""
    said: dict[str, dict[bool, list[str]]] = {}
    for document in documents:
        machine, rows = document["machine"], document["rows"]
        gpus = sorted({row["gpus"] for row in rows if "gpus" in row})
        kind = str(machine.get("gpu") or "CPU").removeprefix("NVIDIA ").split(" ")[0]
        where = f"one {kind}" if gpus == [1] else f"{' and '.join(map(str, gpus))} {kind}s"
        versions = {"torch": machine.get("torch"), "flash-attn-4": machine.get("flash-attn-4"), **machine.get("peers", {})}
        text = ", ".join(f"{_PACKAGES.get(name, name)} {version}" for name, version in versions.items() if version)
        orders = said.setdefault(f"{document['date'][:10]}, {where}, {text}", {})
        for name in dict.fromkeys(row["workload"] for row in rows):
            found = [row for row in rows if row["workload"] == name and "interleaved" in row]
            if len(found) > 1:
                orders.setdefault(all(row["interleaved"] for row in found), []).append(title_of(found[0]))
    order = {(): "", (True,): "; entries in two alternating rounds", (False,): "; entries one after the other"}
    sentences = []
    for text, orders in said.items():
        mixed = f"; entries in two alternating rounds, but one after the other for {'; '.join(orders.get(False, []))}"
        sentences.append(f"{text}{order.get(tuple(orders), mixed)}.")
    return "Measured: " + " ".join(sentences)


def _cells(row: Row, *, several: bool, exposed: bool, attention: bool) -> list[str]:
    gpus = [str(row.get("gpus", _DASH))] * several
    if "error" in row:
        fault = "out of memory" if does_not_fit(row) else "failed"
        fault = "attention is wrong" if "attention is wrong" in row["error"] else fault
        return [*gpus, fault, _DASH, *[_DASH] * exposed, _DASH, _DASH, *[_DASH] * attention]
    open_ms = f"{row['exposed_communication_ms']:.1f} ms" if "exposed_communication_ms" in row else _DASH
    mfu = _DASH if row.get("mfu") is None else f"{row['mfu']:.1%}"
    peak = f"{row['peak_gib']:.1f}" if row.get("peak_gib") else _DASH
    figures = [f"{speed(row):,.0f}", f"{row['step_ms']:,.0f}"]
    return [*gpus, *figures, *[open_ms] * exposed, mfu, peak, *[kernel_of(row) or _DASH] * attention]


def _is_peer(row: Row) -> bool:
    return str(row["entry"]).startswith(tuple(LIBRARIES))


def _best(rows: Sequence[Row], gpus: Any) -> float:
    """The speed of the fastest peer on so many GPUs; 0 without one."""
    return max((speed(row) for row in rows if _is_peer(row) and row.get("gpus") == gpus), default=0.0)


def _read(path: Path) -> dict[str, Any]:
    document = read_json(path, "a file of python -m benchmarks", "names of files in benchmarks/results")
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
        raise InputError(f"{path} is not a file of python -m benchmarks: it has no rows.")
    return document


def workload(document: Mapping[str, Any]) -> tuple[Any, ...]:
    """Suite, cases, kind of GPU and number of GPUs of a file."""
    cases = tuple(sorted({str(row.get("workload")) for row in document["rows"] if isinstance(row, Mapping)}))
    machine = document.get("machine", {})
    return document.get("suite"), cases, machine.get("gpu"), machine.get("count")


def _entries(document: Mapping[str, Any]) -> set[str]:
    return {str(row.get("entry")) for row in document["rows"] if isinstance(row, Mapping)}


def _newer(name: str, results: Path) -> str | None:
    """Another file of the same workload that is newer, with all the entries of this one."""
    given = _read(results / f"{name}.json")
    for path in sorted(results.glob("*.json")):
        found = read_json(path, "a file of results", "names of files in benchmarks/results")
        if path.stem == name or not isinstance(found, dict) or not isinstance(found.get("rows"), list) or "date" not in found:
            continue
        later = workload(found) == workload(given) and str(found["date"]) > str(given["date"])
        if later and _entries(found) >= _entries(given):
            return path.stem
    return None


def main(arguments: list[str]) -> int:
    """Rewrite the pages; returns the exit code."""

    def write() -> None:
        if arguments:
            raise InputError("python -m benchmarks.pages takes no arguments: markers of the pages name the results.")
        front = ROOT / "README.md"
        text = front.read_text(encoding="utf-8")
        write_atomic(front, readme.rewrite(text, *readme.named(text), ROOT))
        for page, regenerated in ((ROOT / "docs" / "results.md", rewrite), (ROOT / "docs" / "vision.md", None)):
            text = page.read_text(encoding="utf-8")
            new = vision.rewrite(text, RESULTS) if regenerated is None else regenerated(text, RESULTS, page.parent)
            write_atomic(page, new)
        write_atomic(PICTURE, curves.picture(_read(RESULTS / "loss-pairs.json"), PAIR))

    return exit_code_of(write)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
