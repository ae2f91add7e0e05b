"""Reciprocal and power of two as single instructions of the GPU, for kernels bound by arithmetic.

Triton's division and exponential preserve subnormal numbers, with four more instructions each; here they become zero. Errors: 1
and 2 units of float32's last place. The interpreter, without a GPU's instructions, uses Triton's.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _instruction(NAME: tl.constexpr, x):
    return tl.inline_asm_elementwise(NAME + " $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x):
    """1 / x, float32."""
    return 1.0 / x if INTERPRETED else _instruction("rcp.approx.ftz.f32", x)


@triton.jit
def exp2(x):
    """2 to the x, float32."""
    return tl.exp2(x) if INTERPRETED else _instruction("ex2.approx.ftz.f32", x)


@triton.jit
def exp(x):
    """e to the x, float32."""
    return exp2(x * LOG2_E)
