"""Routes of tokens to experts: a permutation in which the rows of each expert are contiguous.

On Hopper every expert's rows begin at a multiple of `TILE`, so that a tile of a kernel has one expert and its scale. Rows
without a token are zeros. The number of rows is the largest possible one, and sizes of groups stay on the device: nothing
waits. Elsewhere rows are exact, and their counts are read on the host.

A GPU needs no sort: blocks of copies are counted by expert, the counts summed over blocks, and each copy placed after those
before it, in three launches instead of some forty of PyTorch's.

Legend: T tokens, K experts per token (top-k), E experts, R rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import gemm
from octavo.kernels.tiles import cdiv, next_power_of_2

TILE = 128
"""Rows of a tile: of the products' tiles, and of a piece with one scale under block scaling."""
_PAIRS, _MOST_COPIES, _WARPS = 8192, 512, 8
"""Pairs of a copy and an expert in a program, copies at most, and its warps."""
_BLOCKS = 1024
"""Blocks of copies whose counts are added up at a time."""


@dataclass(frozen=True)
class Routes:
    """One forward of a mixture of experts (MoE): the token of each row and the rows of each token.

    Attributes:
        tokens: int32 [R], the token of each row; -1 for a row of zeros.
        rows: int32 [T, K], the row of each copy of a token.
        experts: int32 [R / tile], the expert of each tile of rows; E after the last expert's rows.
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
        """All tensors, to save for backward."""
        return self.tokens, self.rows, self.experts, self.ends

    @property
    def expert_of_rows(self) -> Tensor:
        """int64 [R], the expert of each row; the last one for rows after its end."""
        return self.experts.long().clamp(max=len(self.ends) - 1).repeat_interleave(self.tile)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First row and end of each expert; only if rows are exact."""
        assert self.splits is not None
        ends = itertools.accumulate(self.splits)
        return [(end - count, end) for end, count in zip(ends, self.splits, strict=True)]


