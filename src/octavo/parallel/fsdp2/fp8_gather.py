"""All-gather of sharded weights in FP8: a quarter of the bytes of float32, and the bits of one rank.

Each rank casts its shard of a master weight with the scale of the whole tensor, so that the gathered weight is bit for bit the
cast of the whole. Forward uses the gathered rows; backward, after a second all-gather, transposes them for the input gradient.
A shard is cast once a step: its bytes stay until the last all-gather of the step. A caller may gather a weight at another time
(`unshard`), or change when it is freed: backward reuses an already gathered weight, and regathers it if its cast differs.
Outside a forward a weight is gathered in its dtype, not in FP8. Stacked experts have a scale per matrix, and a shard may have
rows of several.

FSDP2 lets a sharded tensor replace the gathered data (`fsdp_pre_all_gather`, `fsdp_post_all_gather`). Autograd then needs a
parameter of the original shape and dtype for its gradient: a placeholder that is never read, so all of them share one buffer.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import FSDPModule

from octavo.errors import InputError
from octavo.fp8 import autocast, buffers, checkpoints
from octavo.fp8.quantizer import shard_scale
from octavo.fp8.recipe import Cast, Granularity, Operand, Recipe
from octavo.fp8.scaling import ModuleState
from octavo.kernels.quantize.cast import cast, transpose
from octavo.kernels.quantize.cast_scaled import amax
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer
from octavo.kernels.scales import inverse_
from octavo.parallel.fsdp2.adapter import Form, Group, Parameter, group_of
from octavo.process import process

_BESIDE_THEIR_BASE = ("lora", "ia3", "vera")
"""Adapters of PEFT that use the output of their base layer, and not its weight."""


@dataclass
class _Mode:
    """Gradient mode and micro-batch of the current forward, which FSDP2 does not pass to the casts."""

    running: bool = False
    grads: bool = False
    first: bool | None = None

    def note(self, first: bool | None = None) -> None:
        """Begin a forward. first: it is the first micro-batch; None if the caller does not say."""
        self.grads = checkpoints.trains()
        self.first = autocast.first_microbatch() if first is None else first


def gather_in_fp8(root: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Gather the weights of the FP8 layers in `blocks`, each of which is sharded, in FP8 under an autocast."""
    forward = _Mode()
    shared: list[_SharedWeight] = []

    def note(_: nn.Module, args: Any, options: dict[str, Any]) -> None:
        forward.note(options.get("is_first_microbatch"))
        forward.running = True
        _join_amaxes(shared)

    def forget(*_: Any) -> None:
        forward.running = False
        for weight in shared:
            weight.largest = None

    for block in blocks:
        group = _group(block)
        read = _read_by_others(block)
        weights = [_shared(each, group, forward) for each in group.parameters if each.module not in read]
        if found := [weight for weight in weights if weight is not None]:
            block.register_forward_pre_hook(_gather_again(block, found, forward), prepend=True)
            _complete_in_backward(group, found)
            shared += found
    root.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
    root.register_forward_hook(forget, always_call=True)


def _read_by_others(block: nn.Module) -> set[nn.Module]:
    """Layers whose weights PEFT's adapters read in forward: DoRA computes norms of rows, HRA and BOFT rotate them.

    They are gathered in their dtype, since a weight gathered in FP8 has no readable values.
    """
    return {each.get_submodule("base_layer") for each in block.modules() if _reads_its_base(each)}


def _reads_its_base(module: nn.Module) -> bool:
    package = type(module).__module__.split(".")
    if package[:2] != ["peft", "tuners"] or not isinstance(getattr(module, "base_layer", None), nn.Module):
        return False
    return package[2] not in _BESIDE_THEIR_BASE or len(getattr(module, "lora_magnitude_vector", ())) > 0


def _join_amaxes(weights: Sequence[_SharedWeight]) -> None:
    """Reduce the amaxes of all weights that this forward casts with current scales, by one all-reduce per group of
    ranks."""
    by_group = defaultdict(list)  # with expert parallelism experts have separate groups
    around = {device: autocast.gathering_recipe(device) for device in {weight.parameter.device for weight in weights}}
    for weight in weights:
        recipe = around[weight.parameter.device]
        if recipe is None or (recipe.history is not None and weight.state.override is None):
            continue
        if weight.needs_amax(recipe):
            by_group[weight.parameter.shard_group, weight.state.tensor_group_of(Operand.WEIGHT)].append(weight)
    for (group, tensor), own in by_group.items():
        parts = [weight.amax() for weight in own]
        largest = torch.cat([part.flatten() for part in parts])
        if group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        if tensor is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=tensor)
        for weight, part, found in zip(own, parts, largest.split([part.numel() for part in parts]), strict=True):
            weight.largest = found.view(part.shape)


