"""`fp8.enabled = "auto"`: chooses the layers that run in FP8 by measurement when a run begins.

For small products FP8 saves less time than its casts cost. Rank 0 times the three products of each shape in FP8, casts
included, and in the dtype of activations, and caches the timings for the user. Not measured: casts fused into a norm or an
activation, and the FP8 weight shared by micro-batches, so a layer near break-even may be excluded at a small loss of speed.
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
from octavo.dtypes import short_name
from octavo.errors import InputError
from octavo.fp8.quantizer import quantize
from octavo.fp8.recipe import Cast, Operand, Recipe
from octavo.fp8.scaling import states_of
from octavo.hardware import supports_fp8
from octavo.kernels import gemm
from octavo.kernels.quantize.cast import cast
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer
from octavo.kernels.timing import median_us
from octavo.parallel.coordination import all_ranks
from octavo.plan.run import RunPlan, recipe_from_config
from octavo.run.folder import RunFolder
from octavo.storage import write_atomic
from octavo.stored_names import stored_name

_ROUNDS, _WARM_UP = 25, 3
_HIDE_CYCLES = 2_000_000
"""GPU cycles of about a millisecond, in which the host launches the timed kernels, so that host time does not count."""


class LinearShape(NamedTuple):
    """Shape of a layer's products: x [tokens, columns] and a weight [rows, columns]."""

    tokens: int
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.tokens} × {self.rows} × {self.columns}"  # noqa: RUF001


class Timing(NamedTuple):
    """Microseconds of a layer's three products in the dtype of activations and in FP8."""

    high_precision: float
    fp8: float


class Setting(NamedTuple):
    """Conditions of a timing besides shape and recipe: name of the GPU, dtypes of activations and of the weight."""

    gpu: str
    dtype: torch.dtype
    weight_dtype: torch.dtype


Timer = Callable[[LinearShape, Recipe], Timing]


def choose_layers(plan: RunPlan, folder: RunFolder, *, resumed: bool) -> RunPlan:
    """The plan with the layers that `fp8.enabled = "auto"` excludes from FP8; all ranks call it.

    A resumed run uses the choice in its folder, since other layers in FP8 would change the loss curve.

    Raises:
        InputError: the choice of a continued run is missing or unreadable.
    """
    if plan.config.fp8.enabled != "auto":
        return plan
    if resumed:
        return _with_saved_choice(plan, all_ranks().on_rank_0(lambda: read_choice(folder.choices)))
    if plan.recipe is None:
        names = [*plan.layers, "head"] if plan.config.fp8.head else plan.layers
        return dataclasses.replace(plan, excluded=dict.fromkeys(names, plan.fp8_note))
    timer = timer_on(plan)
    if timer is None:  # fp8.emulate = true: no timings to compare
        return plan
    excluded = all_ranks().on_rank_0(lambda: slower_layers(plan, timer))
    total = sum(layer.recipe is not None for layer in plan.layers.values())
    note = f"{plan.fp8_note}, where it is faster: in {total - len(excluded)} of {total} layers"
    return dataclasses.replace(plan, excluded=excluded, fp8_note=note)


def record(plan: RunPlan, folder: RunFolder) -> None:
    """Save the choice in the run's folder."""
    if plan.config.fp8.enabled == "auto":
        choice = {"fp8": plan.recipe is not None, "device": plan.hardware.name, "kept_out": dict(plan.excluded)}
        write_atomic(folder.choices, json.dumps(choice, indent=1, ensure_ascii=False) + "\n")


def timer_on(plan: RunPlan) -> Timer | None:
    """The timer of products on the run's device; None without FP8 units."""
    if not supports_fp8(plan.device):
        return None
    return lambda shape, recipe: measure(shape, recipe, plan.device, _setting(plan))


def slower_layers(plan: RunPlan, timer: Timer) -> dict[str, str]:
    """The layers that are not faster in FP8, each with both timings; for tensor parallelism, one rank's products."""
    tokens = plan.micro_batch * plan.config.data.sequence_length
    shapes = {name: layer.shape for name, layer in plan.layers.items()}
    if plan.degrees.tensor > 1:
        weights = ((name, state.weight) for name, state in states_of(plan.part_on_meta))
        shapes |= {name: (weight.shape[0], weight.shape[1]) for name, weight in weights if weight is not None}
    pairs = {
        name: (LinearShape(tokens, *shapes[name]), layer.recipe)
        for name, layer in plan.layers.items()
        if layer.recipe is not None
    }
    timings = cached_timings(pairs.values(), _setting(plan), timer)
    reasons = {name: reason_to_exclude(pair[0], timings[pair], plan.dtype) for name, pair in pairs.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _setting(plan: RunPlan) -> Setting:
    return Setting(plan.hardware.name, plan.dtype, plan.params_dtype)


def _with_saved_choice(plan: RunPlan, choice: Mapping[str, Any]) -> RunPlan:
    note = f"FP8 as chosen when the run began, on {choice['device']}"
    recipe = recipe_from_config(plan.config.fp8) if choice["fp8"] else None
    how = ": none" if recipe is None else "" if supports_fp8(plan.device) else ", emulated here"
    named = {stored_name(name): name for name in plan.layers}  # for runs that an older version began
    kept_out = {named.get(name, name): reason for name, reason in choice["kept_out"].items()}
    return dataclasses.replace(plan, recipe=recipe, excluded=kept_out, fp8_note=note + how)


def read_choice(path: Path) -> dict[str, Any]:
    """The choice that `record` saved: "fp8", "device", and "kept_out", layer → reason; an InputError for a damaged file."""
    try:
        choice = json.loads(path.read_bytes())
        return {"fp8": bool(choice["fp8"]), "device": str(choice["device"]), "kept_out": dict(choice["kept_out"])}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f'{path} lists the layers of this run that compute in FP8 (fp8.enabled = "auto") and cannot be read '
            f"({type(error).__name__}): restore it, or set another train.output."
        ) from None


