"""Sums in the order of a warp group's registers, and the rotation's kernel that reads them."""

import pytest
import torch

from octavo.fp8.formats import E5M2
from octavo.kernels import reference
from octavo.kernels.attention.accumulated import Accumulated
from octavo.kernels.quantize.quantized import Quantizer
from octavo.kernels.rope import join_rotated, launch_join

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")


def accumulated(x, scale):
    """x [B, T, H, D] in the registers of a warp group's products of 64 rows, thread by thread."""
    batch, tokens, heads, dim = x.shape
    rows = -(-tokens // 128) * 128
    sums = torch.full((batch, heads, rows * dim), torch.nan)
    inverse = x.float() / scale
    for block in range(rows // 64):
        for thread in range(128):
            for register in range(dim // 2):
                row = 64 * block + 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
                column = 8 * (register // 4) + 2 * (thread % 4) + register % 2
                if row < tokens:
                    at = block * 64 * dim + register // 4 * 512 + thread * 4 + register % 4
                    sums[:, :, at] = inverse[:, row, :, column]
    return Accumulated(sums, scale, tuple(x.shape))


def draw(batch, tokens, heads, dim):
    return torch.randn(batch, tokens, heads, dim)


@pytest.mark.parametrize(("batch", "tokens", "heads", "dim"), [(2, 70, 3, 16), (1, 128, 1, 64), (1, 1, 2, 8)])
def test_dense(batch, tokens, heads, dim):
    x = draw(batch, tokens, heads, dim)
    assert torch.equal(accumulated(x, 0.25).dense(), x)


@interpreted
@pytest.mark.parametrize(
    ("dim", "rotated", "sums"),
    [(32, 32, "qkv"), (32, 32, "q"), (48, 12, "qkv"), (40, 10, "qkv"), (16, None, "qkv"), (32, 32, "kv")],
)
def test_join(exact_casts, dim, rotated, sums):
    grads = [draw(2, 75, heads, dim).bfloat16().float() for heads in (4, 2, 2)]
    turn = torch.randn(2, 75, 0 if rotated is None else rotated)
    cos, sin = (None, None) if rotated is None else (turn.cos(), turn.sin())
    given = [accumulated(x, 0.125) if name in sums else x for name, x in zip("qkv", grads, strict=True)]
    got, want = torch.zeros(()), torch.zeros(())
    scale = torch.tensor(37.0)
    made = launch_join(*given, cos, sin, Quantizer(E5M2.dtype, E5M2.max, scale, got, True, True))
    plain = join_rotated(*grads, cos, sin, Quantizer(E5M2.dtype, E5M2.max, scale, want, True, True))
    assert torch.equal(got, want)
    assert torch.equal(made.rowwise_data.float(), plain.rowwise_data.float())
    assert torch.equal(made.columnwise_data.float(), plain.columnwise_data.float())


def test_join_on_a_cpu():
    grads = [draw(1, 9, heads, 16) for heads in (2, 1, 1)]
    given = [accumulated(x, 0.5) for x in grads]
    turn = torch.randn(1, 9, 16)
    made = join_rotated(*given, turn.cos(), turn.sin(), Quantizer(torch.float32))
    assert torch.equal(made.rowwise_data, reference.join_rotated(*grads, turn.cos(), turn.sin()).flatten(0, 1))
