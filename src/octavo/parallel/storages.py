"""References to a tensor's storage."""

from __future__ import annotations

import torch
from torch import Tensor

ALONE = 2
"""`uses_of` a tensor that shares its memory with no other: its own, and that of the storage that is asked."""


def uses_of(tensor: Tensor) -> int:
    """Number of references to the tensor's memory."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
