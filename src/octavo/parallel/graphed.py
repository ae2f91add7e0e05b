"""Forward and backward as one CUDA graph, for models whose kernels finish faster than Python launches them.

A step of ViT-Huge launches some two thousand kernels; a graph launches all of them at once, with the captured addresses. The
optimizer is not part of the graph, so any optimizer, clipping and schedule can follow. With a group NCCL's reductions of
gradients are in the graph, overlapping the backward (`octavo.parallel.averaging`). Amaxes of delayed scaling, of forward and
backward together, are joined where the backward ends, which is inside the graph too.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from octavo.errors import InputError, warn
from octavo.fp8.buffers import ScaleBuffer, updates_together
from octavo.kernels.algorithms import without_collectives
from octavo.parallel.averaging import Average
from octavo.parallel.torch_clipping import is_of_tensor_rank

WARM_UP = 3
"""Eager calls before the capture, in which kernels are chosen and compiled and FP8 histories are created."""

_Recorded = tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Tensor, list[Tensor | None]]
"""A graph with its static inputs, its loss and the parameters' gradients, which it sets or adds to."""
_Kinds = list[tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each input."""


class Graphed:
    """Calls `loss(*inputs)` and its backward, eagerly at first and then as a recorded graph; see `graphed`.

    after: the callable of a step's first micro-batch; this one runs later micro-batches and adds to its gradients. Both share
    memory.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        parameters: list[Tensor],
        warmup: int,
        group: dist.ProcessGroup | None,
        *,
        after: Graphed | None = None,
    ) -> None:
        self._loss, self._parameters, self._left, self._after = loss, parameters, warmup, after
        self._trained = [parameter.requires_grad for parameter in parameters]
        self._average = None if group is None else Average(parameters, group)
        self._stream = torch.cuda.Stream() if any(parameter.is_cuda for parameter in parameters) else None
        if after is not None:  # gradients accumulate on the stream that set them
            self._stream = after._stream
        self._recorded: _Recorded | None = None
        self._kinds: _Kinds | None = None  # of the captured call; also checked on a CPU
        self._scales: set[ScaleBuffer] = set()  # buffers that the calls update
        self._addresses: list[int] = []  # of the memory that the graph reads and writes, from the capture on
        self._checked = False
        self._walks = 0 if any(map(_is_shard, parameters)) else 2  # shards are gathered to separate leaves
        self._first_leaves: set[Tensor] = set()  # leaves of the first call other than the parameters

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The detached loss of this rank; gradients are in the parameters' `grad`. The next call may overwrite both."""
        self._check_parameters()
        _check_inputs(inputs, self._stream is not None)
        if self._left:
            loss = self._warm_up(inputs)
            self._left -= 1  # not reached by a failed call
            return loss
        kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]
        if self._kinds not in (None, kinds):
            itself = "" if self._average is not None else ", or call the loss itself for it"  # which averages nothing
            raise InputError(
                f"a graphed step was recorded with inputs of {self._kinds} and got {kinds}: drop the last, smaller batch "
                f"(drop_last=True){itself}."
            )
        if self._stream is None:
            loss = self._eager(*inputs)
        elif any(buffer.holds_graphs for buffer in self._scales) or not self._adds_to_a_replay():
            loss = self._warm_up(inputs)
        else:
            loss = self._replay(inputs)
        self._kinds = kinds
        return loss

    def _check_parameters(self) -> None:
        """Refuse gradients of an earlier call, and parameters that were frozen or unfrozen since."""
        if self._after is None and any(parameter.grad is not None for parameter in self._parameters):
            raise InputError(
                "a graphed step overwrites gradients and adds to none: call optimizer.zero_grad(set_to_none=True) before it."
            )
        for parameter, trained in zip(self._parameters, self._trained, strict=True):
            if parameter.requires_grad != trained:
                was, now = ("trained", "frozen") if trained else ("frozen", "trained")
                raise InputError(
                    f"a parameter of shape {tuple(parameter.shape)} was {was} when octavo.graphed was called and is {now} now, "
                    "and a graph repeats its recording: call octavo.graphed anew, after requires_grad_."
                )

    def _adds_to_a_replay(self) -> bool:
        """True if gradients are those of the first graph's replay, to which a recording adds; True for the first."""
        if self._after is None:
            return True
        recorded = self._after._recorded
        return recorded is not None and all(
            parameter.grad is gradient for parameter, gradient in zip(self._parameters, recorded[3], strict=True)
        )

    def _warm_up(self, inputs: tuple[Tensor, ...]) -> Tensor:
        if self._stream is None:
            return self._eager(*inputs)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # the stream of the recording, so that libraries prepare it
            loss = self._eager(*inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _replay(self, inputs: tuple[Tensor, ...]) -> Tensor:
        if self._recorded is None or self._addresses != self._addresses_now():  # the old graph has the old addresses
            self._recorded = None
            self._recorded = self._record(inputs)
            self._addresses = self._addresses_now()
        graph, static_inputs, loss, gradients = self._recorded
        for static, given in zip(static_inputs, inputs, strict=True):
            static.copy_(given, non_blocking=True)
        graph.replay()
        if self._after is None:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
        if self._average is not None and not self._average.recordable:
            self._average.reduce()
        return loss

    def _addresses_now(self) -> list[int]:
        """Addresses of parameters, FP8 scales and accumulated gradients; shards are gathered into other memory anyway."""
        whole = (parameter for parameter in self._parameters if not isinstance(parameter, DTensor))
        scales = (tensor for buffer in self._scales for tensor in (buffer.scale, buffer.history))
        added = [] if self._after is None else [p.grad for p in self._parameters if p.grad is not None]
        return [tensor.data_ptr() for tensor in (*whole, *scales, *added)]

    def _eager(self, *inputs: Tensor, average: bool = True) -> Tensor:
        with updates_together() as update:
            loss = self._forward(*inputs)
            with contextlib.nullcontext() if self._average is None or not average else self._average.of_backward(update):
                loss.backward()
        self._scales |= update.buffers
        return loss.detach()

    def _forward(self, *inputs: Tensor) -> Tensor:
        """Compute the loss; refuse one that a graph cannot repeat."""
        with contextlib.ExitStack() as around:
            if not self._checked:
                around.enter_context(_refusing_ddp())
            if self._average is not None:  # which reduces only during the backward
                around.enter_context(without_collectives())
            loss = self._loss(*inputs)
        if not self._checked:
            _check_loss(loss)
        self._checked = True
        if self._walks:
            self._check_leaves(loss)
        return loss

    def _check_leaves(self, loss: Tensor) -> None:
        """Refuse a loss that trains leaves other than the parameters: a replay would neither average nor set their gradients.

        The loss may create a leaf that is no `torch.nn.Parameter` in each call: such a leaf is refused in the second call.
        Reentrant checkpoints hide their leaves.
        """
        known = set(self._parameters)
        others = [leaf for leaf in _leaves(loss) if leaf not in known]
        if strange := [leaf for leaf in others if isinstance(leaf, torch.nn.Parameter) or leaf in self._first_leaves]:
            raise InputError(
                f"the loss trains {len(strange)} tensors that are not among the {len(self._parameters)} parameters of "
                f"octavo.graphed, the first of shape {tuple(strange[0].shape)}; their gradients would not be averaged, nor set "
                "by a replay. Give it all of them (model.parameters()), or freeze these (requires_grad_(False))."
            )
        self._walks -= 1
        self._first_leaves = set(others) if self._walks else set()

    def _record(self, inputs: tuple[Tensor, ...]) -> _Recorded:
        static_inputs = tuple(tensor.detach().clone() for tensor in inputs)
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # garbage collection during a capture may free an earlier graph, which ends the capture
        # NCCL's watchdog thread queries events of earlier collectives at any time, which ends a recording in the mode "global".
        several = dist.is_available() and dist.is_initialized()
        pool = None if self._after is None or self._after._recorded is None else self._after._recorded[0].pool()
        mode = "thread_local" if several else "global"
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode=mode):
            loss = self._eager(*static_inputs, average=self._average is not None and self._average.recordable)
        return graph, static_inputs, loss, [parameter.grad for parameter in self._parameters]


