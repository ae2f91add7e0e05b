"""One linear layer's three products, in FP8 or not, for layers whose operands come out of a kernel that can cast them.

    output          y  [M, N] = x  [M, K] · w [N, K]ᵀ
    input gradient  dx [M, K] = dy [M, N] · w [N, K]
    weight gradient dw [N, K] = dy [M, N]ᵀ · x [M, K]

A fused layer asks for an operand by handing over its kernel; what the kernel makes of its float32 result (FP8 by the recipe, as
it is and transposed, or the compute dtype) is decided here and nowhere in the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.fp8 import autocast, scaling
from octavo.fp8.matmul import observe, quantize, weight_operand
from octavo.fp8.recipe import Granularity, Operand, Recipe
from octavo.fp8.scaling import ModuleState
from octavo.fp8.tensor import Quantized
from octavo.kernels import gemm
from octavo.kernels.cast import Into, Made, cast, row_tiles, transpose
from octavo.kernels.cast_scaled import amax, scale_from_amax
from octavo.kernels.column_sum import add_up, column_sums

Kernel = Callable[[Into], Made]


def cast_into(x: Tensor, into: Into, partial: Tensor | None = None) -> Made:
    """What `into` asks for, made of a matrix [R, C] that is there already; `partial` as in `octavo.kernels.cast.cast`."""
    if into.scale is None and (into.row or into.column):
        wide = x.to(into.dtype)
        return Made(wide if into.row else None, wide.t().contiguous() if into.column else None, None)
    if into.scale is None:
        if into.amax is not None:
            into.amax.copy_(torch.maximum(into.amax, amax(x)))
        return Made(None, None, None)
    row, column, scale_inv = cast(
        x, into.scale, into.amax, into.dtype, into.fp8_max, into.column, row=into.row, partial=partial
    )
    return Made(row if into.row else None, column if into.column else None, scale_inv)


class Given:
    """A matrix [R, C] that is there already, as a kernel that an operand comes out of; `sums`: its `sum` will be asked for."""

    def __init__(self, matrix: Tensor, *, sums: bool = False) -> None:
        self.matrix = matrix
        self._sums = sums
        self._partial: Tensor | None = None

    def __call__(self, into: Into) -> Made:
        """What `into` asks for."""
        tiles = row_tiles(self.matrix, into.column) if self._sums and into.scale is not None else None
        if tiles is not None:
            self._partial = self.matrix.new_empty(tiles, self.matrix.shape[1], dtype=torch.float32)
        return cast_into(self.matrix, into, None if tiles is None else self._partial)

    def sum(self) -> Tensor:
        """Over the rows, float32 [C]: the gradient of a bias. Costs no pass where a cast has left partial sums."""
        return column_sums(self.matrix) if self._partial is None else add_up(self._partial)


class Forms(NamedTuple):
    """An operand in the layouts that its products read: FP8 with scales, or `row` alone in the compute dtype.

    Four plain tensors, so that they can be saved for backward.
    """

    row: Tensor | None = None
    row_scale: Tensor | None = None
    column: Tensor | None = None
    column_scale: Tensor | None = None

    @property
    def by_row(self) -> Quantized:
        """[R, C] in FP8."""
        assert self.row is not None
        assert self.row_scale is not None
        return Quantized(self.row, self.row_scale)

    @property
    def by_column(self) -> Quantized:
        """[C, R] in FP8."""
        assert self.column is not None
        assert self.column_scale is not None
        return Quantized(self.column, self.column_scale)

    @property
    def wide(self) -> Tensor:
        """[R, C] in the compute dtype."""
        assert self.row is not None
        return self.row

    def with_column(self) -> Forms:
        """The same with the other layout of an FP8 operand of one scale, turned if it is not there."""
        if self.row_scale is None or self.column is not None:
            return self
        assert self.row is not None
        return self._replace(column=transpose(self.row), column_scale=self.row_scale)


NOTHING = Forms()


class Products:
    """The products of one use of a linear layer; made in forward and kept for its backward.

    recipe: None for products in `out_dtype`. first: of several micro-batches, as in `octavo.fp8.matmul.fp8_linear`.
    """

    def __init__(
        self, state: ModuleState, weight: Tensor, recipe: Recipe | None, out_dtype: torch.dtype, first: bool | None
    ) -> None:
        self.state, self.recipe, self.out_dtype, self.weight_dtype = state, recipe, out_dtype, weight.dtype
        self.grads = torch.is_grad_enabled()
        self.first = autocast.first_microbatch() if first is None else first
        self.device = weight.device
        if recipe is not None:
            state.recipe = recipe

    @property
    def repeatable(self) -> bool:
        """Whether a cast of the input can be repeated in backward with the scale that forward used."""
        return self.recipe is None or self.recipe.casts[Operand.INPUT].granularity is Granularity.TENSOR

    def input(self, run: Kernel, *, column: bool, row: bool = True) -> tuple[Forms, Tensor | None]:
        """The first operand of the output, `column` for the weight gradient too; and the scale of a cast to repeat."""
        return self._make(Operand.INPUT, run, row=row, column=column and self.grads)

    def again(self, scale: Tensor | None) -> Into:
        """What a repeated forward kernel makes for the weight gradient: the bits that forward's would have been."""
        if self.recipe is None:
            return Into(self.out_dtype)
        kind = self.recipe.casts[Operand.INPUT].format
        return Into(kind.dtype, kind.max, scale, row=False, column=True)

    def weight(self, weight: Tensor, *, row: bool = True, column: bool = False) -> Forms:
        """The weight for the output, and for the input gradient with `column`; both where they outlive this use."""
        if self.recipe is None:
            return Forms(weight.to(self.out_dtype))
        if self._transposes_late and not (row and column):
            self.state.weight_cache = None
            made, scale = self._make(Operand.WEIGHT, lambda into: cast_into(weight, into), row=row, column=column)
            if column:
                return made
            # For the transposed form in backward: the slot's own scale has moved on by then.
            return made._replace(column_scale=None if scale is None or not self.grads else scale.clone())
        along, across = self.state.gathered or weight_operand(weight, self.state, self.recipe, self.grads, self.first)
        return Forms(*along, *(across or (None, None)))

    @property
    def _transposes_late(self) -> bool:
        """Whether the transposed weight is made in backward: from forward to there it would be memory that nobody reads.

        Of a weight that several micro-batches share, or that was gathered, both forms are made at once.
        """
        tensorwise = self.recipe is not None and self.recipe.casts[Operand.WEIGHT].granularity is Granularity.TENSOR
        return tensorwise and self.first is None and self.state.gathered is None

    def kept_weight(self, w: Forms, weight: Tensor, *, row: bool = False) -> Forms:
        """Of a weight what `weight_again` needs, `row` too; the parameter itself takes no memory of its own."""
        if self.recipe is None:
            return Forms(weight)
        if w.column is None:
            return Forms(weight, w.row_scale, None, w.column_scale)
        return w if row else Forms(None, None, w.column, w.column_scale)

    def weight_again(self, w: Forms, *, row: bool = False) -> Forms:
        """The weight for the input gradient and, with `row`, for the output, from what `kept_weight` gave."""
        if self.recipe is None:
            return Forms(w.wide.to(self.out_dtype))
        if w.column is not None:
            return w
        kind = self.recipe.casts[Operand.WEIGHT].format
        made = cast_into(w.wide, Into(kind.dtype, kind.max, w.column_scale, row=row, column=True))
        return Forms(made.row, w.row_scale if row else None, made.column, w.row_scale)

    def grad_output(self, run: Kernel, *, row: bool, column: bool) -> Forms:
        """The gradient of the output for both gradients; a wide one is a single matrix."""
        return self._make(Operand.GRAD_OUTPUT, run, row=row, column=column)[0] if row or column else NOTHING

    def output(self, x: Forms, w: Forms, bias: Tensor | None) -> Tensor:
        """y [M, N] in `out_dtype`."""
        if self.recipe is None:
            return gemm.wide_mm(x.wide, w.wide.t(), self.out_dtype, None if bias is None else bias.to(self.out_dtype))
        return gemm.scaled_mm(*x.by_row, *w.by_row, out_dtype=self.out_dtype, bias=bias)

    def grad_input(self, dy: Forms, w: Forms) -> Tensor:
        """dx [M, K] in `out_dtype`."""
        if self.recipe is None:
            return gemm.wide_mm(dy.wide, w.wide, self.out_dtype)
        precise = self.recipe.precise("input_gradient")
        return gemm.scaled_mm(*dy.by_row, *w.by_column, out_dtype=self.out_dtype, precise=precise)

    def grad_weight(self, dy: Forms, x: Forms) -> Tensor:
        """dw [N, K] in the dtype of the weight."""
        if self.recipe is None:
            return gemm.wide_mm(dy.wide.t(), x.wide, self.weight_dtype)
        precise = self.recipe.precise("weight_gradient")
        return gemm.scaled_mm(*dy.by_column, *x.by_column, out_dtype=self.weight_dtype, precise=precise)

    def begin_backward(self) -> None:
        """Call first in a backward.

        Raises:
            RuntimeError: a gradient of a gradient is asked for.
        """
        if torch.is_grad_enabled():
            raise RuntimeError("fused layers have no second derivative: call backward without create_graph=True.")
        if self.recipe is not None and self.recipe.casts[Operand.GRAD_OUTPUT].delayed:
            scaling.backward_begins_in(scaling.graph_task())

    def _make(self, operand: Operand, run: Kernel, *, row: bool, column: bool) -> tuple[Forms, Tensor | None]:
        if self.recipe is None:
            return Forms(run(Into(self.out_dtype)).row), None
        how = self.recipe.casts[operand]
        kind = how.format
        if how.granularity is not Granularity.TENSOR:
            matrix = run.matrix if isinstance(run, Given) else _matrix(run(Into(torch.float32)))
            along, across, scale = quantize(matrix, how, row=row, column=column)
            observe(self.state, operand, scale)
            return Forms(*(along or (None, None)), *(across or (None, None))), None
        if how.delayed:
            slot = self.state.slot(operand, self.recipe, self.device)
            record = operand is Operand.GRAD_OUTPUT or self.grads
            made = run(Into(kind.dtype, kind.max, slot.scale, slot.amax if record else None, row, column))
            scale = slot.scale
        else:
            largest = torch.zeros((), device=self.device)
            run(Into(kind.dtype, kind.max, amax=largest, row=False))
            scale = scale_from_amax(largest, kind.max, how.power_of_two)
            observe(self.state, operand, scale)
            made = run(Into(kind.dtype, kind.max, scale, row=row, column=column))
        scale_inv = made.scale_inv
        return Forms(made.row, scale_inv if row else None, made.column, scale_inv if column else None), scale


def _matrix(made: Made) -> Tensor:
    assert made.row is not None
    return made.row