def _shared(parameter: Parameter, group: Group, forward: _Mode) -> _SharedWeight | None:
    state = _state_of(parameter.module, parameter.name)
    if state is None or state.stored is not None:  # FP8 bytes, which FSDP2 gathers without a cast
        return None
    weight = _SharedWeight(parameter, group, state, forward)
    # A weak reference: Python's garbage collector does not track a tensor with views, so a reference to the model would never
    # be freed. The block's hook holds the object alive.
    proxy = weakref.proxy(weight)
    parameter.extend(functools.partial(_SharedWeight.before, proxy), functools.partial(_SharedWeight.after, proxy))
    return weight


def _gather_again(block: nn.Module, weights: Sequence[_SharedWeight], forward: _Mode) -> Callable[..., None]:
    """A hook that drops weights prefetched or gathered for another autocast or evaluation, so that FSDP2 regathers them."""
    group = _group(block)

    def hook(*_: Any) -> None:
        if not forward.running and checkpoints.graph_task() == -1:  # a part of the model that is called directly
            forward.note()
        if checkpoints.graph_task() != -1 or not group.is_there:
            return
        around = autocast.gathering_recipe(weights[0].parameter.device)
        for weight in weights:
            if not weight.is_of_forward(around):
                group.free()
                return

    return hook


def _complete_in_backward(group: Group, weights: Sequence[_SharedWeight]) -> None:
    """Complete the gathered weights for a backward, whoever gathered them and when.

    A backward does not gather again blocks that stay gathered, that their caller gathered, or that were prefetched for another
    run of the forward, if blocks run in another order or more than once.
    """

    def check() -> None:
        if group.is_there:
            for weight in weights:
                if not weight.is_of_backward():
                    group.free()
                    return

    def complete() -> None:
        if not group.is_gathered:
            raise InputError(
                f"set_unshard_in_backward(False): {group.name} has FP8 weights, which backward reads for the gradient "
                "of its input. Leave it True, or leave them gathered by set_reshard_after_forward(False)."
            )
        for weight in weights:
            if not weight.is_complete:
                weight.complete()

    group.around_pre_backward(check, complete)


