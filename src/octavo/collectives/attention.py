"""Attention of sequences that are split over ranks: three exchanges, each with the same result.

all_gather  keys and values of all ranks are gathered while a chunk attends to itself, read as one slice in the order of the
            sequence, freed, and regathered in backward (`octavo.collectives.causal`). Under a window or within documents only
            chunks to which some query attends are sent, while both chunks attend to themselves; in backward gradients are
            summed over the ranks while the pairs within the last chunk are computed.
p2p         Ring Attention: keys and values pass through every rank; the next ones are sent during the attention to the
            current ones, and gradients follow the keys. Needs memory for two ranks' keys and values, for any n.
a2a         Ulysses: exchanges tokens for heads, so that each rank gets whole sequences of H / n heads. Needs n to divide the
            heads.

Gradients are summed in float32. Shapes: B batch, T tokens, n ranks, L = T / n tokens of this rank, C = L / 2 of a chunk,
H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.collectives import causal
from octavo.collectives.context import ContextGroup, in_order, splits_heads
from octavo.collectives.schedule import Earlier, Split, diagonal, earlier, ring
from octavo.collectives.work import Pending, start_collective, start_gather
from octavo.errors import InputError, unknown
from octavo.kernels.attention.cached import saved_once
from octavo.kernels.attention.pattern import Pattern
from octavo.kernels.attention.pieces import Attended, Gradients, attention, gradients
from octavo.kernels.autograd import refuse_second_derivative

T = TypeVar("T")
Received = list[tuple[list[int], list[Tensor]]]
"""Of each rank that sent any: the numbers of its chunks, and the chunks."""


class _Call(NamedTuple):
    """One attention call: ranks with their exchange, pattern and split of whole sequences, and scale."""

    context: ContextGroup
    pattern: Pattern
    split: Split
    scale: float


_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, context: ContextGroup, pattern: Pattern, scale: float | None = None
) -> Tensor:
    """softmax(q · kᵀ · scale) · v of this rank's tokens over whole sequences, differentiable once. Collective.

    Args:
        q: [B, L, H, D], this rank's tokens by `ContextGroup.split`, rotated by their positions in the sequence.
        k, v: [B, L, G, D].
        context: the ranks and their exchange.
        pattern: of whole sequences, the same on every rank; causal.
        scale: of the logits; None for D^-½.

    Returns:
        [B, L, H, D], this rank's tokens.

    Raises:
        InputError: the exchange cannot compute the pattern, or split these heads.
    """
    check_shapes(q, k, v)
    context = context.resolved(q.shape[2], k.shape[2])
    if context.strategy not in _FUNCTIONS:
        raise unknown("cp_comm_type", context.strategy, (*_FUNCTIONS, "auto"))
    split = context.split_of(q.shape[1] * context.size)
    if pattern.tokens != split.tokens:
        raise InputError(
            f"the attention pattern is of {pattern.tokens} tokens, and {context.size} ranks with {q.shape[1]} each hold "
            f"{split.tokens}: create it for the whole sequence."
        )
    _check(pattern, context, q.shape[2], k.shape[2])
    call = _Call(context, pattern, split, q.shape[-1] ** -0.5 if scale is None else scale)
    out: Tensor = _FUNCTIONS[context.strategy].apply(q, k, v, call)
    return out


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise an InputError unless q is [B, L, H, D], and k and v [B, L, G, D] in its dtype, where G divides H."""
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[:2] + q.shape[3:] == k.shape[:2] + k.shape[3:]
    if not fits or not k.shape[2] or q.shape[2] % k.shape[2]:
        raise InputError(
            f"{_shapes(q, k, v)}: give q [samples, tokens of this rank, heads, head dimension], and k and v with the same "
            "shape, except that their number of heads may be a divisor of q's."
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise InputError(f"{_shapes(q, k, v)}: give all three in one dtype, bfloat16, float16, float32 or float64.")


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in zip("qkv", tensors, strict=True))


def _check(pattern: Pattern, context: ContextGroup, heads: int, groups: int) -> None:
    if not pattern.causal:
        raise InputError("context parallelism computes causal attention: set context_parallel_degree = 1 for any other.")
    if pattern.real_tokens is not None:
        raise InputError(
            "attention_mask has padding between real tokens, which context parallelism does not compute: pad sequences at an "
            "end, or set context_parallel_degree = 1."
        )
    if pattern.window is not None and context.strategy == "p2p":
        raise InputError(
            f'cp_comm_type = "p2p" does not compute a sliding window (of {pattern.window} keys): use "all_gather", where only '
            'chunks inside the window are sent, or "a2a".'
        )
    if context.strategy == "a2a":
        check_heads(heads, groups, context.size)


