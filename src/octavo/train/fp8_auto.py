"""`fp8.enabled = "auto"`: the layers of a run that compute in FP8, decided when it begins and kept with it.

An FP8 product takes half the time of a bf16 one where it is large. The casts of its operands are memory traffic that small
products do not win back: below some size bf16 is faster, and that size depends on the GPU, the recipe and the kernels. So the
three products of each distinct shape are timed in FP8, casts included, and in the dtype of the activations. The first rank
measures for all, once a machine: the table is kept in the user's cache folder. Layers that are no faster in FP8 stay out of
it. Where FP8 would be emulated, no layer is in FP8. A run that continues takes the choice from its folder: with other layers
in FP8 its curve would be made of two.

Left out of the timing: casts that a norm or an activation makes, and the FP8 weight that micro-batches share, so a layer near
the border may stay out of FP8 although it would gain a little. Launches are hidden behind a wait on the device: the host's
time is not compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo._version import __version__
from octavo.errors import InputError
from octavo.fp8.matmul import quantize
from octavo.fp8.recipe import Cast, Operand, Recipe
from octavo.fp8.tensor import Quantized
from octavo.hardware import supports_fp8
from octavo.kernels import gemm
from octavo.kernels.cast import cast
from octavo.kernels.timing import median_us
from octavo.parallel.coordination import all_ranks
from octavo.run.folder import RunFolder
from octavo.storage import write_atomic
from octavo.train.plan import RunPlan, recipe_from_config

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


def choose_layers(plan: RunPlan, folder: RunFolder, *, resumed: bool) -> RunPlan:
    """The plan with the layers that `fp8.enabled = "auto"` keeps out of FP8; all ranks call it.

    resumed: the run has checkpoints, so that its own choice holds.

    Raises:
        InputError: the choice of a run that continues is missing or not readable.
    """
    if plan.config.fp8.enabled != "auto":
        return plan
    if resumed:
        return _as_begun(plan, all_ranks().on_rank_0(lambda: _read_choice(folder.choices)))
    if plan.recipe is None:
        names = [*plan.layers, "head"] if plan.config.fp8.head else plan.layers
        return dataclasses.replace(plan, excluded=dict.fromkeys(names, plan.fp8_note))
    timer = timer_on(plan)
    if timer is None:  # emulated because fp8.emulate asks for it
        return plan
    excluded = all_ranks().on_rank_0(lambda: slower_layers(plan, timer))
    taken = sum(layer.recipe is not None for layer in plan.layers.values())
    note = f"{plan.fp8_note}, where it is faster: in {taken - len(excluded)} of {taken} layers"
    return dataclasses.replace(plan, excluded=excluded, fp8_note=note)


def record(plan: RunPlan, folder: RunFolder) -> None:
    """Write the choice down, for when the run continues."""
    if plan.config.fp8.enabled == "auto":
        choice = {"fp8": plan.recipe is not None, "device": plan.hardware.name, "kept_out": dict(plan.excluded)}
        write_atomic(folder.choices, json.dumps(choice, indent=1, ensure_ascii=False) + "\n")


def timer_on(plan: RunPlan) -> Timer | None:
    """What times products on the device of a run; None where that has no FP8 units."""
    if not supports_fp8(plan.device):
        return None
    return lambda shape, recipe: measure(shape, recipe, plan.device, _setting(plan))


def slower_layers(plan: RunPlan, timer: Timer) -> dict[str, str]:
    """The layers for which FP8 does not pay, each with both timings."""
    tokens = plan.micro_batch * plan.config.data.sequence_length
    wanted = {
        name: (Shape(tokens, *layer.shape), layer.recipe) for name, layer in plan.layers.items() if layer.recipe is not None
    }
    timings = table(wanted.values(), _setting(plan), timer)
    reasons = {name: reason_to_exclude(pair[0], timings[pair], plan.dtype) for name, pair in wanted.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _setting(plan: RunPlan) -> Setting:
    return Setting(plan.hardware.name, plan.dtype, plan.params_dtype)


def _as_begun(plan: RunPlan, choice: Mapping[str, Any]) -> RunPlan:
    note = f"FP8 as it was chosen when the run began, on {choice['device']}"
    recipe = recipe_from_config(plan.config.fp8) if choice["fp8"] else None
    how = ": none" if recipe is None else "" if supports_fp8(plan.device) else ", emulated here"
    return dataclasses.replace(plan, recipe=recipe, excluded=choice["kept_out"], fp8_note=note + how)


def _read_choice(path: Path) -> dict[str, Any]:
    try:
        choice = json.loads(path.read_bytes())
        return {"fp8": bool(choice["fp8"]), "device": str(choice["device"]), "kept_out": dict(choice["kept_out"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f'{path} says which layers of this run compute in FP8 (fp8.enabled = "auto") and cannot be read '
            f"({type(error).__name__}): put it back, or set another train.output."
        ) from None


def table(wanted: Iterable[tuple[Shape, Recipe]], setting: Setting, timer: Timer) -> dict[tuple[Shape, Recipe], Timing]:
    """The timings of shapes under recipes: what this machine measured before, and the rest by `timer`, which is kept."""
    found: dict[tuple[Shape, Recipe], Timing] = {}
    pairs = sorted(set(wanted), key=repr)
    for recipe in dict.fromkeys(recipe for _, recipe in pairs):
        shapes = [shape for shape, other in pairs if other == recipe]
        key = _key(recipe, setting)
        path = cache_folder() / f"fp8-auto-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
        known = _read_timings(path, key)
        missing = [shape for shape in shapes if shape not in known]
        known |= {shape: timer(shape, recipe) for shape in missing}
        if missing:
            _write_timings(path, key, known)
        found |= {(shape, recipe): known[shape] for shape in shapes}
    return found


def reason_to_exclude(shape: Shape, timing: Timing, dtype: torch.dtype) -> str:
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
    kinds = (lambda: high_precision_products(x, weight, dy), lambda: fp8_products(x, weight, dy, recipe, place))
    with torch.cuda.device(device):
        wide, fp8 = median_us(*kinds, device=device, rounds=_ROUNDS, warm_up=_WARM_UP, pause_cycles=_HIDE_CYCLES)
    return Timing(wide, fp8)


def high_precision_products(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


def _read_timings(path: Path, key: dict[str, Any]) -> dict[Shape, Timing]:
    """What an earlier start has measured; a file that is not of this key, or damaged, is as none."""
    try:
        held = json.loads(path.read_bytes())
        if held["key"] != key:
            return {}
        return {Shape(*map(int, row[:3])): Timing(*map(float, row[3:])) for row in held["microseconds"]}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _write_timings(path: Path, key: dict[str, Any], known: dict[Shape, Timing]) -> None:
    columns = [*Shape._fields, *Timing._fields]
    rows = [[*shape, *timing] for shape, timing in sorted(known.items())]
    with contextlib.suppress(OSError):  # a folder that cannot be written costs the next start its measurement
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"key": key, "columns": columns, "microseconds": rows}, indent=1) + "\n")
