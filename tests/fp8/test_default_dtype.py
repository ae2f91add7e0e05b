"""PyTorch's default dtype and default device change no scale and no result: scripts set both around a whole training."""

import contextlib

import pytest
import torch

import octavo
from defaults import default_dtype

RECIPES = {
    "delayed": lambda: octavo.recipe.DelayedScaling(amax_history_len=3),
    "current": octavo.recipe.CurrentScaling,
    "rowwise": octavo.recipe.RowwiseScaling,
    "block": octavo.recipe.BlockScaling,
}
LAYERS = {
    "Linear": lambda **how: octavo.nn.Linear(32, 48, **how),
    "LayerNormLinear": lambda **how: octavo.nn.LayerNormLinear(32, 48, **how),
    "LayerNormMLP": lambda **how: octavo.nn.LayerNormMLP(32, 64, activation="swiglu", **how),
    "LayerNormMoE": lambda **how: octavo.nn.LayerNormMoE(32, 64, 1e-5, octavo.nn.Experts(4, 2), **how),
    "GroupedLinear": lambda **how: octavo.nn.GroupedLinear(2, 32, 48, **how),
    "TransformerLayer": lambda **how: octavo.nn.TransformerLayer(32, 64, 4, **how),
}


def trained(name, recipe, around):
    torch.manual_seed(0)
    layer = LAYERS[name](**({} if name == "LayerNormMoE" else {"params_dtype": torch.float32}))
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, 8, 32, generator=draw) * 2**step for step in range(3)]
    cotangent = torch.randn(2, 8, 64, generator=draw)
    splits = ([6, 10],) if name == "GroupedLinear" else ()
    results = {}
    with around:
        for step, x in enumerate(inputs):
            x = x.requires_grad_()
            with octavo.fp8_autocast(fp8_recipe=recipe):
                y = layer(x, *splits)
            y = y[1] if isinstance(y, tuple) else y
            y.backward(cotangent[..., : y.shape[-1]])
            results |= {f"y {step}": y.detach(), f"dx {step}": x.grad}
    results |= {key: parameter.grad for key, parameter in layer.named_parameters()}
    entries = octavo.fp8.inspect(layer)
    for key, entry in entries.items() if "input" not in entries else [("", entries)]:
        for operand, record in entry.items():
            results |= {f"{key} {operand} {what}": record[what] for what in ("scale", "amax_history")}
    return {key: value for key, value in results.items() if value is not None}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("around", ["bfloat16", "float64", "another device"])
def test_results_scales_and_histories_are_the_same(name, recipe, around):
    # No tensor of another device is there to compute with: the meta device shows one that was created by default.
    inside = torch.device("meta") if around == "another device" else default_dtype(getattr(torch, around))
    wanted = trained(name, RECIPES[recipe](), contextlib.nullcontext())
    found = trained(name, RECIPES[recipe](), inside)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key
