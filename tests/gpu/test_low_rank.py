"""Adapters packed as one pair on a GPU: against PyTorch's operations, to the bit."""

import pytest
import torch

from octavo.kernels import gemm, low_rank
from octavo.nn.lora import Adapters

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [16, 6])
def test_packing(rank, dtype, monkeypatch):
    parts, lengths = {"q_proj": 512, "k_proj": 128, "v_proj": 128}, [256, 64, 64]
    shapes = (parts, list(parts), lengths), (parts, ["q_proj", "v_proj"], lengths), ({"down_proj": 384}, ["down_proj"], [384])
    for parts, adapted, lengths in shapes:
        own = Adapters(parts, adapted, lengths, in_features=1024, rank=rank, scale=1.7, dropout=0.0, dtype=dtype, device="cuda")
        with torch.no_grad():
            for parameter in own.parameters():
                parameter.normal_()
            found = own.joint(own.trained, torch.bfloat16)
            gradients = torch.randn(found.a.shape, device="cuda"), torch.randn(found.b.shape, device="cuda")
            split = own.split(*(x.clone() for x in gradients))
            with monkeypatch.context() as patch:
                patch.setattr(low_rank, "packs", lambda matrices, runs: False)
                want = own.joint(own.trained, torch.bfloat16)
                wanted = own.split(*(x.clone() for x in gradients))
        if dtype is torch.float32:  # of bfloat16 PyTorch rounds B times the scale before
            assert all(map(torch.equal, found, want))
        assert torch.equal(found.a, want.a)
        torch.testing.assert_close(found.b, want.b, rtol=2**-7, atol=1e-3)
        assert all(map(torch.equal, split, wanted))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "columns", "between"), [(4096, 14336, 16), (4100, 28676, 32), (2048, 20000, 100)])
def test_the_large_sum_is_rounded_once(rows, columns, between, turned):
    y, a, b = (torch.randn(shape, device="cuda").bfloat16() for shape in ((rows, columns), (rows, between), (columns, between)))
    b = b.t() if turned else b.t().contiguous()
    assert low_rank.takes(y, a)
    found = gemm.add_mm_(y.clone(), a, b)
    for part in (slice(0, 128), slice(rows - 128, rows)):
        wide, narrow = (x.double() for x in (y[part], a[part]))
        exact, terms = wide + narrow @ b.double(), wide.abs() + narrow.abs() @ b.double().abs()
        assert ((found[part].double() - exact).abs() <= exact.abs() * 2**-8 + terms * 1e-5).all()
