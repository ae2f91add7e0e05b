"""PyTorch's FSDP around a layer and around each of its parts: the steps of one rank."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import always_wrap_policy, size_based_auto_wrap_policy

import octavo
import ranks
from octavo.nn import LayerNormMLP, MultiheadAttention, TransformerLayer

pytestmark = [ranks.alone, pytest.mark.filterwarnings("ignore::FutureWarning")]

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


@pytest.mark.parametrize(("policy", "original"), [("always", True), ("by size", False)])
@pytest.mark.parametrize("kind", LAYERS)
def test_parts_that_fsdp_wraps_train_as_on_one_rank(kind, policy, original):
    for found in ranks.run(2, both, kind, policy, original):
        for wanted, losses, weights, own in found:
            assert losses == pytest.approx(wanted, rel=1e-5)
            if original:  # flattened ones stand in another order, and the last loss is by the weights of two steps
                torch.testing.assert_close(own, weights, rtol=1e-4, atol=1e-6)
