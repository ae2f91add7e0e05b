"""Frozen weights that are stored only in FP8: their bytes and scales, 1 byte a parameter.

The parameter is uint8 and its scales are a buffer of int32, so that no `.to(dtype)` rounds either of them. A product reads the
bytes directly; backward transposes them, which is exact for one scale a tensor and for blocks of 128 × 128. Rowwise scales
would need a second copy for backward, with other scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo.errors import InputError
from octavo.fp8.recipe import Cast, Granularity, Operand, Recipe
from octavo.kernels import reference
from octavo.kernels.quantize import cast_scaled
from octavo.kernels.quantize.cast import cast, transpose
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer
from octavo.kernels.scales import inverse_

_BITS = "_scale_bits"
_BLOCK = 128


def refuse(recipe: Recipe, name: str) -> None:
    """Raise an InputError for a recipe whose weight cannot be stored in one layout; name: the layer's."""
    granularity = recipe.casts[Operand.WEIGHT].granularity
    if granularity not in (Granularity.TENSOR, Granularity.BLOCK_128X128):
        raise InputError(
            f'lora.base = "fp8": {name} uses {recipe.name} scaling, whose weight needs two FP8 copies, one a direction. '
            'Set fp8.recipe = "delayed", "current" or "block", or lora.base = "params_dtype".'
        )
    if not recipe.native:
        raise InputError(
            'lora.base = "fp8" with a recipe object of Transformer Engine, whose first scale is 1: use one of octavo.recipe.'
        )
    if recipe.history is not None and recipe.history.margin:
        raise InputError(
            f'lora.base = "fp8" with fp8.margin = {recipe.history.margin}: the scale of a stored weight has no margin. Set '
            'fp8.margin = 0, or lora.base = "params_dtype".'
        )


