"""Lengths and places of the sequences of a batch, from Transformer Engine's cumulative lengths or padding masks.

They are read on the host, a wait for the device, once for a tensor: all layers of a model are given the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from octavo.errors import InputError
from octavo.nn.segments import Segment

_read: Any = WeakIdKeyDictionary()
"""Tensor → (its version, what was read)."""


def _once(tensor: Tensor, read: Callable[[Tensor], Any]) -> Any:
    if tensor.is_inference():  # which has no version
        return read(tensor)
    version, found = _read.get(tensor, (-1, None))
    if version != tensor._version:
        found = read(tensor)
        _read[tensor] = tensor._version, found
    return found


def cumulative(name: str, tensor: Any) -> tuple[int, ...]:
    """Cumulative lengths of a call's argument, int32 or int64 [sequences + 1].

    Raises:
        InputError: they do not begin with 0, or fall.
    """

    def read(tensor: Tensor) -> tuple[int, ...]:
        ends = tuple(tensor.tolist())
        if ends[0] or any(end < start for start, end in itertools.pairwise(ends)):
            raise InputError(f"{name}={list(ends)[:8]}: cumulative lengths begin with 0 and do not fall.")
        return ends

    if not isinstance(tensor, Tensor) or tensor.dim() != 1 or not len(tensor) or tensor.dtype not in (torch.int32, torch.int64):
        shown = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InputError(f"{name} is {shown}: give cumulative lengths, torch.int32 [sequences + 1].")
    found: tuple[int, ...] = _once(tensor, read)
    return found


def lengths_of(mask: Tensor) -> tuple[int, ...]:
    """The tokens of each sample by a padding mask, bool [B, 1, 1, T], True for padding, which has to stand behind them.

    Raises:
        InputError: padding in front of a token.
    """

    def read(mask: Tensor) -> tuple[int, ...]:
        padded = mask[:, 0, 0].cpu()
        if bool((padded[:, :-1] & ~padded[:, 1:]).any()):
            raise InputError(
                "attention_mask has padding in front of tokens: with other numbers of queries than keys, a bias, a sink, "
                "ALiBi or a cap, padding has to stand behind them. Move it there, or give cu_seqlens_q and cu_seqlens_kv."
            )
        return tuple((~padded).sum(1).tolist())

    found: tuple[int, ...] = _once(mask, read)
    return found


def places(
    name: str, ends: Sequence[int], padded: Sequence[int] | None, tokens: int, *, packed: bool
) -> list[tuple[int, int, int]]:
    """(sample, first, end) of each sequence: one behind the other if `packed`, else one a sample.

    Args:
        name: cu_seqlens_q or cu_seqlens_kv.
        ends: cumulative lengths.
        padded: where the sequences begin, packed with padding behind them.
        tokens: of all packed sequences, or of a sample.

    Raises:
        InputError: a sequence is longer than its place.
    """
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    if not packed:
        if lengths and max(lengths) > tokens:
            raise InputError(f"{name} has a sequence of {max(lengths)} tokens: a sample has {tokens}.")
        return [(sample, 0, length) for sample, length in enumerate(lengths)]
    begins = ends if padded is None else padded
    if len(begins) != len(ends):
        raise InputError(f"{name}_padded has {len(begins)} entries: {name} has {len(ends)}.")
    for at, (length, (first, following)) in enumerate(zip(lengths, itertools.pairwise(begins), strict=True)):
        if length > following - first:
            raise InputError(
                f"{name}: sequence {at} has {length} tokens, and by {name}_padded a place for {following - first}."
            )
    last = max((first + length for first, length in zip(begins, lengths, strict=False)), default=0)
    if last > tokens:
        raise InputError(f"{name}: sequences end at token {last}, and there are {tokens}.")
    return [(0, first, first + length) for first, length in zip(begins, lengths, strict=False)]


def joined(queries: list[tuple[int, int, int]], keys: list[tuple[int, int, int]]) -> list[Segment]:
    """Segments of the sequences' queries and keys.

    Raises:
        InputError: other numbers of sequences.
    """
    if len(queries) != len(keys):
        raise InputError(f"cu_seqlens_q is of {len(queries)} sequences, and cu_seqlens_kv of {len(keys)}: give as many.")
    pairs = zip(queries, keys, strict=True)
    return [Segment(sample, sample + 1, first, end, k0, k1) for (sample, first, end), (_, k0, k1) in pairs]


def positions(ends: Sequence[int], tokens: int, *, parts: int = 1, part: int = 0) -> Tensor:
    """int64 [tokens] on the host, the position of each packed token in its sequence; −1 behind all of them.

    ends: where sequences begin and end, without padding or with it. parts: ranks that share each sequence in 2 · `parts`
    chunks, of which rank `part` has this one and its mirror image; `tokens` are then those of the rank.
    """
    out = torch.full((tokens,), -1, dtype=torch.int64)
    for start, end in itertools.pairwise(ends):
        first, last = start // parts, end // parts
        out[first:last] = chunks(last - first, parts, part)[: max(0, tokens - first)]
    return out


def chunks(tokens: int, parts: int, part: int) -> Tensor:
    """Positions of the tokens that a rank has of a sequence shared by `parts`; see `positions`."""
    if parts == 1:
        return torch.arange(tokens)
    half = tokens // 2
    behind = parts * tokens - (part + 1) * half
    return torch.cat((torch.arange(part * half, part * half + half), torch.arange(behind, behind + half)))
