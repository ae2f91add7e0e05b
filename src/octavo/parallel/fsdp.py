"""Sharded data parallelism: FSDP2 wraps each block, its experts, embedding, norm, head, and the root for the rest.

Each rank of a shard group stores a part of every parameter (master weights, gradients, optimizer states). On a [replicate,
shard] mesh gradients are then summed over the replicas as well. In addition to FSDP2, weights of FP8 products are gathered in
FP8 and bf16 gradients are sent as bf16 (`octavo.parallel.fsdp2`), and gradients are summed, not averaged, for a loss divided by
the targets of the global batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from octavo.collectives.blocks import BlockTensor, as_held, local_of, part_of
from octavo.errors import InputError, warn
from octavo.fp8 import checkpoints
from octavo.nn.block import TransformerLayer
from octavo.nn.derived import derive
from octavo.nn.experts import StackedExperts
from octavo.nn.mlp import LayerNormMLP
from octavo.nn.plain_names import PlainLayerNormMLP, PlainTransformerLayer
from octavo.parallel.coordination import Ranks
from octavo.parallel.experts import experts_in, sharding_mesh, spread_experts
from octavo.parallel.fsdp2 import bf16_reduce, direct_gather, direct_reduce, each_micro_batch, single_rank
from octavo.parallel.fsdp2.adapter import (
    FrozenBytes,
    backward_is_open,
    end_passes,
    forward_is_open,
    group_of,
    groups_of,
)
from octavo.parallel.fsdp2.fp8_gather import gather_in_fp8
from octavo.parallel.gathered import has_fp8_weights
from octavo.parallel.sharding import Sharding
from octavo.parallel.world import on_one_host

_EACH = "octavo_syncs_each_micro_batch"
"""Attribute of the root: gradients are summed over the shards in each micro-batch."""
Unit = list[nn.Module]
"""The FSDP modules of a block: parts of it that are gathered and reduced by themselves, and the block."""
_LAYERS, _MLPS = (TransformerLayer, PlainTransformerLayer), (LayerNormMLP, PlainLayerNormMLP)
"""Classes with Octavo's forward."""
_ACCUMULATED = "octavo_accumulated"
"""Attribute of the root: before its last forward there were gradients of micro-batches that the ranks had not summed."""


def check_same_weights(model: nn.Module, ranks: Ranks) -> None:
    """Refuse a model whose values differ between ranks, before each stores its shard of them. Collective.

    Raises:
        InputError: names the first tensor that differs, and two ways to get equal weights.
    """
    tensors = model.state_dict()
    if any(isinstance(as_held(tensor), DTensor) for tensor in tensors.values()):
        return  # sharded already, which `shard` refuses
    gathered = ranks.all_gather({name: _digests(tensor) for name, tensor in tensors.items()})
    first: dict[tuple[str, tuple[int, ...]], int] = {}  # ranks, by name and place
    for rank, digests in enumerate(gathered):
        for name in [*gathered[0], *digests]:
            other = 0 if name not in digests or name not in gathered[0] else rank
            for place, digest in digests.get(name, {}).items():
                holder = first.setdefault((name, place), rank)
                other = holder if gathered[holder][name][place] != digest else other
            if other != rank:
                raise InputError(
                    f"ranks {other} and {rank} hold different weights ({name}), so their shards would not form one model: "
                    "octavo.init seeds each rank differently. Build the model under octavo.delayed_init(), or use the weights "
                    "of rank 0: octavo.transform(model, load_state_dict_from_rank0=True)."
                )


