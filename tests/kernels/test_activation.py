"""Fused activations: their definition against float64 autograd, and the kernels in Triton's interpreter against both."""

import pytest
import torch
from torch.nn import functional

from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels import activation as act
from octavo.kernels import reference
from octavo.kernels.quantize.quantized import NOTHING, Quantizer, quantize

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of numpy, in the interpreter
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs the kernel"
)

F32 = Quantizer(torch.float32)
CURVES = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: x.relu() ** 2,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "silu": functional.silu,
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "geglu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "qgeglu": lambda x: x * torch.sigmoid(1.702 * x),
    "reglu": torch.relu,
    "sreglu": lambda x: x.relu() ** 2,
    "glu": torch.sigmoid,
}
CLAMPED = reference.clamped_swiglu(limit=2.5, alpha=1.25, offset=0.5)
"""Of numbers that are inside and beyond in every case."""
NAMES = [*reference.ACTIVATIONS, CLAMPED]
SHAPES = [(70, 48, 16), (129, 112, 16), (1, 16, 16), (70, 200, 8), (65, 20, 4), (3, 7, 1), (33, 48, 48), (5, 20, 20)]
"""Rows, activation columns, block; with all columns in one, gates stand before ups."""
SMALL = [(70, 48, 16), (65, 20, 4), (3, 7, 1), (33, 48, 48)]
EXTREMES = [0.0, -0.0, 1e4, -1e4, 1e-30, 12.0, -12.0, 90.0, -90.0, 1e13, -1e13, 1e20, -1e20, torch.inf, -torch.inf, torch.nan]


def exact(name, x, block):
    """The activation in x's dtype, with gates and ups picked by the parity of their block."""
    if not act.is_gated(name):
        return CURVES[name](x)
    is_gate = (torch.arange(x.shape[1]) // block) % 2 == 0
    if name == CLAMPED:
        gate, up = x[:, is_gate].clamp(max=2.5), x[:, ~is_gate].clamp(-2.5, 2.5)
        return gate * torch.sigmoid(1.25 * gate) * (up + 0.5)
    return CURVES[name](x[:, is_gate]) * x[:, ~is_gate]


def exact_gradient(name, dy, x, block):
    x = x.double().requires_grad_()
    exact(name, x, block).backward(dy.double())
    return x.grad


def case(name, rows, columns, dtype=torch.float32):
    """dy and x, of values where all of a curve shows."""
    width = columns * (2 if act.is_gated(name) else 1)
    return torch.randn(rows, columns).to(dtype), (torch.randn(rows, width) * 3).to(dtype)


def put_unusual(name, x, block):
    """A NaN, and in the last column an infinity: as an up it stands beside a gate of 1, since 0 · ∞ is a matter of rounding."""
    x[0, 0], x[-1, -1] = torch.nan, torch.inf
    if act.is_gated(name):
        x[-1, -1 - block] = 1


def fp8_quantizer(fmt, **settings):
    return Quantizer(fmt.dtype, fmt.max, torch.rand(()) * 20 + 1, torch.tensor(0.125), **settings)


def ordinal(q):
    """FP8 codes in the order of their values, so that neighbours differ by 1."""
    code = q.contiguous().view(torch.uint8).int()
    return torch.where(code > 127, -(code & 127), code)


def assert_one_step(got, want, scale):
    """NaN in the same places, nothing further than the next FP8 value, and hardly anything that far.

    1 + erf loses digits where gelu is next to 0, which a large scale shows as more than a step.
    """
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    steps = (ordinal(got) - ordinal(want))[~nan].abs()
    off = (got.float() - want.float())[~nan].abs()
    assert ((steps <= 1) | (off <= 3e-5 * scale)).all()
    assert (steps > 0).sum() <= 2 + 0.01 * steps.numel()


def assert_made(got, want):
    """What a kernel made against the definition, and its layouts against each other, bit for bit."""
    assert_one_step(got.rowwise_data, want.rowwise_data, 1 / want.scale_inv)
    assert torch.equal(got.columnwise_data.view(torch.uint8), got.rowwise_data.t().contiguous().view(torch.uint8))
    assert torch.equal(got.scale_inv, want.scale_inv)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "columns", "block"), SHAPES)
def test_definition_equals_float64(name, rows, columns, block):
    dy, x = case(name, rows, columns)
    y = act.activation(name, x, block, F32)
    dx, again, bias = act.activation_backward(name, dy, x, block, F32, recompute=F32, bias=True)
    want = exact_gradient(name, dy, x, block)
    torch.testing.assert_close(y.rowwise_data.double(), exact(name, x.double(), block), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.rowwise_data.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias.double(), want.sum(0), rtol=1e-5, atol=1e-4)
    assert torch.equal(again.rowwise_data, y.rowwise_data)
    assert act.activation_backward(name, dy, x, block, F32)[1:] == (None, None)


