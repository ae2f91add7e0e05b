"""Tensor parallelism: ranks hold parts of the same matrices, and between products each holds its part of the tokens.

Splitting tokens between products is Megatron's sequence parallelism. Tokens are split by rows: of the flattened tokens [B · T]
rank r has the r-th of n equal runs, viewed as [B, T / n]. The concatenation of all ranks' rows is then [B, T] without a copy,
for any B.

The gradient of a gathered tensor depends on its consumer. If all ranks compute the same from it, each has the whole gradient,
and `whole` and `words` return this rank's part of it. If each multiplies it by its part of a matrix, gradients are partial
sums, which `gathered` adds up.

Random numbers come from the default generators, whose states the ranks of a group share: dropout of hidden states is this
rank's part of the mask of all tokens, which one rank would draw (`dropped`). Inside a part, as in the attention of this rank's
heads, each rank draws from a separate stream that begins at the common state (`forked_rng`). So saving and restoring the
default generators, as recomputation and checkpoints do, repeats both. A router's noise is this rank's part of all tokens'
(`uniform`).

Sums of float16 are in float32, and rounded once (`sum_dtype`): a rank's summand may be beyond float16 where the sum is not. One
rank does not round a product's partial sums either.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from octavo.collectives.copies import LEAST_BYTES, Exchange, PeerMemory, by_copies, choices, reach
from octavo.collectives.work import Pending, Ranks, reduce_scatter, start_collective, start_gather
from octavo.kernels.attention.join import add_up


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of summands over ranks whose sum is rounded to `dtype`: float32 for float16."""
    return torch.float32 if dtype == torch.float16 else dtype


