"""Whether FP8 pays for a layer on this machine: its three products timed in FP8, casts included, and in the wide dtype.

An FP8 product takes half the time of a bf16 one where it is large. Its operands must be cast, which is memory traffic that
small products do not win back: below some size bf16 is faster, and where that is depends on the GPU, on the recipe and on the
kernels. So it is measured, once a machine; the table is kept in the user's cache folder. What a layer fuses (a cast into the
norm before it) and what micro-batches share (the FP8 weight) is left out, so a layer near the border may be kept out of FP8
although it would gain a little. Launches are hidden behind a wait on the device: what the host costs is not compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo import __version__
from octavo.fp8.matmul import quantize
from octavo.fp8.recipe import Cast, Operand, Recipe
from octavo.fp8.tensor import Quantized
from octavo.kernels import gemm
from octavo.kernels.cast import cast
from octavo.storage import write_atomic

_ROUNDS, _WARM_UP = 25, 3
_HIDE_CYCLES = 2_000_000
"""About a millisecond, in which the host has launched whatever is timed."""


class Shape(NamedTuple):
    """Products of x [tokens, columns] and a weight [rows, columns]."""

    tokens: int
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.tokens} × {self.rows} × {self.columns}"  # noqa: RUF001


class Timing(NamedTuple):
    """Microseconds of a layer's three products in the wide dtype and in FP8."""

    wide: float
    fp8: float


class Setting(NamedTuple):
    """What timings depend on beside the shape: the GPU by name, the dtypes of activations and of the weight."""

    gpu: str
    dtype: torch.dtype
    weight_dtype: torch.dtype


Timer = Callable[[Shape, Recipe], Timing]


def table(wanted: Iterable[tuple[Shape, Recipe]], setting: Setting, timer: Timer) -> dict[tuple[Shape, Recipe], Timing]:
    """The timings of shapes under recipes: what this machine measured before, and the rest by `timer`, which is kept."""
    found: dict[tuple[Shape, Recipe], Timing] = {}
    pairs = sorted(set(wanted), key=repr)
    for recipe in dict.fromkeys(recipe for _, recipe in pairs):
        shapes = [shape for shape, other in pairs if other == recipe]
        key = _key(recipe, setting)
        path = cache_folder() / f"payoff-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
        known = _read(path, key)
        missing = [shape for shape in shapes if shape not in known]
        known |= {shape: timer(shape, recipe) for shape in missing}
        if missing:
            _write(path, key, known)
        found |= {(shape, recipe): known[shape] for shape in shapes}
    return found


def against(shape: Shape, timing: Timing, dtype: torch.dtype) -> str:
    """Why a layer of this shape stays out of FP8; empty where FP8 is the faster."""
    if timing.fp8 < timing.wide:
        return ""
    name = {torch.bfloat16: "bf16"}.get(dtype, str(dtype).removeprefix("torch."))
    return f"{name} is faster here: {_microseconds(timing.wide)} against {_microseconds(timing.fp8)} in FP8 at {shape}"


def cache_folder() -> Path:
    """Where a user's measurements are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def measure(shape: Shape, recipe: Recipe, device: torch.device, setting: Setting) -> Timing:
    """Time the products of one layer on a GPU, on random numbers; medians, the two kinds in turn."""
    make: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    x = torch.randn(shape.tokens, shape.columns, dtype=setting.dtype, **make)
    weight = torch.randn(shape.rows, shape.columns, dtype=setting.weight_dtype, **make)
    dy = torch.randn(shape.tokens, shape.rows, dtype=setting.dtype, **make)
    place = torch.ones((2,), device=device)
    kinds = (lambda: wide_products(x, weight, dy), lambda: fp8_products(x, weight, dy, recipe, place))
    with torch.cuda.device(device):
        for _ in range(_WARM_UP):
            for run in kinds:
                run()
        events = [[_timed(run) for run in kinds] for _ in range(_ROUNDS)]
        torch.cuda.synchronize()
    wide, fp8 = (statistics.median(1e3 * start.elapsed_time(end) for start, end in one) for one in zip(*events, strict=True))
    return Timing(wide, fp8)


def wide_products(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's output, input gradient and weight gradient in the dtype of `x`, as its backward computes them.

    A weight of another dtype is converted for each of its two products, since backward does not keep the first one's.
    """
    y = gemm.wide_mm(x, weight.to(x.dtype).t(), x.dtype)
    dx = gemm.wide_mm(dy, weight.to(x.dtype), x.dtype)
    return y, dx, gemm.wide_mm(dy.t(), x, weight.dtype)


def fp8_products(x: Tensor, weight: Tensor, dy: Tensor, recipe: Recipe, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with FP8 products, the casts of the three operands included.

    place: float32 [2], a scale and an amax of no layer, for recipes with a history.
    """
    x_row, x_column = _both(x, recipe.casts[Operand.INPUT], place)
    w_row, w_column = _both(weight, recipe.casts[Operand.WEIGHT], place)
    y = gemm.scaled_mm(*x_row, *w_row, out_dtype=x.dtype)
    dy_row, dy_column = _both(dy, recipe.casts[Operand.GRAD_OUTPUT], place)
    dx = gemm.scaled_mm(*dy_row, *w_column, out_dtype=x.dtype, precise=recipe.precise("input_gradient"))
    dw = gemm.scaled_mm(*dy_column, *x_column, out_dtype=weight.dtype, precise=recipe.precise("weight_gradient"))
    return y, dx, dw


def _both(x: Tensor, how: Cast, place: Tensor) -> tuple[Quantized, Quantized]:
    """An operand as it is and transposed."""
    if how.delayed:
        row, column, scale_inv = cast(x, place[0], place[1], how.format.dtype, how.format.max, True)
        return Quantized(row, scale_inv), Quantized(column, scale_inv)
    along, across, _ = quantize(x, how)
    assert along is not None
    assert across is not None
    return along, across


def _timed(run: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HIDE_CYCLES)
    start.record()
    run()
    end.record()
    return start, end


def _microseconds(value: float) -> str:
    return f"{value:.1f} µs" if value < 100 else f"{value:,.0f} µs"


def _key(recipe: Recipe, setting: Setting) -> dict[str, Any]:
    """What a file of timings is good for. A history's length and margin cost no time."""
    casts = {operand.value: (how.format.name, how.granularity.value, how.delayed) for operand, how in recipe.casts.items()}
    versions = {"octavo": __version__, "torch": torch.__version__, "triton": triton.__version__}
    key = {
        "gpu": setting.gpu,
        **versions,
        "dtype": str(setting.dtype),
        "weight_dtype": str(setting.weight_dtype),
        "casts": casts,
        "precise": [recipe.precise("input_gradient"), recipe.precise("weight_gradient")],
    }
    return dict(json.loads(json.dumps(key)))


def _read(path: Path, key: dict[str, Any]) -> dict[Shape, Timing]:
    """What an earlier start has measured; a file that is not of this key, or damaged, is as none."""
    try:
        held = json.loads(path.read_bytes())
        if held["key"] != key:
            return {}
        return {Shape(*map(int, row[:3])): Timing(*map(float, row[3:])) for row in held["microseconds"]}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _write(path: Path, key: dict[str, Any], known: dict[Shape, Timing]) -> None:
    columns = [*Shape._fields, *Timing._fields]
    rows = [[*shape, *timing] for shape, timing in sorted(known.items())]
    with contextlib.suppress(OSError):  # a folder that cannot be written costs the next start its measurement
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"key": key, "columns": columns, "microseconds": rows}, indent=1) + "\n")
