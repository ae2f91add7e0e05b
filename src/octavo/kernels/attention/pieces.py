"""Attention over spans of queries and keys, joined exactly: each span by the fastest kernel that computes it.

The softmax of a query over all its keys is the mean of those over pieces of them, weighted by exp of their log-sum-exp. So keys
may be processed piece by piece, in order of arrival: `out` and `lse` are the same in any order up to float32 rounding. In
backward each piece needs only the joined `out` and `lse`.

Shapes: B batch, Tq queries, Tk keys, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels.attention import flash, library, reference, variable
from octavo.kernels.attention.accumulated import Gradient
from octavo.kernels.attention.cached import once
from octavo.kernels.attention.join import add_, join_
from octavo.kernels.attention.pattern import Packing, Span
from octavo.kernels.attention.window import tiles

SMALLEST_WINDOW = 256
"""Below it the tiles of a window are too small for kernels of causal attention."""


PACKED = (flash, variable, reference)
"""Modules that compute several sequences in one call, with boundaries on the device. The first that supports a call is used."""


class _Part(NamedTuple):
    """The work of one kernel call: a span, a window within it, or several sequences in one."""

    span: Span
    window: int | None = None
    packed: Packing | None = None


class Attended:
    """The result of queries q [B, Tq, H, D] over the keys that were added so far."""

    def __init__(self, q: Tensor, *, scale: float, window: int | None = None) -> None:
        self.q, self.scale, self.window = q, scale, window
        self._out: Tensor | None = None
        self._lse = q.new_empty(0)
        self._touched: list[Span] = []
        self._reached: dict[int, int] = {}  # sample → the end of its queries that have a result

    def add(self, k: Tensor, v: Tensor, spans: Sequence[Span]) -> None:
        """Add the spans' keys k and values v, [B, Tk, G, D]; each pair of a query and a key only once."""
        q = self.q
        for part in _parts(q, k, spans, self.window):
            span = part.span
            b, rows, keys = slice(span.b0, span.b1), slice(span.q0, span.q1), slice(span.k0, span.k1)
            out, lse = _forward(q[b, rows], k[b, keys], v[b, keys], part, self.scale)
            whole = (span.b0, span.b1, span.q0, span.q1) == (0, q.shape[0], 0, q.shape[1])
            if whole and self._out is None:
                self._out, self._lse = out, lse
            else:
                self._join(b, rows, out, lse, new=self._is_new(span))
            self._touched.append(span)
            self._reached |= {n: max(span.q1, self._reached.get(n, 0)) for n in range(span.b0, span.b1)}

    def add_key(self, logits: Tensor, v: Tensor) -> None:
        """Add one more key to each query: its logit [B, H, Tq], −∞ for no key, and its value [B, Tq, H, D]."""
        self._join(slice(None), slice(None), v, logits, new=False)

    def _is_new(self, span: Span) -> bool:
        """True if none of the span's queries has a result yet."""
        if all(self._reached.get(sample, 0) <= span.q0 for sample in range(span.b0, span.b1)):
            return True  # as always where spans come in order: no search through all of them
        return not any(_overlap(span, other) for other in self._touched)

    def _join(self, b: slice, rows: slice, out: Tensor, lse: Tensor, *, new: bool) -> None:
        q = self.q
        if self._out is None:
            wide = torch.promote_types(q.dtype, torch.float32)
            self._out = torch.zeros(q.shape, dtype=wide, device=q.device)
            self._lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=lse.dtype, device=q.device)
        elif self._out.dtype in (torch.bfloat16, torch.float16):
            self._out = self._out.float()
        if new:
            self._out[b, rows], self._lse[b, :, rows] = out, lse
        else:
            join_(self._out[b, rows], self._lse[b, :, rows], out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """out [B, Tq, H, D] in the dtype of q, 0 for a query without a key; lse float32 [B, H, Tq], −∞ for it."""
        if self._out is None:
            q = self.q
            wide = torch.promote_types(q.dtype, torch.float32)
            self._lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=wide, device=q.device)
            return torch.zeros_like(q), self._lse
        return self._out.to(self.q.dtype), self._lse


