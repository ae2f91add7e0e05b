"""PyTorch's attention with its log-sum-exp, and a backward that accepts the log-sum-exp of a softmax over more keys.

PyTorch has no public function for either. These are operators behind `scaled_dot_product_attention`: cuDNN's on Hopper, and the
CPU's, with the same bits as that function. Shapes: B batch, Tq queries, Tk keys, H query heads, G key-value heads, D head
dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HEADS = (64, 96, 128)
"""Head dimensions for cuDNN, those of `tests/gpu/test_pieces.py`."""


def takes(q: Tensor, k: Tensor, *, causal: bool, window: int | None) -> bool:
    """True if these operators compute q [B, Tq, H, D] with k [B, Tk, G, D]: full, or causal with Tq = Tk; no window.

    Not on a GPU with deterministic algorithms required: cuDNN's backward does not.
    """
    if window is not None or (causal and q.shape[1] != k.shape[1]):
        return False
    if q.device.type == "cpu":
        return True
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] not in _HEADS:
        return False
    if q.shape[1] == k.shape[1] == 1:  # cuDNN refuses one token of one
        return False
    if torch.are_deterministic_algorithms_enabled():
        return False
    return torch.backends.cuda.cudnn_sdp_enabled() and torch.cuda.get_device_capability(q.device) >= (9, 0)


def version() -> str:
    """cuDNN and its loaded version, also if it is older than the version of PyTorch's build, for which PyTorch raises."""
    try:
        number = torch.backends.cudnn.version()
    except RuntimeError:
        number = torch._C._cudnn.getVersionInt()
    return f"cuDNN {number}"


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: None = None) -> tuple[Tensor, Tensor]:
    """q [B, Tq, H, D], k and v [B, Tk, G, D] → out [B, Tq, H, D] in the dtype of q, lse [B, H, Tq] float32."""
    q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_, k_, v_, 0.0, causal, scale=scale)
        return out.transpose(1, 2), lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q_, k_, v_, None, True, 0.0, causal, False, scale=scale)
    return out.transpose(1, 2), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float,
    window: None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [B, Tq, H, D], k and v [B, Tk, G, D] in their dtype.

    d_out, out [B, Tq, H, D], lse [B, H, Tq]: the latter two may be those of a softmax over more keys.
    """
    tensors = [x.transpose(1, 2) for x in (d_out, q, k, v, out)]
    if q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, lse.contiguous(), 0.0, causal, scale=scale
        )
    else:
        none = torch.zeros((), dtype=torch.int64, device=q.device)  # no dropout: no state of random numbers
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *tensors,
            lse[..., None].contiguous(),
            none,
            none,
            None,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
            scale=scale,
        )
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq, dk, dv
