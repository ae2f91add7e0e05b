"""The cast policy of FP8 linear layers: the only file that decides dtype, scale, layouts and recorded amax of each operand.

`LinearQuantizer` turns a recipe and a layer's `ModuleState` into a `Quantizer` for the kernel that produces an operand. To save
memory, backward may repeat two casts with forward's scales: that of the columnwise weight, unless it is cached
(`octavo.fp8.columnwise`), and that of an activation's output. Compiled code follows the same policy, with casts as operators
that take a slot's index.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.errors import InputError
from octavo.fp8 import autocast, calibration, checkpoints, compiled
from octavo.fp8.buffers import BufferSet, Session, Slot, of_thread
from octavo.fp8.columnwise import WRAPPED, is_sharded
from octavo.fp8.first_scale import first_scale
from octavo.fp8.recipe import Cast, Granularity, Operand, Recipe
from octavo.fp8.scaling import ModuleState, claim, wait_to_begin
from octavo.kernels import reference
from octavo.kernels.autograd import refuse_transforms
from octavo.kernels.column_sum import add_up, column_sums
from octavo.kernels.quantize.cast import cast, cast_scaled, row_tiles
from octavo.kernels.quantize.cast_scaled import Join, amax, blocks, current_scale, rows, scale_from_amax
from octavo.kernels.quantize.quantized import NOTHING, QuantizedTensor, Quantizer, of_one_scale

Producer = Callable[[Quantizer], QuantizedTensor]
"""Runs the kernel that computes an operand [R, C] and stores it by the quantizer's policy."""


class DenseOperand:
    """Adapter: an existing matrix [R, C] as a `Producer`. column_sum: also compute the sum over rows, a bias's gradient."""

    def __init__(self, matrix: Tensor, *, column_sum: bool = False) -> None:
        self.matrix = matrix
        self._sums = column_sum
        self._partial: Tensor | None = None

    def __call__(self, quantizer: Quantizer) -> QuantizedTensor:
        """Cast the matrix, with partial column sums in the same pass where the kernel has them."""
        if quantizer.scale is None:
            return QuantizedTensor(self.matrix.to(quantizer.dtype))
        tiles = row_tiles(self.matrix, quantizer.columnwise) if self._sums else None
        if tiles is not None:
            self._partial = self.matrix.new_empty(tiles, self.matrix.shape[1], dtype=torch.float32)
        return cast(self.matrix, quantizer, None if tiles is None else self._partial)

    def column_sum(self) -> Tensor:
        """Sum over the rows, float32 [C]: the gradient of a bias."""
        return column_sums(self.matrix) if self._partial is None else add_up(self._partial)


