"""All-gather of one large matrix, such as an embedding or a head, directly into the memory that forward reads.

FSDP2 casts the shards of a group into one buffer, copies that into the buffer of the collective, and copies each parameter out
of it between the kernels of the forward. One matrix sharded by rows needs none of that: each rank casts its rows to their place
in the whole matrix, and the collective fills in those of the others. For an embedding of 8B the last copy alone reads and
writes a GB while forward waits, and the buffer holds a second GB. Groups of several matrices use FSDP2's all-gather: here each
parameter needs a separate collective, which waits for multiprocessors and for the other ranks.

The matrix is allocated on the compute stream, where FSDP2 frees it, so its all-gather starts after all work enqueued there: it
overlaps with the previous part, which prefetches it, and not with earlier ones. An asynchronous `unshard` by the user uses
FSDP2's all-gather.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from octavo.collectives.work import all_gather
from octavo.parallel.fsdp2.adapter import Group, groups_of
from octavo.parallel.fsdp2.sizes import one_is_large


def use(modules: Sequence[FSDPModule], dtype: torch.dtype | None) -> None:
    """Gather the parameters of these modules directly, whenever a group is fit for it.

    dtype: of the all-gather; None: the parameters'.
    """
    for group in groups_of(modules):
        if group.is_sharded and group.ranks.size() > 1:
            group.gather_in_place(_is_fit, _gather, dtype)


def _is_fit(group: Group) -> bool:
    """True if FSDP2 would only cast the shards, and one matrix has nearly all elements; the same on all ranks."""
    parameters = group.parameters
    return one_is_large([each.size.numel() for each in parameters]) and all(each.is_cast_alone for each in parameters)


def _gather(group: Group, wholes: Sequence[Tensor]) -> None:
    """Fill the memory of a group's parameters."""
    ranks = group.ranks
    for parameter, whole in zip(group.parameters, wholes, strict=True):
        shard = parameter.flat_shard
        own = whole.narrow(0, ranks.rank() * shard.numel(), shard.numel())
        own.copy_(shard)
        all_gather(whole, own, group=ranks)
