"""Figures of the README, from named results, all of one day and one kind of GPU.

    python -m benchmarks.readme README.md benchmarks/results/one-gpu-llama-1b.json benchmarks/results/one-gpu-vit-huge.json …

rewrites the parts of a page between their markers, which keep the command: the first figure, and the table of best peers.
Octavo's entry of a workload is its defaults; a ratio is to the fastest peer that the same run measured, at that peer's fastest
setting. A workload that a file measured without a peer is left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from benchmarks.cases import ALL_CASES, Case
from benchmarks.files import exit_code_of, read_json
from octavo.errors import InputError
from octavo.storage import write_atomic

PARTS = ("figure", "table")
WIDTH = 128
SUITES = ("one-gpu", "sharded", "context", "vision")
GIVE = f"JSON files of python -m benchmarks {', '.join(SUITES)}"
DEFAULTS = ("octavo-default", "octavo-delayed-fast-input-fp8-head-backward")
"""Octavo's defaults where an entry of the suite has that name."""
HEADS = ("octavo-delayed-fast-fp8-head", "octavo-delayed-fp8-head")
"""Octavo with all three products of the head in FP8."""
IMAGES = ("octavo-delayed-fast-input", "octavo-delayed")
LIBRARIES = {"te-": ("Transformer Engine", "transformer-engine"), "ao-": ("torchao", "torchao"), "torch-": ("PyTorch", None)}
"""Prefix of a peer's entries → its name and distribution."""
TITLES = {
    "llama-1b": "Llama-3.2-1B's shape",
    "llama-8b-8layers": "eight layers of Llama-3.1-8B",
    "llama2-7b-8layers": "eight layers of Llama-2-7B",
    "mistral-7b-layers-16k": "sixteen layers of Mistral-7B",
    "mixtral-8x7b-layers": "seven layers of Mixtral-8x7B",
    "mixtral-8x7b-4layers": "four layers of Mixtral-8x7B",
    "mixtral-8x7b-2layers": "two layers of Mixtral-8x7B",
    "mixtral-8x7b-5layers": "five layers of Mixtral-8x7B",
    "neox-20b-layers": "twelve layers of GPT-NeoX-20B",
    "neox-20b-10layers": "ten layers of GPT-NeoX-20B",
    "llama-8b": "Llama-3.1-8B",
    "llama-70b": "Llama-3.1-70B",
    "llama-70b-12layers": "twelve layers of Llama-3.1-70B",
    "vit-huge-patch16": "timm's ViT-Huge, patches of 16",
    "vit-huge": "timm's ViT-Huge",
}
"""Names of workloads, by the longest prefix."""

_KERNELS = {"flash-attn 4": "flash-attn-4", "cudnn": "cuDNN", "fused_attn=1": "cuDNN"}
"""Part of a peer's `attention` → the kernel."""
_WRONG = "attention is wrong"
_COMMAND = "python -m benchmarks.readme "

Row = Mapping[str, Any]


class Line(NamedTuple):
    """A workload of one file.

    Attributes:
        octavo, head: Octavo with its defaults, and with an FP8 head if that was measured.
        peer: the fastest.
        rows: all.
    """

    path: Path
    machine: Mapping[str, Any]
    octavo: Row
    head: Row | None
    peer: Row
    rows: Sequence[Row]


def lines_of(paths: Sequence[Path]) -> list[Line]:
    """The workloads with a peer, in the order of the files.

    Raises:
        InputError: a file is none of `python -m benchmarks`, has nothing to compare, or is of another day or another kind of
            GPU than the first; two files compare the same workload.
    """
    if not paths:
        raise InputError(f"no results: give {GIVE}.")
    lines: list[Line] = []
    first: dict[str, tuple[Any, Path]] = {}
    of: dict[tuple[str, int], Path] = {}
    for path in paths:
        document = _read(path)
        facts = {"day": document["date"][:10], "GPU": document["machine"].get("gpu") or document["machine"].get("cpu")}
        for what, value in facts.items():
            known, before = first.setdefault(what, (value, path))
            if value != known:
                raise InputError(
                    f"{path} is of another {what} than {before}: {value} and {known}. One table has one {what}: leave it out, "
                    "or repeat the measurement."
                )
        found = _lines(path, document)
        if not found:
            raise InputError(f"{path} has no workload with Octavo's defaults and a peer. Give files that have both.")
        for line in found:
            key = line.octavo["workload"], line.octavo["gpus"]
            if key in of:
                raise InputError(f"{path} and {of[key]} have both {key[0]} on {key[1]} GPUs: a table has one run of each.")
            of[key] = path
        lines += found
    return lines


