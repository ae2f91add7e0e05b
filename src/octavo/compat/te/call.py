"""Masks, windows and lengths in a call of Transformer Engine's attention: the keys that each query attends to.

Every argument is used or checked: one that contradicts another, or the tensors, is refused. The result is a mask for the layers
of `octavo.nn`, or a list of segments for `octavo.nn.segments`.

Shapes: B batch, Tq queries, Tk keys, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from octavo.compat.notices import say_once
from octavo.compat.te.limits import LENGTHS, LONGEST, TAKEN, cap_of, check_cap_alone, check_lengths, check_terms
from octavo.compat.te.masks import PLAIN, TYPES, is_arbitrary, mask_and_type, window_pair, without_effect
from octavo.compat.te.sequences import check_longest, chunks, cumulative, joined, lengths_of, places, positions, shown
from octavo.errors import InputError, check_flags, unknown
from octavo.kernels.attention.pattern import Span
from octavo.nn.segments import LIBRARY

_PLACES = {"cu_seqlens_q": "cu_seqlens_q_padded", "cu_seqlens_kv": "cu_seqlens_kv_padded"}
"""Cumulative lengths → offsets of the sequences."""
MASKED = f"{LIBRARY} with a mask"


def mask_type(argument: str, kind: Any) -> str:
    """The mask type, one name for each of its spellings; an InputError for an unknown one."""
    name = str(kind).replace(",", "_")
    name = "padding_causal" if name == "causal_padding" else name
    if name not in TYPES:
        raise unknown(argument, str(kind), TYPES)
    return name


class Settings:
    """A layer's mask type, window and softcap: the defaults of its calls."""

    def __init__(self, kind: str, window: Any, bottom_right: bool | None, softcap: float | None) -> None:
        self.kind, self.window, self.bottom_right = kind, window_pair(window), bottom_right
        check_flags("attention", bottom_right_diagonal=bottom_right or False)
        self.softcap = cap_of(softcap)
        causal = "causal" in kind
        self.native = (self.window[0], 0) if self.window is not None and causal else None
        """The window of the `octavo.nn` layer in causal calls."""

    @classmethod
    def take(cls, values: dict[str, Any], name: str, prefix: str = "") -> Settings:
        """The settings in a constructor's `values`, which loses them. name: the mask type. prefix: of the other names."""
        kind = mask_type(name, values.pop(name))
        window, bottom_right = (values.pop(f"{prefix}{part}") for part in ("window_size", "bottom_right_diagonal"))
        return cls(kind, window, bottom_right, values.pop("softcap", None))

    def native_arguments(self, name: str) -> dict[str, Any]:
        """The nearest mask type and window that the layer of `octavo.nn` supports."""
        return {name: "causal" if "causal" in self.kind else "no_mask", "window_size": self.native}


