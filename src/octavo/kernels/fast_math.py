"""Reciprocal and power of two as single instructions of the GPU, for kernels that the arithmetic holds back.

What Triton writes for a division and an exponential keeps subnormal numbers, at four instructions more each. Here they become
zero: a sigmoid below 1e-38 is one. Errors: 1 and 2 units of float32's last place. The interpreter has no instructions of a GPU
and computes the same in its own way.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

if triton.knobs.runtime.interpret:

    @triton.jit
    def reciprocal(x):
        """1 / x, float32."""
        return 1.0 / x

    @triton.jit
    def exp2(x):
        """2 to the x, float32."""
        return tl.exp2(x)

else:

    @triton.jit
    def reciprocal(x):
        """1 / x, float32."""
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def exp2(x):
        """2 to the x, float32."""
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def exp(x):
    """e to the x, float32."""
    return exp2(x * LOG2_E)