def most_rows(copies: int, experts: int, tile: int) -> int:
    """Largest number of rows that `copies` copies of tokens need."""
    used = min(experts, copies)
    return copies if tile == 1 else -(-(copies + used * (tile - 1)) // tile) * tile


def tile_of_device(device: torch.device) -> int:
    """Rows of a tile of `Routes` on a device."""
    return TILE if gemm.has_grouped_products(device) else 1


@triton.jit
def _count_copies(chosen_ptr, counts_ptr, tokens_ptr, copies, rows, experts, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Copies of each expert in a block; and -1 for the token of every row."""
    program = tl.program_id(0)
    c = program * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, EXPERTS)
    expert = tl.load(chosen_ptr + c, mask=c < copies, other=-1).to(tl.int32)
    counts = tl.sum((expert[:, None] == n[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + program * experts + n, counts, mask=n < experts)
    for first in range(program * BLOCK, rows, tl.num_programs(0) * BLOCK):
        r = first + tl.arange(0, BLOCK)
        tl.store(tokens_ptr + r, tl.full([BLOCK], -1, tl.int32), mask=r < rows)


@triton.jit
def _add_up_before(counts_ptr, totals_ptr, blocks, experts, BLOCKS: tl.constexpr):
    """Replace an expert's copies in each block by its copies in all earlier blocks (an exclusive sum)."""
    expert = tl.program_id(0)
    total = 0
    for first in range(0, blocks, BLOCKS):
        b = first + tl.arange(0, BLOCKS)
        counts = tl.load(counts_ptr + b * experts + expert, mask=b < blocks, other=0)
        tl.store(counts_ptr + b * experts + expert, total + tl.cumsum(counts, 0) - counts, mask=b < blocks)
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + expert, total)


@triton.jit
def _place_copies(
    chosen_ptr, before_ptr, totals_ptr, rows_ptr, tokens_ptr, experts_ptr, ends_ptr, copies, top_k, tiles, experts,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """The row of each copy of a block, and the expert of some tiles of rows."""
    program = tl.program_id(0)
    n = tl.arange(0, EXPERTS)
    padded = (tl.load(totals_ptr + n, mask=n < experts, other=0) + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
    ends = tl.cumsum(padded, 0)
    if program == 0:
        tl.store(ends_ptr + n, ends, mask=n < experts)
    c = program * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(chosen_ptr + c, mask=c < copies, other=-1).to(tl.int32)
    chosen_expert = expert[:, None] == n[None, :]
    start = ends - padded + tl.load(before_ptr + program * experts + n, mask=n < experts, other=0)
    row = tl.sum(tl.where(chosen_expert, tl.cumsum(chosen_expert.to(tl.int32), 0) - 1 + start[None, :], 0), 1)
    tl.store(rows_ptr + c, row, mask=c < copies)
    tl.store(tokens_ptr + row, c // top_k, mask=c < copies)
    for first in range(program * BLOCK, tiles, tl.num_programs(0) * BLOCK):
        t = first + tl.arange(0, BLOCK)
        ended = (ends[None, :] <= (t * TILE_ROWS)[:, None]) & (n < experts)[None, :]
        tl.store(experts_ptr + t, tl.sum(ended.to(tl.int32), 1), mask=t < tiles)


def launch(chosen: Tensor, experts: int) -> Routes:
    """Run the kernels; see `make_routes`, with tiles of `TILE` rows."""
    copies, top_k = chosen.numel(), chosen.shape[1]
    rows = max(TILE, most_rows(copies, experts, TILE))
    width = next_power_of_2(experts)
    block = max(1, min(_MOST_COPIES, _PAIRS // width))
    blocks = max(1, cdiv(copies, block))
    sizes = rows, rows // TILE, experts, experts, blocks * experts
    tokens, of_tiles, ends, totals, counts = (torch.empty(size, dtype=torch.int32, device=chosen.device) for size in sizes)
    places = torch.empty(chosen.shape, dtype=torch.int32, device=chosen.device)
    chosen, how = chosen.contiguous(), {"EXPERTS": width, "BLOCK": block, "num_warps": _WARPS}
    _count_copies[(blocks,)](chosen, counts, tokens, copies, rows, experts, **how)
    _add_up_before[(experts,)](counts, totals, blocks, experts, BLOCKS=min(_BLOCKS, next_power_of_2(blocks)), num_warps=4)
    _place_copies[(blocks,)](
        chosen, counts, totals, places, tokens, of_tiles, ends, copies, top_k, rows // TILE, experts, TILE_ROWS=TILE, **how
    )  # fmt: skip
    return Routes(tokens, places, of_tiles, ends, TILE, None)


def make_routes(chosen: Tensor, experts: int, tile: int | None = None) -> Routes:
    """Sort the copies of tokens by expert, in the order of tokens.

    chosen: int64 [T, K], the experts of each token. tile: `TILE` or 1; the device's if None.
    """
    tile = tile_of_device(chosen.device) if tile is None else tile
    if tile == TILE and chosen.device.type == "cuda":
        return launch(chosen, experts)
    top_k, flat, device = chosen.shape[1], chosen.flatten(), chosen.device
    ordered, order = flat.sort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=device).scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + (tile - 1)) // tile * tile
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)  # rows of zeros in front of an expert's first row
    at = torch.arange(len(flat), device=device) + shift[ordered]
    rows = torch.empty_like(flat).scatter_(0, order, at).view(chosen.shape)
    size = most_rows(len(flat), experts, tile)
    if tile == TILE and not size:  # a kernel's grid may not be empty
        size = TILE
    tokens = torch.full((size,), -1, dtype=torch.int64, device=device).scatter_(0, at, order // top_k)
    starts = torch.arange(0, size, tile, device=device)
    of_tiles = torch.searchsorted(ends, starts, right=True)
    splits = tuple(counts.tolist()) if tile == 1 else None
    return Routes(tokens.int(), rows.int(), of_tiles.int(), ends.int(), tile, splits)


def routes_of_splits(splits: Sequence[int], device: torch.device, tile: int | None = None) -> Routes:
    """Routes of rows in the order of their experts, whose counts the host knows: row i is the only copy of token i.

    tile: `TILE` or 1; the device's if None. With 1, or with splits of whole tiles, no row moves.
    """
    tile = tile_of_device(device) if tile is None else tile
    host: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
    counts = torch.tensor(splits, **host)
    padded = (counts + (tile - 1)) // tile * tile
    ends = padded.cumsum(0)
    before = (ends - padded) - (counts.cumsum(0) - counts)  # rows of zeros before an expert's first row
    tokens = torch.arange(sum(splits), **host)
    rows = tokens + before.repeat_interleave(counts)
    of_rows = torch.full((int(padded.sum()),), -1, **host).index_copy_(0, rows, tokens)
    of_tiles = torch.arange(len(splits), **host).repeat_interleave(padded // tile)
    parts = of_rows, rows, of_tiles, ends
    of_rows, rows, of_tiles, ends = on_device(torch.cat(parts), device, torch.int32).split([len(part) for part in parts])
    return Routes(of_rows, rows[:, None], of_tiles, ends, tile, tuple(splits) if tile == 1 else None)


def on_device(numbers: Tensor | Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers of the host, copied without waiting for the device."""
    numbers = torch.as_tensor(numbers, dtype=dtype, device="cpu")
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers
