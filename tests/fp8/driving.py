"""How the tests drive the library, and how they compare what it says with the restatement."""

from __future__ import annotations

import copy

import numpy as np
import torch
from restatement import DelayedState

import octavo

OPERANDS = ("input", "weight", "grad_output")


def array(tensor):
    """A tensor as float32, exactly (bf16 values are float32 values)."""
    return tensor.detach().float().numpy()


def bits(value):
    """The bit patterns of float32 values."""
    if isinstance(value, torch.Tensor):
        assert value.dtype == torch.float32, value.dtype
        value = value.detach().numpy()
    return np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)


def same_bits(one, other):
    """Whether two tensors of any dtype have the same bytes, shape and dtype (None equals None)."""
    if one is None or other is None:
        return one is other
    as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*as_bytes)


def delayed(length=4, algorithm="max", margin=0, hybrid=True):
    """A `DelayedScaling` of the library."""
    fmt = octavo.recipe.Format.HYBRID if hybrid else octavo.recipe.Format.E4M3
    return octavo.recipe.DelayedScaling(
        margin=margin, fp8_format=fmt, amax_history_len=length, amax_compute_algo=algorithm, reduce_amax=True
    )


RECIPES = {
    "delayed": delayed,
    "current": lambda: octavo.recipe.CurrentScaling(),
    "powers of two": lambda: octavo.recipe.CurrentScaling(use_power_2_scales=True),
    "rowwise": lambda: octavo.recipe.RowwiseScaling(),
    "block": lambda: octavo.recipe.BlockScaling(),
}


def snapshot(module):
    """Everything that `inspect` says, held still: {"fc1.input": (scale bits, history bits)} or {"input": …}."""
    report = octavo.fp8.inspect(module)
    if "weight" in report:
        report = {"": report}
    return {
        f"{name}.{operand}".lstrip("."): (
            bits(entry["scale"]).tolist(),
            None if entry["amax_history"] is None else bits(entry["amax_history"]).tolist(),
        )
        for name, operands in report.items()
        for operand, entry in operands.items()
    }


def check_state(entry, state: DelayedState, where=""):
    """One entry of `inspect` equals the restated state, bit for bit."""
    assert entry["format"] == state.format.name
    assert bits(entry["amax_history"]).tolist() == bits(state.history).tolist(), f"{where}: history, want {state.history}"
    assert bits(entry["scale"]).tolist() == bits(state.scale).tolist(), f"{where}: {entry['scale']} is not {state.scale}"


def check_states(module, states, where=""):
    """All three operands of a module with one matrix."""
    report = octavo.fp8.inspect(module)
    for name in OPERANDS:
        check_state(report[name], states[name], f"{where} {name}")


def step(layer, x, g, recipe, **arguments):
    """Forward in an autocast, backward after it. → (y, dx) with the parameters' gradients left in place."""
    x = x.detach().clone().requires_grad_()
    with octavo.fp8_autocast(fp8_recipe=recipe):
        y = layer(x, **arguments)
    y.backward(g)
    return y.detach(), x.grad


def gradients(module):
    """{name: gradient} of the parameters, taken out."""
    found = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    return found


def warmed(layer, recipe, rows=6, steps=2, seed=7):
    """A copy of the layer after some steps, with no gradients left."""
    layer = copy.deepcopy(layer)
    draw = torch.Generator().manual_seed(seed)
    width = getattr(layer, "in_features", None) or layer.hidden_size
    for _ in range(steps):
        x = torch.randn(rows, width, generator=draw).to(next(layer.parameters()).dtype)
        with octavo.fp8_autocast(fp8_recipe=recipe):
            y = layer(x.requires_grad_())
        y.backward(torch.randn(y.shape, generator=draw).to(y.dtype))
    layer.zero_grad(set_to_none=True)
    return layer