def check_heads(heads: int, groups: int, ranks: int) -> None:
    """Raise an InputError unless "a2a" can give each of `ranks` ranks equally many query heads with their key-value heads."""
    if not splits_heads(heads, groups, ranks):
        fits = [n for n in range(1, ranks) if not ranks % n and splits_heads(heads, groups, n)]  # of as many ranks
        raise InputError(
            f'cp_comm_type = "a2a" needs equally many heads on each of {ranks} context-parallel ranks: {heads} query heads '
            f"with {groups} key-value heads do not divide. Use a context_parallel_degree of {', '.join(map(str, fits))}, or "
            'cp_comm_type = "all_gather".'
        )


class _AllGather(torch.autograd.Function):
    """`context_attention` by "all_gather": q [B, L, H, D], k and v [B, L, G, D] → [B, L, H, D]. Saves no other rank's keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        context, pattern, split, scale = call

        def compute() -> tuple[Tensor, Tensor]:
            if _is_plain(pattern):
                return causal.forward(q, k, v, context, split, scale)
            fetching = _Chunks(context, pattern, q.shape[0], split).fetch(torch.stack((k, v)))
            attended = Attended(q, scale=scale, window=pattern.window)
            attended.add(k, v, diagonal(pattern, q.shape[0], split))
            chunks = fetching.wait()
            for plan in earlier(pattern, q.shape[0], split):
                if plan is not None:
                    keys, values = torch.cat(chunks[plan.low : plan.high], 2)
                    attended.add(keys, values, plan.spans)
            return attended.result()

        ctx.call, ctx.started = call, None
        return saved_once(ctx, compute, q, k, v)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("these attention kernels")
        # A checkpoint gives saved tensors once.
        (q, k, v, out, lse), gathering = ctx.started or (ctx.saved_tensors, [])
        ctx.started = None
        context, pattern, split, scale = ctx.call
        if _is_plain(pattern):
            return *causal.backward(d_out, q, k, v, out, lse, context, split, scale, gathering), None
        batch, chunk = q.shape[0], split.chunk
        exchange = _Chunks(context, pattern, batch, split)
        fetching = exchange.fetch(torch.stack((k, v)))
        grads = Gradients(d_out, q, out, lse, scale=scale, window=pattern.window)
        local = grads.dq.new_zeros(2, *k.shape)
        spans = diagonal(pattern, batch, split)
        # The first chunk's pairs with itself hide the gather, the second's the sum over the ranks.
        grads.add(k, v, [span for span in spans if span.q0 < chunk], *local)
        chunks = fetching.wait()
        parts = {
            number: grads.dq.new_zeros(2, batch, chunk, *k.shape[2:])
            for plan in earlier(pattern, batch, split)
            if plan is not None
            for number in range(plan.low, plan.high)
        }
        for plan in earlier(pattern, batch, split):
            if plan is not None:
                _add_earlier(grads, chunks, parts, plan)
        summing = exchange.reduce(parts, local)
        grads.add(k, v, [span for span in spans if span.q0 >= chunk], *local)
        dk, dv = local.add_(summing.wait())
        return grads.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def gather_ahead(result: Tensor, attended: Tensor) -> None:
    """Start the gather for the backward of `attended` as soon as `result`, computed from it, gets a gradient.

    attended: [B, L, H, D] of `context_attention`, or a view of it. No effect with another exchange or without gradients.
    """
    node: Any = attended.grad_fn
    for _ in range(5):  # through views and copies
        if node is not None and not hasattr(node, "started") and len(node.next_functions) == 1:
            node = node.next_functions[0][0]
    if not hasattr(node, "started") or not result.requires_grad or torch.compiler.is_compiling():
        return
    call: _Call = node.call
    if _is_plain(call.pattern):
        result.register_hook(lambda grad: _begin(node, call.context))


def _begin(node: Any, context: ContextGroup) -> None:
    if node.started is None:  # otherwise started by a backward that ended before this node
        tensors = tuple(map(Tensor.detach, node.saved_tensors))  # their autograd history would reference the node
        node.started = tensors, [start_gather(causal.joint(*tensors[1:3]), context.group)]


def backward_bytes(keys: int, element: int, *, plain: bool) -> int:
    """Bytes of temporaries of a backward over gathered keys: keys and values as received and in order, and their gradients.

    Gradients of gathered keys are in their dtype, or in a kernel's float32. The others are float32: one chunk's share, all
    chunks' shares, and the sums over the ranks.

    keys: elements of the keys of all ranks; element: bytes of each. plain: result of `_is_plain`.
    """
    float32 = torch.float32.itemsize
    return 2 * keys * (3 * element + float32 if plain else 2 * element + 3 * float32)


def _is_plain(pattern: Pattern) -> bool:
    return pattern.window is None and not pattern.documents


def _add_earlier(grads: Gradients, chunks: list[Tensor], parts: dict[int, Tensor], plan: Earlier) -> None:
    keys, values = torch.cat(chunks[plan.low : plan.high], 2)
    dk, dv = (torch.zeros(keys.shape, dtype=grads.dq.dtype, device=keys.device) for _ in range(2))
    grads.add(keys, values, plan.spans, dk, dv)
    for number, part in zip(range(plan.low, plan.high), torch.stack((dk, dv)).chunk(plan.high - plan.low, 2), strict=True):
        parts[number] += part


class _Chunks:
    """The exchange of chunks of keys and values, and of their gradients back: a rank receives only chunks that it reads."""

    def __init__(self, context: ContextGroup, pattern: Pattern, batch: int, split: Split) -> None:
        self.context, self.split = context, split
        # reads[r]: the chunks of other ranks that rank r reads.
        reads = []
        for rank in range(split.size):
            plans = earlier(pattern, batch, split._replace(rank=rank))
            numbers = {number for plan in plans if plan is not None for number in range(plan.low, plan.high)}
            reads.append(sorted(numbers - set(split.chunks(rank))))
        self.sent = [[number for number in read if number in split.chunks()] for read in reads]
        self.received = [[number for number in reads[split.rank] if number in split.chunks(rank)] for rank in range(split.size)]
        self.idle = not any(reads)

    def fetch(self, kv: Tensor) -> Pending[list[Tensor]]:
        """kv [2, B, L, G, D] → the chunks that this rank reads, by number, [2, B, C, G, D] each; others are empty."""
        size = self.split.size
        local = dict(zip(self.split.chunks(), kv.chunk(2, 2), strict=True))

        def chunks(received: Received) -> list[Tensor]:
            chunk_of = local | {n: part for numbers, parts in received for n, part in zip(numbers, parts, strict=True)}
            empty = kv.new_empty(2, kv.shape[1], 0, *kv.shape[3:])
            return [chunk_of.get(number, empty) for number in range(2 * size)]

        sent = [[local[number] for number in numbers] for numbers in self.sent]
        return self._exchange(sent, self.received, local, chunks)

    def reduce(self, parts: dict[int, Tensor], local: Tensor) -> Pending[Tensor]:
        """This rank's shares of the gradients of chunks → the sum of all ranks' shares of its two chunks, [2, B, L, G, D]."""
        numbers = self.split.chunks()
        shape = (2, local.shape[1], self.split.chunk, *local.shape[3:])
        mine = {number: parts.get(number, local.new_zeros(shape)) for number in numbers}

        def summed(received: Received) -> Tensor:
            for chunks, tensors in received:
                for number, tensor in zip(chunks, tensors, strict=True):
                    mine[number] = mine[number] + tensor
            return torch.cat([mine[number] for number in numbers], 2)

        return self._exchange([[parts[n] for n in chunks] for chunks in self.received], self.sent, mine, summed)

    def _exchange(
        self, sent: list[list[Tensor]], received: list[list[int]], like: dict[int, Tensor], finish: Callable[[Received], T]
    ) -> Pending[T]:
        """Send each rank its tensors, and receive chunks of these numbers from each. finish: computes the result."""
        some = next(iter(like.values()))
        if self.idle:
            return Pending([], lambda: finish([]))
        flat = [torch.stack(tensors).flatten() if tensors else some.new_empty(0) for tensors in sent]
        sizes = [len(numbers) * some.numel() for numbers in received]
        out = some.new_empty(sum(sizes))

        def result() -> T:
            pieces = zip(received, out.split(sizes), strict=True)
            return finish([(numbers, list(part.view(len(numbers), *some.shape))) for numbers, part in pieces if numbers])

        exchanged = out, torch.cat(flat), sizes, [part.numel() for part in flat]
        return start_collective(dist.all_to_all_single, [exchanged], self.context.group, result)


class _Ring(torch.autograd.Function):
    """`context_attention` by "p2p": q [B, L, H, D], k and v [B, L, G, D] → [B, L, H, D]. Saves no other rank's keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        context, pattern, split, scale = call

        def compute() -> tuple[Tensor, Tensor]:
            attended = Attended(q, scale=scale)
            kv = torch.stack((k, v))
            for step in range(context.size):
                passing = _pass_on(context, kv) if step + 1 < context.size else None
                keys, values = kv
                attended.add(keys, values, ring(pattern, q.shape[0], split, (context.rank - step) % context.size))
                if passing is not None:
                    kv = passing.wait()
            return attended.result()

        ctx.call = call
        return saved_once(ctx, compute, q, k, v)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("these attention kernels")
        q, k, v, out, lse = ctx.saved_tensors
        context, pattern, split, scale = ctx.call
        grads = Gradients(d_out, q, out, lse, scale=scale)
        kv, following = torch.stack((k, v)), None
        for step in range(context.size):
            passing = _pass_on(context, kv) if step + 1 < context.size else None
            share = torch.zeros(kv.shape, dtype=grads.dq.dtype, device=kv.device)
            keys, values = kv
            dk, dv = share
            grads.add(keys, values, ring(pattern, q.shape[0], split, (context.rank - step) % context.size), dk, dv)
            if following is not None:  # the shares of the ranks that had these keys before
                share += following.wait()
            following = _pass_on(context, share)
            if passing is not None:
                kv = passing.wait()
        assert following is not None
        dk, dv = following.wait()  # back at the rank that holds their keys
        return grads.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _pass_on(context: ContextGroup, x: Tensor) -> Pending[Tensor]:
    """Send `x` to the next rank of the ring and get the one before's."""
    if context.size == 1:  # gloo connects no rank with itself
        return Pending([], lambda: x)
    out = torch.empty_like(x)
    following, before = ((context.rank + step) % context.size for step in (1, -1))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=context.group, group_peer=following),
            dist.P2POp(dist.irecv, out, group=context.group, group_peer=before),
        ]
    )
    return Pending(works, lambda: out, [x])


