"""Rotation around attention in Triton's interpreter, against the reference and against what layers do without it."""

import pytest
import torch

from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels import reference
from octavo.kernels.quantize.quantized import Quantizer, quantize
from octavo.kernels.rope import Tiles, join_rotated, launch_join, launch_split, split_rotate
from octavo.nn.attention import split_qkv

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")

SHAPES = [  # batch, tokens, heads, groups, head dimension, rotated
    (1, 5, 4, 2, 16, 16),
    (2, 33, 2, 2, 80, 80),
    (2, 7, 6, 2, 40, 20),
    (1, 9, 5, 1, 64, 16),
    (3, 1, 1, 1, 2, 2),
    (2, 6, 3, 3, 12, None),
]


def angles(batch, tokens, rotated):
    """Random angles, a position's own in each half; and none."""
    if rotated is None:
        return None, None
    turn = torch.randn(batch, tokens, rotated // 2) * 3
    turn = torch.cat((turn, turn), -1)
    return turn.cos() * 1.25, turn.sin() * 1.25


def gradients(batch, tokens, heads, groups, dim, dtype=torch.float32):
    """As attention hands them back: [B, heads, T, D] transposed."""
    return [torch.randn(batch, count, tokens, dim).to(dtype).transpose(1, 2) for count in (heads, groups, groups)]


@pytest.mark.parametrize(("batch", "tokens", "heads", "groups", "dim", "rotated"), SHAPES)
def test_reference_is_what_the_layers_do(batch, tokens, heads, groups, dim, rotated):
    qkv = torch.randn(batch, tokens, (heads + 2 * groups) * dim, requires_grad=True)
    cos, sin = angles(batch, tokens, rotated)
    parts = [x.unflatten(0, (-1, dim)).permute(2, 3, 0, 1) for x in split_qkv(qkv.movedim(-1, 0), heads, groups)]
    want = list(parts)
    if rotated is not None:
        for index in (0, 1):
            turned = reference.rope(parts[index][..., :rotated], cos, sin)
            want[index] = torch.cat((turned, parts[index][..., rotated:]), -1)
    got = split_rotate(qkv, heads, groups, cos, sin)
    for one, other in zip(got, want, strict=True):
        assert one.is_contiguous()
        assert torch.equal(one, other)
    grads = gradients(batch, tokens, heads, groups, dim)
    (expected,) = torch.autograd.grad(want, qkv, grads)
    made = join_rotated(*grads, cos, sin, Quantizer(torch.float32))
    torch.testing.assert_close(made.rowwise_data, expected.flatten(0, 1))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "tokens", "heads", "groups", "dim", "rotated"), SHAPES)
def test_split_equals_reference(exact_casts, dtype, batch, tokens, heads, groups, dim, rotated):
    qkv = torch.randn(batch, tokens, (heads + 2 * groups) * dim).to(dtype)
    cos, sin = angles(batch, tokens, rotated)
    want = reference.split_rotate(qkv, heads, groups, cos, sin)
    for mirrored in (False, True):
        got = launch_split(qkv, heads, groups, cos, sin, mirrored=mirrored, tiles=Tiles(16, 2, 4))
        for one, other in zip(got, want, strict=True):
            assert one.is_contiguous()
            assert one.dtype == dtype
            assert torch.equal(one, other)


@interpreted
def test_angles_of_all_sequences_and_strided_input(exact_casts):
    wide = torch.randn(2, 5, 3 * 16 + 5)
    cos, sin = torch.randn(1, 5, 16), torch.randn(1, 5, 16)  # no rotation at all: its halves differ
    want = reference.split_rotate(wide[..., :48], 1, 1, cos, sin)
    for tables in ((cos, sin), (cos.expand(2, -1, -1), sin.expand(2, -1, -1)), (cos.mT.contiguous().mT, sin)):
        for one, other in zip(launch_split(wide[..., :48], 1, 1, *tables), want, strict=True):
            assert torch.equal(one, other)
        for one, other in zip(launch_split(wide.mT.contiguous().mT[..., :48], 1, 1, *tables), want, strict=True):
            assert torch.equal(one, other)
    grads = gradients(2, 5, 1, 1, 16)
    want = reference.join_rotated(*grads, cos, sin).flatten(0, 1)
    assert torch.equal(launch_join(*grads, cos, sin, Quantizer(torch.float32)).rowwise_data, want)
    grads[1] = grads[1].mT.contiguous().mT
    assert torch.equal(launch_join(*grads, cos, sin, Quantizer(torch.float32)).rowwise_data, want)


@interpreted
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize(("batch", "tokens", "heads", "groups", "dim", "rotated"), SHAPES)
def test_join_casts_exactly(exact_casts, fmt, batch, tokens, heads, groups, dim, rotated):
    grads = gradients(batch, tokens, heads, groups, dim, torch.bfloat16)
    grads[2][0, 0, 0, 0] = torch.nan
    grads[2][0, 0, 0, 1] = -torch.inf
    cos, sin = angles(batch, tokens, rotated)
    scale = torch.tensor(37.0)
    for row, column in ((True, True), (True, False), (False, True), (False, False)):
        got_amax, want_amax = torch.tensor(0.5), torch.tensor(0.5)
        quantizer = Quantizer(fmt.dtype, fmt.max, scale, got_amax, row, column)
        got = launch_join(*grads, cos, sin, quantizer, mirrored=column, tiles=Tiles(32, 2, 4))
        want = quantize(reference.join_rotated(*grads, cos, sin).flatten(0, 1), quantizer._replace(amax=want_amax))
        assert torch.equal(got_amax, want_amax)
        for one, other in zip(got, want, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert torch.equal(one.float().nan_to_num(nan=1e6), other.float().nan_to_num(nan=1e6))


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_join_in_wide_dtypes(exact_casts, dtype):
    grads = gradients(2, 9, 4, 2, 40, dtype)
    cos, sin = angles(1, 9, 24)
    amax = torch.zeros(())
    quantizer = Quantizer(dtype, amax=amax, columnwise=True)
    got = launch_join(*grads, cos, sin, quantizer)
    want = reference.join_rotated(*grads, cos, sin).flatten(0, 1)
    assert torch.equal(got.rowwise_data, want.to(dtype))
    assert torch.equal(got.columnwise_data, want.to(dtype).t())
    assert got.scale_inv is None
    assert torch.equal(amax, want.abs().max())


@interpreted
def test_no_rows(exact_casts):
    cos, sin = angles(1, 0, 8)
    for part in launch_split(torch.randn(1, 0, 32), 2, 1, cos, sin):
        assert part.shape[:2] == (1, 0)
    quantizer = Quantizer(E4M3.dtype, E4M3.max, torch.tensor(4.0), None, True, True)
    made = launch_join(*gradients(1, 0, 2, 1, 8), cos, sin, quantizer)
    assert made.rowwise_data.shape == (0, 32)
    assert made.columnwise_data.shape == (32, 0)
    assert made.scale_inv == 0.25
