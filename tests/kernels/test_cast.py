"""The fused cast in Triton's interpreter, bit for bit against the reference."""

import pytest
import torch
from triton.runtime import interpreter

from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels import reference
from octavo.kernels.cast import launch

_TORCH = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture
def exact_casts(monkeypatch):
    """The interpreter's own conversions lose mantissa carries and subnormals; torch's are exact."""

    def convert(data, source, target, rounding):
        import numpy as np

        bits = torch.from_numpy(np.ascontiguousarray(data)).view(_TORCH[source.name])
        out = bits.float().to(_TORCH[target.name])
        return out.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[out.element_size()]).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs the kernel")
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (1, 1), (65, 129), (70, 20)])
def test_kernel_equals_reference(exact_casts, awkward, fmt, dtype, rows, columns):
    x = awkward(rows, columns, dtype)
    scale, amax = torch.rand(()) * 8, torch.tensor(0.25)
    q, q_t, scale_inv = launch(x, scale, amax, fmt.dtype, fmt.max, True)
    want = reference.cast(x, scale, fmt.dtype, fmt.max)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(q_t.view(torch.uint8), want.t().contiguous().view(torch.uint8))
    assert torch.equal(scale_inv, scale.reciprocal())
    assert torch.equal(amax, torch.maximum(torch.tensor(0.25), reference.amax(x)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs the kernel")
def test_records_nothing_when_not_asked(exact_casts):
    x = torch.randn(5, 40)
    q, q_t, _ = launch(x, torch.tensor(3.0), None, E4M3.dtype, E4M3.max, False)
    assert torch.equal(q.view(torch.uint8), reference.cast(x, torch.tensor(3.0), E4M3.dtype, E4M3.max).view(torch.uint8))
    assert q_t.numel() == 0
