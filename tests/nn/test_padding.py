"""Attention around padding between tokens: the mask written out in float64, and no mask of T × T on the way."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.attention.cached import caching
from octavo.kernels.attention.pattern import Pattern, pattern_of
from octavo.nn.attend import attend

MASK = Pattern.mask


def written_out(q, k, v, pattern, scale):
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    logits = logits.masked_fill(~MASK(pattern, q.shape[0], q.device), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v)


def inputs(batch, tokens, heads, groups, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, tokens, n, 8, generator=draw).to(dtype).requires_grad_() for n in (heads, groups, groups)]


def refused(*_):
    raise AssertionError("not here")


@st.composite
def rows(draw):
    """Real tokens and positions of [B, T], of which a row at least has padding between tokens."""
    tokens = draw(st.integers(3, 20))
    real = torch.tensor(
        [draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)) for _ in range(draw(st.integers(1, 3)))]
    )
    real[0, :3] = torch.tensor([True, False, True])
    starts = torch.tensor([draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)) for _ in real])
    return real, starts if draw(st.booleans()) else None, draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))


@settings(deadline=None, max_examples=60)
@given(rows())
def test_it_is_the_mask_written_out(case):
    real, starts, (heads, groups) = case
    batch, tokens = real.shape
    positions = None if starts is None else torch.arange(tokens).where(~starts, 0)
    pattern = pattern_of(positions, real.long(), batch, tokens)
    ours, theirs = inputs(batch, tokens, heads, groups), inputs(batch, tokens, heads, groups)
    weights = torch.randn(ours[0].shape, dtype=torch.float64)
    wanted = written_out(*theirs, pattern, 0.4)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Pattern, "mask", refused)
        out = attend(*ours, pattern, scale=0.4)
        (out * weights).sum().backward()
    (wanted * weights).sum().backward()
    torch.testing.assert_close(out, wanted)
    for own, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, its.grad)


def test_half_precision_and_a_result_that_is_kept():
    real = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    pattern = pattern_of(None, real, 2, 8)
    ours, exact = inputs(2, 8, 4, 2, torch.bfloat16), inputs(2, 8, 4, 2, torch.bfloat16)
    forward, again = caching()
    with forward:
        out = attend(*ours, pattern, scale=None)
    with again, pytest.MonkeyPatch.context() as patched:
        patched.setattr("octavo.nn.padding.Attended", refused)
        assert torch.equal(attend(*ours, pattern, scale=None), out)
    wanted = written_out(*(x.double() for x in exact), pattern, 8**-0.5)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    wanted.square().sum().backward()
    for found, right in [(out, wanted), *((x.grad, y.grad) for x, y in zip(ours, exact, strict=True))]:
        assert (found.double() - right.double()).norm() < 0.01 * right.double().norm()
