"""FlashAttention-4 on Hopper: causal, full, windows, and sequences of several lengths in one call, with log-sum-exps.

One version of the package `flash-attn-4` is used, since a backward by the log-sum-exps of more keys is a private function of
it. `tests/gpu/test_pieces.py` compares that version with the reference.

Shapes: B batch, Tq queries, Tk keys, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.errors import warn
from octavo.kernels import gemm
from octavo.kernels.attention.accumulated import Accumulated, Gradient
from octavo.kernels.attention.pattern import Packing, Span
from octavo.process import process

VERSION = "4.0.0b36"
_HEADS = (64, 96, 128)
"""Head dimensions, those of the tests: the package's backward gives wrong gradients for some others."""


def enable(enabled: bool) -> None:
    """Use FlashAttention-4 where it is installed (the default), or never; also OCTAVO_FLASH_ATTENTION=0 in the environment."""
    process.flash_attention = enabled


def enabled() -> bool:
    """False after `enable(False)`."""
    return process.flash_attention


@functools.cache
def missing() -> str | None:
    """The reason why Hopper GPUs cannot use FlashAttention-4 here; None if they can."""
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return "flash-attn-4 is not installed"
    if version != VERSION:
        return f"flash-attn-4 is {version}; the tested version is {VERSION}"
    return None


@functools.cache
def _interface() -> Any:
    """The package's functions; None if they cannot be imported, with one warning."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from flash_attn.cute import interface
    except Exception as error:
        warn(f"flash-attn-4 {VERSION} cannot be imported, so attention uses cuDNN's kernels: {error!r}")
        return None
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)  # by its compiler, for each kernel
    interface._tile_size_bwd_sm90 = functools.partial(_backward_tiles, interface._tile_size_bwd_sm90)
    interface._bwd_postprocess_convert = _with_sums(interface._bwd_postprocess_convert)
    return interface


def _backward_tiles(chosen: Callable[..., Any], head_dim: int, *rest: Any, **options: Any) -> Any:
    """The package's tiles of a backward: with heads of 64 (H200) it is 2 to 3% faster if d_out is loaded in one stage."""
    tiles = chosen(head_dim, *rest, **options)
    return dataclasses.replace(tiles, num_stages_dO=1) if head_dim <= 64 else tiles


def _with_sums(round_: Any) -> Callable[..., None]:
    """The package's rounding function, replaced by `_round_sums`."""
    return functools.update_wrapper(functools.partial(_round_sums, round_), round_)  # its cache is looked up by its name


def _round_sums(
    round_: Callable[..., None], sums: Tensor, rounded: Tensor, scale: float, ends: Tensor | None, lengths: Tensor | None,
    arch: int, dtype: Any, head_dim: int, tokens: int, threads: int, warp_groups: int, swapped: bool,
    *rest: Any, **options: Any,
) -> None:  # fmt: skip
    """The package's rounding of sums, postponed where `octavo.kernels.attention.accumulated` knows their order.

    tokens: tokens of a tile. warp_groups: warp groups that share its rows, 64 each.
    """
    # By the address of the rounded gradient.
    sums_by_address: dict[int, Accumulated] | None = getattr(process.attention, "sums", None)
    if sums_by_address is not None and ends is None and lengths is None and not swapped and tokens == 64 * warp_groups:
        batch, length, heads, dim = rounded.shape
        sums_by_address[rounded.data_ptr()] = Accumulated(sums, scale, (batch, length, heads, dim))
        return
    settings = arch, dtype, head_dim, tokens, threads, warp_groups, swapped
    round_(sums, rounded, scale, ends, lengths, *settings, *rest, **options)


def serves(capability: tuple[int, int] | None, head_dim: int) -> bool:
    """True if FlashAttention-4 computes attention in bf16 with heads of this size on a GPU of this capability."""
    return process.flash_attention and capability == (9, 0) and head_dim in _HEADS and missing() is None


def takes(q: Tensor, k: Tensor, *, causal: bool, window: int | None = None) -> bool:
    """True if FlashAttention-4 computes q [B, Tq, H, D] with k [B, Tk, G, D]: bf16 on Hopper, full, or causal with Tq ≤ Tk."""
    if not q.is_cuda or q.dtype != torch.bfloat16 or torch.compiler.is_compiling():
        return False
    if (causal and k.shape[1] < q.shape[1]) or (window is not None and not causal):
        return False
    return serves(gemm.capability(q.device), q.shape[-1]) and _interface() is not None


