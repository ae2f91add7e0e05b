"""Chooses the kernel of attention: softmax(q · kᵀ · scale) · v by the first of these that computes the pattern:

ranks that share the sequence   `octavo.collectives.attention`
padding between tokens, without window and dropout
                                `octavo.nn.padding`: pieces by the kernels below, without a mask
documents that only a GPU knows FlashAttention-4, PyTorch's FlashAttention-2, or the reference, in one call
a caller's mask                 PyTorch's `scaled_dot_product_attention`
other padding between tokens, or a window with dropout
                                the same with a mask of 2²⁴ pairs at a time, rebuilt in backward
without dropout, if FlashAttention-4 is installed or bits are to repeat on a GPU
                                FlashAttention-4, or the reference
a window, or without dropout a result that a recomputation reads
                                kernels that give a log-sum-exp, span by span: cuDNN's, or the reference
documents                       `scaled_dot_product_attention`, document by document
otherwise                       `scaled_dot_product_attention`, which uses cuDNN's kernel on Hopper

FlashAttention-4 computes windows and documents in one call, and its backward repeats. Bits are to repeat under
`torch.use_deterministic_algorithms` (`train.deterministic`): cuDNN's and PyTorch's flash backward do not.

Shapes: B batch, T tokens, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from octavo.collectives.attention import context_attention
from octavo.collectives.context import ContextGroup
from octavo.errors import InputError
from octavo.kernels.attention import flash, library
from octavo.kernels.attention.cached import is_caching
from octavo.kernels.attention.pattern import Packing, Pattern
from octavo.kernels.attention.pieces import SMALLEST_WINDOW, accumulated, attention, gradients
from octavo.kernels.autograd import attention_begins, refuse_second_derivative
from octavo.nn.padding import padded_attention
from octavo.nn.rotary import Handover

MASKED_PAIRS = 1 << 24
"""Most query-key pairs of a sample whose mask is in memory at once: the whole mask of 4,096 tokens."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | Tensor, *, scale: float | None, dropout: float = 0.0,
    context: ContextGroup | None = None, handover: Handover | None = None,
) -> Tensor:  # fmt: skip
    """q [B, T, H, D], k and v [B, T, G, D] → [B, T, H, D]; differentiable once.

    Args:
        q, k, v: with a `context` this rank's tokens. A full pattern may have any number of queries.
        pattern: the keys of each query; or a mask, bool [B or 1, H or 1, T, T], True where a query attends to a key; without
            a key the result is 0.
        scale: None for D^-½.
        dropout: dropout probability of softmax values.
        context: the ranks that share each sequence.
        handover: passes gradients to the rotation that produced q, k and v, if nothing else reads them.

    Raises:
        InputError: the pattern has a different number of tokens, these ranks cannot compute it, or causal attention has
            different numbers of queries and keys.
    """
    if context is not None:
        if isinstance(pattern, Tensor):
            raise InputError(
                "attention_mask is a tensor, and context parallelism takes no mask of [T, T]: give the model position_ids that "
                "restart where a document begins, or a padding mask [B, T]."
            )
        if dropout:
            raise InputError(
                f"attention_dropout = {dropout} with context parallelism: its ranks draw no common mask. Set it to 0, or "
                "context_parallel_degree = 1."
            )
        return context_attention(q, k, v, context, pattern, scale)
    if isinstance(pattern, Tensor):
        return scaled_dot_product(q, k, v, pattern, causal=False, scale=scale, dropout=dropout)
    samples_of = pattern.documents if pattern.real_tokens is None else pattern.real_tokens
    for what, expected, there in (("tokens", pattern.tokens, k.shape[1]), ("samples", len(samples_of) or len(q), len(q))):
        if expected != there:
            raise InputError(f"the attention pattern is for {expected} {what}, and there are {there}: create another.")
    if pattern.ends is not None and dropout:
        raise InputError(
            f"attention_dropout = {dropout} with documents whose boundaries stay on the GPU: no kernel computes both. Set it "
            "to 0, or give position_ids on the host, without max_documents."
        )
    if q.shape[1] != k.shape[1]:
        if pattern.causal or pattern.documents or pattern.real_tokens is not None:
            raise InputError(
                f"causal attention of {q.shape[1]} queries over {k.shape[1]} keys: kernels align these differently. Give "
                'equal numbers, or attn_mask_type="no_mask".'
            )
        return _sdpa(q, k, v, None, False, scale, dropout)
    scale_ = q.shape[-1] ** -0.5 if scale is None else scale
    if pattern.real_tokens is not None and pattern.causal and pattern.window is None and not dropout:
        return padded_attention(q, k, v, pattern, scale_)
    if pattern.real_tokens is not None or (pattern.window is not None and dropout):
        return _masked(q, k, v, pattern, scale, dropout)
    pieces = pattern.window is not None or pattern.ends is not None
    if pieces or (not dropout and (is_caching() or _prefers_pieces(q, k, pattern))):
        out: Tensor = _Pieces.apply(q, k, v, pattern, scale_, handover)
        return out
    if not pattern.documents:
        return _sdpa(q, k, v, None, pattern.causal, scale, dropout)
    samples = []
    for sample in range(q.shape[0]):
        parts = []
        for first, end in pattern.bounds(sample):
            q_, k_, v_ = (x[sample : sample + 1, first:end] for x in (q, k, v))
            parts.append(_sdpa(q_, k_, v_, None, pattern.causal, scale, dropout))
        samples.append(torch.cat(parts, 1))
    return torch.cat(samples)


