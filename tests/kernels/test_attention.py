"""Attention of short sequences in Triton's interpreter, and its definition for a CPU, against PyTorch's in float64."""

import pytest
import torch
from torch.nn import functional
from triton.runtime import interpreter

from octavo.errors import InputError
from octavo.kernels.attention.short import Tiles, backward, forward, launch, launch_backward, takes
from octavo.nn.attention import short_attention

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")

SHAPES = [  # batch, tokens, heads, groups, head dimension
    (2, 1, 2, 2, 16),
    (1, 5, 3, 3, 32),
    (2, 16, 1, 1, 80),
    (1, 17, 2, 2, 64),
    (1, 64, 1, 1, 128),
    (1, 65, 2, 1, 80),
    (1, 66, 1, 1, 80),
    (1, 50, 4, 2, 72),
    (1, 100, 1, 1, 40),
    (1, 130, 1, 1, 64),
    (1, 193, 1, 1, 72),
    (1, 257, 1, 1, 80),
    (1, 257, 2, 1, 64),
    (2, 33, 6, 2, 8),
]
SMALL = Tiles(32, 16, warps=4)
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float32: 1e-5}


@pytest.fixture
def exact_products(monkeypatch, exact_casts):
    """The interpreter multiplies the bits of bfloat16 as if they were integers."""
    product = interpreter.InterpreterBuilder.create_dot

    def wide(x):
        bits = x.data
        if x.dtype.scalar.name == "bf16":
            bits = torch.from_numpy(bits.copy()).view(torch.bfloat16).float().numpy()
        return interpreter.TensorHandle(bits, interpreter.tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *more: product(self, wide(a), wide(b), *more)
    )


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


def case(batch, tokens, heads, groups, dim, dtype=torch.float16):
    qkv = torch.randn(batch, tokens, (heads + 2 * groups) * dim).to(dtype)
    return qkv, torch.randn(batch, tokens, heads * dim).to(dtype), dim**-0.5


def off(got, want):
    """Relative error, by norms; where the exact result is nothing, the absolute one."""
    return ((got.double() - want).norm() / want.norm().clamp(min=1.0)).item()


def parts(gradient, heads, groups):
    """Those of queries, keys and values, so that none hides behind another."""
    per_group = heads // groups
    return gradient.unflatten(-1, (groups, per_group + 2, -1)).split([per_group, 1, 1], -2)


def assert_right(got, want, heads, groups, dtype):
    (out, lse, d_qkv), (want_out, want_lse, want_d_qkv) = got, want
    assert out.dtype == d_qkv.dtype == dtype
    assert lse.dtype == torch.float32
    assert out.is_contiguous()
    assert d_qkv.is_contiguous()
    assert off(out, want_out) < ROUNDING[dtype]
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-4)
    for one, other in zip(parts(d_qkv, heads, groups), parts(want_d_qkv, heads, groups), strict=True):
        assert off(one, other) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "tokens", "heads", "groups", "dim"), SHAPES)
def test_definition(dtype, batch, tokens, heads, groups, dim):
    qkv, d_out, scale = case(batch, tokens, heads, groups, dim, dtype)
    out, lse = forward(qkv, heads, groups, scale)
    d_qkv = backward(d_out, qkv, out, lse, heads, groups, scale)
    assert_right((out, lse, d_qkv), exact(qkv, heads, groups, scale, d_out), heads, groups, dtype)


@interpreted
@pytest.mark.parametrize(("batch", "tokens", "heads", "groups", "dim"), SHAPES)
def test_kernels(batch, tokens, heads, groups, dim):
    qkv, d_out, scale = case(batch, tokens, heads, groups, dim)
    want = exact(qkv, heads, groups, scale, d_out)
    out, lse = launch(qkv, heads, groups, scale)
    assert_right((out, lse, launch_backward(d_out, qkv, out, lse, heads, groups, scale)), want, heads, groups, qkv.dtype)


@interpreted
@pytest.mark.parametrize(("tokens", "dim"), [(33, 80), (34, 32), (20, 16), (55, 16)])
@pytest.mark.parametrize("small", [SMALL, SMALL._replace(beside_few=32, lone=True)])
def test_bfloat16_and_small_tiles(exact_products, tokens, dim, small):
    qkv, d_out, scale = case(1, tokens, 2, 2, dim, torch.bfloat16)
    want = exact(qkv, 2, 2, scale, d_out)
    out, lse = launch(qkv, 2, 2, scale, tiles=small)
    d_qkv = launch_backward(d_out, qkv, out, lse, 2, 2, scale, queries=small, keys=Tiles(16, 32, warps=4))
    assert_right((out, lse, d_qkv), want, 2, 2, torch.bfloat16)


