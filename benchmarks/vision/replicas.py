"""Entries of the vision suite: those of one GPU, with a replica of the model on every rank.

Nothing is sharded, as timm's users train: peers stand in DistributedDataParallel with its defaults, Octavo's entries average
gradients inside their CUDA graph. Each rank has other images. One rank has neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.cases import VisionCase
from benchmarks.peers import ENTRIES, SEED, Entry, Training


def build_replica(
    case: VisionCase, device: torch.device, compiled: bool, *, build: Callable[..., Training], seed: int = SEED
) -> Training:
    """The `Training` of `build`, averaged over the ranks of the default process group, if there is one."""
    training = build(case, device, compiled, seed=seed)
    if dist.is_initialized() and dist.group.WORLD is not None:
        training.replicate(dist.group.WORLD)
    return training


def _replica(entry: Entry) -> Entry:
    return dataclasses.replace(entry, build=partial(build_replica, build=entry.build))


REPLICAS: dict[str, Entry] = {
    name: _replica(ENTRIES[name])
    for name in (
        "octavo-delayed", "octavo-bf16", "torch-bf16", "te-bf16", "te-delayed", "te-delayed-flash-attention",
        "te-delayed-block",
    )
}  # fmt: skip