def packing(q: Tensor, k: Tensor, spans: Sequence[Span], window: int | None) -> Packing | None:
    """The spans as one call, if they are all rows of q [B, Tq, H, D] and all of k [B, Tk, G, D] in order; else None."""
    if len(spans) < 2 or not takes(q, k, causal=False):
        return None
    return _packing(tuple(spans), q.shape[0], q.shape[1], k.shape[1], window, q.device)


@functools.lru_cache(maxsize=16)  # the layers of a model ask for the same
def _packing(
    spans: tuple[Span, ...], batch: int, queries: int, keys: int, window: int | None, device: torch.device
) -> Packing | None:
    causal = spans[0].causal
    q_ends, k_ends = [0], [0]
    for span in spans:
        starts = span.b0 * queries + span.q0, span.b0 * keys + span.k0
        span_q, span_k = span.q1 - span.q0, span.k1 - span.k0
        if span.b1 != span.b0 + 1 or span.reversed or span.causal != causal or starts != (q_ends[-1], k_ends[-1]):
            return None
        if (causal and span_k < span_q) or (window is not None and not causal):
            return None
        q_ends.append(q_ends[-1] + span_q)
        k_ends.append(k_ends[-1] + span_k)
    if q_ends[-1] != batch * queries or k_ends[-1] != batch * keys:
        return None
    longest_q, longest_k = (max(end - start for start, end in itertools.pairwise(ends)) for ends in (q_ends, k_ends))
    on_host = (torch.tensor(ends, dtype=torch.int32, device="cpu") for ends in (q_ends, k_ends))
    q_rows, k_rows = (ends.to(device, non_blocking=True) for ends in on_host)
    return Packing(q_rows, k_rows, longest_q, longest_k)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: int | None = None, packed: Packing | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [B, Tq, H, D], k and v [B, Tk, G, D] → out [B, Tq, H, D] in the dtype of q, lse [B, H, Tq] float32.

    Both are written to `into`, if given.
    """
    tensors, options = _call(q, k, v, packed=packed, causal=causal, window=window)
    if into is not None:
        options |= dict(zip(("out", "lse"), into, strict=True))
    out, lse, *_ = _interface()._flash_attn_fwd(*tensors, softmax_scale=scale, return_lse=True, **options)
    return (out, lse) if packed is None else (out.view(q.shape), lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1))


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float,
    window: int | None = None, packed: Packing | None = None, into: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [B, Tq, H, D], k and v [B, Tk, G, D] in their dtype, in `into`, if given.

    d_out, out [B, Tq, H, D], lse [B, H, Tq]: the latter two may be those of a softmax over more keys. Gradients repeat bit for
    bit under `torch.use_deterministic_algorithms`.
    """
    tensors, options = _call(q, k, v, out, d_out, packed=packed, causal=causal, window=window)
    if into is not None:
        options |= dict(zip(("dq", "dk", "dv"), into, strict=True))
    lse = lse if packed is None else lse.transpose(0, 1).flatten(1)
    repeats = torch.are_deterministic_algorithms_enabled()
    grads = _interface()._flash_attn_bwd(*tensors, lse, softmax_scale=scale, deterministic=repeats, **options)
    dq, dk, dv = (grad.view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def accumulate(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float,
    window: int | None = None,
) -> tuple[Gradient, Gradient, Gradient]:  # fmt: skip
    """`backward`, with gradients [B, Tq or Tk, H or G, D] left as float32 sums where the package computes such sums."""
    sums_by_address: dict[int, Accumulated] = {}
    process.attention.sums = sums_by_address
    try:
        grads = backward(d_out, q, k, v, out, lse, causal=causal, scale=scale, window=window)
    finally:
        process.attention.sums = None
    dq, dk, dv = (sums_by_address.get(grad.data_ptr(), grad) for grad in grads)
    return dq, dk, dv


def _call(
    *tensors: Tensor, packed: Packing | None, causal: bool, window: int | None
) -> tuple[Sequence[Tensor], dict[str, Any]]:
    options: dict[str, Any] = {"causal": causal, "window_size_left": None if window is None else window - 1}
    if packed is None:
        return tensors, options
    options |= {"cu_seqlens_q": packed.q_ends, "cu_seqlens_k": packed.k_ends}
    options |= {"max_seqlen_q": packed.longest_q, "max_seqlen_k": packed.longest_k}
    return [x.flatten(0, 1) for x in tensors], options
