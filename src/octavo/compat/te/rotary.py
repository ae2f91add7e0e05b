"""Transformer Engine's rotary position embedding: its angles, and their application inside and outside of a layer.

Interleaved angles rotate pairs of neighbouring columns of a head, others its two halves. For the former, columns are reordered,
so that one function computes both, in float32.

Shapes: B batch, T tokens, H heads, D head dimension, Dr rotated columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.compat.te.device import default_device
from octavo.compat.te.limits import FORMATS, check_kind, check_rotation
from octavo.compat.te.sequences import INTEGERS, chunks, cumulative, positions, shown
from octavo.errors import InputError, check_flags
from octavo.nn.rotary import rotate


class RotaryPositionEmbedding(nn.Module):
    """Angles of a rotary position embedding; buffer inv_freq, float32.

    With `interleaved` columns 2i and 2i + 1 have the same angle, else column i and i + dim/2.
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        check_flags("RotaryPositionEmbedding", interleaved=interleaved)
        dim = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.rotary_base = rotary_base
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=default_device()) / dim
        self.register_buffer("inv_freq", 1.0 / (rotary_base**exponent))
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.interleaved = interleaved

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles of the positions `offset` to `offset + max_seq_len − 1`: float32 [max_seq_len, 1, 1, dim]."""
        inv_freq: Any = self.inv_freq
        at = torch.arange(int(max_seq_len), device=inv_freq.device, dtype=inv_freq.dtype) + offset
        trained, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if trained is not None and factor is not None:
            longest = max_seq_len > trained * factor
            at *= 1 / (max_seq_len / trained) if longest else 1 / factor
        angles = torch.outer(at, inv_freq)
        both = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return both[:, None, None, :]


def check_angles(freqs: Any, head_dim: int) -> None:
    """Raise an InputError unless `freqs` is [positions, 1, 1, Dr], with an even Dr of at most `head_dim`."""
    if not isinstance(freqs, Tensor) or freqs.dim() != 4 or freqs.shape[1:3] != (1, 1) or not freqs.is_floating_point():
        raise InputError(
            f"rotary angles are {shown(freqs)}: give numbers [positions, 1, 1, columns], as RotaryPositionEmbedding does."
        )
    if freqs.shape[-1] > head_dim or freqs.shape[-1] % 2 or not freqs.shape[-1]:
        raise InputError(f"rotary angles of {freqs.shape[-1]} columns: give an even number of at most {head_dim}, a head's.")


def _starts(offsets: Any, sequences: int) -> Tensor | None:
    """start_positions on the host, int [sequences]; an InputError for anything else."""
    if offsets is None:
        return None
    if not isinstance(offsets, Tensor) or offsets.dtype not in INTEGERS or tuple(offsets.shape) != (sequences,):
        raise InputError(f"start_positions are {shown(offsets)}: give torch.int32 [{sequences}], one for each sequence.")
    starts = offsets.cpu()
    if sequences and int(starts.min()) < 0:
        raise InputError(f"start_positions={starts.tolist()[:8]}: positions begin at 0, and one is {int(starts.min())}.")
    return starts


def tables(freqs: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [B or 1, T, Dr], of the positions `at`, int64 [B or 1, T] on any device; −1: no rotation.

    freqs: angles [positions, 1, 1, Dr].

    Raises:
        InputError: a position beyond the angles.
    """
    if at.numel() and int(at.max()) >= len(freqs):
        raise InputError(
            f"rotary angles cover {len(freqs)} positions: a token has position {int(at.max())}. Compute more angles."
        )
    at = at.to(freqs.device)
    angles = freqs[:, 0, 0].float()[at.clamp(min=0)].masked_fill((at < 0)[..., None], 0.0)
    return angles.cos(), angles.sin()


def turned(x: Tensor, angles: tuple[Tensor, Tensor], *, interleaved: bool) -> Tensor:
    """x [B, T, H, D] with the first Dr columns of each head rotated, by cos and sin [B or 1, T, Dr]."""
    if not interleaved:
        return rotate(x, angles)
    columns = angles[0].shape[-1]
    halves = [table.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for table in angles]
    head = x[..., :columns].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    back = rotate(head, (halves[0], halves[1])).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return back if columns == x.shape[-1] else torch.cat((back, x[..., columns:]), -1)


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """`t`, [T, B, H, D], for "bshd" [B, T, H, D] or for "thd" [T, H, D], rotated by the angles `freqs` [T or more, 1, 1, Dr].

    The result is contiguous. start_positions: int [B], the position of each sequence's first token. fused: no effect, both
    implementations compute in float32. cu_seqlens: int [sequences + 1], cumulative lengths for "thd"; positions begin at 0 in
    each sequence. cp_size, cp_rank: ranks that share each sequence in 2 · cp_size chunks, of which this one has two.

    Raises:
        InputError: another format, angles that do not fit, positions beyond them, start positions that are not one for each
            sequence, are negative, or belong to shared sequences, or a rank outside `cp_size`.
    """
    check_kind("tensor_format", tensor_format, FORMATS)
    packed, first = tensor_format == "thd", tensor_format == "sbhd"
    if not isinstance(t, Tensor) or t.dim() != (3 if packed else 4) or not t.is_floating_point():
        raise InputError(
            f"t is {shown(t)}: tensor_format {tensor_format!r} is of {3 if packed else 4} dimensions, and of floating point."
        )
    check_rotation(
        {
            "tensor_format": tensor_format, "start_positions": start_positions, "interleaved": interleaved,
            "cu_seqlens": cu_seqlens, "cp_size": cp_size, "cp_rank": cp_rank,
        }
    )  # fmt: skip
    check_angles(freqs, t.shape[-1])
    if packed:
        ends = cumulative("cu_seqlens", cu_seqlens)
        starts = _starts(start_positions, len(ends) - 1)
        at = positions(ends, len(t), parts=cp_size, part=cp_rank)
        if starts is not None and len(starts):
            host: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
            places = torch.bucketize(torch.arange(len(t), **host), torch.tensor(ends[1:], **host), right=True)
            number = places.clamp(max=len(starts) - 1)
            at = torch.where(at < 0, at, at + starts[number])
        return turned(t[None], tables(freqs, at[None]), interleaved=interleaved)[0].contiguous()
    tokens, samples = (t.shape[0], t.shape[1]) if first else (t.shape[1], t.shape[0])
    starts = _starts(start_positions, samples)
    at = chunks(tokens, cp_size, cp_rank)[None]
    if starts is not None:
        at = at + starts[:, None]
    cos, sin = tables(freqs, at)
    if first:  # samples and tokens change places in the tables: t keeps its order
        cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)
    return turned(t, (cos, sin), interleaved=interleaved).contiguous()