def test_swiglu_of_the_decoder():
    x = torch.randn(5, 64)
    gate, up = x.float().unflatten(-1, (-1, 2, 16)).unbind(-2)
    want = (torch.nn.functional.silu(gate) * up).flatten(-2)
    assert torch.equal(act.activation("swiglu", x, 16, F32).rowwise_data, want)


@interpreted
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "columns", "block"), SHAPES)
def test_kernel_equals_float64(name, rows, columns, block):
    dy, x = case(name, rows, columns)
    y = act.launch(name, x, block, F32)
    dx, again, bias = act.launch_backward(name, dy, x, block, F32, recompute=F32, bias=True)
    want = exact_gradient(name, dy, x, block)
    torch.testing.assert_close(y.rowwise_data.double(), exact(name, x.double(), block), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dx.rowwise_data.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias.double(), want.sum(0), rtol=1e-5, atol=1e-4)
    assert torch.equal(again.rowwise_data, y.rowwise_data)
    assert (y.columnwise_data, y.scale_inv, dx.columnwise_data, dx.scale_inv) == (None,) * 4


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("name", NAMES)
def test_forward_in_fp8(exact_casts, name, fmt, dtype):
    for rows, columns, block in SMALL:
        _, x = case(name, rows, columns, dtype)
        put_unusual(name, x, block)
        quantizer = fp8_quantizer(fmt, columnwise=True)
        want_amax = quantizer.amax.clone()
        got = act.launch(name, x, block, quantizer)
        assert_made(got, quantize(reference.activation(name, x, block), quantizer._replace(amax=want_amax)))
        torch.testing.assert_close(quantizer.amax, want_amax)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_backward_in_fp8(exact_casts, name, dtype):
    for rows, columns, block in SMALL:
        dy, x = case(name, rows, columns, dtype)
        put_unusual(name, x, block)
        dy[-1, -1] = torch.nan
        quantizer, again = fp8_quantizer(E5M2, columnwise=True), fp8_quantizer(E4M3, rowwise=False, columnwise=True)
        want_amax, forward_amax = quantizer.amax.clone(), again.amax.clone()
        dx, y, bias = act.launch_backward(name, dy, x, block, quantizer, recompute=again, bias=True)
        want = reference.activation_backward(name, dy, x, block)
        assert_made(dx, quantize(want, quantizer._replace(amax=want_amax)))
        torch.testing.assert_close(quantizer.amax, want_amax)
        torch.testing.assert_close(bias, want.sum(0), rtol=1e-4, atol=1e-3, equal_nan=True)
        forward = act.launch(name, x, block, again._replace(amax=forward_amax, rowwise=True), tiles=act.Tiles(16, 32, 4))
        assert y.rowwise_data is None
        assert torch.equal(y.columnwise_data.view(torch.uint8), forward.columnwise_data.view(torch.uint8))
        assert torch.equal(y.scale_inv, forward.scale_inv)
        assert torch.equal(again.amax, forward_amax)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_wide_results(exact_casts, name, dtype):
    dy, x = case(name, 70, 48, dtype)
    quantizer = Quantizer(dtype, columnwise=True)
    y = act.launch(name, x, 16, quantizer)
    dx, again, _ = act.launch_backward(name, dy, x, 16, quantizer, recompute=quantizer)
    for got, want in ((y, reference.activation(name, x, 16)), (dx, reference.activation_backward(name, dy, x, 16))):
        torch.testing.assert_close(got.rowwise_data, want.to(dtype))
        assert torch.equal(got.columnwise_data, got.rowwise_data.t())
        assert got.scale_inv is None
    assert torch.equal(again.rowwise_data, y.rowwise_data)


@interpreted
@pytest.mark.parametrize("tiles", [act.Tiles(16, 16, 4), act.Tiles(32, 8, 4), act.Tiles(16, 128, 8)])
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_any_tiles(exact_casts, name, tiles):
    dy, x = case(name, 70, 48, torch.bfloat16)
    quantizer = fp8_quantizer(E4M3, columnwise=True)._replace(amax=None)
    y = act.launch(name, x, 16, quantizer, tiles=tiles)
    dx, _, bias = act.launch_backward(name, dy, x, 16, quantizer, bias=True, tiles=tiles)
    assert_made(y, quantize(reference.activation(name, x, 16), quantizer))
    assert_made(dx, quantize(reference.activation_backward(name, dy, x, 16), quantizer))
    torch.testing.assert_close(bias, reference.activation_backward(name, dy, x, 16).sum(0), rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "columns", "block"), [(68, 48, 16), (4, 20, 4), (132, 7, 1), (8, 48, 48)])