class _SharedWeight:
    """One FP8 weight of a sharded module: a matrix [N, K], or those of E experts one after the other, [E · N, K]."""

    def __init__(self, parameter: Parameter, group: Group, state: ModuleState, forward: _Mode) -> None:
        self.parameter, self.group, self.state, self.forward = parameter, group, state, forward
        self.how: Cast | None = None  # of the current all-gather; None: in the parameter's dtype
        self.backward_how: Cast | None = None  # of the last forward with gradients
        self.chosen: Cast | None = None  # for which this forward chose the scale
        self.columnwise: Tensor | None = None
        self.is_complete = False  # `columnwise` has the values of this all-gather
        self.shard_rows: Tensor | None = None  # this rank's rows in FP8, if the step gathers them again
        self.largest: Tensor | None = None  # amax of the whole weight, during a forward of the root that casts with its scale
        self.others: dict[Cast | None, tuple[Form, Tensor | None]] = {}  # each with its columnwise layout
        self.matrices = _matrices(parameter, state)
        # (scale, 1 / scale) of forwards without gradients, and of those with, whose backward recasts with it. Written in place:
        # another stream may still read the last value of a tensor that is dropped.
        count = [] if state.experts is None else [len(self.matrices)]
        self.scales = [
            tuple(torch.ones(count, dtype=torch.float32, device=parameter.device) for _ in range(2)) for _ in range(2)
        ]
        self.scale, self.scale_inv = self.scales[True]

    def wanted(self, around: Recipe | None) -> Cast | None:
        """The form that a forward reads under an autocast of this recipe."""
        recipe = self.state.under(around)
        how = None if recipe is None else recipe.casts[Operand.WEIGHT]
        return how if how is not None and how.granularity is Granularity.TENSOR else None

    def is_of_forward(self, around: Recipe | None) -> bool:
        """True if the last all-gather has the form of the current forward, and of its backward if it has one."""
        return self.how == self.wanted(around) and (not self.forward.grads or self.is_of_backward())

    def needs_amax(self, around: Recipe | None) -> bool:
        """True if this forward casts the weight with a current scale."""
        how = self.wanted(around)
        return how is not None and not how.delayed and not self._is_chosen(how)

    def amax(self) -> Tensor:
        """Amax of this rank's rows of each matrix, 0 for matrices without rows here."""
        largest, shard = torch.zeros_like(self.scale), self.parameter.shard
        for index, rows in self.matrices.items():
            largest[index] = amax(shard[rows])
        return largest

    def before(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        """The shard to gather, and whether this is a backward."""
        own = self.parameter.shard
        backward = checkpoints.graph_task() != -1
        in_forward = not backward and (self.forward.running or self.group.in_forward)
        around = autocast.gathering_recipe(own.device) if in_forward else None
        how = self.backward_how if backward else self.wanted(around)
        trains = backward or (in_forward and self.forward.grads)
        held = self.shard_rows
        if held is not None and not backward and (how is None or not self._is_chosen(how)):
            held = None
        if trains:
            self.backward_how, self.shard_rows = how, None
        if how != self.how:
            self._change(how)
        if how is None:
            return (own,), False
        self.scale, self.scale_inv = self.scales[trains]
        if held is None:
            amax = None if around is None else self._choose_scale(own, around, how, mesh)
            held = self._cast(own, amax, how, mesh)
        if trains and self._is_gathered_again(backward):
            self.shard_rows = held
        # Viewed in the dtype of norms and biases, which are gathered with them: FSDP2 copies elements, and a group of several
        # dtypes byte by byte. A shard that some rank pads must have its original width.
        rows, columns = self.parameter.size
        fills_numbers = rows % self.parameter.ranks == 0 and columns % own.dtype.itemsize == 0
        return (held.view(own.dtype) if fills_numbers else held,), backward

    def after(self, gathered: tuple[Tensor, ...], backward: bool, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        """Give the module the whole FP8 weight, and autograd a placeholder parameter."""
        rows, columns = self.parameter.size
        if self.how is None:
            self.state.gathered = None
            return gathered[0], ()
        stack = self.scale.shape  # [] of one matrix
        rowwise = gathered[0].view(self.how.format.dtype)[:rows].view(*stack, -1, columns)
        if self.columnwise is None:
            with torch.inference_mode(False):  # a later forward may save it for backward
                shape = *stack, columns, rowwise.shape[-2]
                self.columnwise = torch.empty(shape, dtype=rowwise.dtype, device=rowwise.device)
        self.state.gathered = QuantizedTensor(rowwise, self.scale_inv, self.columnwise, self.scale_inv)
        self.is_complete = False
        if backward or not self.group.frees_after_forward:
            self._fill(rowwise)
        return _placeholder(rows * columns, dtype, rowwise.device).view(rows, columns), (self.columnwise,)

    def is_of_backward(self) -> bool:
        """True if the last all-gather has the form and scale of the last forward with gradients."""
        return self.how == self.backward_how and (self.how is None or self.scale is self.scales[True][0])

    def complete(self) -> None:
        """Fill backward's layout of a weight that was gathered earlier."""
        gathered = self.state.gathered
        if self.how is not None and gathered is not None and gathered.rowwise_data is not None:
            self._fill(gathered.rowwise_data)
            if not self._is_gathered_again(backward=True):
                self.shard_rows = None

    def _fill(self, rowwise: Tensor) -> None:
        assert self.columnwise is not None
        # Saved for backward before it is filled, as FSDP2's parameters are.
        with _unsafe_preserve_version_counter((self.columnwise,)):
            for index in self.matrices:
                transpose(rowwise[index], self.columnwise[index])
        self.is_complete = True

    def _is_gathered_again(self, backward: bool) -> bool:
        """True if this step gathers the weight once more, for its backward or a later micro-batch."""
        if self.forward.first is not None and (self.group.micro_batch_follows or not self.group.reduces):
            return True
        return not backward and self.group.frees_after_forward

    def _is_chosen(self, how: Cast) -> bool:
        """True in a later micro-batch, which uses the scale of the first."""
        return self.forward.grads and self.chosen == how and self.forward.first is False

    def _choose_scale(self, own: Tensor, around: Recipe, how: Cast, mesh: Any) -> Tensor | None:
        """Choose the scale of a step's forwards and backwards; returns the amax slot in the first of them."""
        recipe = self.state.under(around)
        if recipe is None or self._is_chosen(how):
            return None

        def largest() -> Tensor:
            if self.largest is not None:
                return self.largest
            found = self.amax()
            if mesh.size() > 1:
                dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.get_group())
            if (tensor := self.state.tensor_group_of(Operand.WEIGHT)) is not None:  # the shard is a part of this rank's part
                dist.all_reduce(found, dist.ReduceOp.MAX, group=tensor)
            return found

        scale, amax = shard_scale(self.state, recipe, own.device, record=self.forward.grads, largest=largest)
        with _unsafe_preserve_version_counter((self.scale_inv,)):
            self.scale.copy_(scale)
            inverse_(scale, self.scale_inv)
        if self.forward.grads or not self.state.trained:
            self.state.recipe = recipe
        if self.forward.grads:
            self.chosen = how
        return amax

    def _cast(self, own: Tensor, amax: Tensor | None, how: Cast, mesh: Any) -> Tensor:
        """Cast this rank's part and record the amax of the whole, with an all-reduce here if the autocast's ranks are fewer."""
        alone = amax is not None and mesh.size() > 1 and not buffers.joins_forward(mesh.get_group())
        seen = torch.zeros_like(self.scale) if alone else amax
        q = self._cast_rows(own, seen, how)
        if alone and amax is not None and seen is not None:
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=mesh.get_group())
            amax.copy_(torch.maximum(amax, seen))
        return q

    def _cast_rows(self, own: Tensor, seen: Tensor | None, how: Cast) -> Tensor:
        """Cast each matrix's rows by its scale and record their amaxes in `seen`; bytes, with zeros after the last expert."""
        kind, parts = how.format, []
        for index, rows in self.matrices.items():
            if rows.stop > rows.start:
                amax = None if seen is None else seen[index]
                q, _ = cast(own[rows], Quantizer(kind.dtype, kind.max, self.scale[index], amax)).rowwise
                parts.append(q.view(torch.uint8))
        if padding := len(own) - sum(map(len, parts)):
            parts.append(own.new_zeros(padding, own.shape[1], dtype=torch.uint8))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _change(self, how: Cast | None) -> None:
        """Swap FSDP2's tensors of the current form for another form's: a backward needs those of its forward."""
        self.others[self.how] = self.parameter.take_form(), self.columnwise
        form, columnwise = self.others.pop(how, (Form(), None))
        self.parameter.put_form(form)
        self.how, self.columnwise, self.state.gathered = how, columnwise, None


