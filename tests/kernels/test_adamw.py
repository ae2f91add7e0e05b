"""AdamW's kernel in Triton's interpreter and its plain definition, against PyTorch's own."""

import pytest
import torch

from octavo.kernels.adamw import adamw_, launch

SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
both = pytest.mark.parametrize("run", [pytest.param(launch, marks=interpreted), adamw_], ids=["kernel", "plain"])


def torch_steps(param, grads, rates, *, beta1, beta2, eps, weight_decay, lr=0.0):
    """PyTorch's unfused steps in the dtype of `param`."""
    held = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW([held], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, foreach=False)
    for grad, rate in zip(grads, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        held.grad = grad.to(held.dtype)
        optimizer.step()
    state = optimizer.state[held]
    return held.detach(), state["exp_avg"], state["exp_avg_sq"]


@both
@pytest.mark.parametrize("numel", [1, 1000, 2049])
@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.0, 0.95), (0.9, 0.9999)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_ten_steps_in_float32(exact_casts, run, numel, beta1, beta2, weight_decay):
    param = torch.randn(numel)
    grads = [torch.randn(numel) * 10.0 ** (index % 3 - 5) for index in range(10)]
    rates = [1e-3 * (index + 1) for index in range(10)]
    settings = {"beta1": beta1, "beta2": beta2, "eps": 1e-8, "weight_decay": weight_decay}
    # In float64, PyTorch's differ from the exact values by nothing that shows here.
    want = torch_steps(param.double(), grads, rates, **settings)
    got = [param.clone(), torch.zeros(numel), torch.zeros(numel)]
    for index, (grad, rate) in enumerate(zip(grads, rates, strict=True)):
        step = torch.tensor(index + 1.0) if index % 2 else index + 1.0
        run(got[0], grad, *got[1:], lr=rate, step=step, **settings)
    # What is added up may cancel: it is rounded as the largest summand is.
    largest = max(grad.abs().max().item() for grad in grads)
    summands = (param.abs().max().item() + sum(rates), largest, largest**2)
    for one, other, summand in zip(got, want, summands, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-6, atol=1e-6 * summand)


@interpreted
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # 0 / 0 beyond the end, with an eps of 0
@pytest.mark.parametrize("step", [1, 2, 7, 100, 500, 693, 1000, 30_000, 10_000_000])
@pytest.mark.parametrize("beta", [0.5, 0.9, 0.999, 0.99999])
def test_bias_corrections_do_not_cancel(step, beta):
    """From moments that stand still, the update is the ratio of the corrections."""
    param, first, second = torch.zeros(1), torch.ones(1), torch.ones(1)
    launch(param, torch.ones(1), first, second, lr=1.0, beta1=beta, beta2=0.0, eps=0.0, weight_decay=0.0, step=float(step))
    torch.testing.assert_close(-param.double(), torch.tensor([1 / (1 - beta**step)]).double(), rtol=4e-7, atol=0)


@both
@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("moment_dtype", [torch.bfloat16, torch.float32])
def test_one_step_in_other_dtypes_rounds_once(exact_casts, run, param_dtype, grad_dtype, moment_dtype):
    param, grad = torch.randn(3000).to(param_dtype), torch.randn(3000).to(grad_dtype)
    first, second = torch.randn(3000).to(moment_dtype), torch.rand(3000).to(moment_dtype)
    wide = [x.double() for x in (param, grad, first, second)]
    kept = grad.clone()
    run(param, grad, first, second, step=torch.tensor(4.0), grad_scale=torch.tensor(0.37), **SETTINGS)
    g = wide[1] * 0.37
    m, v = 0.9 * wide[2] + 0.1 * g, 0.95 * wide[3] + 0.05 * g * g
    p = wide[0] * (1 - 1e-3) - 1e-2 / (1 - 0.9**4) * m / ((v / (1 - 0.95**4)).sqrt() + 1e-8)
    assert torch.equal(grad, kept)
    for got, want in ((param, p), (first, m), (second, v)):
        epsilon = torch.finfo(got.dtype).eps
        torch.testing.assert_close(got.double(), want, rtol=max(epsilon, 1e-6) * 0.51, atol=1e-6)


@both
def test_nothing_to_do(run):
    memory = [torch.randn(5) for _ in range(4)]
    kept = [x.clone() for x in memory]
    run(*(x[:0] for x in memory), step=1.0, **SETTINGS)
    for x, before in zip(memory, kept, strict=True):
        assert torch.equal(x, before)
