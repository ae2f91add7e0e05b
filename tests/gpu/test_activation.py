"""The fused activations on a GPU, against their definition in PyTorch on the same GPU and against each other."""

import pytest
import torch

from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels import activation as act
from octavo.kernels import reference
from octavo.kernels.quantize.quantized import NOTHING, Quantizer, quantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

F32 = Quantizer(torch.float32)
SHAPES = [(4096, 8192, 16), (1000, 5120, 16), (333, 11008, 16), (1, 16, 16), (70, 200, 8), (65, 20, 4), (3, 7, 1)]
"""Rows, activation columns, block."""
NAMES = [*reference.ACTIVATIONS, reference.clamped_swiglu(limit=2.5, alpha=1.25, offset=0.5)]
EXTREMES = [0.0, -0.0, 1e4, -1e4, 1e-30, 12.0, -12.0, 90.0, -90.0, 1e13, -1e13, 1e20, -1e20, torch.inf, -torch.inf, torch.nan]


def case(name, rows, columns, dtype=torch.float32):
    width = columns * (2 if act.is_gated(name) else 1)
    return torch.randn(rows, columns, device="cuda").to(dtype), (torch.randn(rows, width, device="cuda") * 3).to(dtype)


def put_unusual(name, x, block):
    """A NaN, and in the last column an infinity: as an up it stands beside a gate of 1, since 0 · ∞ is a matter of rounding."""
    x[0, 0], x[-1, -1] = torch.nan, torch.inf
    if act.is_gated(name):
        x[-1, -1 - block] = 1


def fp8_quantizer(fmt, **settings):
    return Quantizer(
        fmt.dtype, fmt.max, torch.rand((), device="cuda") * 20 + 1, torch.full((), 0.125, device="cuda"), **settings
    )


def codes(q):
    """FP8 as bytes, every NaN the same: which of its codes a NaN takes is the converter's choice."""
    q = q.contiguous()
    return q.view(torch.uint8).masked_fill(q.float().isnan(), 127)


def ordinal(q):
    """FP8 codes in the order of their values, so that neighbours differ by 1."""
    code = q.contiguous().view(torch.uint8).int()
    return torch.where(code > 127, -(code & 127), code)


def assert_made(got, want):
    """Within one FP8 step of the definition and hardly ever that far; the layouts and 1 / scale bit for bit."""
    nan = want.rowwise_data.float().isnan()
    assert torch.equal(got.rowwise_data.float().isnan(), nan)
    steps = (ordinal(got.rowwise_data) - ordinal(want.rowwise_data))[~nan].abs()
    off = (got.rowwise_data.float() - want.rowwise_data.float())[~nan].abs()
    assert ((steps <= 1) | (off * want.scale_inv <= 5e-5)).all()  # 1 + erf loses digits where gelu is next to 0
    assert (steps > 0).sum() <= 1 + 0.005 * steps.numel()
    assert torch.equal(codes(got.columnwise_data), codes(got.rowwise_data.t()))
    assert torch.equal(got.scale_inv, want.scale_inv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "columns", "block"), SHAPES)
def test_forward_in_fp8(name, rows, columns, block, dtype):
    _, x = case(name, rows, columns, dtype)
    put_unusual(name, x, block)
    quantizer = fp8_quantizer(E4M3, columnwise=True)
    want_amax = quantizer.amax.clone()
    got = act.activation(name, x, block, quantizer)
    assert_made(got, quantize(reference.activation(name, x, block), quantizer._replace(amax=want_amax)))
    torch.testing.assert_close(quantizer.amax, want_amax)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "columns", "block"), SHAPES)
