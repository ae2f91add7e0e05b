"""Private parts of PyTorch beside FSDP2, autograd and attention: products, hooks of modules, tensors over ranks, files."""

from __future__ import annotations

import pytest
import torch
from private_names import Name, check
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)  # fmt: skip
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

_FOREACH = "one launch for many tensors; used by the public optimizers and `clip_grad_norm_`, without a public name"
_HOOKS = "detects hooks: a layer with hooks is called instead of being computed by its block; `nn.Module` has no public list"
_LOADING = "detects custom loading or saving: such a model is not rebuilt as a decoder"
_PRODUCT = "FP8 and grouped products with explicit scales and accumulation; `F.scaled_mm` (torch 2.10) lacks some of them"
NAMES = (
    Name(
        "torch._scaled_mm",
        ("kernels/gemm.py", "kernels/algorithms.py", "doctor.py", "benchmarks/kernels/products.py"),
        _PRODUCT,
    ),
    Name("torch._scaled_grouped_mm", ("benchmarks/kernels/grouped.py",), "the peer of Octavo's grouped products"),
    Name("torch._grouped_mm", ("kernels/experts/gemm.py", "benchmarks/plain.py"), _PRODUCT),
    Name("torch._foreach_add_", ("train/adamw.py",), _FOREACH),
    Name("torch._foreach_copy_", ("fp8/buffers.py", "fp8/experts.py", "parallel/averaging.py"), _FOREACH),
    Name("torch._foreach_mul_", ("train/adamw.py", "train/optimizer.py", "parallel/averaging.py"), _FOREACH),
    Name("torch._foreach_norm", ("parallel/shards.py",), _FOREACH),
    Name(
        "torch.ops.aten._unsafe_view",
        ("nn/norm.py", "nn/mlp.py", "collectives/tensor.py"),
        "a result that is no view of a saved tensor",
    ),
    Name("torch.ops.mkldnn._is_mkldnn_bf16_supported", ("kernels/gemm.py",), "whether this CPU has products in bf16"),
    Name("torch.Tensor._make_subclass", ("parallel/deferred_init.py",), "a parameter of a subclass, with its class"),
    Name("torch.Tensor._version", ("fp8/buffers.py",), "whether a tensor was written since"),
    Name("torch.nn.modules.module._has_any_global_hook", ("kernels/autograd.py",), _HOOKS, ()),
    Name("torch.nn.modules.module._IncompatibleKeys", ("compat/smp/state_dicts.py",), "what `load_state_dict` returns"),
    Name(
        "torch.nn.utils.clip_grad._clip_grads_with_norm_",
        ("parallel/torch_clipping.py",),
        "clipping of a tensor rank's parts is refused, however `clip_grad_norm_` was imported",
        ("parameters",),
    ),
    Name(
        "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype",
        ("parallel/torch_clipping.py",),
        "norms of a tensor rank's parts are refused, however `get_total_norm` was imported",
    ),
    *(
        Name(f"torch.distributed.checkpoint.state_dict.{name}", ("parallel/torch_states.py",), why, arguments)
        for name, why, arguments in (
            ("_get_optim_state_dict", "states of a tensor rank's parts are refused", ("model", "optimizers", "info")),
            ("_load_optim_state_dict", "states of a tensor rank's parts are refused", ("model", "optimizers")),
            ("_maybe_full_or_cpu_state_dict", "whole weights are joined out of tensor ranks' parts", ("state_dict", "info")),
        )
    ),
    *(
        Name(
            f"{scaler}._unscale_grads_",
            ("parallel/torch_states.py",),
            "infinities of gradients are joined over all ranks of a tensor-parallel model",
            ("self", "optimizer"),
        )
        for scaler in ("torch.amp.GradScaler", "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler")
    ),
    Name("torch.nn.modules.dropout._DropoutNd", ("models/structure.py",), "the base of every dropout"),
    Name("torch.optim.optimizer._use_grad_for_differentiable", ("train/adamw.py",), "the decorator of `Optimizer.step`"),
    Name(
        "torch.optim.AdamW._init_group",
        ("train/adamw.py",),
        "AdamW's states, so that both read the same `state_dict`",
        ("self", "group"),
    ),
    Name(
        "torch.distributed._composable_state._module_state_mapping",
        ("fp8/columnwise.py",),
        "which modules FSDP2 has sharded",
    ),
    Name(
        "torch.distributed.distributed_c10d._get_default_store",
        ("parallel/calls.py", "watchdog/watchdog.py"),
        "the store of the ranks' rendezvous, for heartbeats concurrent with collectives",
        (),
    ),
    Name(
        "torch.distributed.tensor.debug._clear_sharding_prop_cache",
        ("parallel/world.py",),
        "clears DTensor's cache, which would reuse the mesh of earlier process groups",
        (),
    ),
    Name(
        "torch.distributed.tensor.placement_types._StridedShard",
        ("parallel/shards.py", "collectives/whole.py"),
        "experts that are sharded twice over one dimension",
    ),
    Name(
        "torch.Tensor._make_wrapper_subclass",
        ("collectives/blocks.py",),
        "a tensor of the whole's shape that holds this rank's part, as DTensors are",
    ),
    Name("torch.ops.aten._to_copy", ("collectives/blocks.py",), "`Tensor.to` calls it under `__torch_dispatch__`"),
    Name(
        "torch.distributed.tensor.DTensor._local_tensor",
        ("parallel/deferred_init.py", "parallel/fsdp2/adapter.py"),
        "a shard, without autograd; the tensor itself, which FSDP2 looks at for extensions",
    ),
    Name(
        "torch.distributed.checkpoint.utils._DistWrapper",
        ("compat/smp/patches.py",),
        "collectives of SMP's checkpoints over a group",
    ),
    Name(
        "torch.distributed.checkpoint._fsspec_filesystem.FsspecReader",
        ("compat/smp/checkpoint.py",),
        "SMP's checkpoints at URLs",
    ),
    Name(
        "torch.distributed.checkpoint._traverse.set_element",
        ("compat/smp/checkpoint.py", "compat/smp/plain.py"),
        "nested keys of SMP's checkpoints",
    ),
    Name(
        "torch.distributed.checkpoint.state_dict_saver._save_state_dict",
        ("compat/smp/patches.py",),
        "SMP's scripts call the public functions around it with states of a process group",
        ("state_dict", "storage_writer", "process_group"),
    ),
    Name(
        "torch.distributed.checkpoint.state_dict_loader._load_state_dict",
        ("compat/smp/patches.py",),
        "as `_save_state_dict`",
        ("state_dict", "storage_reader", "process_group"),
    ),
    Name(
        "torch.distributed._shard.sharded_tensor.api.ShardedTensor",
        ("compat/smp/checkpoint.py", "compat/smp/safe_globals.py", "compat/smp/plain.py"),
        "local and sharded states of PyTorch's FSDP1 have shards of this class",
    ),
    Name(
        "torch.distributed.fsdp._shard_utils._create_chunk_sharded_tensor",
        ("compat/smp/plain.py",),
        "shards over a group, as in FSDP1; PyTorch's function for optimizer states creates those of all ranks",
        ("tensor", "rank", "world_size", "num_devices_per_node", "pg"),
    ),
    Name(
        "torch.distributed.remote_device._remote_device",
        ("compat/smp/safe_globals.py",),
        "where a shard is, in files that an older PyTorch wrote",
    ),
    Name(
        "torch.distributed.fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2",
        ("compat/smp/fsdp.py",),
        "a strategy that SMP's scripts name",
    ),
    Name(
        "torch.utils._pytree.tree_leaves",
        ("parallel/module_init.py", "train/nonfinite.py"),
        "tensors in nested results",
        ("tree",),
    ),
    Name("torch.utils._pytree.tree_map", ("compat/smp/checkpoint.py",), "tensors in nested states", ("func", "tree")),
    Name(
        "torch.utils._python_dispatch._get_current_dispatch_mode",
        ("compat/te/state.py",),
        "whether deferred initialisation records a method's writes",
        (),
    ),
    Name(
        "torch.utils._python_dispatch.TorchDispatchMode",
        ("parallel/module_init.py",),
        "random draws of a module's initialisation",
    ),
)
ATTRIBUTES = {
    "_forward_hooks": _HOOKS, "_forward_pre_hooks": _HOOKS, "_backward_hooks": _HOOKS, "_backward_pre_hooks": _HOOKS,
    "_state_dict_hooks": _LOADING, "_state_dict_pre_hooks": _LOADING, "_load_state_dict_pre_hooks": _LOADING,
    "_load_state_dict_post_hooks": _LOADING, "_non_persistent_buffers_set": _LOADING,
    "_compiled_call_impl": "a compiled block is recomputed as a whole: its graphs save other tensors",
}  # fmt: skip
"""Of an `nn.Module`."""
OTHERS = {
    "_cdata": "the address of a storage: do two tensors share memory",
    "_cuda_getCurrentRawStream": "the current stream without an object around it, for cuBLASLt by ctypes; in builds with CUDA",
    "_schema": "of an operator: which arguments are outputs, under `TorchDispatchMode`",
    "_post_accumulate_grad_hooks": "the hooks of the public `register_post_accumulate_grad_hook`",
    "_flat_param": "FSDP1's flat parameter of a module, by its name in a state dict",
    "_use_orig_params": "whether FSDP1 exposes a module's parameters besides the flat one",
    "_process_group": "the ranks of a `ShardedTensor`",
    "_fsdp_flattened": "PyTorch's FSDP marks parameters by it",
    "_fsdp_use_orig_params": "PyTorch's FSDP sets it on a module, which a sharded one refuses with the reason",
    "_ddp_params_and_buffers_to_ignore": "DDP looks for it on a module, which a sharded one refuses with the reason",
    "_checkpoint_wrapped_module": "the module in PyTorch's checkpoint wrapper",
    "_module_classes_to_ignore": "of PyTorch's `MixedPrecision`: refused unless it is empty",
    "_reset_parameters": "`nn.MultiheadAttention`'s equivalent of `reset_parameters`",
    "_torchdynamo_orig_callable": "the function in a wrapper of torch.compile",
}
"""Attributes of other objects."""


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_name(name):
    check(name)


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_attribute_of_a_module(attribute):
    assert hasattr(nn.Linear(1, 1), attribute)


