"""The README's generated parts: its figure of speed, and its table of Octavo and the best peers.

    python -m benchmarks.readme README.md benchmarks/results/one-gpu-llama-1b.json benchmarks/results/one-gpu-vit-huge.json …

rewrites the parts of the page between their markers; a part's first marker stores the command. All results must be of one day
and one kind of GPU. A workload's entry of Octavo is its defaults; the best peer is the fastest entry of any other library in
the same file. Workloads without a peer are left out.
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
"""Names in the markers: the bullet on speed, and the table with its footnote."""
WIDTH = 128
SUITES = ("one-gpu", "sharded", "context", "vision")
GIVE = f"JSON files of python -m benchmarks {', '.join(SUITES)}"
DEFAULTS = ("octavo-default", "octavo-delayed-fast-input-fp8-head-backward")
"""Entries of Octavo's defaults for decoders; the first that the file has."""
IMAGES = ("octavo-delayed-fast-input", "octavo-delayed")
"""The same for vision models."""
WHOLE_HEAD = "octavo-delayed-fast-fp8-head"
"""Octavo with all three products of the head in FP8, and fast accumulation in both gradients."""
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
_TIMES, _DASH, _DAGGER = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}", "\N{DAGGER}"

Row = Mapping[str, Any]


class Comparison(NamedTuple):
    """A workload of one file.

    Attributes:
        machine: GPU and versions, from the file.
        octavo: Octavo with its defaults.
        whole_head: Octavo with the whole head in FP8, if measured.
        peer: the fastest entry of any other library.
        rows: all entries on as many GPUs, failed ones included.
    """

    path: Path
    machine: Mapping[str, Any]
    octavo: Row
    whole_head: Row | None
    peer: Row
    rows: Sequence[Row]


def comparisons(paths: Sequence[Path]) -> list[Comparison]:
    """The workloads with a peer, in the order of the files.

    Raises:
        InputError: a file is not from `python -m benchmarks`, has nothing to compare, or is of another day or kind of GPU than
            the first; two files have the same workload.
    """
    if not paths:
        raise InputError(f"no results: give {GIVE}.")
    compared: list[Comparison] = []
    first: dict[str, tuple[Any, Path]] = {}
    path_of: dict[tuple[str, int], Path] = {}
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
        found = _comparisons(path, document)
        if not found:
            raise InputError(f"{path} has no workload with Octavo's defaults and a peer. Give files that have both.")
        for one in found:
            key = one.octavo["workload"], one.octavo["gpus"]
            if key in path_of:
                raise InputError(f"{path} and {path_of[key]} have both {key[0]} on {key[1]} GPUs: a table has one run of each.")
            path_of[key] = path
        compared += found
    return compared


