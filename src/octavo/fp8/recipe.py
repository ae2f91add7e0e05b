"""Recipes: format, granularity and source of the scale, for each operand of a linear layer's three products.

A recipe is a frozen value: `octavo.fp8.quantizer` executes it, and `octavo.fp8.scaling` stores the amax histories. Transformer
Engine's recipe objects are accepted wherever one of these is (`coerce`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal, get_args

from octavo.errors import InputError, check_flags, unknown
from octavo.fp8.formats import FloatFormat, Format
from octavo.kernels.reference import BLOCK

__all__ = [
    "BlockScaling", "CurrentScaling", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format", "Operand",
    "Recipe", "RowwiseScaling", "coerce",
]  # fmt: skip


class Granularity(Enum):
    """Elements that share a scale. A row runs along the dimension that the product sums over."""

    TENSOR = "tensor"
    ROW = "row"
    BLOCK_1X128 = "1x128"
    BLOCK_128X128 = "128x128"

    def layout_bytes(self, rows: int, columns: int) -> list[int]:
        """Bytes of an FP8 matrix [rows, columns] for products that sum over its columns, and of its float32 scales."""
        down, along = math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)
        scales = {"tensor": 1, "row": rows, "1x128": rows * along, "128x128": down * along}
        return [rows * columns, 4 * scales[self.value]]


class Operand(Enum):
    """The three tensors of a linear layer that are cast, by the names that `inspect` and checkpoints use."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


@dataclass(frozen=True)
class Cast:
    """Format and granularity of one operand's cast to FP8."""

    format: FloatFormat
    granularity: Granularity
    delayed: bool = False
    """The scale comes from the amaxes of earlier steps, not from the tensor itself."""
    power_of_two: bool = False
    """One scale a tensor is rounded down to a power of two."""


@dataclass(frozen=True)
class History:
    """Delayed scale from amaxes: length of the history, the amax chosen from it, and powers of two of headroom."""

    length: int
    algo: Literal["max", "most_recent"]
    margin: int


Gradient = Literal["input_gradient", "weight_gradient"]
"""A product of backward."""
FastAccumulation = bool | Literal["input_gradient"]
"""Products of a layer's backward in Hopper's fast mode: both, none, or input gradients."""


