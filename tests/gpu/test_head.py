"""The output head on a GPU, wide and in FP8, beside float64."""

import pytest
import torch
from torch.nn import functional

import octavo
from octavo.fp8.linear import LinearGemms
from octavo.fp8.scaling import ModuleState
from octavo.kernels.cross_entropy import Objective, cross_entropy_
from octavo.nn import head

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

RECIPES = {
    "bf16": None,
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=2),
    "fast": octavo.recipe.DelayedScaling(amax_history_len=2, fast_accumulation=True),
    "current": octavo.recipe.CurrentScaling(),
    "current in float16": octavo.recipe.CurrentScaling(),
}


@pytest.mark.parametrize("chunk_tokens", [128, 10_000])
@pytest.mark.parametrize(("tokens", "words"), [(1024, 5000), (1001, 4999)])
@pytest.mark.parametrize("kept_tokens", [256, 10_000])
@pytest.mark.parametrize("logits", [True, False], ids=["all", "backward"])
@pytest.mark.parametrize("name", RECIPES)
def test_loss_and_gradients(name, logits, kept_tokens, tokens, words, chunk_tokens, monkeypatch):
    width, recipe, dtype = 512, RECIPES[name], torch.float16 if "float16" in name else torch.bfloat16
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk_tokens * words * 2)
    monkeypatch.setattr(head, "BUFFER_BYTES", kept_tokens * words)
    monkeypatch.setattr(head, "TRANSPOSED_BYTES", 1 << 18)
    hidden = torch.randn(tokens, width, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(words, width, device="cuda") * 0.1).to(dtype).requires_grad_()
    target = torch.randint(words, (tokens,), device="cuda")
    target[::7] = -100
    count = (target != -100).sum().float()
    module = torch.nn.Linear(width, words, bias=False, device="meta")
    module.weight = torch.nn.Parameter(weight.detach())
    products = None if recipe is None else LinearGemms(ModuleState(module), weight, recipe, dtype, None)
    for _ in range(3):  # delayed scaling finds its scales
        hidden.grad = weight.grad = None
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            loss = head.linear_cross_entropy(hidden, weight, target, count, fp8=products, fp8_logits=logits)
        loss.backward()
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    wanted = functional.cross_entropy(h @ w.t(), target, reduction="sum") / count
    wanted.backward()
    assert abs(loss.item() / wanted.item() - 1) < (1e-3 if recipe is None or not logits else 5e-3)
    for found, exact in ((hidden.grad, h.grad), (weight.grad, w.grad)):
        assert (found.double() - exact).norm() < (0.01 if recipe is None else 0.1) * exact.norm()


@pytest.mark.parametrize("unknown", [-1, -7, 5000, 2**33, -(2**33)])
def test_a_label_outside_the_vocabulary_stays_in_its_row(unknown):
    guarded = torch.full((6, 5008), 7.0, device="cuda", dtype=torch.bfloat16)
    logits = guarded[1:5, :5000]
    logits.normal_()
    target = torch.tensor([3, unknown, -100, 4999], device="cuda")
    loss, grad = cross_entropy_(logits, target, torch.tensor(1.0, device="cuda"), Objective())
    assert loss.isnan()
    assert grad.high_precision.isnan().all(1).tolist() == [False, True, False, False]
    assert grad.high_precision[[0, 2, 3]].isfinite().all()
    assert (torch.cat([guarded[0], guarded[5], guarded[:, 5000:].flatten()]) == 7).all()
