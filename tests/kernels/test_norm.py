"""Norms and their gradients: the definition against float64, and the kernels in Triton's interpreter against the definition."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels import reference
from octavo.kernels.norm import Tile, launch, launch_backward, norm, norm_backward
from octavo.kernels.norm_rows import WIDEST_ROW, backward_shape, forward_shape
from octavo.kernels.quantize.quantized import Quantizer

EPS = 1e-5
KINDS = ["RMSNorm", "LayerNorm"]
SIZES = [(1, 1), (70, 20), (9, 257), (1, 64), (33, 48), (150, 80), (3, 1300), (2, 3000)]
SMALL = Tile(16, 32, warps=4)
# Relative error of the norm of a tensor that is rounded to the dtype once.
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs the kernels"
)


class Case:
    """Fresh random inputs of a norm and of its backward."""

    def __init__(self, kind, rows, columns, dtype, *, residual=True, mean=0.0, weight_dtype=None, zero_centered=False):
        self.kind, self.zero_centered = kind, zero_centered
        self.x = (torch.randn(rows, columns) * 3 + mean).to(dtype)
        self.delta = torch.randn(rows, columns).to(dtype) if residual else None
        # Around 0 to 9 bits: 1 + weight has more than bfloat16 holds.
        weight = torch.rand(columns) / 200 if zero_centered else torch.rand(columns) + 0.5
        self.weight = weight.to(weight_dtype or dtype)
        self.bias = torch.randn(columns).to(weight_dtype or dtype) if kind == "LayerNorm" else None
        self.dy = torch.randn(rows, columns).to(dtype)
        self.d_residual = torch.randn(rows, columns).to(dtype) if residual else None

    def forward(self, run, quantizer, **settings):
        settings["zero_centered"] = self.zero_centered
        return run(self.kind, self.x, self.delta, self.weight, self.bias, EPS, quantizer, **settings)

    def backward(self, run, h, stats, **settings):
        settings["zero_centered"] = self.zero_centered
        return run(self.kind, self.dy, h, self.weight, stats, self.d_residual, **settings)

    def exact(self):
        """h, the normed result and the gradients of h, weight and bias in float64."""
        h = (self.x if self.delta is None else self.x + self.delta).double().requires_grad_()
        weight = self.weight.double().requires_grad_()
        bias = None if self.bias is None else self.bias.double().requires_grad_()
        shape = (h.shape[1],)
        if self.kind == "LayerNorm":
            y = functional.layer_norm(h, shape, weight + self.zero_centered, bias, EPS)
        else:
            y = functional.rms_norm(h, shape, weight + self.zero_centered, EPS)
        loss = (y * self.dy.double()).sum()
        if self.d_residual is not None:
            loss = loss + (h * self.d_residual.double()).sum()
        loss.backward()
        return h.detach(), y.detach(), h.grad, weight.grad, None if bias is None else bias.grad


def off(got, want):
    """Relative error, by norms; where the exact result is nothing, the absolute one."""
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-3)).item()


def fp8(fmt=E4M3, *, rowwise=True, columnwise=True):
    return Quantizer(fmt.dtype, fmt.max, torch.rand(()) * 8 + 8, torch.tensor(0.25), rowwise, columnwise)


def again(quantizer):
    """The same request with an amax of its own, as it was."""
    return quantizer if quantizer.amax is None else quantizer._replace(amax=quantizer.amax.clone())


def steps(got, want):
    """By how many FP8 numbers two FP8 tensors differ, an element."""
    a, b = (x.contiguous().view(torch.uint8).int() for x in (got, want))
    return (torch.where(a > 127, 128 - a, a) - torch.where(b > 127, 128 - b, b)).abs()


def assert_same_forms(got, want, quantizer):
    assert (got.rowwise_data is None, got.columnwise_data is None) == (not quantizer.rowwise, not quantizer.columnwise)
    assert (got.scale_inv is None) == (want.scale_inv is None)
    if got.rowwise_data is not None and got.columnwise_data is not None:
        assert torch.equal(got.columnwise_data.float(), got.rowwise_data.float().t())
    for ours, theirs in ((got.rowwise_data, want.rowwise_data), (got.columnwise_data, want.columnwise_data)):
        if ours is None:
            continue
        assert ours.dtype == theirs.dtype == quantizer.dtype
        if quantizer.scale is None:
            torch.testing.assert_close(ours, theirs, rtol=2 * ROUNDING[quantizer.dtype], atol=1e-5)
        else:
            apart = steps(ours, theirs)
            assert apart.max() <= 1
            assert (apart > 0).float().mean() <= 0.01 + 1.0 / apart.numel()
            assert torch.equal(got.scale_inv, want.scale_inv)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(70, 20), (9, 257), (1, 64)])
def test_definition_equals_float64(kind, dtype, residual, rows, columns):
    case = Case(kind, rows, columns, dtype, residual=residual)
    want = case.exact()
    h, stats, made = case.forward(norm, Quantizer(torch.float32))
    dh, dweight, dbias = case.backward(norm_backward, h, stats)
    assert h is case.x or residual
    assert h.dtype == dh.dtype == dtype
    assert torch.equal(h.double(), want[0])
    assert off(made.rowwise_data, want[1]) < 2e-6
    assert off(dh, want[2]) < ROUNDING[dtype]
    assert off(dweight, want[3]) < 2e-6
    assert dbias is None if want[4] is None else off(dbias, want[4]) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "run",
    [
        pytest.param((norm, norm_backward, {}), id="definition"),
        pytest.param((launch, launch_backward, {}), id="rows", marks=interpreted),
        pytest.param((launch, launch_backward, {"tile": SMALL}), id="tiles", marks=interpreted),
    ],
)
@pytest.mark.parametrize(("rows", "columns"), [(70, 20), (9, 257), (3, 1300)])
def test_weights_around_zero_are_added_to_one_in_float32(exact_casts, kind, run, rows, columns):
    forward, backward, how = run
    case = Case(kind, rows, columns, torch.bfloat16, zero_centered=True)
    want = case.exact()
    h, stats, made = case.forward(forward, Quantizer(torch.float32), **how)
    dh, dweight, dbias = case.backward(backward, h, stats, **how)
    assert off(made.rowwise_data, want[1]) < 2e-6  # 1 + weight in bfloat16 is 1e-3 off
    assert off(dh, want[2]) < ROUNDING[torch.bfloat16]
    assert off(dweight, want[3]) < 2e-6
    assert dbias is None if want[4] is None else off(dbias, want[4]) < 2e-6
    quantizer = fp8()
    ours = again(quantizer)
    *_, defined = case.forward(norm, quantizer)
    *_, cast = case.forward(forward, ours, **how)
    torch.testing.assert_close(ours.amax, quantizer.amax, rtol=1e-5, atol=0)
    assert_same_forms(cast, defined, quantizer)


@pytest.mark.parametrize("kind", KINDS)
def test_definition_equals_pytorch(kind):
    case = Case(kind, 9, 40, torch.bfloat16)
    h, _, made = case.forward(norm, Quantizer(torch.float32))
    if kind == "LayerNorm":
        want = functional.layer_norm(h.float(), (40,), case.weight.float(), case.bias.float(), EPS)
    else:
        want = functional.rms_norm(h.float(), (40,), case.weight.float(), EPS)
    torch.testing.assert_close(made.rowwise_data, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("residual", [True, False])
def test_the_references_gradients_equal_float64(kind, residual):
    case = Case(kind, 9, 40, torch.float32, residual=residual)
    want_h, want_normed, *want = case.exact()
    normed, stats = reference.norm(kind, want_h.float(), case.weight, case.bias, EPS)
    assert off(normed, want_normed) < 2e-6
    for got, exactly in zip(case.backward(reference.norm_backward, want_h.float(), stats), want, strict=True):
        assert got is None if exactly is None else got.dtype == torch.float32 and off(got, exactly) < 2e-6


@pytest.mark.parametrize(
    ("shape", "widest"),
    [(forward_shape, 4 / 3), (partial(backward_shape, centred=False), 4 / 3), (partial(backward_shape, centred=True), 2)],
)
def test_blocks_hold_a_row_and_little_more(shape, widest):
    assert shape(1280)[:2] == (1024, 256)
    for columns in range(2, WIDEST_ROW + 1, 7):
        block, rest, warps, programs = shape(columns)
        assert block & (block - 1) == rest & (rest - 1) == 0
        assert columns <= block + rest <= widest * columns
        assert columns > block or rest == 0
        assert warps in (1, 2, 4, 8, 16)
        assert programs is None or programs >= 1


@pytest.mark.long(lambda dtype, residual: residual == (dtype == torch.float32))
@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("tile", [None, SMALL], ids=["rows", "tiles"])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_kernels_equal_float64(exact_casts, kind, dtype, residual, tile, rows, columns):
    case = Case(kind, rows, columns, dtype, residual=residual, weight_dtype=torch.float32)
    want = case.exact()
    h, stats, made = case.forward(launch, Quantizer(torch.float32), tile=tile)
    dh, dweight, dbias = case.backward(launch_backward, h, stats, tile=tile)
    assert h is case.x or residual
    assert h.dtype == dh.dtype == dtype
    assert torch.equal(h.double(), want[0])
    assert off(made.rowwise_data, want[1]) < 2e-6
    # One element an element wide has no gradient but what rounding leaves of 1 − 1.
    assert off(dh, want[2]) < (ROUNDING[dtype] if columns > 1 else 1e-2)
    assert off(dweight, want[3]) < 2e-6
    assert dbias is None if want[4] is None else off(dbias, want[4]) < 2e-6


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize(("row", "column"), [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize(("rows", "columns"), SIZES[:3])
def test_forms_equal_the_definition(exact_casts, kind, fmt, row, column, rows, columns):
    case, quantizer = Case(kind, rows, columns, torch.bfloat16), fp8(fmt, rowwise=row, columnwise=column)
    ours = again(quantizer)
    want_h, want_stats, want = case.forward(norm, quantizer)
    h, stats, got = case.forward(launch, ours, tile=SMALL if column else None)
    assert torch.equal(h, want_h)
    torch.testing.assert_close(stats, want_stats, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.amax, quantizer.amax, rtol=1e-5, atol=0)
    assert_same_forms(got, want, quantizer)


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("column", [True, False])
def test_wide_results(exact_casts, kind, dtype, column):
    case, quantizer = Case(kind, 35, 50, torch.bfloat16), Quantizer(dtype, columnwise=column)
    _, _, want = case.forward(norm, quantizer)
    _, _, got = case.forward(launch, quantizer)
    assert_same_forms(got, want, quantizer)


@interpreted
@pytest.mark.parametrize("tile", [None, SMALL], ids=["rows", "tiles"])
def test_large_mean(exact_casts, tile):
    """A variance 10⁸ times smaller than the square of the mean, which sums of squares in float32 would lose."""
    case = Case("LayerNorm", 20, 200, torch.float32, residual=False, mean=30_000.0)
    want = case.exact()
    h, stats, made = case.forward(launch, Quantizer(torch.float32), tile=tile)
    dh, dweight, _ = case.backward(launch_backward, h, stats, tile=tile)
    # The mean itself is only known to 0.002 (of a deviation of 3), wherever it is kept in float32.
    assert off(stats[1], (h.double().var(1, correction=0) + EPS).rsqrt()) < 1e-4
    assert off(made.rowwise_data, want[1]) < 2e-3
    assert off(dh, want[2]) < 2e-3
    assert off(dweight, want[3]) < 2e-3


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [None, SMALL], ids=["rows", "tiles"])
def test_what_is_not_finite_stays_in_its_row(exact_casts, kind, tile):
    case, quantizer = Case(kind, 20, 70, torch.bfloat16), fp8(columnwise=tile is not None)
    clean_quantizer = again(quantizer)
    clean_h, clean_stats, clean = case.forward(launch, clean_quantizer, tile=tile)
    clean_dh, *_ = case.backward(launch_backward, clean_h, clean_stats, tile=tile)
    case.x[3, 5], case.x[11, 69], case.delta[17, 0] = torch.nan, torch.inf, -torch.inf
    h, stats, made = case.forward(launch, quantizer, tile=tile)
    dh, *_ = case.backward(launch_backward, h, stats, tile=tile)
    poisoned = torch.zeros(20, dtype=torch.bool)
    poisoned[[3, 11, 17]] = True
    for ours, before in ((h, clean_h), (dh, clean_dh), (made.rowwise_data, clean.rowwise_data)):
        assert torch.equal(ours.float()[~poisoned], before.float()[~poisoned])
    assert made.rowwise_data.float()[poisoned].isnan().any(1).all()
    assert quantizer.amax <= clean_quantizer.amax
    assert dh[poisoned].isnan().any(1).all()


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [None, SMALL], ids=["rows", "tiles"])
@pytest.mark.parametrize("strided", [lambda x: x.t().contiguous().t(), lambda x: torch.cat((x, x), 1)[:, : x.shape[1]]])
def test_any_strides(exact_casts, kind, tile, strided):
    case = Case(kind, 18, 40, torch.bfloat16)
    want_h, want_stats, want = case.forward(launch, Quantizer(torch.float32), tile=tile)
    want_back = case.backward(launch_backward, want_h, want_stats, tile=tile)
    for name in ("x", "delta", "dy", "d_residual"):
        setattr(case, name, strided(getattr(case, name)))
    h, stats, got = case.forward(launch, Quantizer(torch.float32), tile=tile)
    back = case.backward(launch_backward, strided(h), stats, tile=tile)
    assert torch.equal(h, want_h)
    assert torch.equal(stats, want_stats)
    assert torch.equal(got.rowwise_data, want.rowwise_data)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(back, want_back, strict=True))
    case.delta = None
    assert case.forward(launch, Quantizer(torch.float32), tile=tile)[0] is case.x


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [None, SMALL], ids=["rows", "tiles"])
def test_gradients_of_16_bits_are_rounded_once(exact_casts, kind, tile):
    case = Case(kind, 150, 80, torch.bfloat16)
    h, stats, _ = case.forward(launch, Quantizer(torch.float32), tile=tile)
    _, *want = case.backward(launch_backward, h, stats, tile=tile)
    rounded = partial(case.backward, h=h, stats=stats, dtype=torch.bfloat16)
    _, *got = rounded(launch_backward, tile=tile)
    _, *defined = rounded(norm_backward)
    for ours, exactly, theirs in zip(got, want, defined, strict=True):
        assert (ours is None) == (exactly is None) == (theirs is None)
        assert ours is None or torch.equal(ours, exactly.bfloat16())
        assert theirs is None or theirs.dtype == torch.bfloat16


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [None, SMALL], ids=["rows", "tiles"])
def test_frozen_weight(exact_casts, kind, tile):
    case = Case(kind, 12, 40, torch.bfloat16)
    h, stats, _ = case.forward(norm, Quantizer(torch.float32))
    want, _, _ = case.backward(launch_backward, h, stats, tile=tile)
    dh, dweight, dbias = case.backward(launch_backward, h, stats, tile=tile, want_weight=False)
    assert torch.equal(dh, want)
    assert dweight is None
    assert dbias is None
    assert case.backward(norm_backward, h, stats, want_weight=False)[1:] == (None, None)


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("column", [True, False])
@pytest.mark.parametrize("run", [(norm, norm_backward), (launch, launch_backward)], ids=["definition", "kernels"])
def test_no_rows(kind, column, run):
    case, quantizer = Case(kind, 0, 40, torch.bfloat16), fp8(columnwise=column)
    h, stats, made = case.forward(run[0], quantizer)
    dh, dweight, dbias = case.backward(run[1], h, stats)
    assert h.shape == dh.shape == made.rowwise_data.shape == (0, 40)
    assert stats.shape == ((2, 0) if kind == "LayerNorm" else (0,))
    assert torch.equal(dweight, torch.zeros(40))
    assert dbias is None if kind == "RMSNorm" else torch.equal(dbias, torch.zeros(40))
    assert torch.equal(made.scale_inv, reference.divide(1.0, quantizer.scale))
    assert quantizer.amax == 0.25


@pytest.mark.long(lambda dtype, row, column: dtype == torch.float16 or (dtype == torch.float32 and row != column))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("row", "column"), [(True, True), (True, False), (False, False)], ids=["both layouts", "rowwise", "amax alone"]
)
@pytest.mark.parametrize(
    ("run", "how"),
    [
        pytest.param(norm, {}, id="definition"),
        pytest.param(launch, {}, id="rows", marks=interpreted),
        pytest.param(launch, {"tile": SMALL}, id="tiles", marks=interpreted),
    ],
)
@pytest.mark.parametrize(("rows", "columns"), [(70, 20), (9, 257), (3, 1300), (0, 16)])
def test_what_is_stored_beside_is_what_is_cast(exact_casts, run, how, row, column, dtype, kind, rows, columns):
    case, quantizer = Case(kind, rows, columns, dtype, weight_dtype=torch.float32), fp8(rowwise=row, columnwise=column)
    high_precision_out = torch.full((rows, columns), torch.nan, dtype=dtype)
    h, stats, made = case.forward(run, quantizer, high_precision_out=high_precision_out, **how)
    want_h, want_stats, alone = case.forward(run, Quantizer(dtype), **how)
    assert torch.equal(h, want_h)
    assert torch.equal(stats, want_stats)
    assert torch.equal(high_precision_out, alone.high_precision)
    want = case.exact()[1]
    assert rows == 0 or off(high_precision_out, want) < ROUNDING[dtype]
    assert torch.equal(quantizer.amax, torch.maximum(torch.tensor(0.25), reference.amax(high_precision_out.float())))
    cast = reference.cast(high_precision_out.float(), quantizer.scale, quantizer.dtype, quantizer.fp8_max)
    for found, wanted in ((made.rowwise_data, cast if row else None), (made.columnwise_data, cast.t() if column else None)):
        assert (found is None) == (wanted is None)
        assert found is None or torch.equal(found.float(), wanted.float())
