"""PyTorch's FSDP around a layer and around each of its parts: the steps of one rank."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import always_wrap_policy, size_based_auto_wrap_policy

import octavo
import ranks
from octavo.fp8.recipe import Operand
from octavo.fp8.scaling import states_of
from octavo.nn import LayerNormMLP, MultiheadAttention, TransformerLayer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

POLICIES = {"always": always_wrap_policy, "by size": functools.partial(size_based_auto_wrap_policy, min_num_params=100)}
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
LAYERS = {
    "layer": lambda: TransformerLayer(32, 64, 4, **QUIET),
    "parallel layer": lambda: TransformerLayer(32, 64, 4, parallel_attention_mlp=True, **QUIET),
    "attention": lambda: MultiheadAttention(32, 4, attention_dropout=0.0, input_layernorm=True),
    "MLP": lambda: LayerNormMLP(32, 64),
}


def steps(model, fp8):
    """Losses of three steps of SGD, each from the weights of the one before."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(step))
        with octavo.fp8_autocast(enabled=fp8, fp8_recipe=octavo.recipe.CurrentScaling()):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def both(kind, policy, original):
    """Losses and weights of one rank, and of FSDP around the parts, in high precision and in FP8."""
    octavo.init({})
    found = []
    for fp8 in (False, True):
        torch.manual_seed(0)
        plain = nn.Sequential(LAYERS[kind]())
        torch.manual_seed(0)
        parts = nn.Sequential(LAYERS[kind]())
        options = {"auto_wrap_policy": POLICIES[policy], "use_orig_params": original, "device_id": torch.device("cpu")}
        sharded = FullyShardedDataParallel(parts, **options)
        assert sum(isinstance(module, FullyShardedDataParallel) for module in sharded.modules()) > 1
        losses = steps(plain, fp8), steps(sharded, fp8)
        with FullyShardedDataParallel.summon_full_params(sharded):
            weights = [parameter.detach().clone() for parameter in sharded.parameters()]
        found.append(
            (*losses, torch.cat([p.detach().flatten() for p in plain.parameters()]), torch.cat([w.flatten() for w in weights]))
        )
    return found


@pytest.mark.long(lambda kind, original: list(LAYERS).index(kind) % 2 == original)
@pytest.mark.parametrize(("policy", "original"), [("always", True), ("by size", False)])
@pytest.mark.parametrize("kind", LAYERS)
def test_parts_that_fsdp_wraps_train_as_on_one_rank(kind, policy, original):
    for found in ranks.run(2, both, kind, policy, original):
        for wanted, losses, weights, own in found:
            assert losses == pytest.approx(wanted, rel=1e-5)
            if original:  # flattened ones stand in another order, and the last loss is by the weights of two steps
                torch.testing.assert_close(own, weights, rtol=1e-4, atol=1e-6)


def first_step(policy, original):
    """Losses and gradients of a first step by both recipes."""
    octavo.init({})
    found = []
    for recipe in (octavo.recipe.DelayedScaling(amax_history_len=2), octavo.recipe.CurrentScaling()):
        model = of_small_gradients(policy, original)
        found.append(backward_of_one(model, recipe))
    return found


def of_small_gradients(policy, original):
    torch.manual_seed(0)
    options = {"auto_wrap_policy": POLICIES[policy], "use_orig_params": original, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(nn.Sequential(LAYERS["MLP"](), LAYERS["layer"]()), **options)


def backward_of_one(model, recipe):
    x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(1))
    with octavo.fp8_autocast(fp8_recipe=recipe):
        loss = model(x).square().mean() * 1e-6
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_first_step_of_delayed_scaling_has_the_bits_of_current_scaling(policy, original):
    for delayed, current in ranks.run(2, first_step, policy, original):
        assert len(delayed) == len(current) > 1
        assert all(map(torch.equal, delayed, current))


def loaded(kind):
    """By operand, whether any has begun behind a step, and behind a load of the model's own state."""
    octavo.init({})
    model = of_small_gradients("by size", original=True)
    backward_of_one(model, octavo.recipe.DelayedScaling(amax_history_len=2))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType[kind]):
        state = model.state_dict()
        before = begun(model)
        model.load_state_dict(state)
    return before, begun(model)


def begun(model):
    found = {operand: [] for operand in Operand}
    for _, state in states_of(model):
        for operand, slot in state.slots.items():
            found[operand].append(bool(slot.begun))
    return found


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_weights_that_are_loaded_begin_anew(kind):
    for before, after in ranks.run(2, loaded, kind):
        assert all(map(all, before.values()))
        assert not any(after.pop(Operand.WEIGHT))
        assert all(map(all, after.values()))
