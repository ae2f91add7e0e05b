"""Transformer Engine's `FP8GlobalStateManager`, for libraries that query it: answers come from this process's autocasts.

Scales and histories belong to layers in Octavo, so there is no global state to reset, reduce or copy.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from octavo.compat.missing import MissingName, way_of
from octavo.compat.te import autocast
from octavo.compat.te.recipes import Recipe
from octavo.errors import InputError

_SCALES = "octavo.fp8.inspect(module) shows scales and histories, which belong to layers."
WAYS = dict.fromkeys(
    [
        "add_fp8_tensors_to_global_buffer",
        "reduce_and_update_fp8_tensors",
        "copy_forward_fp8_meta_tensors_for_recompute",
        "get_old_fp8_meta_tensors_for_recompute",
        "restore_fp8_meta_tensors",
        "global_amax_buffer",
        "global_amax_history_buffer",
        "global_scale_buffer",
        "get_fp8_autocast_state",
        "set_fp8_autocast_state",
        "get_autocast_state",
        "set_autocast_state",
        "fp8_autocast_enter",
        "fp8_autocast_exit",
        "autocast_enter",
        "autocast_exit",
        "is_first_fp8_module",
        "quantization_state",
        "get_key_in_buffer",
        "get_buffer_info",
        "set_skip_fp8_weight_update_tensor",
        "get_skip_fp8_weight_update_tensor",
    ],
    _SCALES,
)
"""Absent attribute → the remedy."""


class _Manager(type):
    def __getattr__(cls, name: str) -> Any:
        if name in WAYS:
            raise MissingName(way_of(f"FP8GlobalStateManager.{name}", WAYS))
        raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")


class FP8GlobalStateManager(metaclass=_Manager):
    """The state of the innermost autocast, by class methods."""

    @classmethod
    def reset(cls) -> None:
        """No effect: there is no global state.

        Raises:
            InputError: within an autocast: Transformer Engine would turn FP8 off for the rest of the context.
        """
        if autocast.innermost() is not None:
            raise InputError(
                "FP8GlobalStateManager.reset() within fp8_autocast: leave the context first, or enter one with enabled=False."
            )

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """True in an autocast that is enabled."""
        current = autocast.innermost()
        return current is not None and current.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """True in an autocast that calibrates."""
        current = autocast.innermost()
        return current is not None and current.calibrating

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The recipe of the innermost autocast, the default one outside."""
        current = autocast.innermost()
        return autocast.get_default_recipe() if current is None or current.recipe is None else current.recipe

    @classmethod
    def get_fp8_group(cls) -> dist.ProcessGroup | None:
        """The ranks over which the innermost autocast reduces amaxes; None: all."""
        current = autocast.innermost()
        return None if current is None else current.group

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """False: parameters are stored in `params_dtype`."""
        return False

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """False: the parameters themselves are in high precision."""
        return False

    is_fp8_available = staticmethod(autocast.check_fp8_support)
    is_fp8_block_scaling_available = staticmethod(autocast.check_fp8_block_scaling_support)
    is_mxfp8_available = staticmethod(autocast.check_mxfp8_support)
    is_nvfp4_available = staticmethod(autocast.check_nvfp4_support)
