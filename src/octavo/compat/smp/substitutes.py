"""Replacements for parts of other packages that published SMP scripts need and this machine lacks; each use is logged once.

* The process-group backend "smddp" of SageMaker's containers is NCCL, or gloo without GPUs.
* `attn_implementation="flash_attention_2"` of transformers without flash-attn becomes its default: transformed models use
  Octavo's attention kernels anyway, and other models PyTorch's.
* `num_key_value_heads=None` in Mistral's and Mixtral's configurations, the default of AWS's script, means the number of
  attention heads, as in transformers 4; version 5 refuses it. Not logged.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import Backend

from octavo.compat.changes import Changes
from octavo.compat.notices import say_once

_SMDDP = re.compile(r"(\w+:)?\bsmddp\b", re.IGNORECASE)
_FLASH = re.compile(r"flash_attention_\d")


def apply() -> Callable[[], None]:
    """Make "smddp" a backend, unless its package has registered it; returns the function that undoes this."""
    changes = Changes()
    if not hasattr(Backend, "SMDDP") and not getattr(Backend.__new__, "octavo", False):
        changes.set(Backend, "__new__", staticmethod(_with_smddp(Backend.__new__)))
    return changes.undo


def _with_smddp(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def new(cls: type, name: Any) -> Any:
        if isinstance(name, str) and _SMDDP.search(name) and not hasattr(Backend, "SMDDP"):
            name = _SMDDP.sub(_instead, name)
            say_once("smddp", f'backend "smddp" belongs to SageMaker\'s containers: {name} is used instead.')
        return theirs(cls, name)

    new.octavo = True  # type: ignore[attr-defined]
    return new


def _instead(match: re.Match[str]) -> str:
    device = match[1] or ""
    gpu = torch.cuda.is_available() if not device else device.lower() != "cpu:"
    return f"{device}{'nccl' if gpu else 'gloo'}"


def flash_attention(changes: Changes) -> None:
    """Patch transformers: a request for flash-attn becomes its default if flash-attn is not installed."""
    from transformers.modeling_utils import PreTrainedModel
    from transformers.utils import is_flash_attn_2_available

    theirs: Any = PreTrainedModel._check_and_adjust_attn_implementation

    @functools.wraps(theirs)
    def adjusted(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        asked = isinstance(attn_implementation, str) and _FLASH.fullmatch(attn_implementation)
        if not asked or is_flash_attn_2_available():
            return theirs(self, attn_implementation, *args, **kwargs)
        say_once(
            "flash_attn",
            f'attn_implementation="{attn_implementation}": flash-attn is not installed. Models of transform() compute '
            "attention by Octavo's kernels, others by PyTorch's.",
        )
        return theirs(self, None, *args, **kwargs)

    changes.set(PreTrainedModel, "_check_and_adjust_attn_implementation", adjusted)


def key_value_heads(changes: Changes) -> None:
    """Patch configurations: num_key_value_heads=None becomes num_attention_heads."""
    from transformers import MistralConfig, MixtralConfig

    for config in (MistralConfig, MixtralConfig):
        changes.set(config, "__init__", _with_heads(config.__init__, config().num_attention_heads))


def _with_heads(theirs: Callable[..., None], usual: int) -> Callable[..., None]:
    @functools.wraps(theirs)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("num_key_value_heads", usual) is None:
            kwargs["num_key_value_heads"] = kwargs.get("num_attention_heads", usual)
        theirs(self, *args, **kwargs)

    return init