def test_attributes_of_other_objects():
    assert nn.MultiheadAttention(2, 1)._reset_parameters
    x = torch.empty(2)
    assert x.untyped_storage()._cdata == x[1:].untyped_storage()._cdata != torch.empty(2).untyped_storage()._cdata
    parameter = nn.Parameter(torch.ones(1))
    calls = []
    parameter.register_post_accumulate_grad_hook(calls.append)
    (parameter * 1).sum().backward()
    assert calls == [parameter]
    assert list(parameter._post_accumulate_grad_hooks.values()) == [calls.append]
    assert torch.ops.aten.add_.Tensor._schema.arguments[0].alias_info.is_write


class InChunks(torch.Tensor):
    """Rows 4 and 5, then 1, of a matrix of 6 rows, to PyTorch's planners."""

    ROWS = ((4, 2), (1, 1))

    @staticmethod
    def __new__(cls, held):
        new = torch.Tensor._make_wrapper_subclass(cls, (6, *held.shape[1:]), dtype=held.dtype, device=held.device)
        new.held, new.asked = held, []
        return new

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a tensor in chunks")

    def chunks(self):
        return [ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([rows, 2])) for first, rows in self.ROWS]

    def __create_write_items__(self, fqn, _):
        self.asked.append("write")
        properties = TensorProperties.create_from_tensor(self.held)
        data = [TensorWriteData(chunk, properties, torch.Size([6, 2])) for chunk in self.chunks()]
        return [WriteItem(MetadataIndex(fqn, each.chunk.offsets), WriteItemType.SHARD, tensor_data=each) for each in data]

    def __create_chunk_list__(self):
        self.asked.append("read")
        return self.chunks()

    def __get_tensor_shard__(self, index):
        return {4: self.held[:2], 1: self.held[2:]}[index.offset[0]]


