"""The only file that uses FSDP2's private parts: parameter groups, their parameters, and the methods that Octavo replaces.

`fully_shard` gives a module a group of parameters that are gathered and reduced together. Octavo gathers weights as FP8, by
the scales of a forward, and reduces gradients without copies, for which FSDP2 has no public API. `Group` and `Parameter` give
public names to what is read and changed; no other file names an attribute of FSDP2. A sharded parameter is a DTensor: its
ranks, size and rows are read from it. Its module shows whether it is gathered: it has the shard or the whole.

Replaced methods, on the instance of each group, in this order:

1. `wait_for_unshard` runs outside inference mode (`Group.make_trainable`).
2. `post_backward` first runs the actions of `BEFORE_REDUCTION` (`Group.before_reduction`), in that order, whatever the order of
registration.
3. `finalize_backward` first runs the actions of `Group.before_end_of_backward`.
4. `pre_backward` checks the gathered weights before and after its all-gather (`Group.around_pre_backward`).
5. `reset_sharded_param`, of a parameter, extends the tensor that replaces its shard (`Parameter.extend`).

`tests/contract/test_fsdp2.py` holds PyTorch to these names, and to the order in which it calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from octavo.errors import InputError
from octavo.versions import requirement

GROUP = (
    "fsdp_params", "post_forward_mesh_info", "comm_ctx", "reduce_grads",
    "gradient_divide_factor", "force_sum_reduction_for_comms", "wait_for_unshard", "pre_backward", "post_backward",
    "finalize_backward", "_training_state", "_all_gather_result", "_partial_reduce_output", "_all_reduce_hook",
)  # fmt: skip
"""Names of an `FSDPParamGroup` that this file uses."""
PARAMETER = ("sharded_param", "all_gather_outputs", "unsharded_accumulated_grad", "reset_sharded_param")
"""Names of an `FSDPParam` that this file uses, before its first gathering."""
LATER = ("_unsharded_param", "_unsharded_inner_tensors")
"""Names that a first forward gives an `FSDPParam`."""

BEFORE_REDUCTION = ("same parameters", "direct", "hand over", "buffers")
"""Actions when the gradients of a group are complete, in the order in which they run, at most one of each.