def test_packed_rows_equal_single_ones(exact_casts, name, rows, columns, block):
    dy, x = case(name, rows, columns, torch.bfloat16)
    put_unusual(name, x, block)
    results = []
    for tiles in (None, act.Tiles(16, 32, 4)):
        quantizer = fp8_quantizer(E5M2, columnwise=True)
        again = fp8_quantizer(E4M3, rowwise=False, columnwise=True)._replace(amax=None, scale=torch.tensor(3.0))
        quantizer = quantizer._replace(scale=torch.tensor(7.0))
        results.append(
            (quantizer, *act.launch_backward(name, dy, x, block, quantizer, recompute=again, bias=True, tiles=tiles))
        )
    (quantizer, dx, y, bias), (want_quantizer, want_dx, want_y, want_bias) = results
    for got, want in (
        (dx.rowwise_data, want_dx.rowwise_data),
        (dx.columnwise_data, want_dx.columnwise_data),
        (y.columnwise_data, want_y.columnwise_data),
    ):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(dx.rowwise_data.t().view(torch.uint8), dx.columnwise_data.view(torch.uint8))
    for got, want in (
        (dx.scale_inv, want_dx.scale_inv),
        (y.scale_inv, want_y.scale_inv),
        (quantizer.amax, want_quantizer.amax),
    ):
        assert torch.equal(got, want)
    torch.testing.assert_close(bias, want_bias, rtol=1e-5, atol=1e-4, equal_nan=True)


@interpreted
@pytest.mark.parametrize("name", NAMES)
def test_extremes(name):
    """Each beside an up and a gradient of 1: finite stays finite where float32 reaches, and NaN stays where it is."""
    x = torch.tensor(EXTREMES)[None]
    dy = torch.ones_like(x)
    if act.is_gated(name):
        x = torch.cat((x, torch.ones_like(x)), 1)
    y = act.launch(name, x, 16, F32).rowwise_data
    dx, _, _ = act.launch_backward(name, dy, x, 16, F32)
    torch.testing.assert_close(y, reference.activation(name, x, 16), equal_nan=True)
    torch.testing.assert_close(dx.rowwise_data, reference.activation_backward(name, dy, x, 16), equal_nan=True)
    beyond = 11 if name in ("relu2", "sreglu") else 13  # the square of 1e20 is beyond float32
    assert y[:, :beyond].isfinite().all()
    assert dx.rowwise_data[:, :13].isfinite().all()
    assert y[:, -1].isnan().all()
    assert dx.rowwise_data[:, 15].isnan().all()


@interpreted
@pytest.mark.parametrize("name", NAMES)
def test_nan_stays_in_its_element(name):
    dy, x = case(name, 5, 32)
    clean, clean_dx = act.launch(name, x, 16, F32).rowwise_data, act.launch_backward(name, dy, x, 16, F32)[0].rowwise_data
    x[2, 3] = torch.nan  # a gate, with its up 16 columns on
    y, dx = act.launch(name, x, 16, F32).rowwise_data, act.launch_backward(name, dy, x, 16, F32)[0].rowwise_data
    assert y[2, 3].isnan()
    assert dx[2, 3].isnan()
    touched = torch.zeros_like(x, dtype=torch.bool)
    touched[2, 3], touched[2, 19] = True, act.is_gated(name)
    assert torch.equal(dx[~touched], clean_dx[~touched])
    y[2, 3] = clean[2, 3]
    assert torch.equal(y, clean)