class WithHighPrecision:
    """Adapter: a `Producer` that also stores its result [R, C] in high precision, and casts that.

    run: runs the kernel, with a matrix for that result or None. `matrix`: in `dtype`, set by the first run.
    """

    def __init__(
        self,
        run: Callable[[Quantizer, Tensor | None], QuantizedTensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._run, self._shape, self.dtype, self.device = run, shape, dtype, device
        self.matrix: Tensor | None = None

    def __call__(self, quantizer: Quantizer) -> QuantizedTensor:
        """Run the kernel, or cast the stored matrix."""
        if self.matrix is not None:
            return DenseOperand(self.matrix)(quantizer)
        if quantizer.scale is None and quantizer.rowwise:  # for a result in high precision: the matrix itself
            out = self._run(quantizer._replace(dtype=self.dtype), None)
            self.matrix = out.high_precision
            return out
        self.matrix = torch.empty(self._shape, dtype=self.dtype, device=self.device)
        return self._run(quantizer, self.matrix)


def active_recipe(state: ModuleState, device: torch.device) -> Recipe | None:
    """The recipe of a layer's products inside the current autocast; None for products in high precision.

    Raises:
        RuntimeError: the sharded weight was gathered in a form that this forward cannot read.
        InputError: a transform of `torch.func` around an FP8 layer.
    """
    around = autocast.current_recipe(device)
    # First: compiled code guards everything read before this, and would recompile on a change.
    if not torch.compiler.is_compiling() and around is not None and around is not state.buffers.claimed:
        claim(state.buffers, around)
    recipe = state.under(around)
    if recipe is not None:
        refuse_transforms("FP8 layers")
    if state.gathered is not None and not has_one_scale(recipe):
        raise RuntimeError(
            "this layer's weight is still gathered in FP8 for an earlier forward, and this forward needs it in another form: "
            "run it after the backward of the earlier forward."
        )
    return recipe


def has_one_scale(recipe: Recipe | None, operand: Operand = Operand.WEIGHT) -> bool:
    """True if the recipe casts this operand with one scale a tensor: then a weight can be cast before it is gathered."""
    return recipe is not None and recipe.casts[operand].granularity is Granularity.TENSOR


def repeats_input(recipe: Recipe | None) -> bool:
    """True if backward can repeat the cast of an input to the same bits from its scale."""
    return recipe is None or recipe.casts[Operand.INPUT].granularity is Granularity.TENSOR


def shard_scale(
    state: ModuleState, recipe: Recipe, device: torch.device, *, record: bool, largest: Callable[[], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Scale of a sharded weight, and the tensor that records its amax (None: not recorded).

    Both are float32 [], or [E] of this rank's experts. largest: returns the amax of the whole weight; called under current
    scaling, and under delayed scaling before the first update.
    """
    how = recipe.casts[Operand.WEIGHT]
    if how.delayed:
        slot = state.slot(Operand.WEIGHT, recipe, device, trains=record)
        if record:
            slot.buffer.owner.record_forward(training=state.training)
        scale, entry = slot.present()
        if (number := of_thread.state.session.number) < slot.buffer.begun_from[slot.index]:
            if record:
                wait_to_begin(state, Operand.WEIGHT, slot.buffer, slot.index, slot.entries, native=recipe.native)
            partly = number >= slot.buffer.partly_from[slot.index]
            of_all = functools.partial(_of_whole_stack, state, largest)
            scale = first_scale(scale, how.format.max, native=recipe.native, partly=partly, largest=of_all)
        if state.local_experts is not None:
            scale, entry = scale[state.local_experts], entry[state.local_experts]
        return scale, entry if record else None
    scale = scale_from_amax(largest(), how.format.max, how.power_of_two)
    state.observed[Operand.WEIGHT] = scale
    return scale, None


def _of_whole_stack(state: ModuleState, largest: Callable[[], Tensor]) -> Tensor:
    """The amaxes of an operand; for experts that are distributed over ranks the largest of all experts.

    All ranks of the experts call it at the same cast, since they agree on which entries have a scale.
    """
    amaxes = largest()
    if state.local_experts is None:
        return amaxes
    amaxes = amaxes.amax()
    dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=state.buffers.expert_group)
    return amaxes


class LinearQuantizer:
    """Casts the operands of one use of a linear layer: created in forward, saved for its backward.

    `want` sets the gradients that backward computes; layouts and saved tensors follow from it. recipe: None leaves operands in
    `out_dtype`. first: True in the first of several micro-batches, which share its FP8 weight, and False in the others; None
    casts the weight in each call.
    """

    wants_x = wants_weight = wants_bias = True
    """Gradients that backward computes, set by `want`."""
    recasts = False
    """Backward recasts the input with the scale of forward (`recomputed_input`) instead of reading a saved one."""
    recomputes_output = False
    """Backward recomputes the output from saved operands."""
    _scales: tuple[int, ...] = ()
    """Shape of the scales of a tensor."""
    _local: slice | None = None
    """The slot's entries for this rank's operands; None for all."""
    _operand: type[Any] = DenseOperand
    """The weight as a `Producer`."""

    def __init__(
        self, state: ModuleState, weight: Tensor, recipe: Recipe | None, out_dtype: torch.dtype, first: bool | None
    ) -> None:
        self.state, self.device, self.recipe, self.out_dtype = state, weight.device, recipe, out_dtype
        self.weight_dtype = weight.dtype
        self.grads = torch.is_grad_enabled()
        compiling = torch.compiler.is_compiling()
        self.trains = self.grads or (not compiling and checkpoints.trains())
        self.records = self.trains and (compiling or checkpoints.graph_task() == -1)
        self.session: Session | None = None
        if compiling:
            around, self._discards_copies = autocast.first_microbatch(), False
        else:
            self.session, around, self._discards_copies = autocast.around_layer()
        # An evaluation does not touch the FP8 weight of the micro-batches.
        self.first = (around if first is None else first) if self.trains else None
        self._noted: BufferSet | None = None  # its forward has recorded an amax of this use
        self.training = state.training
        self._discards_cached = self.trains and (compiling or self.training)
        self._input_scale: Tensor | None = None
        self._weight_scale: Tensor | None = None
        if recipe is None:
            return
        if self.records or not state.trained:
            state.recipe = recipe
        if self.records:
            state.trained = True
        if self.session is not None:
            self.session.used[state.buffers] = None

    def want(
        self, x: bool, weight: bool, bias: bool = False, *, recasts: bool = False, recomputes_output: bool = False
    ) -> None:
        """The gradients that backward computes; call before the casts.

        recasts: backward has the producer of the input, and repeats its cast where that gives the same bits.
        """
        self.wants_x, self.wants_weight, self.wants_bias = x, weight, bias
        self.recasts, self.recomputes_output = recasts and weight and repeats_input(self.recipe), recomputes_output

    @property
    def knows_input_scale(self) -> bool:
        """True if the input's scale, or the lack of one, is known before its values."""
        if self.recipe is None or not self.recipe.casts[Operand.INPUT].delayed:
            return self.recipe is None
        if not self.recipe.native:
            return True
        find = self.state.slot_of_forward if self.trains and not self.records else self.state.slot
        slot = find(Operand.INPUT, self.recipe, self.device)
        return self.session is not None and self.session.number >= slot.buffer.begun_from[slot.index]

    def input(self, producer: Producer, *, rowwise: bool = True) -> QuantizedTensor:
        """The input [M, K], rowwise for the output and columnwise [K, M] for the weight gradient."""
        columnwise, save_scale = self.wants_weight and self.grads and not self.recasts, self.recasts and self.grads
        if self.recomputes_output and repeats_input(self.recipe):
            columnwise = False  # backward transposes the rowwise layout, which is saved for the output
        discarded = rowwise and columnwise and self._discards_copies and has_one_scale(self.recipe, Operand.INPUT)
        x, self._input_scale = self._cast(
            Operand.INPUT, producer, rowwise=rowwise, columnwise=columnwise and not discarded, save_scale=save_scale
        )
        if discarded:
            data, scale_inv = x.rowwise
            x = QuantizedTensor(data, scale_inv, data.new_empty(data.shape[::-1]), scale_inv)
        return x

    def recomputed_input(self) -> Quantizer:
        """Quantizer for a forward kernel that backward repeats: the same bits, in the layout of the weight gradient."""
        if self.recipe is None:
            return Quantizer(self.out_dtype)
        kind = self.recipe.casts[Operand.INPUT].format
        return Quantizer(kind.dtype, kind.max, self._input_scale, rowwise=False, columnwise=True)

    def weight(self, weight: Tensor, *, rowwise: bool = True, columnwise: bool = False, cache: bool = True) -> QuantizedTensor:
        """The weight [N, K]: rowwise for the output, columnwise [K, N] for the input gradient, both if used more than once.

        cache: cache the layouts that backward reads. Otherwise it recasts the weight, as under activation checkpointing,
        offloading and FSDP, and where it recomputes the output.
        """
        if self.state.stored is not None:  # backward transposes it, instead of reading a saved layout
            return self.state.stored.operand(self.state, self.recipe, self.out_dtype, rowwise=rowwise, columnwise=columnwise)
        if self.recipe is None:
            calibration.observe(self.state, Operand.WEIGHT, weight)
            return QuantizedTensor(weight.to(self.out_dtype)) if rowwise or columnwise else NOTHING
        # Read only by this use, in eager code; a shared or gathered one has both layouts at once.
        once = self.first is None and self.state.gathered is None and not torch.compiler.is_compiling()
        if (rowwise and columnwise) or not (once and has_one_scale(self.recipe)):
            return self._weight_in_both(weight)
        if self._discards_cached:
            self.state.weight_cache = None
        cache = cache and self.wants_x and not self.recomputes_output
        # A second cast of a float32 weight would read four bytes to save one.
        cache = cache and (weight.itemsize > 2 or self.state.caches_columnwise)
        # FSDP may free it between forward and backward, so that a cached layout would undo the saving. Weights of FSDP1 are
        # parts of a flat parameter.
        cache = cache and weight.untyped_storage().nbytes() == weight.nbytes and not checkpoints.has_hooks()
        cache = cache and not (WRAPPED and is_sharded(self.state.module))
        columnwise = columnwise or (self.grads and cache)
        recast = self.grads and not columnwise  # in backward
        w, scale = self._cast(Operand.WEIGHT, self._operand(weight), rowwise=rowwise, columnwise=columnwise, save_scale=recast)
        self._weight_scale = scale
        return w

    def _weight_in_both(self, weight: Tensor) -> QuantizedTensor:
        """The gathered weight, that of an earlier micro-batch, or a new one, columnwise where there will be gradients."""
        state, cached = self.state, self.state.weight_cache
        if state.gathered is not None:
            return state.gathered
        if self.first is False and cached is not None:
            return cached
        columnwise = self.grads or self.first is not None
        w, _ = self._cast(Operand.WEIGHT, self._operand(weight), rowwise=True, columnwise=columnwise)
        if self.first is not None:
            state.weight_cache = w
        elif cached is not None and self._discards_cached:
            state.weight_cache = None
        return w

    def saved(self, x: QuantizedTensor, w: QuantizedTensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        """Entries of `save_for_backward`: the parts of x [M, K] and w [N, K] that backward reads; inverse: `operands`.

        weight: the parameter [N, K], which takes no extra memory. It is saved if `w` has no columnwise layout.
        """
        if not self.recomputes_output:
            if not self.wants_weight or self.recasts:
                x = NOTHING
            elif x.scale_inv is not None:
                x = QuantizedTensor(None, None, x.columnwise_data, x.columnwise_scale_inv)
        if not (self.wants_x or self.recomputes_output):
            w = NOTHING
        elif self.recipe is None or w.columnwise_data is None:
            w = QuantizedTensor(weight)
        elif not self.recomputes_output:
            w = QuantizedTensor(None, None, *w.columnwise)
        return *x, *w

    def restored_weight(self, saved: QuantizedTensor, *, rowwise: bool = False) -> QuantizedTensor:
        """The saved weight [N, K] for the input gradient, and with `rowwise` for the output; a restored one is unchanged."""
        if self.state.stored is not None and saved.columnwise_data is None:
            return self.state.stored.operand(self.state, self.recipe, self.out_dtype, rowwise=rowwise, columnwise=True)
        if self.recipe is None:
            return QuantizedTensor(saved.high_precision.to(self.out_dtype))
        if saved.columnwise_data is not None:
            if saved.columnwise_data.untyped_storage().size() < saved.columnwise_data.nbytes:  # FSDP2 has freed it
                raise InputError(
                    "the FP8 weights of this backward were freed: another forward with gradients, under another recipe, has "
                    "gathered them since. Run each backward before the next forward, or the other forward under "
                    "torch.no_grad()."
                )
            return saved
        kind = self.recipe.casts[Operand.WEIGHT].format
        recast = Quantizer(kind.dtype, kind.max, self._weight_scale, rowwise=rowwise, columnwise=True)
        return self._operand(saved.high_precision)(recast)

    def grad_output(self, producer: Producer, *, slot_index: Tensor | None = None) -> QuantizedTensor:
        """The output's gradient [M, N], rowwise for the input gradient and columnwise [N, M] for the weight gradient.

        slot_index: in compiled code, the tensor that `grad_output_slot` gave in forward.
        """
        if not (self.wants_x or self.wants_weight):
            return NOTHING
        dy, _ = self._cast(
            Operand.GRAD_OUTPUT, producer, rowwise=self.wants_x, columnwise=self.wants_weight, slot_index=slot_index
        )
        return dy

    def grad_output_slot(self) -> Tensor | None:
        """The index of the output gradient's slot, int64 [2], which compiled code saves for backward; None without history."""
        if self.recipe is None or not self.recipe.casts[Operand.GRAD_OUTPUT].delayed:
            return None
        return self.state.slot(Operand.GRAD_OUTPUT, self.recipe, self.device).position

    def _first_scale(self, operand: Operand, slot: Slot, scale: Tensor, producer: Producer, recipe: Recipe) -> Tensor:
        """The scale of a cast in place of the slot's, if some entries have none yet."""
        session = self.session
        assert session is not None

        def largest() -> Tensor:
            amaxes = self._amax(producer, slot.fp8_max, recipe.casts[operand].format.dtype)
            tensor, group = self.state.tensor_group_of(operand), self.state.context_group
            if tensor is not None:  # tensor-parallel ranks share one history under every autocast
                self._join(amaxes, tensor)
            if group is not None and operand is not Operand.WEIGHT and session.joint.covers(group):
                self._join(amaxes, group)  # like histories: separate ones may get a first scale at different steps
            return amaxes

        partly = session.number >= slot.buffer.partly_from[slot.index]
        of_all = functools.partial(_of_whole_stack, self.state, largest)
        return first_scale(scale, slot.fp8_max, native=recipe.native, partly=partly, largest=of_all)

    def _amax(self, producer: Producer, fp8_max: float, dtype: torch.dtype) -> Tensor:
        """The amax of an operand, float32 [], or of each expert [E]."""
        if isinstance(producer, DenseOperand):
            return amax(producer.matrix)
        largest = torch.zeros(self._scales, dtype=torch.float32, device=self.device)
        producer(Quantizer(dtype, fp8_max, amax=largest, rowwise=False))
        return largest

    def _join(self, largest: Tensor, group: dist.ProcessGroup) -> None:
        """Reduce amaxes to the maximum over the ranks of a group, in place."""
        self.state.buffers.joins.largest_(largest, group)

    def _current_scale(self, operand: Operand, producer: Producer, how: Cast) -> Tensor:
        """The scale of an operand from its amax, reduced over the ranks that hold parts of it."""
        kind = how.format
        if operand is Operand.WEIGHT and (joined := self.state.joined_amax) is not None:
            return scale_from_amax(joined, kind.max, how.power_of_two)
        largest = self._amax(producer, kind.max, kind.dtype)
        groups = [self.state.tensor_group_of(operand), None if operand is Operand.WEIGHT else self.state.context_group]
        there = [group for group in groups if group is not None]
        if self._local is not None:  # all experts' entries are reduced; this rank has some of them
            for group in there:
                self._join(largest, group)
            there = []
        return self.state.buffers.joins.scale(largest, there, kind.max, how.power_of_two)

    def _quantize(
        self, operand: Operand, matrix: Tensor, how: Cast, *, rowwise: bool, columnwise: bool
    ) -> tuple[QuantizedTensor, Tensor | None]:
        """Cast with scales of rows or blocks, or in compiled code with one."""
        return quantize(matrix, how, rowwise=rowwise, columnwise=columnwise)

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
        """An operand in the requested layouts, and with `save_scale` its scale, if the tensor has a single one."""
        stored = rowwise or columnwise
        if self.recipe is None:
            if not stored:
                return NOTHING, None
            out = QuantizedTensor(producer(Quantizer(self.out_dtype)).high_precision)
            if operand is Operand.INPUT:
                calibration.observe(self.state, operand, out.high_precision)
            return out, None
        how, compiling = self.recipe.casts[operand], torch.compiler.is_compiling()
        kind, record = how.format, operand is Operand.GRAD_OUTPUT or self.records
        matrix = producer.matrix if isinstance(producer, DenseOperand) else None
        if how.delayed:
            if compiling:
                assert matrix is not None
                if slot_index is None:
                    slot_index = self.state.slot(operand, self.recipe, self.device, trains=record).position
                native = self.recipe.native
                return compiled.cast_delayed(matrix, slot_index, kind.dtype, kind.max, record, native, columnwise), None
            if self.trains and not record:
                slot = self.state.slot_of_forward(operand, self.recipe, self.device)
            else:
                slot = self.state.slot(operand, self.recipe, self.device, trains=record)
            if record and operand is Operand.GRAD_OUTPUT:
                slot.buffer.owner.record_gradient(self.session)
            elif record and self._noted is not slot.buffer.owner:
                self._noted = slot.buffer.owner
                self._noted.record_forward(self.session, training=self.training)
            (scale, entry), saved = slot.present(), slot.saved_scale if save_scale else None  # the slot changes before backward
            if self.session is None or self.session.number < slot.buffer.begun_from[slot.index]:
                if record:
                    wait_to_begin(self.state, operand, slot.buffer, slot.index, slot.entries, native=self.recipe.native)
                if stored or save_scale:
                    scale = self._first_scale(operand, slot, scale, producer, self.recipe)
                    saved = scale if save_scale else None
            if self._local is not None:
                scale, entry, saved = scale[self._local], entry[self._local], None if saved is None else saved[self._local]
            if not stored and not record:
                return NOTHING, saved
            amax: Tensor | None = entry
            if not record:  # a recomputation runs forward's very kernels
                amax = torch.empty_like(entry) if self.trains else None
            return producer(Quantizer(kind.dtype, kind.max, scale, amax, rowwise, columnwise)), saved
        if how.granularity is Granularity.TENSOR and not compiling:
            scale = self._current_scale(operand, producer, how)
            self._observe(operand, scale)
            out = producer(Quantizer(kind.dtype, kind.max, scale, None, rowwise, columnwise)) if stored else NOTHING
            return out, scale if save_scale else None
        if compiling and how.granularity is Granularity.TENSOR and self.state.context_group is not None:
            # Not traced, so this layer runs eagerly: its amax must be reduced over the ranks that share a sequence.
            raise InputError(
                "current scaling reduces amaxes over the ranks that share a sequence, which is not compiled: compile without "
                "fullgraph, or use delayed scaling."
            )
        if not stored:
            return NOTHING, None
        if matrix is None:
            matrix = producer(Quantizer(torch.float32)).high_precision
        out, chosen = self._quantize(operand, matrix, how, rowwise=rowwise, columnwise=columnwise)
        if chosen is not None and not compiling:
            self._observe(operand, chosen)
        if compiling and not self.trains and operand is Operand.INPUT:
            out = compiled.outside_of_checkpoints(out)
        return out, None

    def _observe(self, operand: Operand, scale: Tensor) -> None:
        """Store the scale of the last cast for `inspect`; a recomputation, perhaps of an earlier forward, does not."""
        if operand is Operand.GRAD_OUTPUT or self.records or not self.trains:
            self.state.observed[operand] = scale


class WeightUse(NamedTuple):
    """Inputs of the memory estimate that decide, with the recipe, which copies of a layer's weight exist.

    Attributes:
        compute_bytes: bytes per element of products outside FP8.
        parameter_bytes: bytes per element of the parameter that its layer sees.
        cached: micro-batches share FP8 weights (`first`), which no backward saves then.
        gathered: FP8 weights with one scale are gathered in both layouts, without further copies in a layer.
        caches_columnwise: the result of `caches_columnwise`.
    """

    compute_bytes: int
    parameter_bytes: int
    cached: bool
    gathered: bool
    caches_columnwise: bool


def caches_columnwise(parameter_bytes: int, *, affordable: bool, shared: bool, hooks: bool) -> bool:
    """True if `LinearQuantizer.weight` casts a weight with one scale in both layouts, for the backward of this forward.

    affordable: `ModuleState.caches_columnwise`, of 16-bit parameters. shared: micro-batches or ranks share the weight. hooks:
    the forward saves through hooks of saved tensors, as activation checkpoints and offloading do.
    """
    return not (shared or hooks) and (parameter_bytes > 2 or affordable)


def cached_weight_bytes(rows: int, columns: int, recipe: Recipe) -> list[int]:
    """Bytes of the tensors of a weight [rows, columns] in both layouts, as micro-batches share it."""
    granularity = recipe.casts[Operand.WEIGHT].granularity
    columnwise, rowwise = granularity.layout_bytes(columns, rows), granularity.layout_bytes(rows, columns)
    return [*columnwise[: 1 if has_one_scale(recipe) else 2], *rowwise]


def saved_weight_bytes(
    rows: int, columns: int, recipe: Recipe | None, use: WeightUse, *, rowwise: bool = False, recast: bool = False
) -> list[int]:
    """Bytes of the weight's tensors in `LinearQuantizer.saved`, the parameter excluded.

    rowwise: backward recomputes the output. recast: forward caches no layout for backward (`cache` of `weight`).
    """
    if recipe is None or use.cached:
        return []
    if has_one_scale(recipe):
        return [rows * columns] if use.caches_columnwise and not recast else []
    columnwise_and_rowwise = cached_weight_bytes(rows, columns, recipe)
    return columnwise_and_rowwise if rowwise else columnwise_and_rowwise[:2]


def restored_weight_bytes(elements: int, recipe: Recipe | None, use: WeightUse, *, recast: bool = False) -> int:
    """Bytes of the copy that `LinearQuantizer.restored_weight` returns if it was not saved, cached or gathered."""
    if recipe is None:
        return elements * use.compute_bytes if use.compute_bytes != use.parameter_bytes else 0
    there = use.cached or use.gathered or (use.caches_columnwise and not recast)
    return elements if has_one_scale(recipe) and not there else 0


def quantize(
    x: Tensor, how: Cast, *, rowwise: bool = True, columnwise: bool = True, join: Join | None = None
) -> tuple[QuantizedTensor, Tensor | None]:
    """Cast a matrix [R, C] with scales computed from its values; also the scales (None: neither layout is requested).

    join: reduces the amaxes of columns with separate scales over the ranks that hold other rows.
    """
    dtype, fp8_max = how.format.dtype, how.format.max
    if how.granularity is Granularity.TENSOR:
        scale = current_scale(x, fp8_max, how.power_of_two)
        if not torch.compiler.is_compiling():
            return cast(x, Quantizer(dtype, fp8_max, scale, columnwise=columnwise)), scale
        q, q_t, scale_inv = cast_scaled(x, scale, dtype, fp8_max, columnwise)
        return of_one_scale(q, q_t if columnwise else None, scale_inv), scale
    if how.granularity is Granularity.ROW:
        along, across = rows(x, dtype, fp8_max, rowwise=rowwise, columnwise=columnwise, join=join)
    else:
        high = reference.BLOCK if how.granularity is Granularity.BLOCK_128X128 else 1
        along, across = blocks(x, dtype, fp8_max, high, rowwise=rowwise, columnwise=columnwise)
    chosen = next((each.scale for each in (along, across) if each is not None), None)
    row, column = ((None, None) if each is None else (each.data, each.scale_inv) for each in (along, across))
    return QuantizedTensor(*row, *column), chosen
