"""Forward and backward as one CUDA graph, for models whose kernels finish before Python launches the next.

A step of ViT-Huge launches some two thousand kernels; a graph launches all of them at once, with the addresses of its
recording. The optimizer is not part of the graph, so any optimizer, clipping and schedule can follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from octavo.errors import InputError

WARM_UP = 3
"""Eager calls before the recording, in which kernels are chosen and compiled and FP8 histories are created."""


_Recorded = tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor, list[Tensor | None]]
"""A graph with its inputs, its loss and the gradients of the parameters."""


class Graphed:
    """Calls `loss(*inputs)` and its backward, eagerly at first and then as a recorded graph; see `graphed`."""

    def __init__(self, loss: Callable[..., Tensor], parameters: Iterable[Tensor], warmup: int) -> None:
        self._loss, self._parameters, self._left = loss, list(parameters), warmup
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._recorded: _Recorded | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The detached loss; gradients are in the parameters' `grad`. On a GPU the next call overwrites both."""
        if any(parameter.grad is not None for parameter in self._parameters):
            raise InputError(
                "a graphed step overwrites gradients and adds to none: call optimizer.zero_grad(set_to_none=True) before it."
            )
        if self._stream is None:
            return self._eager(*inputs)
        if self._recorded is None and self._left:
            self._left -= 1
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):  # the stream of the recording, so that libraries prepare it
                loss = self._eager(*inputs)
            torch.cuda.current_stream().wait_stream(self._stream)
            return loss
        if self._recorded is None:
            self._recorded = self._record(inputs)
        graph, own_inputs, loss, gradients = self._recorded
        expected, given = ([(tuple(tensor.shape), tensor.dtype) for tensor in of] for of in (own_inputs, inputs))
        if expected != given:
            raise InputError(
                f"a graphed step was recorded with inputs of {expected} and got {given}: drop the last, smaller batch "
                "(drop_last=True), or call the loss itself for it."
            )
        for own, other in zip(own_inputs, inputs, strict=True):
            own.copy_(other, non_blocking=True)
        graph.replay()
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss

    def _eager(self, *inputs: Tensor) -> Tensor:
        loss = self._loss(*inputs)
        loss.backward()
        return loss.detach()

    def _record(self, inputs: tuple[Tensor, ...]) -> _Recorded:
        own_inputs = [tensor.detach().clone() for tensor in inputs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            loss = self._eager(*own_inputs)
        return graph, own_inputs, loss, [parameter.grad for parameter in self._parameters]


def graphed(loss: Callable[..., Tensor], parameters: Iterable[Tensor], *, warmup: int = WARM_UP) -> Graphed:
    """`loss(*inputs)` and its backward as one callable; on a GPU a CUDA graph after `warmup` eager calls.

        step = octavo.graphed(loss, model.parameters())
        for images, labels in loader:
            step(images, labels)          # as loss(images, labels).backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        loss: takes tensors and returns a scalar. It may open `fp8_autocast` and `torch.autocast`; it must not wait for the
            device (`.item()`, printing a tensor), and its Python code does not run again after the recording.
        parameters: a call sets their `grad`. They keep their memory and are updated in place.
        warmup: eager calls before the recording; steps like any other.

    Inputs keep their shapes and dtypes. Each call gives the same numbers as an eager one. On a CPU all calls are eager.

    Raises:
        InputError: no function or no parameters; from a call with gradients left from the last one, or with inputs of other
            shapes or dtypes.
    """
    if type(warmup) is not int or warmup < 1:
        raise InputError(f"warmup = {warmup}: at least 1 call must run before one is recorded (usual: {WARM_UP}).")
    parameters = list(parameters)
    if not callable(loss) or not parameters or not all(isinstance(parameter, Tensor) for parameter in parameters):
        raise InputError("octavo.graphed takes a function of the loss, and parameters: graphed(loss, model.parameters()).")
    return Graphed(loss, parameters, warmup)
