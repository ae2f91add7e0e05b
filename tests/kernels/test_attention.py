"""Attention of short sequences in Triton's interpreter, and its definition for a CPU, against PyTorch's in float64."""

import pytest
import torch
from torch.nn import functional
from triton.runtime import interpreter

from octavo.errors import InputError
from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels import reference
from octavo.kernels.attention import (
    Tiles,
    backward,
    backward_into,
    forward,
    launch,
    launch_backward,
    launch_backward_into,
    short_attention,
    takes,
)
from octavo.kernels.cast import Into, make

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
    (1, 257, 1, 1, 80),
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
def test_bfloat16_and_small_tiles(exact_products, tokens, dim):
    qkv, d_out, scale = case(1, tokens, 2, 2, dim, torch.bfloat16)
    want = exact(qkv, 2, 2, scale, d_out)
    out, lse = launch(qkv, 2, 2, scale, tiles=SMALL)
    d_qkv = launch_backward(d_out, qkv, out, lse, 2, 2, scale, queries=SMALL, keys=Tiles(16, 32, warps=4))
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


FP8_SHAPES = [  # batch, tokens, heads, groups, head dimension
    (2, 37, 2, 2, 80),
    (1, 65, 2, 2, 80),
    (3, 17, 2, 2, 64),
    (1, 50, 4, 2, 72),
    (2, 33, 6, 2, 8),
    (1, 64, 2, 1, 32),
    (4, 1, 1, 1, 16),
]
LAYOUTS = [(True, True), (True, False), (False, True), (False, False)]
formats = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)


def backward_case(*shape):
    """What a backward is given, and its gradient in float64 as a matrix."""
    (heads, groups), (qkv, d_out, scale) = shape[2:4], case(*shape)
    out, lse = launch(qkv, heads, groups, scale)
    return (d_out, qkv, out, lse, heads, groups, scale), exact(qkv, heads, groups, scale, d_out)[2].flatten(0, 1)


def bits(x):
    return x.view(torch.uint8)


def assert_within_a_step(fp8, scale_inv, want, fmt, rounding):
    """Of FP8 numbers between which the exact one lies; `rounding`: what the float32 gradient is off, of its norm an element."""
    coarse, smallest = {"E4M3": (2**-3, 2**-9), "E5M2": (2**-2, 2**-16)}[fmt.name]
    got = reference.dequantize(fp8, scale_inv).double()
    noise = 8 * rounding * want.norm() / want.numel() ** 0.5
    torch.testing.assert_close(got, want, rtol=coarse, atol=(smallest * scale_inv + noise).item())


@interpreted
@formats
@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
def test_fp8_is_made_of_the_float32_gradient(exact_casts, fmt, shape):
    arguments, want = backward_case(*shape)
    wide, _ = launch_backward_into(*arguments, Into(torch.float32))
    assert off(wide.row, want) < ROUNDING[torch.float16]
    scale = torch.tensor(fmt.max / 2) / wide.row.abs().max()
    cast = make(wide.row, Into(fmt.dtype, fmt.max, scale, None, True, True))
    for row, column in LAYOUTS:
        amax = torch.zeros(())
        made, _ = launch_backward_into(*arguments, Into(fmt.dtype, fmt.max, scale, amax, row, column))
        assert torch.equal(amax, wide.row.abs().max())
        assert (made.row is not None, made.column is not None) == (row, column)
        assert (made.scale_inv is None) == (not row and not column)
        for one, other in zip(made[:2], cast[:2], strict=True):
            assert one is None or torch.equal(bits(one), bits(other))
    assert_within_a_step(cast.row, cast.scale_inv, want, fmt, ROUNDING[torch.float16])


@interpreted
@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
def test_sums_of_columns(exact_casts, shape):
    arguments, want = backward_case(*shape)
    wide, _ = launch_backward_into(*arguments, Into(torch.float32))
    for into in (Into(E5M2.dtype, E5M2.max, torch.tensor(64.0), None, True, True), Into(torch.float16)):
        _, summed = launch_backward_into(*arguments, into, bias=True)
        assert summed.dtype == torch.float32
        torch.testing.assert_close(summed, wide.row.sum(0), rtol=1e-5, atol=1e-5)
    assert (summed.double() - want.sum(0)).abs().max() <= ROUNDING[torch.float16] * want.abs().sum(0).max()


