"""The table of published figures, each with the run that measures its workload; loads no torch.

Figures are those of their sources, whose machines, batches and counts of FLOPs are not always Octavo's: a ratio to one is for
orientation, and the peers of a row are measured in the same run. A row has one file of results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cases import ALL_CASES, AnyCase

Result = Mapping[str, Any]

TOKENS, IMAGES, SAMPLES, TFLOPS = "tokens/s of a GPU", "images/s of a GPU", "samples/s", "TFLOP/s of a GPU"
UNITS: dict[str, Callable[[Result], float]] = {
    TOKENS: lambda row: row["tokens_per_second"],
    IMAGES: lambda row: row["images_per_second"],
    SAMPLES: lambda row: row["tokens_per_second"] * row["gpus"] / row["sequence_length"],
    TFLOPS: lambda row: row["tflops"],
}
"""A figure of a row of results, by its unit."""


@dataclass(frozen=True)
class Figure:
    """A figure beside Octavo's fastest entry in a precision.

    Attributes:
        layers: precision of the blocks' linear layers, "bf16" or "fp8".
        unit: of `UNITS`.
        published: in that unit; None without one.
        source: the published figure in words, with its source.
        aim: Octavo's, in words.
        beside: the row whose figure is compared in place of a published one.
    """

    layers: str
    unit: str
    published: float | None
    source: str
    aim: str
    beside: str | None = None


@dataclass(frozen=True)
class Row:
    """A workload on so many GPUs of one host.

    Attributes:
        name: of its file and for `--cases`, where the part before the first hyphen names all rows that begin with it.
        workload: in words.
        suite, case, entries: as `python -m benchmarks` takes them.
        gpus: ranks.
    """

    name: str
    workload: str
    suite: str
    case: str
    entries: tuple[str, ...]
    figures: tuple[Figure, ...]
    gpus: int = 8

    @property
    def file(self) -> str:
        """The name of its results."""
        return f"published-{self.name}.json"

    @property
    def shape(self) -> AnyCase:
        """Its case."""
        return ALL_CASES[self.case]

    def tiny(self) -> Row:
        """The same entries on the case's tiny one, over two ranks at most: for a CPU."""
        return replace(self, name=f"tiny-{self.name}", case=f"tiny-{self.case}", gpus=min(2, self.gpus))

    def is_complete(self, document: Any) -> bool:
        """True for results of this row with each of its entries, of which one of Octavo's has a figure."""
        if (
            not isinstance(document, dict)
            or document.get("published") != self.name
            or not isinstance(document.get("machine"), dict)
        ):
            return False
        rows = document.get("rows")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            return False
        of_this = [row for row in rows if row.get("workload") == self.case and row.get("gpus", self.gpus) == self.gpus]
        return {row.get("entry") for row in of_this} == set(self.entries) and bool(octavo_of(of_this))

    def file_in(self, folder: Path) -> Path:
        """The path of its results."""
        return folder / self.file


def octavo_of(rows: list[dict[str, Any]], layers: str | None = None) -> list[dict[str, Any]]:
    """Rows of Octavo's entries that have a figure, in this precision if one is given; the fastest first."""
    of = [row for row in rows if str(row.get("entry")).startswith("octavo-") and "error" not in row]
    of = [row for row in of if layers in (None, row.get("layers"))]
    return sorted(of, key=lambda row: row["step_ms"])


def machine_of(document: Mapping[str, Any]) -> str:
    """The kind of GPU of results, or of the CPU."""
    machine = document["machine"]
    return str(machine.get("gpu") or machine.get("cpu"))


_DEFAULTS = "octavo-delayed-fast-input-fp8-head-backward"
_SHARDED = (_DEFAULTS, "te-delayed", "te-delayed-flash-attention", "torch-bf16", "ao-tensorwise")
_LONG = ("octavo-delayed", "octavo-delayed-a2a", "te-delayed-a2a", "te-delayed-flash-attention-a2a")
_STATES = (f"{_DEFAULTS}-bf16-states", "octavo-bf16-states")
_SMP = "SageMaker's model parallel library, 8 H100s"
_TITAN = "torchtitan, 8 H100s limited to 500 W"
_ONE_NODE = "8 H100s, Transformer Engine's layers"


def _long(name: str, tokens: str, over: str, figure: int, suite: str, case: str, entries: tuple[str, ...]) -> Row:
    figures = (Figure("fp8", TOKENS, figure, f"{figure:,} ({_TITAN})", f"{2 * figure:,}"),)
    return Row(f"T3-{name}", f"Llama-3.1-8B, {tokens} tokens, {over}", suite, case, entries, figures)


def _one_node(name: str, model: str, case: str, plain: int, fp8: int) -> Row:
    figures = (
        Figure("bf16", TOKENS, plain, f"{plain:,} ({_ONE_NODE}, without FP8)", ""),
        Figure("fp8", TOKENS, fp8, f"{fp8:,} ({_ONE_NODE}, with FP8)", f"{2 * fp8:,}"),
    )
    entries = (_DEFAULTS, "octavo-bf16", "te-delayed", "torch-bf16")
    return Row(f"L-{name}", f"{model}, 4 sequences of 4,096 tokens a GPU", "sharded", case, entries, figures)


