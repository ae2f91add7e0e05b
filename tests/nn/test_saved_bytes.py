"""The bytes that layers state beside their autograd functions are those of the tensors that these save."""

import random

import pytest
import torch

import octavo
from octavo.fp8.autocast import microbatch
from octavo.fp8.buffers import ScaleBuffer
from octavo.fp8.quantizer import WeightUse, cached_weight_bytes
from octavo.fp8.recipe import RECIPES, DelayedScaling
from octavo.nn import LayerNormLinear, LayerNormMLP, Linear
from octavo.nn.linear import saved_by_linear, saved_by_norm_linear
from octavo.nn.mlp import MlpUse, saved_by_mlp

SCALES = 16
"""Bytes of a few scales of one number, which are not all stated."""
NAMES = [None, *RECIPES]


def sizes():
    """Rows, outputs and inputs, of which no two are equal and most are no multiples of 128."""
    return [16 * size for size in random.sample(range(9, 30), 3)]


def run(layer, x, name):
    with octavo.fp8_autocast(enabled=name is not None, fp8_recipe=RECIPES[name]() if name else None):
        return layer(x)


def nbytes(tensors):
    return sum(t.nbytes for t in tensors)


def by_layout(tensors):
    """Tensors by address, shape and strides: on a CPU both layouts of an FP8 matrix may have one storage."""
    return {(t.data_ptr(), tuple(t.shape), t.stride()): t for t in tensors if t is not None}


def saved_by(layer, y, cached=()):
    """Bytes of what the node of y saves; a tensor counts once, parameters and `cached` weights not at all."""
    saved = by_layout(y.grad_fn.saved_tensors)
    return nbytes(saved[key] for key in saved.keys() - by_layout([*layer.parameters(), *cached]).keys())


def use_of(params_dtype, *, cached=False):
    return WeightUse(2, params_dtype.itemsize, cached, gathered=False, caches_columnwise=params_dtype.itemsize == 4)


def input_of(rows, columns):
    return torch.randn(rows, columns, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_linear(name, dtype):
    rows, outer, inner = sizes()
    layer = Linear(inner, outer, params_dtype=dtype)
    x = input_of(rows, inner)
    stated = saved_by_linear(rows, (outer, inner), name and RECIPES[name](), use_of(dtype))
    if name is None:  # PyTorch's own function has names for what it saves
        packed = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.setdefault(t.data_ptr(), t), lambda t: t):
            run(layer, x, name)
        found = nbytes(t for t in packed.values() if all(t.data_ptr() != own.data_ptr() for own in layer.parameters()))
    else:
        found = saved_by(layer, run(layer, x, name))
    assert sum(map(sum, stated)) == pytest.approx(found, abs=SCALES)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_norm_linear(name, dtype, normalization):
    rows, outer, inner = sizes()
    layer = LayerNormLinear(inner, outer, normalization=normalization, params_dtype=dtype)
    stated = saved_by_norm_linear(rows, (outer, inner), name and RECIPES[name](), use_of(dtype), normalization)
    found = saved_by(layer, run(layer, input_of(rows, inner), name))
    assert sum(map(sum, stated)) == pytest.approx(found, abs=SCALES)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_mlp(name, dtype, recompute):
    rows, hidden, ffn = sizes()
    layer = LayerNormMLP(hidden, ffn, activation="swiglu", bias=False, checkpoint=recompute, params_dtype=dtype)
    recipe = name and RECIPES[name]()
    stated = saved_by_mlp(rows, MlpUse(hidden, ffn, 2 * ffn, recipe, recipe, use_of(dtype)), "LayerNorm", recompute=recompute)
    found = saved_by(layer, run(layer, input_of(rows, hidden), name))
    assert sum(map(sum, stated)) == pytest.approx(found, abs=SCALES)


@pytest.mark.parametrize("name", RECIPES)
def test_weights_that_micro_batches_share(name):
    rows, outer, inner = sizes()
    layer = Linear(inner, outer)
    with microbatch(first=True):
        y = run(layer, input_of(rows, inner), name)
    cached = layer.fp8_state.weight_cache
    assert sum(cached_weight_bytes(outer, inner, RECIPES[name]())) == pytest.approx(
        nbytes(by_layout(cached).values()), abs=SCALES
    )
    stated = saved_by_linear(rows, (outer, inner), RECIPES[name](), use_of(torch.float32, cached=True))
    assert stated.weight_copies == []
    assert sum(stated.activations) == pytest.approx(saved_by(layer, y, cached), abs=SCALES)


@pytest.mark.parametrize("layers", [1, 70, 130])
def test_buffers_of_scales(layers):
    model = octavo.transform(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(layers))))
    with octavo.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=5)):
        model(torch.randn(2, 16)).sum().backward()
    buffers = {id(slot.buffer): slot.buffer for layer in model for slot in layer.fp8_state.slots.values()}.values()
    found = nbytes(t for b in buffers for t in (b.scale, b.history, b.fp8_max, b.saturated))
    assert found == ScaleBuffer.bytes_of(2 * layers, 5) + ScaleBuffer.bytes_of(layers, 5)  # of forward, and of backward
