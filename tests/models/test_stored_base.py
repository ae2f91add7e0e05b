"""A frozen base in FP8 bytes computes what a bf16 base computes whose weights are cast in each forward, to the bit."""

import copy

import pytest
import torch
from expectations import refused
from llamas import llama, tokens

import octavo
from octavo.fp8.scaling import states_of
from octavo.models.lora import adapted

RECIPES = {
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=4),
    "e4m3": octavo.recipe.DelayedScaling(
        fp8_format=octavo.recipe.Format.E4M3, amax_compute_algo="most_recent", amax_history_len=2
    ),
    "current": octavo.recipe.CurrentScaling(),
    "block": octavo.recipe.BlockScaling(),
}


def model_of(base, recipe, stored, *, recompute=False, **options):
    lora = octavo.LoRA(4, base="fp8" if stored else "params_dtype", **options)
    how = {"dtype": torch.bfloat16, "params_dtype": torch.bfloat16, "recompute": recompute}
    return octavo.transform(copy.deepcopy(base), recipe, lora=lora, **how)


def steps(model, recipe, count=3, seed=3):
    """Losses, gradients of each step, and the loss of an evaluation in high precision."""
    optimizer = torch.optim.AdamW(octavo.parameter_groups(model, 0.0), lr=3e-2)
    found = []
    for step in range(count):
        ids = tokens(2, 32, seed + step)
        for first in (True, False):  # two micro-batches
            with octavo.fp8_autocast(fp8_recipe=recipe):
                loss = model(input_ids=ids, labels=ids, is_first_microbatch=first).loss
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters() if p.requires_grad]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.long(lambda kind, recompute: (list(RECIPES).index(kind) % 2 == 0) == (recompute == "selective"))
@pytest.mark.parametrize("recompute", [False, True, "selective"])
@pytest.mark.parametrize("kind", RECIPES)
def test_losses_and_gradients_of_several_steps_are_those_of_weights_cast_in_each_forward(kind, recompute):
    recipe, base = RECIPES[kind], llama(hidden_size=160, intermediate_size=144, head_dim=40)
    models = [model_of(base, recipe, stored, recompute=recompute) for stored in (False, True)]
    assert adapted(models[0]).base == adapted(models[1]).base
    wanted, found = (steps(model, recipe) for model in models)
    assert len(wanted) == len(found)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    matrices = [(state.weight, state.stored) for name, state in states_of(models[1]) if name != "head"]
    assert len(matrices) == 8
    assert all(weight.dtype == torch.uint8 and how is not None for weight, how in matrices)
    in_bytes = sum(p.nbytes for p in models[1].layers.parameters() if not p.requires_grad)
    elements = sum(p.numel() for p in models[1].layers.parameters() if not p.requires_grad)
    assert in_bytes < 1.02 * elements  # norms are bf16


def test_layers_out_of_fp8_and_forwards_in_high_precision_read_the_values_of_the_bytes(tmp_path):
    recipe, base = RECIPES["current"], llama()
    model = octavo.transform(
        copy.deepcopy(base), recipe, dtype=torch.float32, lora=octavo.LoRA(4, base="fp8"), skip=["layers.0.*"]
    )
    kinds = {name: state.stored is not None for name, state in states_of(model) if name != "head"}
    assert {stored for name, stored in kinds.items() if name.startswith("layers.0.")} == {False}
    assert {stored for name, stored in kinds.items() if name.startswith("layers.1.")} == {True}
    rounded = octavo.transform(copy.deepcopy(base), recipe, dtype=torch.float32)
    with torch.no_grad():
        for (name, state), (_, other) in zip(states_of(model), states_of(rounded), strict=True):
            if state.stored is not None:
                before = other.weight.clone()
                other.weight.copy_(state.stored.values(state, torch.float32))
                assert 0 < (other.weight - before).abs().max() <= before.abs().max() / 16, name
    ids = tokens(2, 16)
    loss = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, rounded(input_ids=ids, labels=ids).loss, rtol=1e-6, atol=1e-6)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(input_ids=ids, labels=ids).loss, loss)
    octavo.save(tmp_path / "saved", model)
    octavo.load(tmp_path / "saved", twin)
    model.to(torch.bfloat16)  # rounds no byte and no scale
    first, second = (dict(each.named_parameters()) for each in (model, twin))
    assert all(torch.equal(first[name], second[name]) for name in first if first[name].dtype == torch.uint8)


def test_recipes_and_forwards_that_stored_weights_do_not_have_are_refused_by_name():
    base, ids = llama(), tokens(2, 16)
    refused(("rowwise scaling", "two FP8 copies"), model_of, base, octavo.recipe.RowwiseScaling(), True)
    refused("fp8.margin = 1", model_of, base, octavo.recipe.DelayedScaling(margin=1), True)
    refused("base", octavo.LoRA, 4, base="fp4")
    model = model_of(base, RECIPES["current"], True)
    with octavo.fp8_autocast(fp8_recipe=RECIPES["block"]):
        refused("by the recipe of octavo.transform", model, input_ids=ids, labels=ids)
    other = model_of(base, RECIPES["current"], False)
    refused("stored in FP8", model.load_state_dict, other.state_dict(), strict=False)
