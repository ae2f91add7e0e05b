"""SMP's checkpoints of model, optimizer and scheduler at once (`torch.sagemaker.distributed.fsdp.checkpoint`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import optimizer as dcp_optimizer
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

from octavo.compat.smp.checkpoint import DistributedFileSystemReader, load, save
from octavo.compat.smp.init import state
from octavo.compat.smp.utils import get_logger

EXPORT_KEY_MODEL = "model"
EXPORT_KEY_OPTIMIZER = "optimizer"
EXPORT_KEY_SCHEDULER = "scheduler"
EXPORT_KEY_IDENTITY = "identity"


def save_model_checkpoint(
    model: Any,
    state_dict_type: Any,
    save_dir: str,
    sharding_strategy: Any = None,
    checkpointing_pg_metadata: Any = None,
    log: bool = False,
    optimizer: Any = None,
    scheduler: Any = None,
    extra_exports: Mapping[str, Any] | None = None,
) -> None:
    """Write a model in FSDP, its optimizer and scheduler, and other values, to a folder. Collective.

    checkpointing_pg_metadata: (process group, its coordinator, True on the ranks that write); None: one replica writes.
    """
    group, writes = _ranks(model, checkpointing_pg_metadata)
    with Fsdp.state_dict_type(model, state_dict_type):
        values: dict[str, Any] = {EXPORT_KEY_MODEL: model.state_dict()}
        if optimizer is not None:
            values[EXPORT_KEY_OPTIMIZER] = Fsdp.optim_state_dict(model, optimizer)
    if scheduler is not None:
        values[EXPORT_KEY_SCHEDULER] = scheduler.state_dict()
    values[EXPORT_KEY_IDENTITY] = dict(extra_exports or {})
    if writes:
        save(values, checkpoint_id=save_dir, process_group=group)
    if log:
        get_logger().info("Wrote the checkpoint %s", save_dir)


def load_model_checkpoint(
    model: Any,
    state_dict_type: Any,
    checkpoint_dir: str,
    sharding_strategy: Any = None,
    checkpointing_pg_metadata: Any = None,
    log: bool = False,
    optimizer: Any = None,
    scheduler: Any = None,
    extra_imports: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Read a checkpoint of `save_model_checkpoint`: model, optimizer, scheduler and the other values, by the keys above."""
    group, _ = _ranks(model, checkpointing_pg_metadata)
    reader = DistributedFileSystemReader(checkpoint_dir)
    with Fsdp.state_dict_type(model, state_dict_type):
        values: dict[str, Any] = {EXPORT_KEY_MODEL: model.state_dict(), EXPORT_KEY_IDENTITY: dict(extra_imports or {})}
        if scheduler is not None:
            values[EXPORT_KEY_SCHEDULER] = scheduler.state_dict()
        load(values, storage_reader=reader, process_group=group)
        model.load_state_dict(values[EXPORT_KEY_MODEL])
        if optimizer is not None:
            read: Any = dcp_optimizer.load_sharded_optimizer_state_dict  # patched for transformed models
            optimizer_state = read(values[EXPORT_KEY_MODEL], EXPORT_KEY_OPTIMIZER, reader)[EXPORT_KEY_OPTIMIZER]
            optimizer.load_state_dict(Fsdp.optim_state_dict_to_load(model, optimizer, optimizer_state))
    if scheduler is not None:
        scheduler.load_state_dict(values[EXPORT_KEY_SCHEDULER])
    if log:
        get_logger().info("Read the checkpoint %s", checkpoint_dir)
    return {**values, EXPORT_KEY_MODEL: model, EXPORT_KEY_OPTIMIZER: optimizer, EXPORT_KEY_SCHEDULER: scheduler}


def _ranks(model: Any, metadata: Any) -> tuple[Any, bool]:
    """(process group, True if this rank writes)."""
    if metadata is not None:
        return metadata[0], bool(metadata[2])
    return model.process_group, not dist.is_initialized() or state.ranker.get_rep_rank(dist.get_rank()) == 0
