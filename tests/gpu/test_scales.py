"""The update of all scales in one kernel on a GPU, bit for bit against the reference on the CPU."""

import pytest
import torch

from octavo.kernels import reference
from octavo.kernels.scales import update_scales_

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ROUNDING = 1 + 2.0**-20


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "tensors"), [(1, 64), (2, 64), (5, 300), (32, 512), (1024, 256), (5000, 128)])
def test_equals_reference(length, tensors, algo, margin):
    history, scale = torch.zeros(length, tensors), torch.ones(tensors)
    fp8_max = torch.tensor([448.0, 57344.0])[torch.randint(0, 2, (tensors,))]
    saturated = torch.zeros(tensors, dtype=torch.bool)
    on_gpu = [x.cuda() for x in (history, scale, fp8_max, saturated)]
    for step in range(40):
        amaxes = torch.rand(tensors) * torch.exp2(torch.randint(-120, 120, (tensors,)).float())
        kind = torch.randint(0, 20, (tensors,))
        for number, value in enumerate((0.0, 0.0, torch.inf, torch.nan, 1e-45, 1e-38, reference.FLOAT32_MAX)):
            if number not in (2, 3) or step % 20 == 7:
                amaxes[kind == number] = value
        history[0] = amaxes
        on_gpu[0][0] = amaxes.cuda()
        for state in ((history, scale, fp8_max, saturated), on_gpu):
            update_scales_(*state, algo=algo, margin=margin, rounding=ROUNDING)
        for got, want in zip(on_gpu, (history, scale, fp8_max, saturated), strict=True):
            raw = torch.uint8 if want.dtype == torch.bool else torch.int32
            assert torch.equal(got.cpu().view(raw), want.view(raw))