def test_backward_in_fp8(name, rows, columns, block, dtype):
    dy, x = case(name, rows, columns, dtype)
    dy[-1, -1] = torch.nan
    dy[0, 0], x[0, 0] = torch.nan, 3.0  # beyond the limit of a clamp, which no gradient passes
    quantizer, again = fp8_quantizer(E5M2, columnwise=True), fp8_quantizer(E4M3, rowwise=False, columnwise=True)
    want_amax, forward_amax = quantizer.amax.clone(), again.amax.clone()
    dx, y, bias = act.launch_backward(name, dy, x, block, quantizer, recompute=again, bias=True)
    want = reference.activation_backward(name, dy, x, block)
    assert_made(dx, quantize(want, quantizer._replace(amax=want_amax)))
    torch.testing.assert_close(quantizer.amax, want_amax)
    torch.testing.assert_close(bias.double(), want.double().sum(0), rtol=1e-4, atol=5e-3, equal_nan=True)
    forward = act.activation(name, x, block, again._replace(amax=forward_amax, rowwise=True))
    assert y.rowwise_data is None
    assert torch.equal(codes(y.columnwise_data), codes(forward.columnwise_data))
    assert torch.equal(y.scale_inv, forward.scale_inv)
    assert torch.equal(again.amax, forward_amax)


