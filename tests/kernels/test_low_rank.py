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


@pytest.mark.parametrize(
    ("rows", "columns", "between"), [(1, 3, 1), (64, 1024, 16), (70, 700, 48), (130, 129, 33), (33, 512, 128)]
)
@pytest.mark.parametrize("turned", [False, True])
def test_the_sum_is_rounded_once(rows, columns, between, turned):
    y = torch.randn(rows, columns + 5)[:, :columns].half()
    a = torch.randn(rows, between).half()
    b = torch.randn(columns, between).half().t() if turned else torch.randn(between, columns).half()
    exact, terms = (
        x + c @ d for x, c, d in ((y.double(), a.double(), b.double()), map(torch.abs, (y.double(), a.double(), b.double())))
    )
    found = low_rank.launch_add(y.clone(), a, b)
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-11 + terms * 1e-6 + 2**-25).all()


def test_small_sums_narrow_ones_and_those_of_many_columns_stay_cublas_s(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)

    def takes(rows, columns, between, dtype=torch.bfloat16):
        return low_rank.takes(*(torch.empty(rows, size, dtype=dtype, device="meta") for size in (columns, between)))

    assert takes(4096, 8192, 16)
    assert not takes(4095, 8192, 16)
    assert not takes(8192, 6144, 16)
    assert not takes(4096, 8192, 129)
    assert not takes(4096, 8192, 16, torch.float32)