def _leaves(loss: Tensor) -> list[Tensor]:
    """Leaf tensors of a loss, in the order of a traversal of its graph."""
    left: list[Any] = [get_gradient_edge(loss).node]
    found, seen = [], set()
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.append(node.variable)
        left += [following for following, _ in node.next_functions if following is not None]
    return found


def _is_shard(parameter: Tensor) -> bool:
    """True for a parameter of FSDP2, and of FSDP1, which marks those that it has flattened."""
    return isinstance(parameter, DTensor) or getattr(parameter, "_fsdp_flattened", False)


def _check_inputs(inputs: tuple[object, ...], on_gpu: bool) -> None:
    """Refuse inputs that a recording would not repeat."""
    for number, tensor in enumerate(inputs):
        if not isinstance(tensor, Tensor):
            raise InputError(
                f"input {number} of a graphed step is {type(tensor).__name__}, and a graph repeats the value at its recording: "
                "give tensors, and put constants into the loss function."
            )
        if tensor.requires_grad:
            raise InputError(
                f"input {number} of a graphed step, of shape {tuple(tensor.shape)}, requires a gradient, which a replay does "
                "not set: give its .detach(), or add it to the parameters."
            )
        if on_gpu and not tensor.is_cuda:
            raise InputError(
                f"input {number} of a graphed step is on {tensor.device}, and a graph repeats only the GPU's work: give "
                "tensors on the GPU, .to(device, non_blocking=True)."
            )


