"""Reads or refuses the arguments of PyTorch's FullyShardedDataParallel around a transformed model."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from octavo.compat.notices import say_once
from octavo.errors import InputError, unknown
from octavo.nn.norm import FLOATS

_ORDER = list(inspect.signature(FullyShardedDataParallel.__init__).parameters)[2:]  # behind self and module
_NEUTRAL = [
    "auto_wrap_policy",
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "post_param_init_fn",
]
"""Arguments without effect: Octavo always shards block by block, prefetches, and never flattens parameters."""


@dataclass
class Given:
    """The arguments with an effect."""

    sharding_strategy: ShardingStrategy | None = None
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    param_init_fn: Any = None
    device_id: Any = None
    sync_module_states: bool = False


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """The arguments of FullyShardedDataParallel after `module`.

    Raises:
        InputError: an unsupported value, or one of the wrong type.
        TypeError: an argument that PyTorch does not have either.
    """
    if len(args) > len(_ORDER) or (twice := set(_ORDER[: len(args)]) & kwargs.keys()):
        what = f"argument {sorted(twice)[0]!r} twice" if len(args) <= len(_ORDER) else "too many positional arguments"
        raise TypeError(f"FullyShardedDataParallel() got {what}")
    values = {**dict(zip(_ORDER, args, strict=False)), **kwargs}
    _refuse(values.pop("process_group", None), values.pop("cpu_offload", None), values)
    for name in _NEUTRAL:
        values.pop(name, None)
    taken = {name: values.pop(name) for name in list(values) if name in Given.__dataclass_fields__}
    if values:
        raise TypeError(f"FullyShardedDataParallel() got an unexpected keyword argument {next(iter(values))!r}")
    strategy = taken.get("sharding_strategy")
    if strategy is not None and not isinstance(strategy, ShardingStrategy):
        name = str(strategy).rpartition(".")[2].upper()
        if name not in ShardingStrategy.__members__:
            raise unknown("sharding_strategy", str(strategy), ShardingStrategy.__members__)
        raise InputError(f"sharding_strategy={strategy!r} is no ShardingStrategy: give ShardingStrategy.{name}.")
    if taken.get("mixed_precision") is None:
        taken["mixed_precision"] = MixedPrecision()
    _check_precision(taken["mixed_precision"])
    return Given(**taken)


def _refuse(process_group: Any, cpu_offload: Any, values: dict[str, Any]) -> None:
    if process_group is not None and process_group is not dist.group.WORLD:
        raise InputError(
            "FullyShardedDataParallel(process_group=…): the ranks are those of torch.sagemaker.init. Leave it out, and set "
            "hybrid_shard_degree there."
        )
    if getattr(cpu_offload, "offload_params", bool(cpu_offload)):
        raise InputError(
            "FullyShardedDataParallel(cpu_offload=…): parameters are not offloaded. Leave it out; offload_wrapper "
            "offloads activations to host memory."
        )
    for name in ("ignored_modules", "ignored_states", "device_mesh"):
        value = values.pop(name, None)
        empty = value is None or (name != "device_mesh" and isinstance(value, Iterable) and not list(value))
        if not empty:
            raise InputError(f"FullyShardedDataParallel({name}=…) is not supported for a transformed model: leave it out.")


def _check_precision(precision: Any) -> None:
    if not isinstance(precision, MixedPrecision):
        raise InputError(
            f"FullyShardedDataParallel(mixed_precision={precision!r}): give a MixedPrecision of torch.distributed.fsdp."
        )
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(precision, name)
        if dtype not in (None, *FLOATS):
            raise InputError(f"MixedPrecision({name}={dtype}) is not supported: use {', '.join(map(str, FLOATS))}, or None.")
    if precision.keep_low_precision_grads:
        raise InputError("MixedPrecision(keep_low_precision_grads=True): gradients have their parameters' dtype. Leave it out.")
    if precision.buffer_dtype not in (None, torch.float32):
        say_once(
            "buffers", f"MixedPrecision(buffer_dtype={precision.buffer_dtype}): rotary tables and other buffers stay float32."
        )
    if list(precision._module_classes_to_ignore) != list(MixedPrecision()._module_classes_to_ignore):
        say_once(
            "classes",
            "MixedPrecision(_module_classes_to_ignore=…) has no effect on a transformed model: norms, softmax and loss "
            "are computed in float32 anyway.",
        )
