"""Attention of segments: the ways that compute it beside each other and beside a mask written out, in float64."""

import pytest
import torch

from octavo.kernels.attention.cached import caching
from octavo.kernels.attention.pattern import Span
from octavo.nn import scores, segments
from octavo.nn.scores import Scores
from octavo.nn.segments import Sight, attend_segments

HEADS, GROUPS, DIM, QUERIES, KEYS = 4, 2, 8, 300, 280


def cut(batch, tokens, pieces):
    """Random ascending places of `pieces` sequences in each sample, with gaps."""
    return [sorted(torch.randperm(tokens)[: 2 * pieces].tolist()) for _ in range(batch)]


def drawn_segments(batch=2, pieces=4):
    places = zip(cut(batch, QUERIES, pieces), cut(batch, KEYS, pieces), strict=True)
    return [
        Span(n, n + 1, q[2 * at], q[2 * at + 1], k[2 * at], k[2 * at + 1])
        for n, (q, k) in enumerate(places)
        for at in range(pieces)
    ]


def inputs(batch=2, value=DIM):
    shapes = (QUERIES, HEADS, DIM), (KEYS, GROUPS, DIM), (KEYS, GROUPS, value)
    return [torch.randn(batch, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def written_out(q, k, v, segments, sight, sink=None):
    """One matrix of all pairs."""
    allowed = torch.zeros(len(q), QUERIES, KEYS, dtype=torch.bool)
    for b0, b1, q0, q1, k0, k1, *_ in segments:
        at = torch.arange(q1 - q0)[:, None] + (q1 - q0 and (k1 - k0) - (q1 - q0)) * sight.bottom_right
        distance = torch.arange(k1 - k0) - at
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen &= distance >= -(KEYS * 2 if sight.left is None else sight.left)
        seen &= distance <= (KEYS * 2 if sight.right is None else sight.right)
        allowed[b0:b1, q0:q1, k0:k1] = seen
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3).exp() * allowed[:, None]
    total = weights.sum(-1, keepdim=True) + (0 if sink is None else sink.exp().view(1, -1, 1, 1))
    return torch.einsum("bhqk,bkhd->bqhd", weights / total.where(total > 0, 1.0), v)


SIGHTS = [
    Sight(), Sight(None, 0, False), Sight(None, 0, True), Sight(20, 0, False), Sight(20, 0, True), Sight(5, 9, True),
    Sight(None, 3, False),
]  # fmt: skip


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
@pytest.mark.parametrize("way", ["kernels", "sink", "library", "plain"])
def test_each_way_is_the_whole_matrix(sight, way, monkeypatch):
    monkeypatch.setattr(scores, "PAIRS", 1)
    monkeypatch.setattr(segments, "MASKED_PAIRS", 1)  # the smallest bands
    places = drawn_segments()
    ours = inputs(value=12 if way == "library" else DIM)  # whose values only PyTorch's function takes
    sink = torch.randn(HEADS, dtype=torch.float64, requires_grad=True) if way == "sink" else None
    theirs = [x.detach().clone().requires_grad_() for x in (*ours, *([] if sink is None else [sink]))]
    terms = Scores(sink=sink, cap=1e9 if way == "plain" else 0.0)  # a cap that caps nothing
    found, top = attend_segments(*ours, places, sight, scale=0.3, scores=terms)
    wanted = written_out(*theirs[:3], places, sight, theirs[3] if sink is not None else None)
    cotangent = torch.randn_like(wanted)
    found.backward(cotangent)
    wanted.backward(cotangent)
    assert top is None
    torch.testing.assert_close(found, wanted)
    for one, two in zip((*ours, *([] if sink is None else [sink])), theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_windows_before_a_query_take_the_kernels(monkeypatch):
    monkeypatch.setattr(segments, "_by_library", None)
    monkeypatch.setattr(segments, "plain_attention", None)
    for sight in (Sight(), Sight(None, 0, True), Sight(None, 0, False), Sight(20, 0, True)):
        ours, places = inputs(), drawn_segments()
        found, _ = attend_segments(*ours, places, sight, scale=0.3)
        torch.testing.assert_close(found, written_out(*ours, places, sight))


def test_nothing_to_attend_to():
    for places in ([], [Span(0, 2, 5, 5, 0, 3)], [Span(1, 2, 0, 9, 4, 4)]):
        for terms in (Scores(), Scores(sink=torch.zeros(HEADS)), Scores(cap=1.0)):
            q, k, v = inputs()
            out, top = attend_segments(q, k, v, places, Sight(), scale=0.3, scores=terms, top=bool(terms.cap))
            out.sum().backward()
            assert not out.any()
            assert not q.grad.any()
            assert top is None or (top == -torch.inf).all()


def test_a_recomputation_reads_the_attention_of_its_forward():
    forward, again = caching()
    places, (q, k, v) = drawn_segments(), inputs()
    sink = torch.randn(HEADS, dtype=torch.float64)
    with forward:
        first, _ = attend_segments(q, k, v, places, Sight(None, 0), scale=0.3, scores=Scores(sink=sink))
    with again, torch.no_grad():
        second, _ = attend_segments(q, torch.zeros_like(k), v, places, Sight(None, 0), scale=0.3, scores=Scores(sink=sink))
    assert torch.equal(first, second)


def test_dropout_is_drawn_again_in_backward(monkeypatch):
    """Attention is linear in v, so the gradient of v is the forward of its weights with the same draws: out · w = v · dv."""
    monkeypatch.setattr(scores, "PAIRS", 1)
    monkeypatch.setattr(segments, "MASKED_PAIRS", 1)
    for terms in (Scores(), Scores(sink=torch.zeros(HEADS))):
        q, k, v = inputs()
        out, _ = attend_segments(q, k, v, drawn_segments(), Sight(5, 9), scale=0.3, scores=terms, dropout=0.5)
        weights = torch.randn_like(out)
        (out * weights).sum().backward()
        torch.testing.assert_close((v * v.grad).sum(), (out * weights).sum())
