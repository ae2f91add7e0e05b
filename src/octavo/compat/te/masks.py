"""Converts Transformer Engine's masks (True: masked) to those of `octavo.nn` (True: attended to).

For self-attention. The result of a query without any key is 0. Shapes: B batch, T tokens.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from octavo.errors import InputError, unknown

PLAIN = {"causal": "causal", "causal_bottom_right": "causal", "no_mask": "no_mask"}
"""Mask types without a mask; with as many queries as keys, bottom-right and top-left alignment are the same."""
TYPES = (*PLAIN, "padding", "padding_causal", "padding_causal_bottom_right", "arbitrary")


def window_pair(window: Any) -> tuple[int, int] | None:
    """(left, right) keys around each query; None for all.

    Raises:
        InputError: not two whole numbers of at least -1.
    """
    if window is None:
        return None
    pair = tuple(window) if isinstance(window, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(part, int) and part >= -1 for part in pair):
        raise InputError(f"window_size={window!r}: give (left, right), the keys before and after a query, -1 for all; or None.")
    return None if pair in ((-1, -1), (-1, 0)) else pair


def without_effect(kind: str) -> None:
    """Warn that a mask type ignores `attention_mask`."""
    message = f"attention_mask has no effect with {kind!r}: use 'arbitrary' or a mask type with 'padding'."
    warnings.warn(message, stacklevel=3)  # shown once by Python


def mask_and_type(
    kind: str, mask: Any, window: tuple[int, int] | None, shape: tuple[int, int, int], device: torch.device
) -> tuple[Tensor | None, str]:
    """(the mask for `octavo.nn`, bool [B or 1, H or 1, T, T] or None; its mask type for a call without a mask).

    Args:
        kind: Transformer Engine's mask type.
        mask: bool [B, 1, 1, T] for padding, any shape that broadcasts to [B, H, T, T] for "arbitrary".
        window: (left, right) keys around each query, -1 for all.
        shape: B, H, T.

    Raises:
        InputError: an unknown type, a mask of another dtype or shape, a type without its mask.
    """
    if kind not in TYPES:
        raise unknown("attention mask type", str(kind), TYPES)
    causal = "causal" in kind
    left, right = window or (-1, -1)
    right = 0 if causal else right
    base = "causal" if causal else "no_mask"
    if kind in PLAIN:
        if mask is not None:
            without_effect(kind)
        if left < 0 and (causal or right < 0):
            return None, base
        return _allowed(shape[2], left, right, device)[None, None], base
    excluded = _checked(kind, mask, shape)
    allowed = ~excluded
    if left >= 0 or right >= 0:
        allowed = allowed & _allowed(shape[2], left, right, device)
    if not kind.startswith("arbitrary"):
        allowed = allowed & allowed.new_ones(1, 1, shape[2], 1)  # [B, 1, T, T]
        allowed = allowed & ~excluded.transpose(-1, -2)  # padding attends to nothing
    return allowed, base


def is_arbitrary(mask: Tensor, batch: int, heads: int, queries: int, keys: int) -> bool:
    """True for a bool mask [batch or 1, heads or 1, queries, keys]; leading dimensions may be missing."""
    leading = (1,) * (4 - mask.dim()) + tuple(mask.shape[:-2])
    fits = mask.dtype == torch.bool and 2 <= mask.dim() <= 4 and mask.shape[-2:] == (queries, keys)
    return fits and leading[0] in (1, batch) and leading[1] in (1, heads)


def _checked(kind: str, mask: Any, shape: tuple[int, int, int]) -> Tensor:
    batch, heads, tokens = shape
    if isinstance(mask, tuple):
        if len(mask) != 2:
            raise InputError(f"attention_mask is {len(mask)} masks: give one, or two of queries and keys.")
        mask = mask[1]  # the same as mask[0]: `octavo.compat.te.call` handles different ones
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        shown = type(mask).__name__ if not isinstance(mask, Tensor) else mask.dtype
        raise InputError(
            f"attention mask type {kind!r} with attention_mask of {shown}: give a bool tensor, True where nothing is "
            f"attended to{', or cu_seqlens_q and cu_seqlens_kv' if 'padding' in kind else ''}."
        )
    if kind == "arbitrary":
        if not is_arbitrary(mask, batch, heads, tokens, tokens):
            takes = f"[{batch} or 1, {heads} or 1, {tokens}, {tokens}]"
            raise InputError(f"attention_mask has the shape {list(mask.shape)}: 'arbitrary' takes {takes}.")
        return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    wanted = (batch, 1, 1, tokens)
    if tuple(mask.shape) not in (wanted, (1, *wanted[1:])):
        raise InputError(f"attention_mask has the shape {list(mask.shape)}: {kind!r} takes {list(wanted)}.")
    return mask


def _allowed(tokens: int, left: int, right: int, device: torch.device) -> Tensor:
    """[T, T], True for the keys from `left` before a query to `right` behind it; -1 for all."""
    distance = torch.arange(tokens, device=device) - torch.arange(tokens, device=device)[:, None]  # key − query
    allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    if left >= 0:
        allowed &= distance >= -left
    if right >= 0:
        allowed &= distance <= right
    return allowed
