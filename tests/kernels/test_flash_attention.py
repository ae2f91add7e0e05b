"""Sequences of several lengths in one call: the rows that a call packs, and its results put back, beside the reference.

FlashAttention-4 needs a Hopper GPU (`tests/gpu/test_pieces.py`); its two functions stand here in plain PyTorch, with their
shapes, and see what they would.
"""

import importlib.metadata
import itertools
import tomllib
from pathlib import Path

import pytest
import torch

from octavo.kernels.attention import flash, reference
from octavo.kernels.attention.pattern import Pattern, Span
from octavo.nn.attend import attend

SHAPE = {"dim": 16, "heads": 4, "groups": 2}


class Package:
    """The functions of `flash_attn.cute.interface` that are taken; counts what it is asked for."""

    def __init__(self):
        self.packed, self.whole = 0, 0

    def _sequences(self, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        rows = zip(*(itertools.pairwise(ends.tolist()) for ends in (cu_seqlens_q, cu_seqlens_k)), strict=True)
        found = [(slice(*q), slice(*k)) for q, k in rows]
        assert max(q.stop - q.start for q, _ in found) == max_seqlen_q
        assert max(k.stop - k.start for _, k in found) == max_seqlen_k
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        return found

    def _flash_attn_fwd(self, q, k, v, *, softmax_scale, return_lse, causal, window_size_left, **lengths):
        how = {"causal": causal, "scale": softmax_scale, "window": None if window_size_left is None else window_size_left + 1}
        if not lengths:
            self.whole += 1
            return *reference.forward(q, k, v, **how), None, None, None
        self.packed += 1
        parts = [reference.forward(*(x[None] for x in (q[i], k[j], v[j])), **how) for i, j in self._sequences(**lengths)]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1), None, None, None

    def _flash_attn_bwd(self, q, k, v, out, d_out, lse, *, softmax_scale, deterministic, causal, window_size_left, **lengths):
        how = {"causal": causal, "scale": softmax_scale, "window": None if window_size_left is None else window_size_left + 1}
        if not lengths:
            return reference.backward(d_out, q, k, v, out, lse, **how)
        assert lse.shape == (q.shape[1], q.shape[0])
        parts = [
            reference.backward(*(x[None] for x in (d_out[i], q[i], k[j], v[j], out[i], lse[:, i])), **how)
            for i, j in self._sequences(**lengths)
        ]
        return [torch.cat([part[n][0] for part in parts]) for n in range(3)]


@pytest.fixture
def package(monkeypatch):
    """A package that takes tensors of any device."""
    package = Package()
    monkeypatch.setattr(flash, "_interface", lambda: package)

    def takes(q, k, *, causal, window=None):
        return not (causal and k.shape[1] < q.shape[1])

    monkeypatch.setattr(flash, "takes", takes)
    return package


def draw(batch, tokens, dim, heads, groups):
    sizes = (heads, groups, groups, heads)
    # Views into one tensor, as a joint projection gives them.
    joint = torch.randn(batch, tokens, sum(sizes) * dim, dtype=torch.float64).split([n * dim for n in sizes], 2)
    return [x.unflatten(2, (-1, dim)) for x in joint]


@pytest.mark.parametrize("window", [None, 1, 5, 400])
@pytest.mark.parametrize(
    ("documents", "packed"), [((), 0), (((0, 7, 30), (0, 1, 2, 39)), 2), (((0,), (0,)), 2), (((0, 39), (0, 20)), 2)]
)
def test_documents_are_one_call(package, documents, packed, window):
    q, k, v, d_out = draw(2, 40, **SHAPE)
    pattern = Pattern(40, documents=documents).with_window(window)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, pattern, scale=0.3)
    out.backward(d_out)
    assert (package.packed, package.whole) == ((1, 0) if packed else (0, 1))
    for span in pattern.spans(2):
        at = slice(span.b0, span.b1), slice(span.q0, span.q1)
        how = {"causal": True, "scale": 0.3, "window": window}
        own = [x[at] for x in (q, k, v)]
        wanted, lse = reference.forward(*own, **how)
        torch.testing.assert_close(out[at].detach(), wanted)
        grads = reference.backward(d_out[at], *own, wanted, lse, **how)
        for leaf, grad in zip(leaves, grads, strict=True):
            torch.testing.assert_close(leaf.grad[at], grad)


@pytest.mark.parametrize(
    "spans",
    [
        [Span(0, 1, 0, 20, 0, 20, True)],
        [Span(0, 1, 0, 20, 0, 20, True), Span(0, 1, 20, 40, 20, 40, False)],
        [Span(0, 1, 0, 20, 0, 20, True), Span(0, 1, 20, 39, 20, 39, True)],
        [Span(0, 1, 20, 40, 20, 40, True), Span(0, 1, 0, 20, 0, 20, True)],
        [Span(0, 1, 0, 20, 0, 10, True), Span(0, 1, 20, 40, 10, 40, True)],
        [Span(0, 1, 0, 20, 0, 20, True, True), Span(0, 1, 20, 40, 20, 40, True, True)],
    ],
)
def test_what_is_not_all_rows_in_order_is_not_packed(package, spans):
    q, k, *_ = draw(1, 40, **SHAPE)
    assert flash.packing(q, k, spans, None) is None


def test_rows_of_one_batch_may_lie_in_two_samples(package):
    q, k, *_ = draw(2, 40, **SHAPE)
    found = flash.packing(q, k, Pattern(40, documents=((0, 10), (0, 30))).spans(2), None)
    assert found.q_ends.tolist() == found.k_ends.tolist() == [0, 10, 40, 70, 80]
    assert (found.longest_q, found.longest_k) == (30, 30)


def test_another_version_is_named_and_not_taken(monkeypatch):
    flash.missing.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.0.0b99")
    try:
        assert flash.missing() == f"flash-attn-4 is 4.0.0b99; the tested version is {flash.VERSION}"
        assert not flash.serves((9, 0), 128)
    finally:
        flash.missing.cache_clear()


def test_it_serves_hopper_and_the_heads_that_are_tested(monkeypatch):
    monkeypatch.setattr(flash, "missing", lambda: None)
    assert [flash.serves((9, 0), dim) for dim in (64, 80, 96, 128)] == [True, False, True, True]
    assert not any(flash.serves(capability, 128) for capability in ((8, 0), (10, 0), None))
    flash.enable(False)
    try:
        assert not flash.serves((9, 0), 128)
    finally:
        flash.enable(True)


def test_the_pinned_version_is_that_of_the_extra():
    project = tomllib.loads((Path(__file__).parent.parent.parent / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["flash"] == [f"flash-attn-4=={flash.VERSION}"]