def _scaling(name: str, model: str, case: str) -> tuple[Row, ...]:
    rows = []
    for gpus in (1, 2, 4, 8):
        aim = "97% of one GPU's" if gpus == 8 else ""
        figure = Figure("fp8", TOKENS, None, "", aim, None if gpus == 1 else f"N-{name}-1")
        rows.append(Row(f"N-{name}-{gpus}", model, "sharded", case, (_DEFAULTS,), (figure,), gpus))
    return tuple(rows)


_IMAGES = (
    Figure("bf16", IMAGES, 64 / 0.199, "0.199 s a step of 64 images (8 H100s, bf16)", ""),
    Figure("fp8", IMAGES, None, "", "94% of one GPU's", "V-1"),
)
_ONE_OF_IMAGES = (Figure("fp8", IMAGES, None, "", ""),)

ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row(
            "A1",
            "Llama-3-8B, 8,192 tokens, global batch 128, 16 micro-batches a GPU",
            "sharded",
            "llama-8b-8k-16-micro-batches",
            _SHARDED,
            (Figure("fp8", TOKENS, 14_451, "14,451, 744 TFLOP/s (Megatron-Bridge 25.11, 8 H100s)", "16,000"),),
        ),
        Row(
            "S1",
            "Llama-3.1-8B, 16,384 tokens, 8 GPUs share each sequence, batch 4",
            "context",
            "llama-8b-16k-cp8",
            ("octavo-bf16", *_LONG),
            (
                Figure("bf16", SAMPLES, 2.03, f"2.03 ({_SMP})", ""),
                Figure("fp8", SAMPLES, 3.05, f"3.05 ({_SMP})", "6"),
            ),
        ),
        _long(
            "32k", "32,768", "sharded over 8 GPUs", 3_890, "sharded", "llama-8b-32k-recomputed",
            (_DEFAULTS, "te-delayed", "te-delayed-flash-attention", "ao-tensorwise"),
        ),
        _long("64k", "65,536", "2 GPUs share each sequence", 2_540, "context", "llama-8b-64k-cp2", _LONG),
        _long("128k", "131,072", "4 GPUs share each sequence", 1_071, "context", "llama-8b-128k-cp4", _LONG),
        _long("256k", "262,144", "8 GPUs share each sequence", 548, "context", "llama-8b-256k-cp8", _LONG),
        Row(
            "A9",
            "Qwen3-30B-A3B, 4,096 tokens, global batch 512, experts over 8 GPUs",
            "sharded",
            "qwen3-30b-a3b-ep8-16-micro-batches",
            _STATES,
            (
                Figure("bf16", TOKENS, 12_040, "12,040, 277 TFLOP/s (NeMo AutoModel, 8 H100s, bf16)", ""),
                Figure("fp8", TOKENS, 12_040, "the same, in bf16", "15,000"),
            ),
        ),
        Row(
            "M",
            "Mixtral-8x7B, 4,096 tokens, experts over 8 GPUs, states in bf16",
            "sharded",
            "mixtral-8x7b-ep8",
            _STATES,
            (
                Figure("bf16", TFLOPS, 468, "468 (Megatron-LM 0.9, H100s, bf16)", ""),
                Figure("fp8", TFLOPS, None, "none in FP8", "600"),
            ),
        ),
        Row(
            "A4",
            "LoRA on Llama-3-70B, 4,096 tokens, global batch 32, base in FP8, sharded over 8 GPUs",
            "lora",
            "llama-70b-lora-2-micro-batches",
            ("octavo-delayed-fp8-base", "octavo-current-fp8-base"),
            (Figure("fp8", TOKENS, 2_643, "2,643 (Megatron-Bridge 26.06, 8 H100s, tensor 2, pipeline 4)", "2,900"),),
        ),
        *(
            Row(
                f"V-{gpus}", "timm's ViT-Huge, 128 images a GPU, a replica on each", "vision", "vit-huge-patch16",
                ("octavo-delayed", "octavo-bf16", "torch-bf16", "te-delayed"), _IMAGES if gpus > 1 else _ONE_OF_IMAGES, gpus,
            )
            for gpus in (1, 8)
        ),
        _one_node("1b", "Llama-3.2-1B's shape", "llama-1b", 40_200, 40_800),
        _one_node("7b", "Llama-2-7B's shape", "llama2-7b", 9_350, 11_000),
        *_scaling("1b", "Llama-3.2-1B's shape, 4 sequences of 4,096 tokens a GPU", "llama-1b"),
        *_scaling("8b", "eight layers of Llama-3.1-8B, 2 sequences of 8,192 tokens a GPU", "llama-8b-8layers"),
    )
}  # fmt: skip
