"""Lengths and offsets of the sequences of a batch, from Transformer Engine's cumulative lengths or padding masks.

They are read on the host at each call, which waits for the device unless the tensor is on the CPU. Nothing is cached: writes
through `.data` or by a kernel could not be detected.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.errors import InputError
from octavo.kernels.attention.pattern import Span

INTEGERS = (torch.int32, torch.int64)


def shown(value: Any) -> str:
    """Dtype and shape of a tensor, the class name of other objects, for messages."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def cumulative(name: str, tensor: Any) -> tuple[int, ...]:
    """Cumulative lengths of a call's argument, int32 or int64 [sequences + 1].

    Raises:
        InputError: they do not begin with 0, or fall.
    """
    if not isinstance(tensor, Tensor) or tensor.dim() != 1 or not len(tensor) or tensor.dtype not in INTEGERS:
        raise InputError(f"{name} is {shown(tensor)}: give cumulative lengths, torch.int32 [sequences + 1].")
    ends = tuple(tensor.tolist())
    if ends[0] or any(end < start for start, end in itertools.pairwise(ends)):
        raise InputError(f"{name}={list(ends)[:8]}: cumulative lengths begin with 0 and do not fall.")
    return ends


def lengths_of(mask: Tensor) -> tuple[int, ...]:
    """The number of tokens of each sample, from a padding mask, bool [B, 1, 1, T], True for padding, which must be on the
    right.

    Raises:
        InputError: padding before a token.
    """
    padded = mask[:, 0, 0].cpu()
    if bool((padded[:, :-1] & ~padded[:, 1:]).any()):
        raise InputError(
            "attention_mask has padding in front of tokens: with other numbers of queries than keys, a bias, a sink, "
            "ALiBi or a cap, padding must be on the right. Move it there, or give cu_seqlens_q and cu_seqlens_kv."
        )
    return tuple((~padded).sum(1).tolist())


def check_longest(name: str, value: Any, longest: int) -> None:
    """Check max_seqlen_q or max_seqlen_kv. Octavo does not need it, but a wrong value is refused.

    Raises:
        InputError: it is not a whole number, or below the longest sequence.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} is {shown(value)}: give a whole number of at least {longest}, or leave it out.")
    if value < longest:
        raise InputError(
            f"{name}={value}, and the longest sequence has {longest} tokens: give at least {longest}, or leave it out."
        )


def places(
    name: str, ends: Sequence[int], padded: Sequence[int] | None, tokens: int, *, packed: bool
) -> list[tuple[int, int, int]]:
    """(sample, first, end) of each sequence: concatenated if `packed`, else one a sample.

    Args:
        name: cu_seqlens_q or cu_seqlens_kv.
        ends: cumulative lengths.
        padded: offsets of packed sequences with padding behind them.
        tokens: of all packed sequences, or of a sample.

    Raises:
        InputError: a sequence is longer than the room between offsets.
    """
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    if not packed:
        if lengths and max(lengths) > tokens:
            raise InputError(f"{name} has a sequence of {max(lengths)} tokens: a sample has {tokens}.")
        whole = tuple(tokens * sample for sample in range(len(ends)))
        if padded is not None and tuple(padded) not in (whole, tuple(ends)):  # the latter: no padding between sequences
            raise InputError(
                f"{name}_padded={list(padded)[:8]}: samples of {tokens} tokens begin at {list(whole)[:8]}. Leave it out, or "
                'pass packed sequences ("thd").'
            )
        return [(sample, 0, length) for sample, length in enumerate(lengths)]
    begins = ends if padded is None else padded
    if len(begins) != len(ends):
        raise InputError(f"{name}_padded has {len(begins)} entries: {name} has {len(ends)}.")
    for at, (length, (first, following)) in enumerate(zip(lengths, itertools.pairwise(begins), strict=True)):
        if length > following - first:
            raise InputError(f"{name}: sequence {at} has {length} tokens, but {name}_padded leaves {following - first}.")
    last = max((first + length for first, length in zip(begins, lengths, strict=False)), default=0)
    if last > tokens:
        raise InputError(f"{name}: sequences end at token {last}, and there are {tokens}.")
    return [(0, first, first + length) for first, length in zip(begins, lengths, strict=False)]


def joined(queries: list[tuple[int, int, int]], keys: list[tuple[int, int, int]]) -> list[Span]:
    """Segments of the sequences' queries and keys.

    Raises:
        InputError: different numbers of sequences of queries and of keys.
    """
    if len(queries) != len(keys):
        raise InputError(f"cu_seqlens_q is of {len(queries)} sequences, and cu_seqlens_kv of {len(keys)}: give as many.")
    pairs = zip(queries, keys, strict=True)
    return [Span(sample, sample + 1, first, end, k0, k1) for (sample, first, end), (_, k0, k1) in pairs]


def positions(ends: Sequence[int], tokens: int, *, parts: int = 1, part: int = 0) -> Tensor:
    """int64 [tokens] on the host, the position of each packed token in its sequence; −1 behind all of them.

    ends: cumulative lengths, with or without padding. parts: ranks that share each sequence in 2 · `parts` chunks, of which
    rank `part` has chunk `part` and its mirror image; `tokens` are then those of the rank.

    Raises:
        InputError: sequences that chunks do not divide, or that end after the tokens.
    """
    for at, (start, end) in enumerate(itertools.pairwise(ends)):
        if parts > 1 and (end - start) % (2 * parts):
            raise InputError(
                f"cu_seqlens: sequence {at} has {end - start} tokens, and {parts} ranks share it in {2 * parts} chunks. Pad it "
                f"to a multiple of {2 * parts}."
            )
    if ends[-1] // parts > tokens:
        raise InputError(f"cu_seqlens: sequences end at token {ends[-1] // parts}, and there are {tokens}.")
    out = torch.full((tokens,), -1, dtype=torch.int64, device="cpu")
    for start, end in itertools.pairwise(ends):
        first, last = start // parts, end // parts
        out[first:last] = chunks(last - first, parts, part)
    return out


def chunks(tokens: int, parts: int, part: int) -> Tensor:
    """Positions, int64 [tokens], of rank `part`'s tokens of a sequence that `parts` ranks share; see `positions`.

    Raises:
        InputError: an odd number of tokens, which cannot be two chunks.
    """
    if parts == 1:
        return torch.arange(tokens, device="cpu")
    if tokens % 2:
        raise InputError(
            f"{tokens} tokens of a rank with cp_size={parts}: they are two chunks, an even number. Pad the sequences."
        )
    half = tokens // 2
    behind = parts * tokens - (part + 1) * half
    spans = ((part * half, part * half + half), (behind, behind + half))
    return torch.cat([torch.arange(*span, device="cpu") for span in spans])