class Gradients:
    """Gradients of attention, summed over pieces in float32 (float64 for float64 inputs).

    d_out, q, out: [B, Tq, H, D]. lse: [B, H, Tq], of all pieces. `dq` is [B, Tq, H, D].
    """

    def __init__(self, d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, *, scale: float, window: int | None = None) -> None:
        self.d_out, self.q, self.out, self.lse = d_out, q, out, lse
        self.scale, self.window = scale, window
        self.dq = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)

    def add(self, k: Tensor, v: Tensor, spans: Sequence[Span], dk: Tensor, dv: Tensor) -> None:
        """Add the spans' share to `dq`, and to dk and dv, of the shape of k and v in the dtype of `dq`."""
        for part in _parts(self.q, k, spans, self.window):
            span = part.span
            b, rows, keys = slice(span.b0, span.b1), slice(span.q0, span.q1), slice(span.k0, span.k1)
            d_q, d_k, d_v = _backward(
                self.d_out[b, rows], self.q[b, rows], k[b, keys], v[b, keys], self.out[b, rows], self.lse[b, :, rows], part,
                self.scale,
            )  # fmt: skip
            for sums, terms in ((self.dq[b, rows], d_q), (dk[b, keys], d_k), (dv[b, keys], d_v)):
                add_(sums, terms)


def attention(
    q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span], *, scale: float, window: int | None = None,
    packed: Packing | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`Attended.result` for all keys: q [B, Tq, H, D], k and v [B, Tk, G, D] → out [B, Tq, H, D], lse [B, H, Tq].

    In a context of `octavo.kernels.attention.cached` the result of forward. packed: causal sequences with boundaries on the
    device, instead of the spans.
    """

    def compute() -> tuple[Tensor, Tensor]:
        if packed is not None:
            out, lse = _forward(q, k, v, _Part(_whole(q, k, causal=True), window, packed), scale)
            return out.to(q.dtype), lse
        attended = Attended(q, scale=scale, window=window)
        attended.add(k, v, spans)
        return attended.result()

    return once(compute)


def gradients(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spans: Sequence[Span], *, scale: float,
    window: int | None = None, packed: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [B, Tq, H, D], k and v [B, Tk, G, D], in their dtype, of `attention`, whose results are out and lse."""
    alone = _Part(_whole(q, k, causal=True), window, packed)
    parts = list(_parts(q, k, spans, window)) if packed is None else [alone]
    if len(parts) == 1 and parts[0].span == _whole(q, k, causal=parts[0].span.causal):
        dq, dk, dv = _backward(d_out, q, k, v, out, lse, parts[0], scale)
    else:
        summed = Gradients(d_out, q, out, lse, scale=scale, window=window)
        dq, dk, dv = summed.dq, *(torch.zeros(x.shape, dtype=summed.dq.dtype, device=x.device) for x in (k, v))
        summed.add(k, v, spans, dk, dv)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def accumulated(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spans: Sequence[Span], *, scale: float,
    window: int | None = None, packed: Packing | None = None,
) -> tuple[Gradient, Gradient, Gradient]:  # fmt: skip
    """`gradients`, [B, Tq or Tk, H or G, D], left as a kernel's float32 sums where one kernel computes all of them."""
    if packed is not None:
        return gradients(d_out, q, k, v, out, lse, spans, scale=scale, window=window, packed=packed)
    parts = list(_parts(q, k, spans, window))
    part = parts[0]
    alone = len(parts) == 1 and part.span == _whole(q, k, causal=part.span.causal) and part.packed is None
    if alone and _backend(q, k, part) is flash:
        return flash.accumulate(d_out, q, k, v, out, lse, causal=part.span.causal, scale=scale, window=part.window)
    return gradients(d_out, q, k, v, out, lse, spans, scale=scale, window=window)


def takes_more_keys(k: Tensor) -> bool:
    """True if a fast kernel computes causal attention with Tq < Tk, for the device and dtype of k [B, Tk, G, D]."""
    return flash.takes(k, k, causal=True)


