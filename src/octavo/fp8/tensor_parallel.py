"""The products of a matrix that is split over a tensor group, by rows or by columns.

Legend: n ranks, m tokens of a rank, weight [N, K].

    `ColumnParallelGemms`   weight [N / n, K]: x [m, K] of each rank is gathered, y is [n · m, N / n]
    `RowParallelGemms`      weight [N, K / n]: x is [n · m, K / n], y [m, N] is this rank's rows of the sum over the ranks

In FP8, gathers send the bytes, and sums are in the compute dtype, of float16 in float32. Backward saves this rank's tokens of a
gathered input, and gathers them a second time. With one scale a tensor, all ranks cast with the same scale, since an operand's
amaxes are reduced over the group: given equal values, casts equal those of one rank, and the weight's gradient reads the
gathered bytes transposed.

With scales of rows or blocks the scales of gathered rows are gathered too, and the weight's gradient reads a separate cast
and gather:

    operand                          rowwise                       columnwise, for the weight's gradient
    gathered: x [m, K], dy [m, N]    over whole rows, as on one    rows: amaxes of columns are joined over the ranks;
                                     rank                          blocks: of 128 of this rank's tokens
    of all tokens: dy [n · m, N / n] over the rank's columns:      rows: as on one rank; blocks: of 128 tokens, which
    and x [n · m, K / n]             finer than on one rank        are counted per rank
    weight                           of the rank's rows and columns, in both layouts

So blocks are those of one rank where a rank's tokens, rows and columns are multiples of 128; otherwise each rank's blocks begin
at its first row.

A product of gathered rows starts with this rank's rows while the others are gathered, if it is long enough to pay
for a second launch. In backward, gathers of inputs and sums of gradients overlap the products of the weights' gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from octavo.collectives.tensor import Gathering, TensorGroup, narrowed, sum_dtype, widened
from octavo.collectives.work import Pending
from octavo.errors import InputError
from octavo.fp8.linear import LinearGemms, operands
from octavo.fp8.quantizer import Producer, has_one_scale, quantize
from octavo.fp8.recipe import Cast, Granularity, Operand, Recipe
from octavo.fp8.scaling import ModuleState
from octavo.kernels.quantize.cast import transpose
from octavo.kernels.quantize.quantized import NOTHING, QuantizedTensor
from octavo.kernels.reference import BLOCK

LEAST_OPERATIONS = 2**34
"""Multiplications and additions of a rank's rows that justify a separate product on a GPU: some 20 microseconds."""


class _Gathering:
    """A rowwise operand of all ranks, being gathered; call `wait` or `parts` once for the result."""

    def __init__(self, data: Gathering, scale_inv: Gathering | Tensor | None) -> None:
        self._data, self._scale_inv = data, scale_inv

    def wait(self) -> QuantizedTensor:
        """[n · m, C]."""
        scale_inv = self._scale_inv
        return QuantizedTensor(self._data.wait(), scale_inv.wait() if isinstance(scale_inv, Gathering) else scale_inv)

    @contextlib.contextmanager
    def parts(self) -> Iterator[list[QuantizedTensor]]:
        """[m, C] of each rank, to be read inside."""
        scale_inv = self._scale_inv
        with contextlib.ExitStack() as stack:
            parts = stack.enter_context(self._data.parts())
            if isinstance(scale_inv, Gathering):
                scales = stack.enter_context(scale_inv.parts())
                yield [QuantizedTensor(*pair) for pair in zip(parts, scales, strict=True)]
            else:
                yield [QuantizedTensor(part, scale_inv) for part in parts]


