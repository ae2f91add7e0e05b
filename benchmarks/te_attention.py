"""Transformer Engine's attention: its kernel is chosen before the import, compared with the reference, and named after steps.

Transformer Engine 2.20.2 passes window bounds of -1 to flash-attn-4, for which a bound of -1 beside another is a window without
keys: attention is empty, and the step looks faster. Here the package gets None in their place, which it means by "unlimited".
A comparison before the timed steps refuses an entry whose attention is another function, whatever the reason.

Shapes: B batch, T tokens, H query heads, G key-value heads, K head dimension.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.collectives.context import ContextGroup
from octavo.errors import InputError
from octavo.kernels.attention import reference

CUDNN = {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
"""cuDNN's attention or none, even where another one is installed."""
FLASH = {
    "NVTE_FUSED_ATTN": "0",
    "NVTE_FLASH_ATTN": "1",
    "NVTE_FLASH_ATTN_V2": "0",
    "NVTE_FLASH_ATTN_V3": "0",  # which it would take before version 4 on Hopper
    "NVTE_FLASH_ATTN_V4": "1",
    "NVTE_UNFUSED_ATTN": "0",
}
"""flash-attn-4 or none."""
USERBUFFERS = {"UB_SKIPMC": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Of exchanges beside products: no NVLink multicast, and kernels of one stream start in the order of their launch."""
TOLERANCE = 0.02
"""Maximum relative error of the output and of each gradient in bfloat16, whose rounding is 0.004."""
MOST_TOKENS = 32_768
"""The comparison's time grows with the square of the tokens: longer sequences are compared at this length."""

_MENDED = ("flash_attn_func", "flash_attn_varlen_func", "_flash_attn_fwd", "_flash_attn_bwd")
"""Functions of `flash_attn.cute.interface` that Transformer Engine calls."""
_calls = 0


def choose(environment: Mapping[str, str]) -> None:
    """Set `CUDNN` or `FLASH`, with the windows of flash-attn-4 mended, before Transformer Engine's import.

    Raises:
        InputError: Transformer Engine was imported under other variables, some of which it read then.
    """
    asked = " ".join(f"{key}={value}" for key, value in environment.items())
    if "transformer_engine.pytorch" in sys.modules and any(os.environ.get(key) != environment[key] for key in environment):
        raise InputError(
            f"Transformer Engine is imported already, under other variables than {asked}: build this entry in a separate "
            "process, as python -m benchmarks does."
        )
    os.environ.update(environment)
    if environment == FLASH:
        _mend_windows()


def chosen() -> str:
    """The attention that Transformer Engine chose in the last step, in words."""
    found: dict[str, Any] = {}
    if "transformer_engine.pytorch" in sys.modules:
        with contextlib.suppress(ImportError):  # another version, which keeps its choice elsewhere
            from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

            found = _attention_backends
    if found.get("use_flash_attention"):
        version = found.get("flash_attention_backend")
        mended = ", window bounds of -1 mended" if getattr(version, "major", None) == 4 and _calls else ""
        return f"Transformer Engine, flash-attn {version}{mended}"
    if found.get("use_fused_attention"):
        return f"Transformer Engine, cuDNN (sub-backend {int(found['fused_attention_backend'])})"
    if found.get("use_unfused_attention"):
        return "Transformer Engine, unfused"
    return "Transformer Engine, " + " ".join(f"{key}={os.environ.get(key, '')}" for key in CUDNN)


def check(
    attention: nn.Module,
    run: Callable[[], Tensor],
    *,
    causal: bool,
    window: int | None = None,
    context: ContextGroup | None = None,
    tokens_first: bool = False,
) -> dict[str, float]:
    """Relative errors of an attention inside a layer: of its output and of its query, key and value gradients.

    Args:
        attention: takes q [B, T, H, K], k and v [B, T, G, K]; a part of a layer.
        run: the layer's forward on some input; this runs its backward too.
        window: keys that a query sees, itself among them; None: all.
        context: the ranks that share each sequence; every rank calls this.
        tokens_first: q is [T, B, H, K], and so are the others.

    Raises:
        InputError: an error above `TOLERANCE`; flash-attn-4 was asked for and not called.
    """
    before = _calls
    seen = _watch(attention, run)
    if os.environ.get("NVTE_FUSED_ATTN") == "0" and _calls == before:
        raise InputError(
            f"attention by flash-attn-4 was asked for, and Transformer Engine did not call it: {chosen()}. Compare "
            "te-delayed, whose attention is cuDNN's."
        )
    if tokens_first:
        seen = {name: x.transpose(0, 1) for name, x in seen.items()}
    errors = _errors(seen, causal=causal, window=window, context=context)
    if not all(error <= TOLERANCE for error in errors.values()):  # a NaN is no error below it
        figures = ", ".join(f"{name} {error:.4f}" for name, error in errors.items())
        raise InputError(
            f"its attention is wrong ({chosen()}, heads of {seen['q'].shape[-1]}, {seen['q'].shape[1]} tokens): relative "
            f"errors {figures}, where at most {TOLERANCE} is rounding. It is not timed."
        )
    return errors


def drawn(shape: Sequence[int], device: torch.device, seed: int = 0) -> Tensor:
    """Normal numbers in float32, others on each rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(1000 * rank + seed), device=device)


def _mend_windows() -> None:
    """Have flash-attn-4 read negative window bounds as unlimited, each by itself."""
    from flash_attn.cute import interface

    for name in _MENDED:
        function = getattr(interface, name)
        if not hasattr(function, "_mended"):
            setattr(interface, name, _mended(function))


def _mended(function: Callable[..., Any]) -> Callable[..., Any]:
    # With the function's attributes: the package looks up its compiled kernels there, by this name.
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        global _calls
        _calls += 1
        if options.get("window_size") is not None:
            options["window_size"] = tuple(map(_unlimited, options["window_size"]))
        for key in ("window_size_left", "window_size_right"):
            if key in options:
                options[key] = _unlimited(options[key])
        return function(*arguments, **options)

    call._mended = True  # type: ignore[attr-defined]
    return call


def _unlimited(bound: int | None) -> int | None:
    return None if bound is None or bound < 0 else bound


def _watch(attention: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """q, k, v, out of an attention and d_out, dq, dk, dv, from a forward and a backward of its layer."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> None:
        seen[name] = x.detach().clone()

    def keep_all(prefix: str, joint: Tensor, dim: int) -> None:
        for name, x in zip("qkv", joint.unbind(dim), strict=True):
            keep(prefix + name, x)

    def enter(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        joint = options.get("qkv_layer")
        if joint is not None:  # of a joint product that its layer does not split
            dim = options["qkv_interleave_dim"]
            keep_all("", joint, dim)
            joint.register_hook(lambda grad: keep_all("d", grad, dim))
            return
        for name, x in zip("qkv", arguments, strict=False):
            keep(name, x)
            x.register_hook(partial(keep, f"d{name}"))

    def leave(module: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> None:
        keep("out", out)
        out.register_hook(partial(keep, "d_out"))

    handles = attention.register_forward_pre_hook(enter, with_kwargs=True), attention.register_forward_hook(leave)
    try:
        y = run()
        y.backward(drawn(y.shape, y.device, seed=1).to(y.dtype))
    finally:
        for handle in handles:
            handle.remove()
    if unseen := [name for name in ("q", "k", "v", "out", "d_out", "dq", "dk", "dv") if name not in seen]:
        raise InputError(
            f"its attention cannot be compared with the reference, since its layer shows no {', '.join(unseen)}: this version "
            "of Transformer Engine calls attention in another way than 2.20. It is not timed."
        )
    return {name: x.reshape(seen["q"].shape) if name in ("out", "d_out") else x for name, x in seen.items()}


def _errors(seen: Mapping[str, Tensor], *, causal: bool, window: int | None, context: ContextGroup | None) -> dict[str, float]:
    """‖found − expected‖ / ‖expected‖ of each tensor; a head of keys at a time, which bounds the memory."""
    split: Callable[[Tensor], Tensor] = (lambda x: x) if context is None else context.split
    whole = dict(seen) if context is None else {name: context.gather(x.contiguous()) for name, x in seen.items()}
    how: dict[str, Any] = {"causal": causal, "scale": whole["q"].shape[-1] ** -0.5, "window": window}
    groups = whole["k"].shape[2]
    each = whole["q"].shape[2] // groups
    names = {"out": "output", "dq": "query gradient", "dk": "key gradient", "dv": "value gradient"}
    far, size = (dict.fromkeys(names, 0.0) for _ in range(2))
    for sequence in range(len(whole["q"])):
        for group in range(groups):
            queries, keys = slice(group * each, (group + 1) * each), slice(group, group + 1)
            of = {name: keys if name in ("k", "v", "dk", "dv") else queries for name in whole}
            part = {name: x[sequence : sequence + 1, :, of[name]] for name, x in whole.items()}
            out, lse = reference.forward(part["q"], part["k"], part["v"], **how)
            grads = reference.backward(part["d_out"], part["q"], part["k"], part["v"], out, lse, **how)
            for name, expected in zip(names, (out, *grads), strict=True):
                expected = split(expected)
                far[name] += float((split(part[name]) - expected).double().square().sum())
                size[name] += float(expected.double().square().sum())
    return {title: math.sqrt(far[name] / size[name]) if size[name] else math.inf for name, title in names.items()}
