"""Computes calls of Transformer Engine's attention that `octavo.nn` does not support: lengths, biases, kinds of softmax.

Self-attention of samples without lengths uses `octavo.nn`'s layers. Everything else becomes a list of segments, computed by
`octavo.nn.segments`; features without a fused kernel are logged once. Queries without a key, and padding, have the result 0.

Shapes: B batch, Tq queries, Tk keys, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compat.te.call import Given
from octavo.compat.te.cross import crossed
from octavo.compat.te.limits import LENGTHS
from octavo.compat.te.recompute import checkpoint
from octavo.compat.te.rotary import check_angles, tables, turned
from octavo.compat.te.sequences import shown
from octavo.errors import InputError, unknown
from octavo.kernels.attention.pattern import Span
from octavo.nn import attention as _attention
from octavo.nn.arguments import cos_and_sin
from octavo.nn.rotary import Rotation
from octavo.nn.scores import Scores, alibi_slopes
from octavo.nn.segments import LIBRARY, Sight, attend_segments

SOFTMAX = ("vanilla", "off-by-one", "learnable")


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
class Call(Given, _attention.Attending):
    """An attention call and its computation: the layers of `octavo.nn` call `core` or `context`."""

    def core(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """softmax(…) · v of q [B, Tq, H, D], k and v [B, Tk, G, D] → [B, Tq, H·D]; with return_max_logit a pair."""
        if self.given.get("checkpoint_core_attention"):
            tracker = layer.draws.tracker
            once = replace(self, given=self.given | {"checkpoint_core_attention": False}, mask=self._copied_mask())
            return checkpoint(once.core, layer, q, k, v, get_rng_state_tracker=tracker)
        sides = v.shape[-1] == q.shape[-1]
        if sides and self.is_plain(layer, q.shape[1], k.shape[1]):
            mask, base = self.native(len(k), q.shape[2], q.shape[1], k.shape[1], k.device)
            first = layer.sequence_first
            q, k, v = (x.transpose(0, 1) if first else x for x in (q, k, v))
            out = _attention.DotProductAttention.forward(layer, q, k, v, mask, attn_mask_type=base)
            return out.transpose(0, 1) if first else out
        out, top = self._segmented(layer, q, k, v)
        return out.flatten(2) if top is None else (out.flatten(2), top)

    def _segmented(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        if layer.context is not None:
            raise InputError(
                "context parallelism supports self-attention of whole samples: leave out cu_seqlens, biases, softmax types "
                "and caps, or call set_context_parallel_group(None)."
            )
        segments, mask = self.segments(q, k)
        left, right = self.window or (-1, -1)
        right = 0 if "causal" in self.kind else right
        sight = Sight(None if left < 0 else left, None if right < 0 else right, self._aligned_right())
        dropout = layer.attention_dropout if layer.training else 0.0
        scale = q.shape[-1] ** -0.5 if layer.softmax_scale is None else layer.softmax_scale
        scores = self.scores(layer, q, k.shape[1], segments)
        top = bool(getattr(layer, "return_max_logit", False))
        said = self._reasons(scores, sight, mask, dropout, v.shape[-1] != q.shape[-1], top)
        with layer.draws() if dropout else contextlib.nullcontext():
            return attend_segments(
                q, k, v, segments, sight, scale=scale, scores=scores, mask=mask, dropout=dropout, top=top,
                report=lambda way: self._say(said(way), way),
            )  # fmt: skip

    def _reasons(
        self, scores: Scores, sight: Sight, mask: Tensor | None, dropout: float, sizes: bool, top: bool
    ) -> Callable[[str], dict[str, bool]]:
        """Implementation → features that need it → True if this call has them."""
        terms = {
            f"core_attention_bias_type={self.bias!r}": scores.bias is not None or scores.slopes is not None,
            "softcap": bool(scores.cap),
            "return_max_logit": top,
        }
        others = {
            "attention_dropout": bool(dropout),
            f"attn_mask_type={self.kind!r}": mask is not None,
            f"window_size={self.window}": self.window is not None,
            "kv_channels of two sizes": sizes,
        }
        with_offset = {f"{what} with a softmax offset": there for what, there in others.items()}
        return lambda way: others if way == LIBRARY else terms if any(terms.values()) else with_offset

    def scores(self, layer: Any, q: Tensor, keys: int, segments: list[Span]) -> Scores:
        """Bias, ALiBi slopes, cap and sink of the softmax, on the device of q [B, Tq, H, D]. keys: Tk."""
        sink = getattr(layer, "softmax_offset", None)
        bias, slopes, heads = self.given.get("core_attention_bias"), None, q.shape[2]
        samples = len(segments) if self.packed else len(q)
        if self.bias == "alibi":
            slopes = self.given.get("alibi_slopes", None)
            slopes = alibi_slopes(heads, q.device) if slopes is None else slopes
            if not isinstance(slopes, Tensor) or tuple(slopes.shape) not in ((heads,), (samples, heads)):
                raise InputError(f"alibi_slopes is {shown(slopes)}: give a tensor [{heads}] or [{samples}, {heads}].")
            slopes = slopes.to(q.device)
        if bias is not None:
            longest = max((s.q1 - s.q0 for s in segments), default=0), max((s.k1 - s.k0 for s in segments), default=0)
            shape = tuple(bias.shape) if isinstance(bias, Tensor) else ()
            if not self.packed:
                longest = q.shape[1], keys
            fits = len(shape) == 4 and shape[0] in (1, samples) and shape[1] in (1, heads)
            if fits and self.packed:  # of max_seqlen_…
                fits = (shape[2] == 1 or shape[2] >= longest[0]) and shape[3] >= longest[1]
            elif fits:
                fits = shape[2] in (1, longest[0]) and shape[3] == longest[1]
            if not fits:
                raise InputError(
                    f"core_attention_bias is {shown(bias)}: give a tensor [{samples} or 1, {heads} or 1, {longest[0]} or 1, "
                    f"{longest[1]}]."
                )
        if self.packed and ((bias is not None and len(bias) > 1) or (slopes is not None and slopes.dim() == 2)):
            raise InputError('packed sequences ("thd") need one core_attention_bias or alibi_slopes for all of them.')
        return Scores(bias, self.bias == "pre_scale_bias", slopes, self.cap, None if sink is None else sink.to(q.device))

    def context(
        self, layer: Any, x: Tensor, delta: Tensor | None, rotary: Any, first: bool | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Products, rotation, q/k norms and attention of a layer, as `Attending.context`.

        x and delta [B, Tq, hidden] → the residual stream [B, Tq, hidden], and attention's result [B, Tq, H·D].
        """
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
        if isinstance(rotary, tuple) and len(rotary) > 1 and isinstance(rotary[0], Tensor) and rotary[0].dim() == 3:
            if self.encoded is not None and self.encoded.shape[1] != x.shape[1]:
                raise InputError(
                    f"rotary_pos_emb of (cos, sin) with {x.shape[1]} queries and {self.encoded.shape[1]} keys: give a pair of "
                    "angles, as RotaryPositionEmbedding computes them."
                )
            angles = cos_and_sin(rotary, x.shape[:2], layer.head_dim)[:2]
            return angles, angles
        both = rotary if isinstance(rotary, tuple) and len(rotary) == 2 else (rotary, rotary)
        tokens = x.shape[1], x.shape[1] if self.encoded is None else self.encoded.shape[1]
        rotations: list[Any] = []
        for name, angles, count in zip(LENGTHS, both, tokens, strict=False):
            check_angles(angles, layer.head_dim)
            rotations.append(tables(angles, self._positions(name, count)[None]))
        same = both[0] is both[1] and tokens[0] == tokens[1] and self._alike()
        return rotations[0], rotations[0 if same else 1]
