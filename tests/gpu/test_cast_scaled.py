"""Casts that choose their scales, and products of blocks, on a GPU: against the reference and against dequantised products."""

import itertools

import pytest
import torch

from octavo.fp8.formats import E4M3, E5M2
from octavo.fp8.quantizer import quantize
from octavo.fp8.recipe import Cast, Granularity
from octavo.kernels import gemm, reference
from octavo.kernels.quantize import cast_scaled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
SIZES = pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (5, 20), (130, 257), (1000, 333), (1001, 336), (2048, 4096), (3, 40000)]
)
LAYOUTS = pytest.mark.parametrize(("row", "column"), [(True, False), (False, True), (True, True)])
PRODUCTS = pytest.mark.parametrize(("m", "k", "n"), [(4096, 2048, 1024), (200, 336, 80), (512, 1280, 384), (7, 19, 33)])


@pytest.fixture
def troubled(awkward):
    """`awkward` on the GPU with rows of zeros, of NaN, with an infinity, and of subnormal values."""

    def make(rows, columns, dtype):
        x = awkward(rows, columns, dtype)
        if rows > 4:
            x[1], x[2], x[3, 0] = 0, torch.nan, torch.inf
            x[4] = x[4].sign() * torch.finfo(dtype).tiny * 2.0**-3
        return x.cuda()

    return make


def same(made, x, cast):
    """Equal to the bit, but that any NaN equals any other: which of the two codes a NaN takes is the converter's choice."""
    want, scale = cast(x.cpu())
    got, nan = made.data.cpu(), want.float().isnan()
    assert got.shape == want.shape
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(got.view(torch.uint8)[~nan], want.contiguous().view(torch.uint8)[~nan])
    assert torch.equal(made.scale.cpu(), scale)
    assert torch.equal(made.scale_inv.cpu(), reference.divide(1.0, scale))


def check(made, x, cast, row, column):
    along, across = made
    assert (along is not None) == row
    assert (across is not None) == column
    if row:
        same(along, x, cast)
    if column:
        same(across, x.t(), cast)


@FORMATS
@DTYPES
@SIZES
@LAYOUTS
def test_rows(troubled, fmt, dtype, rows, columns, row, column):
    x = troubled(rows, columns, dtype)
    made = cast_scaled.rows(x, fmt.dtype, fmt.max, rowwise=row, columnwise=column)
    check(made, x, lambda m: reference.cast_rows(m, fmt.dtype, fmt.max), row, column)


@FORMATS
@DTYPES
@SIZES
@LAYOUTS
@pytest.mark.parametrize("high", [1, 128])
def test_blocks(troubled, fmt, dtype, rows, columns, row, column, high):
    x = troubled(rows, columns, dtype)
    made = cast_scaled.blocks(x, fmt.dtype, fmt.max, high, rowwise=row, columnwise=column)
    check(made, x, lambda m: reference.cast_blocks(m, fmt.dtype, fmt.max, high), row, column)


@FORMATS
def test_powers_of_two(fmt):
    """Every exponent, with the mantissas at which the scale halves: 1.75 is both formats' own."""
    mantissas = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF])
    x = ((torch.arange(255) << 23)[:, None] + mantissas).to(torch.int32).view(torch.float32).reshape(-1, 1).cuda()
    made = cast_scaled.blocks(x, fmt.dtype, fmt.max, 1, rowwise=True, columnwise=False)
    check(made, x, lambda m: reference.cast_blocks(m, fmt.dtype, fmt.max, 1), True, False)


@pytest.mark.parametrize("view", ["rows apart", "transposed", "expanded"])
def test_strides(troubled, view):
    whole = troubled(300, 500, torch.bfloat16)
    x = {"rows apart": whole[:, 7:400], "transposed": whole.t(), "expanded": whole[:1].expand(300, -1)}[view]
    made = cast_scaled.rows(x, E4M3.dtype, E4M3.max, rowwise=True, columnwise=True)
    check(made, x, lambda m: reference.cast_rows(m, E4M3.dtype, E4M3.max), True, True)
    made = cast_scaled.blocks(x, E4M3.dtype, E4M3.max, 1, rowwise=True, columnwise=True)
    check(made, x, lambda m: reference.cast_blocks(m, E4M3.dtype, E4M3.max, 1), True, True)
    assert torch.equal(cast_scaled.amax(x).cpu(), reference.amax(x.cpu()))


@DTYPES
@pytest.mark.parametrize("shape", [(), (1, 1), (3, 5, 7), (1000, 333), (4096, 4096), (0, 4)])
def test_amax(dtype, shape):
    x = torch.randn(shape).to(dtype)
    assert torch.equal(cast_scaled.amax(x.cuda()).cpu(), reference.amax(x))
    if x.dim() and x.numel():
        x.view(-1)[0] = torch.nan
        assert torch.equal(cast_scaled.amax(x.cuda()).cpu(), reference.amax(x))
        x.view(-1)[-1] = -torch.inf
        assert torch.equal(cast_scaled.amax(x.cuda()).cpu(), reference.amax(x))


