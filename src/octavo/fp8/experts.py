"""The products of experts' matrices, and the casts of their operands; each expert is cast like a separate layer.

`octavo.fp8.quantizer` decides as for a linear layer; scales and amaxes are vectors here, with an entry per expert. The matrices
of an MoE layer are one stacked parameter with one FP8 state (`ExpertsGemms`). Those of Transformer Engine's `GroupedLinear` are
separate parameters with separate states, by which checkpoints name them (`GroupedGemms`); casts and products are the same
launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.fp8.linear import SAVED, LinearGemms, operands
from octavo.fp8.quantizer import DenseOperand, Producer, has_one_scale
from octavo.fp8.recipe import Cast, Granularity, Operand, Recipe
from octavo.fp8.scaling import ModuleState
from octavo.kernels.experts.cast import Matrices, Scales, cast_rows_scaled, cast_stacked, cast_stacked_scaled
from octavo.kernels.experts.gemm import Operand as GemmOperand
from octavo.kernels.experts.gemm import grouped_mm, grouped_weight_mm
from octavo.kernels.experts.permute import add_copies, permute
from octavo.kernels.experts.routes import TILE, Routes
from octavo.kernels.quantize.quantized import NOTHING, QuantizedTensor, Quantizer
from octavo.kernels.tiles import cdiv

_SCALES: dict[Granularity, Scales] = {
    Granularity.ROW: "row",
    Granularity.BLOCK_1X128: "block",
    Granularity.BLOCK_128X128: "square",
}


class StackedOperand:
    """Matrices [N, K] of experts as a `Producer`, with one scale each."""

    def __init__(self, weight: Matrices) -> None:
        self.weight = weight

    def __call__(self, quantizer: Quantizer) -> QuantizedTensor:
        """Cast them, or only record their amaxes."""
        if quantizer.scale is None and quantizer.amax is None:
            weight = self.weight if isinstance(self.weight, Tensor) else torch.stack(tuple(self.weight))
            return QuantizedTensor(weight.to(quantizer.dtype))
        return cast_stacked(self.weight, quantizer)


class PermutedRows:
    """The rows of x [T, K] in the order of their experts, as a `Producer`."""

    def __init__(self, x: Tensor, routes: Routes) -> None:
        self.x, self.routes = x, routes

    def __call__(self, quantizer: Quantizer) -> QuantizedTensor:
        """Run the kernel."""
        return permute(self.x, self.routes, quantizer)


class ExpertsGemms(LinearGemms):
    """The casts and products of one use of stacked matrices [E, N, K]: a `LinearGemms` of all experts' rows.

    routes: of a forward, which sets them to None once they are saved; a backward sets the saved ones.
    """

    _operand = StackedOperand

    def __init__(
        self,
        state: ModuleState,
        weight: Tensor,
        routes: Routes,
        recipe: Recipe | None,
        out_dtype: torch.dtype,
        first: bool | None,
    ) -> None:
        super().__init__(state, weight, recipe, out_dtype, first)
        self.routes: Routes | None = routes
        self._scales = (len(routes.ends),)
        self._all, self._local = state.experts, state.local_experts

    def output(
        self, x: QuantizedTensor, w: QuantizedTensor, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """y [R, N] in `out_dtype`. bias: [E, N], only under a recipe."""
        assert self.routes is not None
        assert out is None
        return grouped_mm(_rowwise(x), _rowwise(w), self.routes, self.output_dtype or self.out_dtype, bias=bias)

    def grad_input(self, dy: QuantizedTensor, w: QuantizedTensor, *, out: Tensor | None = None) -> Tensor:
        """dx [R, K] in `out_dtype`. w: as saved, or restored already."""
        assert self.routes is not None
        assert out is None
        w, dtype = self.restored_weight(w), self.input_grad_dtype or self.out_dtype
        if self.recipe is None:
            return grouped_mm(_rowwise(dy), (w.high_precision.transpose(1, 2), None), self.routes, dtype)
        precise = self.recipe.precise["input_gradient"]
        return grouped_mm(_rowwise(dy), w.columnwise, self.routes, dtype, precise=precise)

    def grad_weight(self, dy: QuantizedTensor, x: QuantizedTensor, *, recurring: bool = False) -> Tensor:
        """dw [E, N, K] in the dtype of the weight. Product sizes change from step to step, so none is recurring."""
        assert self.routes is not None
        if self.recipe is None:
            return grouped_weight_mm(_rowwise(dy), _rowwise(x), self.routes, self.weight_dtype)
        precise = self.recipe.precise["weight_gradient"]
        return grouped_weight_mm(dy.columnwise, x.columnwise, self.routes, self.weight_dtype, precise=precise)

    def _join(self, largest: Tensor, group: dist.ProcessGroup) -> None:
        if self._local is None:
            super()._join(largest, group)
            return
        assert self._all is not None
        whole = largest.new_zeros(self._all)  # zeros for experts of other ranks: the maximum ignores them
        whole[self._local] = largest
        super()._join(whole, group)
        largest.copy_(whole[self._local])

    def _quantize(
        self, operand: Operand, matrix: Matrices, how: Cast, *, rowwise: bool, columnwise: bool
    ) -> tuple[QuantizedTensor, Tensor | None]:
        scales, kind = _SCALES[how.granularity], how.format
        if operand is Operand.WEIGHT:
            return cast_stacked_scaled(matrix, kind.dtype, kind.max, scales, rowwise=rowwise, columnwise=columnwise)
        assert self.routes is not None
        assert isinstance(matrix, Tensor)
        return cast_rows_scaled(matrix, self.routes, kind.dtype, kind.max, scales, rowwise=rowwise, columnwise=columnwise)


class _Sorted(PermutedRows):
    """The rows x [M, C] of all experts, in the order of these; `parts` are the rows of each."""

    def __init__(self, x: Tensor, routes: Routes, splits: Sequence[int]) -> None:
        super().__init__(x, routes)
        self.parts = x.split(list(splits))

    @property
    def values(self) -> Tensor:
        """The rows in high precision, each expert's from a multiple of `Routes.tile`."""
        moved = len(self.x) != len(self.routes.tokens)
        return permute(self.x, self.routes, Quantizer(self.x.dtype)).high_precision if moved else self.x


