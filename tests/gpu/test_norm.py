"""The kernels of norms, compiled, at the sizes of models: against float64 and against the reference, all on the GPU."""

import pytest
import torch
from torch.nn import functional

from octavo.fp8.formats import E4M3
from octavo.kernels import reference
from octavo.kernels.norm import Tile, launch, launch_backward, norm
from octavo.kernels.quantize.quantized import Quantizer, quantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

EPS = 1e-5
KINDS = ["RMSNorm", "LayerNorm"]
SIZES = [(1, 1), (9, 257), (333, 4096), (9001, 1280), (4096, 2048), (70, 5120), (9, 12288)]
TILES = [Tile(16, 64, warps=4), Tile(32, 256), Tile(64, 128, warps=8)]
ROUNDING = {torch.bfloat16: 4e-3, torch.float32: 2e-6}


def case(kind, rows, columns, dtype, residual=True, mean=0.0):
    """Arguments of `norm` up to eps, and dy and d_residual."""
    x, delta, dy, d_residual = (torch.randn(rows, columns, device="cuda") for _ in range(4))
    weight = torch.rand(columns, device="cuda") + 0.5
    bias = torch.randn(columns, device="cuda") if kind == "LayerNorm" else None
    arguments = (kind, (x * 3 + mean).to(dtype), delta.to(dtype) if residual else None, weight, bias, EPS)
    return arguments, dy.to(dtype), d_residual.to(dtype) if residual else None


def exact(arguments, dy, d_residual, zero=0):
    """h, the normed result and the gradients of h, weight and bias, in float64. zero: 1 for a weight around 0."""
    _, x, delta, weight, bias, eps = arguments
    h = (x if delta is None else x + delta).double().requires_grad_()
    weight = weight.double().requires_grad_()
    bias = None if bias is None else bias.double().requires_grad_()
    shape = (h.shape[1],)
    gain = weight + zero
    y = functional.layer_norm(h, shape, gain, bias, eps) if bias is not None else functional.rms_norm(h, shape, gain, eps)
    upstream = torch.zeros_like(h) if d_residual is None else d_residual.double()
    torch.autograd.backward([y, h], [dy.double(), upstream])
    return h.detach(), y.detach(), h.grad, weight.grad, None if bias is None else bias.grad


def off(got, want):
    """Relative error, by norms; where the exact result is nothing, the absolute one."""
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-3)).item()


def assert_within_one_step(got, want):
    """By at most one FP8 number, and nearly nowhere."""
    a, b = (x.contiguous().view(torch.uint8).int() for x in (got, want))
    apart = (torch.where(a > 127, 128 - a, a) - torch.where(b > 127, 128 - b, b)).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() <= 0.01 + 1.0 / apart.numel()


def fp8(fmt, rowwise=True, columnwise=True):
    scale, amax = torch.rand((), device="cuda") * 8 + 8, torch.full((), 0.25, device="cuda")
    return Quantizer(fmt.dtype, fmt.max, scale, amax, rowwise, columnwise)


def again(quantizer):
    return quantizer._replace(amax=torch.full((), 0.25, device="cuda"))


def normed(arguments, h):
    """The reference's result in float32 for a given h."""
    kind, _, _, weight, bias, eps = arguments
    return reference.norm(kind, h, weight, bias, eps)[0]


def assert_equals_float64(kind, rows, columns, dtype, residual, tile):
    arguments, dy, d_residual = case(kind, rows, columns, dtype, residual)
    want = exact(arguments, dy, d_residual)
    h, stats, made = launch(*arguments, Quantizer(torch.float32), tile=tile)
    back = (dy, h, arguments[3], stats, d_residual)
    dh, dweight, dbias = launch_backward(kind, *back, tile=tile)
    assert torch.equal(h.double(), want[0])
    assert off(made.rowwise_data, want[1]) < 2e-6
    # One element wide, a LayerNorm has no gradient but what rounding leaves.
    assert off(dh, want[2]) < (ROUNDING[dtype] if columns > 1 else 0.1)
    assert off(dweight, want[3]) < 2e-6
    assert dbias is None if want[4] is None else off(dbias, want[4]) < 2e-6
    repeated = launch_backward(kind, *back, tile=tile)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip((dh, dweight, dbias), repeated, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [None, TILES[0]], ids=["rows", "tiles"])
