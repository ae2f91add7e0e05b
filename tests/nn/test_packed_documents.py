"""Documents whose boundaries are a tensor of fixed length: attention and whole decoders beside those with exact boundaries."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import octavo
from octavo.errors import InputError
from octavo.kernels.attention import reference
from octavo.kernels.attention.cached import caching
from octavo.kernels.attention.pattern import Pattern, packed_pattern, pattern_of
from octavo.models.decoder import Decoder
from octavo.nn.attend import attend

T = 40
CUTS = {"one each": [[], []], "some": [[5, 30], [1, 2, 39]], "every token": [list(range(1, T)), [17]]}


def positions(cuts, tokens=T):
    """[B, T] of documents that begin at 0 and at these tokens."""
    return torch.stack([torch.cat([torch.arange(b - a) for a, b in itertools.pairwise([0, *row, tokens])]) for row in cuts])


def attended(pattern, *, recomputed=False):
    """Output and gradients in float64, of the same inputs in each call; recomputed: attention's result is read from a cache."""
    torch.manual_seed(3)
    q, k, v, d_out = (torch.randn(2, T, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if recomputed:
        stored, read = caching()
        with stored:
            attend(*leaves, pattern, scale=0.3)
        with read:
            out = attend(*leaves, pattern, scale=0.3)
    else:
        out = attend(*leaves, pattern, scale=0.3)
    return out.detach(), *torch.autograd.grad(out, leaves, d_out)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("spare", [0, 9])
def test_padded_boundaries_are_exact_ones(cuts, window, spare, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK", 16)
    places = positions(CUTS[cuts])
    documents = sum(len(row) + 1 for row in CUTS[cuts])
    pattern, fits = packed_pattern(places, 2, documents + spare)
    assert bool(fits)
    assert len(pattern.ends) == documents + spare + 1
    assert pattern.ends[documents:].tolist() == [2 * T] * (spare + 1)
    exact = pattern_of(places, None, 2, T)
    for found, wanted in zip(attended(pattern.with_window(window)), attended(exact.with_window(window)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    if cuts == "some":
        cached = attended(pattern.with_window(window), recomputed=True)
        assert all(map(torch.equal, cached, attended(pattern.with_window(window))))


def test_more_documents_than_there_is_room_for_are_said():
    assert not packed_pattern(positions(CUTS["some"]), 2, 6)[1]
    assert bool(packed_pattern(positions(CUTS["some"])[:1], 2, 6)[1])  # one row of positions for both samples


def test_dropout_with_padded_boundaries_is_refused():
    q = torch.randn(1, T, 2, 8)
    with pytest.raises(InputError, match=r"attention_dropout = 0\.1 with documents .* Set it to 0, or give position_ids on"):
        attend(q, q, q, packed_pattern(positions([[4]]), 1, 3)[0], scale=None, dropout=0.1)


@pytest.fixture(scope="module")
def decoder():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    torch.manual_seed(0)
    return octavo.transform(AutoModelForCausalLM.from_config(config, dtype=torch.float32), dtype=torch.float32)


def step(model, places, **more):
    ids = torch.randint(64, places.shape, generator=torch.Generator().manual_seed(2))
    loss = model(input_ids=ids, labels=ids, position_ids=places, **more).loss
    return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))


def test_a_step_with_padded_boundaries_is_the_step_with_exact_ones(decoder, monkeypatch):
    places = positions([[3, 20], [1]], 40)
    exact = step(decoder, places)
    for found, wanted in zip(step(decoder, places, max_documents=5), exact, strict=True):
        assert torch.equal(found, wanted)  # on a CPU the host reads them
    pack = lambda self, most, ids, places, *_: packed_pattern(places, len(ids), most)  # noqa: E731
    monkeypatch.setattr(Decoder, "_packed", pack)  # as on a GPU
    for found, wanted in zip(step(decoder, places, max_documents=9), exact, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert step(decoder, places, max_documents=4)[0].isnan()


@pytest.mark.parametrize(
    ("most", "more", "message"),
    [
        (4, {}, "max_documents = 4, but the positions have 5 documents: give 5 or more"),
        (0, {}, "max_documents = 0: give a whole number, at least 1"),
        (True, {}, "max_documents = True: give a whole number"),
        (9, {"position_ids": None}, "max_documents = 9: give a whole number, at least 1, with position_ids"),
        (9, {"attention_mask": torch.ones(2, 40)}, "max_documents = 9 with an attention_mask"),
    ],
)
def test_a_limit_that_does_not_fit_is_refused(most, more, message, decoder):
    ids = torch.zeros(2, 40, dtype=torch.int64)
    given = {"position_ids": positions([[3, 20], [1]], 40), **more}
    with pytest.raises(InputError, match=message):
        decoder(input_ids=ids, labels=ids, max_documents=most, **given)


def test_a_pattern_of_ends_has_no_documents_on_the_host():
    pattern = packed_pattern(positions([[4]]), 1, 3)[0]
    assert pattern.documents == ()
    assert isinstance(pattern.with_window(5), Pattern)
    assert pattern.with_window(5).ends is pattern.ends
