"""Training steps by the code for a GPU, its kernels interpreted, beside those of the reference on a CPU."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, MixtralConfig
from triton.runtime.interpreter import GridExecutor

import octavo
from as_gpu import as_gpu, backward

RECIPES = {
    None: None,
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="max"),
    "current": octavo.recipe.CurrentScaling(),
    "rowwise": octavo.recipe.RowwiseScaling(),
    "block": octavo.recipe.BlockScaling(),
}
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS = {
    "llama": (LlamaConfig(num_key_value_heads=1, **TINY), {"norm_rows", "backward_rows", "_split_rotate", "_join_rotated"}),
    "gpt-neox": (GPTNeoXConfig(**TINY), {"norm_rows", "backward_rows", "activation_tiles", "_add_up"}),
    "mixtral": (
        MixtralConfig(num_key_value_heads=1, num_local_experts=4, output_router_logits=True, **TINY),
        {"_gather_tiles", "_add_copies", "activation_tiles"},
    ),
}


def train(config, recipe, run_backward):
    """Losses and the last gradients of two steps in bf16."""
    torch.manual_seed(0)
    model = octavo.transform(AutoModelForCausalLM.from_config(config), dtype=torch.bfloat16, device="cpu")
    ids = torch.randint(0, 64, (2, 16))
    losses = []
    for _ in range(2):
        model.zero_grad()
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            loss = model(input_ids=ids, labels=ids).loss
        run_backward(loss)
        losses.append(loss.item())
    return losses, {name: parameter.grad.float() for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs it on a GPU")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", MODELS)
def test_a_gpus_training_equals_the_references(family, recipe, monkeypatch, exact_casts):
    config, kernels = MODELS[family]
    losses, gradients = train(config, RECIPES[recipe], torch.Tensor.backward)
    seen = set()
    interpret = GridExecutor.__call__

    def call(self, *arguments, **keywords):
        seen.add(self.fn.__name__)
        return interpret(self, *arguments, **keywords)

    monkeypatch.setattr(GridExecutor, "__call__", call)
    with as_gpu(monkeypatch):
        on_gpu, gradients_on_gpu = train(config, RECIPES[recipe], backward)
    assert seen >= kernels
    assert on_gpu == pytest.approx(losses, rel=1e-5)
    # Rowwise products are rounded to bf16 between their scales and their bias, which moves some values by a step of FP8.
    tolerance = 5e-2 if recipe == "rowwise" else 5e-3
    for name, wanted in gradients.items():
        assert (gradients_on_gpu[name] - wanted).norm() <= tolerance * wanted.norm() + 1e-7, name
