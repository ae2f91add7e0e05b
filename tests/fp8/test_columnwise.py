"""Which FP8 weights of 16 bits keep their columnwise layout until backward, and that a trained model has the same numbers."""

from unittest import mock

import pytest
import torch
from driving import RECIPES
from transformers import LlamaConfig

import octavo
from octavo import build
from octavo.fp8.scaling import states_of
from octavo.hardware import GIB, PART

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
OF_A_BLOCK = 4 * 32 * 32 + 3 * 32 * 48
"""Elements of a block's matrices."""


def model_of(memory, **options):
    """A decoder on a GPU of so many bytes, as far as the rule is told."""
    with mock.patch.object(build, "memory_of_gpu", return_value=memory):
        return build.build_model(
            LlamaConfig(**SIZES), dtype=torch.bfloat16, params_dtype=torch.bfloat16, device="cpu", seed=3, **options
        )  # fmt: skip


def kept(model):
    """Names of layers that keep."""
    return {name for name, state in states_of(model) if state.keeps_columnwise}


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


def train(model, recipe, steps):
    """Losses, and gradients of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    draw, losses = torch.Generator().manual_seed(5), []
    for _ in range(steps):
        ids = torch.randint(64, (2, 16), generator=draw)
        optimizer.zero_grad()
        with octavo.fp8_autocast(fp8_recipe=RECIPES[recipe]()):
            losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("recompute", [False, "mlp", "selective", True])
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_losses_and_gradients_have_the_same_bits(recipe, recompute):
    losses, gradients = train(model_of(GIB, recompute=recompute), recipe, 3)
    assert losses.isfinite().all()
    want_losses, want = train(model_of(None, recompute=recompute), recipe, 3)
    assert torch.equal(losses, want_losses)
    for ours, theirs in zip(gradients, want, strict=True):
        assert theirs.any()
        assert torch.equal(ours, theirs)