@FORMATS
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales(fmt, power_of_two):
    amaxes = torch.rand(5000) * torch.exp2(torch.randint(-140, 120, (5000,)).float())
    edges = [0.0, torch.inf, torch.nan, 1e-45, 1e-40, reference.FLOAT32_MAX, fmt.max / reference.FLOAT32_MAX]
    amaxes = torch.cat([amaxes, torch.tensor(edges)])
    wanted = reference.scale_from_amax(amaxes, fmt.max, power_of_two=power_of_two)
    assert torch.equal(cast_scaled.scale_from_amax(amaxes.cuda(), fmt.max, power_of_two).cpu(), wanted)


@pytest.mark.parametrize("granularity", list(Granularity))
def test_quantize_gives_what_a_cpu_gives(troubled, granularity):
    x = troubled(300, 500, torch.bfloat16)
    x[x.isnan()] = 1
    on_gpu, scale_on_gpu = quantize(x, Cast(E4M3, granularity))
    on_cpu, scale_on_cpu = quantize(x.cpu(), Cast(E4M3, granularity))
    for (got, got_inv), (want, want_inv) in ((on_gpu.rowwise, on_cpu.rowwise), (on_gpu.columnwise, on_cpu.columnwise)):
        assert torch.equal(got.cpu().view(torch.uint8), want.contiguous().view(torch.uint8))
        assert torch.equal(got_inv.cpu(), want_inv)
    assert torch.equal(scale_on_gpu.cpu(), scale_on_cpu)


def near(got, a, b, bias=None):
    """The relative error of a product against dequantised operands multiplied in float32."""
    want = reference.dequantize(*a).double() @ reference.dequantize(*b).double().t()
    want = want if bias is None else want + bias.double()
    error = ((got.double() - want).norm() / want.norm()).item()
    in_bf16 = got.dtype == torch.bfloat16 or a[1].shape == (len(a[0]), 1)  # where a row is one piece, it is the row's scale
    # Hopper keeps 14 bits of each sum of 128 products, and rows of a block may be far smaller than the largest.
    limit = 4e-3 if in_bf16 else 1e-3 if got.dtype == torch.float16 else 5e-4
    assert got.shape == want.shape
    assert got.is_contiguous()
    assert error < limit, error


def operands(m, k, n):
    """(x, its transpose), (w, its transpose), (dy, its transpose) in FP8 blocks, with magnitudes that differ between blocks."""
    x, w, dy = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        * torch.exp2(torch.randint(-8, 2, (shape[0], 1), device="cuda").float()).bfloat16()
        for shape in ((m, k), (n, k), (m, n))
    )
    x = x * torch.exp2(torch.arange(k, device="cuda") // 128 % 5).bfloat16()
    pieces = [cast_scaled.blocks(t, E4M3.dtype, E4M3.max, 1, rowwise=True, columnwise=True) for t in (x, dy)]
    square = cast_scaled.blocks(w, E4M3.dtype, E4M3.max, 128, rowwise=True, columnwise=True)
    return tuple(tuple(made[:2] for made in pair) for pair in (pieces[0], square, pieces[1]))


def three(m, k, n):
    """Left and right operands of output, input gradient and weight gradient."""
    (x, x_t), (w, w_t), (dy, dy_t) = operands(m, k, n)
    return (x, w), (dy, w_t), (dy_t, x_t)


@PRODUCTS
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_products_of_blocks(m, k, n, out_dtype):
    for a, b in three(m, k, n):
        near(gemm.scaled_mm(*a, *b, out_dtype=out_dtype, precise=True), a, b)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_bias_and_scales_that_lie_otherwise(out_dtype):
    a, b = three(512, 1280, 384)[0]
    bias = torch.randn(384, device="cuda")
    other = (a[0], a[1].contiguous())
    assert other[1].stride() != a[1].stride()
    product = gemm.scaled_mm(*a, *b, out_dtype=out_dtype, bias=bias)
    near(product, a, b, bias)
    assert torch.equal(product, gemm.scaled_mm(*other, *b, out_dtype=out_dtype, bias=bias))
    near(gemm.scaled_mm(*b, *a, out_dtype=out_dtype), b, a)  # squares on the left: no such product, so in bf16


def test_hopper_multiplies_blocks_in_fp8(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    assert gemm._takes_blocks(torch.device("cuda", 0))

    def refused(*_):
        raise AssertionError("dequantised")

    monkeypatch.setattr(reference, "dequantize", refused)
    for (m, k, n), out_dtype in itertools.product([(256, 512, 384), (200, 336, 80)], [torch.bfloat16, torch.float32]):
        for a, b in three(m, k, n):
            assert gemm.scaled_mm(*a, *b, out_dtype=out_dtype).isfinite().all()


@pytest.mark.filterwarnings("ignore")
def test_compiled_products_of_blocks():
    for a, b in three(256, 1280, 384):
        compiled = torch.compile(lambda *t: gemm.scaled_mm(*t, out_dtype=torch.bfloat16), fullgraph=True)
        assert torch.equal(compiled(*a, *b), gemm.scaled_mm(*a, *b, out_dtype=torch.bfloat16))