class _HeadsForTokens(torch.autograd.Function):
    """`context_attention` by "a2a": q [B, L, H, D], k and v [B, L, G, D] → [B, L, H, D]. Saves H / n heads of all tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        context, pattern, _, scale = call
        heads, groups = q.shape[2] // context.size, max(1, k.shape[2] // context.size)
        mine = _to_heads(context, q, k, v)
        whole_q, whole_k, whole_v = mine.split([heads, groups, groups], 2)
        spans = pattern.spans(q.shape[0])
        out, lse = attention(whole_q, whole_k, whole_v, spans, scale=scale, window=pattern.window)
        ctx.save_for_backward(whole_q, whole_k, whole_v, out, lse)
        ctx.call, ctx.groups = call, k.shape[2]
        return _of_rank(_to_tokens(context, out))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("these attention kernels")
        q, k, v, out, lse = ctx.saved_tensors
        (context, pattern, _, scale), groups = ctx.call, ctx.groups
        spans = pattern.spans(q.shape[0])
        grads = gradients(_to_heads(context, d_out), q, k, v, out, lse, spans, scale=scale, window=pattern.window)
        copies = max(1, context.size // groups)  # ranks with the same key-value head
        mine = torch.cat(grads, 2)
        dq, dk, dv = map(_of_rank, _to_tokens(context, mine).split([q.shape[2], k.shape[2], k.shape[2]], 4))
        if copies > 1:
            wide = torch.promote_types(q.dtype, torch.float32)
            dk, dv = (x.unflatten(2, (groups, copies)).sum(3, dtype=wide).to(x.dtype) for x in (dk, dv))
        return dq, dk, dv, None


_FUNCTIONS = {"all_gather": _AllGather, "p2p": _Ring, "a2a": _HeadsForTokens}


def _to_heads(context: ContextGroup, *parts: Tensor) -> Tensor:
    """[B, L, heads, D] each → [B, T, h, D], this rank's heads of each, of whole sequences.

    One pass over the memory before the exchange, and one after it. Heads fewer than ranks are repeated.
    """
    sent = torch.cat([_by_rank(part, context.size) for part in parts], 3).contiguous()
    out = torch.empty_like(sent)
    dist.all_to_all_single(out, sent, group=context.group)
    return in_order(list(out), 1)


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """A view of [B, L, heads, D] as [n, B, L, heads per rank, D]."""
    if x.shape[2] < ranks:
        x = x[:, :, :, None].expand(-1, -1, -1, ranks // x.shape[2], -1).flatten(2, 3)
    return x.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4)


def _to_tokens(context: ContextGroup, x: Tensor) -> Tensor:
    """The inverse of `_to_heads`: [B, T, h, D] → a view of [B, 2, C, n, h, D], this rank's two chunks of all heads.

    One pass over the memory before the exchange; the caller's copy of the view is the one after it.
    """
    split = context.split_of(x.shape[1])
    chunks = x.unflatten(1, (2 * split.size, split.chunk)).unbind(1)
    sent = torch.stack([chunks[number] for rank in range(split.size) for number in split.chunks(rank)])
    out = torch.empty_like(sent)
    dist.all_to_all_single(out, sent, group=context.group)
    return out.unflatten(0, (split.size, 2)).permute(2, 1, 3, 0, 4, 5)


def _of_rank(x: Tensor) -> Tensor:
    """[B, 2, C, n, h, D] → [B, L, heads, D]."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[3] * x.shape[4], x.shape[5])
