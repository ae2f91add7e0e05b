"""Rates by hand, which tensors decay, and the norm of the gradient."""

import math

import pytest
import torch
from torch import nn

from octavo.config.optimizer import OptimizerConfig
from octavo.errors import OctavoError
from octavo.train.nonfinite import check_finite
from octavo.train.optimizer import build_optimizer, clip_grad_norm_, learning_rate


def config(**values):
    return OptimizerConfig.model_validate({"lr": 1.0, "warmup_steps": 4, "min_lr_fraction": 0.2, **values})


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        # steps:     1     2    4    8 (half way)  12 (the end)
        ("constant", [0.25, 0.5, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 1.0, 0.6, 0.2]),
        ("cosine", [0.25, 0.5, 1.0, 0.6, 0.2]),
    ],
)
def test_the_schedule_has_the_values_computed_by_hand(schedule, rates):
    found = [learning_rate(step, config(schedule=schedule), 12) for step in (1, 2, 4, 8, 12)]
    assert found == pytest.approx(rates, abs=1e-15)


def test_the_cosine_is_a_cosine():
    # A quarter of the way down: 0.2 + 0.8 × (1 + cos(π/4)) / 2
    assert learning_rate(6, config(schedule="cosine"), 12) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)


def test_without_warmup_the_first_step_falls_already_and_a_warmup_may_fill_the_run():
    assert learning_rate(1, config(schedule="linear", warmup_steps=0, min_lr_fraction=0.0), 10) == pytest.approx(0.9)
    assert learning_rate(12, config(warmup_steps=12), 12) == 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm([2, 2])  # a norm whose weight has two dimensions
        self.layer_norm_weight = nn.Parameter(torch.ones(4))


def test_norms_biases_and_vectors_do_not_decay():
    model = Net()
    optimizer = build_optimizer(model, config(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: decay[id(p)] for name, p in model.named_parameters()}
    assert found == {
        "embedding.weight": 0.3,
        "linear.weight": 0.3,
        "linear.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "layer_norm_weight": 0.0,
    }


def test_the_decay_is_decoupled():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    model.weight.grad = torch.zeros_like(model.weight)
    build_optimizer(model, config(lr=0.1, weight_decay=0.5)).step()
    assert model.weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_scales_all_gradients_by_one_factor(dtype):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).to(dtype)
    generator = torch.Generator().manual_seed(3)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    before = [p.grad.double() for p in model.parameters()]
    expected = math.sqrt(sum(float((g * g).sum()) for g in before))
    norm = clip_grad_norm_(model, 1.0)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected, rel=1e-5)
    after = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()))
    assert after == pytest.approx(1.0, rel=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_small_gradients_and_no_limit_leave_the_bits_alone():
    model = nn.Linear(3, 3)
    for limit, scale in ((1.0, 1e-3), (0.0, 1e3)):
        for p in model.parameters():
            p.grad = torch.full_like(p, scale)
        clip_grad_norm_(model, limit)
        assert all((p.grad == scale).all() for p in model.parameters())


def test_a_gradient_that_is_not_finite_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[1].bias.grad[0] = math.nan
    norm = clip_grad_norm_(model, 1.0).item()
    model[0].weight.grad.fill_(1.0)  # clipping by NaN spoilt the others; only the message is looked at here
    with pytest.raises(OctavoError, match=r"step 7: loss 2.0, gradient norm nan.*1\.bias"):
        check_finite(model, 7, 2.0, norm)
    check_finite(model, 7, 2.0, 1.0)