class _TensorGemms(LinearGemms):
    """Base class. Arguments after the group are those of `LinearGemms`."""

    _gathers: Operand
    """The operand that is gathered: each rank holds its tokens."""

    def __init__(
        self,
        tensor: TensorGroup,
        state: ModuleState,
        weight: Tensor,
        recipe: Recipe | None,
        out_dtype: torch.dtype,
        first: bool | None,
    ) -> None:
        if torch.compiler.is_compiling():
            raise InputError(
                f"torch.compile with tensor_parallel_degree = {tensor.size}: overlapped collectives are not compiled. "
                "Leave torch.compile out."
            )
        super().__init__(state, weight, recipe, out_dtype, first)
        self.tensor = tensor
        self._of_rows = recipe is not None and not has_one_scale(recipe, self._gathers)  # or of blocks

    def _start_gather(self, x: QuantizedTensor) -> _Gathering:
        """Begin to gather a rowwise operand, and scales that belong to its rows."""
        data, scale_inv = self.tensor.start_gather(_rows(x)), x.rowwise_scale_inv
        if not self._of_rows or scale_inv is None:
            return _Gathering(data, scale_inv)
        return _Gathering(data, self.tensor.start_gather(scale_inv))

    def _start_gather_columns(self, x: QuantizedTensor) -> Pending[QuantizedTensor]:
        """Begin to gather a columnwise operand with scales of rows or blocks, the tokens of all ranks side by side."""
        data, scale_inv = x.columnwise
        parts = self.tensor.start_gather(data)
        if self._runs() == 1:  # reduced: the scales of all tokens
            return Pending([], lambda: QuantizedTensor(None, None, self._side_by_side(parts.wait()), scale_inv))
        scales = self.tensor.start_gather(scale_inv)
        return Pending([], lambda: QuantizedTensor(None, None, *map(self._side_by_side, (parts.wait(), scales.wait()))))

    def _side_by_side(self, parts: Tensor) -> Tensor:
        """[n · C, m] of all ranks as [C, n · m]."""
        raw = parts.view(torch.uint8) if parts.itemsize == 1 else parts
        return raw.unflatten(0, (self.tensor.size, -1)).transpose(0, 1).flatten(1).view(parts.dtype)

    def _runs(self) -> int:
        """Runs of tokens with separate scales in the weight's gradient: one per rank under block scaling."""
        if self.recipe is None or self.recipe.casts[self._gathers].granularity is not Granularity.BLOCK_1X128:
            return 1
        return self.tensor.size

    def _quantize(
        self, operand: Operand, matrix: Tensor, how: Cast, *, rowwise: bool, columnwise: bool
    ) -> tuple[QuantizedTensor, Tensor | None]:
        """Cast with scales of rows or blocks, by the table at the top of this file."""
        if operand is self._gathers:
            return quantize(matrix, how, rowwise=rowwise, columnwise=columnwise, join=self.tensor.largest_)
        length = matrix.shape[0] // self.tensor.size
        if operand is Operand.WEIGHT or not columnwise or how.granularity is Granularity.ROW or length % BLOCK == 0:
            return quantize(matrix, how, rowwise=rowwise, columnwise=columnwise)
        along, scales = quantize(matrix, how, rowwise=True, columnwise=False) if rowwise else (NOTHING, None)
        runs = functional.pad(matrix.unflatten(0, (self.tensor.size, length)), (0, 0, 0, -length % BLOCK)).flatten(0, 1)
        across, others = quantize(runs, how, rowwise=False, columnwise=True)
        data, scale_inv = across.columnwise
        data = data.view(torch.uint8).unflatten(1, (self.tensor.size, -1))[..., :length].flatten(1).view(data.dtype)
        return QuantizedTensor(*along[:2], data, scale_inv), others if scales is None else scales

    def _filled_up(self, x: QuantizedTensor) -> QuantizedTensor:
        """A columnwise operand whose runs of tokens are each padded with zeros to whole blocks."""
        length = x.columnwise[0].shape[1] // self._runs()
        if self._runs() == 1 or length % BLOCK == 0:
            return x
        data, scale_inv = x.columnwise
        runs = data.view(torch.uint8).unflatten(1, (self.tensor.size, length))  # a byte of 0 is 0
        return QuantizedTensor(None, None, functional.pad(runs, (0, -length % BLOCK)).flatten(1).view(data.dtype), scale_inv)

    def grad_weight(self, dy: QuantizedTensor, x: QuantizedTensor, *, recurring: bool = True) -> Tensor:
        """dw of all tokens."""
        if self._of_rows:
            dy, x = self._filled_up(dy), self._filled_up(x)
        return super().grad_weight(dy, x, recurring=recurring)

    def _of_gathered(
        self,
        x: QuantizedTensor,
        flight: _Gathering,
        columns: int,
        product: Callable[[QuantizedTensor, Tensor | None], Tensor],
        *,
        for_weight: bool = False,
    ) -> tuple[Tensor, QuantizedTensor]:
        """The product [n · m, columns] of the gathered rows of x [m, C], and these rows in the weight gradient's layout.

        product: multiplies some rows, into a matrix if one is given. flight: the pending gather of `x`. for_weight: return
        the rows too; else `NOTHING`.
        """
        local = _rows(x)
        if not self._pays(local, columns):
            whole = flight.wait()
            return product(whole, None), self._for_weight(whole) if for_weight else NOTHING
        y = local.new_empty(local.shape[0] * self.tensor.size, columns, dtype=self.out_dtype)
        of_ranks = y.chunk(self.tensor.size)
        product(x, of_ranks[self.tensor.rank])
        with flight.parts() as parts:
            for rank, (part, place) in enumerate(zip(parts, of_ranks, strict=True)):
                if rank != self.tensor.rank:
                    product(part, place)
            return y, self._joined(parts) if for_weight else NOTHING

    def _pays(self, rows: Tensor, columns: int) -> bool:
        """True if a product of a rank's rows [m, C] takes long enough for a separate launch; on a CPU always."""
        return rows.device.type == "cpu" or 2 * rows.numel() * columns >= LEAST_OPERATIONS

    def _gathered_for_weight(self, flight: _Gathering) -> QuantizedTensor:
        """Gathered rows as the product of the weight's gradient reads them."""
        with flight.parts() as parts:
            return self._joined(parts)

    def _joined(self, parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """The rows of all ranks, rowwise with one scale or none, as the product of the weight's gradient reads them."""
        if self.recipe is None:
            return QuantizedTensor(torch.cat([part.high_precision for part in parts]), None)
        rows, columns = _rows(parts[0]).shape
        out = _rows(parts[0]).new_empty(columns, rows * self.tensor.size)
        for part, place in zip(parts, out.chunk(self.tensor.size, 1), strict=True):
            transpose(_rows(part), place)
        return QuantizedTensor(None, None, out, parts[0].rowwise_scale_inv)

    def _part(self, x: QuantizedTensor, rows: slice) -> QuantizedTensor:
        """Some rows of a rowwise operand of all tokens."""
        scale_inv = x.rowwise_scale_inv
        of_rows = scale_inv is not None and scale_inv.dim() > 0  # or of blocks
        return QuantizedTensor(_rows(x)[rows], scale_inv[rows] if of_rows and scale_inv is not None else scale_inv)

    def _for_weight(self, x: QuantizedTensor) -> QuantizedTensor:
        """A rowwise operand with one scale, or none, as the product of the weight's gradient reads it."""
        if self.recipe is None:
            return x
        data, scale_inv = x.rowwise
        return QuantizedTensor(None, None, transpose(data), scale_inv)


class ColumnParallelGemms(_TensorGemms):
    """The products of a weight [N / n, K]. Input: this rank's tokens [m, K]; output: all tokens [n · m, N / n].

    shared: last rows of the weight that other ranks of `TensorGroup.sharing` hold too; their gradients are added up.
    """

    _gathers = Operand.INPUT

    def __init__(self, *arguments: Any, shared: int = 0) -> None:
        super().__init__(*arguments)
        self.shared, self.input_grad_dtype = shared, sum_dtype(self.out_dtype)

    def output_shape(self, leading: Sequence[int]) -> tuple[int, ...]:
        """The output has the tokens of all ranks."""
        return widened(leading, self.tensor.size)

    def input(self, producer: Producer, *, rowwise: bool = True) -> QuantizedTensor:
        """This rank's rows, which products gather."""
        save_scale = self.recasts and self.grads
        columnwise = self._of_rows and self.wants_weight and self.grads
        x, self._input_scale = self._cast(Operand.INPUT, producer, rowwise=True, columnwise=columnwise, save_scale=save_scale)
        return x

    def output(self, x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
        """y [n · m, N / n] of x [m, K]."""
        assert out is None  # only for parts
        return self._output(x, w, bias)[0]

    def _output(
        self, x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, *, for_weight: bool = False
    ) -> tuple[Tensor, QuantizedTensor]:
        """The output, and the gathered input if it is wanted for the weight's gradient."""
        product = super().output
        flight, columns = self._start_gather(x), _rows(w).shape[0]
        return self._of_gathered(x, flight, columns, lambda part, out: product(part, w, bias, out=out), for_weight=for_weight)

    def recomputed_output(
        self, x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None
    ) -> tuple[Tensor, QuantizedTensor, QuantizedTensor]:
        """As in `LinearGemms`; the returned input is gathered, unless it has scales of rows or blocks."""
        w = self.restored_weight(w, rowwise=True)
        y, gathered = self._output(x, w, bias, for_weight=self.wants_weight and not self._of_rows)
        return y, x if self.wants_weight and self._of_rows else gathered, w

    def saved(self, x: QuantizedTensor, w: QuantizedTensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        """As in `LinearGemms`, with this rank's rows of the input."""
        inputs = x if self.wants_weight or self.recomputes_output else NOTHING
        if self._of_rows and not self.recomputes_output:
            inputs = QuantizedTensor(None, None, *inputs[2:])
        return *inputs, *operands(super().saved(NOTHING, w, weight))[1]

    def gradients(
        self, producer: Producer, saved: Sequence[Tensor | None], use: int = 0, *, slot_index: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dx [m, K], dw [N / n, K] and db [N / n]; producer: of dy [n · m, N / n]."""
        dx, dw, db = super().gradients(producer, saved, use, slot_index=slot_index)
        return dx, dw, self._complete(db)

    def both_gradients(
        self, dy: QuantizedTensor, x: QuantizedTensor, w: QuantizedTensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gather of the input overlaps the product for its gradient; the reduce-scatter of that overlaps the weight's."""
        flight = self._start_gather_for_weight(x, dy) if self.wants_weight else None
        parts = super().grad_input(dy, w) if self.wants_x else None
        x = x if flight is None else flight.wait()  # its blocks are read before the reduce-scatter sends its own
        dx = None if parts is None else self.tensor.start_scatter(parts)
        dw = self._complete(self.grad_weight(dy, x)) if self.wants_weight else None
        return None if dx is None else dx.wait().to(self.out_dtype), dw

    def _start_gather_for_weight(self, x: QuantizedTensor, dy: QuantizedTensor) -> Pending[QuantizedTensor] | None:
        """Begin to gather the input for the weight's gradient; None where `recomputed_output` has gathered it."""
        if self._of_rows:
            return self._start_gather_columns(x)
        if x.columnwise_data is not None or (self.recipe is None and _same_rows(x, dy)):
            return None
        flight = self._start_gather(x)
        return Pending([], lambda: self._gathered_for_weight(flight))

    def _complete(self, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a weight or bias, with the shared rows summed over the ranks that hold them."""
        if gradient is not None and self.shared:
            rows = gradient[-self.shared :]
            rows.copy_(self.tensor.sum_shared_(rows.clone()))
        return gradient


class RowParallelGemms(_TensorGemms):
    """The products of a weight [N, K / n]. Input: all tokens [n · m, K / n]; output: this rank's tokens [m, N] of the sum.

    In backward `grad_output` starts the gather of the gradient of all tokens, `grad_input` overlaps it, and `grad_weight` comes
    last.
    """

    _gathers = Operand.GRAD_OUTPUT
    _flight: _Gathering | None = None
    """The pending gather of the output's gradient."""
    _flight_of_columns: Pending[QuantizedTensor] | None = None
    """The pending gather of its columnwise cast for the weight's gradient, with scales of rows or blocks."""
    _gathered: QuantizedTensor = NOTHING
    """The gathered output gradient in the layout of the weight's gradient, saved from `grad_input` to `grad_weight`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.output_dtype = sum_dtype(self.out_dtype)

    def output_shape(self, leading: Sequence[int]) -> tuple[int, ...]:
        """The output has this rank's tokens."""
        return narrowed(leading, self.tensor.size)

    def output(self, x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
        """y [m, N] of x [n · m, K / n]; the bias is added once, to the sum."""
        assert out is None  # only for parts
        product, rows = super().output, _rows(x)
        shape = rows.shape[0] // self.tensor.size, _rows(w).shape[0]
        parts, dtype = self._pays(rows[: shape[0]], shape[1]), sum_dtype(self.out_dtype)
        y = self.tensor.summed(lambda part: product(self._part(x, part), w, None), shape, dtype, rows.device, parts=parts)
        return (y if bias is None else y.add_(bias.to(y.dtype))).to(self.out_dtype)

    def grad_output(self, producer: Producer, *, slot_index: Tensor | None = None) -> QuantizedTensor:
        """The gradient dy [m, N] of this rank's tokens."""
        if not (self.wants_x or self.wants_weight):
            return NOTHING
        layouts = {"rowwise": True, "columnwise": False}
        if self._of_rows:
            layouts = {"rowwise": self.wants_x, "columnwise": self.wants_weight}
        dy, _ = self._cast(Operand.GRAD_OUTPUT, producer, slot_index=slot_index, **layouts)
        if layouts["rowwise"]:
            self._flight = self._start_gather(dy)
        if layouts["columnwise"]:
            self._flight_of_columns = self._start_gather_columns(dy)
        return dy

    def both_gradients(
        self, dy: QuantizedTensor, x: QuantizedTensor, w: QuantizedTensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """As in `LinearGemms`, with the gradient of the input first; dy: from `grad_output`."""
        dx = self.grad_input(dy, w) if self.wants_x else None
        return dx, self.grad_weight(dy, x) if self.wants_weight else None

    def grad_input(self, dy: QuantizedTensor, w: QuantizedTensor, *, out: Tensor | None = None) -> Tensor:
        """dx [n · m, K / n]; dy: of `grad_output`."""
        assert out is None  # only for parts
        assert self._flight is not None
        product, w = super().grad_input, self.restored_weight(w)
        columns = (w.high_precision if self.recipe is None else w.columnwise[0].t()).shape[1]
        flight, self._flight = self._flight, None
        dx, self._gathered = self._of_gathered(
            dy, flight, columns, lambda part, out: product(part, w, out=out), for_weight=self.wants_weight and not self._of_rows
        )
        return dx

    def grad_weight(self, dy: QuantizedTensor, x: QuantizedTensor, *, recurring: bool = True) -> Tensor:
        """dw [N, K / n]; dy: of `grad_output`."""
        if self._flight_of_columns is not None:
            columns, self._flight_of_columns = self._flight_of_columns, None
            return super().grad_weight(columns.wait(), x, recurring=recurring)
        flight, self._flight = self._flight, None
        gathered = self._gathered if flight is None else self._gathered_for_weight(flight)
        self._gathered = NOTHING
        return super().grad_weight(gathered, x, recurring=recurring)


def _rows(x: QuantizedTensor) -> Tensor:
    assert x.rowwise_data is not None
    return x.rowwise_data


def _same_rows(x: QuantizedTensor, y: QuantizedTensor) -> bool:
    return x.rowwise_data is not None and y.rowwise_data is not None and x.rowwise_data.shape[0] == y.rowwise_data.shape[0]
