"""Adapters packed as one pair: in Triton's interpreter against the same operations of PyTorch, to the bit."""

import pytest
import torch

from octavo.kernels import low_rank
from octavo.nn.lora import Adapters

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off where there is a GPU")
CASES = {
    "one": ({"o_proj": 40}, ["o_proj"], [40]),
    "heads in two groups": ({"q_proj": 32, "k_proj": 8, "v_proj": 8}, ["q_proj", "k_proj", "v_proj"], [16, 4, 4]),
    "without keys": ({"q_proj": 32, "k_proj": 8, "v_proj": 8}, ["q_proj", "v_proj"], [16, 4, 4]),
    "gate and up": ({"gate_proj": 96, "up_proj": 96}, ["gate_proj", "up_proj"], [32, 32]),
    "up alone": ({"gate_proj": 96, "up_proj": 96}, ["up_proj"], [32, 32]),
    "one matrix with all parts": ({"query_key_value": 48}, ["query_key_value"], [4, 4, 4]),
}


def adapters(case, rank, dtype):
    parts, adapted, lengths = CASES[case]
    found = Adapters(parts, adapted, lengths, in_features=24, rank=rank, scale=1.7, dropout=0.0, dtype=dtype, device="cpu")
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter)
    return found


@pytest.mark.parametrize("rank", [4, 6])
@pytest.mark.parametrize("case", CASES)
def test_packing_is_that_of_pytorch_to_the_bit(case, rank, monkeypatch):
    own = adapters(case, rank, torch.float32)
    with torch.no_grad():
        want = own.joint(own.trained, torch.float16)  # the interpreter cuts bfloat16 off
        gradients = torch.randn(want.a.shape), torch.randn(want.b.shape)
        wanted = own.split(*(x.clone() for x in gradients))
        monkeypatch.setattr(low_rank, "packs", lambda matrices, runs: True)
        found = own.joint(own.trained, torch.float16)
        split = own.split(*(x.clone() for x in gradients))
    assert all(map(torch.equal, found, want))
    assert [part.shape for part in split] == [part.shape for part in own.trained]
    assert all(map(torch.equal, split, wanted))
