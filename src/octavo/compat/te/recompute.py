"""Transformer Engine's activation checkpointing (`checkpoint`), and its RNG states tracker of tensor-parallel ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint as _checkpoint

from octavo.compat.notices import say_once
from octavo.errors import InputError
from octavo.fp8.autocast import recomputing
from octavo.parallel.world import RngStateTracker


class CudaRNGStatesTracker(RngStateTracker):
    """Named random generators of this process's device."""

    def __init__(self) -> None:
        super().__init__(
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )

    def reset(self) -> None:
        """Remove all generators."""
        self.set_states({})


class _Restored(contextlib.AbstractContextManager[None]):
    """Context of a recomputation: restores the RNG tracker's states of its forward."""

    def __init__(self, tracker: Callable[[], Any]) -> None:
        self._tracker, self._states = tracker, tracker().get_states()

    def __enter__(self) -> None:
        self._now = self._tracker().get_states()
        self._tracker().set_states(self._states)

    def __exit__(self, *exception: Any) -> None:
        self._tracker().set_states(self._now)


def get_activation_recompute_contexts() -> tuple[
    contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]
]:
    """Contexts of a checkpointed forward and of its recomputation: a `context_fn` of PyTorch's `checkpoint`.

    Recomputation uses its forward's scales without these contexts, too.
    """
    return recomputing()


def prepare_te_modules_for_fsdp(fsdp_root: Any) -> None:
    """No effect, logged once: saved activations are not sharded."""
    say_once("prepare_te_modules_for_fsdp", "prepare_te_modules_for_fsdp has no effect: saved activations stay on their rank.")


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, recomputed in backward with the scales and random numbers of its forward.

    Accepts Transformer Engine's arguments: use_reentrant (no effect on the numbers), get_rng_state_tracker,
    distribute_saved_activations and tp_group.

    Raises:
        InputError: `distribute_saved_activations` over several ranks.
    """
    kwargs.pop("use_reentrant", None)
    options = {name: kwargs.pop(name) for name in ("determinism_check", "debug", "early_stop") if name in kwargs}
    user_context = kwargs.pop("context_fn", None)
    distribute = kwargs.pop("distribute_saved_activations", False)
    group = kwargs.pop("tp_group", None)
    tracker = kwargs.pop("get_rng_state_tracker", None) or kwargs.pop("get_cuda_rng_tracker", None)
    kwargs.pop("get_cuda_rng_tracker", None)
    if len(args) > 3 and isinstance(args[0], bool) and (args[1] is None or callable(args[1])) and _is_group(args[2]):
        distribute, tracker, group, args = args[0], args[1], args[2], args[3:]  # positions of version 0.x
    if distribute and group is not None and dist.get_world_size(group) > 1:
        raise InputError(
            "checkpoint(distribute_saved_activations=True) over several ranks: saved activations stay on their rank here. "
            "Set it to False."
        )

    def contexts() -> tuple[Any, Any]:
        pairs = [recomputing()]
        if tracker is not None:
            pairs.append((contextlib.nullcontext(), _Restored(tracker)))
        if user_context is not None:
            pairs.append(user_context())
        forward, recomputation = zip(*pairs, strict=True)
        return _Nested(forward), _Nested(recomputation)

    return _checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **options, **kwargs)


class _Nested(contextlib.AbstractContextManager[None]):
    """Contexts that are entered together; reusable, for several recomputations."""

    def __init__(self, contexts: tuple[Any, ...]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._stack = stack.pop_all()

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)


def _is_group(value: Any) -> bool:
    return value is None or isinstance(value, dist.ProcessGroup)
