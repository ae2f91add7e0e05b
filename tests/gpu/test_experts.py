"""Mixtures of experts on Hopper: grouped kernels against one product an expert, with the same routes."""

import pytest
import torch

import octavo
from octavo.kernels.experts import routes as routing
from octavo.nn import experts as stacked
from octavo.nn.moe import Experts, LayerNormMoE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

RECIPES = {
    None: None,
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="max"),
    "current": octavo.recipe.CurrentScaling(),
    "rowwise": octavo.recipe.RowwiseScaling(),
    "block": octavo.recipe.BlockScaling(),
}


def layer(experts, hidden=256, ffn=384):
    torch.manual_seed(0)
    return LayerNormMoE(hidden, ffn, 1e-5, experts, params_dtype=torch.float32, device="cuda")


def train(module, recipe, tile, monkeypatch, bias=None, steps=2):
    """Results and gradients of the last of some steps."""
    monkeypatch.setattr(stacked, "make_routes", lambda chosen, count: routing.make_routes(chosen, count, tile))
    if bias is not None:
        with torch.no_grad():
            module.router_weight.zero_()
        monkeypatch.setattr(LayerNormMoE, "_route", lambda self, logits: forced(self, logits, bias))
    draw = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        module.zero_grad()
        x = torch.randn(2, 300, module.hidden_size, device="cuda", generator=draw).bfloat16().requires_grad_()
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            h, y, stats = module(x)
            loss = ((h + y).float() * torch.linspace(-1, 1, module.hidden_size, device="cuda")).mean() + 1e-3 * stats[:8].sum()
        loss.backward()
    return {"y": y, "dx": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def forced(module, logits, expert):
    """All tokens to one expert, and their second choices among the others."""
    logits = logits + torch.nn.functional.one_hot(torch.tensor(expert), logits.shape[1]).to(logits) * 100
    scores, chosen = torch.topk(logits.softmax(-1), module.config.top_k, dim=-1)
    return scores, chosen


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("experts", [Experts(8, 2), Experts(32, 4, normalized=False)], ids=["8", "32"])
def test_grouped_kernels_equal_one_product_an_expert(recipe, experts, monkeypatch):
    one = train(layer(experts), RECIPES[recipe], 1, monkeypatch)
    grouped = train(layer(experts), RECIPES[recipe], routing.TILE, monkeypatch)
    for name, wanted in one.items():
        error = (grouped[name].float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-20)
        assert error < 2e-2, (name, error.item())


def test_one_expert_with_all_tokens(monkeypatch):
    one = train(layer(Experts(8, 1)), RECIPES["delayed"], 1, monkeypatch, bias=5)
    grouped = train(layer(Experts(8, 1)), RECIPES["delayed"], routing.TILE, monkeypatch, bias=5)
    for name, wanted in one.items():
        assert (grouped[name].float() - wanted.float()).norm() <= 2e-2 * wanted.float().norm() + 1e-6, name
    assert not grouped["experts.fc1_weight"].unflatten(0, (8, -1))[[0, 1, 2, 3, 4, 6, 7]].any()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits():
    module = layer(Experts(8, 2))
    x = torch.randn(2, 300, 256, device="cuda").bfloat16().requires_grad_()
    with octavo.fp8_autocast(enabled=True, fp8_recipe=RECIPES["delayed"]):
        h, y, _ = module(x)
    (h + y).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with octavo.fp8_autocast(enabled=True, fp8_recipe=RECIPES["delayed"]):
            h, y, _ = module(x)
        (h + y).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
