"""Sums of columns in Triton's interpreter against float64, alone and beside a cast."""

import pytest
import torch

from octavo.fp8.formats import E5M2
from octavo.fp8.quantizer import DenseOperand
from octavo.kernels import column_sum, gemm
from octavo.kernels.quantize import cast
from octavo.kernels.quantize.quantized import Quantizer

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs the kernel"
)
SHAPES = [(1, 1), (7, 130), (300, 5), (257, 129)]


@interpreted
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_sums_columns(shape):
    x = torch.randn(*shape)
    torch.testing.assert_close(column_sum.launch(x).double(), x.double().sum(0), rtol=1e-6, atol=1e-5)
    wide = torch.randn(shape[0], 2 * shape[1])
    torch.testing.assert_close(column_sum.launch(wide[:, ::2]), column_sum.launch(wide[:, ::2].contiguous()))


@interpreted
@pytest.mark.parametrize("shape", [(1, 1), (300, 5), (2, 257, 33), (3, 512, 16), (2, 0, 3), (0, 4, 3)])
def test_partial_sums_are_added_up(shape):
    parts = torch.randn(*shape)
    found = column_sum.launch_add_up(parts)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), parts.double().sum(-2), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(column_sum.add_up(parts), found, rtol=1e-6, atol=1e-4)
    assert torch.equal(column_sum.launch_add_up(parts.mT.contiguous().mT), found)


def test_of_nothing_it_is_zero():
    for sum_ in (column_sum.column_sums, column_sum.launch):
        assert torch.equal(sum_(torch.empty(0, 3)), torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_float32(dtype):
    x = torch.randn(50, 6).to(dtype)
    found = column_sum.column_sums(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double().sum(0), rtol=1e-6, atol=1e-5)


@interpreted
@pytest.mark.usefixtures("exact_casts")
@pytest.mark.parametrize("shape", [(4, 3), (264, 70), (128, 64)])
@pytest.mark.parametrize("row", [True, False])
def test_a_cast_leaves_partial_sums(shape, row, monkeypatch):
    monkeypatch.setattr(gemm, "is_native", lambda device: True)
    x, scale = torch.randn(*shape), torch.tensor(3.0)
    tiles = cast.row_tiles(x, True)
    partial = torch.full((tiles, shape[1]), torch.nan)
    quantizer = Quantizer(E5M2.dtype, E5M2.max, scale, rowwise=row, columnwise=True)
    for one, other in zip(cast.launch(x, quantizer, partial), cast.launch(x, quantizer), strict=True):
        assert one is other is None or torch.equal(one.float(), other.float())
    torch.testing.assert_close(partial.sum(0).double(), x.double().sum(0), rtol=1e-6, atol=1e-5)


@interpreted
@pytest.mark.usefixtures("exact_casts")
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("column", [True, False])
def test_a_dense_operand_sums_its_rows_in_any_layout(rows, column, monkeypatch):
    monkeypatch.setattr("octavo.kernels.quantize.cast.gemm.is_native", lambda device: True)
    x = torch.randn(rows, 5)
    operand = DenseOperand(x, column_sum=True)
    operand(Quantizer(E5M2.dtype, E5M2.max, torch.tensor(2.0), columnwise=column))
    torch.testing.assert_close(operand.column_sum().double(), x.double().sum(0), rtol=1e-6, atol=1e-5)
    assert cast.row_tiles(x, column) == (1 if rows == 8 and column else None)