def test_the_planners_of_distributed_checkpoints_ask_a_tensor_for_its_chunks():
    tensor = InChunks(torch.arange(6.0).view(3, 2))
    items = create_default_local_save_plan({"w": tensor}, is_coordinator=True).items
    assert [(tuple(item.index.offset), tuple(item.tensor_data.chunk.sizes)) for item in items] == [
        ((4, 0), (2, 2)),
        ((1, 0), (1, 2)),
    ]
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": tensor}, is_coordinator=True)
    assert [planner.lookup_object(item.index).tolist() for item in items] == [[[0, 1], [2, 3]], [[4, 5]]]
    stored = [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([5, 2])),
        ChunkStorageMetadata(torch.Size([5, 0]), torch.Size([1, 2])),
    ]
    metadata = Metadata({"w": TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([6, 2]), stored)})
    loading = DefaultLoadPlanner()
    loading.set_up_planner({"w": tensor}, metadata, is_coordinator=False)
    whole = torch.randn(6, 2)
    for item in loading.create_local_plan().items:
        first = item.storage_index.offset[0] + item.storage_offsets[0]
        loading.resolve_tensor(item).copy_(whole[first : first + item.lengths[0]])
    assert torch.equal(tensor.held, whole[[4, 5, 1]])
    assert set(tensor.asked) == {"write", "read"}


def test_a_hook_registers_where_octavo_looks():
    layer = nn.Linear(1, 1)
    for register, kept in (
        (layer.register_forward_hook, "_forward_hooks"),
        (layer.register_forward_pre_hook, "_forward_pre_hooks"),
        (layer.register_full_backward_hook, "_backward_hooks"),
        (layer.register_full_backward_pre_hook, "_backward_pre_hooks"),
        (layer.register_state_dict_post_hook, "_state_dict_hooks"),
        (layer.register_state_dict_pre_hook, "_state_dict_pre_hooks"),
        (layer.register_load_state_dict_pre_hook, "_load_state_dict_pre_hooks"),
        (layer.register_load_state_dict_post_hook, "_load_state_dict_post_hooks"),
    ):
        assert not getattr(layer, kept)
        register(lambda *_: None)
        assert getattr(layer, kept), kept
