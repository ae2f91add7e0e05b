"""`octavo.graphed` on a CPU, where every call is eager: the contract that a GPU's graph is held to in tests/gpu."""

import pytest
import torch

import octavo
from octavo.errors import InputError


def setting():
    torch.manual_seed(0)
    model = octavo.nn.TransformerLayer(32, 64, 2, self_attn_mask_type="no_mask")
    recipe = octavo.recipe.DelayedScaling(amax_history_len=3)

    def loss(x, y):
        with octavo.fp8_autocast(fp8_recipe=recipe):
            return (model(x) - y).square().mean()

    batches = [(torch.randn(2, 5, 32), torch.randn(2, 5, 32)) for _ in range(5)]
    return model, loss, batches, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_steps_are_those_of_the_plain_loop():
    model, loss, batches, optimizer = setting()
    wanted = []
    for batch in batches:
        value = loss(*batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(value.item())
    weights = [parameter.detach().clone() for parameter in model.parameters()]

    model, loss, batches, optimizer = setting()
    step = octavo.graphed(loss, model.parameters(), warmup=2)
    for batch, value in zip(batches, wanted, strict=True):
        found = step(*batch)
        assert not found.requires_grad
        assert found.item() == value
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), weights))


def test_gradients_of_an_earlier_call_are_not_added_to():
    model, loss, batches, _ = setting()
    step = octavo.graphed(loss, model.parameters())
    step(*batches[0])
    with pytest.raises(InputError, match=r"adds to none: call optimizer.zero_grad\(set_to_none=True\) before it"):
        step(*batches[1])


def test_one_call_at_least_is_eager():
    with pytest.raises(InputError, match=r"warmup = 0: at least 1 call must run before one is recorded \(usual: 3\)"):
        octavo.graphed(torch.sum, [], warmup=0)
