"""Layers with recipes of their own in a sharded model: what travels in FP8 follows them, and the numbers are one rank's."""

import pytest
import sharded
import torch
import torch.distributed as dist

import ranks
from octavo.fp8.recipe import RECIPES, CurrentScaling, DelayedScaling, RowwiseScaling
from octavo.fp8.scaling import states_of
from octavo.parallel import world

LAYERS = {
    "mixed": {
        "layers.0.*": None,
        "*.fc1": RowwiseScaling(),
        "*.proj": CurrentScaling(),
        "*.fc2": DelayedScaling(0, amax_history_len=3),
    },
    "one": {"layers.1.ffn.fc2": DelayedScaling(amax_history_len=3)},
}


def train(recipe, which):
    found, records, weights = sharded.train({}, torch.float32, recipe, 2, steps=4, layers=LAYERS[which])
    return [(loss, norm) for loss, norm, _, _ in found], found[-1][2], records, weights


@pytest.mark.long(lambda recipe: recipe == "current")
@pytest.mark.parametrize(("recipe", "which"), [("delayed", "mixed"), ("rowwise", "one"), ("current", "one")])
def test_two_ranks_equal_one(recipe, which):
    (one,) = ranks.run(1, train, recipe, which)
    for many in ranks.run(2, train, recipe, which):
        for (loss, norm), (wanted, wanted_norm) in zip(many[0], one[0], strict=True):
            assert loss == pytest.approx(wanted, rel=1e-2)
            assert norm == pytest.approx(wanted_norm, rel=5e-2)
        assert many[2].keys() == one[2].keys()
        for name, weight in one[3].items():
            torch.testing.assert_close(many[3][name], weight, rtol=0, atol=2e-2, msg=name)


def gathered(recipe, which):
    """The layers whose weights arrived in FP8."""
    from octavo.fp8.autocast import fp8_autocast

    if dist.is_initialized():
        world.init({})
    recipe = RECIPES[recipe]()
    model = sharded.build(torch.float32, recipe, settings={"reshard_after_forward": False}, layers=LAYERS[which])
    ids = torch.randint(0, 17, (2, 8))
    with fp8_autocast(fp8_recipe=recipe):
        loss = model(input_ids=ids, labels=ids).loss
    found = {name for name, state in states_of(model) if state.gathered is not None}
    loss.backward()
    return found


def test_what_has_one_scale_a_tensor_travels_in_fp8_whatever_the_others_do():
    for found in ranks.run(2, gathered, "delayed", "mixed"):
        parts = ("self_attention.qkv", "self_attention.proj", "ffn.fc2")
        blocks = {f"layers.{n}.{part}" for n in (1, 2) for part in parts}
        assert found == blocks | {"layers.0.self_attention.proj", "layers.0.ffn.fc2"}
    for found in ranks.run(2, gathered, "rowwise", "one"):
        assert found == {"layers.1.ffn.fc2"}
