"""Octavo's AdamW as PyTorch's: on a CPU to the bit, and by the kernel in Triton's interpreter."""

import copy

import pytest
import torch
from torch import nn

from octavo.kernels.adamw import adamw_, launch
from octavo.train import adamw
from octavo.train.adamw import AdamW

SHAPES = [(40, 30), (7,), (1,), (3, 5, 2)]


def parameters(dtype=torch.float32):
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def groups(held):
    return [{"params": held[:2], "weight_decay": 0.1}, {"params": held[2:], "weight_decay": 0.0, "betas": (0.8, 0.95)}]


def drive(optimizer, held, steps, *, seed=0, scale=None):
    """Steps on gradients drawn from the seed, at a rate that changes; now and then one has no gradient."""
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for index, p in enumerate(held):
            grad = torch.randn(p.shape, generator=draw).to(p.dtype)
            p.grad = None if (step + index) % 5 == 3 else grad * (1 if scale is None else scale)
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = 1e-3 * (step + 1) / (number + 1)
        optimizer.step()


@pytest.fixture
def by_kernel(monkeypatch):
    """All tensors go to the kernel, which Triton interprets."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is off where there is a GPU; tests/gpu steps there")
    monkeypatch.setattr(adamw, "_native", lambda device: True)
    monkeypatch.setattr(adamw, "SMALL", 0)
    monkeypatch.setattr(adamw, "adamw_", launch)


def assert_same_states(one, other, **tolerance):
    for p, q in zip(one, other, strict=True):
        torch.testing.assert_close(p, q, **tolerance)


def test_a_cpu_steps_as_pytorch():
    mine = parameters()
    theirs = copy.deepcopy(mine)
    one, other = AdamW(groups(mine), lr=1e-3), torch.optim.AdamW(groups(theirs), lr=1e-3, fused=True)
    drive(one, mine, 10)
    drive(other, theirs, 10)
    assert_same_states(mine, theirs, rtol=0, atol=0)
    assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("by_kernel")
def test_the_kernel_steps_as_pytorch(monkeypatch, dtype):
    if dtype == torch.bfloat16:  # which Triton's interpreter rounds wrongly
        monkeypatch.setattr(adamw, "adamw_", adamw_)
    mine = parameters(dtype)
    theirs = copy.deepcopy(mine)
    one, other = AdamW(groups(mine), lr=1e-3), torch.optim.AdamW(groups(theirs), lr=1e-3, fused=True)
    drive(one, mine, 10)
    drive(other, theirs, 10)
    assert_same_states(
        mine, theirs, **({"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2})
    )
    for p, q in zip(mine, theirs, strict=True):
        assert one.state[p].keys() == other.state[q].keys()
        for name, value in other.state[q].items():
            assert one.state[p][name].dtype == value.dtype
            assert one.state[p][name].shape == value.shape
        assert torch.equal(one.state[p]["step"], other.state[q]["step"])


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("back", [False, True])
def test_states_load_into_each_other(back):
    held = parameters()
    kinds = [lambda p: AdamW(groups(p), lr=1e-3), lambda p: torch.optim.AdamW(groups(p), lr=1e-3, fused=True)]
    first, second = reversed(kinds) if back else kinds
    begun = first(held)
    drive(begun, held, 3)
    moved = copy.deepcopy(held)
    resumed = second(moved)
    resumed.load_state_dict(copy.deepcopy(begun.state_dict()))
    drive(begun, held, 4, seed=1)
    drive(resumed, moved, 4, seed=1)
    assert_same_states(held, moved, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kernel", [False, True])
def test_gradients_are_scaled_in_the_step(request, kernel):
    if kernel:
        request.getfixturevalue("by_kernel")
    mine = parameters()
    theirs = copy.deepcopy(mine)
    one, other = AdamW(groups(mine), lr=1e-3), torch.optim.AdamW(groups(theirs), lr=1e-3, fused=True)
    one.grad_scale = torch.tensor(0.25)
    drive(one, mine, 4)
    drive(other, theirs, 4, scale=0.25)
    assert_same_states(mine, theirs, rtol=1e-6, atol=1e-7)


def test_a_closure_and_hooks_are_called_once():
    held = parameters()
    optimizer = AdamW(held, 1e-3)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        loss = sum(p.square().sum() for p in held)
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert calls == ["before", "after"]


@pytest.mark.usefixtures("by_kernel")
@pytest.mark.parametrize("settings", [{"amsgrad": True}, {"maximize": True}], ids=str)
def test_what_the_kernel_has_not_goes_to_pytorch(settings):
    mine = parameters()
    theirs = copy.deepcopy(mine)
    drive(AdamW(mine, **settings), mine, 3)
    drive(torch.optim.AdamW(theirs, fused=True, **settings), theirs, 3)
    assert_same_states(mine, theirs, rtol=0, atol=0)


@pytest.mark.usefixtures("by_kernel")
def test_small_and_strided_tensors_go_to_pytorch(monkeypatch):
    monkeypatch.setattr(adamw, "SMALL", 100)
    taken = []

    def record(param, *tensors, **settings):
        taken.append(param.shape)
        launch(param, *tensors, **settings)

    monkeypatch.setattr(adamw, "adamw_", record)
    mine = [*parameters(), nn.Parameter(torch.randn(20, 30).t())]
    theirs = copy.deepcopy(mine)
    drive(AdamW(mine), mine, 2)
    drive(torch.optim.AdamW(theirs, fused=True), theirs, 2)
    assert_same_states(mine, theirs, rtol=1e-6, atol=1e-7)
    assert set(taken) == {torch.Size(SHAPES[0])}
