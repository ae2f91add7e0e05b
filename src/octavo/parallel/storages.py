"""Counts references to a tensor's storage: a gradient with one owner needs no copy before it is reduced."""

from __future__ import annotations

import torch
from torch import Tensor

SOLE_OWNER = 2
"""`reference_count` of a tensor that shares its memory with no other: one of the tensor, one of the query itself."""


def reference_count(tensor: Tensor) -> int:
    """Number of references to the tensor's memory."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count
