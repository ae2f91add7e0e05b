"""One call of Transformer Engine's attention: masks, lengths, windows, biases and kinds of softmax beyond those of `octavo.nn`.

Self-attention of samples without lengths stays with `octavo.nn`'s layers. Everything else is a list of segments, computed by
`octavo.nn.segments`, and what no kernel computes there is named once. Queries without a key, and padding, have the result 0.

Shapes: B batch, Tq queries, Tk keys, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compat.notices import say_once
from octavo.compat.te.masks import PLAIN, TYPES, mask_and_type, window_pair, without_effect
from octavo.compat.te.recompute import checkpoint
from octavo.compat.te.rotary import check_angles, tables, turned
from octavo.compat.te.sequences import chunks, cumulative, joined, lengths_of, places, positions
from octavo.errors import InputError, unknown
from octavo.nn import attention as _attention
from octavo.nn.norm import forward_residual
from octavo.nn.rotary import Rotation
from octavo.nn.scores import Scores, alibi_slopes
from octavo.nn.segments import Segment, Sight, attend_segments

BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
SOFTMAX = ("vanilla", "off-by-one", "learnable")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_PLACES = {"cu_seqlens_q": "cu_seqlens_q_padded", "cu_seqlens_kv": "cu_seqlens_kv_padded"}
"""Lengths → where the sequences begin."""
TAKEN = (
    *LENGTHS, "max_seqlen_q", "max_seqlen_kv", "pad_between_seqs", "core_attention_bias_type", "core_attention_bias",
    "alibi_slopes", "softcap", "checkpoint_core_attention",
)  # fmt: skip
"""Arguments of a call that `Call` has an answer for."""


def mask_type(argument: str, kind: Any) -> str:
    """Transformer Engine's mask type, of which some have two spellings; an InputError unless it is one."""
    name = str(kind).replace(",", "_")
    name = "padding_causal" if name == "causal_padding" else name
    if name not in TYPES:
        raise unknown(argument, str(kind), TYPES)
    return name


class Settings:
    """What a layer's constructor says of its calls."""

    def __init__(self, kind: str, window: Any, bottom_right: bool | None, softcap: float | None) -> None:
        self.kind, self.window, self.bottom_right = kind, window_pair(window), bottom_right
        self.softcap = softcap or 0.0
        causal = "causal" in kind
        self.native = (self.window[0], 0) if self.window is not None and causal else None
        """A window that the layer of `octavo.nn` computes by itself, in causal calls."""

    @classmethod
    def take(cls, values: dict[str, Any], name: str, prefix: str = "") -> Settings:
        """Those of a constructor's arguments, which are removed. name: of the mask type. prefix: of the others."""
        kind = mask_type(name, values.pop(name))
        window, bottom_right = (values.pop(f"{prefix}{part}") for part in ("window_size", "bottom_right_diagonal"))
        return cls(kind, window, bottom_right, values.pop("softcap", None))

    def native_arguments(self, name: str) -> dict[str, Any]:
        """Mask type and window for the layer of `octavo.nn`, the nearest that it has."""
        return {name: "causal" if "causal" in self.kind else "no_mask", "window_size": self.native}


def set_softmax(core: Any, softmax_type: str, heads: int, make: dict[str, Any]) -> None:
    """Give an attention its `softmax_offset` [H]: a parameter if learnable, zeros if off by one, else None."""
    if softmax_type not in SOFTMAX:
        raise unknown("softmax_type", str(softmax_type), SOFTMAX)
    core.softmax_type = softmax_type
    core.softmax_offset = None
    if softmax_type == "off-by-one":
        core.softmax_offset = torch.zeros(heads, **make)
    elif softmax_type == "learnable":
        del core.softmax_offset
        core.register_parameter("softmax_offset", nn.Parameter(torch.zeros(heads, **make)))