@pytest.mark.parametrize(("rows", "columns"), [(333, 4096), (9001, 1280), (9, 257)])
def test_weights_around_zero(kind, tile, rows, columns):
    arguments, dy, d_residual = case(kind, rows, columns, torch.bfloat16)
    weight = (torch.rand(columns, device="cuda") / 200).bfloat16()  # 1 + weight is 1e-3 off in bfloat16
    arguments = (*arguments[:3], weight, *arguments[4:])
    want = exact(arguments, dy, d_residual, zero=1)
    h, stats, made = launch(*arguments, Quantizer(torch.float32), zero_centered=True, tile=tile)
    dh, dweight, dbias = launch_backward(kind, dy, h, weight, stats, d_residual, zero_centered=True, tile=tile)
    assert off(made.rowwise_data, want[1]) < 2e-6
    assert off(dh, want[2]) < ROUNDING[torch.bfloat16]
    assert off(dweight, want[3]) < 2e-5
    assert dbias is None if want[4] is None else off(dbias, want[4]) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "residual"), [(torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_rows_equal_float64(kind, dtype, residual, rows, columns):
    assert_equals_float64(kind, rows, columns, dtype, residual, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(70, 20), (1000, 1280), (300, 11008)])
def test_tiles_equal_float64(kind, residual, tile, rows, columns):
    assert_equals_float64(kind, rows, columns, torch.bfloat16, residual, tile)


def assert_forms(kind, rows, columns, row, column, **settings):
    arguments, _, _ = case(kind, rows, columns, torch.bfloat16)
    quantizer = fp8(E4M3, row, column)
    wanted = again(quantizer)
    h, _, made = (launch if settings else norm)(*arguments, quantizer, **settings)
    want = quantize(normed(arguments, h), wanted)
    assert torch.equal(h, arguments[1] + arguments[2])
    torch.testing.assert_close(quantizer.amax, wanted.amax, rtol=1e-5, atol=0)
    assert (made.rowwise_data is None, made.columnwise_data is None) == (not row, not column)
    for ours, theirs in ((made.rowwise_data, want.rowwise_data), (made.columnwise_data, want.columnwise_data)):
        if ours is not None:
            assert_within_one_step(ours, theirs)
    if row and column:
        assert torch.equal(made.columnwise_data.view(torch.uint8), made.rowwise_data.view(torch.uint8).t())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_both_forms(kind, rows, columns):
    assert_forms(kind, rows, columns, True, True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("row", "column"), [(False, True), (True, False), (False, False)])
def test_some_forms(kind, row, column):
    assert_forms(kind, 1000, 1280, row, column)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_no_tile_loses_bytes(kind, tile):
    """Whichever layouts the compiler gives a tile, what one conversion makes reaches both stores."""
    assert_forms(kind, 1000, 1280, True, True, tile=tile)


@pytest.mark.parametrize("tile", [None, TILES[1]], ids=str)
def test_large_mean(tile):
    arguments, dy, _ = case("LayerNorm", 200, 4096, torch.float32, residual=False, mean=30_000.0)
    want = exact(arguments, dy, None)
    h, stats, made = launch(*arguments, Quantizer(torch.float32), tile=tile)
    dh, dweight, _ = launch_backward("LayerNorm", dy, h, arguments[3], stats, None, tile=tile)
    assert off(stats[1], (want[0].var(1, correction=0) + EPS).rsqrt()) < 1e-4
    assert all(off(got, exactly) < 2e-3 for got, exactly in zip((made.rowwise_data, dh, dweight), want[1:4], strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [None, TILES[1]], ids=str)
def test_what_is_not_finite_stays_in_its_row(kind, tile):
    arguments, _, _ = case(kind, 200, 1280, torch.bfloat16)
    quantizer = fp8(E4M3, columnwise=tile is not None)
    x = arguments[1].clone()
    x[3, 5], x[111, 1279], x[170, 0] = torch.nan, torch.inf, -torch.inf
    clean_h, _, clean = launch(*arguments, again(quantizer), tile=tile)
    h, _, made = launch(kind, x, *arguments[2:], quantizer, tile=tile)
    poisoned = torch.zeros(200, dtype=torch.bool, device="cuda")
    poisoned[[3, 111, 170]] = True
    assert torch.equal(h[~poisoned], clean_h[~poisoned])
    assert torch.equal(made.rowwise_data.float()[~poisoned], clean.rowwise_data.float()[~poisoned])
    assert made.rowwise_data.float()[poisoned].isnan().any(1).all()
    assert quantizer.amax.isfinite()


@pytest.mark.parametrize("tile", [None, TILES[1]], ids=str)
@pytest.mark.parametrize("strided", [lambda x: x.t().contiguous().t(), lambda x: torch.cat((x, x), 1)[:, : x.shape[1]]])
def test_any_strides(tile, strided):
    (kind, x, delta, *others), dy, d_residual = case("LayerNorm", 180, 400, torch.bfloat16)
    want_h, want_stats, want = launch(kind, x, delta, *others, Quantizer(torch.float32), tile=tile)
    h, stats, made = launch(kind, strided(x), strided(delta), *others, Quantizer(torch.float32), tile=tile)
    assert all(torch.equal(a, b) for a, b in ((h, want_h), (stats, want_stats), (made.rowwise_data, want.rowwise_data)))
    want = launch_backward(kind, dy, h, others[0], stats, d_residual, tile=tile)
    got = launch_backward(kind, strided(dy), strided(h), others[0], stats, strided(d_residual), tile=tile)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
