"""Transformer Engine's recipe classes, which compare and print as the originals. `octavo.fp8.recipe.coerce` converts them.

Fields are those of version 2.20. MXFP8 and NVFP4 can be constructed, but autocast refuses them: Hopper supports neither. A
wrong value gives one message, with the name that the script uses: Accelerate and others build recipes from their arguments.
Loads no torch: `octavo migrate` constructs these classes too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import InitVar, fields
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from octavo.errors import InputError

_ANY = ConfigDict(arbitrary_types_allowed=True)
MAKERS = {
    "accelerate": "accelerate.utils.TERecipeKwargs",
    "lightning": "TransformerEnginePrecision(recipe=…): DelayedScaling",
    "lightning_fabric": "TransformerEnginePrecision(recipe=…): DelayedScaling",
    "composer": "precision_config: DelayedScaling",
}
"""Package that constructs recipes → the call in which its users set their fields."""


def named(cls: Any) -> Any:
    """Class decorator: a wrong field raises one InputError; `written_in` of an object is the call that its user wrote."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        maker = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        owner = MAKERS.get(maker, type(self).__name__)
        try:
            init(self, *args, **kwargs)
        except ValidationError as error:
            raise InputError(_told(error, owner)) from None
        object.__setattr__(self, "written_in", owner)

    cls.__init__ = checked
    return cls


def _told(error: ValidationError, owner: str) -> str:
    """The first fault, with its field and value."""
    one = error.errors(include_url=False)[0]
    text = str(one["msg"]).removeprefix("Assertion failed, ").removeprefix("Value error, ")
    name = str(one["loc"][0]) if one["loc"] else ""
    if one["type"] in ("unexpected_keyword_argument", "unexpected_positional_argument"):
        return f"{owner}: unknown argument {name!r}."
    return f"{owner}({name}={one['input']!r}): {text}." if name else f"{owner}: {text}"


class _FormatHelper(NamedTuple):
    """Largest finite values in forward and backward."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Formats of the operands of forward and backward."""

    E2M1 = _FormatHelper(max_fwd=6, max_bwd=6)
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)


@dataclass(frozen=True)
class MMParams:
    """Accumulation of a product."""

    use_split_accumulator: bool = True


@dataclass(frozen=True, repr=False)
class QParams:
    """Quantisation of a tensor."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __repr__(self) -> str:
        return "Qparams(\n" + ",\n".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self)) + "\n)"


class Recipe:
    """Base of the recipes."""

    _shown: ClassVar[tuple[str, ...]] = ()
    """Fields in `repr`, in this order; `format` stands for `fp8_format`."""

    def __repr__(self) -> str:
        parts = [f"recipe_type={type(self).__name__}"]
        for name in self._shown:
            value = self._format() if name == "format" else getattr(self, name)
            parts.append(f"{name}={value}")
        return ", ".join(parts)

    def _format(self) -> str:
        return str(getattr(self, "fp8_format", "")).partition(".")[2]

    @classmethod
    def delayed(cls) -> bool:
        """True for delayed scaling."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """True for current scaling."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """True for one scale a tensor."""
        return issubclass(cls, DelayedScaling | Float8CurrentScaling)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """True for scales of blocks."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """True for MXFP8."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        """True for NVFP4."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """False: there are no custom recipes here."""
        return False


def _check(recipe: Any) -> None:
    """Refuse E5M2, also under python -O."""
    if recipe.fp8_format == Format.E5M2:
        raise AssertionError("fp8_format E5M2 is not supported: use HYBRID or E4M3.")


@named
@dataclass(repr=False, config=_ANY)
class DelayedScaling(Recipe):
    """Scales from the amaxes of earlier steps. `interval` and `override_linear_precision` are arguments of early versions."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    interval: InitVar[int] = 1
    override_linear_precision: InitVar[tuple[bool, bool, bool]] = (False, False, False)

    _shown = ("margin", "format", "amax_history_len", "reduce_amax", "fp8_dpa", "fp8_mha", "backward_override")

    def __post_init__(self, interval: int, override_linear_precision: tuple[bool, bool, bool]) -> None:
        _check(self)
        if any(override_linear_precision):
            raise AssertionError(
                f"override_linear_precision={override_linear_precision} belongs to Transformer Engine 1; all products run in "
                "FP8. Leave it out."
            )
        if self.backward_override is not None:
            raise AssertionError(
                f"backward_override={self.backward_override!r}: delayed scaling supports only None. Leave it out."
            )


@named
@dataclass(repr=False)
class Float8CurrentScaling(Recipe):
    """Scales from each tensor's current amax."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    fp8_quant_fwd_inp: ClassVar[QParams] = QParams()
    fp8_quant_fwd_weight: ClassVar[QParams] = QParams()
    fp8_quant_bwd_grad: ClassVar[QParams] = QParams()
    _shown = (
        "format", "fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad", "fp8_gemm_fprop", "fp8_gemm_dgrad",
        "fp8_gemm_wgrad", "fp8_dpa", "fp8_mha", "backward_override",
    )  # fmt: skip

    def __post_init__(self) -> None:
        _check(self)


@named
@dataclass(repr=False)
class Float8BlockScaling(Recipe):
    """A scale for each 1×128 or 128×128 block."""

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    fp8_quant_fwd_inp: ClassVar[QParams] = QParams(power_2_scale=True)
    fp8_quant_fwd_weight: ClassVar[QParams] = QParams(power_2_scale=True)
    fp8_quant_bwd_grad: ClassVar[QParams] = QParams(power_2_scale=True)
    _shown = (
        "format", "fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad", "x_block_scaling_dim",
        "w_block_scaling_dim", "grad_block_scaling_dim", "fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad", "fp8_dpa",
        "fp8_mha", "backward_override",
    )  # fmt: skip

    def __post_init__(self) -> None:
        _check(self)


@named
@dataclass(repr=False)
class MXFP8BlockScaling(Recipe):
    """A recipe for Blackwell: constructed, but refused by an autocast."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    _shown = ("margin", "format", "backward_override")


@named
@dataclass(repr=False)
class NVFP4BlockScaling(Recipe):
    """A recipe for Blackwell: constructed, but refused by an autocast."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    _shown = ("format", "fp8_dpa", "fp8_mha", "backward_override")
