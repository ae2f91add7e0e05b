"""Attention of short sequences, compiled, at the sizes of vision transformers: against PyTorch's in float64."""

import pytest
import torch
from torch.nn import functional

from octavo.kernels.attention.short import Tiles, launch, launch_backward
from octavo.nn.attention import short_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = [  # batch, tokens, heads, groups, head dimension
    (8, 257, 16, 16, 80),  # ViT-Huge
    (8, 197, 12, 12, 64),  # ViT-Base
    (4, 258, 3, 3, 72),
    (2, 512, 4, 4, 128),
    (3, 300, 8, 2, 96),
    (2, 50, 12, 12, 64),
    (5, 129, 2, 2, 112),
    (2, 65, 6, 3, 40),
    (3, 17, 2, 2, 32),
    (2, 5, 2, 2, 16),
    (1, 1, 1, 1, 8),
]
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def exact(qkv, heads, groups, scale, d_out):
    """Result, lse and gradient in float64."""
    qkv = qkv.double().requires_grad_()
    per_group = heads // groups
    q, k, v = qkv.unflatten(-1, (groups, per_group + 2, -1)).split([per_group, 1, 1], -2)
    q, k, v = (x.flatten(2, 3).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(per_group, 1) for x in (k, v))
    out = functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)
    out.backward(d_out.double())
    return out.detach(), (q @ k.mT * scale).logsumexp(-1).detach(), qkv.grad


def case(batch, tokens, heads, groups, dim, dtype=torch.bfloat16):
    qkv = torch.randn(batch, tokens, (heads + 2 * groups) * dim, device="cuda").to(dtype)
    return qkv, torch.randn(batch, tokens, heads * dim, device="cuda").to(dtype), dim**-0.5


def off(got, want):
    """Relative error, by norms; where the exact result is nothing, the absolute one."""
    return ((got.double() - want).norm() / want.norm().clamp(min=1.0)).item()


def assert_close(d_qkv, want, heads, groups, tolerance):
    """Gradients of queries, keys and values each, and of no token alone much further off."""
    per_group = heads // groups
    got, want = (x.unflatten(-1, (groups, per_group + 2, -1)).split([per_group, 1, 1], -2) for x in (d_qkv, want))
    for one, other in zip(got, want, strict=True):
        assert off(one, other) < tolerance
        worst = (one.double() - other).flatten(2).norm(dim=-1) / other.flatten(2).norm(dim=-1).clamp(min=1e-1)
        assert worst.max() < 4 * tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "tokens", "heads", "groups", "dim"), SHAPES)
def test_kernels(dtype, batch, tokens, heads, groups, dim):
    qkv, d_out, scale = case(batch, tokens, heads, groups, dim, dtype)
    want, want_lse, want_d_qkv = exact(qkv, heads, groups, scale, d_out)
    out, lse = launch(qkv, heads, groups, scale)
    assert off(out, want) < ROUNDING[dtype]
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-3)
    d_qkv = launch_backward(d_out, qkv, out, lse, heads, groups, scale)
    assert_close(d_qkv, want_d_qkv, heads, groups, ROUNDING[dtype])
    assert torch.equal(d_qkv, launch_backward(d_out, qkv, out, lse, heads, groups, scale))


@pytest.mark.parametrize(
    "tiles", [Tiles(64, 64, 4), Tiles(64, 32, 4, 3), Tiles(128, 128, 8, 1), Tiles(32, 32, 4, beside_few=64, lone=True)], ids=str
)
def test_other_tiles(tiles):
    qkv, d_out, scale = case(3, 257, 4, 4, 80)
    want, _, want_d_qkv = exact(qkv, 4, 4, scale, d_out)
    out, lse = launch(qkv, 4, 4, scale, tiles=tiles)
    assert off(out, want) < ROUNDING[torch.bfloat16]
    d_qkv = launch_backward(d_out, qkv, out, lse, 4, 4, scale, queries=tiles, keys=tiles)
    assert_close(d_qkv, want_d_qkv, 4, 4, ROUNDING[torch.bfloat16])


@pytest.mark.parametrize("tokens", [257, 200])
def test_large_logits(tokens):
    qkv, d_out, scale = case(2, tokens, 4, 4, 80, torch.float16)
    want, _, want_d_qkv = exact(qkv, 4, 4, scale * 30, d_out)
    qkv.requires_grad_()
    out = short_attention(qkv, 4, 4, scale * 30)
    out.backward(d_out)
    assert off(out.detach(), want) < 1e-2
    assert off(qkv.grad, want_d_qkv) < 2e-2


def test_rows_of_a_wider_matrix():
    qkv, d_out, scale = case(4, 257, 4, 4, 80)
    wide = torch.full((4, 260, 1040), torch.nan, device="cuda", dtype=qkv.dtype)
    view = wide[:, 1:258, 40:1000].copy_(qkv)
    out, lse = launch(qkv, 4, 4, scale)
    assert torch.equal(launch(view, 4, 4, scale)[0], out)
    assert torch.equal(launch_backward(d_out, view, out, lse, 4, 4, scale), launch_backward(d_out, qkv, out, lse, 4, 4, scale))


@pytest.mark.parametrize("groups", [4, 2])
def test_function(groups):
    qkv, d_out, scale = case(4, 145, 4, groups, 80)
    want, _, want_d_qkv = exact(qkv, 4, groups, scale, d_out)
    qkv.requires_grad_()
    out = short_attention(qkv, 4, groups)
    out.backward(d_out)
    assert off(out.detach(), want) < ROUNDING[torch.bfloat16]
    assert_close(qkv.grad, want_d_qkv, 4, groups, ROUNDING[torch.bfloat16])