@pytest.mark.parametrize("name", reference.ACTIVATIONS)
@pytest.mark.parametrize(("rows", "columns", "block"), SHAPES[1:])
def test_float32(name, rows, columns, block):
    dy, x = case(name, rows, columns)
    y = act.launch(name, x, block, F32).rowwise_data
    dx, again, _ = act.launch_backward(name, dy, x, block, F32, recompute=F32)
    x64, dy64 = x.double(), dy.double()
    parts = x64.unflatten(-1, (-1, 2, block)).unbind(-2) if act.is_gated(name) else (x64,)
    curve, slope = reference.CURVES[reference.ACTIVATIONS[name][0]]
    if act.is_gated(name):
        gate, up = parts
        dy64 = dy64.unflatten(-1, (-1, block))
        want_y = (curve(gate) * up).flatten(-2)
        want_dx = torch.stack((dy64 * up * slope(gate), dy64 * curve(gate)), -2).flatten(-3)
    else:
        want_y, want_dx = curve(x64), dy64 * slope(x64)
    torch.testing.assert_close(y.double(), want_y, rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(dx.rowwise_data.double(), want_dx, rtol=1e-5, atol=5e-5)
    assert torch.equal(again.rowwise_data, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", reference.ACTIVATIONS)
def test_wide_results(name, dtype):
    dy, x = case(name, 1000, 5120, dtype)
    quantizer = Quantizer(dtype, columnwise=True)
    y = act.activation(name, x, 16, quantizer)
    dx, again, _ = act.activation_backward(name, dy, x, 16, quantizer, recompute=quantizer)
    for got, want in ((y, reference.activation(name, x, 16)), (dx, reference.activation_backward(name, dy, x, 16))):
        torch.testing.assert_close(got.rowwise_data, want.to(dtype), rtol=1e-2, atol=1e-4)
        assert torch.equal(got.columnwise_data, got.rowwise_data.t())
        assert got.scale_inv is None
    assert torch.equal(again.rowwise_data, y.rowwise_data)


@pytest.mark.parametrize("name", reference.ACTIVATIONS)
def test_extremes(name):
    """Each beside an up and a gradient of 1: finite stays finite where float32 reaches."""
    x = torch.tensor(EXTREMES, device="cuda")[None]
    dy = torch.ones_like(x)
    if act.is_gated(name):
        x = torch.cat((x, torch.ones_like(x)), 1)
    y = act.activation(name, x, 16, F32).rowwise_data
    dx = act.activation_backward(name, dy, x, 16, F32)[0].rowwise_data
    torch.testing.assert_close(y, reference.activation(name, x, 16), equal_nan=True, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dx, reference.activation_backward(name, dy, x, 16), equal_nan=True, rtol=1e-5, atol=1e-6)
    assert y[:, : 11 if name in ("relu2", "sreglu") else 13].isfinite().all()
    assert dx[:, :13].isfinite().all()


@pytest.mark.parametrize("name", reference.ACTIVATIONS)
def test_amax_alone_views_and_repeats(name):
    dy, x = (torch.cat((t, t), 1)[:, 3 : 3 + t.shape[1]] for t in case(name, 333, 5120, torch.bfloat16))
    quantizer = Quantizer(E4M3.dtype, E4M3.max, None, torch.zeros((), device="cuda"), rowwise=False)
    assert act.activation_backward(name, dy, x, 16, quantizer)[0] == NOTHING
    torch.testing.assert_close(quantizer.amax, reference.activation_backward(name, dy, x, 16).abs().amax())
    quantizer = fp8_quantizer(E4M3, columnwise=True)
    first, second = (act.activation_backward(name, dy, x, 16, quantizer, bias=True) for _ in range(2))
    assert torch.equal(codes(first[0].rowwise_data), codes(second[0].rowwise_data))
    assert torch.equal(codes(first[0].columnwise_data), codes(second[0].columnwise_data))
    assert torch.equal(first[2], second[2])


@pytest.mark.parametrize("name", ["relu2", "swiglu"])
def test_more_than_2_31_elements(name):
    rows, columns = (70_000, 16_384) if act.is_gated(name) else (70_000, 32_768)
    dy, x = case(name, rows, columns, torch.bfloat16)
    quantizer = fp8_quantizer(E4M3, columnwise=True)
    y, (dx, _, _) = act.activation(name, x, 16, quantizer), act.activation_backward(name, dy, x, 16, quantizer)
    last = slice(rows - 256, rows)
    for got, want in (
        (y, reference.activation(name, x[last], 16)),
        (dx, reference.activation_backward(name, dy[last], x[last], 16)),
    ):
        part = got._replace(rowwise_data=got.rowwise_data[last], columnwise_data=got.columnwise_data[:, last])
        assert_made(part, quantize(want, quantizer._replace(amax=None)))


@pytest.mark.parametrize("name", reference.ACTIVATIONS)
@pytest.mark.parametrize(("rows", "columns", "block"), [(4096, 2048, 16), (1000, 5120, 16), (260, 200, 4)])
def test_packed_rows_equal_single_ones(name, rows, columns, block):
    width = columns * (2 if act.is_gated(name) else 1)
    dy, x = torch.randn(rows, columns, device="cuda").bfloat16(), torch.randn(rows, width, device="cuda").bfloat16()
    results = []
    for tiles in (None, act.Tiles(64, 64, 8)):
        quantizer = Quantizer(E5M2.dtype, E5M2.max, torch.tensor(7e3).cuda(), torch.zeros((), device="cuda"), True, True)
        again = Quantizer(E4M3.dtype, E4M3.max, torch.tensor(30.0).cuda(), None, False, True)
        results.append(
            (quantizer, *act.launch_backward(name, dy, x, block, quantizer, recompute=again, bias=True, tiles=tiles))
        )
    (quantizer, dx, y, bias), (want_quantizer, want_dx, want_y, want_bias) = results
    for got, want in (
        (dx.rowwise_data, want_dx.rowwise_data),
        (dx.columnwise_data, want_dx.columnwise_data),
        (y.columnwise_data, want_y.columnwise_data),
    ):
        same = got.view(torch.uint8) == want.view(torch.uint8)
        assert same.float().mean() > 0.999  # one kernel may fuse a product with a sum where the other does not
    assert torch.equal(dx.rowwise_data.t().view(torch.uint8), dx.columnwise_data.view(torch.uint8))
    forward = act.launch(name, x, block, Quantizer(E4M3.dtype, E4M3.max, torch.tensor(30.0).cuda(), None, True, False))
    assert torch.equal(forward.rowwise_data.t().view(torch.uint8), y.columnwise_data.view(torch.uint8))
    torch.testing.assert_close(quantizer.amax, want_quantizer.amax)
    torch.testing.assert_close(bias, want_bias, rtol=1e-3, atol=1e-2)
