"""`train.graph`: forward and backward of a step's micro-batches as CUDA graphs, with the bits of the eager loop.

The first micro-batch is one graph, which sets the gradients and casts the FP8 weights; all others are replays of a second one,
which adds to them and reads these. Clipping, optimizer, evaluation and checkpoints stay eager. `octavo.plan.graph` refuses the
runs that a recording would not repeat.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from octavo.data.packing import Batch
from octavo.errors import InputError, warn
from octavo.fp8.autocast import microbatch
from octavo.parallel.graphed import WARM_UP, Graphed

LossOf = Callable[[Batch, Tensor], Tensor]
"""The loss of a micro-batch, divided by the targets of the step, an int64 []."""


class StepGraph:
    """Forwards and backwards of whole steps: eager ones at first, and on a CPU; then replays.

    Args:
        model: trained, on one GPU or on the CPU.
        loss_of: of a batch on the model's device.
        device: of the model.
        micro_batches: of each step.
        documents: True if each micro-batch packs documents, whose boundaries follow from its positions on the device.
        required: False if a step that a replay would not repeat may be eager.
    """

    def __init__(
        self, model: nn.Module, loss_of: LossOf, device: torch.device, micro_batches: int, *, documents: bool = False,
        required: bool = True,
    ) -> None:  # fmt: skip
        self._device, self._documents, self._required, self._warned = device, documents, required, False
        self._modules = [(name, module, module.training) for name, module in model.named_modules()]
        parameters: list[Tensor] = list(dict.fromkeys(model.parameters()))
        several = micro_batches > 1
        self._first = Graphed(_loss(loss_of, True if several else None), parameters, WARM_UP, None)
        self._later = Graphed(_loss(loss_of, False), parameters, WARM_UP, None, after=self._first)

    def __call__(self, batches: Sequence[Batch], targets: int) -> Tensor:
        """Set the gradients of a step; returns its loss, float32 []."""
        count = torch.tensor(targets).to(self._device, non_blocking=True)
        total = torch.zeros((), device=self._device)
        for index, batch in enumerate(batches):
            run = self._later if index else self._first
            inputs = batch.input_ids, batch.labels, *((batch.position_ids,) if self._documents else ())
            total += run(count, *(x.to(self._device, non_blocking=True) for x in inputs))
        return total

    def repeats(self) -> bool:
        """True if a replay is the next step. A replay runs no code of Python: it would leave out hooks, and a change of mode.

        Raises:
            InputError: a module has a hook or another mode, and recorded steps are `required`.
        """
        for name, module, training in self._modules:
            hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
            if not hooks and module.training == training:
                continue
            named, modes = name or "the model", ("evaluation", "training")
            change = "has a hook" if hooks else f"was in {modes[training]} mode and is in {modes[module.training]} mode"
            undo = "Remove it" if hooks else "Put it back"
            change = f"{named} {change}, which a replayed graph does not heed"
            if self._required:
                raise InputError(f"train.graph = true: {change}. {undo}, or set train.graph = false.")
            if not self._warned:
                warn(f'train.graph = "auto": {change}: steps are eager, and slower, from here on. {undo} to replay them.')
            self._warned = True
            return False
        return True


def _loss(loss_of: LossOf, first: bool | None) -> Callable[..., Tensor]:
    """The loss of tensors; first: as of `microbatch`, None for the one micro-batch of a step."""

    def loss(targets: Tensor, ids: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
        with contextlib.nullcontext() if first is None else microbatch(first=first):
            return loss_of(Batch(ids, labels, ids if positions is None else positions, ids), targets)

    return loss