def attend(
    q: Tensor, k: Tensor, v: Tensor, into: tuple[Tensor, Tensor] | None, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """out [B, Tq, H, D] and lse [B, H, Tq] of all queries over all keys [B, Tk, G, D], full or causal; in `into` if given."""
    part = _Part(_whole(q, k, causal=causal))
    backend = _backend(q, k, part)
    if backend is flash:
        return flash.forward(q, k, v, causal=causal, scale=scale, into=into)
    results: tuple[Tensor, Tensor] = backend.forward(q, k, v, causal=causal, scale=scale)
    return results if into is None else _copied(into, results)


def differentiate(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, into: tuple[Tensor, ...], *, causal: bool,
    scale: float,
) -> None:  # fmt: skip
    """Gradients of q [B, Tq, H, D], k and v [B, Tk, G, D] of `attend`, written to `into`.

    `out` and `lse` may be those of a softmax over more keys.
    """
    backend = _backend(q, k, _Part(_whole(q, k, causal=causal)))
    if backend is flash:
        flash.backward(d_out, q, k, v, out, lse, causal=causal, scale=scale, into=into)
    else:
        _copied(into, backend.backward(d_out, q, k, v, out, lse, causal=causal, scale=scale))


def _copied(into: Any, results: Any) -> Any:
    for target, result in zip(into, results, strict=True):
        target.copy_(result)
    return into


def _whole(q: Tensor, k: Tensor, *, causal: bool) -> Span:
    return Span(0, q.shape[0], 0, q.shape[1], 0, k.shape[1], causal)


def _parts(q: Tensor, k: Tensor, spans: Sequence[Span], window: int | None) -> Iterator[_Part]:
    """The calls that compute the spans; the window is None where it has no effect, or is in the spans themselves."""
    packed = flash.packing(q, k, spans, window)
    if packed is not None:
        window = None if window is None or window >= packed.longest_k else window
        yield _Part(_whole(q, k, causal=spans[0].causal), window, packed)
        return
    for span in spans:
        queries, keys = span.q1 - span.q0, span.k1 - span.k0
        if window is None or window >= keys:
            yield _Part(span)
        elif keys < queries or not _splits_window(q, window):
            yield _Part(span, window)
        else:
            yield from (_Part(tile) for tile in tiles(span, window))


def _splits_window(q: Tensor, window: int) -> bool:
    """True if triangles and rectangles by the device's kernels are faster than a kernel with the window."""
    if flash.takes(q, q, causal=True, window=window):  # of as many queries as keys, as the tiles' triangles
        return False
    return window >= SMALLEST_WINDOW and library.takes(q, q, causal=True, window=None)


def _backend(q: Tensor, k: Tensor, part: _Part) -> Any:
    """The module that computes a part: the first that supports it."""
    causal, window = part.span.causal, part.window
    backends = (flash, library, reference) if part.packed is None else PACKED
    return next(each for each in backends if each.takes(q, k, causal=causal, window=window))


def _options(part: _Part, scale: float) -> dict[str, Any]:
    packed = {} if part.packed is None else {"packed": part.packed}
    return {"causal": part.span.causal, "scale": scale, "window": part.window, **packed}


def _forward(q: Tensor, k: Tensor, v: Tensor, part: _Part, scale: float) -> tuple[Tensor, Tensor]:
    if part.span.reversed:
        q, k, v = (x.flip(1) for x in (q, k, v))
    out, lse = _backend(q, k, part).forward(q, k, v, **_options(part, scale))
    return (out.flip(1), lse.flip(2)) if part.span.reversed else (out, lse)


def _backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: _Part, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if part.span.reversed:
        d_out, q, k, v, out = (x.flip(1) for x in (d_out, q, k, v, out))
        lse = lse.flip(2)
    dq, dk, dv = _backend(q, k, part).backward(d_out, q, k, v, out, lse, **_options(part, scale))
    return (dq.flip(1), dk.flip(1), dv.flip(1)) if part.span.reversed else (dq, dk, dv)


def _overlap(one: Span, other: Span) -> bool:
    return one.b0 < other.b1 and other.b0 < one.b1 and one.q0 < other.q1 and other.q0 < one.q1
