"""AdamW's kernel on a GPU, against float64 and against PyTorch's fused optimizer."""

import copy

import pytest
import torch
from torch import nn

from octavo.kernels.adamw import _adamw, adamw_
from octavo.train.adamw import SMALL, AdamW
from octavo.train.optimizer import clip_grad_norm_

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SETTINGS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("numel", [1, 1025, 5_000_017])
@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("moment_dtype", [torch.bfloat16, torch.float32])
def test_one_step_rounds_once(numel, param_dtype, grad_dtype, moment_dtype):
    param, grad = torch.randn(numel, device="cuda").to(param_dtype), torch.randn(numel, device="cuda").to(grad_dtype)
    first, second = torch.randn(numel, device="cuda").to(moment_dtype), torch.rand(numel, device="cuda").to(moment_dtype)
    wide = [x.double() for x in (param, grad, first, second)]
    step, scale = torch.tensor(4.0, device="cuda"), torch.tensor(0.37, device="cuda")
    adamw_(param, grad, first, second, lr=1e-2, step=step, grad_scale=scale, **SETTINGS)
    g = wide[1] * scale.double()
    m, v = 0.9 * wide[2] + 0.1 * g, 0.95 * wide[3] + 0.05 * g * g
    p = wide[0] * (1 - 1e-3) - 1e-2 / (1 - 0.9**4) * m / ((v / (1 - 0.95**4)).sqrt() + 1e-8)
    for got, want in ((param, p), (first, m), (second, v)):
        epsilon = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.double(), want, rtol=max(epsilon, 2e-6) * 0.51, atol=1e-6)


@pytest.mark.parametrize("step", [1, 7, 500, 693, 30_000, 10_000_000])
@pytest.mark.parametrize("beta", [0.5, 0.999, 0.99999])
def test_bias_corrections_do_not_cancel(step, beta):
    param, first, second = (torch.full((64,), value, device="cuda") for value in (0.0, 1.0, 1.0))
    count = torch.tensor(float(step), device="cuda")
    settings = {"beta1": beta, "beta2": 0.0, "eps": 0.0, "weight_decay": 0.0}
    adamw_(param, torch.ones_like(param), first, second, lr=1.0, step=count, **settings)
    torch.testing.assert_close(-param.double().cpu(), torch.full((64,), 1 / (1 - beta**step)).double(), rtol=1e-6, atol=0)


def test_a_new_rate_is_no_new_kernel():
    tensors = [torch.ones(4096, device="cuda") for _ in range(4)]
    step = torch.ones((), device="cuda")
    adamw_(*tensors, lr=0.3, step=step, **SETTINGS)
    before = sum(len(cache[0]) for cache in _adamw.device_caches.values())
    for rate in (1.0, 0.0, 1e-3):
        adamw_(*tensors, lr=rate, step=step, **SETTINGS)
    assert sum(len(cache[0]) for cache in _adamw.device_caches.values()) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ten_steps_as_pytorch(dtype):
    shapes = [(1024, 1000), (4096,), (SMALL,), (3, 5)]
    mine = [nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in shapes]
    theirs = copy.deepcopy(mine)
    both = []
    for held, kind in ((mine, AdamW), (theirs, torch.optim.AdamW)):
        groups = [{"params": held[:2], "weight_decay": 0.1}, {"params": held[2:], "weight_decay": 0.0}]
        both.append(kind(groups, lr=1e-3, fused=True))
    for step in range(10):
        for index, (p, q) in enumerate(zip(mine, theirs, strict=True)):
            p.grad = None if (step + index) % 5 == 3 else torch.randn_like(p)
            q.grad = None if p.grad is None else p.grad * 0.5
        both[0].grad_scale = torch.tensor(0.5, device="cuda")
        for optimizer in both:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (step + 1)
            optimizer.step()
        if step == 5:  # each goes on with the states of the other
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in both]
            for optimizer, state in zip(both, reversed(states), strict=True):
                optimizer.load_state_dict(state)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, **tolerance)
        assert torch.equal(both[0].state[p]["step"], both[1].state[q]["step"])


def test_more_elements_than_an_int32_counts():
    numel = 2**31 + 4096
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 16 GiB")
    tensors = [torch.zeros(numel, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    tensors[1][-4096:] = 1
    adamw_(*tensors, lr=1.0, step=1.0, **{**SETTINGS, "weight_decay": 0.0})
    assert (tensors[0][-4096:] == -1).all()
    assert not tensors[0][:-4096].any()


def test_clipping_left_to_the_step_is_clipping():
    model = nn.Sequential(nn.Linear(1000, 1000), nn.LayerNorm(1000)).cuda()
    twin = copy.deepcopy(model)
    optimizers = [AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    for _ in range(3):
        x = torch.randn(50, 1000, device="cuda")
        for m in (model, twin):
            m.zero_grad()
            (m(x) ** 3).sum().backward()
        norms = [clip_grad_norm_(m, 1.0, optimizer=o) for m, o in zip((model, twin), (optimizers[0], None), strict=True)]
        # After the first step the weights differ by the rounding of a product.
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0.0)
        assert norms[0] > 1
        for optimizer in optimizers:
            optimizer.step()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