class _Separate(StackedOperand):
    """Separate matrices [N, K]: their own `parts` and `values`."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__(weights)
        self.parts = self.values = weights


class _Noted(DenseOperand):
    """The operand of one expert, which only notes its `Quantizer`: one launch casts those of all experts."""

    quantizer: Quantizer | None = None

    def __call__(self, quantizer: Quantizer) -> QuantizedTensor:
        """Note how the operand is to be cast."""
        self.quantizer = quantizer
        return NOTHING


class GroupedGemms(ExpertsGemms):
    """`ExpertsGemms` of separate matrices [N, K], each with a `ModuleState`, under one recipe.

    routes: those of `splits`, the rows of each expert, which the host knows (`routes_of_splits`). Rows are in their order.
    """

    recipe: Recipe
    routes: Routes

    def __init__(
        self,
        states: Sequence[ModuleState],
        weights: Sequence[Tensor],
        splits: Sequence[int],
        routes: Routes,
        recipe: Recipe,
        out_dtype: torch.dtype,
        first: bool | None,
    ) -> None:
        super().__init__(states[0], weights[0], routes, recipe, out_dtype, first)
        self._splits = splits
        self._each = [LinearGemms(state, one, recipe, out_dtype, first) for state, one in zip(states, weights, strict=True)]

    def inputs(self, x: Tensor) -> QuantizedTensor:
        """The input x [M, K] of all experts, as `LinearQuantizer.input`."""
        return self.input(_Sorted(x, self.routes, self._splits))

    def weights(self, weights: Sequence[Tensor]) -> QuantizedTensor:
        """As `LinearQuantizer.weight`. Micro-batches share all of these matrices or none."""
        states = [each.state for each in self._each]
        if self.first is False and any(state.weight_cache is not None for state in states):
            return _stacked([each._weight_in_both(weight) for each, weight in zip(self._each, weights, strict=True)])
        once = self.first is None and has_one_scale(self.recipe)
        # A scale each: backward casts the matrices again. Their second layouts would be as large as all weights in FP8.
        columnwise = not once and (self.grads or self.first is not None)
        recast = once and self.grads
        w, self._weight_scale = self._cast(
            Operand.WEIGHT, _Separate(weights), rowwise=True, columnwise=columnwise, save_scale=recast
        )
        if self.first is not None or self._discards_cached:
            of_each = zip(*([x] * len(states) if x is None else x.unbind() for x in w), strict=True)
            for state, parts in zip(states, of_each, strict=True):
                state.weight_cache = None if self.first is None else QuantizedTensor(*parts)
        return w

    def outputs(self, x: QuantizedTensor, w: QuantizedTensor, biases: Sequence[Tensor]) -> Tensor:
        """y [M, N] of all experts; biases: [N] of each, or none."""
        return self._in_place(self.output(x, w, torch.stack(list(biases)) if biases else None))

    def saved_by_all(self, x: QuantizedTensor, w: QuantizedTensor, weights: Sequence[Tensor]) -> list[Tensor | None]:
        """Entries of `save_for_backward`: as `LinearQuantizer.saved`, with all matrices if backward casts them again."""
        recast = self.wants_x and w.columnwise_data is None
        return [*self.saved(x, w, weights[0]), *(weights[1:] if recast else ())]

    def gradients_of_all(self, dy: Tensor, saved: Sequence[Tensor | None]) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """dx [M, K] and dw [N, K] of each expert, None where not wanted. dy: [M, N]. saved: of `saved_by_all`."""
        x, w = operands(saved)
        if self.wants_x and w.columnwise_data is None:
            weights = [w.high_precision, *(weight for weight in saved[SAVED:] if weight is not None)]
            kind = self.recipe.casts[Operand.WEIGHT].format
            w = _Separate(weights)(Quantizer(kind.dtype, kind.max, self._weight_scale, rowwise=False, columnwise=True))
        dx, dw = self.both_gradients(self.grad_output(_Sorted(dy, self.routes, self._splits)), x, w)
        return None if dx is None else self._in_place(dx), [None] * len(self._each) if dw is None else dw.unbind()

    def _in_place(self, y: Tensor) -> Tensor:
        """Rows [R, C] without those of zeros between experts: [M, C]."""
        rows = self.routes.rows
        return y if len(y) == len(rows) else add_copies(y, rows, self.routes.tile)

    def _cast(
        self,
        operand: Operand,
        producer: Producer,
        *,
        rowwise: bool,
        columnwise: bool,
        slot_index: Tensor | None = None,
        save_scale: bool = False,
    ) -> tuple[QuantizedTensor, Tensor | None]:
        assert isinstance(producer, _Sorted | _Separate)
        how = self.recipe.casts[operand]
        layouts: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise}
        if how.delayed:
            noted = [_Noted(part) for part in producer.parts]
            pairs = zip(self._each, noted, strict=True)
            saved = [each._cast(operand, one, **layouts, save_scale=save_scale)[1] for each, one in pairs]
            there = [scale for scale in saved if scale is not None]
            return _cast_together(producer, noted), torch.stack(there) if there else None
        if how.granularity is Granularity.TENSOR:
            return super()._cast(operand, producer, **layouts, save_scale=save_scale)
        if not (rowwise or columnwise):
            return NOTHING, None
        out, scale = self._quantize(operand, producer.values, how, **layouts)
        if scale is not None:
            of_rows = operand is not Operand.WEIGHT and (rowwise or scale.dim() == 2)
            self._observe_each(operand, self._parts_of_rows(scale, rowwise) if of_rows else scale.unbind())
        return out, None

    def _observe(self, operand: Operand, scale: Tensor) -> None:
        self._observe_each(operand, scale.unbind())

    def _observe_each(self, operand: Operand, scales: Sequence[Tensor]) -> None:
        for each, scale in zip(self._each, scales, strict=True):
            each._observe(operand, scale)

    def _parts_of_rows(self, scale: Tensor, rowwise: bool) -> list[Tensor]:
        """Each expert's part of scales [R, ...] of rows, or [C, pieces] of pieces of columns."""
        size, dim = (self.routes.tile, 0) if rowwise else (TILE, 1)
        parts, begin = [], 0
        for count in self._splits:
            parts.append(scale.narrow(dim, begin, count if rowwise else cdiv(count, TILE)))
            begin += cdiv(count, size) * (size if rowwise else 1)
        return parts


