"""Rotation around attention on a GPU, against the reference on the CPU."""

import pytest
import torch

from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels import reference
from octavo.kernels.quantize.quantized import Quantizer, quantize
from octavo.kernels.rope import Tiles, join_rotated, launch_join, launch_split, split_rotate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = [  # batch, tokens, heads, groups, head dimension, rotated
    (2, 1024, 32, 8, 128, 128),
    (1, 777, 16, 16, 64, 64),
    (3, 257, 16, 16, 80, 80),
    (2, 300, 12, 4, 96, 24),
    (2, 129, 5, 1, 80, 20),
    (2, 65, 6, 2, 128, None),
]


def angles(batch, tokens, rotated):
    if rotated is None:
        return None, None
    turn = torch.randn(batch, tokens, rotated // 2) * 3
    turn = torch.cat((turn, turn), -1)
    return turn.cos(), turn.sin()


def cuda(*tensors):
    return [None if x is None else x.cuda() for x in tensors]


def assert_within_a_step(got, want):
    """A fused multiplication and addition rounds once where the CPU rounds twice: at most one step of the format apart."""
    got, want = got.cpu().float(), want.float()
    same = got == want
    assert same.float().mean() > 0.99
    step = 0.25 if want.abs().max() > 448 else 0.13
    # Where a difference of two products is nearly 0, their roundings are all of it.
    torch.testing.assert_close(got, want, rtol=step, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "tokens", "heads", "groups", "dim", "rotated"), SHAPES)
def test_split(mirrored, dtype, batch, tokens, heads, groups, dim, rotated):
    qkv = torch.randn(batch, tokens, (heads + 2 * groups) * dim).to(dtype)
    cos, sin = angles(batch, tokens, rotated)
    want = reference.split_rotate(qkv, heads, groups, cos, sin)
    got = split_rotate(qkv.cuda(), heads, groups, *cuda(cos, sin), mirrored=mirrored)
    for one, other in zip(got, want, strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-5)
    assert torch.equal(got[2].cpu(), want[2])


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(("batch", "tokens", "heads", "groups", "dim", "rotated"), SHAPES)
def test_join(fmt, mirrored, batch, tokens, heads, groups, dim, rotated):
    grads = [torch.randn(batch, n, tokens, dim).bfloat16().transpose(1, 2) for n in (heads, groups, groups)]
    cos, sin = angles(batch, tokens, rotated)
    scale = torch.tensor(fmt.max / 4)
    want_amax, amax = torch.zeros(()), torch.zeros((), device="cuda")
    quantizer = Quantizer(fmt.dtype, fmt.max, scale, want_amax, True, True)
    want = quantize(reference.join_rotated(*grads, cos, sin).flatten(0, 1), quantizer)
    for row, column in ((True, True), (True, False), (False, True), (False, False)):
        asked = Quantizer(fmt.dtype, fmt.max, scale.cuda(), amax.zero_(), row, column)
        made = join_rotated(*cuda(*grads, cos, sin), asked, mirrored=mirrored)
        torch.testing.assert_close(amax.cpu(), want_amax, rtol=1e-6, atol=0)
        if row:
            assert_within_a_step(made.rowwise_data, want.rowwise_data)
        if column:
            assert_within_a_step(made.columnwise_data, want.columnwise_data)
            assert made.scale_inv.cpu() == want.scale_inv
        if row and column:
            assert torch.equal(made.rowwise_data.view(torch.uint8), made.columnwise_data.view(torch.uint8).t())


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("tile", [(32, 2, 4), (64, 4, 4), (64, 4, 8), (128, 1, 8)], ids=str)
def test_both_layouts_agree_to_the_bit_for_any_tile(fmt, tile):
    """Values that need no rounding before the cast: nothing may be lost between the two stores."""
    grads = [torch.randn(1, n, 1000, 128, device="cuda").transpose(1, 2) for n in (8, 2, 2)]
    quantizer = Quantizer(fmt.dtype, fmt.max, torch.tensor(16.0, device="cuda"), None, True, True)
    want = quantize(reference.join_rotated(*grads, None, None).flatten(0, 1), quantizer)
    got = launch_join(*grads, None, None, quantizer, tiles=Tiles(*tile))
    assert torch.equal(got.rowwise_data.view(torch.uint8), want.rowwise_data.view(torch.uint8))
    assert torch.equal(got.columnwise_data.view(torch.uint8), want.columnwise_data.view(torch.uint8))


def test_join_in_bfloat16():
    grads = [torch.randn(2, n, 333, 64).bfloat16().transpose(1, 2) for n in (8, 2, 2)]
    cos, sin = angles(1, 333, 64)
    made = join_rotated(*cuda(*grads, cos, sin), Quantizer(torch.bfloat16, columnwise=True))
    want = reference.join_rotated(*grads, cos, sin).flatten(0, 1)
    torch.testing.assert_close(made.rowwise_data.cpu().float(), want, rtol=8e-3, atol=1e-5)
    assert torch.equal(made.rowwise_data, made.columnwise_data.t())


def test_split_by_other_tiles():
    qkv = torch.randn(2, 500, 12 * 64, device="cuda", dtype=torch.bfloat16)
    cos, sin = cuda(*angles(1, 500, 64))
    want = launch_split(qkv, 8, 2, cos, sin)
    for tiles in (Tiles(8, 1, 2), Tiles(32, 12, 4), Tiles(64, 3, 8)):
        got = launch_split(qkv, 8, 2, cos, sin, tiles=tiles)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
