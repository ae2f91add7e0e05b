"""Attention's reference against a softmax written out in float64 and PyTorch's derivatives of it; and joins of its pieces."""

import pytest
import torch

from octavo.kernels.attention import pieces, reference
from octavo.kernels.attention.pattern import Span
from octavo.kernels.attention.pieces import Attended, Gradients

CASES = {
    "causal": (7, 7, True, None),
    "more keys": (5, 9, True, None),
    "fewer keys": (9, 4, True, None),
    "full": (6, 11, False, None),
    "window": (9, 9, True, 3),
    "window with more keys": (4, 11, True, 6),
    "window of 1": (5, 5, True, 1),
}


def draw(queries, keys, heads=4, groups=2, batch=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, queries, heads, 8), (batch, keys, groups, 8), (batch, keys, groups, 8), (batch, queries, heads, 8)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def written_out(q, k, v, causal, window, scale):
    """[B, Tq, H, D] and [B, H, Tq]; a query without keys gives 0 and −∞."""
    per_group = q.shape[2] // k.shape[2]
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(per_group, 2)) * scale
    behind = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    seen = (behind >= 0) if causal else torch.ones_like(behind, dtype=torch.bool)
    if window is not None:
        seen &= behind < window
    logits = logits.masked_fill(~seen, -torch.inf)
    weights = logits.softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(per_group, 2)), logits.logsumexp(-1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [3, 512])
def test_output_and_gradients_are_those_of_a_softmax_written_out(case, block, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK", block)
    queries, keys, causal, window = CASES[case]
    q, k, v, d_out = draw(queries, keys)
    for x in (q, k, v):
        x.requires_grad_()
    wanted, wanted_lse = written_out(q, k, v, causal, window, 0.3)
    out, lse = reference.forward(q.detach(), k.detach(), v.detach(), causal=causal, scale=0.3, window=window)
    torch.testing.assert_close(out, wanted.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, wanted_lse.detach(), rtol=0, atol=1e-12)
    empty = max(0, queries - keys) if causal else 0
    (wanted[:, empty:] * d_out[:, empty:]).sum().backward()
    found = reference.backward(d_out, q.detach(), k.detach(), v.detach(), out, lse, causal=causal, scale=0.3, window=window)
    for ours, x in zip(found, (q, k, v), strict=True):
        torch.testing.assert_close(ours, x.grad.nan_to_num(0.0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_scaled_dot_product_attention(dtype):
    q, k, v, d_out = (x.to(dtype).requires_grad_() for x in draw(600, 600, dtype=torch.float32))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
    wanted.backward(d_out)
    out, lse = reference.forward(q.detach(), k.detach(), v.detach(), causal=True, scale=8**-0.5)
    assert out.dtype == lse.dtype == torch.float32
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(out, wanted.detach().float(), rtol=tolerance, atol=tolerance)
    grads = reference.backward(d_out, q.detach(), k.detach(), v.detach(), out, lse, causal=True, scale=8**-0.5)
    for ours, x in zip(grads, (q, k, v), strict=True):
        assert (ours - x.grad.float()).norm() <= tolerance * x.grad.float().norm()


SPLITS = {
    "keys in three": [Span(0, 2, 0, 6, 0, 4, False), Span(0, 2, 0, 6, 4, 5, False), Span(0, 2, 0, 6, 5, 12, False)],
    "a triangle and a rectangle": [Span(0, 2, 0, 6, 6, 12, True), Span(0, 2, 0, 6, 0, 6, False)],
    "samples apart": [Span(0, 1, 0, 6, 0, 12, False), Span(1, 2, 0, 6, 0, 12, False)],
    "rows without keys": [Span(0, 2, 2, 6, 0, 3, True), Span(0, 2, 2, 6, 3, 12, False)],
}


@pytest.mark.parametrize("case", SPLITS)
def test_pieces_are_joined_exactly(case):
    spans = SPLITS[case]
    q, k, v, d_out = draw(6, 12)
    seen = torch.zeros(2, 6, 12, dtype=torch.bool)
    for span in spans:
        behind = torch.arange(span.q1 - span.q0)[:, None] + span.k1 - span.k0 - span.q1 + span.q0
        own = behind >= torch.arange(span.k1 - span.k0) if span.causal else torch.tensor(True)
        seen[span.b0 : span.b1, span.q0 : span.q1, span.k0 : span.k1] |= own
    some = seen.any(-1, keepdim=True)  # PyTorch's derivative of an empty softmax is NaN
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen & some, -torch.inf)[:, None]
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    logits = torch.einsum("bqhd,bkhd->bhqk", inputs[0], inputs[1].repeat_interleave(2, 2)) * 0.3 + mask
    weights = logits.softmax(-1) * some[:, None]
    wanted = torch.einsum("bhqk,bkhd->bqhd", weights, inputs[2].repeat_interleave(2, 2))
    (wanted * d_out).sum().backward()

    attended = Attended(q, scale=0.3)
    attended.add(k, v, spans)
    out, lse = attended.result()
    torch.testing.assert_close(out, wanted.detach(), rtol=0, atol=1e-12)
    assert torch.equal(lse == -torch.inf, ~seen.any(-1)[:, None].expand(2, 4, 6))
    grads = Gradients(d_out, q, out, lse, scale=0.3)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    grads.add(k, v, spans, dk, dv)
    for ours, x in zip((grads.dq, dk, dv), inputs, strict=True):
        torch.testing.assert_close(ours, x.grad, rtol=0, atol=1e-12)


def test_queries_without_any_key_are_zero():
    q, *_ = draw(5, 5, dtype=torch.bfloat16)
    out, lse = Attended(q, scale=1.0).result()
    assert torch.equal(out, torch.zeros_like(q))
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize(("queries", "keys"), [(12, 12), (5, 12), (13, 17), (1, 9), (7, 7)])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 11])
def test_a_window_is_triangles_and_rectangles(queries, keys, window, monkeypatch):
    q, k, v, d_out = draw(queries, keys)
    setting = {"causal": True, "scale": 0.3, "window": window}
    wanted_out, wanted_lse = reference.forward(q, k, v, **setting)
    wanted = reference.backward(d_out, q, k, v, wanted_out, wanted_lse, **setting)
    monkeypatch.setattr(pieces, "_splits_window", lambda q, window: True)
    spans = [Span(0, 2, 0, queries, 0, keys, True)]
    parts = list(pieces._parts(q, k, spans, window))
    assert all(part.window is None for part in parts)
    seen = [part.span for part in parts]
    assert all(not tile.causal or tile.q1 - tile.q0 == tile.k1 - tile.k0 for tile in seen) or window >= keys
    attended = Attended(q, scale=0.3, window=window)
    attended.add(k, v, spans)
    out, lse = attended.result()
    torch.testing.assert_close(out, wanted_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-12)
    grads = Gradients(d_out, q, out, lse, scale=0.3, window=window)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    grads.add(k, v, spans, dk, dv)
    for found, exact in zip((grads.dq, dk, dv), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)
