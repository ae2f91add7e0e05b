"""Attention by pieces on a GPU: cuDNN with its log-sum-exp, joined, windows included, against the reference in float32."""

import itertools

import pytest
import torch

from octavo.kernels.attention import library, reference
from octavo.kernels.attention.pattern import Pattern, Span
from octavo.kernels.attention.pieces import Attended, Gradients
from octavo.nn.attend import attend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def draw(batch, queries, keys, heads, groups, dim, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = ((batch, queries, heads), (batch, keys, groups), (batch, keys, groups), (batch, queries, heads))
    return [torch.randn(*size, dim, device="cuda", generator=generator).bfloat16() for size in sizes]


def close(found, wanted, tolerance=1e-2):
    assert (found.float() - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("dim", library._HEADS)
@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(512, 512, True), (384, 1024, False), (1000, 1000, True), (128, 77, False)]
)
def test_output_and_gradients_are_the_references(dim, heads, groups, queries, keys, causal):
    q, k, v, d_out = draw(2, queries, keys, heads, groups, dim)
    assert library.takes(q, k, causal=causal, window=None)
    how = {"causal": causal, "scale": dim**-0.5}
    out, lse = library.forward(q, k, v, **how)
    wanted, wanted_lse = reference.forward(q, k, v, **how)
    close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
    for found, exact in zip(
        library.backward(d_out, q, k, v, out, lse, **how),
        reference.backward(d_out, q, k, v, wanted, wanted_lse, **how),
        strict=True,
    ):
        close(found, exact, 2e-2)


@pytest.mark.parametrize("dim", library._HEADS)
def test_a_part_of_the_keys_has_its_part_of_the_gradients(dim):
    q, k, v, d_out = draw(1, 512, 1024, 8, 2, dim)
    spans = [Span(0, 1, 0, 512, 512, 1024, True), Span(0, 1, 0, 512, 0, 512, False)]
    attended = Attended(q, scale=dim**-0.5)
    attended.add(k, v, spans)
    out, lse = attended.result()
    how = {"causal": True, "scale": dim**-0.5}
    wanted, wanted_lse = reference.forward(q, k, v, **how)
    close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
    grads = Gradients(d_out, q, out, lse, scale=dim**-0.5)
    dk, dv = (torch.zeros(k.shape, device="cuda") for _ in range(2))
    grads.add(k, v, spans, dk, dv)
    for found, exact in zip((grads.dq, dk, dv), reference.backward(d_out, q, k, v, wanted, wanted_lse, **how), strict=True):
        close(found, exact, 2e-2)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("documents", [(0, 1, 2, 4, 7), (0, 5, 6, 23)])
def test_spans_of_few_tokens(documents, dim):
    ends = (*documents[1:], 90)
    spans = [Span(0, 1, first, end, first, end, True) for first, end in zip(documents, ends, strict=True)]
    spans += [Span(0, 1, later, later + 1, 0, first, False) for first, later in itertools.pairwise(documents[1:])]
    q, k, v, d_out = draw(1, 90, 90, 4, 2, dim)
    attended = Attended(q, scale=dim**-0.5)
    attended.add(k, v, spans)
    out, lse = attended.result()
    seen = torch.zeros(90, 90, dtype=torch.bool, device="cuda")
    for span in spans:
        block = torch.ones(span.q1 - span.q0, span.k1 - span.k0, dtype=torch.bool, device="cuda")
        seen[span.q0 : span.q1, span.k0 : span.k1] |= block.tril() if span.causal else block
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    wide_q, *wide = leaves[0], *(x.repeat_interleave(2, 2) for x in leaves[1:])
    logits = torch.einsum("bqhd,bkhd->bhqk", wide_q, wide[0]) * dim**-0.5
    logits = logits.masked_fill(~seen, -torch.inf)
    wanted = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), wide[1])
    wanted.backward(d_out.float())
    close(out, wanted.detach())
    torch.testing.assert_close(lse, logits.logsumexp(-1).detach(), rtol=1e-3, atol=1e-3)
    grads = Gradients(d_out, q, out, lse, scale=dim**-0.5)
    dk, dv = (torch.zeros(k.shape, device="cuda") for _ in range(2))
    grads.add(k, v, spans, dk, dv)
    for found, leaf in zip((grads.dq, dk, dv), leaves, strict=True):
        close(found, leaf.grad, 2e-2)


@pytest.mark.parametrize("window", [256, 300, 1000, 64])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_window(window, dim):
    q, k, v, d_out = draw(2, 1536, 1536, 8, 2, dim)
    pattern = Pattern(1536, window=window)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, pattern, scale=None)
    out.backward(d_out)
    how = {"causal": True, "scale": dim**-0.5, "window": window}
    wanted, lse = reference.forward(q, k, v, **how)
    close(out.detach(), wanted)
    for leaf, exact in zip(leaves, reference.backward(d_out, q, k, v, wanted, lse, **how), strict=True):
        close(leaf.grad, exact, 2e-2)


def test_documents_are_the_references_document_by_document():
    q, k, v, d_out = draw(2, 1024, 1024, 8, 2, 128)
    pattern = Pattern(1024, documents=((0, 100, 700), (0, 1, 513)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, pattern, scale=None)
    out.backward(d_out)
    for span in pattern.spans(2):
        b, rows = slice(span.b0, span.b1), slice(span.q0, span.q1)
        own, how = [x[b, rows] for x in (q, k, v)], {"causal": True, "scale": 128**-0.5}
        wanted, lse = reference.forward(*own, **how)
        close(out[b, rows].detach(), wanted)
        grads = reference.backward(d_out[b, rows], *own, wanted, lse, **how)
        for leaf, exact in zip(leaves, grads, strict=True):
            # A document of one token has gradients of queries and keys that are 0 but for rounding.
            assert (leaf.grad[b, rows].float() - exact).norm() <= 2e-2 * exact.norm() + 1e-2
