"""The FP8 numerics of the design, restated from its sentences in NumPy: no torch, no float8 type, nothing of the library's.

A format is the table of the values of its 256 codes, built from the definition of its bits; rounding is a search in that
table. Slow and short on purpose: what the library computes is compared with this, bit for bit where the design says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

BLOCK = 128
LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True)
class Format:
    """An FP8 format: sign, `exponent_bits`, `mantissa_bits`; `ieee` says whether the top exponent means infinity and NaN."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    ieee: bool

    def value(self, code: int) -> float:
        """The value of one of the 256 codes."""
        bias = 2 ** (self.exponent_bits - 1) - 1
        sign = -1.0 if code >> 7 else 1.0
        exponent = code >> self.mantissa_bits & (1 << self.exponent_bits) - 1
        mantissa = code & (1 << self.mantissa_bits) - 1
        if exponent == (1 << self.exponent_bits) - 1:
            if self.ieee:
                return sign * float("inf") if mantissa == 0 else float("nan")
            if mantissa == (1 << self.mantissa_bits) - 1:
                return float("nan")
        fraction = mantissa / (1 << self.mantissa_bits)
        if exponent == 0:
            return sign * fraction * 2.0 ** (1 - bias)
        return sign * (1 + fraction) * 2.0 ** (exponent - bias)

    @cached_property
    def table(self) -> np.ndarray:
        """float64 [256]: the value of each code."""
        return np.array([self.value(code) for code in range(256)])

    @cached_property
    def magnitudes(self) -> np.ndarray:
        """float64: the finite values of the codes 0, 1, 2 …, ascending."""
        positive = self.table[:128]
        return positive[np.isfinite(positive)]

    @property
    def max(self) -> float:
        """The largest finite value."""
        return float(self.magnitudes[-1])

    def encode(self, values: np.ndarray) -> np.ndarray:
        """uint8 codes of finite or NaN values within ±max, rounded to the nearest, ties to the even code."""
        values = np.asarray(values, dtype=np.float64)
        size = np.where(np.isnan(values), 0.0, np.abs(values))
        above = np.searchsorted(self.magnitudes, size).clip(max=len(self.magnitudes) - 1)
        below = (above - 1).clip(min=0)
        gap_above, gap_below = self.magnitudes[above] - size, size - self.magnitudes[below]
        take_above = (gap_above < gap_below) | ((gap_above == gap_below) & (above % 2 == 0))
        code = np.where(take_above, above, below) + np.where(np.signbit(values), 128, 0)
        return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """float64 values of uint8 codes."""
        return self.table[codes]


E4M3 = Format("E4M3", 4, 3, ieee=False)
E5M2 = Format("E5M2", 5, 2, ieee=True)


def cast(x: np.ndarray, scale: np.ndarray | np.float32, fmt: Format) -> np.ndarray:
    """Codes of float32 `x`: round_to_nearest_even(clamp(x × scale, ±max)), the product in float32; NaN stays NaN."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = np.asarray(x, dtype=np.float32) * np.asarray(scale, dtype=np.float32)
    assert scaled.dtype == np.float32
    return fmt.encode(np.clip(scaled, -fmt.max, fmt.max))


def round_trip(x: np.ndarray, scale: np.ndarray | np.float32, fmt: Format) -> np.ndarray:
    """What the products see: the cast values divided by their scale, in float64."""
    return fmt.decode(cast(x, scale, fmt)) / np.asarray(scale, dtype=np.float64)


def amax(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The largest |x| in float32, NaN ignored, 0 of nothing; dimensions are kept when an axis is given."""
    size = np.abs(np.asarray(x, dtype=np.float32))
    size = np.where(np.isnan(size), np.float32(0), size)
    return np.max(size, axis=axis, keepdims=axis is not None, initial=np.float32(0))


@dataclass
class DelayedState:
    """Scale and history of one tensor under delayed scaling; `begun` once a finite amax above 0 has given it a scale."""

    format: Format
    length: int
    algorithm: str = "max"
    margin: int = 0
    scale: np.float32 = field(default_factory=lambda: np.float32(1))
    history: np.ndarray = field(init=False)
    begun: bool = False

    def __post_init__(self) -> None:
        self.history = np.zeros(self.length, dtype=np.float32)

    def record(self, x: np.ndarray) -> None:
        """Slot 0 collects the largest amax of the uses since the last update."""
        self.history[0] = max(self.history[0], amax(x))

    def update(self) -> None:
        """End of a forward or of a backward."""
        last = self.history[0]
        if last == 0:
            return
        largest = max([last, *self.history[1:]]) if self.algorithm == "max" else last
        self.history = np.concatenate([self.history[1:], [last]]).astype(np.float32)
        self.history[0] = 0
        if np.isfinite(largest) and largest > 0:
            with np.errstate(over="ignore"):
                scale = np.float32(self.format.max * 2.0**-self.margin) / np.float32(largest)
            self.scale = LARGEST if np.isinf(scale) else scale
            self.begun = True

    def of_cast(self, x: np.ndarray) -> np.float32:
        """The scale of the next cast: before the state has begun that of current scaling."""
        return self.scale if self.begun else scale_of(amax(x), self.format)

    def step(self, x: np.ndarray) -> None:
        """One use and its update."""
        self.record(x)
        self.update()


