"""Context parallelism for scripts that split sequences themselves, as SMP's examples do: their slices are gathered.

Octavo's decoder takes whole sequences, shifts the labels, and splits afterwards. SMP's takes each rank's two chunks of tokens
and labels (chunks r and 2n−1−r of 2n), with wrong targets at the boundaries. So the ranks of a sequence gather the slices: only
token ids, labels and the like. Inputs that are equal on all ranks are whole sequences. The first forward decides which of both
a script passes; a later forward with the other is refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octavo.collectives.context import ContextGroup, in_order
from octavo.errors import InputError

SEQUENCES = ("input_ids", "labels", "position_ids", "attention_mask")
"""Arguments of a forward with a token dimension, by position too."""
_ORDER = ("input_ids", "attention_mask", "position_ids", "labels")


def join_inputs(model: nn.Module, context: ContextGroup) -> None:
    """Register a hook by which a decoder under context parallelism accepts slices of sequences."""
    model.register_forward_pre_hook(_Joined(context), prepend=True, with_kwargs=True)


class _Joined:
    def __init__(self, context: ContextGroup) -> None:
        self.context = context
        self.parts: bool | None = None

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        arguments = {**dict(zip(_ORDER, args, strict=False)), **kwargs}
        tensors = {name: arguments[name] for name in SEQUENCES if isinstance(arguments.get(name), Tensor)}
        if not tensors:
            return args, kwargs
        same = bool(self.context.same(*tensors.values()))
        if self.parts is None:
            self.parts = not same
        elif same and self.parts and not _constant(tensors["input_ids"]):
            raise InputError(
                "the ranks of each sequence were given parts of it before, and the same tokens now: give all of them either "
                "the whole sequences or each rank's two chunks, in every forward."
            )
        elif not same and not self.parts:
            raise InputError(
                "the ranks of each sequence were given whole sequences before, and different tokens now: give all of them "
                "either the same whole sequences or each rank's two chunks, in every forward."
            )
        if not self.parts:
            return args, kwargs
        joined = {name: self._whole(tensor) for name, tensor in tensors.items()}
        return (), {**arguments, **joined}

    def _whole(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.context.size)]
        dist.all_gather(parts, x.contiguous(), group=self.context.group)
        return in_order(parts, 1)


def _constant(x: Tensor) -> bool:
    return bool((x == x.flatten()[0]).all())