@interpreted
def test_rows_with_strides():
    qkv, d_out, scale = case(2, 33, 2, 2, 16)
    out, lse = launch(qkv, 2, 2, scale)
    want = launch_backward(d_out, qkv, out, lse, 2, 2, scale)
    for wide in (torch.zeros(2, 40, 110, dtype=qkv.dtype), torch.zeros(40, 2, 96, dtype=qkv.dtype).transpose(0, 1)):
        view = wide[:, 3:36, :96]
        view.copy_(qkv)
        d_view = torch.zeros(2, 33, 50, dtype=qkv.dtype)[..., 5:37]
        d_view.copy_(d_out)
        got, got_lse = launch(view, 2, 2, scale)
        assert torch.equal(got, out)
        assert torch.equal(got_lse, lse)
        assert torch.equal(launch_backward(d_view, view, out, lse, 2, 2, scale), want)
    ones = torch.ones((), dtype=qkv.dtype).expand_as(d_out)  # as the gradient of a sum comes
    want = launch_backward(ones.contiguous(), qkv, out, lse, 2, 2, scale)
    assert torch.equal(launch_backward(ones, qkv, out, lse, 2, 2, scale), want)


@interpreted
@pytest.mark.parametrize("tokens", [33, 40])
def test_large_logits(tokens):
    """A softmax that is nearly a choice: logits in the hundreds, and nothing overflows."""
    qkv, d_out, scale = case(1, tokens, 2, 2, 32)
    scale *= 30
    out, lse = launch(qkv, 2, 2, scale)
    want, want_lse, want_d_qkv = exact(qkv, 2, 2, scale, d_out)
    assert off(out, want) < 5e-3
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-3)
    assert off(launch_backward(d_out, qkv, out, lse, 2, 2, scale), want_d_qkv) < 1e-2


@interpreted
def test_repeats_bit_for_bit():
    qkv, d_out, scale = case(1, 65, 2, 2, 80)
    out, lse = launch(qkv, 2, 2, scale)
    for run in (lambda: launch(qkv, 2, 2, scale)[0], lambda: launch_backward(d_out, qkv, out, lse, 2, 2, scale)):
        assert torch.equal(run(), run())


@interpreted
def test_nothing_at_all():
    qkv, d_out, scale = case(0, 5, 2, 2, 16)
    out, lse = launch(qkv, 2, 2, scale)
    assert out.shape == (0, 5, 32)
    assert lse.shape == (0, 2, 5)
    assert launch_backward(d_out, qkv, out, lse, 2, 2, scale).shape == qkv.shape


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2)])
def test_function(heads, groups):
    qkv, d_out, scale = case(2, 7, heads, groups, 16, torch.float32)
    qkv.requires_grad_()
    out = short_attention(qkv, heads, groups)
    out.backward(d_out)
    want, _, want_d_qkv = exact(qkv.detach(), heads, groups, scale, d_out)
    torch.testing.assert_close(out.detach().double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(qkv.grad.double(), want_d_qkv, rtol=1e-4, atol=1e-5)
    other, _, _ = exact(qkv.detach(), heads, groups, 0.5, d_out)
    torch.testing.assert_close(short_attention(qkv, heads, groups, 0.5).detach().double(), other, rtol=1e-4, atol=1e-5)


def test_what_is_refused():
    qkv = torch.randn(1, 3, 48, requires_grad=True)
    with pytest.raises(InputError, match=r"softmax_scale = -1\.0: give a number above 0"):
        short_attention(qkv, 1, 1, -1.0)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(short_attention(qkv, 1, 1).sum(), qkv, create_graph=True)


def test_which_heads_are_taken():
    assert takes(torch.bfloat16, 257, 80)
    assert takes(torch.float16, 1, 8)
    assert takes(torch.bfloat16, 512, 128)
    for dtype, tokens, dim in (
        (torch.float32, 257, 80),
        (torch.bfloat16, 513, 80),
        (torch.bfloat16, 0, 80),
        (torch.bfloat16, 257, 136),
        (torch.bfloat16, 257, 20),
    ):
        assert not takes(dtype, tokens, dim)
