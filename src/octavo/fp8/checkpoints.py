"""Finds the activation checkpoints around a layer, so that a recomputation repeats the casts of its forward.

PyTorch has no public access to a running checkpoint. With `use_reentrant=False` it is in the closure of its saved-tensor hook;
a reentrant one, PyTorch's or another library's, is an autograd function that runs its forward without gradients. Nested
checkpoints are found on Python's call stack, which is read only in backward, without gradients, and at the first layer of a
checkpoint.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction

# The function that holds the generator of a checkpoint with `use_reentrant=False`; from torch 2.14 on `checkpoint` calls it.
_CHECKPOINT = inspect.unwrap(getattr(torch.utils.checkpoint, "_checkpoint_impl", torch.utils.checkpoint.checkpoint)).__code__
if "gen" not in _CHECKPOINT.co_varnames:
    raise AttributeError(f"torch {torch.__version__} runs checkpoints in a way that Octavo does not know")
_BACKWARD = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)


graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the autograd backward running on this thread; -1 outside of a backward."""


def is_nested_backward() -> bool:
    """True in a backward that a reentrant checkpoint starts inside another backward."""
    inner = False
    for frame in _stack():
        if inner and _context(frame, "backward") is not None:
            return True
        inner = inner or frame.f_code in _BACKWARD
    return False


def trains() -> bool:
    """True in a forward with gradients, and in the forward of a reentrant checkpoint with gradients by recomputation."""
    if torch.is_grad_enabled():
        return True
    contexts = (_context(frame, "forward") for frame in _stack())
    return any(context is not None and context.next_functions for context in contexts)


def are_around() -> bool:
    """True in the forward of training, or the recomputation, of a checkpoint."""
    return trains() and bool(enclosing())


has_hooks: Callable[[], object] = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
"""Truthy under saved-tensor hooks, as in every forward with gradients in a checkpoint."""


def pack_hook() -> Any:
    """The innermost saved-tensor hook, which is another function in each pass through a checkpoint; None without one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks else None


def innermost() -> Any:
    """The object that identifies the innermost checkpoint with `use_reentrant=False`, in its forward and recomputation."""
    return _innermost()[0]


def _innermost() -> tuple[Any, bool]:
    """`innermost`, and True in its recomputation."""
    hook = pack_hook()
    pack = getattr(hook, "_torchdynamo_orig_callable", hook)
    names = pack.__code__.co_freevars if hasattr(pack, "__code__") else ()
    cells = dict(zip(names, getattr(pack, "__closure__", None) or (), strict=False))
    if "target_frame_ref" in cells:
        return cells["target_frame_ref"].cell_contents(), True
    return (cells["frame"].cell_contents if "frame" in cells else None), False


def enclosing() -> list[Any]:
    """The objects that identify all checkpoints around this forward, in forward and recomputation, the innermost first."""
    return list(_enclosing())


def recomputed() -> list[Any]:
    """The checkpoints of `enclosing` that are being recomputed; the others run their first forward."""
    return [one for one, is_recomputed in _enclosing().items() if is_recomputed]


def nearest_first() -> Iterator[Any]:
    """The checkpoints of `enclosing`, some twice; the stack is read only as far as the caller iterates."""
    return (one for one, _ in _found() if one is not None)


def _enclosing() -> dict[Any, bool]:
    checkpoints: dict[Any, bool] = {}
    for one, is_recomputed in _found():
        checkpoints.setdefault(one, is_recomputed)
    checkpoints.pop(None, None)
    return checkpoints


def _found() -> Iterator[tuple[Any, bool]]:
    """Each checkpoint around, from the innermost, and True in its recomputation; None between them."""
    yield _innermost()
    for frame in _stack():
        if frame.f_code is _CHECKPOINT:
            generator = getattr(frame.f_locals.get("gen"), "gi_frame", None)
            yield generator.f_locals.get("new_frame") if generator is not None else None, False
        elif frame.f_code.co_name == "unpack_hook" and "frame" in frame.f_code.co_freevars:
            yield frame.f_locals["frame"], True
        else:
            recomputing = _context(frame, "backward")
            yield recomputing or _context(frame, "forward"), recomputing is not None


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _context(frame: FrameType, method: str) -> Any:
    """The context of the autograd function with this method, if the frame runs it."""
    code = frame.f_code
    if code.co_name != method or not code.co_argcount or code.co_varnames[0] == "self":
        return None
    context = frame.f_locals.get(code.co_varnames[0])
    return context if isinstance(context, BackwardCFunction) else None
