"""Transformer Engine's rotary position embedding: angles, and their use outside of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.compat.te.device import default_device
from octavo.errors import InputError
from octavo.nn.rotary import rotate
from octavo.nn.te_arguments import check_format, cos_and_sin


def _refuse_interleaved(interleaved: bool) -> None:
    if interleaved:
        raise InputError(
            "interleaved rotary embeddings are not supported: the two halves of a head rotate here. Reorder the rows of query "
            "and key, and leave interleaved out."
        )


class RotaryPositionEmbedding(nn.Module):
    """Angles of a rotary position embedding; buffer inv_freq, float32."""

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
        _refuse_interleaved(interleaved)
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
        positions = torch.arange(max_seq_len, device=inv_freq.device, dtype=inv_freq.dtype) + offset
        trained, factor = self.pretrained_max_position_embeddings, self.seq_len_interpolation_factor
        if trained is not None and factor is not None:
            longest = max_seq_len > trained * factor
            positions *= 1 / (max_seq_len / trained) if longest else 1 / factor
        angles = torch.outer(positions, inv_freq)
        return torch.cat((angles, angles), -1)[:, None, None, :]


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
    """`t`, [T, B, H, D] or for "bshd" [B, T, H, D], rotated by the angles `freqs` [T or more, 1, 1, Dr].

    Raises:
        InputError: packed sequences, parts of a sequence, start positions or interleaved heads.
    """
    _refuse_interleaved(interleaved)
    if start_positions is not None or cu_seqlens is not None or cp_size != 1:
        raise InputError("apply_rotary_pos_emb takes whole sequences from position 0: leave the other arguments out.")
    first = check_format("tensor_format", tensor_format)
    x = t.transpose(0, 1) if first else t
    out = rotate(x, cos_and_sin(freqs, x.shape[:2], x.shape[-1]))
    return out.transpose(0, 1) if first else out