def generated(part: str, lines: Sequence[Line], folder: Path) -> str:
    """The text of a part; links are relative to the page's folder."""
    if part == "figure":
        return fill(_figure(lines[0]), WIDTH)
    return "\n".join([*_best(lines, folder), "", fill(_below(lines), WIDTH)])


def rewrite(text: str, page: Path, paths: Sequence[Path], root: Path) -> str:
    """The text of a page with its parts regenerated.

    Args:
        page, paths: the page and the results, relative to `root`, as the command of the markers names them.

    Raises:
        InputError: see `lines_of`; or the page has no part, or a part without its two markers, each once and in order.
    """
    lines = lines_of([root / path for path in paths])
    command = f"{_COMMAND}{page.as_posix()} {' '.join(path.as_posix() for path in paths)}"
    there = [part for part in PARTS if f"<!-- The {part}: " in text or f"<!-- End of the {part} -->" in text]
    for part in there or PARTS[:1]:
        begin, end = f"<!-- The {part}: ", f"<!-- End of the {part} -->"
        before, begun, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not begun or not ended or begin in rest or end in before + after:
            raise InputError(f"{page} needs the markers '{begin}… -->' and '{end}', each once and in this order.")
        text = f"{before}{begin}{command} -->\n{generated(part, lines, (root / page).parent)}\n{end}{after}"
    return text


def named(text: str) -> tuple[Path, list[Path]]:
    """The page and the results in the command of a page's first marker.

    Raises:
        InputError: no marker has one.
    """
    _, found, rest = text.partition(_COMMAND)
    page, *paths = rest.partition(" -->")[0].split() if found else [""]
    if not paths:
        raise InputError(f"no results: the page's markers name none. Give {GIVE}.")
    return Path(page), list(map(Path, paths))


def main(arguments: list[str]) -> int:
    """Rewrite PAGE from RESULTS…, by default those of its markers; returns the exit code."""

    def write() -> None:
        if not arguments:
            raise InputError(f"give a page, such as README.md, and {GIVE}.")
        page, *paths = (Path(name).resolve() for name in arguments)
        text = page.read_text(encoding="utf-8")
        if paths:
            root = Path(os.path.commonpath([page.parent, *(path.parent for path in paths)]))
            given = page.relative_to(root), [path.relative_to(root) for path in paths]
        else:
            given = named(text)
            root = page.parents[len(given[0].parts) - 1]
        write_atomic(page, rewrite(text, *given, root))

    return exit_code_of(write)


def speed(row: Row) -> float:
    """Tokens or images a second of a GPU; 0 for a row with neither."""
    found = row.get("tokens_per_second", row.get("images_per_second", 0.0))
    return float(found) if isinstance(found, int | float) and "error" not in row else 0.0


def setting(row: Row, machine: Mapping[str, Any]) -> str:
    """A peer's entry in words: library, precision, head, attention."""
    prefix = next(prefix for prefix in LIBRARIES if row["entry"].startswith(prefix))
    name, package = LIBRARIES[prefix]
    version = machine.get("torch") if package is None else machine.get("peers", {}).get(package)
    words = [part for part in ("delayed", "current", "tensorwise", "rowwise") if part in row["entry"].split("-")]
    precision = f"FP8 {words[0]}" if words else "bf16"
    attention = kernel_of(row)
    parts = [f"{name} {version}" if version else name, precision]
    parts += ["FP8 head"] * (row.get("head") == "fp8") + [f"attention of {attention}"] * bool(attention)
    parts += [exchange for exchange in ("a2a", "p2p") if row["entry"].endswith(f"-{exchange}")]
    return ", ".join(parts)


