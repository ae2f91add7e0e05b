"""Gradients of parameters that tensor ranks replicate: norms, biases of row-parallel products, routers, adapters' factors.

Each rank reads them for its tokens, so its gradient is a partial sum. One autograd function before the model's forward returns
all of them; its backward runs last and sums all gradients by one all-reduce. With shards, FSDP2 reduces a block's gradients
after its backward: then each block has such a function. A parameter that is read outside such a forward is summed separately.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from octavo.collectives.blocks import parameters_of
from octavo.collectives.tensor import TensorGroup


def sum_together(model: nn.Module, tensor: TensorGroup, parts: Sequence[nn.Module]) -> None:
    """Register hooks so that each forward of these parts sums the gradients of its replicated parameters together."""
    alike = {parameter for parameter, block in parameters_of(model).items() if block is None or block.is_whole}
    shared_out = [
        module for part in parts for module in part.modules() if module is not part and isinstance(module, FSDPModule)
    ]
    for part in (*parts, *shared_out):  # of those within a block FSDP2 gathers the parameters when they run
        hooks = _Replicated(part, tensor, alike)
        part.register_forward_pre_hook(hooks.begin)
        part.register_forward_hook(hooks.end, always_call=True)


class _Replicated:
    def __init__(self, part: nn.Module, tensor: TensorGroup, alike: set[Tensor]) -> None:
        self._part, self._tensor = weakref.ref(part), tensor
        self._places: list[tuple[weakref.ref[nn.Module], str]] = []
        """Modules and names: FSDP2 exchanges a parameter for the gathered one."""
        seen: set[Tensor] = set()
        for module in part.modules():
            for name, parameter in module._parameters.items():
                if parameter in alike and parameter not in seen:
                    seen.add(parameter)
                    self._places.append((weakref.ref(module), name))
        self._present: list[Tensor] = []

    def begin(self, part: nn.Module, _: object) -> None:
        if torch.is_grad_enabled() and self._part() is part:  # not a copy of it
            self._present = list(self._parameters())
            self._tensor.begin_together(self._present)

    def end(self, *_: object) -> None:
        self._tensor.end_together(self._present)
        self._present = []

    def _parameters(self) -> Iterator[Tensor]:
        for place, name in self._places:
            parameter = None if (module := place()) is None else module._parameters.get(name)
            if parameter is not None and parameter.requires_grad and not isinstance(parameter, DTensor):
                yield parameter
