"""Which FP8 weights of 16 bits keep their columnwise layout until backward, and that a trained model has the same numbers."""

from unittest import mock

import pytest
import torch
from driving import RECIPES
from transformers import LlamaConfig, MixtralConfig, Qwen3MoeConfig

import octavo
from building import built_model
from octavo import build
from octavo.fp8.columnwise import cache_columnwise
from octavo.fp8.quantizer import DenseOperand, LinearQuantizer
from octavo.fp8.scaling import states_of
from octavo.hardware import GIB, PART
from octavo.models.families import spec_of
from octavo.plan.saved import BlockRecipes, Setup, caches_columnwise, parameters

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
OF_A_BLOCK = 4 * 32 * 32 + 3 * 32 * 48
"""Elements of a block's matrices."""


def model_of(memory, **options):
    """A decoder on a GPU of so many bytes, as far as the rule is told."""
    with mock.patch.object(build, "memory_of_gpu", return_value=memory):
        return built_model(
            LlamaConfig(**SIZES), dtype=torch.bfloat16, params_dtype=torch.bfloat16, device="cpu", seed=3, **options
        )  # fmt: skip


def kept(model):
    """Names of layers that keep."""
    return {name for name, state in states_of(model) if state.caches_columnwise}


def test_they_are_kept_if_all_of_them_fit_into_a_twenty_fifth_of_the_memory():
    weights = 2 * OF_A_BLOCK
    blocks = {name for name, _ in states_of(model_of(None)) if name.startswith("layers")}
    assert len(blocks) == 8
    assert kept(model_of(PART * weights)) == blocks
    assert kept(model_of(PART * weights - 1)) == set()
    assert kept(model_of(None)) == set()


def test_layers_out_of_fp8_do_not_count():
    model = model_of(PART * OF_A_BLOCK, skip=["layers.1.*"])
    assert kept(model) == {name for name, _ in states_of(model) if name.startswith("layers.0.")}


def test_a_model_without_blocks_keeps_those_of_its_layers():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)).bfloat16()
    with mock.patch.object(build, "memory_of_gpu", return_value=GIB):
        assert kept(octavo.transform(model)) == {"0", "1"}


def test_weights_of_32_bits_are_none_of_its_business():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    with mock.patch.object(build, "memory_of_gpu", return_value=GIB):
        assert kept(octavo.transform(model)) == set()


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        MixtralConfig(**SIZES, num_key_value_heads=1, num_local_experts=4),
        Qwen3MoeConfig(
            **SIZES,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            mlp_only_layers=[1],
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_a_plan_and_its_run_decide_alike(config):
    spec = spec_of(config)
    model = built_model(config, dtype=torch.bfloat16, params_dtype=torch.bfloat16, device="cpu", seed=0)
    limit = PART * sum(state.weight.numel() for layer in model.layers for _, state in states_of(layer))
    blocks = (BlockRecipes(*("delayed",) * 4),) * spec.layers
    for memory, keeps in ((limit - 1, False), (limit, True), (None, False)):  # the last for one that moves to a CPU
        cache_columnwise(model.layers, memory)
        assert bool(kept(model)) == keeps
        setup = Setup(spec, parameters(spec), 1, 16, params_bytes=2, blocks=blocks, memory=memory)
        assert caches_columnwise(setup) == keeps


def train(model, recipe, steps):
    """Losses, gradients of the last step, and reads of weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    draw, losses = torch.Generator().manual_seed(5), []
    with mock.patch.object(LinearQuantizer, "_operand", side_effect=DenseOperand) as reads:
        for _ in range(steps):
            ids = torch.randint(64, (2, 16), generator=draw)
            optimizer.zero_grad()
            with octavo.fp8_autocast(fp8_recipe=RECIPES[recipe]()):
                losses.append(model(input_ids=ids, labels=ids).loss)
            losses[-1].backward()
            optimizer.step()
    return torch.stack(losses).detach(), [parameter.grad for parameter in model.parameters()], reads.call_count


@pytest.mark.parametrize("recompute", [False, "mlp", "selective", True])
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_losses_and_gradients_have_the_same_bits(recipe, recompute):
    losses, gradients, reads = train(model_of(GIB, recompute=recompute), recipe, 3)
    assert losses.isfinite().all()
    want_losses, want, twice = train(model_of(None, recompute=recompute), recipe, 3)
    assert torch.equal(losses, want_losses)
    spared = {False: 8, "mlp": 4}.get(recompute, 0)  # of the two blocks, in each step
    assert twice - reads == (0 if recipe == "rowwise" else 3 * spared)
    for ours, theirs in zip(gradients, want, strict=True):
        assert theirs.any()
        assert torch.equal(ours, theirs)
