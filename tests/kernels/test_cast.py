"""The fused cast in Triton's interpreter, bit for bit against the reference."""

import pytest
import torch

from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels import reference
from octavo.kernels.quantize.cast import launch, launch_transpose, transpose
from octavo.kernels.quantize.quantized import Quantizer


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs the kernel")
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (1, 1), (65, 129), (70, 20)])
def test_kernel_equals_reference(exact_casts, awkward, fmt, dtype, rows, columns):
    x = awkward(rows, columns, dtype)
    scale, amax = torch.rand(()) * 8, torch.tensor(0.25)
    made = launch(x, Quantizer(fmt.dtype, fmt.max, scale, amax, columnwise=True))
    (q, scale_inv), (q_t, _) = made.rowwise, made.columnwise
    want = reference.cast(x, scale, fmt.dtype, fmt.max)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(q_t.view(torch.uint8), want.t().contiguous().view(torch.uint8))
    assert torch.equal(scale_inv, scale.reciprocal())
    assert torch.equal(amax, torch.maximum(torch.tensor(0.25), reference.amax(x)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs the kernel")
def test_records_nothing_when_not_asked(exact_casts):
    x = torch.randn(5, 40)
    made = launch(x, Quantizer(E4M3.dtype, E4M3.max, torch.tensor(3.0)))
    q, _ = made.rowwise
    assert torch.equal(q.view(torch.uint8), reference.cast(x, torch.tensor(3.0), E4M3.dtype, E4M3.max).view(torch.uint8))
    assert made.columnwise_data is made.columnwise_scale_inv is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs the kernel")
@pytest.mark.parametrize("rows", [132, 7], ids=["in fours", "ragged"])
def test_the_transposed_layout_alone(exact_casts, awkward, rows):
    x, scale, amax = awkward(rows, 80, torch.bfloat16), torch.tensor(3.0), torch.tensor(0.25)
    made = launch(x, Quantizer(E4M3.dtype, E4M3.max, scale, amax, rowwise=False, columnwise=True))
    q_t, scale_inv = made.columnwise
    assert made.rowwise_data is made.rowwise_scale_inv is None
    want = reference.cast(x, scale, E4M3.dtype, E4M3.max).t().contiguous()
    assert torch.equal(q_t.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scale_inv, scale.reciprocal())
    assert torch.equal(amax, torch.maximum(torch.tensor(0.25), reference.amax(x)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs the kernel")
@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (4, 4), (132, 72), (260, 200), (0, 8)])
def test_transposes_every_byte(rows, columns):
    q = torch.randint(256, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    part = torch.empty(rows, columns + 12, dtype=torch.uint8).view(q.dtype)[:, 8 : 8 + columns]
    part.copy_(q)
    for out in (
        launch_transpose(q, q.new_empty(columns, rows)),
        launch_transpose(part, q.new_empty(columns, rows)),
        transpose(q),
    ):
        assert out.is_contiguous()
        assert torch.equal(out.view(torch.uint8), q.view(torch.uint8).t())
    beside = torch.full((columns, 3 * rows), 7, dtype=torch.uint8).view(q.dtype)
    launch_transpose(q, beside[:, rows : 2 * rows])
    beside = beside.view(torch.uint8)
    assert torch.equal(beside[:, rows : 2 * rows], q.view(torch.uint8).t())
    assert (beside[:, :rows] == 7).all()
    assert (beside[:, 2 * rows :] == 7).all()
