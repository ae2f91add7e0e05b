"""What the hosts of all ranks tell each other, as JSON text over the control group; nothing is pickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from octavo.parallel.world import state


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """A JSON value of each rank, in the order of ranks. `group`: a gloo group of all ranks; the control group when absent."""
    if state.world_size == 1:
        return [value]
    group = group or state.control
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([len(text)])
    sizes = [torch.empty_like(size) for _ in range(state.world_size)]
    dist.all_gather(sizes, size, group=group)
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = text
    texts = [torch.empty_like(padded) for _ in range(state.world_size)]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(bytes(t[: int(n)].tolist())) for t, n in zip(texts, sizes, strict=True)]
