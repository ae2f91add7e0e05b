"""The products of a matrix of which each rank of a tensor group holds a part: its rows, or its columns.

    columns of the result (rows of the weight)      x [m, K] of this rank's tokens is gathered, y [n · m, N / n]
    rows of the weight's columns                    x [n · m, K / n], y [m, N] is this rank's rows of the sum of all ranks'

In FP8 gathers carry the bytes: all ranks cast by one scale, since the amaxes of an operand are joined over the group. Sums are
of the compute dtype. Backward keeps this rank's tokens of a gathered input, and gathers them again. Given equal values, casts
are those of one rank.

A product of gathered rows begins with this rank's, beside the gather of the others, where it is long enough to pay for a second
launch. In backward, gathers of inputs and sums of gradients run beside the products of the weights' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.collectives.tensor import TensorGroup, narrowed, widened
from octavo.collectives.work import Pending
from octavo.errors import InputError
from octavo.fp8.linear import LinearGemms, operands
from octavo.fp8.quantizer import DenseOperand, Producer
from octavo.fp8.recipe import Granularity, Operand, Recipe
from octavo.fp8.scaling import ModuleState
from octavo.kernels.quantize.cast import transpose
from octavo.kernels.quantize.quantized import NOTHING, QuantizedTensor

LEAST_OPERATIONS = 2**34
"""Multiplications and additions of a rank's rows that are worth a product of their own on a GPU: some 20 microseconds."""


def check_recipe(recipe: Recipe | None, ranks: int) -> None:
    """Raise an InputError for a recipe whose scales are not one a tensor, which tensor-parallel ranks could not join."""
    if recipe is None:
        return
    if any(how.granularity is not Granularity.TENSOR for how in recipe.casts.values()):
        raise InputError(
            f"{recipe.name} scaling with tensor_parallel_degree = {ranks}: gathered rows have one scale a tensor. Use delayed "
            "or current scaling, or tensor_parallel_degree = 1."
        )


class _TensorGemms(LinearGemms):
    """Base. Arguments behind the group are those of `LinearGemms`."""

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
                f"torch.compile with tensor_parallel_degree = {tensor.size}: the collectives beside products are not compiled. "
                "Leave torch.compile out."
            )
        check_recipe(recipe, tensor.size)
        super().__init__(state, weight, recipe, out_dtype, first)
        self.tensor = tensor

    def _with_data(self, x: QuantizedTensor, data: Tensor) -> QuantizedTensor:
        return QuantizedTensor(data, x.rowwise_scale_inv)

    def _of_gathered(
        self,
        x: QuantizedTensor,
        flight: Pending[Tensor],
        columns: int,
        product: Callable[[QuantizedTensor, Tensor | None], Tensor],
    ) -> tuple[Tensor, QuantizedTensor]:
        """The product [n · m, columns] of the gathered rows of x [m, C], and these.

        product: of some rows, into a matrix if there is one. flight: the gather of `x`, under way.
        """
        own = _rows(x)
        rows, on_cpu = own.shape[0], own.device.type == "cpu"
        if not on_cpu and 2 * own.numel() * columns < LEAST_OPERATIONS:
            whole = self._with_data(x, flight.wait())
            return product(whole, None), whole
        y = own.new_empty(rows * self.tensor.size, columns, dtype=self.out_dtype)
        start, stop = rows * self.tensor.rank, rows * (self.tensor.rank + 1)
        product(x, y[start:stop])
        gathered = flight.wait()
        for others in (slice(0, start), slice(stop, len(y))):
            if others.start < others.stop:
                product(self._with_data(x, gathered[others]), y[others])
        return y, self._with_data(x, gathered)

    def _for_weight(self, x: QuantizedTensor) -> QuantizedTensor:
        """A rowwise operand as the product of the weight's gradient reads it."""
        if self.recipe is None:
            return x
        data, scale_inv = x.rowwise
        return QuantizedTensor(None, None, transpose(data), scale_inv)


