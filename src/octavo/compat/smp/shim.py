"""Table of the modules and names of SMP version 2 (`torch.sagemaker`) → where Octavo implements them. Loads no torch."""

from __future__ import annotations

from octavo.compat import finder
from octavo.compat.finder import Names, Shim
from octavo.compat.smp import beside

_HERE = "octavo.compat.smp"
_INIT = f"{_HERE}.init"
_CHECKPOINT = f"{_HERE}.checkpoint"
_QUEUE = f"{_HERE}.asynchronous"
_LAYERS = f"{_HERE}.layers"
_FILES = f"{_HERE}.subfolders"

MODULES: dict[str, Names] = {
    "torch.sagemaker": {_INIT: "init is_initialized state", f"{_HERE}.transform": "transform"},
    "torch.sagemaker.state_handler": {_INIT: "state"},
    "torch.sagemaker.delayed_param": {f"{_HERE}.delayed": "DelayedParamIniter"},
    "torch.sagemaker.grad_norm": {f"{_HERE}.utils": "clip_grad_norm_"},
    "torch.sagemaker.logger": {f"{_HERE}.utils": "get_logger"},
    "torch.sagemaker.utils": {},
    "torch.sagemaker.utils.utils": {f"{_HERE}.utils": "timeit"},
    "torch.sagemaker.utils.process_group_utils": {f"{_HERE}.utils": "get_global_ranks"},
    "torch.sagemaker.utils.module_utils": {f"{_HERE}.utils": "empty_module_params move_buffers_to_device"},
    "torch.sagemaker.checkpoint": {},
    "torch.sagemaker.checkpoint.utils": {_FILES: "limit_num_subdirs SORT_BY_LAST_INT"},
    "torch.sagemaker.distributed": {},
    "torch.sagemaker.distributed.checkpoint": {},
    "torch.sagemaker.distributed.checkpoint.filesystem": {
        _CHECKPOINT: "DistributedFileSystemReader DistributedFileSystemWriter"
    },
    "torch.sagemaker.distributed.checkpoint.state_dict_loader": {_CHECKPOINT: "load"},
    "torch.sagemaker.distributed.checkpoint.state_dict_saver": {
        _CHECKPOINT: "save async_save PyTorchDistSaveShardedStrategy",
        _QUEUE: "maybe_finalize_async_calls",
    },
    "torch.sagemaker.distributed.checkpoint.state_dict_utils": {
        f"{_HERE}.state_dicts": "SMStateDictType sm_state_dict_type",
        _CHECKPOINT: "init_optim_state",
    },
    "torch.sagemaker.distributed.checkpoint.async_utils": {_QUEUE: "AsyncCallsQueue"},
    "torch.sagemaker.distributed.fsdp": {},
    "torch.sagemaker.distributed.fsdp.checkpoint": {
        f"{_HERE}.model_checkpoint": "save_model_checkpoint load_model_checkpoint EXPORT_KEY_MODEL EXPORT_KEY_OPTIMIZER "
        "EXPORT_KEY_SCHEDULER EXPORT_KEY_IDENTITY"
    },
    "torch.sagemaker.moe": {},
    "torch.sagemaker.moe.moe_config": {f"{_HERE}.configs": "MoEConfig"},
    "torch.sagemaker.moe.moe_layer": {f"{_HERE}.moe": "MoELayer"},
    "torch.sagemaker.nn": {},
    "torch.sagemaker.nn.attn": {_LAYERS: "FlashSelfAttention FlashGroupedQueryAttention"},
    "torch.sagemaker.nn.huggingface": {},
    "torch.sagemaker.nn.huggingface.llama_flashattn": {_LAYERS: "LlamaFlashAttention"},
    "torch.sagemaker.tensor_parallel": {},
    "torch.sagemaker.tensor_parallel.transformer": {_LAYERS: "TransformerLayer TETransformerLayer TransformerLMHead"},
}

_OFFLOAD = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.offload_wrapper(model) offloads saved activations here."
WAYS = {
    "offload": _OFFLOAD,
    "activation_offloading": _OFFLOAD,
    "context_parallel": "transform(model) splits sequences over the ranks of context_parallel_degree by itself.",
    "DistributedModel": "This is SMP version 1: use torch.sagemaker.transform, and FullyShardedDataParallel around it.",
    "step": "This is SMP version 1: write the loop without it.",
    "setup_transformer_engine_cp_groups": "Leave it out: the attention of a transformed model knows its ranks after init.",
    "torch.sagemaker.checkpoint.constants": "Leave its keys out of the state.",
    "torch.sagemaker.distributed.checkpoint.s3_filesystem": "Give s3:// URLs to save and load, which open them with fsspec.",
    "path_to_file_system": "Give a folder, or a URL for fsspec: DistributedFileSystemReader and -Writer open it.",
    "compute_auto_checkpoint_interval": "Choose the number of steps between saves.",
    "_Interval": "Choose the number of steps between saves.",
    "dp_rank": "Data-parallel ranks are state.rank // (cp_size * tp_size).",
}


SHIM = Shim("torch.sagemaker", "SageMaker's model parallel library", MODULES, WAYS, begin=f"{_HERE}.patches")


def install(*, replace_installed: bool = False) -> None:
    """Give this process SMP's names. The first import of torch.sagemaker also patches PyTorch (`octavo.compat.smp.patches`).

    Args:
        replace_installed: also where SMP is installed.

    Raises:
        InputError: it is installed and may not be replaced, or is already imported.
    """
    finder.install(SHIM, replace=replace_installed)
    for shim in beside.SHIMS:
        finder.install(shim)


def uninstall() -> None:
    """Remove SMP's names from this process and undo the patches of PyTorch."""
    for shim in (SHIM, *beside.SHIMS):
        finder.uninstall(shim)
