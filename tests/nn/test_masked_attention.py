"""Window, padding between tokens and dropout, two of them together: by masks of a part of the queries at a time."""

import pytest
import torch

from octavo.errors import InputError
from octavo.kernels.attention.pattern import Pattern, pattern_of
from octavo.nn import attend as attention
from octavo.nn.attend import attend

TOKENS, HEADS, GROUPS = 700, 4, 2


def inputs():
    return [torch.randn(2, TOKENS, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]


def written_out(q, k, v, seen):
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
    return torch.einsum("bhqk,bkhd->bqhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), v)


def patterns():
    real = torch.rand(2, TOKENS) > 0.1
    real[:, :3] = torch.tensor([True, False, True])
    position_ids = torch.arange(TOKENS).where(torch.rand(2, TOKENS) > 0.01, 0)
    padded = pattern_of(position_ids, real, 2, TOKENS)
    assert padded.real_tokens is not None
    assert padded.documents
    return {
        "window": padded.with_window(50),
        "wide window": pattern_of(None, real, 2, TOKENS).with_window(500),
        "not causal": Pattern(TOKENS, causal=False, real_tokens=padded.real_tokens),
    }


@pytest.mark.parametrize("name", ["window", "wide window", "not causal"])
def test_bands_are_the_whole_mask(name, monkeypatch):
    monkeypatch.setattr(attention, "MASKED_PAIRS", 150 * TOKENS)
    pattern, made, mask = patterns()[name], [], Pattern.mask

    def noted(self, *arguments):
        seen = mask(self, *arguments)
        made.append(seen[0, 0].numel())
        return seen

    monkeypatch.setattr(Pattern, "mask", noted)
    ours = inputs()
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    weights = torch.randn_like(ours[0])
    out, wanted = attend(*ours, pattern, scale=None), written_out(*theirs, mask(pattern, 2, torch.device("cpu")))
    (out * weights).sum().backward()
    (wanted * weights).sum().backward()
    torch.testing.assert_close(out, wanted)
    for own, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, its.grad)
    assert len(made) == 2 * 5  # made again in backward
    assert max(made) <= 150 * TOKENS


@pytest.mark.parametrize("name", ["window", "wide window", "padding"])
def test_dropout_is_drawn_again_in_backward(name, monkeypatch):
    """Attention is linear in v, so the gradient of v is the forward of its weights with the same draws: out · w = v · dv."""
    monkeypatch.setattr(attention, "MASKED_PAIRS", 150 * TOKENS)
    found = patterns()
    pattern = {
        **found,
        "padding": Pattern(TOKENS, real_tokens=found["window"].real_tokens),
        "wide window": Pattern(TOKENS, window=500),
    }[name]
    q, k, v = inputs()
    out = attend(q, k, v, pattern, scale=None, dropout=0.5)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    torch.testing.assert_close((v * v.grad).sum(), (out * weights).sum())
    assert not torch.allclose(attend(q, k, v, pattern, scale=None, dropout=0.5), out)
    ones = attend(q, k, torch.ones_like(v), pattern, scale=None, dropout=0.5)
    assert float(ones.detach().mean()) == pytest.approx(1.0, abs=0.05)


def test_one_band_makes_its_mask_once(monkeypatch):
    made, mask = [], Pattern.mask
    monkeypatch.setattr(Pattern, "mask", lambda *arguments: made.append(1) or mask(*arguments))
    attend(*inputs(), patterns()["window"], scale=None).sum().backward()
    assert made == [1]


@pytest.mark.parametrize(
    "pattern", [Pattern(4, documents=((0, 2),)), Pattern(4, real_tokens=torch.ones(3, 4).bool()), Pattern(5)]
)
def test_a_pattern_of_another_batch_is_refused(pattern):
    x = torch.randn(2, 4, 2, 8)
    with pytest.raises(InputError, match=r"is for \d (samples|tokens), and there are [24]: create another"):
        attend(x, x, x, pattern, scale=None)
