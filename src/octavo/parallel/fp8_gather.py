"""Gathering sharded weights in FP8: a quarter of the bytes of float32, and the numbers of one rank.

Each rank casts its own shard of a master weight with the scale that the whole tensor has, so that what is gathered is bit for
bit what one rank would have made of the whole: half of bfloat16's traffic, and no rounding to bfloat16 before. In forward the
rows are used as they arrive; in backward, after a second gathering, they are transposed for the product that reads columns.

FSDP2 lets a sharded tensor replace what is gathered (`fsdp_pre_all_gather`, `fsdp_post_all_gather`), and looks for the hooks
on the local tensor when the model first runs. It then wants a parameter of the original shape and dtype for autograd to hang
a gradient on. Nobody reads that parameter, so all of them are views of one piece of memory that nobody writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FSDPModule

from octavo.fp8 import autocast, scaling
from octavo.fp8.recipe import Cast, Granularity, Operand, Recipe
from octavo.fp8.scaling import ModuleState
from octavo.fp8.tensor import GatheredWeight, Quantized
from octavo.kernels import reference
from octavo.kernels.cast import cast

_placeholders: dict[tuple[torch.device, torch.dtype], Tensor] = {}


@dataclass
class _Forward:
    """What the casts must know of the forward that runs, since FSDP2 calls them with gradients off."""

    grads: bool = False


def gather_in_fp8(root: nn.Module, block: nn.Module, *, keep: bool) -> None:
    """Let the weights of the FP8 layers in `block`, which is sharded, travel in FP8 under an autocast.

    keep: gathered weights stay from forward to backward.
    """
    forward = _Forward()

    def note(*_: Any) -> None:
        forward.grads = torch.is_grad_enabled()

    found = False
    for parameter in _fsdp_parameters(block):
        info = parameter._module_info
        state = _state_of(info.module, info.param_name)
        if state is not None:
            found = True
            parameter.reset_sharded_param()  # a local tensor with room for padding, which then stays the same object
            weight = _SharedWeight(parameter, state, forward, keep)
            parameter._sharded_local_tensor.fsdp_pre_all_gather = weight.before
            parameter._sharded_local_tensor.fsdp_post_all_gather = weight.after
            parameter._init_extensions()
    if found:
        root.register_forward_pre_hook(note, prepend=True)


class _SharedWeight:
    """One FP8 weight of a sharded module."""

    def __init__(self, parameter: Any, state: ModuleState, forward: _Forward, keep: bool) -> None:
        self.parameter, self.state, self.forward, self.keep = parameter, state, forward, keep
        self.how: Cast | None = None
        self.column: Tensor | None = None
        # Written in place: another stream may still read the last value of a tensor that is dropped.
        self.scale, self.scale_inv = (torch.ones((), device=parameter.device) for _ in range(2))
        self.chosen = False

    def before(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        """This rank's part of what is gathered, and whether it is gathered for a backward."""
        parameter = self.parameter
        own = parameter._sharded_param_data.view(parameter.padded_sharded_param_size)
        backward = scaling.graph_task() != -1
        recipe = None if backward else self._recipe()
        how = self.how if backward else None if recipe is None else recipe.casts[Operand.WEIGHT]
        if how != self.how:
            self._forget()
            self.how = how
        if how is None:
            return (own,), False
        amax = None if recipe is None else self._choose_scale(own, recipe, how, mesh)
        q, _, _ = cast(own, self.scale, amax, how.format.dtype, how.format.max, False)
        return (q.view(torch.uint8),), backward

    def after(self, gathered: tuple[Tensor, ...], backward: bool, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        """Give the module the whole weight; autograd gets a parameter without content."""
        rows, columns = self.parameter._orig_size
        if self.how is None:
            self.state.gathered = None
            return gathered[0], ()
        row = gathered[0].view(self.how.format.dtype)[:rows]
        if self.column is None:
            self.column = torch.empty(columns, rows, dtype=self.how.format.dtype, device=row.device)
        if backward or self.keep:
            # Saved for backward before it is filled, as FSDP2's own parameters are.
            with _unsafe_preserve_version_counter((self.column,)):
                self.column.copy_(row.t())
        self.state.gathered = GatheredWeight(Quantized(row, self.scale_inv), Quantized(self.column, self.scale_inv))
        return _placeholder(rows * columns, dtype, row.device).view(rows, columns), (self.column,)

    def _recipe(self) -> Recipe | None:
        """What this forward casts weights by, if weights of that kind can be cast before they are gathered."""
        recipe = None if self.state.skipped else autocast.current_recipe(self.parameter.device)
        tensorwise = recipe is not None and recipe.casts[Operand.WEIGHT].granularity is Granularity.TENSOR
        return recipe if tensorwise else None

    def _choose_scale(self, own: Tensor, recipe: Recipe, how: Cast, mesh: Any) -> Tensor | None:
        """The scale that a step's forwards and backwards share; returns where the first of them records the amax."""
        if self.forward.grads and self.chosen and autocast.first_microbatch() is False:
            return None
        record = None
        if how.delayed:
            slot = self.state.slot(Operand.WEIGHT, recipe, own.device)
            record = slot.amax if self.forward.grads else None
            scale = slot.scale
        else:
            amax = reference.amax(own)
            if mesh.size() > 1:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
            scale = reference.scale_from_amax(amax, how.format.max)
            self.state.observed[Operand.WEIGHT] = scale
        with _unsafe_preserve_version_counter((self.scale_inv,)):
            self.scale.copy_(scale)
            self.scale_inv.copy_(reference.divide(1.0, scale))
        self.state.recipe = recipe
        self.chosen = self.forward.grads
        return record

    def _forget(self) -> None:
        """FSDP2 keeps the buffers of the first gathering; another format needs others."""
        self.parameter.all_gather_outputs = []
        self.parameter.__dict__.pop("_unsharded_param", None)
        self.column, self.state.gathered, self.chosen = None, None, False


def _placeholder(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    shared = _placeholders.get((device, dtype))
    if shared is None or shared.numel() < elements:
        shared = _placeholders[device, dtype] = torch.empty(elements, dtype=dtype, device=device)
    return shared[:elements]


def _state_of(module: nn.Module, parameter: str) -> ModuleState | None:
    states = (value for value in vars(module).values() if isinstance(value, ModuleState))
    return next((state for state in states if state.weight_name == parameter), None)


def _fsdp_parameters(block: nn.Module) -> Iterator[Any]:
    """FSDP2's own record of each parameter in the group of `block`, for which there is no public name."""
    assert isinstance(block, FSDPModule)
    group = block._get_fsdp_state()._fsdp_param_group
    return iter(group.fsdp_params if group is not None else ())
