"""Adds methods to one module's class, and finds the class that a user or library wrote."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

_MARK = "octavo_derived_from"


def derive(module: nn.Module, members: dict[str, Any], mixins: tuple[type, ...] = ()) -> None:
    """Replace a module's class by a subclass with these members and the same name, which libraries read.

    mixins: further bases, after the module's class.
    """
    base = type(module)
    module.__class__ = type(base.__name__, (base, *mixins), {**members, _MARK: base, "__module__": base.__module__})


def written_class(module: nn.Module) -> type[nn.Module]:
    """The class that a user or library wrote, below the classes that `derive` and FSDP2 have created from it."""
    cls = type(module)
    while _MARK in vars(cls) or FSDPModule in cls.__bases__:
        cls = vars(cls).get(_MARK) or cls.__bases__[-1]
    return cls
