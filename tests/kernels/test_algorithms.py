"""The choice of an algorithm without a GPU: what happens around the measurement. `tests/gpu` measures."""

import contextlib
from unittest import mock

import torch

from octavo.kernels import algorithms, cublaslt
from octavo.kernels.cublaslt import ProductShape

E4M3 = torch.float8_e4m3fn


class Product:
    """Two algorithms: one with other bits, one for which there is no memory."""

    def __init__(self, shape):
        self.shape, self.algorithms = shape, (0, 1)

    def __call__(self, number, a, b, scales, bias, out):
        if number:
            raise torch.OutOfMemoryError
        return out.fill_(123)


def test_a_comparison_without_memory_leaves_the_bits_of_pytorch():
    a, b = torch.randn(64, 32).bfloat16(), torch.randn(32, 64).bfloat16()
    operands = algorithms._Operands(a, b, torch.bfloat16, None, False, None)
    shape = ProductShape(0, 64, 64, 32, a.dtype, True, b.dtype, True, torch.bfloat16, False, False)
    no_device = mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext())
    with mock.patch.object(algorithms, "Product", Product), mock.patch.dict(algorithms._chosen), no_device:
        assert torch.equal(algorithms._measured(shape, operands, None), a @ b)
        assert algorithms._chosen[shape] is None


def test_a_workspace_without_algorithms_leaves_those_of_the_other(monkeypatch):
    calls = []

    def call(name, *arguments):
        calls.append(name)
        if name == "cublasLtMatmulAlgoGetHeuristic":
            if calls.count(name) == 2:
                raise cublaslt.RefusedError
            found, count = arguments[-2], arguments[-1]
            found[0].workspace = 4
            count._obj.value = 1

    monkeypatch.setattr(cublaslt, "_call", call)
    monkeypatch.setattr(cublaslt, "_handle", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    product = cublaslt.Product(ProductShape(0, 64, 64, 32, E4M3, True, E4M3, False, torch.bfloat16, False, False))
    assert [algorithm.workspace for algorithm in product.algorithms] == [4]
    assert calls.count("cublasLtMatmulPreferenceCreate") == calls.count("cublasLtMatmulPreferenceDestroy") == 2
