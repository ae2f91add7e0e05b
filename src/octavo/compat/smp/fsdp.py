"""FullyShardedDataParallel around a transformed model: Octavo's sharding behind the arguments of PyTorch's FSDP1.

`ShardedModel` is a subclass of PyTorch's class; PyTorch's constructor returns one for a transformed model
(`octavo.compat.smp.patches`). Octavo shards block by block, whatever the auto_wrap_policy; rotary tables stay float32.

`sharding_strategy` and hybrid_shard_degree H combine as in SMP:

    H = 0     by strategy: FULL_SHARD, SHARD_GRAD_OP over all ranks; HYBRID_SHARD, _HYBRID_SHARD_ZERO2 over those of a
              host; NO_SHARD over none
    H = 1     NO_SHARD
    H > 1     over H ranks, replicated beyond: HYBRID_SHARD, or _HYBRID_SHARD_ZERO2 if that is given
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from octavo.build import place
from octavo.compat.notices import say_once
from octavo.compat.smp import arguments, slices, state_dicts
from octavo.compat.smp.checkpoint import make_background_groups
from octavo.compat.smp.delayed import ParamInit
from octavo.compat.smp.init import cached, given_names, replica_group
from octavo.compat.smp.init import state as smp_state
from octavo.compat.smp.transform import Transformed, transformed, whole_weights
from octavo.compat.smp.utils import clip_by_pytorch
from octavo.errors import InputError
from octavo.fp8.recipe import DelayedScaling
from octavo.models.decoder import Decoder
from octavo.models.original_code import compute_in, refuse_float32_parameters
from octavo.models.tensor_parallel import check_tensor
from octavo.models.vision import Blocks
from octavo.parallel.coordination import all_ranks
from octavo.parallel.deferred_init import CounterInit, FromRank0, Values
from octavo.parallel.fsdp import check_same_weights, settle
from octavo.parallel.module_init import OwnInit
from octavo.parallel.offload import offloaded
from octavo.parallel.sharding import Sharding, sharding_of
from octavo.parallel.world import expert_mesh, rank_variable
from octavo.parallel.world import state as ranks
from octavo.train.optimizer import clip_grad_norm_

_ZERO2 = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
IN_HOST = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class ShardedModel(FullyShardedDataParallel):
    """A transformed model, sharded over the ranks of `torch.sagemaker.init`.

    Attributes:
        module: the model itself.
        process_group, rank, world_size: the ranks that a parameter is sharded over.
        sharding_strategy: the strategy in effect.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        options = arguments.given(args, kwargs)
        noted = transformed(module)
        assert noted is not None
        degree, strategy = resolved(smp_state.hybrid_shard_degree, options.sharding_strategy, ranks.tp_size)
        training = module.training
        with given_names():
            sharding = _sharding(module, noted, options.mixed_precision, degree, strategy)
            values = _values(module, noted, options.param_init_fn, sync=options.sync_module_states)
            device = _device(options.device_id)
            if sharding is not None or not _is_on(module, device):
                place(module, device, sharding, values, averaged=True, of_one_rank=True).train(training)  # for its state dicts
        if sharding is not None and sharding.context is not None:
            slices.join_inputs(module, sharding.context)
        self._fsdp_wrapped_module = module
        self.sharding_strategy, self.mixed_precision = strategy, options.mixed_precision
        self.process_group = _shard_group(sharding)
        self.rank = 0 if self.process_group is None else dist.get_rank(self.process_group)
        self.world_size = 1 if self.process_group is None else dist.get_world_size(self.process_group)
        self.state_settings = state_dicts.Settings()
        if sharding is not None:
            # [replicas, shards, tensor ranks]
            layout = torch.arange(ranks.world_size, device="cpu").view(-1, sharding.mesh.size(-1), ranks.tp_size)
            groups = [layout.flatten(1), layout.transpose(1, 2).flatten(0, 1), layout.permute(1, 2, 0).flatten(0, 1)]
            make_background_groups([list(range(ranks.world_size)), *(group for each in groups for group in each.tolist())])
            replica_group(sharding.mesh.size(-1))
        self._offloads = False
        self.register_load_state_dict_pre_hook(_load_inside)

    @property
    def module(self) -> nn.Module:
        """The model itself."""
        return self._fsdp_wrapped_module

    @property
    def sharded_model(self) -> ShardedModel:
        """This object: wrappers that forward attributes forward this one."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            return getattr(nn.Module.__getattr__(self, "_fsdp_wrapped_module"), name)

    # Names as in PyTorch's FSDP outside of `summon_full_params`: rules by class look parameters up under module names.
    named_parameters, named_buffers = nn.Module.named_parameters, nn.Module.named_buffers

    def apply(self, fn: Callable[[nn.Module], None]) -> ShardedModel:
        """`nn.Module.apply`; parameters are this rank's shards."""
        nn.Module.apply(self, fn)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module._apply(self, *args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank without reduction; the next backward outside reduces their sum over the ranks."""
        model = self.module
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(True)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients to a norm of at most `max_norm`; returns the norm before, the same on every rank."""
        max_norm, norm_type = float(max_norm), float(norm_type)
        settle(self.module)
        if norm_type == 2.0 and max_norm > 0:
            return clip_grad_norm_(self.module, max_norm)
        norm = clip_by_pytorch(self.module, max_norm, norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """The state by the surrounding `state_dict_type` context; by default whole tensors with Hugging Face's names."""
        state = state_dicts.model_state(self.module, self.state_settings)
        if destination is None:
            return state
        destination.update({f"{prefix}{name}": value for name, value in state.items()})  # called by an enclosing module
        return destination

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state of any type."""
        return state_dicts.load_model_state(self.module, state_dict, self.state_settings, strict=strict)

    @property
    def stack(self) -> Decoder | Blocks | None:
        """The module that runs Octavo's blocks; None for the model's original code."""
        model: Any = self.module
        stack = model if isinstance(model, Decoder) else getattr(model, "blocks", None)
        return stack if isinstance(stack, Decoder | Blocks) else None

    def offload(self) -> None:
        """Offload saved activations of Octavo's blocks to host memory from now on."""
        if self.stack is not None and not self._offloads:
            self._offloads = True
            self.stack.run_block = offloaded(self.stack.run_block, smp_state.activation_loading_horizon)


def _load_inside(
    module: ShardedModel, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], *others: Any
) -> None:
    """Hook of an enclosing module's load_state_dict: load this model's entries and remove them from the state."""
    entries = {name[len(prefix) :]: state.pop(name) for name in [name for name in state if name.startswith(prefix)]}
    lost, unexpected = state_dicts.load_model_state(module.module, entries, module.state_settings, strict=False)
    missing += [f"{prefix}{name}" for name in lost]
    state |= {f"{prefix}{name}": entries[name] for name in unexpected}
    tensors = nn.Module.state_dict(module.module, keep_vars=True, prefix=f"{prefix}_fsdp_wrapped_module.")
    state |= {name: tensor.detach() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def resolved(degree: int, requested: ShardingStrategy | None, tensor: int = 1) -> tuple[int, ShardingStrategy]:
    """(ranks over which a parameter is sharded, 0 for all; the strategy in effect), by the table above.

    tensor: tensor-parallel degree; neighbouring ranks hold parts of a matrix.
    """
    strategy = requested or ShardingStrategy.FULL_SHARD
    if degree == 1:
        return 1, _overridden(degree, requested, ShardingStrategy.NO_SHARD)
    if degree > 1:
        zero2 = strategy is ShardingStrategy._HYBRID_SHARD_ZERO2
        return degree, _overridden(degree, requested, strategy if zero2 else ShardingStrategy.HYBRID_SHARD)
    if strategy is ShardingStrategy.NO_SHARD:
        return 1, strategy
    if strategy in IN_HOST:
        local = rank_variable("LOCAL_WORLD_SIZE", min(ranks.world_size, max(1, torch.cuda.device_count() or ranks.world_size)))
        return max(1, min(local, ranks.world_size) // tensor), strategy
    return 0, strategy


def _overridden(degree: int, requested: ShardingStrategy | None, strategy: ShardingStrategy) -> ShardingStrategy:
    if requested not in (None, strategy, ShardingStrategy.HYBRID_SHARD):
        say_once(
            "strategy",
            f"sharding_strategy={requested.name if requested else None} becomes {strategy.name}: hybrid_shard_degree = "
            f"{degree} of torch.sagemaker.init decides, as in SMP.",
        )
    return strategy


def _is_on(model: nn.Module, device: torch.device) -> bool:
    """True if `transform` has already placed the model on the device: a single rank, with weights."""
    return all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))


def _device(device_id: Any) -> torch.device:
    if device_id is None:
        return ranks.device
    return torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)


