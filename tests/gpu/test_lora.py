"""Adapters beside frozen weights on a GPU: the loss and every gradient of float32 and of the CPU's FP8, in every recipe."""

import pytest
import torch
from transformers import MixtralConfig

import octavo
from building import built_model
from octavo.fp8.recipe import RECIPES
from octavo.models.sources import load_config
from octavo.nn.arguments import Draws
from octavo.nn.expert_lora import StackedAdapters
from octavo.nn.experts import StackedExperts
from octavo.nn.moe import LayerNormMoE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CONFIG = load_config(
    "llama-tiny",
    {
        "num_hidden_layers": 2, "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64,
    },
)  # fmt: skip
EXPERTS = MixtralConfig(
    num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2, vocab_size=1000, hidden_size=256, intermediate_size=384,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64,
)  # fmt: skip
GPU = "cuda"


def built(device, recipe, base, dtype=torch.bfloat16, config=CONFIG, **options):
    """A model with adapters that are not 0, the same on every device."""
    make = {"dtype": dtype, "params_dtype": dtype, "device": device, "seed": 3}
    lora = octavo.LoRA(8, base=base, **options)
    model = built_model(config, **make, lora=lora, base_recipe=None if recipe is None else RECIPES[recipe]())
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


@pytest.mark.parametrize(("rank", "rows"), [(8, 700), (3, 9), (16, 2000), (48, 257)])
def test_grouped_adapters_are_those_of_float64(rank, rows):
    """Values and every gradient of one stack of experts, of unequal numbers of rows, one of them without any."""
    experts, hidden, ffn = 5, 256, 384
    chosen = torch.randint(experts - 1, (rows, 2))
    chosen[:, 1] = (chosen[:, 0] + 1) % (experts - 1)
    scores = torch.rand(rows, 2).to(GPU).requires_grad_()
    x = torch.randn(rows, hidden, device=GPU, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(rows, hidden, device=GPU, dtype=torch.bfloat16)
    stack = StackedExperts(
        hidden, ffn, experts, "swiglu", (None, None), Draws(None), dtype=torch.bfloat16, device=GPU
    ).requires_grad_(False)  # fmt: skip
    make = {"dtype": torch.float32, "device": GPU}
    stack.lora_fc1 = StackedAdapters("gate_up_proj", experts, hidden, experts * 2 * ffn, rank, 0.7, **make)
    stack.lora_fc2 = StackedAdapters("down_proj", experts, ffn, experts * hidden, rank, 0.7, **make)
    trained = [each for one in stack.adapters for each in one.trained]
    with torch.no_grad():
        for parameter in trained:
            parameter.normal_(std=0.1)
    y = stack(x, scores, chosen.to(GPU))
    y.backward(dy)

    def wide(tensor):
        return tensor.detach().double().cpu().requires_grad_()

    leaves = [wide(tensor) for tensor in (x, scores, *trained)]
    x_64, scores_64, a1, b1, a2, b2 = leaves
    w1, w2 = (wide(weight).unflatten(0, (experts, -1)) for weight in (stack.fc1_weight, stack.fc2_weight))
    w1 = w1 + 0.7 * b1.unflatten(0, (experts, -1)) @ a1.unflatten(0, (experts, -1))
    w2 = w2 + 0.7 * b2.unflatten(0, (experts, -1)) @ a2.unflatten(0, (experts, -1))
    result = torch.zeros(rows, hidden, dtype=torch.float64)
    for expert in range(experts):
        tokens, copies = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x_64[tokens] @ w1[expert].t()).chunk(2, -1)
        activated = torch.nn.functional.silu(gate) * up * scores_64[tokens, copies, None]
        result = result.index_add(0, tokens, activated @ w2[expert].t())
    result.backward(dy.double().cpu())
    assert (y.double().cpu() - result).norm() < 1e-2 * result.norm()
    for found, wanted in zip((x, scores, *trained), leaves, strict=True):
        assert found.grad.isfinite().all()
        assert (found.grad.double().cpu() - wanted.grad).norm() < 2e-2 * wanted.grad.norm()
    for parameter in trained:  # of an expert without rows
        assert not parameter.grad.unflatten(0, (experts, -1))[-1].any()


@pytest.mark.parametrize(("recipe", "base"), CASES)
def test_loss_and_gradients_of_adapters_of_experts(recipe, base, monkeypatch):
    ids, route, chosen = token_ids(), LayerNormMoE._route, []

    def recorded(layer, logits):
        scores, experts = route(layer, logits)
        chosen.append(experts)
        return scores, experts

    def repeated(layer, logits):
        experts = chosen[0].to(logits.device)  # a token at the edge would visit another in another precision
        chosen.append(chosen.pop(0))
        scores = logits.softmax(-1).gather(1, experts)
        return scores / scores.sum(-1, keepdim=True), experts

    monkeypatch.setattr(LayerNormMoE, "_route", recorded)
    exact_loss, exact = gradients(built("cpu", None, "params_dtype", torch.float32, EXPERTS), None, ids)
    monkeypatch.setattr(LayerNormMoE, "_route", repeated)
    cpu_loss, cpu = gradients(built("cpu", recipe, base, config=EXPERTS), recipe, ids, repeats=2)
    loss, found = gradients(built(GPU, recipe, base, config=EXPERTS), recipe, ids.to(GPU), repeats=2)
    assert loss == pytest.approx(exact_loss, rel=5e-3)
    assert loss == pytest.approx(cpu_loss, rel=2e-3)
    ours, theirs = errors(found, exact), errors(cpu, exact)
    assert max(ours.values()) < (0.05 if recipe is None else 0.35)
    assert all(ours[name] < 1.5 * theirs[name] + 0.02 for name in exact), {n: (ours[n], theirs[n]) for n in exact}


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