def generated(part: str, compared: Sequence[Comparison], folder: Path) -> str:
    """The text of a part. folder: that of the page, for relative links."""
    if part == "figure":
        return fill(_figure(compared[0]), WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join([*_table(compared, folder), "", fill(_footnote(compared), WIDTH, break_on_hyphens=False)])


def rewrite(text: str, page: Path, paths: Sequence[Path], root: Path) -> str:
    """The text of a page with its parts regenerated.

    Args:
        page, paths: the page and the results, relative to `root`, as in the command of the markers.

    Raises:
        InputError: see `comparisons`; or the page has no part, or a part without its two markers, each once and in order.
    """
    compared = comparisons([root / path for path in paths])
    command = f"{_COMMAND}{page.as_posix()} {' '.join(path.as_posix() for path in paths)}"
    present = [part for part in PARTS if f"<!-- The {part}: " in text or f"<!-- End of the {part} -->" in text]
    for part in present or PARTS[:1]:
        begin, end = f"<!-- The {part}: ", f"<!-- End of the {part} -->"
        before, begun, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not begun or not ended or begin in rest or end in before + after:
            raise InputError(f"{page} needs the markers '{begin}… -->' and '{end}', each once and in this order.")
        indent = "  " * (part == "figure")  # within the list item, so that the list goes on
        text = f"{before}{begin}{command} -->\n{generated(part, compared, (root / page).parent)}\n{indent}{end}{after}"
    return text


def named(text: str) -> tuple[Path, list[Path]]:
    """The page and the results in the command of the first marker.

    Raises:
        InputError: no marker has a command.
    """
    _, found, rest = text.partition(_COMMAND)
    page, *paths = rest.partition(" -->")[0].split() if found else [""]
    if not paths:
        raise InputError(f"no results: the page's markers name none. Give {GIVE}.")
    return Path(page), list(map(Path, paths))


def main(arguments: list[str]) -> int:
    """Rewrite a page from results, by default those of its markers; returns the exit code.

    Args:
        arguments: the page's path, then those of the results.
    """

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
    """Tokens/s or images/s per GPU; 0 for a failed row."""
    found = row.get("tokens_per_second", row.get("images_per_second", 0.0))
    return float(found) if isinstance(found, int | float) and "error" not in row else 0.0


def rate_of(rows: Iterable[Row]) -> str:
    """The unit of the rows' speeds: `tokens/s`, `images/s` or `tokens or images/s`, `per GPU` if a row has several."""
    timed = [row for row in rows if "error" not in row]
    units = sorted({"images" if "images_per_second" in row else "tokens" for row in timed}, reverse=True)
    return f"{' or '.join(units)}/s{' per GPU' * any(row.get('gpus', 1) > 1 for row in timed)}"


def library_of(row: Row, machine: Mapping[str, Any]) -> str:
    """Name and version of a peer's library."""
    name, package = LIBRARIES[_prefix(row)]
    version = machine.get("torch") if package is None else machine.get("peers", {}).get(package)
    return f"{name} {version}" if version else name


def setting(row: Row, machine: Mapping[str, Any]) -> list[str]:
    """A peer's entry in words: library, precision, head, attention, exchange of context parallelism."""
    recipe = next((part for part in ("delayed", "current", "tensorwise", "rowwise") if part in row["entry"].split("-")), None)
    attention = kernel_of(row)
    parts = [library_of(row, machine), f"FP8 with {recipe} scaling" if recipe else "bf16"]
    parts += [f"{'FP8' if row['head'] == 'fp8' else row['head']} head"] * bool(row.get("head"))
    parts += [f"{attention}'s attention"] * bool(attention)
    return parts + [exchange for exchange in ("a2a", "p2p") if row["entry"].endswith(f"-{exchange}")]


def kernel_of(row: Row) -> str:
    """The attention kernel of a row in a word or two; empty for older rows, which do not name it."""
    attention = str(row.get("attention") or "")
    if row["entry"].startswith("octavo-") and not attention.startswith("cuDNN"):
        return attention.partition(";")[0].partition(",")[0]
    return next((kernel for part, kernel in _KERNELS.items() if part in attention.lower()), attention)


def shape_of(row: Row) -> str:
    """The workload's model in words."""
    workload = row["workload"]
    prefix = max((name for name in TITLES if workload.startswith(name)), key=len, default=None)
    return f"`{workload}`" if prefix is None else TITLES[prefix]


def title_of(row: Row) -> str:
    """The workload in words: GPUs if several, model, batch."""
    title, batch = shape_of(row), row["batch"]
    size = f"{batch} images" if "images_per_second" in row else f"{batch} {_TIMES} {row['sequence_length']:,} tokens"
    if row["gpus"] == 1:
        return f"{title}, {size}"
    case = ALL_CASES.get(row["workload"])
    shared = case.context * case.tensor if isinstance(case, Case) else 1
    return f"{row['gpus']} GPUs: {title}, " + (f"{size} of {shared} GPUs together" if shared > 1 else f"{size} of each")


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


def _comparisons(path: Path, document: Mapping[str, Any]) -> list[Comparison]:
    found = []
    for workload in dict.fromkeys(row["workload"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["workload"] == workload]
        octavo = _octavo(document["suite"], [row for row in rows if speed(row)])
        if octavo is None:
            continue
        rows = [row for row in rows if row.get("gpus") in (None, octavo["gpus"])]
        timed = [row for row in rows if speed(row)]
        peer = max((row for row in timed if row["entry"].startswith(tuple(LIBRARIES))), key=speed, default=None)
        if peer is not None:
            whole_head = next((row for row in timed if row["entry"] == WHOLE_HEAD), None)
            found.append(Comparison(path, document["machine"], octavo, whole_head, peer, rows))
    return found


def _octavo(suite: str, rows: Sequence[Row]) -> Row | None:
    """The row of Octavo's defaults; in the suite context with the fastest exchange."""
    if suite == "context":
        return max((row for row in rows if row["entry"].startswith("octavo-delayed")), key=speed, default=None)
    names = (*DEFAULTS, *(IMAGES if any("images_per_second" in row for row in rows) else ()))
    return next((row for name in names for row in rows if row["entry"] == name), None)


def _prefix(row: Row) -> str:
    """The part of a peer's entry that names its library."""
    return next(prefix for prefix in LIBRARIES if row["entry"].startswith(prefix))


def _gpu(one: Comparison) -> str:
    return str(one.machine.get("gpu") or "CPU").removeprefix("NVIDIA ").split(" ")[0]


def _figure(one: Comparison) -> str:
    """The bullet on speed."""
    octavo, peer = one.octavo, one.peer
    train = f"one {_gpu(one)} trains" if octavo["gpus"] == 1 else f"{octavo['gpus']} {_gpu(one)}s train"
    memory = f", in {octavo['peak_gib']:.1f} GiB instead of {peer['peak_gib']:.1f}" if octavo.get("peak_gib") else ""
    return (
        f"* **Fast**: {train} {shape_of(octavo)} at {speed(octavo):,.0f} {rate_of([octavo])}, "
        f"{speed(octavo) / speed(peer):.2f} times as fast as the fastest peer ({library_of(peer, one.machine)}){memory}."
    )


def _table(compared: Sequence[Comparison], folder: Path) -> list[str]:
    """A line for each workload. A last column has the parts of the peers' settings that differ, if any do."""
    rate, shared = rate_of(one.octavo for one in compared), _shared(compared)
    differing = [[part for part in setting(one.peer, one.machine) if part not in shared] for one in compared]
    titles = ["workload", f"Octavo, {rate}", f"best peer, {rate}", _TIMES, "GiB, Octavo and peer"]
    titles += ["peer's setting"] * any(differing)
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for one, settings in zip(compared, differing, strict=True):
        octavo, peer = one.octavo, one.peer
        link = f"[JSON]({Path(os.path.relpath(one.path, folder)).as_posix()})"
        memory = [f"{row['peak_gib']:.1f}" if row.get("peak_gib") else _DASH for row in (octavo, peer)]
        cells = [f"{title_of(octavo)}{_DAGGER * _one_by_one(one)} ({link})", f"**{speed(octavo):,.0f}**", f"{speed(peer):,.0f}"]
        cells += [f"{speed(octavo) / speed(peer):.3f}", " and ".join(memory)]
        cells += [", ".join(settings) or _DASH] * any(differing)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _shared(compared: Sequence[Comparison]) -> list[str]:
    """The parts of the settings of all peers; none if there is a single one."""
    first, *others = (setting(one.peer, one.machine) for one in compared)
    return [part for part in first if others and all(part in other for other in others)]


def _one_by_one(one: Comparison) -> bool:
    """True if entries were timed one after the other, not in alternating rounds."""
    return one.octavo.get("interleaved") is False


def _footnote(compared: Sequence[Comparison]) -> str:
    """Definitions, date, machine and conditions of all lines of the table."""
    shared = ", ".join(_shared(compared))
    versions = f"torch {_versions(compared, 'torch')}"
    if flash := _versions(compared, "flash-attn-4"):
        versions += f"; Octavo's attention is flash-attn-4 {flash}"
    return " ".join(
        [
            f"{_TIMES}: Octavo's speed divided by the best peer's. GiB: peak memory.",
            f"Best peer: the fastest entry of any other library in the row's file{shared and f'; in all rows: {shared}'}.",
            *_defaults(compared),
            f"Measured on {_read(compared[0].path)['date'][:10]} on {_gpu(compared[0])}s with {versions}.",
            _order(compared),
            *_missing(compared),
        ]
    )


def _defaults(compared: Sequence[Comparison]) -> list[str]:
    """Octavo's defaults, and its speed with the whole head in FP8, where measured."""
    lines = [one for one in compared if one.octavo["entry"] in DEFAULTS]
    ratios = [speed(one.whole_head) / speed(one.peer) for one in lines if one.whole_head is not None]
    text = []
    if lines:
        text.append(
            "Octavo's defaults: delayed scaling; the head's gradients in FP8, its output in bf16; fast accumulation in input "
            "gradients."
        )
    if ratios:
        ratio = " to ".join(sorted({f"{ratio:.2f}" for ratio in (min(ratios), max(ratios))}))
        rows = "" if len(ratios) == len(compared) else f" ({len(ratios)} of {len(compared)} rows)"
        text.append(
            "With the head's output in FP8 and fast accumulation in weight gradients too, Octavo is "
            f"{ratio} times as fast as the best peer{rows}."
        )
    return text


def _order(compared: Sequence[Comparison]) -> str:
    """The order in which entries were timed."""
    marked = sum(map(_one_by_one, compared))
    if marked == len(compared):
        return "Entries were timed one after the other."
    return f"Entries were timed in two alternating rounds{f' ({_DAGGER}: one after the other)' * bool(marked)}."


def _missing(compared: Sequence[Comparison]) -> list[str]:
    """Settings of Transformer Engine that were not measured, and entries whose attention was wrong."""
    text = []
    for what, lacks in (("flash-attn-4", _lacks_flash), ("an FP8 head", _lacks_head)):
        if without := [one for one in compared if lacks(one)]:
            rows = "" if len(without) == len(compared) else f" for {'; '.join(shape_of(one.octavo) for one in without)}"
            text.append(f"Not measured: Transformer Engine with {what}{rows}.")
    wrong = [(row["entry"], one) for one in compared for row in one.rows if _WRONG in row.get("error", "")]
    return text + [f"`{entry}` has no figure for {shape_of(one.octavo)}: its attention was wrong." for entry, one in wrong]


def _versions(compared: Iterable[Comparison], package: str) -> str:
    return " and ".join(sorted({str(one.machine[package]) for one in compared if one.machine.get(package)}))


def _lacks_flash(one: Comparison) -> bool:
    """True if Octavo's attention is FlashAttention-4's, and Transformer Engine was not measured with it."""
    entries = [row["entry"] for row in one.rows if row["entry"].startswith("te-")]
    octavo = "FlashAttention-4" in str(one.octavo.get("attention")) or bool(one.machine.get("flash-attn-4"))
    return octavo and bool(entries) and not any("flash-attention" in entry for entry in entries)


def _lacks_head(one: Comparison) -> bool:
    """True if Octavo's head has products in FP8, and Transformer Engine was not measured with such a head."""
    heads = [row.get("head") for row in one.rows if row["entry"].startswith("te-")]
    return one.octavo.get("head") == "fp8" and bool(heads) and "fp8" not in heads


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
