"""The two 8-bit floating-point formats, and which operand of a product takes which.

E4M3 has 3 bits of mantissa and reaches 448; E5M2 has 2 and reaches 57344. Gradients of outputs spread over more powers of two
than they need precision, hence HYBRID. Source: Micikevicius et al., "FP8 formats for deep learning" (2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


@dataclass(frozen=True)
class FloatFormat:
    """An 8-bit format: its name, torch dtype, and largest finite value."""

    name: str
    dtype: torch.dtype
    max: float


E4M3 = FloatFormat("E4M3", torch.float8_e4m3fn, 448.0)
E5M2 = FloatFormat("E5M2", torch.float8_e5m2, 57344.0)


class Format(Enum):
    """Pairs of formats of a recipe: `forward` for inputs and weights, `backward` for gradients of outputs."""

    HYBRID = (E4M3, E5M2)  # before the member E4M3, which hides the module's name in this body
    E4M3 = (E4M3, E4M3)

    def __init__(self, forward: FloatFormat, backward: FloatFormat) -> None:
        self.forward, self.backward = forward, backward
