"""Offloading on streams of its own: with copies as long as the blocks, gradients stay those of kept activations.

In bf16: in the first steps of FP8 a gradient is noise, and attention's backward adds in another order each time.
"""

import gc

import pytest
import torch

from building import built_model
from octavo.models.sources import load_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LAYERS, TOKENS, HIDDEN = 8, 4096, 1024
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 4096, "num_hidden_layers": LAYERS, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 4096, "max_position_embeddings": TOKENS,
}  # fmt: skip


def gradients(*, twice=False, **options):
    """Gradients of two micro-batches, and bytes on the GPU between the forward and the backward of the second."""
    model = built_model(
        load_config("llama-tiny", SIZES), dtype=torch.bfloat16, params_dtype=torch.float32, device="cuda", seed=1, **options
    )
    generator = torch.Generator("cuda").manual_seed(2)
    for _ in range(2):
        ids = torch.randint(4096, (2, TOKENS), generator=generator, device="cuda")
        before = torch.cuda.memory_allocated()
        loss = model(input_ids=ids, labels=ids).loss
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    del model, loss
    gc.collect()
    return found, held


@pytest.mark.parametrize("horizon", [1, 2, 100])
@pytest.mark.parametrize("recompute", [False, "mlp", "selective", True])
def test_gradients_are_those_of_kept_activations(recompute, horizon):
    kept, held = gradients(recompute=recompute)
    away, left = gradients(recompute=recompute, offload=True, horizon=horizon)
    for one, other in zip(kept, away, strict=True):
        # Attention's backward adds in another order each time; a race of copies would be off by the gradient itself.
        assert (one - other).norm() <= 0.02 * one.norm()
    # Each block's input alone is 16 MiB; those of all blocks but the last are on the host.
    assert held - left >= (LAYERS - 2) * 2 * TOKENS * HIDDEN * 2


@pytest.mark.parametrize("recompute", [False, "selective"])
def test_a_backward_twice(recompute):
    kept, _ = gradients(recompute=recompute, twice=True)
    away, _ = gradients(recompute=recompute, twice=True, offload=True)
    for one, other in zip(kept, away, strict=True):
        assert (one - other).norm() <= 0.02 * one.norm()


@pytest.mark.parametrize("recompute", [False, "selective", True])
def test_mlps_in_chunks(recompute):
    whole, _ = gradients(recompute=recompute)
    parts, _ = gradients(recompute=recompute, mlp_chunks=4)
    for one, other in zip(whole, parts, strict=True):
        assert (one - other).norm() <= 0.02 * one.norm()
