"""A step that stops being numbers says where: the first layer in forward, weights that already were none, or gradients."""

import functools
import math
import re

import pytest
import torch
from torch import nn

from octavo.config.run import RunConfig
from octavo.data.prepared import prepare
from octavo.errors import OctavoError
from octavo.parallel.world import seed_everything
from octavo.plan.run import check
from octavo.train.nonfinite import first_nonfinite
from octavo.train.setup import build
from octavo.train.step import train_step


def built(run, *overrides):
    config = RunConfig.from_file(run.file, overrides)
    stepper, _ = build(check(config), prepare(config.data))
    seed_everything(0)
    return stepper


class Exploding(nn.Module):
    def forward(self, x):
        return x * 3e38 * 3e38


def model(at):
    layers = [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    if at is not None:
        layers.insert(at, Exploding())
    return nn.Sequential(*layers)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_the_first_output_that_is_not_finite_is_named(at):
    module = model(at)
    told = first_nonfinite(module, [functools.partial(module, torch.randn(2, 4))])
    assert told == f"the first output that is not finite is that of {at}"
    assert not any(m._forward_hooks for m in module.modules())


def test_what_is_finite_is_not_named():
    module = model(None)
    assert first_nonfinite(module, [functools.partial(module, torch.randn(2, 4))] * 2) is None


def test_a_weight_that_was_none_before_comes_first():
    module = model(1)
    with torch.no_grad():
        module[3].bias[2] = math.nan
    assert first_nonfinite(module, [functools.partial(module, torch.randn(2, 4))]) == "weights that are not finite: 3.bias"


@pytest.mark.parametrize("micro", [2, 4])
@pytest.mark.parametrize("overrides", [(), ("fp8.enabled=false",), ("fp8.recipe=current",), ("train.recompute=true",)])
def test_a_step_ends_with_the_layer_and_the_weights_of_the_step_before(tiny_run, overrides, micro):
    stepper = built(tiny_run(), *overrides, f"train.micro_batch={micro}")
    train_step(stepper, 1)
    stepper.model.layers[1].ffn.register_forward_hook(lambda _, __, stream: (stream[0], stream[1] * math.inf))
    before = [p.detach().clone() for p in stepper.model.parameters()]
    where = re.escape("the first output that is not finite is that of layers.1.ffn")
    with pytest.raises(OctavoError, match=rf"step 2: .*{where}.*Lower optimizer\.lr"):
        train_step(stepper, 2)
    assert all(torch.equal(a, b) for a, b in zip(before, stepper.model.parameters(), strict=True))