@dataclass(frozen=True)
class Recipe:
    """Base of all recipes; `casts` is all that a recipe determines."""

    name: ClassVar[str]
    granularities: ClassVar[tuple[Granularity, Granularity]] = (Granularity.TENSOR, Granularity.TENSOR)
    """Granularity of inputs and output gradients, and of weights."""

    casts: Mapping[Operand, Cast] = field(init=False, repr=False, compare=False)
    """The cast of each operand, the same in both products that read it."""
    precise: Mapping[Gradient, bool] = field(init=False, repr=False, compare=False)
    """Products of backward that add every partial sum in float32 (`octavo.kernels.gemm.scaled_mm`)."""
    native: bool = field(default=True, init=False, repr=False, compare=False)
    """False for a Transformer Engine recipe: heads need an argument to run in FP8, and the first scale is 1."""

    def __post_init__(self) -> None:
        fp8_format = getattr(self, "fp8_format", Format.E4M3)
        fast = getattr(self, "fast_accumulation", False)
        if not isinstance(fp8_format, Format):
            known = ", ".join(f"octavo.recipe.{kind}" for kind in Format)
            raise InputError(f"unknown FP8 format {fp8_format!r}: use one of {known}. Change fp8.format.")
        if not isinstance(fast, bool) and fast != "input_gradient":
            raise unknown("accumulation", str(fast), ("True", "False", "input_gradient"), key="fp8.fast_accumulation")
        power_of_two = getattr(self, "use_power_2_scales", False)
        check_flags(type(self).__name__, reduce_amax=getattr(self, "reduce_amax", False), use_power_2_scales=power_of_two)
        activation, weight = self.granularities
        how = {"delayed": self.history is not None, "power_of_two": power_of_two}
        casts = {
            Operand.INPUT: Cast(fp8_format.forward, activation, **how),
            Operand.WEIGHT: Cast(fp8_format.forward, weight, **how),
            Operand.GRAD_OUTPUT: Cast(fp8_format.backward, activation, **how),
        }
        object.__setattr__(self, "casts", casts)
        products: tuple[Gradient, ...] = get_args(Gradient)
        object.__setattr__(self, "precise", {product: fast not in (True, product) for product in products})

    @functools.cached_property
    def with_octavo_rules(self) -> Recipe:
        """The recipe itself; for Transformer Engine's with Octavo's rules, the equal Octavo recipe."""
        return self if self.native else dataclasses.replace(self)

    @property
    def history(self) -> History | None:
        """The amax history of delayed scaling; None for other recipes."""
        return None


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """One scale a tensor, from the largest |x| of the last `amax_history_len` steps: the cast needs one pass over the tensor.

    Names and defaults are Transformer Engine's, except `fast_accumulation`: Hopper's fast mode in backward too, not only in
    forward, takes 5 to 11% less time for those products. By default input gradients use it and weight gradients are precise.
    True adds weight gradients, of which a sum over 16,384 tokens then loses 0.27% of its norm; False makes both precise. Heads
    are precise in backward in any case. `reduce_amax` reduces amaxes over `fp8_group`, so that all ranks that hold parts of a
    model use the same scales; without it each rank has separate scales.

    Raises:
        InputError: a history shorter than 1, a margin beyond ±64, an unknown algorithm, format or product.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    reduce_amax: bool = True
    fast_accumulation: FastAccumulation = "input_gradient"
    name: ClassVar[str] = "delayed"

    def __post_init__(self) -> None:
        super().__post_init__()
        length, margin = self.amax_history_len, self.margin
        if type(length) is not int or length < 1:
            raise InputError(f"fp8.amax_history_len = {length!r}: a history has at least 1 step; use 1 or more.")
        if type(margin) is not int or not -64 <= margin <= 64:
            raise InputError(f"fp8.margin = {margin!r}: scales are divided by 2^margin; use a whole number from -64 to 64.")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise unknown("amax algorithm", str(self.amax_compute_algo), ("max", "most_recent"), key="fp8.amax_compute_algo")

    @functools.cached_property
    def history(self) -> History:  # noqa: D102
        return History(self.amax_history_len, self.amax_compute_algo, self.margin)


@dataclass(frozen=True)
class CurrentScaling(Recipe):
    """One scale a tensor, from its largest |x|: two passes over the tensor, no state.

    `fast_accumulation` as in `DelayedScaling`. `use_power_2_scales`, Transformer Engine's name, rounds scales down to powers of
    two: unchanged values then quantise identically even when the amax moves.
    """

    fp8_format: Format = Format.HYBRID
    fast_accumulation: FastAccumulation = "input_gradient"
    use_power_2_scales: bool = False
    name: ClassVar[str] = "current"


@dataclass(frozen=True)
class RowwiseScaling(Recipe):
    """One scale for each row of each operand of each product: outliers stay in their row. E4M3 everywhere."""

    name: ClassVar[str] = "rowwise"
    granularities = (Granularity.ROW, Granularity.ROW)


@dataclass(frozen=True)
class BlockScaling(Recipe):
    """Power-of-two scales for 1×128 pieces of inputs and gradients and 128×128 blocks of weights. E4M3 everywhere."""

    name: ClassVar[str] = "block"
    granularities = (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128)


Float8CurrentScaling = CurrentScaling
Float8BlockScaling = BlockScaling

RECIPES: dict[str, type[Recipe]] = {r.name: r for r in (DelayedScaling, CurrentScaling, RowwiseScaling, BlockScaling)}
_BY_CLASS_NAME: dict[str, type[Recipe]] = {r.__name__: r for r in RECIPES.values()} | {
    "Float8CurrentScaling": CurrentScaling,
    "Float8BlockScaling": BlockScaling,
}

_THEIR_USUAL: dict[str, Any] = {"use_f32_scales": False, "backward_override": None}
"""Supported values of Transformer Engine's fields with defaults from the environment."""


def coerce(recipe: Any) -> Recipe:
    """`recipe` itself, or Octavo's equivalent of a Transformer Engine recipe object (matched by class and field names).

    The equivalent has Transformer Engine's precise gradients, and is not `native`.

    Raises:
        InputError: the object is neither, or a format or another field requests something that Octavo does not support.
    """
    if isinstance(recipe, Recipe):
        return recipe
    cls = _BY_CLASS_NAME.get(type(recipe).__name__)
    if isinstance(recipe, str | type):
        kind = type(recipe).__name__
        raise InputError(
            f"FP8 recipe {recipe!r} is a {kind}: give an object, such as octavo.recipe.DelayedScaling() (fp8_recipe)."
        )
    if cls is None:
        raise unknown("FP8 recipe", type(recipe).__name__, _BY_CLASS_NAME, key="fp8_recipe")
    known = {f.name for f in dataclasses.fields(cls) if f.init}
    values = {name: getattr(recipe, name) for name in known if hasattr(recipe, name)}
    if "fast_accumulation" in known:
        values.setdefault("fast_accumulation", False)
    if "fp8_format" in values:
        name = getattr(values["fp8_format"], "name", str(values["fp8_format"]))
        if name not in Format.__members__:
            raise unknown("FP8 format", name, Format.__members__, key="fp8_format")
        values["fp8_format"] = Format[name]
    others = [f for f in dataclasses.fields(recipe) if f.name not in known] if dataclasses.is_dataclass(recipe) else []
    for other in others:
        default = other.default if other.default_factory is dataclasses.MISSING else other.default_factory()
        usual, value = _THEIR_USUAL.get(other.name, default), getattr(recipe, other.name)
        if usual is not dataclasses.MISSING and value != usual:
            raise InputError(
                f"fp8_recipe: {type(recipe).__name__}.{other.name} = {value!r}: Octavo's recipe has no such setting; "
                f"leave it at {usual!r}."
            )
    equal = cls(**values)
    object.__setattr__(equal, "native", False)
    return equal
