"""Training steps by the code for a GPU, its kernels interpreted, beside those of the reference on a CPU."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, MixtralConfig
from triton.runtime.interpreter import GridExecutor

import octavo
from as_gpu import as_gpu, backward

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy's, in the interpreter
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them on a GPU"),
]
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
    "tied": (
        LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **TINY),
        {"_embedding_rows", "_embedding_keys", "_embedding_sums"},
    ),
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


def train_block(recipe, run_backward):
    """The same of a block of a vision transformer, in float16: the interpreter multiplies bf16 as whole numbers."""
    torch.manual_seed(0)
    settings = {"self_attn_mask_type": "no_mask", "attn_input_format": "bshd", "hidden_dropout": 0, "attention_dropout": 0}
    block = octavo.nn.TransformerLayer(32, 64, 2, params_dtype=torch.float16, device="cpu", **settings)
    losses = []
    for _ in range(2):
        block.zero_grad()
        x = torch.randn(2, 17, 32, dtype=torch.float16)
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            loss = block(x).float().square().mean()
        run_backward(loss)
        losses.append(loss.item())
    return losses, {name: parameter.grad.float() for name, parameter in block.named_parameters()}


@pytest.fixture
def kernels(monkeypatch):
    """Names of the kernels that run."""
    seen, interpret = set(), GridExecutor.__call__

    def call(self, *arguments, **keywords):
        seen.add(self.fn.__name__)
        return interpret(self, *arguments, **keywords)

    monkeypatch.setattr(GridExecutor, "__call__", call)
    return seen


def compare(found, wanted, loss_tolerance, tolerance):
    (on_gpu, gradients_on_gpu), (losses, gradients) = found, wanted
    assert on_gpu == pytest.approx(losses, rel=loss_tolerance)
    for name, gradient in gradients.items():
        assert (gradients_on_gpu[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-7, name


@pytest.mark.long(lambda family, recipe: (family, recipe) not in (("mixtral", "delayed"), ("llama", "block")))
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", MODELS)
def test_a_gpus_training_equals_the_references(family, recipe, monkeypatch, exact_casts, kernels):
    config, expected = MODELS[family]
    wanted = train(config, RECIPES[recipe], torch.Tensor.backward)
    assert not kernels
    with as_gpu(monkeypatch):
        found = train(config, RECIPES[recipe], backward)
    assert kernels >= expected
    # Rowwise products are rounded to bf16 between their scales and their bias, which moves some values by a step of FP8.
    compare(found, wanted, 1e-5, 5e-2 if recipe == "rowwise" else 5e-3)


@pytest.mark.long(lambda recipe: recipe != "block")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpus_block_of_vision_equals_the_references(recipe, monkeypatch, exact_casts, kernels):
    wanted = train_block(RECIPES[recipe], torch.Tensor.backward)
    with as_gpu(monkeypatch):
        found = train_block(RECIPES[recipe], backward)
    assert kernels >= {"attention_forward", "backward_queries", "backward_keys"}
    compare(found, wanted, 5e-4, 5e-2)  # attention rounds its probabilities, as a GPU does and the CPU's does not