def delayed_states(hybrid: bool, length: int, algorithm: str, margin: int) -> dict[str, DelayedState]:
    """The three operands of a layer: HYBRID takes E5M2 for gradients of outputs, E4M3 takes E4M3 for all."""
    formats = {"input": E4M3, "weight": E4M3, "grad_output": E5M2 if hybrid else E4M3}
    return {name: DelayedState(fmt, length, algorithm, margin) for name, fmt in formats.items()}


def scale_of(largest: np.ndarray, fmt: Format) -> np.ndarray:
    """max / amax in float32; 1 where the amax is 0 or not finite."""
    good = np.isfinite(largest) & (largest > 0)
    return np.where(good, np.float32(fmt.max) / np.where(good, largest, np.float32(1)), np.float32(1)).astype(np.float32)


def tensorwise(x: np.ndarray, fmt: Format, *, powers: bool = False) -> np.ndarray:
    """Current scaling: one scale for the tensor, from its own amax; with `powers` a power of two, rounded down."""
    scale = scale_of(amax(x), fmt)
    return round_trip(x, power_of_two_below(scale) if powers else scale, fmt)


def rowwise(x: np.ndarray, fmt: Format) -> np.ndarray:
    """One scale for each row of an operand [rows, summed]."""
    return round_trip(x, scale_of(amax(x, axis=1), fmt), fmt)


def power_of_two_below(scale: np.ndarray) -> np.ndarray:
    """The largest power of two that is not above the scale."""
    mantissa, exponent = np.frexp(scale)
    assert (mantissa >= 0.5).all()
    return np.ldexp(np.float32(0.5), exponent).astype(np.float32)


def blockwise(x: np.ndarray, fmt: Format, rows: int) -> np.ndarray:
    """One scale, a power of two rounded down, for each block of `rows` × 128 of an operand [rows, summed]."""
    height, width = x.shape
    padded = np.zeros((-(-height // rows) * rows, -(-width // BLOCK) * BLOCK), dtype=np.float32)
    padded[:height, :width] = x
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // BLOCK, BLOCK)
    scales = power_of_two_below(scale_of(np.abs(blocks).max((1, 3), keepdims=True), fmt))
    return round_trip(blocks, scales, fmt).reshape(padded.shape)[:height, :width]


Pair = tuple[np.ndarray, np.ndarray]


@dataclass
class Products:
    """The two operands [rows, summed] of each product, as the product sees them; a product is left · rightᵀ."""

    output: Pair
    input_gradient: Pair
    weight_gradient: Pair


def operands(x: np.ndarray, w: np.ndarray, g: np.ndarray, recipe: str, states: dict[str, DelayedState]) -> Products:
    """x [M, K], w [N, K], g [M, N] → the quantised operands of the three products. `states` is for "delayed" only."""
    if recipe == "delayed":
        named = zip(states.values(), (x, w, g), strict=True)
        x, w, g = (round_trip(tensor, state.of_cast(tensor), state.format) for state, tensor in named)
        return Products((x, w), (g, w.T), (g.T, x.T))
    if recipe in ("current", "powers of two"):
        powers = recipe == "powers of two"
        x, w, g = tensorwise(x, E4M3, powers=powers), tensorwise(w, E4M3, powers=powers), tensorwise(g, E5M2, powers=powers)
        return Products((x, w), (g, w.T), (g.T, x.T))
    if recipe == "rowwise":
        return Products(
            (rowwise(x, E4M3), rowwise(w, E4M3)),
            (rowwise(g, E4M3), rowwise(w.T, E4M3)),
            (rowwise(g.T, E4M3), rowwise(x.T, E4M3)),
        )
    assert recipe == "block"
    weight = blockwise(w, E4M3, BLOCK)
    return Products(
        (blockwise(x, E4M3, 1), weight),
        (blockwise(g, E4M3, 1), weight.T),
        (blockwise(g.T, E4M3, 1), blockwise(x.T, E4M3, 1)),
    )


def normalised(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: float, kind: str) -> np.ndarray:
    """RMSNorm or LayerNorm over the last dimension in float64."""
    x = x.astype(np.float64)
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return x if bias is None else x + bias


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) × up."""
    return gate / (1 + np.exp(-gate)) * up
