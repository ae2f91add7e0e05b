"""The choice of an algorithm without a GPU: what happens around the measurement. `tests/gpu` measures."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from octavo.kernels import algorithms, cublaslt
from octavo.kernels.cublaslt import ProductShape
from octavo.process import process

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
    shape = ProductShape(0, 64, 64, 32, a.dtype, True, b.dtype, True, torch.bfloat16, False, False, False)
    no_device = mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext())
    idle = mock.patch.object(torch.cuda, "synchronize")
    with (
        mock.patch.object(algorithms, "Product", Product),
        mock.patch.dict(process.product_algorithms),
        no_device,
        idle as waited,
    ):
        assert torch.equal(algorithms._measured(shape, operands, None), a @ b)
        assert process.product_algorithms[shape] is None
        waited.assert_called_once_with()
        assert algorithms.choices()["cuda:0, 64 x 64 x 32, bfloat16 rows · bfloat16 rows → bfloat16"] == "PyTorch's"


WITH, WITHOUT = [(7, 4), (7, 4), (8, 4), (9, 0)], [(7, 0), (8, 0)]


@pytest.mark.parametrize(
    ("dynamic", "offers", "expected"),
    [
        (False, {2**20: WITH, 0: WITHOUT}, [(7, 4), (8, 4), (9, 0), (7, 0), (8, 0)]),
        (False, {2**20: WITH}, [(7, 4), (8, 4), (9, 0)]),  # none that needs no workspace
        (False, {2**20: WITHOUT, 0: WITHOUT}, WITHOUT),
        (True, {2**20: WITH, 0: WITHOUT}, [(7, 4), (8, 4)]),
        (True, {2**20: WITHOUT}, WITHOUT),  # of older GPUs
    ],
)
def test_algorithms_have_a_workspace_or_not_and_one_if_they_are_to_be_dynamic(dynamic, offers, expected, monkeypatch):
    asked, calls = [], []

    def call(name, *arguments):
        calls.append(name)
        if name == "cublasLtMatmulPreferenceSetAttribute":
            asked.append(arguments[2]._obj.value)
        if name == "cublasLtMatmulAlgoGetHeuristic":
            if asked[-1] not in offers:
                raise cublaslt.RefusedError
            found, count = arguments[-2], arguments[-1]
            for algorithm, (number, workspace) in zip(found, offers[asked[-1]], strict=False):
                algorithm.data[0], algorithm.workspace = number, workspace
            count._obj.value = len(offers[asked[-1]])

    monkeypatch.setattr(cublaslt, "_call", call)
    monkeypatch.setattr(cublaslt, "_handle", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    product = cublaslt.Product(ProductShape(0, 64, 64, 32, E4M3, True, E4M3, False, torch.bfloat16, False, False, dynamic))
    assert [(algorithm.data[0], algorithm.workspace) for algorithm in product.algorithms] == expected
    assert calls.count("cublasLtMatmulPreferenceCreate") == calls.count("cublasLtMatmulPreferenceDestroy") == len(asked)


@pytest.mark.parametrize("ranks", [None, 1, 2])
def test_products_of_several_ranks_are_dynamic(ranks, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: ranks is not None)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: ranks)
    monkeypatch.setattr(cublaslt, "library", object)
    monkeypatch.setattr(algorithms, "_is_aligned", lambda *tensors: True)
    a, b = torch.randn(1024, 1024).bfloat16(), torch.randn(1024, 1024).bfloat16()
    shape = algorithms._Operands(a, b, torch.bfloat16, None, False, None).shape()
    assert shape is not None
    assert shape.dynamic == (ranks == 2)
    with algorithms.without_collectives():
        shape = algorithms._Operands(a, b, torch.bfloat16, None, False, None).shape()
    assert shape is not None
    assert not shape.dynamic