@interpreted
@pytest.mark.parametrize(
    ("queries", "keys"), [(SMALL, SMALL), (Tiles(64, 32, 4), Tiles(16, 16, 4)), (Tiles(16, 32, 4), Tiles(32, 64, 4))], ids=str
)
def test_fp8_of_other_tiles(exact_casts, queries, keys):
    arguments, _ = backward_case(2, 37, 2, 2, 80)
    into = Into(E4M3.dtype, E4M3.max, torch.tensor(20.0), torch.zeros(()), True, True)
    made, summed = launch_backward_into(*arguments, into, bias=True, queries=queries, keys=keys)
    wide = launch_backward_into(*arguments, Into(torch.float32), queries=queries, keys=keys)[0].row
    cast = make(wide, into._replace(amax=None))
    assert torch.equal(bits(made.row), bits(cast.row))
    assert torch.equal(bits(made.column), bits(cast.column))
    assert torch.equal(into.amax, wide.abs().max())
    torch.testing.assert_close(summed, wide.sum(0), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("batch", [2, 4])
def test_fp8_turned_afterwards_is_the_same(exact_casts, batch):
    """37 tokens: of two sequences rows that are no multiple of four, of four they are."""
    arguments, _ = backward_case(batch, 37, 2, 2, 16)
    for row in (True, False):
        into = Into(E4M3.dtype, E4M3.max, torch.tensor(20.0), None, row, True)
        want, got = (launch_backward_into(*arguments, into, bias=True, turned=turned) for turned in (False, True))
        assert (got[0].row is None) == (not row)
        assert not row or torch.equal(bits(got[0].row), bits(want[0].row))
        assert torch.equal(bits(got[0].column), bits(want[0].column))
        assert torch.equal(got[1], want[1])
        assert torch.equal(got[0].scale_inv, want[0].scale_inv)


@interpreted
def test_wide_results_in_both_layouts(exact_casts):
    arguments, _ = backward_case(2, 37, 2, 2, 80)
    made, summed = launch_backward_into(*arguments, Into(torch.float16, column=True))
    assert torch.equal(made.row, launch_backward(*arguments).flatten(0, 1))
    assert torch.equal(made.column, made.row.t())
    assert made.scale_inv is None
    assert summed is None


@interpreted
def test_the_amax_grows_and_knows_no_nan(exact_casts):
    """Of tokens beyond the last there are probabilities: large values must not let those into the amax."""
    arguments, _ = backward_case(2, 37, 2, 2, 16)
    arguments[0][1, :, 16:].mul_(50)
    arguments[0][0, 5, 3] = torch.nan
    wide = launch_backward_into(*arguments, Into(torch.float32))[0].row
    assert wide.isnan().any()
    for before in (0.0, 1e6):
        into = Into(E4M3.dtype, E4M3.max, torch.tensor(1.0), torch.tensor(before), True, True)
        made, summed = launch_backward_into(*arguments, into, bias=True)
        assert into.amax == max(wide.nan_to_num(nan=0.0).abs().max(), before)
        assert torch.equal(made.row.float().isnan(), wide.isnan())
        assert torch.equal(made.column.float().isnan(), wide.isnan().t())
        assert torch.equal(summed.isnan(), wide.isnan().any(0))


@interpreted
def test_fp8_of_rows_with_strides(exact_casts):
    arguments, _ = backward_case(2, 37, 2, 2, 16)
    into = Into(E5M2.dtype, E5M2.max, torch.tensor(100.0), None, True, True)
    want, _ = launch_backward_into(*arguments, into)
    d_out, qkv = (torch.cat((x, x), -1)[..., : x.shape[-1]] for x in arguments[:2])
    got, _ = launch_backward_into(d_out, qkv, *arguments[2:], into)
    assert torch.equal(bits(got.row), bits(want.row))
    assert torch.equal(bits(got.column), bits(want.column))


@interpreted
@pytest.mark.parametrize("turned", [False, True])
def test_fp8_of_nothing_at_all(turned):
    qkv, d_out, scale = case(0, 5, 2, 2, 16)
    out, lse = launch(qkv, 2, 2, scale)
    into = Into(E4M3.dtype, E4M3.max, torch.tensor(4.0), torch.zeros(()), True, True)
    made, summed = launch_backward_into(d_out, qkv, out, lse, 2, 2, scale, into, bias=True, turned=turned)
    assert made.row.shape == (0, 96)
    assert made.column.shape == (96, 0)
    assert made.scale_inv == 0.25
    assert into.amax == 0
    assert torch.equal(summed, torch.zeros(96))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
def test_definition_of_what_is_asked_for(dtype, shape):
    heads, groups = shape[2:4]
    qkv, d_out, scale = case(*shape, dtype)
    arguments = (d_out, qkv, *forward(qkv, heads, groups, scale), heads, groups, scale)
    want = exact(qkv, heads, groups, scale, d_out)[2].flatten(0, 1)
    wide, summed = backward_into(*arguments, Into(torch.float32), bias=True)
    assert off(wide.row, want) < ROUNDING[dtype]
    assert torch.equal(wide.row.to(dtype), backward(*arguments).flatten(0, 1))
    torch.testing.assert_close(summed, wide.row.sum(0))
    into = Into(E4M3.dtype, E4M3.max, torch.tensor(20.0), torch.zeros(()), True, True)
    made, nothing = backward_into(*arguments, into)
    assert nothing is None
    assert torch.equal(bits(made.row), bits(reference.cast(wide.row, into.scale, E4M3.dtype, E4M3.max)))
    assert torch.equal(bits(made.column), bits(made.row).t())
    assert torch.equal(into.amax, wide.row.abs().max())


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
    with pytest.raises(InputError, match="more than 0"):
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
