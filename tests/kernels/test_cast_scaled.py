"""Casts that choose their scales, bit for bit against the reference in Triton's interpreter; and products of their blocks."""

import pytest
import torch

from as_gpu import scaled_mm_of_blocks
from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels import gemm, reference
from octavo.kernels.quantize import cast_scaled
from octavo.kernels.quantize.cast_scaled import launch_amax, launch_blocks, launch_rows, launch_scale

interpreted = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs it"),
    # An infinite quotient becomes the largest float, as it should; NumPy tells of it.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    # Nor need it tell of a row of nothing else.
    pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning"),
]
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
SIZES = pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 20), (130, 257), (4, 70), (264, 129)])
LAYOUTS = pytest.mark.parametrize(("row", "column"), [(True, False), (False, True), (True, True)])


@pytest.fixture
def troubled(awkward):
    """`awkward` with rows, columns and blocks of zeros, of NaN, with infinities, and with the smallest and largest floats."""

    def make(rows, columns, dtype):
        x = awkward(rows, columns, dtype)
        if rows > 4:
            x[1], x[2], x[3] = 0, torch.nan, torch.randn(columns)
            x[3, 0], x[:, columns - 1], x[:, columns - 2] = torch.inf, 0, torch.nan
            x[4] = x[4].sign() * torch.finfo(dtype).tiny * 2.0**-3
            x[0, 5 : columns // 2] = torch.finfo(dtype).max
        if rows > 128:
            x[128:, 128:] = 0
        return x

    return make


def same(made, x, cast):
    """Data, scales and their inverses equal to the bit."""
    want, scale = cast(x)
    assert torch.equal(made.data.view(torch.uint8), want.view(torch.uint8))
    assert made.scale.dtype == made.scale_inv.dtype == torch.float32
    assert torch.equal(made.scale, scale)
    assert torch.equal(made.scale_inv, reference.divide(1.0, scale))


def check(made, x, cast, row, column):
    """Both layouts, or the absence of one."""
    along, across = made
    assert (along is not None) == row
    assert (across is not None) == column
    if row:
        same(along, x, cast)
    if column:
        same(across, x.t(), cast)


class TestKernels:
    pytestmark = interpreted

    @FORMATS
    @DTYPES
    @SIZES
    @LAYOUTS
    def test_rows(self, exact_casts, troubled, fmt, dtype, rows, columns, row, column):
        x = troubled(rows, columns, dtype)
        made = launch_rows(x, fmt.dtype, fmt.max, rowwise=row, columnwise=column)
        check(made, x, lambda m: reference.cast_rows(m, fmt.dtype, fmt.max), row, column)

    @SIZES
    @LAYOUTS
    def test_amaxes_of_columns_are_joined(self, exact_casts, troubled, rows, columns, row, column):
        """With those of other rows, which another rank has."""
        x, others = troubled(rows, columns, torch.float32), torch.randn(columns).abs() * 100
        made = launch_rows(
            x, E4M3.dtype, E4M3.max, rowwise=row, columnwise=column,
            join=lambda largest: largest.copy_(torch.maximum(largest, others.view(largest.shape))),
        )  # fmt: skip
        check((made[0], None), x, lambda m: reference.cast_rows(m, E4M3.dtype, E4M3.max), row, False)
        if column:
            whole = torch.cat((x, others[None]))
            of_whole = reference.scale_from_amax(reference.amax(whole, 0, keepdim=True), E4M3.max).t()
            assert torch.equal(made[1].scale, of_whole)
            data = reference.cast(x.t(), of_whole, E4M3.dtype, E4M3.max)
            assert torch.equal(made[1].data.view(torch.uint8), data.view(torch.uint8))

    def test_rows_longer_than_a_tile(self, exact_casts, troubled):
        x = troubled(5, 700, torch.bfloat16)
        made = launch_rows(x, E4M3.dtype, E4M3.max, rowwise=True, columnwise=False, row_tile=256, longest_row=512)
        check(made, x, lambda m: reference.cast_rows(m, E4M3.dtype, E4M3.max), True, False)

    @FORMATS
    @DTYPES
    @SIZES
    @LAYOUTS
    @pytest.mark.parametrize("high", [1, 128])
    def test_blocks(self, exact_casts, troubled, fmt, dtype, rows, columns, row, column, high):
        x = troubled(rows, columns, dtype)
        made = launch_blocks(x, fmt.dtype, fmt.max, high, rowwise=row, columnwise=column)
        check(made, x, lambda m: reference.cast_blocks(m, fmt.dtype, fmt.max, high), row, column)

    @FORMATS
    def test_powers_of_two(self, exact_casts, fmt):
        """Every exponent, with the mantissas at which the scale halves: 1.75 is both formats' own."""
        mantissas = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF])
        x = ((torch.arange(255) << 23)[:, None] + mantissas).to(torch.int32).view(torch.float32).reshape(-1, 1)
        made = launch_blocks(x, fmt.dtype, fmt.max, 1, rowwise=True, columnwise=False)
        check(made, x, lambda m: reference.cast_blocks(m, fmt.dtype, fmt.max, 1), True, False)

    def test_inverses_of_pieces_lie_as_the_products_read_them(self, exact_casts):
        along, across = launch_blocks(torch.randn(130, 257), E4M3.dtype, E4M3.max, 1, rowwise=True, columnwise=True)
        assert along.scale_inv.stride() == (1, 130)
        assert across.scale_inv.stride() == (1, 257)

    @pytest.mark.parametrize("rows", [70, 72])
    @pytest.mark.parametrize("view", ["rows apart", "transposed", "expanded"])
    def test_strides(self, exact_casts, awkward, view, rows):
        whole = awkward(rows, 88, torch.bfloat16)
        x = {"rows apart": whole[:, 7:70], "transposed": whole.t(), "expanded": whole[:1].expand(rows, -1)}[view]
        check(
            launch_rows(x, E4M3.dtype, E4M3.max, rowwise=True, columnwise=True),
            x,
            lambda m: reference.cast_rows(m, E4M3.dtype, E4M3.max),
            True,
            True,
        )
        check(
            launch_blocks(x, E4M3.dtype, E4M3.max, 1, rowwise=True, columnwise=True),
            x,
            lambda m: reference.cast_blocks(m, E4M3.dtype, E4M3.max, 1),
            True,
            True,
        )
        assert torch.equal(launch_amax(x, block=64), reference.amax(x))

    @DTYPES
    @pytest.mark.parametrize("shape", [(), (1, 1), (3, 5, 7), (130, 257), (0, 4)])
    def test_amax(self, dtype, shape):
        x = torch.randn(shape).to(dtype)
        assert torch.equal(launch_amax(x, block=256), reference.amax(x))
        if x.dim() and x.numel():
            x.view(-1)[0] = torch.nan
            assert torch.equal(launch_amax(x), reference.amax(x))
            x.view(-1)[-1] = -torch.inf
            assert torch.equal(launch_amax(x), reference.amax(x))

    @FORMATS
    @pytest.mark.parametrize("power_of_two", [False, True])
    def test_scales(self, fmt, power_of_two):
        amaxes = torch.cat(
            [
                torch.rand(2000) * torch.exp2(torch.randint(-140, 120, (2000,)).float()),
                torch.tensor([0.0, torch.inf, torch.nan, 1e-45, reference.FLOAT32_MAX, fmt.max / reference.FLOAT32_MAX]),
            ]
        )
        wanted = reference.scale_from_amax(amaxes, fmt.max, power_of_two=power_of_two)
        assert torch.equal(launch_scale(amaxes, fmt.max, power_of_two), wanted)
        assert launch_scale(torch.tensor(2.0), fmt.max).item() == fmt.max / 2