class TensorGroup(Ranks):
    """The ranks of a tensor group and their collectives, on rows [m, …] of a rank and [n · m, …] of all.

    Args:
        group: the ranks; None without communication, as in a plan.
        sharing: the ranks that hold the same rows of keys and values, if there are fewer key-value heads than ranks.
        size, rank: used without a group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        sharing: dist.ProcessGroup | None = None,
        *,
        size: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(group)
        self.sharing = sharing
        self.size = dist.get_world_size(group) if size is None else size
        self.rank = dist.get_rank(group) if rank is None else rank
        self._peers: PeerMemory | str | None = None
        """Memory for exchanges by copies, or the reason why there is none; None before the first exchange on a GPU."""
        self._together: dict[int, Tensor] = {}
        """Views that replace parameters within a forward, by id, so that one collective sums their gradients."""

    def start_gather(self, rows: Tensor) -> Gathering:
        """Begin to gather rows [m, C] of any dtype, FP8 too, from all ranks."""
        rows = rows.contiguous()
        memory = self._memory("gather", rows.shape, rows.dtype, rows.device)
        return self._gathering(rows) if memory is None else self._copying(memory, rows)

    def _gathering(self, rows: Tensor) -> Gathering:
        one_byte = rows.dtype.itemsize == 1  # backends do not know FP8
        return Gathering(self, rows, start_gather(rows.view(torch.uint8) if one_byte else rows, self.group))

    def _copying(self, memory: PeerMemory, rows: Tensor) -> Gathering:
        exchange = memory.begin(tuple(rows.shape), rows.dtype)
        exchange.send(dict.fromkeys(memory.others, rows))
        return Gathering(self, rows, exchange)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, [n · m, C]."""
        return self.start_gather(rows).wait()

    def start_scatter(self, parts: Tensor) -> Pending[Tensor]:
        """Start a reduce-scatter of parts [n · m, C] to this rank's rows [m, C], in their dtype."""
        parts = parts.contiguous()
        local = parts.chunk(self.size)[self.rank]
        memory = self._memory("sum", local.shape, local.dtype, local.device)
        return self._reducing(parts) if memory is None else self._adding(memory, parts)

    def _reducing(self, parts: Tensor) -> Pending[Tensor]:
        out = parts.new_empty(parts.shape[0] // self.size, *parts.shape[1:])
        return start_collective(reduce_scatter, [(out.view(-1), parts.view(-1))], self.group, lambda: out)

    def _adding(self, memory: PeerMemory, parts: Tensor) -> Pending[Tensor]:
        of_ranks = parts.chunk(self.size)
        exchange = memory.begin(tuple(of_ranks[0].shape), parts.dtype)
        exchange.send({other: of_ranks[other] for other in memory.others})
        return Pending([], lambda: _added(exchange, of_ranks[self.rank]), [parts])

    def scatter(self, parts: Tensor) -> Tensor:
        """This rank's rows [m, C] of the sum of all ranks' parts [n · m, C]."""
        return self.start_scatter(parts).wait()

    def summed(
        self, product: Callable[[slice], Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, parts: bool
    ) -> Tensor:
        """`scatter` of parts that are computed here; shape: [m, C] of the sum.

        product: computes some of the rows [n · m, C]. parts: True if one rank's rows justify a separate product, so that rows
        for other ranks are sent while this rank's are computed.
        """
        rows = [slice(rank * shape[0], (rank + 1) * shape[0]) for rank in range(self.size)]
        memory = self._memory("sum", shape, dtype, device) if parts else None
        if memory is None:
            in_parts = parts and device.type == "cpu"
            return self.scatter(torch.cat([*map(product, rows)]) if in_parts else product(slice(0, rows[-1].stop)))
        exchange = memory.begin(tuple(shape), dtype)
        for other in memory.others:
            exchange.send({other: product(rows[other])})
        return _added(exchange, product(rows[self.rank]))

    def _memory(self, kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> PeerMemory | None:
        """The memory for copies if these are faster than NCCL for blocks of this shape; the same on all ranks. Collective."""
        block = math.prod(shape) * dtype.itemsize
        if device.type != "cuda" or block < LEAST_BYTES or torch.cuda.is_current_stream_capturing():
            return None
        if self._peers is None:
            self._peers = reach(self.group, device, block)
        memory = self._peers
        if isinstance(memory, str):
            return None

        def calls() -> tuple[Callable[[], object], ...]:
            if kind == "gather":
                rows = torch.zeros(shape, dtype=dtype, device=device)
                return lambda: self._gathering(rows).wait(), lambda: self._copying(memory, rows).wait()
            parts = torch.zeros(shape[0] * self.size, *shape[1:], dtype=dtype, device=device)
            return lambda: self._reducing(parts).wait(), lambda: self._adding(memory, parts).wait()

        return memory if by_copies(kind, block, memory, calls) else None

    @property
    def exchanges(self) -> str:
        """The exchanges of rows, in words; empty before the first exchange on a GPU."""
        if self._peers is None or isinstance(self._peers, str):
            return f"by NCCL: {self._peers}" if self._peers else ""
        return "; ".join(f"{exchange}: {method}" for exchange, method in choices(self.size).items())

    def sum_(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in place."""
        dist.all_reduce(part, group=self.group)
        return part

    def sum_each(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The sum of all ranks' parts of each tensor, by one all-reduce in float32 (float64 if any part is); new tensors."""
        dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        flat = torch.empty(sum(part.numel() for part in parts), dtype=dtype, device=parts[0].device)
        places = [place.view(part.shape) for place, part in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]
        torch._foreach_copy_(places, list(parts))
        self.sum_(flat)
        summed = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]
        torch._foreach_copy_(summed, places)
        return summed

    def sum_shared_(self, rows: Tensor) -> Tensor:
        """The sum over the ranks that share these rows, in place."""
        assert self.sharing is not None
        wide = rows.to(sum_dtype(rows.dtype))
        dist.all_reduce(wide, group=self.sharing)
        return rows if wide is rows else rows.copy_(wide)

    def largest_(self, amaxes: Tensor) -> Tensor:
        """The largest of all ranks' amaxes, in place."""
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=self.group)
        return amaxes

    # Differentiable, on hidden states.

    def local(self, x: Tensor) -> Tensor:
        """This rank's rows of x [B, T, …], the same on all ranks: [B, T / n, …]."""
        return self._local_rows(_flat(x)).unflatten(0, (x.shape[0], -1))

    def _local_rows(self, rows: Tensor) -> Tensor:
        return rows.chunk(self.size)[self.rank]

    def gathered(self, x: Tensor) -> Tensor:
        """x [B, T / n, C] of all ranks, [B, T, C], for products with parts of a matrix: the gradients are summed.

        With a gradient the result is of `sum_dtype`, so that autograd does not round this rank's summand.
        """
        dtype = sum_dtype(x.dtype) if torch.is_grad_enabled() and x.requires_grad else x.dtype
        out: Tensor = _Exchanged.apply(x, self.gather, self.scatter, dtype)
        return out

    def scattered(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's rows [B, T / n, C] of the sum of all ranks' x [B, T, C], in `dtype`, or that of x."""
        out: Tensor = _Exchanged.apply(x, self.scatter, self.gather, dtype)
        return out

    def whole(self, x: Tensor) -> Tensor:
        """x [B, T / n, C] of all ranks, [B, T, C], if all ranks compute the same from it."""
        out: Tensor = _Exchanged.apply(x, self.gather, self._local_rows, None)
        return out

    def words(self, x: Tensor, number: int) -> Tensor:
        """The first `number` columns of x [B, T, C] of all ranks side by side, if all ranks compute the same from it."""
        out: Tensor = _Words.apply(x, self, number)
        return out

    def uniform(self, x: Tensor, low: float, high: float) -> Tensor:
        """Uniform numbers like this rank's rows x [m, C]: its rows of those that one rank draws for [n · m, C]."""
        return self._local_rows(x.new_empty(self.size * x.shape[0], *x.shape[1:]).uniform_(low, high)).clone()

    def dropped(self, x: Tensor, rate: float) -> Tensor:
        """Dropout of this rank's x [B, T / n, C] in training, by its rows of the mask that one rank draws for [B, T, C]."""
        return self._dropped(x, rate, (*widened(x.shape[:2], self.size), *x.shape[2:]), self.local)

    def dropped_columns(self, x: Tensor, rate: float) -> Tensor:
        """Dropout of this rank's equal part x [B, T, C / n] of columns, by its columns of the mask that one rank draws."""
        shape = *x.shape[:-1], x.shape[-1] * self.size
        return self._dropped(x, rate, shape, lambda mask: mask.chunk(self.size, -1)[self.rank])

    def _dropped(self, x: Tensor, rate: float, shape: Sequence[int], local: Callable[[Tensor], Tensor]) -> Tensor:
        """Dropout of x by this rank's part of a mask of this shape."""
        if not rate or x.numel() == 0:
            return x
        with torch.no_grad():
            if x.is_cuda:  # as PyTorch's kernel on one rank: it saves a mask, and multiplies in float32
                mask, scale = torch.native_dropout(x.new_empty(shape), rate, True)[1], 1 / (1 - rate)
            else:
                mask, scale = functional.dropout(x.new_ones(shape), rate), None
            mask = local(mask).clone()
        out: Tensor = _Dropped.apply(x, mask, scale)
        return out

    @contextlib.contextmanager
    def forked_rng(self, device: torch.device) -> Iterator[None]:
        """A context whose random numbers of a device differ from rank to rank; after it the ranks' states are equal."""
        if device.type == "cuda":  # counter-based, on the host: another seed is another stream, without synchronisation
            generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
            seed, offset = generator.initial_seed(), generator.get_offset()
            generator.manual_seed(_seed_of_rank(seed, self.rank)).set_offset(offset)
            try:
                yield
            finally:
                offset = generator.get_offset()
                generator.manual_seed(seed).set_offset(offset)
            return
        seed = int(torch.randint(1 << 62, (), device="cpu").item())
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(_seed_of_rank(seed, self.rank))
        try:
            yield
        finally:
            torch.default_generator.set_state(state)

    def replicated(self, parameter: Tensor | None) -> Tensor | None:
        """A parameter that every rank holds and reads for its tokens or heads: its gradient is the sum of all ranks'."""
        if parameter is None or not torch.is_grad_enabled():
            return parameter
        together = self._together.get(id(parameter))
        return _Replicated.apply(self, parameter)[0] if together is None else together

    def begin_together(self, parameters: Sequence[Tensor]) -> None:
        """Sum the gradients of these parameters in one collective, after the last one, in `replicated` until `end_together`."""
        if parameters:
            self._together |= {id(p): view for p, view in zip(parameters, _Replicated.apply(self, *parameters), strict=True)}

    def end_together(self, parameters: Sequence[Tensor]) -> None:
        """End the forward that began with `begin_together` of these parameters."""
        for parameter in parameters:
            self._together.pop(id(parameter), None)

    def shared(self, parameter: Tensor, rows: int) -> Tensor:
        """A parameter whose last rows the ranks of `sharing` hold too: they sum the gradient of those rows."""
        out: Tensor = _Shared.apply(parameter, self, rows) if rows else parameter
        return out


class Gathering:
    """Rows [m, C] of all ranks, being gathered; call `wait` or `parts` once for the result."""

    def __init__(self, tensor: TensorGroup, rows: Tensor, pending: Pending[Tensor] | Exchange) -> None:
        self._tensor, self._rows, self._pending = tensor, rows, pending

    def wait(self) -> Tensor:
        """All rows, [n · m, C]."""
        if isinstance(self._pending, Pending):
            return self._pending.wait().flatten(0, 1).view(self._rows.dtype)
        rows = self._rows.new_empty(self._tensor.size * self._rows.shape[0], *self._rows.shape[1:])
        with self.parts() as parts:
            for place, part in zip(rows.chunk(self._tensor.size), parts, strict=True):
                place.copy_(part)
        return rows

    @contextlib.contextmanager
    def parts(self) -> Iterator[list[Tensor]]:
        """Context with the rows of each rank, to be read inside."""
        if isinstance(self._pending, Pending):
            yield list(self.wait().chunk(self._tensor.size))
            return
        with self._pending.blocks() as blocks:
            yield [blocks.get(rank, self._rows) for rank in range(self._tensor.size)]


def _added(exchange: Exchange, local: Tensor) -> Tensor:
    """The sum of all ranks' blocks, rounded once."""
    out = torch.empty_like(local)
    with exchange.blocks() as blocks:
        terms = [blocks.get(rank, local) for rank in range(len(blocks) + 1)]  # in the same order on all ranks
        add_up(out.view(1, 1, -1), [term.view(1, 1, -1) for term in terms])
    return out


_GOLDEN = 0x9E3779B97F4A7C15
"""2⁶⁴ over the golden ratio: its multiples are far from each other, and from seeds that differ by a rank's index."""


def _seed_of_rank(seed: int, rank: int) -> int:
    return (seed + rank * _GOLDEN) % (1 << 64)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def _as(rows: Tensor, samples: int) -> Tensor:
    """Rows [B · T, C] as [B, T, C], and not as a view, into which autograd allows no writes."""
    return torch.ops.aten._unsafe_view.default(rows, (samples, rows.shape[0] // samples, *rows.shape[1:]))


def widened(leading: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The leading dimensions [B, T / n] of a rank's rows as those of all ranks' rows, [B, T]."""
    return *leading[:-1], leading[-1] * ranks


def narrowed(leading: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The inverse of `widened`."""
    return *leading[:-1], leading[-1] // ranks


class _Exchanged(torch.autograd.Function):
    """Applies one collective to the rows of x [B, T, …] or [B, T / n, …] in forward, and another to those of the gradient.

    dtype: of the result; None: that of x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.backward_collective, ctx.dtype = backward, x.dtype
        return _as(forward(_flat(x)).to(dtype or x.dtype), x.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _as(ctx.backward_collective(_flat(grad)).to(ctx.dtype), grad.shape[0]), None, None, None


class _Words(torch.autograd.Function):
    """x [B, T, C] of each rank → the first `number` of their columns side by side, [B, T, number]; gradient: this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup, number: int) -> Tensor:
        ctx.tensor, ctx.columns = tensor, x.shape[-1]
        of_ranks = start_gather(x.contiguous(), tensor.group).wait()
        return of_ranks.movedim(0, -2).flatten(-2)[..., :number].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        start, columns = ctx.tensor.rank * ctx.columns, ctx.columns
        local = grad[..., start : start + columns]
        return torch.nn.functional.pad(local, (0, columns - local.shape[-1])), None, None


class _Dropped(torch.autograd.Function):
    """x times a mask of its shape: bool, multiplied by `scale`, or float factors. Only the mask is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float | None) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return _masked(x, mask, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return _masked(grad, mask, ctx.scale), None, None


def _masked(x: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    return x * mask if scale is None else torch.ops.aten.native_dropout_backward(x, mask, scale)


class _Replicated(torch.autograd.Function):
    """Identity on parameters, whose gradients are summed once all exist; unused parameters get none."""

    @staticmethod
    def forward(ctx: Any, tensor: TensorGroup, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.tensor = tensor
        ctx.set_materialize_grads(False)
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        there = [number for number, grad in enumerate(grads) if grad is not None]
        gradients: list[Tensor | None] = [None] * len(grads)
        if there:
            for number, summed in zip(there, ctx.tensor.sum_each([grads[number] for number in there]), strict=True):
                gradients[number] = summed
        return None, *gradients


class _Shared(torch.autograd.Function):
    """Identity on a parameter [N, …]; the gradients of its last `rows` rows are summed over the ranks of `sharing`."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, tensor: TensorGroup, rows: int) -> Tensor:
        ctx.tensor, ctx.rows = tensor, rows
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        separate, shared = grad.split([grad.shape[0] - ctx.rows, ctx.rows])
        return torch.cat([separate, ctx.tensor.sum_shared_(shared.contiguous().clone())]), None, None