class ColumnParallelGemms(_TensorGemms):
    """The products of a weight [N / n, K], whose input is this rank's tokens and whose output all tokens.

    shared: rows of the weight, the last, that other ranks of `TensorGroup.sharing` hold too: their gradients are added up.
    """

    def __init__(self, *arguments: Any, shared: int = 0) -> None:
        super().__init__(*arguments)
        self.shared = shared

    def output_shape(self, leading: Sequence[int]) -> tuple[int, ...]:
        """Of all tokens."""
        return widened(leading, self.tensor.size)

    def input(self, producer: Producer, *, rowwise: bool = True) -> QuantizedTensor:
        """This rank's rows, which products gather."""
        keep = self.recasts and self.grads
        x, self._input_scale = self._cast(Operand.INPUT, producer, rowwise=True, columnwise=False, keep=keep)
        return x

    def output(self, x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
        """y [n · m, N / n] of x [m, K]."""
        assert out is None  # of parts alone
        return self._output(x, w, bias)[0]

    def _output(self, x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None) -> tuple[Tensor, QuantizedTensor]:
        """The output, and the gathered input."""
        product = super().output
        flight, columns = self.tensor.start_gather(_rows(x)), _rows(w).shape[0]
        return self._of_gathered(x, flight, columns, lambda part, out: product(part, w, bias, out=out))

    def recomputed_output(
        self, x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None
    ) -> tuple[Tensor, QuantizedTensor, QuantizedTensor]:
        """As `LinearGemms`; the input that it returns is gathered."""
        w = self.restored_weight(w, rowwise=True)
        y, x = self._output(x, w, bias)
        return y, self._for_weight(x) if self.wants_weight else NOTHING, w

    def saved(self, x: QuantizedTensor, w: QuantizedTensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        """As `LinearGemms`; of the input this rank's rows."""
        kept = x if self.wants_weight or self.recomputes_output else NOTHING
        return *kept, *super().saved(NOTHING, w, weight)[4:]

    def gradients(
        self, producer: Producer, saved: Sequence[Tensor | None], *, slot_index: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dx [m, K], dw [N / n, K] and db [N / n]; producer: of dy [n · m, N / n]."""
        x, w = operands(saved)
        dy = self.grad_output(producer, slot_index=slot_index)
        db = producer.column_sum() if self.wants_bias and isinstance(producer, DenseOperand) else None
        dx, dw = self.both_gradients(dy, x, w)
        return dx, dw, self._complete(db)

    def both_gradients(
        self, dy: QuantizedTensor, x: QuantizedTensor, w: QuantizedTensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gather of the input overlaps the product for its gradient; the reduce-scatter of that overlaps the weight's."""
        is_here = x.columnwise_data is not None or (self.recipe is None and _same_rows(x, dy))  # of `recomputed_output`
        flight = self.tensor.start_gather(_rows(x)) if self.wants_weight and not is_here else None
        dx = self.tensor.start_scatter(super().grad_input(dy, w)) if self.wants_x else None
        dw = None
        if self.wants_weight:
            x = x if flight is None else self._for_weight(self._with_data(x, flight.wait()))
            dw = self._complete(self.grad_weight(dy, x))
        return None if dx is None else dx.wait(), dw

    def _complete(self, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a weight or bias with the sums of the rows that other ranks hold too."""
        if gradient is not None and self.shared:
            rows = gradient[-self.shared :]
            rows.copy_(self.tensor.sum_shared_(rows.clone()))
        return gradient


class RowParallelGemms(_TensorGemms):
    """The products of a weight [N, K / n], whose input is all tokens and whose output this rank's, added up over the ranks.

    In backward `grad_output` begins to gather the gradient of all tokens, `grad_input` runs beside that, and `grad_weight`
    comes last.
    """

    _flight: Pending[Tensor] | None = None
    """The gather of the output's gradient, under way."""
    _gathered: QuantizedTensor = NOTHING
    """That gradient, of all tokens, from the input's gradient to the weight's."""

    def output_shape(self, leading: Sequence[int]) -> tuple[int, ...]:
        """Of this rank's tokens."""
        return narrowed(leading, self.tensor.size)

    def output(self, x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
        """y [m, N] of x [n · m, K / n]; the bias is added once, to the sum."""
        assert out is None  # of parts alone
        y = self.tensor.scatter(super().output(x, w, None))
        return y if bias is None else y.add_(bias.to(y.dtype))

    def grad_output(self, producer: Producer, *, slot_index: Tensor | None = None) -> QuantizedTensor:
        """The gradient dy [m, N] of this rank's tokens."""
        if not (self.wants_x or self.wants_weight):
            return NOTHING
        dy, _ = self._cast(Operand.GRAD_OUTPUT, producer, rowwise=True, columnwise=False, slot_index=slot_index)
        self._flight = self.tensor.start_gather(_rows(dy))
        return dy

    def both_gradients(
        self, dy: QuantizedTensor, x: QuantizedTensor, w: QuantizedTensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """As `LinearGemms`, the input's first; dy: of `grad_output`."""
        dx = self.grad_input(dy, w) if self.wants_x else None
        return dx, self.grad_weight(dy, x) if self.wants_weight else None

    def grad_input(self, dy: QuantizedTensor, w: QuantizedTensor, *, out: Tensor | None = None) -> Tensor:
        """dx [n · m, K / n]; dy: of `grad_output`."""
        assert out is None  # of parts alone
        assert self._flight is not None
        product, w = super().grad_input, self.restored_weight(w)
        columns = (w.high_precision if self.recipe is None else w.columnwise[0].t()).shape[1]
        flight, self._flight = self._flight, None
        dx, whole = self._of_gathered(dy, flight, columns, lambda part, out: product(part, w, out=out))
        self._gathered = whole if self.wants_weight else NOTHING
        return dx

    def grad_weight(self, dy: QuantizedTensor, x: QuantizedTensor, *, recurring: bool = True) -> Tensor:
        """dw [N, K / n]; dy: of `grad_output`."""
        flight, self._flight = self._flight, None
        whole = self._gathered if flight is None else self._with_data(dy, flight.wait())
        self._gathered = NOTHING
        return super().grad_weight(self._for_weight(whole), x, recurring=recurring)


def _rows(x: QuantizedTensor) -> Tensor:
    assert x.rowwise_data is not None
    return x.rowwise_data


def _same_rows(x: QuantizedTensor, y: QuantizedTensor) -> bool:
    return x.rowwise_data is not None and y.rowwise_data is not None and x.rowwise_data.shape[0] == y.rowwise_data.shape[0]