class TestElsewhere:
    """What a CPU gives from the same functions."""

    @LAYOUTS
    @pytest.mark.parametrize("shape", [(5, 300), (0, 4), (3, 0)])
    def test_rows_and_blocks(self, row, column, shape):
        x = torch.randn(shape)
        made = cast_scaled.rows(x, E4M3.dtype, E4M3.max, rowwise=row, columnwise=column)
        check(made, x, lambda m: reference.cast_rows(m, E4M3.dtype, E4M3.max), row, column)
        for high in (1, 128):
            made = cast_scaled.blocks(x, E4M3.dtype, E4M3.max, high, rowwise=row, columnwise=column)
            check(made, x, lambda m, high=high: reference.cast_blocks(m, E4M3.dtype, E4M3.max, high), row, column)

    def test_amax_and_scale(self):
        x = torch.randn(5, 7)
        assert torch.equal(cast_scaled.amax(x), reference.amax(x))
        for power_of_two in (False, True):
            wanted = reference.scale_from_amax(x.abs(), 448.0, power_of_two=power_of_two)
            assert torch.equal(cast_scaled.scale_from_amax(x.abs(), 448.0, power_of_two), wanted)


class TestProductsOfBlocks:
    """What is handed to cuBLAS on a Hopper GPU, played by its definition."""

    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch):
        monkeypatch.setattr(gemm, "is_native", lambda device: True)
        monkeypatch.setattr(gemm, "_takes_blocks", lambda device: True)
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm_of_blocks)

    @pytest.mark.parametrize(("m", "k", "n"), [(256, 384, 128), (200, 336, 150), (16, 640, 256), (1, 130, 1)])
    @pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.float16])
    @pytest.mark.parametrize("high", [1, 128])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("from_kernel", [False, True])
    def test_equal_dequantised_products(self, m, k, n, out_dtype, high, bias, from_kernel):
        a = reference.cast_blocks(torch.randn(m, k), E4M3.dtype, E4M3.max, 1)
        b = reference.cast_blocks(torch.randn(n, k), E4M3.dtype, E4M3.max, high)
        a, b = ((q, reference.divide(1.0, scale)) for q, scale in (a, b))
        if from_kernel:
            a, b = ((q, s.t().contiguous().t() if len(s) == len(q) else s) for q, s in (a, b))
        offset = torch.randn(n) if bias else None
        got = gemm.scaled_mm(*a, *b, out_dtype=out_dtype, bias=offset)
        want = reference.dequantize(*a) @ reference.dequantize(*b).t()
        want = want if offset is None else want + offset
        assert got.is_contiguous()
        torch.testing.assert_close(got, want.to(out_dtype), rtol=2e-2 if bias else 1e-2, atol=1e-1 if bias else 1e-4)

    def test_what_cublas_does_not_multiply_is_dequantised(self):
        a, b = torch.randn(256, 256), torch.randn(256, 256)
        for fmt, rows in ((E5M2, 1), (E4M3, 128)):
            q, scale = reference.cast_blocks(a, fmt.dtype, fmt.max, rows)
            other, other_scale = reference.cast_blocks(b, E4M3.dtype, E4M3.max, 128)
            scales = reference.divide(1.0, scale), reference.divide(1.0, other_scale)
            got = gemm.scaled_mm(q, scales[0], other, scales[1], out_dtype=torch.bfloat16)
            want = reference.dequantize(q, scales[0]) @ reference.dequantize(other, scales[1]).t()
            torch.testing.assert_close(got, want.bfloat16(), rtol=1e-2, atol=1e-1)