@dataclass(frozen=True)
class Stored:
    """Format of a layer's stored weight.

    Attributes:
        cast: the recipe's cast of a weight.
        dtype: dtype of the weight before the cast.
        experts: number of matrices of a stack, one after the other, each with separate scales; None for one matrix.
    """

    cast: Cast
    dtype: torch.dtype
    experts: int | None = None

    @property
    def one_scale(self) -> bool:
        """One scale a tensor; else one for each block of 128 × 128."""
        return self.cast.granularity is Granularity.TENSOR

    def allocate(self, module: nn.Module, name: str) -> None:
        """Replace a frozen parameter [N, K] by uninitialised bytes on its device."""
        old: nn.Parameter = getattr(module, name)
        rows, columns = old.shape[0] // (self.experts or 1), old.shape[1]
        scales = () if self.one_scale else (-(-rows // _BLOCK), -(-columns // _BLOCK))
        scales = scales if self.experts is None else (self.experts, *scales)
        setattr(module, name, nn.Parameter(torch.empty_like(old, dtype=torch.uint8), requires_grad=False))
        module.register_buffer(name + _BITS, torch.empty(scales, dtype=torch.int32, device=old.device), persistent=False)

    def rows_to_read(self, start: int, stop: int, height: int) -> tuple[int, int]:
        """Range of rows, in whole blocks, needed to cast rows `start` to `stop` of a parameter with `height` rows."""
        if self.one_scale or start == stop:
            return start, stop
        each = height // (self.experts or 1)
        (first, begin), (last, end) = divmod(start, each), divmod(stop - 1, each)
        return first * each + begin // _BLOCK * _BLOCK, last * each + min((end // _BLOCK + 1) * _BLOCK, each)

    @torch.no_grad()
    def fill(
        self, module: nn.Module, name: str, weight: Tensor, out: Tensor, first: int = 0, skipped: int = 0,
        *, height: int | None = None, join: Callable[[Tensor, bool], None] | None = None,
    ) -> None:  # fmt: skip
        """Cast rows of a weight, to the same bits as the cast of the whole weight in the recipe's first forward.

        Args:
            module, name: of the parameter.
            weight: rows of `rows_to_read`, [R, K].
            out: this rank's rows of the parameter, uint8.
            first: index in the parameter of the first row of `weight`.
            skipped: number of rows of `weight` before those of `out`.
            height: rows of the parameter, of all ranks that share it; None: those of `weight`.
            join: takes the maximum of a tensor over ranks, in place. Its second argument: True for the ranks that share one
                scale, False for those that hold rows of this module's parameter. None for one rank.
        """
        kind, bits = self.cast.format, getattr(module, name + _BITS)
        stacked = bits if self.experts is not None else bits[None]
        each = (len(weight) if height is None else height) // len(stacked)
        parts = list(_of_matrices(first, first + len(weight), each)) if len(weight) else []
        if self.one_scale:
            largest = torch.zeros(len(stacked), dtype=torch.float32, device=weight.device)
            for index, rows in parts:
                largest[index] = cast_scaled.amax(weight[rows.start - first : rows.stop - first])
            if join is not None:
                join(largest, True)
            scale = cast_scaled.scale_from_amax(largest, kind.max, self.cast.power_of_two)
            inverse_(scale, stacked.view(torch.float32))
            for index, rows in parts:
                part = slice(rows.start - first, rows.stop - first)
                q, _ = cast(weight[part], Quantizer(kind.dtype, kind.max, scale[index])).rowwise
                out[part].copy_(q.view(torch.uint8))
            return
        bits.zero_()
        for index, rows in parts:
            blocks, _ = cast_scaled.blocks(
                weight[rows.start - first : rows.stop - first], kind.dtype, kind.max, _BLOCK, rowwise=True, columnwise=False
            )
            assert blocks is not None
            begin, end = max(rows.start - first, skipped), min(rows.stop - first, skipped + len(out))
            if begin < end:
                data = blocks.data.view(torch.uint8)[begin - (rows.start - first) :]
                out[begin - skipped : end - skipped].copy_(data[: end - begin])
            block = (rows.start - index * each) // _BLOCK
            stacked[index, block : block + len(blocks.scale_inv)] = blocks.scale_inv.contiguous().view(torch.int32)
        if join is not None:  # scales are above 0, so their bits as integers have the order of their values
            join(bits, False)

    @torch.no_grad()
    def put(self, module: nn.Module, name: str, out: Tensor, data: Tensor, scale_inv: Tensor) -> None:
        """Copy rows of bytes [r, K] from a folder into `out`, uint8 [r, K], and the scales of the whole matrix."""
        out.copy_(data.view(torch.uint8))
        getattr(module, name + _BITS).copy_(scale_inv.contiguous().view(torch.int32))

    def operand(
        self, state: Any, recipe: Recipe | None, dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = False
    ) -> QuantizedTensor:
        """The weight [N, K] or [E, N, K] of a layer's state as operand: its bytes, or without a recipe values in `dtype`.

        Raises:
            InputError: the recipe casts weights otherwise than they are stored.
        """
        data, scale_inv = self._parts(state)
        if recipe is None:
            return QuantizedTensor(self.values(state, dtype))
        how = recipe.casts[Operand.WEIGHT]
        if (how.format, how.granularity) != (self.cast.format, self.cast.granularity) or (
            how.power_of_two != self.cast.power_of_two
        ):
            raise InputError(
                f'lora.base = "fp8": weights are stored in {self.cast.format.name}, scale by {self.cast.granularity.value}, '
                f"and the forward runs by {recipe.name} scaling. Run it by the recipe of octavo.transform."
            )
        one = QuantizedTensor(data, scale_inv) if rowwise or not columnwise else QuantizedTensor()
        if not columnwise:
            return one
        turned = scale_inv if self.one_scale else scale_inv.transpose(-1, -2).contiguous()
        if self.experts is None:
            return one._replace(columnwise_data=transpose(data), columnwise_scale_inv=turned)
        across = data.new_empty(data.shape[0], data.shape[2], data.shape[1])
        for matrix, place in zip(data, across, strict=True):
            transpose(matrix, place)
        return one._replace(columnwise_data=across, columnwise_scale_inv=turned)

    def values(self, state: Any, dtype: torch.dtype) -> Tensor:
        """The values of the bytes [N, K], or [E, N, K], in `dtype`, for products in high precision."""
        data, scale_inv = self._parts(state)
        if self.experts is None:
            return reference.dequantize(data, scale_inv).to(dtype)
        return torch.stack([reference.dequantize(*one).to(dtype) for one in zip(data, scale_inv, strict=True)])

    def _parts(self, state: Any) -> tuple[Tensor, Tensor]:
        module, name = state.module, state.weight_name
        data: Tensor = getattr(module, name)
        bits: Tensor = getattr(module, name + _BITS)
        if isinstance(data, DTensor):  # this rank's experts
            data = data.to_local()
        if self.experts is not None:
            bits = bits[state.local_experts or slice(None)]
            data = data.unflatten(0, (len(bits), -1))
        return data.view(self.cast.format.dtype), bits.view(torch.float32)


def _of_matrices(start: int, stop: int, each: int) -> Iterator[tuple[int, range]]:
    """Index of each matrix of `each` rows that has rows in `start` to `stop`, and those rows."""
    for index in range(start // each, (stop - 1) // each + 1):
        yield index, range(max(start, index * each), min(stop, (index + 1) * each))
