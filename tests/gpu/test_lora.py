"""Adapters beside frozen weights on a GPU: the loss and every gradient of float32 and of the CPU's FP8, in every recipe."""

import pytest
import torch

import octavo
from building import built_model
from octavo.fp8.recipe import RECIPES
from octavo.models.sources import load_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CONFIG = load_config(
    "llama-tiny",
    {
        "num_hidden_layers": 2, "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64,
    },
)  # fmt: skip
GPU = "cuda"


def built(device, recipe, base, dtype=torch.bfloat16, **options):
    """A model with adapters that are not 0, the same on every device."""
    make = {"dtype": dtype, "params_dtype": dtype, "device": device, "seed": 3}
    lora = octavo.LoRA(8, base=base, **options)
    model = built_model(CONFIG, **make, lora=lora, base_recipe=None if recipe is None else RECIPES[recipe]())
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                values = torch.randn(parameter.shape, generator=generator) * (0.03 if name.endswith("lora_B") else 0.06)
                parameter.copy_(values)
    return model


def gradients(model, recipe, ids, repeats=1):
    """The loss and the adapters' gradients of the last of several forwards and backwards."""
    for _ in range(repeats):
        model.zero_grad()
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=None if recipe is None else RECIPES[recipe]()):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(parameter.grad.isfinite().all() for parameter in trained.values())
    return loss.item(), {name: parameter.grad.double().cpu() for name, parameter in trained.items()}


def errors(found, wanted):
    return {name: ((found[name] - one).norm() / one.norm()).item() for name, one in wanted.items()}


def token_ids():
    return torch.randint(1000, (2, 128), generator=torch.Generator().manual_seed(torch.seed() % 1000))


CASES = [(None, "params_dtype")] + [
    (recipe, base) for recipe in RECIPES for base in ("params_dtype", "fp8") if (recipe, base) != ("rowwise", "fp8")
]


@pytest.mark.parametrize(("recipe", "base"), CASES)
def test_loss_and_gradients_of_adapters(recipe, base):
    ids = token_ids()
    exact_loss, exact = gradients(built("cpu", None, "params_dtype", torch.float32), None, ids)
    cpu_loss, cpu = gradients(built("cpu", recipe, base), recipe, ids, repeats=2)
    loss, found = gradients(built(GPU, recipe, base), recipe, ids.to(GPU), repeats=2)
    assert loss == pytest.approx(exact_loss, rel=5e-3)
    assert loss == pytest.approx(cpu_loss, rel=2e-3)
    assert max(errors(found, exact).values()) < (0.03 if recipe is None else 0.25)
    # Sums in another order round to other FP8 values here and there: the gradients differ from the CPU's by up to √2 of
    # either's error, and the errors are of one size.
    ours, theirs = errors(found, exact), errors(cpu, exact)
    assert all(ours[name] < 1.5 * theirs[name] + 0.01 for name in exact)


@pytest.mark.parametrize("recompute", [True, "selective"])
def test_recomputation_repeats_the_gradients(recompute):
    ids, found = token_ids().to(GPU), []
    for how in (False, recompute):
        lora = octavo.LoRA(8, base="fp8")
        make = {"dtype": torch.bfloat16, "params_dtype": torch.bfloat16, "device": GPU, "seed": 3, "recompute": how}
        model = built_model(CONFIG, **make, lora=lora, base_recipe=RECIPES["delayed"]())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("lora_B"):
                    parameter.fill_(0.01)
        found.append(gradients(model, "delayed", ids, repeats=2))
    assert found[0][0] == found[1][0]
    assert max(errors(found[1][1], found[0][1]).values()) < 1e-2  # attention's backward adds by atomic operations


def test_dropout_draws_for_each_adapter():
    ids = token_ids().to(GPU)
    with_dropout, without = (gradients(built(GPU, "delayed", "fp8", dropout=p), "delayed", ids) for p in (0.3, 0.0))
    assert with_dropout[0] == pytest.approx(without[0], rel=0.05)
    assert min(errors(with_dropout[1], without[1]).values()) > 0.02