@dataclass(frozen=True)
class Call(_attention.Attending):
    """A call. given: its arguments by `TAKEN`. encoded: hidden states of an encoder, [B, Tk, hidden]."""

    settings: Settings
    kind: str
    window: tuple[int, int] | None
    bottom_right: bool | None
    mask: Any
    given: dict[str, Any]
    packed: bool = False
    encoded: Tensor | None = None

    @classmethod
    def of(
        cls, settings: Settings, kind: Any, window: Any, bottom_right: bool | None, mask: Any, arguments: dict[str, Any], *,
        packed: bool = False, encoded: Tensor | None = None,
    ) -> tuple[Call, dict[str, Any]]:  # fmt: skip
        """The call, and the arguments that it has no answer for."""
        given = {name: value for name, value in arguments.items() if name in TAKEN and value is not None}
        rest = {name: value for name, value in arguments.items() if name not in TAKEN}
        kind = settings.kind if kind is None else mask_type("attn_mask_type", kind)
        window = settings.window if window is None else window_pair(window)
        bias = given.get("core_attention_bias_type", "no_bias")
        if bias not in BIASES:
            raise unknown("core_attention_bias_type", str(bias), BIASES)
        if ("core_attention_bias" in given) != (bias in ("pre_scale_bias", "post_scale_bias")):
            raise InputError(
                f"core_attention_bias_type={bias!r} with{'' if 'core_attention_bias' in given else 'out'} core_attention_bias: "
                "'pre_scale_bias' and 'post_scale_bias' take one, the others none."
            )
        if "alibi_slopes" in given and bias != "alibi":
            raise InputError(f"alibi_slopes beside core_attention_bias_type={bias!r}: pass 'alibi'.")
        call = cls(
            settings,
            kind,
            window,
            settings.bottom_right if bottom_right is None else bottom_right,
            mask,
            given,
            packed,
            encoded,
        )
        return call, rest

    @property
    def bias(self) -> str:
        """Kind of bias."""
        return str(self.given.get("core_attention_bias_type", "no_bias"))

    @property
    def cap(self) -> float:
        """Cap of the scores, 0 for none."""
        return float(self.given.get("softcap", self.settings.softcap))

    def is_plain(self, core: Any, queries: int, keys: int) -> bool:
        """True if a layer of `octavo.nn` computes it, at most with a mask."""
        if self.packed or any(name in self.given for name in LENGTHS) or self.bias != "no_bias" or self.cap:
            return False
        if self.given.get("checkpoint_core_attention") or getattr(core, "softmax_offset", None) is not None:
            return False
        if getattr(core, "return_max_logit", False) or self.encoded is not None:
            return False
        if isinstance(self.mask, tuple) and len(self.mask) == 2 and self.mask[0] is not self.mask[1]:
            return False  # of queries and of keys
        return queries == keys or (self.kind == "no_mask" and self.window is None)

    def native(self, tokens: tuple[int, int], device: torch.device) -> tuple[Tensor | None, str]:
        """The mask for the layer of `octavo.nn`, and its mask type. tokens: B, T."""
        settings, kind, window = self.settings, self.kind, self.window
        if settings.native is None or kind not in PLAIN:
            return mask_and_type(kind, self.mask, window, tokens, device)
        if "causal" in kind and window is not None and window[0] == settings.native[0]:
            return None, "causal"
        found, base = mask_and_type(kind, self.mask, window, tokens, device)
        everything = (tokens[1], tokens[1])
        return (found if found is not None else mask_and_type(kind, self.mask, everything, tokens, device)[0]), base

    def core(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """softmax(…) · v of q [B, Tq, H, D], k and v [B, Tk, G, D] → [B, Tq, H·D]; with return_max_logit a pair."""
        if self.given.get("checkpoint_core_attention"):
            tracker = layer.draws.tracker
            once = replace(self, given=self.given | {"checkpoint_core_attention": False})
            return checkpoint(once.core, layer, q, k, v, get_rng_state_tracker=tracker)
        sides = v.shape[-1] == q.shape[-1]
        if sides and self.is_plain(layer, q.shape[1], k.shape[1]):
            mask, base = self.native((k.shape[0], k.shape[1]), k.device)
            first = layer.sequence_first
            q, k, v = (x.transpose(0, 1) if first else x for x in (q, k, v))
            out = _attention.DotProductAttention.forward(layer, q, k, v, mask, attn_mask_type=base)
            return out.transpose(0, 1) if first else out
        out, top = self._segmented(layer, q, k, v)
        return out.flatten(2) if top is None else (out.flatten(2), top)

    def _segmented(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        if layer.context is not None:
            raise InputError(
                "context parallelism takes self-attention of whole samples: leave out cu_seqlens, biases, kinds of softmax and "
                "caps, or call set_context_parallel_group(None)."
            )
        segments, mask = self.segments(q, k)
        left, right = self.window or (-1, -1)
        right = 0 if "causal" in self.kind else right
        sight = Sight(None if left < 0 else left, None if right < 0 else right, self._aligned_right())
        dropout = layer.attention_dropout if layer.training else 0.0
        scale = q.shape[-1] ** -0.5 if layer.softmax_scale is None else layer.softmax_scale
        scores = self.scores(layer, q, segments)
        top = bool(getattr(layer, "return_max_logit", False))
        self._name(scores, dropout, top)
        with layer.draws() if dropout else contextlib.nullcontext():
            return attend_segments(
                q, k, v, segments, sight, scale=scale, scores=scores, mask=mask, dropout=dropout, top=top
            )  # fmt: skip

    def _aligned_right(self) -> bool:
        if self.kind in ("causal", "padding_causal"):
            return False
        return True if self.kind.endswith("bottom_right") or self.bottom_right is None else self.bottom_right

    def _name(self, scores: Scores, dropout: float, top: bool) -> None:
        """Say once which term has no kernel."""
        found = {
            f"core_attention_bias_type={self.bias!r}": scores.bias is not None or scores.slopes is not None,
            "softcap": bool(scores.cap),
            "return_max_logit": top,
            "attention_dropout beside a softmax offset": bool(dropout) and scores.sink is not None,
        }
        for what in [what for what, there in found.items() if there]:
            say_once(f"attention: {what}", f"attention with {what} runs in plain PyTorch, in float32, and not in a kernel.")

    def scores(self, layer: Any, q: Tensor, segments: list[Segment]) -> Scores:
        """Terms of the softmax, on the device of q."""
        sink = getattr(layer, "softmax_offset", None)
        bias, slopes, heads = self.given.get("core_attention_bias"), None, q.shape[2]
        samples = len(segments) if self.packed else len(q)
        if self.bias == "alibi":
            slopes = self.given.get("alibi_slopes", None)
            slopes = alibi_slopes(heads, q.device) if slopes is None else slopes.to(q.device)
            if tuple(slopes.shape) not in ((heads,), (samples, heads)):
                raise InputError(f"alibi_slopes has the shape {list(slopes.shape)}: give [{heads}] or [{samples}, {heads}].")
        if bias is not None:
            longest = max((s.q1 - s.q0 for s in segments), default=0), max((s.k1 - s.k0 for s in segments), default=0)
            shape = tuple(bias.shape)
            fits = len(shape) == 4 and shape[0] in (1, samples) and shape[1] in (1, heads)
            if not fits or (shape[2] != 1 and shape[2] < longest[0]) or shape[3] < longest[1]:
                raise InputError(
                    f"core_attention_bias has the shape {list(shape)}: give [{samples} or 1, {heads} or 1, {longest[0]} or 1, "
                    f"{longest[1]}]."
                )
        if self.packed and ((bias is not None and len(bias) > 1) or (slopes is not None and slopes.dim() == 2)):
            raise InputError('packed sequences ("thd") take one core_attention_bias or alibi_slopes for all of them.')
        if self.cap and self.bias != "no_bias":
            raise InputError(f"softcap={self.cap} with core_attention_bias_type={self.bias!r} is not supported: leave one out.")
        return Scores(bias, self.bias == "pre_scale_bias", slopes, self.cap, None if sink is None else sink.to(q.device))

    def segments(self, q: Tensor, k: Tensor) -> tuple[list[Segment], Tensor | None]:
        """The segments, and for "arbitrary" the mask, True where a query attends to a key."""
        (batch, queries), keys = q.shape[:2], k.shape[1]
        padding, lengths = "padding" in self.kind, {name: self.given.get(name) for name in LENGTHS}
        whole = [Segment(0, batch, 0, queries, 0, keys)]
        if self.packed or any(value is not None for value in lengths.values()):
            if self.packed and not padding:
                raise InputError(
                    f"attn_mask_type={self.kind!r} with packed sequences (\"thd\"): use 'padding', 'padding_causal' or "
                    "'padding_causal_bottom_right'."
                )
            segments = self._by_lengths(lengths, batch, queries, keys)
            if padding:
                return segments, None
            full = [(one.q1 - one.q0, one.k1 - one.k0) for one in segments] == [(queries, keys)] * batch
            if not full:
                raise InputError(
                    f"attn_mask_type={self.kind!r} with cu_seqlens of shorter sequences: use a mask type with 'padding', or "
                    "leave cu_seqlens out."
                )
        if self.kind == "arbitrary":
            return whole, self._arbitrary(queries, keys)
        if not padding:
            if self.mask is not None:
                without_effect(self.kind)
            return whole, None
        masks = self.mask if isinstance(self.mask, tuple | list) else (self.mask, self.mask)
        for mask, tokens, what in zip(masks, (queries, keys), ("queries", "keys"), strict=True):
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != (batch, 1, 1, tokens):
                shown = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
                raise InputError(
                    f"attention mask type {self.kind!r} with attention_mask of {shown} for the {what}: give bool "
                    f"{[batch, 1, 1, tokens]}, True for padding, of queries and keys a pair; or cu_seqlens_q and cu_seqlens_kv."
                )
        found = [[(n, 0, length) for n, length in enumerate(lengths_of(mask))] for mask in masks]
        return joined(*found), None

    def _arbitrary(self, queries: int, keys: int) -> Tensor:
        mask = self.mask
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape[-2:] != (queries, keys):
            shown = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise InputError(
                f"attention mask type 'arbitrary' with attention_mask of {shown}: give bool [B, H, {queries}, {keys}], True "
                "where nothing is attended to."
            )
        return ~mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))

    def _by_lengths(self, lengths: dict[str, Any], batch: int, queries: int, keys: int) -> list[Segment]:
        q_ends, kv_ends = (lengths[name] for name in LENGTHS[:2])
        q_padded, kv_padded = (lengths[name] for name in LENGTHS[2:])
        if q_ends is None or (kv_ends is None and self.encoded is not None):
            raise InputError("sequences take cu_seqlens_q and cu_seqlens_kv: give both.")
        kv_ends = q_ends if kv_ends is None else kv_ends
        kv_padded = q_padded if kv_padded is None and kv_ends is q_ends else kv_padded
        if (q_padded is None) != (kv_padded is None):
            raise InputError("cu_seqlens_q_padded and cu_seqlens_kv_padded go together: give both, or none.")
        found = []
        for name, ends, padded, tokens in zip(LENGTHS, (q_ends, kv_ends), (q_padded, kv_padded), (queries, keys), strict=False):
            begins = None if padded is None else cumulative(_PLACES[name], padded)
            found.append(places(name, cumulative(name, ends), begins, tokens, packed=self.packed))
            if not self.packed and len(found[-1]) != batch:
                raise InputError(f"{name} is of {len(found[-1])} sequences: there are {batch} samples.")
        return joined(*found)

    def context(
        self, layer: Any, x: Tensor, delta: Tensor | None, rotary: Any, first: bool | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As `Attending` says: products, rotation, norms of heads and attention of a layer."""
        q_angles, k_angles = self._angles(layer, rotary, x)
        before = q_angles is not None and not layer.norm_first and layer.q_norm is None
        fused = before and q_angles is k_angles and not layer.interleaved and layer.grouped and self.encoded is None
        rotation = Rotation(layer.heads, layer.groups, *(q_angles if fused and q_angles else (None, None)))
        if layer.attention_type == "cross":
            h, q, k, v = crossed(layer, x, delta, self.encoded, first)
        elif layer.grouped:
            h, q, k, v = layer._qkv(x, delta, first, rotation)
        else:
            h, joint = layer._qkv(x, delta, first)
            sizes = [count * layer.head_dim for count in (layer.heads, layer.groups, layer.groups)]
            q, k, v = (part.unflatten(-1, (-1, layer.head_dim)) for part in joint.split(sizes, -1))
        if layer.q_norm is not None and layer.norm_first:
            q, k = layer.q_norm(q), layer.k_norm(k)
        if not fused and q_angles is not None and k_angles is not None:
            q, k = (turned(part, angles, interleaved=layer.interleaved) for part, angles in ((q, q_angles), (k, k_angles)))
        if layer.q_norm is not None and not layer.norm_first:
            q, k = layer.q_norm(q), layer.k_norm(k)
        return h, layer.core_attention(q, k, v, self)

    def _angles(self, layer: Any, rotary: Any, x: Tensor) -> tuple[Any, Any]:
        """cos and sin of queries and of keys, [B or 1, T, Dr]; None without a rotation."""
        if rotary is None:
            return None, None
        if isinstance(rotary, tuple) and rotary[0].dim() == 3:  # cos and sin
            return rotary[:2], rotary[:2]
        both = rotary if isinstance(rotary, tuple) else (rotary, rotary)
        tokens = x.shape[1], x.shape[1] if self.encoded is None else self.encoded.shape[1]
        made: list[Any] = []
        for name, angles, count in zip(LENGTHS, both, tokens, strict=False):
            check_angles(angles, layer.head_dim)
            made.append(tables(angles, self._positions(name, count)[None]))
        return (made[0], made[0]) if both[0] is both[1] and tokens[0] == tokens[1] and self._alike() else (made[0], made[1])

    def _alike(self) -> bool:
        """True if queries and keys have the same positions."""
        names = ("cu_seqlens_q", "cu_seqlens_kv"), ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        return not self.packed or all(self.given.get(q) is self.given.get(kv) for q, kv in names)

    def _positions(self, name: str, tokens: int) -> Tensor:
        if not self.packed:
            return chunks(tokens, 1, 0)
        ends = self.given.get(_PLACES[name])
        ends = self.given.get(name) if ends is None else ends
        if ends is None and name == "cu_seqlens_kv" and self.encoded is None:
            return self._positions("cu_seqlens_q", tokens)
        return positions(cumulative(name, ends), tokens)


def crossed(
    layer: Any, x: Tensor, delta: Tensor | None, encoded: Tensor | None, first: bool | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The stream, queries of x [B, T, H, D], keys and values of the encoder's output [B, Tk, G, D]."""
    if encoded is None:
        raise InputError("cross-attention takes encoder_output: give hidden states of the encoder.")
    if layer.input_layernorm:
        h, q = forward_residual(layer.layernorm_query, x, delta, first)
    else:
        h = x if delta is None else x + delta
        q = layer.query_layer(h, first)
    joint = layer.key_value(encoded, first)
    if layer.grouped:
        k, v = joint.unflatten(-1, (layer.groups, 2 * layer.head_dim)).chunk(2, -1)
    else:
        k, v = joint.unflatten(-1, (2 * layer.groups, layer.head_dim)).chunk(2, -2)
    return h, q.unflatten(-1, (layer.heads, layer.head_dim)), k, v
