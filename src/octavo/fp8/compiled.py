"""Casts in code that PyTorch compiles: delayed scaling, and refusals of the other recipes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.errors import InputError
from octavo.fp8 import autocast, buffers, checkpoints, scaling
from octavo.fp8.first_scale import first_scale
from octavo.fp8.recipe import Operand
from octavo.kernels.quantize.cast import CastResults, cast, fake_results, operator_results
from octavo.kernels.quantize.cast_scaled import amax as amax_of
from octavo.kernels.quantize.quantized import QuantizedTensor, Quantizer, of_one_scale


def cast_delayed(
    x: Tensor, position: Tensor, dtype: torch.dtype, fp8_max: float, record: bool, native: bool, columnwise: bool
) -> QuantizedTensor:
    """Cast x [R, C] in compiled code with the scale of the slot at `position` [2]: rowwise, and optionally columnwise [C, R].

    native: an entry without a scale uses Octavo's first scale (`octavo.fp8.first_scale`).
    """
    q, q_t, scale_inv = _cast_delayed(x, position, dtype, fp8_max, record, native, columnwise)
    return of_one_scale(q, q_t if columnwise else None, scale_inv)


# A compiler gets the position of a slot, not its tensors: as inputs of a graph they would be views of one buffer, one of them
# written, which functionalisation copies and autograd's version counters refuse. Nothing in a graph reads the amax. The
# position is a tensor, because a number would be compiled in, and each layer would be compiled separately.
@torch.library.custom_op("octavo::cast_delayed", mutates_args=())
def _cast_delayed(
    x: Tensor, position: Tensor, dtype: torch.dtype, fp8_max: float, record: bool, native: bool, columnwise: bool
) -> CastResults:
    if not record:
        _refuse_reentrant_checkpoints()
    number, index = position.tolist()
    buffer = buffers.by_number(number)
    buffers.session().used[buffer.owner] = None
    if checkpoints.graph_task() == -1:
        autocast.claim_buffers(buffer.owner)
    if record and buffer in buffer.owner.backward.values():
        buffer.owner.record_gradient()
    elif record and checkpoints.graph_task() == -1:
        buffer.owner.record_forward(training=True)
    amax = buffer.history[0, index] if record else None
    scale = buffer.scale[index]
    session = autocast.session()  # in a recomputation that of its forward
    if session.number < buffer.begun_from[index]:
        state, operand = scaling.owner_of_slot(buffer, index)
        if record:
            scaling.wait_to_begin(state, operand, buffer, index, index, native=native)

        def largest() -> Tensor:
            largest_here = amax_of(x)
            group = state.context_group
            if group is not None and operand is not Operand.WEIGHT and session.joint.covers(group):
                dist.all_reduce(largest_here, dist.ReduceOp.MAX, group=group)
            return largest_here

        scale = first_scale(scale, fp8_max, native=native, partly=False, largest=largest)
    return operator_results(cast(x, Quantizer(dtype, fp8_max, scale, amax, columnwise=columnwise)))


@_cast_delayed.register_fake
def _(
    x: Tensor, position: Tensor, dtype: torch.dtype, fp8_max: float, record: bool, native: bool, columnwise: bool
) -> CastResults:
    return fake_results(x, dtype, columnwise)


def outside_of_checkpoints(q: QuantizedTensor) -> QuantizedTensor:
    """A cast in code compiled without gradients, which is refused when that runs inside a reentrant checkpoint."""
    if q.rowwise_scale_inv is None:
        return q
    return q._replace(rowwise_scale_inv=_outside_of_checkpoints(q.rowwise_scale_inv))


@torch.library.custom_op("octavo::outside_of_checkpoints", mutates_args=())
def _outside_of_checkpoints(scale_inv: Tensor) -> Tensor:
    _refuse_reentrant_checkpoints()
    return scale_inv.clone()


@_outside_of_checkpoints.register_fake
def _(scale_inv: Tensor) -> Tensor:
    return torch.empty_like(scale_inv)


def _refuse_reentrant_checkpoints() -> None:
    """Compiled without gradients a layer records no amax, and its recomputation would run outside of the autocast."""
    if not torch.is_grad_enabled() and checkpoints.graph_task() == -1 and checkpoints.trains():
        raise InputError(
            "a compiled layer inside a reentrant checkpoint: use use_reentrant=False with "
            "context_fn=octavo.fp8.autocast.recomputing, or compile nothing there."
        )
