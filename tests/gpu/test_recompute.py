"""Recomputation on a GPU: losses, gradients and FP8 state of kept activations, to the last bit."""

import pytest
import torch

import octavo
from building import built_model
from octavo.fp8.scaling import state_records
from octavo.kernels.attention import flash
from octavo.models.sources import load_config
from octavo.parallel.world import repeat_bits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1000,
}  # fmt: skip
CONFIGS = {
    "llama": load_config("llama-tiny", SIZES | {"num_key_value_heads": 2}),
    "gpt_neox": load_config("pythia-160m", SIZES),
    "mixtral": load_config(
        "mixtral-8x7b", SIZES | {"num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 512}
    ),
}
RECIPES = {
    None: None,
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=4),
    "current": octavo.recipe.CurrentScaling(),
    "rowwise": octavo.recipe.RowwiseScaling(),
    "block": octavo.recipe.BlockScaling(),
}


@pytest.fixture(autouse=True)
def repeats():
    """Attention's backward, else, adds in another order each time. The folder's fixture ends it."""
    repeat_bits()


def train(config, recipe, **options):
    """By name: losses, gradients and FP8 state of three steps of two micro-batches."""
    model = built_model(config, dtype=torch.bfloat16, params_dtype=torch.float32, device="cuda", seed=3, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    seen = {}
    for step in range(3):
        for micro in range(2):
            ids = torch.randint(1000, (4, 128), generator=generator).cuda()
            with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                loss = model(input_ids=ids, labels=ids, is_first_microbatch=micro == 0).loss
            loss.backward()
            seen[f"loss {step} {micro}"] = loss.detach()
        seen |= {f"{name} {step}": parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return seen | state_records(model)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", CONFIGS)
def test_recomputation_changes_no_bit(family, recipe):
    kept = train(CONFIGS[family], RECIPES[recipe])
    # Experts are recomputed with their block alone; and without FlashAttention-4, selective recomputation takes another kernel.
    for recompute in (True, *(["mlp"] if family != "mixtral" else []), *(["selective"] if flash.missing() is None else [])):
        again = train(CONFIGS[family], RECIPES[recipe], recompute=recompute)
        for name, wanted in kept.items():
            assert torch.equal(again[name], wanted), (recompute, name, (again[name] - wanted).abs().max())