@interpreted
@pytest.mark.parametrize("shape", [(5, 32, 16), (5, 32, 5)], ids=["tiles", "elements"])
def test_no_gradient_passes_a_limit(shape):
    """Neither a NaN nor an infinity, as of PyTorch's clamp."""
    rows, columns, block = shape
    dy, x = case(CLAMPED, rows, columns // block * block)
    dy[1, 2], dy[3, 4] = torch.nan, torch.inf
    x[1, 2], x[1, 2 + block], x[3, 4], x[3, 4 + block] = 3.0, 3.0, 40.0, -3.0  # beyond 2.5
    dx = act.launch_backward(CLAMPED, dy, x, block, F32)[0].rowwise_data
    assert torch.equal(dx == 0, reference.activation_backward(CLAMPED, dy, x, block) == 0)
    assert dx.isfinite().all()


@interpreted
@pytest.mark.parametrize("name", ["relu2", "swiglu"])
@pytest.mark.parametrize("view", [lambda x: x.t().contiguous().t(), lambda x: torch.cat((x, x), 1)[:, 3 : 3 + x.shape[1]]])
def test_views(name, view):
    dy, x = case(name, 33, 48)
    dy, x = view(dy), view(x)
    assert not x.is_contiguous()
    torch.testing.assert_close(act.launch(name, x, 16, F32).rowwise_data, reference.activation(name, x, 16))
    dx, _, _ = act.launch_backward(name, dy, x, 16, F32)
    torch.testing.assert_close(dx.rowwise_data, reference.activation_backward(name, dy, x, 16))


@interpreted
@pytest.mark.parametrize("name", NAMES)
def test_amax_alone(name):
    dy, x = case(name, 70, 48, torch.bfloat16)
    quantizer, again = (Quantizer(E4M3.dtype, E4M3.max, None, torch.zeros(()), rowwise=False) for _ in range(2))
    assert act.launch(name, x, 16, quantizer) == NOTHING
    torch.testing.assert_close(quantizer.amax, reference.activation(name, x, 16).abs().amax())
    made = act.launch_backward(name, dy, x, 16, quantizer._replace(amax=quantizer.amax.zero_()), recompute=again)
    assert made == (NOTHING, NOTHING, None)
    torch.testing.assert_close(quantizer.amax, reference.activation_backward(name, dy, x, 16).abs().amax())
    torch.testing.assert_close(again.amax, reference.activation(name, x, 16).abs().amax())


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_no_rows(name):
    dy, x = case(name, 0, 48, torch.bfloat16)
    quantizer = fp8_quantizer(E4M3, columnwise=True)
    launched = (
        act.launch(name, x, 16, quantizer),
        act.launch_backward(name, dy, x, 16, quantizer, recompute=quantizer, bias=True),
    )
    plain = (
        act.activation(name, x, 16, quantizer),
        act.activation_backward(name, dy, x, 16, quantizer, recompute=quantizer, bias=True),
    )
    for y, (dx, again, bias) in (launched, plain):
        assert y.rowwise_data.shape == again.rowwise_data.shape == (0, 48)
        assert dx.rowwise_data.shape == x.shape
        assert dx.columnwise_data.shape == (x.shape[1], 0)
        assert torch.equal(dx.scale_inv, quantizer.scale.reciprocal())
        assert torch.equal(bias, torch.zeros(x.shape[1]))
    assert quantizer.amax == 0.125


@pytest.mark.parametrize("name", ["swiglu", "gelu", CLAMPED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columnwise", [True, False])
@pytest.mark.parametrize(
    "run", [pytest.param(act.activation, id="definition"), pytest.param(act.launch, id="kernel", marks=interpreted)]
)
@pytest.mark.parametrize(("rows", "columns", "block"), [*SMALL, (0, 16, 16)])
def test_what_is_stored_beside_is_what_is_cast(exact_casts, run, rows, columns, block, columnwise, dtype, name):
    x, quantizer = case(name, rows, columns, dtype)[1], fp8_quantizer(E4M3, columnwise=columnwise)
    high_precision_out = torch.full((rows, columns), torch.nan, dtype=dtype)
    made = run(name, x, block, quantizer, high_precision_out=high_precision_out)
    assert torch.equal(high_precision_out, run(name, x, block, Quantizer(dtype)).high_precision)
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    torch.testing.assert_close(high_precision_out.double(), exact(name, x.double(), block), rtol=rounding, atol=1e-5)
    assert torch.equal(quantizer.amax, torch.maximum(torch.tensor(0.125), reference.amax(high_precision_out.float())))
    cast = reference.cast(high_precision_out.float(), quantizer.scale, quantizer.dtype, quantizer.fp8_max)
    assert torch.equal(made.rowwise_data.float(), cast.float())
    assert (made.columnwise_data is not None) == columnwise
    assert not columnwise or torch.equal(made.columnwise_data.float(), cast.float().t())


@pytest.mark.parametrize("name", ["swiglu", "gelu", CLAMPED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(act.activation_backward, id="definition"),
        pytest.param(act.launch_backward, id="kernel", marks=interpreted),
    ],
)
@pytest.mark.parametrize(("rows", "columns", "block"), [*SMALL, (0, 16, 16)])
def test_a_gradient_that_is_stored_beside_is_what_is_cast(exact_casts, run, rows, columns, block, dtype, name):
    (dy, x), quantizer = case(name, rows, columns, dtype), fp8_quantizer(E5M2, columnwise=False)
    high_precision_out = torch.full(x.shape, torch.nan, dtype=dtype)
    made, _, bias = run(name, dy, x, block, quantizer, bias=True, high_precision_out=high_precision_out)
    plain, _, wanted = run(name, dy, x, block, Quantizer(dtype), bias=True)
    assert torch.equal(high_precision_out, plain.high_precision)
    assert torch.equal(bias, wanted)
    assert torch.equal(quantizer.amax, torch.maximum(torch.tensor(0.125), reference.amax(high_precision_out.float())))
    cast = reference.cast(high_precision_out.float(), quantizer.scale, quantizer.dtype, quantizer.fp8_max)
    assert torch.equal(made.rowwise_data.float(), cast.float())