def _check_loss(loss: object) -> None:
    """Refuse a result of the loss that has no backward."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__}, not a tensor"
        raise InputError(f"octavo.graphed got {kind} from the loss: return one number, such as loss.mean().")
    if not loss.requires_grad:
        raise InputError(
            "octavo.graphed got a loss without a gradient: call it outside of torch.no_grad(), with a parameter that is not "
            "frozen, and return the loss itself, not loss.detach()."
        )


@contextlib.contextmanager
def _refusing_ddp() -> Iterator[None]:
    """Refuse the forward of a DistributedDataParallel inside, before it computes or communicates.

    Its forward is replaced meanwhile: a global module hook would make compiled modules compile twice.
    """

    def refuse(*_: object, **__: object) -> None:
        raise InputError(
            "octavo.graphed got a loss of a DistributedDataParallel model, whose reducer counts calls that a graph does not "
            "repeat: call the model inside it (model.module), and average with octavo.graphed(loss, parameters, "
            "group=torch.distributed.group.WORLD)."
        )

    forward = DistributedDataParallel.forward
    DistributedDataParallel.forward = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel.forward = forward  # type: ignore[method-assign]


def graphed(
    loss: Callable[..., Tensor],
    parameters: Iterable[Tensor],
    *,
    warmup: int = WARM_UP,
    group: dist.ProcessGroup | None = None,
) -> Graphed:
    """`loss(*inputs)` and its backward as one callable; on a GPU a CUDA graph after `warmup` eager calls.

        step = octavo.graphed(loss, model.parameters())
        for images, labels in loader:
            step(images, labels)          # as loss(images, labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        loss: a function of tensors (on the GPU if the parameters are) that returns a scalar. It may enter `fp8_autocast` and
            `torch.autocast`. It must not synchronise with the device (`.item()`, printing a tensor), and its Python code does
            not run after the capture.
        parameters: all that the loss trains; a call sets their `grad`. They are updated in place, and stay frozen or not. If
            one gets other memory (`parameter.data = …`), the next call records anew.
        warmup: eager calls before the capture; steps like any other.
        group: ranks with a replica of the model each, over which every call averages gradients, as DistributedDataParallel
            does: `torch.distributed.group.WORLD`. Parameters take the first rank's values at once. All ranks make the same
            calls. None: gradients are this rank's.

    After `warmup` calls, inputs must have the same shapes and dtypes. Each call gives the same numbers as an eager one. While
    an FP8 operand has no scale yet (under delayed scaling, if its amaxes were 0 or not finite), calls stay eager; a warning
    names operands without a scale after 10 calls. On a CPU all calls are eager, and the same inputs are refused.

    With a group, buffers are not broadcast as in DistributedDataParallel: `graphed` knows only the parameters. Statistics of
    batch norm stay separate on each rank. Before the first step, and before a validation or a checkpoint of them:

        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)

    On several ranks `fp8_autocast` reduces amaxes over its `fp8_group` inside the recording, which needs NCCL. NCCL also
    reduces gradients inside the recording, overlapping the backward; other backends reduce them after it. NCCL does not destroy
    a process group while a graph holds its collectives: delete the callable before `torch.distributed.destroy_process_group()`.

    Raises:
        InputError: `loss` is not callable; no parameters, or all are frozen, or they are on several devices; `group` is not a
            process group, or is combined with sharded parameters. From a call: gradients left from the previous call; inputs
            that are not tensors, require gradients or have other shapes or dtypes; a parameter without a gradient to average,
            or frozen or unfrozen since; a loss that calls a DistributedDataParallel, is not a scalar, has no gradient or trains
            other parameters too.
    """
    if type(warmup) is not int or warmup < 1:
        raise InputError(f"warmup = {warmup}: at least 1 call must run before one is recorded (usual: {WARM_UP}).")
    parameters = list(parameters)
    tensors = all(isinstance(parameter, Tensor) and parameter.is_leaf for parameter in parameters)  # views are not leaves
    if not callable(loss) or not parameters or not tensors:
        raise InputError("octavo.graphed takes a function of the loss, and parameters: graphed(loss, model.parameters()).")
    if not any(parameter.requires_grad for parameter in parameters):
        raise InputError(
            f"octavo.graphed: all {len(parameters)} parameters are frozen, and a call sets only their gradients: give "
            "those that the loss trains, such as model.parameters(), or unfreeze some (requires_grad_())."
        )
    devices = {parameter.device.type for parameter in parameters}
    if "cuda" in devices and len(devices) > 1:
        raise InputError(
            f"octavo.graphed: parameters are on {' and '.join(sorted(devices))}, and a graph repeats only the GPU's work: "
            "move the model to one device, model.to('cuda')."
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"octavo.graphed: group = {group!r} is not a process group that this rank has joined: give "
            "torch.distributed.group.WORLD after torch.distributed.init_process_group."
        )
    if any(map(is_of_tensor_rank, parameters)):
        raise InputError(
            "octavo.graphed: these parameters are parts of a tensor-parallel model, whose collectives a graph does not record. "
            "Call the loss itself, or set tensor_parallel_degree = 1."
        )
    if group is not None and any(map(_is_shard, parameters)):
        raise InputError(
            "octavo.graphed averages gradients of whole replicas, and these parameters are shards, whose gradients are reduced "
            "in the backward: leave group out, or leave octavo.init out to train replicas."
        )
    ranks = os.environ.get("WORLD_SIZE", "1")
    if group is None and ranks != "1" and not (dist.is_available() and dist.is_initialized()):
        warn(  # torch.distributed.group.WORLD is None then
            f"octavo.graphed averages no gradients: group = None, and this is one of {ranks} ranks without a process group. "
            "Call torch.distributed.init_process_group() before, and give group=torch.distributed.group.WORLD."
        )
    return Graphed(loss, list(dict.fromkeys(parameters)), warmup, group)