def kernel_of(row: Row) -> str:
    """The attention of a row in a word or two; empty for an older row without."""
    named = str(row.get("attention") or "")
    if row["entry"].startswith("octavo-") and not named.startswith("cuDNN"):
        return named.partition(";")[0].partition(",")[0]
    for part, kernel in _KERNELS.items():
        if part in named.lower():
            return kernel
    return named


def _read(path: Path) -> dict[str, Any]:
    document = read_json(path, "a file of python -m benchmarks", GIVE)
    keys = {"suite": str, "date": str, "machine": dict, "rows": list}
    if not isinstance(document, dict) or not all(isinstance(document.get(key), kind) for key, kind in keys.items()):
        raise InputError(f"{path} is not a file of python -m benchmarks: it lacks one of {', '.join(keys)}. Give {GIVE}.")
    if document["suite"] not in SUITES:
        raise InputError(f"{path} is of the suite {document['suite']}. Give {GIVE}.")
    for number, row in enumerate(document["rows"], 1):
        whole = isinstance(row, dict) and isinstance(row.get("workload"), str) and isinstance(row.get("entry"), str)
        if not whole or not (isinstance(row.get("error"), str) or speed(row) > 0):
            raise InputError(f"{path}: row {number} has no workload, entry, and speed or error. Give {GIVE}.")
    return document


