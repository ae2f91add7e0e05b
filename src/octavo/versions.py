"""The versions of PyTorch, Triton and transformers with which every test of Octavo has passed.

Octavo uses private parts of them, which `tests/contract` lists: another version can lack one, or change it. pip refuses
versions outside these ranges; an environment built by other means may have one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import pkgutil
import re

TESTED = {"torch": ((2, 11), (2, 14)), "triton": ((3, 6), (3, 8)), "transformers": ((5, 14), (5, 24))}
"""Package → the first and the last minor version of the range."""

CALLED = {
    "torch": (
        "torch._C._are_functorch_transforms_active", "torch._C._autograd._get_current_graph_task_keep_graph",
        "torch._C._autograd._top_saved_tensors_default_hooks", "torch._C._current_graph_task_id", "torch._C._get_obj_in_tls",
        "torch._C._is_key_in_tls", "torch._C._stash_obj_in_tls", "torch._C._storage_Use_Count",
        "torch.Tensor._make_subclass", "torch.Tensor._make_wrapper_subclass", "torch.Tensor._version", "torch._foreach_add_",
        "torch._foreach_copy_", "torch._foreach_mul_", "torch._foreach_norm", "torch._fused_sdp_choice", "torch._grouped_mm",
        "torch._scaled_mm", "torch.amp.GradScaler._unscale_grads_",
        "torch.autograd.Variable._execution_engine",
        "torch.autograd.grad_mode._unsafe_preserve_version_counter",
        "torch.distributed._composable_state._module_state_mapping",
        "torch.distributed.checkpoint.state_dict._get_optim_state_dict",
        "torch.distributed.checkpoint.state_dict._load_optim_state_dict",
        "torch.distributed.checkpoint.state_dict._maybe_full_or_cpu_state_dict",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler._unscale_grads_",
        "torch.distributed.tensor.DTensor._local_tensor",
        "torch.distributed.tensor.debug._clear_sharding_prop_cache",
        "torch.distributed.tensor.placement_types._StridedShard", "torch.nn.modules.dropout._DropoutNd",
        "torch.nn.modules.module._has_any_global_hook", "torch.nn.utils.clip_grad._clip_grads_with_norm_",
        "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype", "torch.ops.aten._scaled_dot_product_cudnn_attention",
        "torch.ops.aten._flash_attention_backward", "torch.ops.aten._flash_attention_forward",
        "torch.ops.aten._scaled_dot_product_cudnn_attention_backward",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", "torch.ops.aten._to_copy",
        "torch.ops.aten._unsafe_view", "torch.ops.mkldnn._is_mkldnn_bf16_supported",
        "torch.optim.optimizer._use_grad_for_differentiable", "torch.utils._pytree.tree_leaves",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch.is_in_torch_dispatch_mode",
    ),
    "transformers": (
        "transformers.AutoModelForCausalLM._model_mapping", "transformers.PreTrainedModel._adjust_missing_and_unexpected_keys",
        "transformers.PreTrainedModel._get_dtype_plan", "transformers.PreTrainedModel._init_weights",
        "transformers.PreTrainedModel._hf_peft_config_loaded", "transformers.PreTrainedModel._keys_to_ignore_on_save",
        "transformers.PretrainedConfig._attn_implementation",
        "transformers.PretrainedConfig._experts_implementation",
    ),
}  # fmt: skip
"""Package → private names from `tests/contract` whose absence would fail a training only during or after its steps."""


def requirement(package: str) -> str:
    """Requirement of pip for a tested version, such as "torch>=2.11,<2.15"."""
    first, (major, minor) = TESTED[package]
    return f"{package}>={_text(first)},<{major}.{minor + 1}"


def untested(package: str) -> str | None:
    """A sentence about an installed version outside the range; None if it is inside, or not installed."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    first, last = TESTED[package]
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or first <= (int(match[1]), int(match[2])) <= last:
        return None
    return f"{package} {version} was not tested with Octavo; versions {_text(first)} to {_text(last)} were"


@functools.cache
def lacking() -> str | None:
    """A sentence about an installed package that lacks a name in `CALLED`, with versions that have it; else None."""
    for package, names in CALLED.items():
        for name in names:
            try:
                pkgutil.resolve_name(name)
            except AttributeError:
                return _lacks(package, name)
    return None


def broken(error: BaseException) -> str | None:
    """A sentence about the private name that an import or access did not find; None for other errors."""
    if isinstance(error, ImportError):
        match = re.match(r"cannot import name '(\w+)'", str(error))
        name = f"{error.name}.{match[1]}" if match else str(error.name)
        private = "." in name  # everything that Octavo imports from inside these packages is listed in tests/contract
    elif isinstance(error, AttributeError):
        owner = error.obj if hasattr(error.obj, "__name__") else type(error.obj)
        module = "" if hasattr(owner, "__spec__") else f"{owner.__module__}."
        name = f"{module}{owner.__name__}.{error.name}"
        private = str(error.name).startswith("_")
    else:
        return None
    package = name.partition(".")[0]
    return _lacks(package, name) if private and package in TESTED else None


def _lacks(package: str, name: str) -> str:
    first, last = map(_text, TESTED[package])
    return (
        f"{package} {importlib.metadata.version(package)} has no {name}, which Octavo uses; "
        f"versions {first} to {last} have it: pip install '{requirement(package)}'"
    )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
