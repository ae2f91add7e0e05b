"""Routes of tokens to experts: the order of rows in which each expert's tokens are neighbours.

On Hopper every expert's rows begin at a multiple of `TILE`, so that a tile of a kernel has one expert and its scale. Rows
without a token are zeros. The number of rows is the largest possible one, and sizes of groups stay on the device: nothing
waits. Elsewhere rows are exact, and their counts are read on the host.

Legend: T tokens, V experts that a token visits, E experts, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels import gemm

TILE = 128
"""Rows of a tile: those of the products, and those that share a scale under block scaling."""


@dataclass(frozen=True)
class Routes:
    """A use of a mixture: which rows hold which tokens.

    Attributes:
        tokens: int32 [R], the token of each row; -1 for a row of zeros.
        rows: int32 [T, V], the row of each copy of a token.
        experts: int32 [R / tile], the expert of each tile of rows; E behind the last one's rows.
        ends: int32 [E], the end of each expert's rows.
        tile: rows of a tile, `TILE` or 1.
        splits: rows of each expert, known on the host where `tile` is 1.
    """

    tokens: Tensor
    rows: Tensor
    experts: Tensor
    ends: Tensor
    tile: int
    splits: tuple[int, ...] | None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All tensors, for a backward."""
        return self.tokens, self.rows, self.experts, self.ends

    @property
    def expert_of_rows(self) -> Tensor:
        """int64 [R], the expert of each row; the last one behind its rows."""
        return self.experts.long().clamp(max=len(self.ends) - 1).repeat_interleave(self.tile)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First row and end of each expert; only where rows are exact."""
        assert self.splits is not None
        ends = torch.tensor(self.splits).cumsum(0).tolist()
        return [(end - count, end) for end, count in zip(ends, self.splits, strict=True)]


def most_rows(copies: int, experts: int, tile: int) -> int:
    """Rows that so many copies of tokens need at most."""
    used = min(experts, copies)
    return copies if tile == 1 else -(-(copies + used * (tile - 1)) // tile) * tile


def tile_of_device(device: torch.device) -> int:
    """Rows of a tile of `Routes` on a device."""
    return TILE if gemm.has_grouped_products(device) else 1


def make_routes(chosen: Tensor, experts: int, tile: int | None = None) -> Routes:
    """Sort the copies of tokens by expert, in the order of tokens.

    chosen: int64 [T, V], the experts of each token. tile: `TILE` or 1; that of the device if absent.
    """
    tile = tile_of_device(chosen.device) if tile is None else tile
    visited, flat, device = chosen.shape[1], chosen.flatten(), chosen.device
    ordered, order = flat.sort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + (tile - 1)) // tile * tile
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)  # rows of zeros in front of an expert's first row
    at = torch.arange(len(flat), device=device) + shift[ordered]
    rows = torch.empty_like(flat).scatter_(0, order, at).view(chosen.shape)
    size = most_rows(len(flat), experts, tile)
    if tile == TILE and not size:  # no grid of a kernel is empty
        size = TILE
    tokens = torch.full((size,), -1, dtype=torch.int64, device=device).scatter_(0, at, order // visited)
    starts = torch.arange(0, size, tile, device=device)
    of_tiles = torch.searchsorted(ends, starts, right=True)
    splits = tuple(counts.tolist()) if tile == 1 else None
    return Routes(tokens.int(), rows.int(), of_tiles.int(), ends.int(), tile, splits)
