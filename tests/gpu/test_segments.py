"""Attention of packed and padded sequences on a GPU, by cuDNN and by FlashAttention-4, against float64."""

import pytest
import torch

from octavo.kernels.attention import flash
from octavo.kernels.attention.pattern import Span
from octavo.nn.scores import Scores
from octavo.nn.segments import Sight, attend_segments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
FLASH = pytest.mark.skipif(flash.missing() is not None, reason=str(flash.missing()))
HEADS, GROUPS, DIM = 8, 2, 64
Q_LENGTHS, KV_LENGTHS = (300, 0, 129, 1, 512), (200, 40, 0, 700, 512)


@pytest.fixture(params=["cuDNN", pytest.param("FlashAttention-4", marks=FLASH)], autouse=True)
def kernels(request):
    before = flash.enabled()
    flash.enable(request.param != "cuDNN")
    yield
    flash.enable(before)


def packed(lengths, gap):
    begins = [sum(lengths[:n]) + gap * n for n in range(len(lengths))]
    return list(zip(begins, (begin + length for begin, length in zip(begins, lengths, strict=True)), strict=True))


@pytest.mark.parametrize("gap", [0, 3], ids=["packed", "padded"])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(
    "sight", [Sight(), Sight(None, 0, False), Sight(None, 0, True), Sight(100, 0, True), Sight(9, 9, True)]
)
def test_results_and_gradients_are_those_of_float64(gap, sink, sight):
    q_places, kv_places = packed(Q_LENGTHS, gap), packed(KV_LENGTHS, gap)
    segments = [Span(0, 1, *q, *k) for q, k in zip(q_places, kv_places, strict=True)]
    sizes = (q_places[-1][1] + gap, HEADS), (kv_places[-1][1] + gap, GROUPS), (kv_places[-1][1] + gap, GROUPS)
    inputs = [torch.randn(1, *size, DIM, device="cuda").bfloat16().requires_grad_() for size in sizes]
    own = [torch.randn(HEADS, device="cuda", requires_grad=True)] if sink else []
    exact = [x.detach().double().requires_grad_() for x in (*inputs, *own)]
    found, _ = attend_segments(*inputs, segments, sight, scale=0.125, scores=Scores(sink=own[0] if sink else None))
    # In float64 a cap that caps nothing takes plain PyTorch, whose results are compared with masks written out on CPUs.
    terms = Scores(sink=exact[3] if sink else None, cap=1e9)
    wanted, _ = attend_segments(*exact[:3], segments, sight, scale=0.125, scores=terms)
    cotangent = torch.randn_like(found)
    found.backward(cotangent)
    wanted.backward(cotangent.double())
    pairs = [(found, wanted), *((x.grad, e.grad) for x, e in zip((*inputs, *own), exact, strict=True))]
    for at, (one, two) in enumerate(pairs):
        tolerance = 5e-2 if at == 4 else 1e-2  # the sink's gradient is a sum of terms of both signs
        assert (one.double() - two).norm() <= tolerance * two.norm() + 1e-6
