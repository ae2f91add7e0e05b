"""PyTorch's FlashAttention-2 of several sequences in one call, with its log-sum-exp: boundaries are read only on the GPU.

The operators behind `torch.nn.attention.varlen.varlen_attn`, whose backward accepts no log-sum-exp. Slower than cuDNN's kernels
for long sequences, but one launch for all of them, the same for every packing.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import gemm
from octavo.kernels.attention.pattern import Packing

HEADS = (64, 96, 128)
"""Head dimensions, those of the tests."""


def takes(q: Tensor, k: Tensor, *, causal: bool, window: int | None) -> bool:
    """True if the operators compute the call: 16 bits, from Ampere on; a window only with causal attention.

    Not on a GPU with deterministic algorithms required: with grouped heads its backward is not.
    """
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] not in HEADS:
        return False
    if torch.are_deterministic_algorithms_enabled() or torch.compiler.is_compiling() or (window is not None and not causal):
        return False
    capability = gemm.capability(q.device)
    return capability is not None and capability >= (8, 0)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, packed: Packing, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """q [B, T, H, D], k and v [B, T, G, D] → out [B, T, H, D] in the dtype of q, lse [B, H, T] float32."""
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *rows, packed.q_ends, packed.k_ends, packed.longest_q, packed.longest_k, 0.0, causal, False, scale=scale,
        **_window(window),
    )  # fmt: skip
    return out.view(q.shape), lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1)


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float, packed: Packing,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [B, T, H, D], k and v [B, T, G, D] in their dtype, from d_out, out [B, T, H, D] and lse [B, H, T]."""
    rows = [x.flatten(0, 1) for x in (d_out, q, k, v, out)]
    none = torch.empty(2, dtype=torch.uint64, device=q.device)  # no dropout: no state of random numbers
    grads = torch.ops.aten._flash_attention_backward(
        *rows, lse.transpose(0, 1).flatten(1), packed.q_ends, packed.k_ends, packed.longest_q, packed.longest_k, 0.0, causal,
        none, none, scale=scale, **_window(window),
    )  # fmt: skip
    dq, dk, dv = (grad.view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _window(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