def backend(q: Tensor, k: Tensor, pattern: Pattern) -> str:
    """Name of the kernel that `attend` uses for q [B, T, H, D], k [B, T, G, D] without dropout, for reports."""
    if not q.is_cuda:
        return "PyTorch on the CPU"
    if pattern.real_tokens is not None and pattern.window is not None:
        return "PyTorch with a mask"
    if flash.takes(q, k, causal=pattern.causal, window=pattern.window):
        return f"FlashAttention-4 {flash.VERSION}"
    small = pattern.window is not None and pattern.window < SMALLEST_WINDOW
    if not small and library.takes(q, k, causal=pattern.causal, window=None):
        return library.version()
    if pattern.window is not None or torch.are_deterministic_algorithms_enabled():
        return "plain PyTorch"
    q_, k_ = q.transpose(1, 2), k.transpose(1, 2)
    choice = torch._fused_sdp_choice(q_, k_, k_, is_causal=pattern.causal, enable_gqa=q.shape[2] != k.shape[2])
    return f"PyTorch's {SDPBackend(choice).name.lower().replace('_', ' ')}"


def _masked(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float | None, dropout: float) -> Tensor:
    """Attention of a band of queries at a time: no mask of T × T exists or is saved for backward."""

    def of_band(q: Tensor, k: Tensor, v: Tensor, queries: slice, keys: slice) -> Tensor:
        return _sdpa(q, k, v, pattern.mask(q.shape[0], q.device, queries, keys), False, scale, dropout)

    parts = []
    for queries, keys in pattern.bands(MASKED_PAIRS):
        band = q[:, queries], k[:, keys], v[:, keys], queries, keys
        is_all = queries.stop - queries.start == pattern.tokens
        parts.append(of_band(*band) if is_all else checkpoint(of_band, *band, use_reentrant=False))
    return torch.cat(parts, 1)


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None, dropout: float
) -> Tensor:
    """PyTorch's function for [B, T, H, D]; 0 for a query without a key in `mask`, bool [B or 1, H or 1, Tq, Tk]."""
    if mask is None or mask.dtype != torch.bool:
        return _sdpa(q, k, v, mask, causal, scale, dropout)
    empty = ~mask.any(-1, keepdim=True)  # not every kernel defines their result and gradient
    out = _sdpa(q, k, v, mask | empty, causal, scale, dropout)
    return out.masked_fill(empty.transpose(1, 2), 0.0)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, dropout: float) -> Tensor:
    repeats = q.is_cuda and torch.are_deterministic_algorithms_enabled()
    with sdpa_kernel(SDPBackend.MATH) if repeats else contextlib.nullcontext():
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=causal,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return out.transpose(1, 2)


def _prefers_pieces(q: Tensor, k: Tensor, pattern: Pattern) -> bool:
    """True if a kernel with a log-sum-exp is faster than `scaled_dot_product_attention`, or the only one that repeats bits."""
    if q.is_cuda and torch.are_deterministic_algorithms_enabled():
        return True
    return flash.takes(q, k, causal=pattern.causal)


def result_bytes(tokens: int, heads: int, head_dim: int, element: int) -> list[int]:
    """Bytes of attention's result, `element` bytes per element, and of its float32 log-sum-exp."""
    return [tokens * heads * head_dim * element, tokens * heads * torch.float32.itemsize]


def saved_by_attention(tokens: int, heads: int, groups: int, head_dim: int, element: int) -> list[int]:
    """Bytes that `attend` saves: queries, keys and values, counted as one tensor, the result, and its log-sum-exp."""
    qkv = tokens * (heads + 2 * groups) * head_dim * element
    return [qkv, *result_bytes(tokens, heads, head_dim, element)]


class _Pieces(torch.autograd.Function):
    """q [B, T, H, D], k and v [B, T, G, D] → [B, T, H, D] by kernels that give a log-sum-exp, which is saved."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float, handover: Handover | None) -> Tensor:
        packed = _packed(pattern)
        out, lse = attention(q, k, v, pattern.spans(q.shape[0]), scale=scale, window=pattern.window, packed=packed)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.handover = (pattern, scale), handover
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("these attention kernels")
        attention_begins()
        q, k, v, out, lse = ctx.saved_tensors
        pattern, scale = ctx.call
        spans = pattern.spans(q.shape[0])
        arguments = d_out, q, k, v, out, lse, spans
        how: dict[str, Any] = {"scale": scale, "window": pattern.window, "packed": _packed(pattern)}
        handover: Handover | None = ctx.handover
        if handover is None or not handover.expected or torch.is_anomaly_enabled():  # it rejects NaN
            return *gradients(*arguments, **how), *(None,) * 3
        return *handover.give(accumulated(*arguments, **how), q.dtype), *(None,) * 3


def _packed(pattern: Pattern) -> Packing | None:
    """Documents with boundaries in device memory; the longest may have all tokens."""
    ends = pattern.ends
    return None if ends is None else Packing(ends, ends, pattern.tokens, pattern.tokens)
