"""Classes that `torch.load(weights_only=True)`, the default since PyTorch 2.6, accepts in checkpoints of SMP's scripts.

Besides tensors, SMP's examples `torch.save` a parameter count (a numpy scalar), numpy's random state (with an array), and the
model's config. A local state of PyTorch's FSDP contains ShardedTensors. These classes only hold data, and are listed one by
one; all others stay refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed._shard.sharding_spec.chunk_sharding_spec import ChunkShardingSpec
from torch.distributed.remote_device import _remote_device
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals
from transformers import PretrainedConfig

from octavo.process import process

_SCALAR: Any = np.int64(0).__reduce__()[0]
_SCALARS = (_SCALAR, (_SCALAR, "numpy.core.multiarray.scalar"), (_SCALAR, "numpy._core.multiarray.scalar"))
"""The function that unpickles a numpy scalar, by the names of numpy 1 and 2."""
_RECONSTRUCT: Any = np.zeros(0).__reduce__()[0]
_ARRAYS = (
    np.ndarray,
    _RECONSTRUCT,
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),
    (_RECONSTRUCT, "numpy._core.multiarray._reconstruct"),
)
"""numpy's array, and the function that creates it empty when it is unpickled, by the names of numpy 1 and 2."""
_KINDS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
_DTYPES = (np.dtype, *(type(np.dtype(name)) for name in _KINDS))


_GROUP = ShardedTensor.ProcessGroupState


def _member(owner: Any, name: str) -> Any:
    """`getattr` in pickles of ShardedTensors, which have it for two kinds of attributes."""
    if owner is ShardedTensor and name == _GROUP.__name__:
        return _GROUP
    if owner is MEM_FORMAT_ENCODING and name in MEM_FORMAT_ENCODING.__members__:
        return MEM_FORMAT_ENCODING[name]
    raise pickle.UnpicklingError(f"getattr({owner!r}, {name!r}) is not allowed in a file of weights.")


_SHARDED = (
    ShardedTensor,
    _GROUP,
    ShardedTensorMetadata,
    TensorProperties,
    MEM_FORMAT_ENCODING,
    ShardMetadata,
    Shard,
    ChunkShardingSpec,
    EnumerableShardingSpec,
    _remote_device,
    (_member, "builtins.getattr"),
)


def admit_data() -> Callable[[], None]:
    """Register these classes with `torch.load`; returns the function that removes them and admitted configs."""
    ours = (*_SCALARS, *_ARRAYS, *_DTYPES, *_SHARDED)
    before = get_safe_globals()
    add_safe_globals([one for one in ours if one not in before])

    def undo() -> None:
        remaining = [
            one for one in get_safe_globals() if one in before or (one not in ours and one not in process.safe_configs)
        ]
        clear_safe_globals()
        add_safe_globals(remaining)
        process.safe_configs.clear()

    return undo


def admit_config(config: Any) -> None:
    """Register the class of a config, and of configs in it, with `torch.load`."""
    if not isinstance(config, PretrainedConfig) or type(config) in process.safe_configs:
        return
    process.safe_configs.append(type(config))
    add_safe_globals([type(config)])
    for value in vars(config).values():
        admit_config(value)