def _digests(tensor: Tensor) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Place → `_digest` of a tensor; for a BlockTensor its shape, and the digest of each range that this rank holds."""
    if not isinstance(tensor, BlockTensor):
        return {(): _digest(tensor)}
    of_ranges = {box.whole + box.sizes: _digest(local_of(tensor)[box.in_local]) for box in part_of(tensor).boxes}
    return {(): (f"{tensor.dtype} {tuple(tensor.shape)}",), **of_ranges}


def _digest(tensor: Tensor) -> tuple[str, ...]:
    """Shape, dtype and, except on meta, sums of a tensor's bytes, which differ between two draws of random weights."""
    shape = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.is_meta:
        return (shape,)
    words = tensor.detach().contiguous().flatten().view(torch.uint8)
    words = words.view(torch.int32) if words.numel() % 4 == 0 else words
    half = words.numel() // 2
    return shape, str(int(words[:half].sum())), str(int(words[half:].sum()))


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    how: Sharding,
    *,
    summed: bool,
    ends: tuple[Sequence[nn.Module], Sequence[nn.Module]] = ((), ()),
) -> None:
    """Shard a model in place, on a real device or on meta.

    Args:
        model: the root; parameters outside blocks and ends are gathered before its forward and reduced after its backward.
        blocks: gathered one by one, each while the previous part runs. Experts are a separate unit, gathered with their block,
            since fewer ranks share them under expert parallelism. So is the first block's MLP.
        how: ranks and dtypes, with `reshard_after_forward` decided.
        summed: sum gradients over the ranks; False averages them, for mean losses.
        ends: modules that run before and after the blocks, in order. They are gathered as blocks are, those after the blocks
            together, but once for forward and backward; their gradients are reduced as soon as they exist.
    """
    mesh = how.mesh
    _refuse_shared(model, blocks)
    # FSDP2 needs gradients of one dtype in a group. Those of FP8 products have the parameters' dtype, as on one rank, so norms
    # and biases in their block, which are small, are gathered in their dtype too.
    outer = MixedPrecisionPolicy(how.param_dtype, how.reduce_dtype, cast_forward_inputs=False)
    parameter_dtypes = MixedPrecisionPolicy(None, how.reduce_dtype, cast_forward_inputs=False)
    inner = mesh if how.expert_mesh is None else sharding_mesh(how.expert_mesh)
    units = _units(blocks)
    for unit in units:
        for part in unit:
            of_dtypes, shared = unit[-1], mesh  # an MLP has the dtypes that it would have in its block
            if isinstance(part, StackedExperts):
                of_dtypes, shared = part, inner
                if how.expert_mesh is not None:
                    spread_experts(part, how.expert_mesh, fp8=how.expert_dispatch_fp8)
            policy = parameter_dtypes if has_fp8_weights(of_dtypes, how.recipe) else outer
            with FrozenBytes():
                fully_shard(part, mesh=shared, reshard_after_forward=how.frees_blocks, mp_policy=policy)
    front, behind = ends
    for end in front:
        fully_shard(end, mesh=mesh, reshard_after_forward=False, mp_policy=outer)
    together = _groups_of(behind)
    for group in together:
        fully_shard(group, mesh=mesh, reshard_after_forward=False, mp_policy=outer)
    policy = parameter_dtypes if not blocks and has_fp8_weights(model, how.recipe) else outer
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    for each in groups_of(sharded_modules(model)):
        each.make_trainable()
    _derive_class(model, each_micro_batch_too=how.sync_each_micro_batch)
    if summed:
        for module in sharded_modules(model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        _spare_copies(model, units, how, whole=inner.size() == 1)
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and (of_module := group_of(module)) is not None:
            of_module.name = ", ".join(filter(None, (of_module.name, name)))
    if how.sync_each_micro_batch:
        each_micro_batch.use(model, sharded_modules(model))
        vars(model)[_EACH] = True
    last = [group[-1] for group in together]  # the hooks of a group are those of its modules together
    _prefetch([[part] for part in front], units, [[part] for part in last])
    for part in [*front, *itertools.chain(*units), *last, model]:
        part.register_forward_hook(_reshard_after_evaluation)
    model.register_forward_pre_hook(lambda root, _: settle(root), prepend=True)
    model.register_forward_hook(_settle_after_exception, always_call=True)


def _refuse_shared(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise an InputError for a parameter of two blocks, or of a block and the root: units are gathered separately."""
    names = {module: name for name, module in model.named_modules()}
    inside = {module for block in blocks for module in block.modules()}
    owners = [*blocks, *(module for module in names if module not in inside)]
    first: dict[nn.Parameter, nn.Module] = {}
    for owner in owners:
        for parameter_name, parameter in owner.named_parameters(recurse=owner in inside):
            other = first.setdefault(parameter, owner)
            if other is not owner and not inside.isdisjoint((other, owner)):
                raise InputError(
                    f"{names[owner]}.{parameter_name} is also a parameter of {names[other] or type(other).__name__}, but "
                    "sharding gathers the weights of each block for this block alone: give each block a separate "
                    "parameter, or train on one rank."
                )


def _units(blocks: Sequence[nn.Module]) -> list[Unit]:
    """The units of blocks, with experts separate, and in the first block the MLP."""
    separate = [[*experts_in(block), *(() if number else _separate_mlp(block))] for number, block in enumerate(blocks)]
    return [[*parts, block] for parts, block in zip(separate, blocks, strict=True)]


def _separate_mlp(first: nn.Module) -> list[nn.Module]:
    """The MLP of a first block that calls it after its attention, or nothing.

    No computation after the backward of the first block would hide the reduction of its gradients. Those of the MLP are most of
    them, and complete first: separate, they are reduced during the backward of attention. A user's code, which may read the
    MLP's weights, has the block as one unit.
    """
    if not isinstance(first, TransformerLayer) or type(first) not in _LAYERS or first.parallel or first.experts is not None:
        return []
    mlp = first.layernorm_mlp
    if type(mlp) not in _MLPS or any({"forward", "forward_residual"} & vars(part).keys() for part in (first, mlp)):
        return []
    parameters = set(mlp.parameters())
    inside = set(mlp.modules())
    shared = any(p in parameters for part in first.modules() if part not in inside for p in part.parameters(recurse=False))
    return [] if shared or not parameters else [mlp]


def _groups_of(behind: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """The modules after the blocks as one group, for which FSDP2 wants one dtype; else each separately.

    As one, norm and head are gathered a whole block ahead, and the backward of the norm, which is over at once, need not wait
    until the head's gradients are reduced.
    """
    dtypes = {parameter.dtype for part in behind for parameter in part.parameters()}
    return [[*behind]] if len(dtypes) == 1 else [[part] for part in behind]


def _spare_copies(model: nn.Module, units: Sequence[Unit], how: Sharding, *, whole: bool) -> None:
    """Reduce gradients without FSDP2's avoidable copies; whole: each rank alone holds its experts."""
    experts = [_fsdp(part) for part in itertools.chain(*units) if isinstance(part, StackedExperts)] if whole else []
    single_rank.use(experts)
    rest = [module for module in sharded_modules(model) if module not in experts]
    if how.reduce_dtype == torch.float32 and on_one_host():
        bf16_reduce.use(rest)
    direct_reduce.use(rest, how.reduce_dtype, one_host=on_one_host())


def _prefetch(front: Sequence[Unit], blocks: Sequence[Unit], behind: Sequence[Unit]) -> None:
    """Prefetch each part while the previous one runs, also in backward, where FSDP2 by itself prefetches only blocks that
    are a single unit.

    During the head's backward FSDP2 would prefetch the part in front of the head, which is gathered already.
    """
    order = [*front, *blocks, *behind]
    for unit, following in itertools.pairwise(order):
        first = unit if unit is order[0] else []  # nothing before it has gathered its other parts
        _fsdp(unit[-1]).set_modules_to_forward_prefetch([_fsdp(part) for part in (*first[:-1], *reversed(following))])
    for before, unit in itertools.pairwise(blocks):
        if len(before) > 1:
            _fsdp(unit[-1]).set_modules_to_backward_prefetch([_fsdp(part) for part in before])
    if blocks and behind:
        _fsdp(behind[-1][-1]).set_modules_to_backward_prefetch([_fsdp(part) for part in blocks[-1]])


def extend_gathers(model: nn.Module, blocks: Sequence[nn.Module], how: Sharding) -> None:
    """The last step of sharding, once every parameter has storage.

    FP8 weights are gathered in FP8, if `how` allows it, and large matrices outside the blocks in place.
    """
    in_blocks: list[Any] = [part for block in blocks for part in sharded_modules(block)]
    if parts := [part for part in in_blocks or [model] if has_fp8_weights(part, how.recipe)]:
        gather_in_fp8(model, parts)
    direct_gather.use(model, [part for part in sharded_modules(model) if part not in in_blocks])


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model that runs its original code: the elements of its outermost module lists."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            blocks += [block for block in child if any(True for _ in block.parameters())]
        else:
            blocks += blocks_of(child)
    return list(dict.fromkeys(blocks))  # a shared list once


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Every module with a separate shard group."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def accumulate(model: nn.Module, *, last: bool) -> None:
    """Before a backward: sum gradients over the ranks in it if it is the `last` of its step.

    With `Sharding.sync_each_micro_batch` they are summed over the shards in each, and the last sums them over the replicas.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)


def settle(model: nn.Module) -> None:
    """Between passes, free the state of an abandoned forward or backward: the next forward then reads current shards.

    A forward without a backward leaves embedding, norm and head gathered; one that an exception ended may leave any part. FSDP2
    would compute with these weights after the optimizer has changed their shards, and `parameters()` would be the gathered
    ones, which have no gradients.

    A backward that an exception ended leaves gradients of gathered weights, where `optimizer.zero_grad()` does not reach: FSDP2
    would add them to those of the next backward. Gradients reduced before the exception are with the shards.
    """
    if not isinstance(model, FSDPModule) or checkpoints.graph_task() != -1:  # a backward recomputes its forward
        return
    modules = list(sharded_modules(model))
    _drop_abandoned_gradients(model, modules)
    end_passes(modules)


def _drop_abandoned_gradients(model: nn.Module, modules: Sequence[FSDPModule]) -> None:
    """After an unfinished backward drop gradients that are not reduced; warns if earlier micro-batches are lost with it."""
    groups = groups_of(modules)
    if backward_is_open(modules):
        for group in groups:
            group.drop_gradients()
        if vars(model).get(_EACH) and any(parameter.grad is not None for parameter in model.parameters()):
            warn(
                "a backward ended in an exception. The gradients of this step, which are summed over the ranks in each "
                "micro-batch, may contain a part of its gradients: call optimizer.zero_grad(), and restart the step."
            )
        elif vars(model).get(_ACCUMULATED):
            warn(
                "a backward ended in an exception. The gradients of the micro-batches before it, which were not summed over "
                "the ranks yet, contain a part of its gradients, and are dropped: restart the step with its first micro-batch."
            )
    vars(model)[_ACCUMULATED] = any(group.holds_gradients for group in groups)


def _settle_after_exception(root: nn.Module, *_: Any) -> None:
    """Restore the shards in `parameters()` at once, for an optimizer that is created before the next forward."""
    if forward_is_open(_fsdp(root)):
        settle(root)


def refuse_wrappers(model: nn.Module) -> None:
    """Refuse DDP, FSDP1, FSDP2 and copies of a model with tensor-parallel parameters that FSDP2 does not wrap."""

    def refuse_copy(self: nn.Module, memo: dict[int, Any]) -> NoReturn:
        raise InputError(
            f"copy.deepcopy of a {type(self).__name__} whose parameters are parts of tensor-parallel ranks: "
            "octavo.to_huggingface(model) has whole weights, and octavo.transform creates another model from them."
        )

    def refuse_sharded_blocks(module: Any, _: Any) -> None:
        if isinstance(module.layers[0], FSDPModule):
            _refuse_fsdp(module, None)

    marks = {_FSDP_MARK: property(lambda self: False, _refuse_fsdp), _DDP_MARK: property(_refuse_ddp)}
    derive(model, {**marks, "__deepcopy__": refuse_copy})
    model.register_forward_pre_hook(refuse_sharded_blocks, prepend=True)


_FSDP_MARK, _DDP_MARK = "_fsdp_use_orig_params", "_ddp_params_and_buffers_to_ignore"
"""Attributes that FSDP1 and FSDP2 set on a module, and that DDP looks for."""


def _refuse_fsdp(self: nn.Module, value: Any) -> None:
    raise InputError(
        f"{type(self).__name__} is sharded already, by octavo.transform over the ranks of octavo.init: "
        "leave FullyShardedDataParallel and fully_shard out. Their mixed precision goes into octavo.init as param_dtype, "
        "reduce_dtype and buffer_dtype, sharding_strategy as hybrid_shard_degree and reshard_after_forward."
    )


def _refuse_ddp(self: nn.Module) -> None:
    raise InputError(
        f"{type(self).__name__}: DistributedDataParallel, also inside Trainer and Accelerate, would reduce gradients a second "
        "time: octavo.init shards this model over the ranks and reduces its gradients. Leave octavo.init out, or write the "
        "loop without them."
    )


def _derive_class(model: nn.Module, *, each_micro_batch_too: bool) -> None:
    """Derive a class for the model, whose `zero_grad` drops all gradients.

    each_micro_batch_too: `set_requires_gradient_sync(False)`, which loops and libraries call to accumulate, still sums
    over the shards.
    """

    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        """Drop all gradients: of the shards, and of micro-batches that the ranks have not summed yet."""
        settle(self)
        for group in groups_of(sharded_modules(self)):
            group.drop_gradients()
        base.zero_grad(self, set_to_none)

    def set_requires_gradient_sync(self: Any, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Sum gradients over the shards in the next backwards, and with True over the replicas too."""
        if not recurse:
            base.set_requires_gradient_sync(self, requires_gradient_sync, recurse=False)
            return
        each_micro_batch.begin(self, sharded_modules(self), last=requires_gradient_sync)

    vars(model).pop(_FSDP_MARK, None)  # FSDP2 has set it
    base: Any = type(model)
    marks = {_FSDP_MARK: property(lambda self: True, _refuse_fsdp), _DDP_MARK: property(_refuse_ddp)}
    more = {"set_requires_gradient_sync": set_requires_gradient_sync} if each_micro_batch_too else {}
    derive(model, {**marks, **more, "zero_grad": zero_grad})


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


def _reshard_after_evaluation(block: nn.Module, inputs: Any, output: Tensor) -> None:
    """Reshard a part that stays gathered after its forward: after an evaluation no backward frees it."""
    group = group_of(_fsdp(block))
    if group is None or group.frees_after_forward:
        return
    if not torch.is_grad_enabled() or (not block.training and checkpoints.graph_task() == -1):
        _fsdp(block).reshard()