def _stacked(matrices: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """The stack of matrices: without a copy if they are views of one."""
    stacks: list[Tensor | None] = []
    for tensors in zip(*matrices, strict=True):
        parts = [part for part in tensors if part is not None]
        assert len(parts) in (0, len(tensors))  # each matrix has the same layouts
        stacks.append(_stack(parts) if parts else None)
    return QuantizedTensor(*stacks)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    storage, begin, size = first.untyped_storage().data_ptr(), first.storage_offset(), first.numel()
    places = [(part.untyped_storage().data_ptr(), part.storage_offset()) for part in parts]
    if places == [(storage, begin + i * size) for i in range(len(parts))]:
        return first.as_strided((len(parts), *first.shape), (size, *first.stride()), begin)
    bits = [part.contiguous().view(torch.uint8 if part.itemsize == 1 else part.dtype) for part in parts]
    return torch.stack(bits).view(first.dtype)


def _cast_together(producer: Producer, noted: Sequence[_Noted]) -> QuantizedTensor:
    """Cast the operands of all experts with the scale that each has noted, and record the amax of each."""
    quantizers = [one.quantizer for one in noted if one.quantizer is not None]
    if not quantizers:
        return NOTHING
    scales = [one.scale for one in quantizers if one.scale is not None]
    entries = [one.amax for one in quantizers if one.amax is not None]
    amaxes = torch.stack(entries) if entries else None
    out = producer(quantizers[0]._replace(scale=torch.stack(scales), amax=amaxes))
    if amaxes is not None:
        torch._foreach_copy_(entries, list(amaxes.unbind()))
    return out


def _rowwise(x: QuantizedTensor) -> GemmOperand:
    """FP8 with its scales, or the matrix in high precision and None."""
    assert x.rowwise_data is not None
    return x.rowwise_data, x.rowwise_scale_inv
