"""FP8 dispatch: quantises rows to E4M3 with a power-of-two scale per 128 elements for the all-to-all, and dequantises them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import gemm, reference
from octavo.kernels.quantize.cast_scaled import blocks
from octavo.kernels.tiles import adjacent_columns, cdiv

_DTYPE = torch.float8_e4m3fn
_MAX = torch.finfo(_DTYPE).max
_ROWS, _WARPS = 32, 4


@triton.jit
def _widen(q_ptr, scale_inv_ptr, out_ptr, rows, columns, pieces, TILE_R: tl.constexpr, PIECE: tl.constexpr):
    r = (tl.program_id(0) // pieces) * TILE_R + tl.arange(0, TILE_R)
    piece = tl.program_id(0) % pieces
    c = piece * PIECE + tl.arange(0, PIECE)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    at = r[:, None].to(tl.int64) * columns + c[None, :]
    scale_inv = tl.load(scale_inv_ptr + r.to(tl.int64) * pieces + piece, mask=r < rows, other=0)
    x = tl.load(q_ptr + at, mask=inside).to(tl.float32) * scale_inv[:, None]
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def narrow(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, K] in FP8 [R, K], and the inverse scales, float32 [R, ⌈K/128⌉], both row after row."""
    if not x.shape[0]:
        return x.to(_DTYPE), x.new_empty(0, -(-x.shape[1] // reference.BLOCK), dtype=torch.float32)
    q, _ = blocks(adjacent_columns(x), _DTYPE, _MAX, 1, rowwise=True, columnwise=False)
    assert q is not None
    return q.data.contiguous(), q.scale_inv.contiguous()


def launch(q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Run the kernel; see `widen`."""
    (rows, columns), pieces = q.shape, scale_inv.shape[1]
    out = torch.empty(rows, columns, dtype=dtype, device=q.device)
    if rows:
        _widen[(cdiv(rows, _ROWS) * pieces,)](
            q, scale_inv, out, rows, columns, pieces, TILE_R=_ROWS, PIECE=reference.BLOCK, num_warps=_WARPS
        )
    return out


def widen(q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [R, K] of `narrow`'s q [R, K] and scales [R, ⌈K/128⌉] in a dtype: exact in float32 and bf16."""
    if gemm.is_native(q.device):
        return launch(q, scale_inv, dtype)
    columns = q.shape[1]
    return (q.float() * scale_inv.repeat_interleave(reference.BLOCK, 1)[:, :columns]).to(dtype)