def _matrices(parameter: Parameter, state: ModuleState) -> dict[int | tuple[()], slice]:
    """This rank's rows of each matrix of a weight, by the index of its scale; padding belongs to a single matrix."""
    high = parameter.padded_rows
    if state.experts is None:
        return {(): slice(0, high)}
    held = len(range(state.experts)[state.local_experts or slice(None)])
    height = parameter.size[0] // held
    first = parameter.rank * high
    edges = (min(max(expert * height - first, 0), high) for expert in range(held + 1))
    return dict(enumerate(slice(*pair) for pair in itertools.pairwise(edges)))


@torch.inference_mode(False)
def _placeholder(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN, so that the loss is NaN if code outside the layer reads the weight."""
    shared: Tensor | None = process.placeholders.get((device, dtype))
    if shared is None or shared.numel() < elements:
        shared = process.placeholders[device, dtype] = torch.full((elements,), torch.nan, dtype=dtype, device=device)
    return shared[:elements]


def _state_of(module: nn.Module, parameter: str) -> ModuleState | None:
    states = (value for value in vars(module).values() if isinstance(value, ModuleState))
    return next((state for state in states if state.weight_name == parameter), None)


def _group(block: nn.Module) -> Group:
    assert isinstance(block, FSDPModule)
    group = group_of(block)
    assert group is not None
    return group