def _lines(path: Path, document: Mapping[str, Any]) -> list[Line]:
    found = []
    for workload in dict.fromkeys(row["workload"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["workload"] == workload]
        timed = [row for row in rows if speed(row)]
        octavo = _octavo(document["suite"], timed)
        peers = [row for row in timed if row["entry"].startswith(tuple(LIBRARIES)) and octavo and row["gpus"] == octavo["gpus"]]
        if octavo is None or not peers:
            continue
        heads = [row for row in timed if row["entry"] in HEADS and row["gpus"] == octavo["gpus"]]
        head, best = max(heads, key=speed, default=None), max(peers, key=speed)
        found.append(
            Line(
                path,
                document["machine"],
                octavo,
                head,
                best,
                [row for row in rows if row.get("gpus") in (None, octavo["gpus"])],
            )
        )
    return found


def _octavo(suite: str, rows: Sequence[Row]) -> Row | None:
    """The row of Octavo's defaults; in the suite context with the fastest exchange."""
    if suite == "context":
        return max((row for row in rows if row["entry"].startswith("octavo-delayed")), key=speed, default=None)
    names = (*DEFAULTS, *(IMAGES if any("images_per_second" in row for row in rows) else ()))
    return next((row for name in names for row in rows if row["entry"] == name), None)


def title_of(row: Row) -> str:
    """The workload in words."""
    workload, batch = row["workload"], row["batch"]
    prefix = max((name for name in TITLES if workload.startswith(name)), key=len, default=None)
    title = f"`{workload}`" if prefix is None else TITLES[prefix]
    size = (
        f"{batch} images"
        if "images_per_second" in row
        else f"{batch} \N{MULTIPLICATION SIGN} {row['sequence_length']:,} tokens"
    )
    if row["gpus"] == 1:
        return f"{title}, {size}"
    case = ALL_CASES.get(workload)
    shared = case.context * case.tensor if isinstance(case, Case) else 1
    return f"{row['gpus']} GPUs: {title}, " + (f"{size} of {shared} GPUs together" if shared > 1 else f"{size} of each")


def _figure(line: Line) -> str:
    octavo, peer = line.octavo, line.peer
    unit = "images" if "images_per_second" in octavo else "tokens"
    where = f"one {_gpu(line)}" if octavo["gpus"] == 1 else f"{octavo['gpus']} {_gpu(line)}s"
    memory = f", in {octavo['peak_gib']:.1f} GiB against {peer['peak_gib']:.1f}" if octavo.get("peak_gib") else ""
    fastest = f"{speed(octavo) / speed(peer):.2f} times the fastest peer at its fastest setting ({setting(peer, line.machine)})"
    return f"On {where} it trains {title_of(octavo)}, at **{speed(octavo):,.0f} {unit}/s**: {fastest}{memory}."


def _gpu(line: Line) -> str:
    return str(line.machine.get("gpu") or "CPU").removeprefix("NVIDIA ").split(" ")[0]


def _best(lines: Sequence[Line], folder: Path) -> list[str]:
    """A line for each workload: Octavo by its defaults and the best peer."""
    times = "\N{MULTIPLICATION SIGN}"
    titles = ("tokens or images/s per GPU", "Octavo", "best peer", times, "GiB, Octavo and peer", "the peer's setting")
    text = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for line in lines:
        octavo, peer = line.octavo, line.peer
        memory = [f"{row['peak_gib']:.1f}" if row.get("peak_gib") else "\N{EN DASH}" for row in (octavo, peer)]
        cells = [f"{title_of(octavo)}{_mark(line)} ({_link(line, folder)})", f"**{speed(octavo):,.0f}**", f"{speed(peer):,.0f}"]
        cells += [f"{speed(octavo) / speed(peer):.3f}", f"{memory[0]} and {memory[1]}", setting(peer, line.machine)]
        text.append(f"| {' | '.join(cells)} |")
    return text


def _mark(line: Line) -> str:
    """A dagger for entries that were timed one after the other."""
    return "\N{DAGGER}" if line.octavo.get("interleaved") is False else ""


def _link(line: Line, folder: Path) -> str:
    return f"[JSON]({Path(os.path.relpath(line.path, folder)).as_posix()})"


def _below(lines: Sequence[Line]) -> str:
    """Date, machine and conditions of all lines."""
    day, torch = _read(lines[0].path)["date"][:10], _versions(line.machine.get("torch") for line in lines)
    flash = _versions(line.machine.get("flash-attn-4") for line in lines)
    times = "\N{MULTIPLICATION SIGN}"
    parts = [
        f"{times}: Octavo's speed, with its defaults, over that of the fastest entry of any peer in the same file. GiB: peak "
        "memory."
    ]
    heads = [speed(line.head) / speed(line.peer) for line in lines if line.head is not None]
    if heads:
        shown = " to ".join(sorted({f"{ratio:.2f}" for ratio in (min(heads), max(heads))}))
        parts.append(
            "Octavo's defaults compute the head's gradients in FP8; with all three products of the head in FP8 and fast "
            f"accumulation it is {shown} times as fast as these peers."
        )
    parts.append(
        f"Measured on {day} on {_gpu(lines[0])}s with torch {torch}"
        f"{f' and, for Octavo, flash-attn-4 {flash}' if flash else ''}."
    )
    alone = [line for line in lines if _mark(line)]
    if len(alone) == len(lines):
        parts.append("Entries ran one after the other.")
    elif alone:
        parts.append("Entries were timed in two alternating rounds; in rows with \N{DAGGER} one after the other.")
    else:
        parts.append("Entries were timed in two alternating rounds.")
    if without := [line for line in lines if _lacks_flash(line)]:
        every = "these runs" if len(without) == len(lines) else "; ".join(title_of(line.octavo) for line in without)
        parts.append(f"Not measured in {every}: Transformer Engine with flash-attn-4.")
    refused = [(row, line) for line in lines for row in line.rows if _WRONG in row.get("error", "")]
    parts += [
        f"`{row['entry']}` has no figure for {title_of(line.octavo)}, since its attention was wrong." for row, line in refused
    ]
    return " ".join(parts)


def _versions(found: Iterable[Any]) -> str:
    return " and ".join(sorted({str(version) for version in found if version}))


def _lacks_flash(line: Line) -> bool:
    """True if Octavo's attention is FlashAttention-4's, and Transformer Engine was not tried with it."""
    rows = [row["entry"] for row in line.rows if row["entry"].startswith("te-")]
    ours = "FlashAttention-4" in str(line.octavo.get("attention")) or bool(line.machine.get("flash-attn-4"))
    return ours and bool(rows) and not any("flash-attention" in entry for entry in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
