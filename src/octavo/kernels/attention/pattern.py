"""Attention patterns as one value on the host, `Pattern`, and their parts for kernels: `Span`, a rectangle or a triangle.

Causal attention within documents and a sliding window is, for every query, one interval of keys. So no pattern needs a mask of
T × T: it is a list of spans, each of which a kernel for plain causal or full attention computes. Only padding inside a sequence
(`real_tokens`) is not an interval.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import InputError


class Span(NamedTuple):
    """Samples b0 … b1 of a batch: their queries q0 … q1 attend to the keys k0 … k1, the ends not included.

    causal: the last query sees up to the last key, the one before it one less; False: every query sees every key.
    reversed: the same with queries and keys in reverse order.
    """

    b0: int
    b1: int
    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool = False
    reversed: bool = False


class Packing(NamedTuple):
    """Sequences that are contiguous in the rows [B·Tq] of queries and [B·Tk] of keys.

    q_ends, k_ends: int32 [sequences + 1] on their device, 0 and then the end of each; the last one may be repeated.
    """

    q_ends: Tensor
    k_ends: Tensor
    longest_q: int
    longest_k: int


class RealFirst(NamedTuple):
    """A causal pattern whose real tokens are first and padding last.

    order: int64 [B, T], places of the tokens. padded: bool [B, T] in that order, True for padding. spans: in that order, all
    pairs but those of a padding token with itself.
    """

    order: Tensor
    padded: Tensor
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Pattern:
    """The keys that each query of a batch attends to.

    Attributes:
        tokens: T, of the whole sequence, also on a rank that holds a part of it.
        causal: no query attends to a later key.
        documents: for each sample the first token of each of its documents, ascending from 0; empty: one document a sample.
            A query attends only to keys of its document.
        window: number of keys that a query attends to at most, including its own position; None for all.
        real_tokens: bool [B, T], False for padding, to which no other token attends, if some is between real tokens.
        ends: document boundaries on the device instead of `documents` on the host: int32 [N + 1], 0 and then the end of each
            document among all B · T tokens, the last end repeated. None if the boundaries are on the host.
    """

    tokens: int
    causal: bool = True
    documents: tuple[tuple[int, ...], ...] = ()
    window: int | None = None
    real_tokens: Tensor | None = field(default=None, compare=False)
    ends: Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.window is not None and (not isinstance(self.window, int) or self.window < 1 or not self.causal):
            raise InputError(f"a window of {self.window} keys: give a whole number, at least 1, and causal attention.")

    def with_window(self, window: int | None) -> Pattern:
        """The pattern of a layer with a window; a window of at least T keys has no effect."""
        if window is None or window >= self.tokens:
            return self
        return replace(self, window=window)

    def bounds(self, sample: int) -> Iterator[tuple[int, int]]:
        """(first token, end) of each document of a sample."""
        starts = self.documents[sample] if self.documents else (0,)
        return zip(starts, (*starts[1:], self.tokens), strict=True)

    def spans(self, batch: int) -> list[Span]:
        """Spans that cover all pairs of a query and a key it attends to. With `ends` they cover more pairs. The window
        applies within each span."""
        if not self.documents:
            return [Span(0, batch, 0, self.tokens, 0, self.tokens, self.causal)]
        return [
            Span(sample, sample + 1, first, end, first, end, self.causal)
            for sample in range(batch)
            for first, end in self.bounds(sample)
        ]

    @functools.cached_property
    def real_first(self) -> RealFirst:
        """The pattern with its real tokens in front, where padding is between real tokens, without a window."""
        assert self.real_tokens is not None
        spans: list[Span] = []
        for sample, real in enumerate(self.real_tokens):
            before = torch.cat((real.new_zeros(1, dtype=torch.int64), real.cumsum(0)))  # real tokens before each place
            at = int(before[-1])  # padding follows all real tokens
            for first, end in self.bounds(sample):
                low, high = int(before[first]), int(before[end])
                if low < high:
                    spans.append(Span(sample, sample + 1, low, high, low, high, True))
                seen, counts = before[first:end][~real[first:end]].unique_consecutive(return_counts=True)
                for last, count in zip(seen.tolist(), counts.tolist(), strict=True):
                    if last > low:
                        spans.append(Span(sample, sample + 1, at, at + count, low, last, False))
                    at += count
        order = (~self.real_tokens).to(torch.int8).argsort(dim=1, stable=True)
        return RealFirst(order, (~self.real_tokens).gather(1, order), tuple(spans))

    def mask(self, batch: int, device: torch.device, queries: slice | None = None, keys: slice | None = None) -> Tensor:
        """bool [B, 1, queries, keys], True where a query attends to a key; all T of both by default."""
        queries, keys = (slice(0, self.tokens) if part is None else part for part in (queries, keys))
        rows, columns = (torch.arange(part.start, part.stop, device=device) for part in (queries, keys))
        ahead = rows[:, None] - columns
        seen = torch.ones(batch, 1, *ahead.shape, dtype=torch.bool, device=device)
        if self.causal:
            seen &= ahead >= 0
        if self.window is not None:
            seen &= ahead < self.window
        if self.documents:
            starts = torch.zeros(batch, self.tokens, dtype=torch.int64, device="cpu")
            for sample, firsts in enumerate(self.documents):
                starts[sample, list(firsts)] = 1
            number = starts.cumsum(1).to(device)
            seen &= number[:, None, queries, None] == number[:, None, None, keys]
        if self.real_tokens is not None:
            # A padded query sees itself, so that no row of the softmax is empty.
            seen &= self.real_tokens.to(device)[:, None, None, keys] | (ahead == 0)
        return seen

    def bands(self, pairs: int) -> Iterator[tuple[slice, slice]]:
        """Parts of the queries, and all keys that they may see: some `pairs` of both at a time."""
        rows = max(128, pairs // self.tokens)
        for first in range(0, self.tokens, rows):
            end = min(first + rows, self.tokens)
            begin = 0 if self.window is None else max(0, first - self.window + 1)
            yield slice(first, end), slice(begin, end if self.causal else self.tokens)


def pattern_of(
    position_ids: Tensor | None, attention_mask: Tensor | None, batch: int, tokens: int, *, padded_to: int | None = None
) -> Pattern:
    """The causal pattern of a batch; tensors on a GPU are waited for, those on the host cost nothing there.

    Args:
        position_ids: [B or 1, T]; a position that is not the previous one plus 1 begins a document.
        attention_mask: [B, T], 0 for padding, to which no token attends. Padding at either end is a separate document.
        batch, tokens: B, T.
        padded_to: tokens of the pattern, if more; each of the additional tokens is a separate document.

    Raises:
        InputError: an additive mask (with negative numbers).
    """
    whole = padded_to or tokens
    if position_ids is None and attention_mask is None and whole == tokens:
        return Pattern(whole)
    begins, real, negative = _on_host(position_ids, attention_mask, batch, tokens)
    if bool(negative.any()):
        assert attention_mask is not None
        raise InputError(
            f"attention_mask has the value {attention_mask.min().item():g}, as a mask that is added to logits: give 1 for "
            "tokens, and 0 for padding."
        )
    cuts = real.new_zeros(batch, whole)
    cuts[:, :tokens] = begins
    real_tokens = None
    edges = real[:, 1:] != real[:, :-1]
    if bool((edges.sum(1) > 2).any()) or bool(((edges.sum(1) == 2) & real[:, 0]).any()):
        real_tokens = real.new_ones(batch, whole)
        real_tokens[:, :tokens] = real
    else:
        cuts[:, 1:tokens] |= edges
    cuts[:, tokens:] = True
    if not bool(cuts.any()):
        return Pattern(whole, real_tokens=real_tokens)
    cuts[:, 0] = True
    documents = tuple(tuple(row.nonzero().flatten().tolist()) for row in cuts)
    return Pattern(whole, documents=documents, real_tokens=real_tokens)


def packed_pattern(position_ids: Tensor, batch: int, most: int) -> tuple[Pattern, Tensor]:
    """The causal pattern of a batch of at most `most` documents, found on the device of the positions; nothing is waited for.

    Shapes do not depend on the positions, so that a CUDA graph repeats this for others.

    Args:
        position_ids: [B or 1, T]; a position that is not the previous one plus 1 begins a document.
        batch: B.
        most: documents of all samples together.

    Returns:
        The pattern, and bool []: False if there are more documents, of which the pattern has the first.
    """
    tokens = position_ids.shape[1]
    begins = torch.ones(position_ids.shape, dtype=torch.bool, device=position_ids.device)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    number = begins.expand(batch, tokens).flatten().cumsum(0)  # of each token's document, from 1 on
    ends = torch.searchsorted(number, torch.arange(1, most + 2, device=number.device), out_int32=True)
    return Pattern(tokens, ends=ends), ends[-1] == len(number)


def _on_host(
    position_ids: Tensor | None, attention_mask: Tensor | None, batch: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """bool [B, T] on the host: a document begins, not padding, negative in the mask. A GPU that has both is waited for once."""
    first = next(x for x in (position_ids, attention_mask, torch.empty(0, device="cpu")) if x is not None)
    begins = torch.zeros(batch, tokens, dtype=torch.bool, device=first.device)
    if position_ids is not None:
        begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    mask = begins.new_ones(batch, tokens) if attention_mask is None else attention_mask
    rows = [begins, *(x.expand(batch, tokens) for x in (mask.bool(), mask < 0))]
    if len({row.device for row in rows}) > 1:
        rows = [row.cpu() for row in rows]
    begins, real, negative = torch.stack(rows).cpu()
    return begins, real, negative


def merged(spans: Iterable[Span]) -> list[Span]:
    """Neighbouring rectangles as one: fewer and larger calls of a kernel."""
    out: list[Span] = []
    for span in spans:
        last = out[-1] if out else None
        if last is not None and not (last.causal or span.causal) and last[:2] == span[:2]:
            if last[2:4] == span[2:4] and last.k1 == span.k0:
                out[-1] = last._replace(k1=span.k1)
                continue
            if last[4:6] == span[4:6] and last.q1 == span.q0:
                out[-1] = last._replace(q1=span.q1)
                continue
        out.append(span)
    return out