@dataclass(frozen=True)
class Given:
    """The arguments of one call of attention.

    Attributes:
        given: its arguments of `TAKEN` that are not None.
        encoded: hidden states of an encoder, [B, Tk, hidden].
        self_attention: queries and keys come from the same tokens and have the same lengths.
    """

    settings: Settings
    kind: str
    window: tuple[int, int] | None
    bottom_right: bool | None
    mask: Any
    given: dict[str, Any]
    packed: bool = False
    encoded: Tensor | None = None
    self_attention: bool = False
    read: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Lengths on the host, read once a call; recomputation in backward reuses those of its forward."""

    @classmethod
    def of(
        cls, settings: Settings, kind: Any, window: Any, bottom_right: bool | None, mask: Any, arguments: dict[str, Any], *,
        packed: bool = False, encoded: Tensor | None = None, self_attention: bool = False,
    ) -> tuple[Self, dict[str, Any]]:  # fmt: skip
        """The call, and the arguments that it does not handle."""
        passed = {name: value for name, value in arguments.items() if name in TAKEN and value is not None}
        rest = {name: value for name, value in arguments.items() if name not in TAKEN}
        kind = settings.kind if kind is None else mask_type("attn_mask_type", kind)
        window = settings.window if window is None else window_pair(window)
        right = settings.bottom_right if bottom_right is None else bottom_right
        recompute = passed.get("checkpoint_core_attention", False)
        check_flags("attention", bottom_right_diagonal=right or False, checkpoint_core_attention=recompute)
        bias = check_terms(passed)
        check_cap_alone(cap_of(passed.get("softcap", settings.softcap)), bias)
        call = cls(
            settings,
            kind,
            window,
            right,
            mask,
            passed,
            packed,
            encoded,
            self_attention,
        )
        return call, rest

    @property
    def bias(self) -> str:
        """Bias type."""
        return str(self.given.get("core_attention_bias_type", "no_bias"))

    @property
    def cap(self) -> float:
        """Cap of the scores, 0 for none."""
        return cap_of(self.given.get("softcap", self.settings.softcap))

    def is_plain(self, core: Any, queries: int, keys: int) -> bool:
        """True if a layer of `octavo.nn` supports the call, with at most a mask."""
        if self.packed or any(name in self.given for name in LENGTHS) or self.bias != "no_bias" or self.cap:
            return False
        if self.given.get("checkpoint_core_attention") or getattr(core, "softmax_offset", None) is not None:
            return False
        if getattr(core, "return_max_logit", False) or self.encoded is not None:
            return False
        if isinstance(self.mask, tuple) and len(self.mask) == 2 and self.mask[0] is not self.mask[1]:
            return False  # different masks of queries and keys
        return queries == keys or (self.kind == "no_mask" and self.window is None)

    def native(self, batch: int, heads: int, queries: int, keys: int, device: torch.device) -> tuple[Tensor | None, str]:
        """The mask for the layer of `octavo.nn`, bool [B or 1, H or 1, Tq, Tk] or None, and its mask type."""
        mask, base = self._native((batch, heads, keys), device)
        self._check_samples(queries, keys)
        if mask is not None:
            plain = self.kind in PLAIN
            windowed = plain or self.window is not None
            self._say({f"attn_mask_type={self.kind!r}": not plain, f"window_size={self.window}": windowed}, MASKED)
        return mask, base

    def _native(self, shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor | None, str]:
        settings, kind, window = self.settings, self.kind, self.window
        if settings.native is None or kind not in PLAIN:
            return mask_and_type(kind, self.mask, window, shape, device)
        if "causal" in kind and window is not None and window[0] == settings.native[0]:
            return None, "causal"
        mask, base = mask_and_type(kind, self.mask, window, shape, device)
        everything = shape[2], shape[2]
        return (mask if mask is not None else mask_and_type(kind, self.mask, everything, shape, device)[0]), base

    def _check_samples(self, queries: int, keys: int) -> None:
        """Raise an InputError unless max_seqlen_… and pad_between_seqs fit samples without lengths."""
        self._check_padding({})
        masks = self._masks()
        for name, mask, tokens in zip(LONGEST, masks, (queries, keys), strict=True):
            maximum, longest = self.given.get(name), tokens
            if isinstance(maximum, int) and maximum < tokens and "padding" in self.kind and isinstance(mask, Tensor):
                longest = int((~mask).sum(-1).max()) if mask.numel() else 0
            if maximum is not None:
                check_longest(name, maximum, longest)

    def _check_padding(self, padded: dict[str, bool], *, full: bool = False) -> None:
        """Raise an InputError if pad_between_seqs contradicts the lengths.

        padded: by `_PLACES`, True where sequences have gaps. full: sequences leave no token for padding.
        """
        pads = self.given.get("pad_between_seqs")
        if pads is None:
            return
        if not isinstance(pads, bool):
            raise InputError(f"pad_between_seqs={pads!r}: give True, False or None.")
        if pads and not self.packed:
            raise InputError('pad_between_seqs=True is for packed sequences ("thd"): for samples give lengths or masks.')
        if pads and not padded and not full:
            raise InputError(
                "pad_between_seqs=True without the offsets of the sequences, which are shorter than the tokens: give "
                "cu_seqlens_q_padded and cu_seqlens_kv_padded."
            )
        if not pads and any(padded.values()):
            name = next(name for name, gaps in padded.items() if gaps)
            raise InputError(f"pad_between_seqs=False, but {name} has padding between sequences: pass True, or leave it out.")

    def _aligned_right(self) -> bool:
        if self.kind in ("causal", "padding_causal"):
            return False
        return True if self.kind.endswith("bottom_right") or self.bottom_right is None else self.bottom_right

    def _say(self, reasons: dict[str, bool], way: str) -> None:
        """Log once which feature of a call has no kernel."""
        for what in [what for what, there in reasons.items() if there]:
            say_once(f"attention: {what}, {way}", f"attention with {what} runs in {way}, not in a fused kernel.")

    def segments(self, q: Tensor, k: Tensor) -> tuple[list[Span], Tensor | None]:
        """q [B, Tq, H, D], k [B, Tk, G, D] → the segments, and for "arbitrary" a mask [B or 1, H or 1, Tq, Tk]."""
        (batch, queries), keys = q.shape[:2], k.shape[1]
        padding = "padding" in self.kind
        whole = [Span(0, batch, 0, queries, 0, keys)]
        if self.packed or any(name in self.given for name in LENGTHS):
            if self.packed and not padding:
                raise InputError(
                    f"attn_mask_type={self.kind!r} with packed sequences (\"thd\"): use 'padding', 'padding_causal' or "
                    "'padding_causal_bottom_right'."
                )
            segments = self._by_lengths(batch, queries, keys)
            if padding:
                self._check_masks(segments)
                return segments, None
            full = [(one.q1 - one.q0, one.k1 - one.k0) for one in segments] == [(queries, keys)] * batch
            if not full:
                raise InputError(
                    f"attn_mask_type={self.kind!r} with cu_seqlens of shorter sequences: use a mask type with 'padding', or "
                    "leave cu_seqlens out."
                )
        else:
            self._check_samples(queries, keys)
        if self.kind == "arbitrary":
            return whole, self._arbitrary(batch, q.shape[2], queries, keys)
        if not padding:
            if self.mask is not None:
                without_effect(self.kind)
            return whole, None
        masks = self._masks()
        for mask, tokens, what in zip(masks, (queries, keys), ("queries", "keys"), strict=True):
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != (batch, 1, 1, tokens):
                raise InputError(
                    f"attention mask type {self.kind!r} with attention_mask of {shown(mask)} for the {what}: give bool "
                    f"{[batch, 1, 1, tokens]}, True for padding, of queries and keys a pair; or cu_seqlens_q and cu_seqlens_kv."
                )
            if what not in self.read:
                self.read[what] = lengths_of(mask)
        return joined(*([(n, 0, length) for n, length in enumerate(self.read[what])] for what in ("queries", "keys"))), None

    def _arbitrary(self, batch: int, heads: int, queries: int, keys: int) -> Tensor:
        mask = self.mask
        if not isinstance(mask, Tensor) or not is_arbitrary(mask, batch, heads, queries, keys):
            raise InputError(
                f"attention mask type 'arbitrary' with attention_mask of {shown(mask)}: give bool "
                f"[{batch} or 1, {heads} or 1, {queries}, {keys}], True for masked positions."
            )
        return ~mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))

    def _by_lengths(self, batch: int, queries: int, keys: int) -> list[Span]:
        check_lengths(self.given, self_attention=self.self_attention, packed=self.packed)
        q_ends, kv_ends, q_padded, kv_padded = (self._ends(name) for name in LENGTHS)
        if kv_ends is None:
            kv_ends, kv_padded = q_ends, q_padded if kv_padded is None else kv_padded
        assert q_ends is not None
        assert kv_ends is not None
        sequences, gaps = [], {}
        sides = zip(LENGTHS, LONGEST, (q_ends, kv_ends), (q_padded, kv_padded), (queries, keys), strict=False)
        for name, longest, ends, padded, tokens in sides:
            sequences.append(places(name, ends, padded, tokens, packed=self.packed))
            if not self.packed and len(sequences[-1]) != batch:
                raise InputError(f"{name} is of {len(sequences[-1])} sequences: there are {batch} samples.")
            if longest in self.given:
                check_longest(longest, self.given[longest], max((end - first for _, first, end in sequences[-1]), default=0))
            if padded is not None and self.packed:
                gaps[_PLACES[name]] = padded[:-1] != ends[:-1]
        self._check_padding(gaps, full=(q_ends[-1], kv_ends[-1]) == (queries, keys))
        return joined(*sequences)

    def _masks(self) -> tuple[Any, Any]:
        """The masks of queries and of keys."""
        if not isinstance(self.mask, tuple | list):
            return self.mask, self.mask
        if len(self.mask) != 2:
            raise InputError(f"attention_mask is {len(self.mask)} masks: give one, or two of queries and keys.")
        return self.mask[0], self.mask[1]

    def _copied_mask(self) -> Any:
        """Copies of padding masks for recomputation, which needs those of its forward; Tq × Tk masks are not copied."""
        if "padding" not in self.kind:
            return self.mask
        if isinstance(self.mask, tuple | list):
            return tuple(mask.clone() if isinstance(mask, Tensor) else mask for mask in self.mask)
        return self.mask.clone() if isinstance(self.mask, Tensor) else self.mask

    def _ends(self, name: str) -> tuple[int, ...] | None:
        """Cumulative lengths on the host; None if they are not given."""
        if name in self.given and name not in self.read:
            self.read[name] = cumulative(name, self.given[name])
        return self.read.get(name)

    def _check_masks(self, segments: list[Span]) -> None:
        """Raise an InputError if masks contradict the lengths."""
        if self.mask is None:
            return
        masks = self._masks()
        lengths = [one.q1 - one.q0 for one in segments], [one.k1 - one.k0 for one in segments]
        for name, mask, expected in zip(LENGTHS, masks, lengths, strict=False):
            fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 4
            fits = fits and tuple(mask.shape[:3]) == (len(expected), 1, 1) and mask.shape[3] >= max(expected, default=0)
            if fits:
                host: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
                padded = torch.arange(mask.shape[3], **host) >= torch.tensor(expected, **host)[:, None]
                fits = torch.equal(mask[:, 0, 0].cpu(), padded)
            if not fits:
                raise InputError(
                    f"attention_mask of {shown(mask)} contradicts {name}: leave one of the two out, or give bool "
                    f"{[len(expected), 1, 1, max(expected, default=0)]}, True for padding."
                )

    def _alike(self) -> bool:
        """True if queries and keys have the same positions."""
        names = ("cu_seqlens_q", "cu_seqlens_kv"), ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        return not self.packed or all(self.given.get(q) is self.given.get(kv) for q, kv in names)

    def _positions(self, name: str, tokens: int) -> Tensor:
        if not self.packed:
            return chunks(tokens, 1, 0)
        ends, padded = self._ends(name), self._ends(_PLACES[name])
        if ends is None and name == "cu_seqlens_kv" and self.self_attention:
            return self._positions("cu_seqlens_q", tokens)
        if ends is None:
            raise InputError(f"no {name}: packed sequences need it, for queries and for keys.")
        return positions(ends if padded is None else [min(end, tokens) for end in padded], tokens)
