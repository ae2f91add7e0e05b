"""Groups of parameters that FSDP2 gathers and reduces together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

LARGE_SHARE = 0.9
"""Of a group's elements at least are in its largest parameter."""


def group_of(module: FSDPModule) -> Any:
    """The module's `FSDPParamGroup`; None without parameters of its own."""
    return module._get_fsdp_state()._fsdp_param_group


def make_trainable(group: Any) -> None:
    """Have FSDP2 make the whole parameters of a group outside of inference mode, whatever the mode of the first forward.

    Made in it, as by an evaluation before training, they would be refused by every later forward with gradients.
    """
    for parameter in group.fsdp_params:
        for name in ("init_all_gather_outputs", "init_unsharded_param"):
            setattr(parameter, name, torch.inference_mode(False)(getattr(parameter, name)))


def one_is_large(sizes: Sequence[int]) -> bool:
    """True if one of these numbers of elements is nearly all of them, as of an embedding, or of a head with its norm."""
    return bool(sizes) and max(sizes) >= LARGE_SHARE * sum(sizes)
