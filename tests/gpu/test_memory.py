"""A GPU that is full, by a real allocation that fails."""

import pytest
import torch

from octavo.config.run import RunConfig
from octavo.plan.advice import out_of_memory
from octavo.plan.run import check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_a_full_gpu_is_explained(tiny_run):
    plan = check(RunConfig.from_file(tiny_run().file))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    message = str(out_of_memory(caught.value, plan))
    assert message.startswith(f"out of memory for 1048576.00 GiB: {plan.hardware.name} has ")
    assert "in use. The run's estimate is" in message