def cached_timings(
    pairs: Iterable[tuple[LinearShape, Recipe]], setting: Setting, timer: Timer
) -> dict[tuple[LinearShape, Recipe], Timing]:
    """Timings of shapes under recipes, from this machine's cache, else measured by `timer` and cached."""
    timings: dict[tuple[LinearShape, Recipe], Timing] = {}
    for shape, recipe in sorted(set(pairs), key=repr):
        key = _key(recipe, setting)
        path = cache_folder() / f"fp8-auto-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
        known = _read_timings(path, key)
        if shape not in known:
            known[shape] = timer(shape, recipe)
            _write_timings(path, key, known)
        timings[shape, recipe] = known[shape]
    return timings


def reason_to_exclude(shape: LinearShape, timing: Timing, dtype: torch.dtype) -> str:
    """The reason to exclude a layer of this shape from FP8; empty if FP8 is faster."""
    if timing.fp8 < timing.high_precision:
        return ""
    name, slower = short_name(dtype), _microseconds(timing.high_precision)
    return f"{name} is faster here: {slower} against {_microseconds(timing.fp8)} in FP8 at {shape}"


def cache_folder() -> Path:
    """Cache folder of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def measure(shape: LinearShape, recipe: Recipe, device: torch.device, setting: Setting) -> Timing:
    """Time the products of one layer on a GPU, on random numbers: medians, both precisions in turn."""
    make: dict[str, Any] = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    x = torch.randn(shape.tokens, shape.columns, dtype=setting.dtype, **make)
    weight = torch.randn(shape.rows, shape.columns, dtype=setting.weight_dtype, **make)
    dy = torch.randn(shape.tokens, shape.rows, dtype=setting.dtype, **make)
    slot = torch.ones((2,), dtype=torch.float32, device=device)
    kinds = (lambda: high_precision_products(x, weight, dy), lambda: fp8_products(x, weight, dy, recipe, slot))
    with torch.cuda.device(device):
        high, fp8 = median_us(*kinds, device=device, rounds=_ROUNDS, warm_up=_WARM_UP, pause_cycles=_HIDE_CYCLES)
    return Timing(high, fp8)


def high_precision_products(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's output, input gradient and weight gradient in the dtype of `x`.

    A weight of another dtype is converted for each of its two products, as in a layer's forward and backward.
    """
    y = gemm.high_precision_mm(x, weight.to(x.dtype).t(), x.dtype)
    dx = gemm.high_precision_mm(dy, weight.to(x.dtype), x.dtype)
    return y, dx, gemm.high_precision_mm(dy.t(), x, weight.dtype)


def fp8_products(x: Tensor, weight: Tensor, dy: Tensor, recipe: Recipe, slot: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with FP8 products and the casts of the three operands.

    slot: float32 [2], a dummy scale and amax, for recipes with a history.
    """
    x_q = _both_layouts(x, recipe.casts[Operand.INPUT], slot)
    w_q = _both_layouts(weight, recipe.casts[Operand.WEIGHT], slot)
    y = gemm.scaled_mm(*x_q.rowwise, *w_q.rowwise, out_dtype=x.dtype)
    dy_q = _both_layouts(dy, recipe.casts[Operand.GRAD_OUTPUT], slot)
    dx = gemm.scaled_mm(*dy_q.rowwise, *w_q.columnwise, out_dtype=x.dtype, precise=recipe.precise["input_gradient"])
    dw = gemm.scaled_mm(*dy_q.columnwise, *x_q.columnwise, out_dtype=weight.dtype, precise=recipe.precise["weight_gradient"])
    return y, dx, dw


def _both_layouts(x: Tensor, how: Cast, slot: Tensor) -> QuantizedTensor:
    if how.delayed:
        return cast(x, Quantizer(how.format.dtype, how.format.max, slot[0], slot[1], columnwise=True))
    return quantize(x, how)[0]


def _microseconds(value: float) -> str:
    return f"{value:.1f} µs" if value < 100 else f"{value:,.0f} µs"


def _key(recipe: Recipe, setting: Setting) -> dict[str, Any]:
    """Key of a file of timings, without length and margin of histories, which do not affect time."""
    casts = {operand.value: [how.format.name, how.granularity.value, how.delayed] for operand, how in recipe.casts.items()}
    return {
        "gpu": setting.gpu,
        "octavo": __version__,
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "dtype": str(setting.dtype),
        "weight_dtype": str(setting.weight_dtype),
        "casts": casts,
        "precise": [recipe.precise["input_gradient"], recipe.precise["weight_gradient"]],
    }


def _read_timings(path: Path, key: dict[str, Any]) -> dict[LinearShape, Timing]:
    """Timings of earlier starts; none from a damaged file or one with another key."""
    try:
        saved = json.loads(path.read_bytes())
        if saved["key"] != key:
            return {}
        return {LinearShape(*map(int, row[:3])): Timing(*map(float, row[3:])) for row in saved["microseconds"]}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _write_timings(path: Path, key: dict[str, Any], known: dict[LinearShape, Timing]) -> None:
    columns = [*LinearShape._fields, *Timing._fields]
    rows = [[*shape, *timing] for shape, timing in sorted(known.items())]
    with contextlib.suppress(OSError):  # without a writable folder, the next start measures once more
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"key": key, "columns": columns, "microseconds": rows}, indent=1) + "\n")
