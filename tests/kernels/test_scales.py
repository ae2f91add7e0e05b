"""The update of all scales in one kernel: in Triton's interpreter, bit for bit against the reference."""

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.scales import launch, launch_inverse, update_scales_

ROUNDING = 1 + 2.0**-20


def recorded(tensors):
    """What a step may leave in slot 0: amaxes of many sizes, zeros, infinity, NaN, and floats at both ends of the range."""
    x = torch.rand(tensors) * torch.exp2(torch.randint(-30, 12, (tensors,)).float())
    kind = torch.randint(0, 12, (tensors,))
    for number, value in enumerate((0.0, torch.inf, torch.nan, 1e-45, 1e-38, reference.FLOAT32_MAX)):
        x[kind == number] = value
    return x


def same(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("run", [launch, update_scales_], ids=["kernel", "plain"])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "tensors"), [(1, 7), (2, 8), (5, 19), (32, 64), (1024, 9), (1500, 3)])
def test_equals_reference(run, length, tensors, algo, margin):
    if run is launch and torch.cuda.is_available():
        pytest.skip("the interpreter is off where there is a GPU")
    history, scale = torch.zeros(length, tensors), torch.ones(tensors)
    if length > 1:
        history[torch.randint(1, length, (tensors,)), torch.arange(tensors)] = recorded(tensors)
    fp8_max = torch.tensor([448.0, 57344.0])[torch.randint(0, 2, (tensors,))]
    saturated = torch.rand(tensors) < 0.5
    for _ in range(min(2 * length + 2, 12)):
        history[0] = recorded(tensors)
        last = history[0]
        flags = torch.where(last != 0, last * scale > fp8_max * ROUNDING, saturated)
        want = reference.update_scales(history.clone(), scale, fp8_max, algo=algo, margin=margin)
        run(history, scale, fp8_max, saturated, algo=algo, margin=margin, rounding=ROUNDING)
        assert same(history, want[0])
        assert same(scale, want[1])
        assert torch.equal(saturated, flags)


def test_flags_of_a_cast():
    history = torch.tensor([[448.0, 448.01, 0.0, torch.inf]])
    saturated = torch.tensor([True, False, True, False])
    update_scales_(history, torch.ones(4), torch.full((4,), 448.0), saturated, algo="max", margin=0, rounding=ROUNDING)
    assert saturated.tolist() == [False, True, True, True]
    assert not history.any()


@pytest.mark.parametrize("shape", [(), (1,), (8,), (300,)])
def test_inverses_are_those_of_the_reference(shape):
    scale = torch.rand(shape) * 1e4 + 1e-3
    assert torch.equal(launch_inverse(scale, torch.empty(shape)), reference.divide(1.0, scale))
    largest = torch.full(shape, torch.finfo(torch.float32).max)
    assert torch.equal(launch_inverse(largest, torch.empty(shape)), reference.divide(1.0, largest))
