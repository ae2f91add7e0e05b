"""`apply_activation_checkpointing` on a transformed model: maps a script's choice of layers to Octavo's blocks.

SMP leaves the decoder layers of MoE models in place, so scripts choose classes such as MixtralDecoderLayer. Octavo recomputes
the blocks that replace them. A choice that matches nothing is logged: otherwise only the memory in use would show it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

from octavo.compat.changes import Changes, copy_of
from octavo.compat.notices import say_once
from octavo.compat.smp.state_dicts import sharded_in
from octavo.compat.smp.transform import transformed
from octavo.nn.block import TransformerLayer


def apply(changes: Changes) -> None:
    """Replace PyTorch's function by one that finds the blocks of transformed models."""
    theirs = copy_of(wrappers.apply_activation_checkpointing)

    @functools.wraps(wrappers.apply_activation_checkpointing)
    def chosen(
        model: nn.Module,
        checkpoint_wrapper_fn: Any = wrappers.checkpoint_wrapper,
        check_fn: Callable[[nn.Module], bool] = lambda _: True,
        auto_wrap_policy: Any = None,
    ) -> None:
        if not sharded_in(model) or auto_wrap_policy is not None:
            return theirs(model, checkpoint_wrapper_fn, check_fn, auto_wrap_policy)
        layers = [layer for sharded in sharded_in(model) if (noted := transformed(sharded.module)) for layer in noted.layers]
        taken = False

        def named(part: nn.Module) -> bool:
            nonlocal taken
            selected = bool(check_fn(part))
            taken |= selected
            return selected

        def in_its_place(part: nn.Module) -> bool:
            nonlocal taken
            selected = isinstance(part, TransformerLayer) and any(_takes(check_fn, layer) for layer in layers)
            taken |= selected
            return selected

        # Each module once, in order: check_fn may count its calls, for example to select every second layer.
        for choice in (named, in_its_place):
            theirs(model, checkpoint_wrapper_fn, choice)
            if taken:
                return None
        say_once(
            "apply_activation_checkpointing",
            "apply_activation_checkpointing: check_fn selects no module of the transformed model, so nothing is recomputed. "
            "Blocks are torch.sagemaker.tensor_parallel.transformer.TransformerLayer.",
        )
        return None

    changes.redirect(wrappers.apply_activation_checkpointing, chosen)


def _takes(check_fn: Callable[[nn.Module], bool], layer: type[nn.Module]) -> bool:
    """True if check_fn selects a class that the blocks have replaced; False if it reads attributes of instances."""
    empty = layer.__new__(layer)
    nn.Module.__init__(empty)
    with contextlib.suppress(AttributeError):
        return bool(check_fn(empty))
    return False