same parameters: checks that sums which wait for the replicas are of the same parameters. direct: large gradients are reduced in
place. hand over: gradients of a group of one rank become those of its shards. buffers: the next reduction allocates new
buffers, in the dtypes chosen here.
"""


class FrozenBytes(TorchFunctionMode):
    """Around `fully_shard` of frozen uint8 parameters.

    PyTorch before 2.13 briefly sets `requires_grad` on each parameter that it shards, which integers do not allow.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Ignore `requires_grad` of integer tensors."""
        if func is Tensor.requires_grad_ and not args[0].is_floating_point():
            return args[0]
        return func(*args, **(kwargs or {}))


@dataclass
class Form:
    """A parameter's tensors for one form of its gathered values, stored between gathers.

    Attributes:
        outputs, inner: gathered tensors, and an extension's replacements of them.
        whole: the unsharded parameter, into which autograd accumulates gradients.
    """

    outputs: list[Tensor] = field(default_factory=list)
    inner: list[Tensor] = field(default_factory=list)
    whole: nn.Parameter | None = None


class Parameter:
    """A sharded parameter.

    Attributes:
        module, name: its module, and its name there.
        size: shape of the whole; for experts, of this rank's experts.
        rank, ranks: this rank's index in the shard group, and the group's size.
        shard_group: the ranks that hold parts of it.
        replicated: other ranks hold replicas of the shards.
        device: where it is gathered.
        padded_rows: rows of a shard, padding included.
        by_rows: ranks have consecutive rows.
    """

    def __init__(self, raw: Any, module: nn.Module, name: str) -> None:
        _check(raw, PARAMETER, "parameters")
        self._raw, self.module, self.name = raw, module, name
        placements, mesh = raw.sharded_param.placements, raw.sharded_param.device_mesh
        # FSDP2's dimensions are first: of replicas, if any, then of shards. Those of other parallelism are behind.
        place = next((place for place, placement in enumerate(placements) if not placement.is_replicate()), None)
        self.replicated: bool = place is None or place > 0
        ranks: Any = None if place is None else mesh.get_group(place)
        self.shard_group = ranks
        self.rank: int = 0 if ranks is None else ranks.rank()
        self.ranks: int = 1 if ranks is None else ranks.size()
        sizes = list(raw.sharded_param.shape)
        for behind, placement in enumerate(placements):
            if place is not None and behind > place and not placement.is_replicate():
                sizes[placement.dim], rest = divmod(sizes[placement.dim], mesh.size(behind))
                assert not rest, "as many experts on each rank"
        self.size = torch.Size(sizes)
        self.device = torch.device("cpu")
        if mesh.device_type != "cpu":
            self.device = torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
        # PyTorch's chunks: the first rank has the most rows.
        self.padded_rows: int = -(-self.size[0] // self.ranks)
        self._padded = torch.empty(self.padded_rows, *self.size[1:], device="meta")
        self.by_rows = all(getattr(placement, "dim", 0) == 0 for placement in placements)

    @property
    def shard(self) -> Tensor:
        """This rank's rows, padded, [padded rows, …]; only of a parameter sharded by rows."""
        own: Tensor = self._raw.sharded_param._local_tensor
        return own.as_strided(self._padded.shape, self._padded.stride())

    @property
    def is_by_rows(self) -> bool:
        """True if each rank has consecutive rows, on its device."""
        return self.by_rows and self._raw.sharded_param.device.type == self.device.type

    @property
    def is_cast_alone(self) -> bool:
        """True if the whole is the concatenation of the ranks' shards, cast."""
        raw = self._raw
        extended = hasattr(raw.sharded_param._local_tensor, "fsdp_pre_all_gather")
        return self.is_by_rows and getattr(self.module, self.name) is raw.sharded_param and not extended

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """Dtype of the unsharded parameter's gradient in the last backward; None without one."""
        whole = vars(self._raw).get("_unsharded_param")
        return None if whole is None or whole.grad is None else whole.grad.dtype

    def gradient(self) -> Tensor | None:
        """The unsharded parameter's gradient, of all micro-batches; None without one."""
        raw, whole = self._raw, vars(self._raw).get("_unsharded_param")
        if whole is None:  # no forward yet
            return None
        if (total := raw.unsharded_accumulated_grad) is None:
            total = whole.grad
        elif whole.grad is not None:
            total += whole.grad
            whole.grad = None
        return _held(total, whole) if isinstance(total, DTensor) else cast("Tensor | None", total)

    def drop_gradient(self) -> None:
        """Leave FSDP2 no gradient to reduce."""
        if (whole := vars(self._raw).get("_unsharded_param")) is not None:
            self._raw.unsharded_accumulated_grad = whole.grad = None

    def add_to_shard(self, gradient: Tensor) -> None:
        """Set or accumulate the gradient [rows, …] of this rank's shard."""
        shard = self._raw.sharded_param
        gradient = gradient.to(shard.dtype).contiguous()
        if shard.grad is None:
            shard.grad = DTensor.from_local(
                gradient, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
            )
        else:
            shard.grad.to_local().add_(gradient)
        for hook in (shard._post_accumulate_grad_hooks or {}).values():
            hook(shard)

    def extend(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Gather what `before` returns for the padded shard, and build the parameter by `after`: PyTorch's tensor extensions.

        FSDP2 looks for them before its first all-gather. They are attributes of the shard, which `Module.to` and
        `load_state_dict(assign=True)` replace: FSDP2 then calls `reset_sharded_param`, and the new tensor gets them. Another
        dtype would need other memory, which FSDP2 does not allocate again.
        """
        raw, reset, dtype = self._raw, self._raw.reset_sharded_param, self._raw.sharded_param.dtype

        def extended() -> None:
            reset()
            tensor = raw.sharded_param._local_tensor
            if tensor.dtype != dtype and raw.all_gather_outputs:
                raise InputError(
                    f"{type(self.module).__name__}.{self.name} was {dtype} and is {tensor.dtype}: a sharded model keeps its "
                    f"dtype. Give params_dtype = {tensor.dtype} to octavo.transform, or convert octavo.to_huggingface(model)."
                )
            tensor.fsdp_pre_all_gather, tensor.fsdp_post_all_gather = before, after

        raw.reset_sharded_param = extended
        extended()

    def take_form(self) -> Form:
        """Remove and return the tensors of the current form; accumulated gradients stay with the parameter."""
        raw = self._raw
        whole = raw.__dict__.pop("_unsharded_param", None)
        if whole is not None and whole.grad is not None:
            total = raw.unsharded_accumulated_grad
            raw.unsharded_accumulated_grad = whole.grad if total is None else total + whole.grad
            whole.grad = None
        return Form(raw.all_gather_outputs, raw._unsharded_inner_tensors, whole)

    def put_form(self, form: Form) -> None:
        """Have the next all-gather write into these tensors."""
        self._raw.all_gather_outputs, self._raw._unsharded_inner_tensors = form.outputs, form.inner
        if form.whole is not None:
            self._raw._unsharded_param = form.whole


class Group:
    """The parameters that FSDP2 gathers and reduces together.

    Attributes:
        module: the first that has the group.
        name: of its modules, below the root.
        parameters: in FSDP2's order.
        device: PyTorch's module of streams and events for the group's device.
        replicated: gradients are also summed over replicas.
    """

    def __init__(self, raw: Any, modules: Sequence[FSDPModule]) -> None:
        _check(raw, GROUP, "groups of parameters")
        self._raw, self.module, self.name = raw, modules[0], ""
        places = _places(cast("Sequence[nn.Module]", modules))
        self.parameters = [Parameter(parameter, *places[parameter.sharded_param]) for parameter in raw.fsdp_params]
        first = self.parameters[0]
        self.device: Any = torch.get_device_module(first.device)
        self.is_sharded = first.shard_group is not None
        self.replicated = self.is_sharded and first.replicated
        self._before_reduction: dict[str, Callable[[], None]] = {}
        self.micro_batch_follows = False
        """This backward is reduced, and another of the same step follows (`octavo.parallel.fsdp2.each_micro_batch`)."""

    def make_trainable(self) -> None:
        """Have FSDP2 create the unsharded parameters outside inference mode, whatever the mode of the first forward.

        If an evaluation before training created them in inference mode, every later forward with gradients would fail.
        """
        self._raw.wait_for_unshard = torch.inference_mode(False)(self._raw.wait_for_unshard)

    @property
    def ranks(self) -> dist.ProcessGroup:
        """The ranks that have parts of its parameters."""
        return cast(dist.ProcessGroup, self.parameters[0].shard_group)

    @property
    def is_gathered(self) -> bool:
        """True while the modules have their whole parameters."""
        first = self.parameters[0]
        return getattr(first.module, first.name) is vars(first._raw).get("_unsharded_param")

    @property
    def is_there(self) -> bool:
        """True if it is gathered or being gathered."""
        first = self.parameters[0]  # `is_gathered` inlined: every block of every step reads it
        gathered = getattr(first.module, first.name) is vars(first._raw).get("_unsharded_param")
        return gathered or self._raw._all_gather_result is not None

    @property
    def in_forward(self) -> bool:
        """True in the forward of its module."""
        return bool(self._raw._training_state == TrainingState.FORWARD)

    @property
    def in_pass(self) -> bool:
        """True in the forward and backward of its module, whose all-gathers FSDP2 runs in a separate stream."""
        return self._raw._training_state in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)

    @property
    def frees_after_forward(self) -> bool:
        """True if the current setting frees it between forward and backward."""
        return self._raw.post_forward_mesh_info is not None

    @property
    def reduces(self) -> bool:
        """True if this backward sums gradients over the ranks, False for a micro-batch that accumulates."""
        return bool(self._raw.reduce_grads)

    @property
    def forces_sums(self) -> bool:
        """True if gradients are summed, and not averaged."""
        return bool(self._raw.force_sum_reduction_for_comms)

    @property
    def divides_by(self) -> float | None:
        """Divisor of the gradients; None: the number of ranks."""
        return cast("float | None", self._raw.gradient_divide_factor)

    @property
    def has_hook(self) -> bool:
        """True if the user's hook runs between the sums of shards and of replicas."""
        return self._raw._all_reduce_hook is not None

    @property
    def reduction_stream(self) -> Any:
        """The stream of reductions."""
        return self._raw.comm_ctx.reduce_scatter_stream

    @property
    def waits_for_replicas(self) -> bool:
        """True if earlier backwards left sums over the shards that are not summed over the replicas yet."""
        return self._raw._partial_reduce_output is not None

    @property
    def holds_gradients(self) -> bool:
        """True if earlier backwards left gradients that are not reduced yet, over shards or over replicas."""
        for raw in self._raw.fsdp_params:
            whole = vars(raw).get("_unsharded_param")
            if whole is not None and (whole.grad is not None or raw.unsharded_accumulated_grad is not None):
                return True
        return self._raw._partial_reduce_output is not None

    def drop_gradients(self) -> None:
        """Drop the gradients of `holds_gradients`."""
        for parameter in self.parameters:
            parameter.drop_gradient()
        self._raw._partial_reduce_output = None

    def free(self) -> None:
        """Free what is gathered or being gathered."""
        self._raw.wait_for_unshard()
        FSDPModule.reshard(self.module)

    def before_reduction(self, kind: str, action: Callable[[], None]) -> None:
        """Run `action`, of a kind in `BEFORE_REDUCTION`, in every backward once the gradients are complete, reduced or not."""
        if kind not in BEFORE_REDUCTION or kind in self._before_reduction:
            raise ValueError(f"{kind}: one action each of {', '.join(BEFORE_REDUCTION)}")
        first = not self._before_reduction
        self._before_reduction[kind] = action
        self._before_reduction = {
            each: self._before_reduction[each] for each in BEFORE_REDUCTION if each in self._before_reduction
        }
        if first:
            reduce = self._raw.post_backward

            def post_backward(*unused: Any) -> None:
                for before in self._before_reduction.values():
                    before()
                reduce(*unused)

            self._raw.post_backward = post_backward

    def before_end_of_backward(self, action: Callable[[], None]) -> None:
        """Run `action` when a backward of the root ends, before FSDP2 waits for its reductions."""
        finalize = self._raw.finalize_backward

        def finalize_backward() -> None:
            action()
            finalize()

        self._raw.finalize_backward = finalize_backward

    def around_pre_backward(self, before: Callable[[], None], behind: Callable[[], None]) -> None:
        """Run `before` when a backward first reaches the group, and `behind` after each of its all-gathers for a backward."""
        raw, gather = self._raw, self._raw.pre_backward

        def pre_backward(*arguments: Any) -> None:
            if raw._training_state != TrainingState.PRE_BACKWARD:
                before()
            gather(*arguments)
            behind()

        raw.pre_backward = pre_backward


def group_of(module: FSDPModule) -> Group | None:
    """The group of a module's direct parameters, the same object each time; None without any."""
    raw: Any = _state(module)._fsdp_param_group
    if raw is None:
        return None
    known = vars(raw).get("octavo_group")
    return groups_of([module])[0] if known is None else cast(Group, known)


def groups_of(modules: Iterable[FSDPModule]) -> list[Group]:
    """The groups of modules, each once, in their order.

    The first call for a group of several modules must have all of them.
    """
    together: dict[Any, list[FSDPModule]] = {}
    for module in modules:
        if (raw := _state(module)._fsdp_param_group) is not None:
            together.setdefault(raw, []).append(module)
    for raw, own in together.items():
        if "octavo_group" not in vars(raw):
            raw.octavo_group = Group(raw, own)
    return [raw.octavo_group for raw in together]


def backward_is_open(modules: Iterable[FSDPModule]) -> bool:
    """True if a backward of these modules has begun and not ended."""
    return any(_state(module)._state_ctx.post_backward_final_callback_queued for module in modules)


def forward_is_open(root: FSDPModule) -> bool:
    """True if the forward of a root has not ended, as after an exception."""
    return _state(root)._state_ctx.iter_forward_root is not None


def end_passes(modules: Iterable[FSDPModule]) -> None:
    """Reset a forward or backward that did not finish, and free gathered parameters."""
    for module in modules:
        state = _state(module)
        group = state._fsdp_param_group
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._modules_to_run_forward.clear()  # left by a forward that an exception ended
        if group is not None:
            group._training_state = TrainingState.IDLE
            group.wait_for_unshard()
            FSDPModule.reshard(module)


def _held(gradient: DTensor, whole: DTensor) -> Tensor:
    """This rank's part of the gradient of experts distributed over ranks."""
    if gradient.placements != whole.placements:
        gradient = gradient.redistribute(placements=whole.placements)
    return gradient._local_tensor


def _places(modules: Iterable[nn.Module]) -> dict[Tensor, tuple[nn.Module, str]]:
    """The first module that has a parameter, and its name there, of the parameters below `modules`."""
    found: dict[Tensor, tuple[nn.Module, str]] = {}
    for root in modules:
        for module in root.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                found.setdefault(parameter, (module, name))
    return found


def _state(module: FSDPModule) -> Any:
    return fully_shard.state(module)  # type: ignore[attr-defined]


def _check(raw: Any, names: Sequence[str], what: str) -> None:
    """Raise an InputError if FSDP2 lacks one of these names."""
    # Some properties of a class raise an error before a gradient is there.
    if missing := [name for name in names if not hasattr(type(raw), name) and not hasattr(raw, name)]:
        raise InputError(
            f"torch {torch.__version__}: FSDP2's {what} have no {', '.join(missing)}, which Octavo needs to shard. "
            f"pip install '{requirement('torch')}', or train on one rank."
        )
