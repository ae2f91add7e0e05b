"""`train.graph`: forward and backward of a step's micro-batches as CUDA graphs, with the numbers of the eager loop.

The first micro-batch is one graph, which sets the gradients and casts the FP8 weights. The others are replays of a second
graph, which adds to the gradients and reads those weights. Clipping, optimizer, evaluation and checkpoints stay eager.
`octavo.plan.graph` refuses runs that a replay would not repeat.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from octavo.data.packing import Batch
from octavo.errors import InputError, warn
from octavo.fp8.autocast import microbatch
from octavo.kernels.autograd import has_hooks
from octavo.parallel.graphed import WARM_UP, Graphed

LossOf = Callable[[Batch, Tensor], Tensor]
"""The loss of a micro-batch, divided by the targets of the step, an int64 []."""


class StepGraph:
    """Forward and backward of whole steps: eager at first and on a CPU, then by replays.

    Args:
        model: trained, on one GPU or on the CPU.
        loss_of: loss of a batch on the model's device.
        device: the model's device.
        micro_batches: number of micro-batches in a step.
        documents: True if micro-batches pack documents, with boundaries given by positions on the device.
        required: True raises for a step that a replay would not repeat; False computes it eagerly.
    """

    def __init__(
        self, model: nn.Module, loss_of: LossOf, device: torch.device, micro_batches: int, *, documents: bool = False,
        required: bool = True,
    ) -> None:  # fmt: skip
        self._device, self._documents, self._required, self._warned = device, documents, required, False
        self._modules = [(name, module, module.training) for name, module in model.named_modules()]
        self._replaced = {name for name, module in model.named_modules() if "forward" in vars(module)}
        self._parameters = [(name, parameter, parameter.requires_grad) for name, parameter in model.named_parameters()]
        self._hooked = {name for name, p, _ in self._parameters if p._backward_hooks or p._post_accumulate_grad_hooks}
        parameters: list[Tensor] = [parameter for _, parameter, _ in self._parameters]
        several = micro_batches > 1
        self._first = Graphed(_loss(loss_of, True if several else None), parameters, WARM_UP, None)
        self._later = Graphed(_loss(loss_of, False), parameters, WARM_UP, None, after=self._first)

    def __call__(self, batches: Sequence[Batch], targets: int) -> Tensor:
        """Set the gradients of a step; returns its loss, float32 []."""
        count = torch.tensor(targets).to(self._device, non_blocking=True)
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        for index, batch in enumerate(batches):
            run = self._later if index else self._first
            inputs = batch.input_ids, batch.labels, *((batch.position_ids,) if self._documents else ())
            total += run(count, *(x.to(self._device, non_blocking=True) for x in inputs))
        return total

    def can_replay(self) -> bool:
        """True if a replay would compute the same as an eager step. A replay runs no Python code, such as hooks.

        Raises:
            InputError: it would not, and replays are `required`.
        """
        change = next(self._changes(), None)
        if change is None:
            self._warned = False
            return True
        what, undo = change
        if self._required:
            raise InputError(f"train.graph = true: {what}, which a replayed graph ignores. {undo}, or set train.graph = false.")
        if not self._warned:
            warn(
                f'train.graph = "auto": {what}, which a replayed graph ignores: steps are eager, and slower. {undo} to replay.'
            )
        self._warned = True
        return False

    def _changes(self) -> Iterator[tuple[str, str]]:
        """Differences from the recording, each with a remedy."""
        for name, module, training in self._modules:
            named, modes = name or "the model", ("evaluation", "training")
            if has_hooks(module):
                yield f"{named} has a hook", "Remove it"
            if module.training != training:
                yield f"{named} was in {modes[training]} mode and is in {modes[module.training]} mode", "Put it back"
            if ("forward" in vars(module)) != (name in self._replaced):
                yield f"the forward of {named} was replaced", "Put it back"
        for name, parameter, trained in self._parameters:
            if parameter.requires_grad != trained:
                yield f"{name} was {'trained' if trained else 'frozen'} and no longer is", "Put it back"
            if (parameter._backward_hooks or parameter._post_accumulate_grad_hooks) and name not in self._hooked:
                yield f"{name} has a hook", "Remove it"
            if parameter.grad is not None:
                yield f"{name} has a gradient before the step", "Set it to None"


def _loss(loss_of: LossOf, first: bool | None) -> Callable[..., Tensor]:
    """The loss as a function of tensors. first: as in `microbatch`; None if a step has one micro-batch."""

    def loss(targets: Tensor, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
        with contextlib.nullcontext() if first is None else microbatch(first=first):
            return loss_of(Batch(ids, labels, ids if positions is None else positions, ids), targets)

    return loss
