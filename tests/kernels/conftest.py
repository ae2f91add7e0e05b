"""What tests of the Triton kernels share: casts that are exact in the interpreter."""

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

_TORCH = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


@pytest.fixture(autouse=True)
def maximum_of_a_gpu(monkeypatch):
    """Of a number and NaN a GPU's maximum is the number, the interpreter's NaN."""
    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_maxnumf", lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    )


@pytest.fixture
def exact_casts(monkeypatch):
    """The interpreter's own conversions lose mantissa carries and subnormals; torch's are exact, and saturate as a GPU's do."""

    def convert(data, source, target, rounding):
        bits = torch.from_numpy(np.ascontiguousarray(data)).view(_TORCH[source.name])
        to = _TORCH[target.name]
        limit = torch.finfo(to).max if to.itemsize == 1 else torch.inf
        out = bits.float().clamp(-limit, limit).to(to)
        return out.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[out.element_size()]).numpy().reshape(data.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def fused_fma(monkeypatch):
    """The interpreter rounds the product of `tl.fma`; a GPU rounds its sum alone. In float64 a product of float32 is exact."""

    def fma(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(exact.astype(x.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