def _sharding(
    model: nn.Module, noted: Transformed, precision: MixedPrecision, degree: int, strategy: ShardingStrategy
) -> Sharding | None:
    """The sharding: ranks and dtypes. Also sets the model's compute dtype."""
    params_dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    compute = precision.param_dtype or params_dtype
    if isinstance(model, Decoder):
        model.dtype = compute
        check_tensor(model.spec, ranks.tp_size, spread=ranks.ep_size > 1)
    else:
        compute_in(model, compute, ranks.device)
    base = sharding_of(ranks, DelayedScaling(), dtype=compute, params_dtype=params_dtype, strategy=noted.cp_comm_type)
    if base is None:
        return None
    if not isinstance(model, Decoder):
        refuse_float32_parameters(model, params_dtype, "Give torch.sagemaker.transform dtype=torch.float32.")
    mesh = _mesh(degree, base.mesh)
    return replace(
        base,
        mesh=mesh,
        expert_mesh=_expert_mesh(mesh.size(-1), base),
        reduce_dtype=precision.reduce_dtype or precision.param_dtype or params_dtype,
        reshard_after_forward=strategy not in _ZERO2,
    )


def _mesh(degree: int, usual: DeviceMesh) -> DeviceMesh:
    """[replicate, shard] with `degree` ranks a shard group, or [shard]."""
    if degree in (0, usual.size(-1)):
        return cast("DeviceMesh", cached("dense", usual.size(-1), lambda: usual))
    tensor, each = ranks.tp_size, ranks.world_size // ranks.tp_size
    if each % degree or degree % ranks.cp_size:
        several = f", of tensor_parallel_degree {tensor}" if tensor > 1 else ""
        raise InputError(
            f"a shard group of {degree} ranks does not fit {ranks.world_size} ranks{several} with context_parallel_degree "
            f"{ranks.cp_size}: it divides the {'ranks' if tensor == 1 else f'{each} ranks with the same part of a matrix'} and "
            "is a multiple of that degree. Set hybrid_shard_degree in torch.sagemaker.init."
        )

    def make() -> DeviceMesh:
        names = ("replicate", "hybrid_shard", "tensor")
        mesh = init_device_mesh(ranks.device.type, (each // degree, degree, tensor), mesh_dim_names=names)
        return mesh["hybrid_shard"] if degree == each else mesh["replicate", "hybrid_shard"]

    return cast("DeviceMesh", cached("dense", degree, make))


def _expert_mesh(degree: int, base: Sharding) -> DeviceMesh | None:
    """[replicate, expert_shard, expert] with `degree` ranks a shard group."""
    if base.expert_mesh is None or degree == base.mesh.size(-1):
        return base.expert_mesh
    if degree * ranks.tp_size % ranks.ep_size:
        least = ranks.ep_size // ranks.tp_size
        raise InputError(
            f"a shard group of {degree} ranks cannot hold expert_parallel_degree {ranks.ep_size}: it is a multiple of "
            f"{'that degree' if ranks.tp_size == 1 else f'{least}, that degree divided by tensor_parallel_degree'}. Set "
            "hybrid_shard_degree in torch.sagemaker.init."
        )
    return cast(
        "DeviceMesh",
        cached("expert", degree, lambda: expert_mesh(ranks.device.type, replace(ranks.degrees, hybrid_shard=degree))),
    )


def _shard_group(sharding: Sharding | None) -> dist.ProcessGroup | None:
    if sharding is None:
        return dist.group.WORLD if dist.is_initialized() else None
    mesh = sharding.mesh
    return mesh.get_group(mesh.ndim - 1)


def _values(model: nn.Module, noted: Transformed, init: Any, *, sync: bool) -> Callable[[], Values]:
    """The source of the model's values.

    Raises:
        InputError: a `param_init_fn` other than DelayedParamIniter's, or weights of rank 0 without sync_module_states.
    """
    on_meta = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    several = ranks.world_size > 1
    if noted.from_rank0 and sync and ranks.tp_size > 1:
        load = whole_weights(model) if ranks.rank == 0 else None
        return lambda: FromRank0(load, all_ranks())
    if sync and ranks.tp_size > 1:
        # Every rank already has its parts of the matrices, so rank 0 sends nothing.
        check_same_weights(model, all_ranks())
    elif sync and several:
        load = _Own(model) if ranks.rank == 0 else None
        return lambda: FromRank0(load, all_ranks())
    if noted.from_rank0 and several:
        raise InputError(
            "transform(load_state_dict_from_rank0=True): rank 0 alone has the weights. Give FullyShardedDataParallel "
            "sync_module_states=True."
        )
    if init is not None and not isinstance(init, ParamInit):
        raise InputError(
            "FullyShardedDataParallel(param_init_fn=…): a transformed model has Octavo's modules, which this function does not "
            "know. Give torch.sagemaker.delayed_param.DelayedParamIniter(model).get_param_init_fn()."
        )
    if on_meta and init is None:
        raise InputError(
            f"{on_meta[0]} and others are on the meta device: give FullyShardedDataParallel "
            "param_init_fn=DelayedParamIniter(model).get_param_init_fn(), or sync_module_states=True."
        )
    if several and not on_meta:
        check_same_weights(model, all_ranks())
    seed = ranks.config.random_seed
    if isinstance(model, Decoder):
        return lambda: CounterInit(seed, model.spec.initializer_range)
    return lambda: OwnInit(seed)


class _Own:
    """A weight source: the model's tensors before it is sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers()) if not t.is_meta}
        self.names = self._tensors.keys()

    def __call__(self, name: str, out: Tensor, start: int) -> None:
        """Fill `out` with the rows from `start` on."""
        whole = self._tensors[name]
        out.copy_(whole[start : start + len(out)] if whole.dim() else whole)
