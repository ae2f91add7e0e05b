"""State dicts of a sharded model and its optimizer, by FSDP1's types and SMP's local one.

    FULL_STATE_DICT      whole tensors by Hugging Face's names, for `from_pretrained` (translate_on_save=False: Octavo's)
    SHARDED_STATE_DICT   DTensors, which load at any number of ranks; and the FP8 state
    LOCAL_STATE_DICT     this rank's rows, which share the parameters' memory; and the FP8 state
    SM_LOCAL_STATE_DICT  as LOCAL_STATE_DICT

The FP8 state (scales and amax histories) is bytes under the key `FP8`, so that training resumes with the same scales.
"""

from __future__ import annotations

import codecs
import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.nn.modules.module import _IncompatibleKeys

from octavo.collectives.blocks import has_part, local_of, parameters_of, with_block
from octavo.collectives.whole import whole_tensor
from octavo.compat.te.state import decode, encode, is_ours
from octavo.errors import InputError
from octavo.fp8.scaling import states_of, weight_is_new
from octavo.models.convert import Conversion, conversion_of
from octavo.nn.plain_names import stored_names
from octavo.parallel.fsdp import settle
from octavo.parallel.shards import have_same_parts, local_shard

FP8 = "octavo_fp8_state"
_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


class SMStateDictType(Enum):
    """SMP's additional type of state dicts: local rows."""

    SM_LOCAL_STATE_DICT = "sm_local_state_dict"


@dataclass
class Settings:
    """The type of state dicts, and the options of the model's and the optimizer's, as PyTorch's `StateDictSettings`."""

    state_dict_type: StateDictType | SMStateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: Any = None
    optim_state_dict_config: Any = None


class WrongState(InputError, RuntimeError):
    """A state dict of another model; a RuntimeError too, as from PyTorch's `load_state_dict`."""


class Fp8State(bytes):
    """The FP8 state in a state dict, with a reference to the model of the other entries, which may have a prefix.

    It is pickled as plain bytes, so that `weights_only` loads it without this class.
    """

    model: weakref.ref[nn.Module]

    def __new__(cls, data: bytes, model: nn.Module) -> Fp8State:
        """data: the bytes of `encode`."""
        self = super().__new__(cls, data)
        self.model = weakref.ref(model)
        return self

    def __reduce__(self) -> Any:
        return codecs.encode, (self.decode("latin1"), "latin1")

    def __deepcopy__(self, memo: Any) -> Fp8State:
        return self

    def loaded(self, data: Any) -> Any:
        """Restore the model's FP8 state, after a checkpoint has been read into the state dict."""
        model = self.model()
        if model is None or not isinstance(data, bytes):
            return data
        load_fp8(model, data)
        return Fp8State(data, model)


def states_in(state: Any) -> Iterator[Fp8State]:
    """The FP8 states in a state dict, and in state dicts nested in it."""
    nested = state.values() if isinstance(state, Mapping) else ()
    for one in (state, *nested):
        if isinstance(one, Mapping):
            yield from (value for value in one.values() if isinstance(value, Fp8State))


def with_shards(state: Mapping[Any, Any], among: Callable[[Tensor], bool]) -> dict[Any, Any]:
    """A state dict with shards of the whole tensors in place of models' local rows.

    among: True for a tensor of which the saving ranks hold all rows; rows of others stay.

    Raises:
        InputError: rows that are no longer a model's.
    """
    sharded = dict(state)
    for key, value in state.items():
        if isinstance(value, Fp8State):
            sharded |= _shards(state, str(key).removesuffix(FP8), value.model(), among)
    return sharded


def _shards(
    state: Mapping[Any, Any], prefix: str, model: nn.Module | None, among: Callable[[Tensor], bool]
) -> dict[str, Tensor]:
    if model is None:
        raise InputError("a local state dict needs its model when it is saved or loaded: keep the model until then.")
    shards: dict[str, Tensor] = {}
    for name, tensor in tensors_of(model).items():
        value = state.get(f"{prefix}{name}")
        if value is None or has_part(value) or not has_part(tensor) or not among(tensor):
            continue
        if not isinstance(value, Tensor) or value.data_ptr() != local_shard(tensor).local.data_ptr():
            raise InputError(
                f"{prefix}{name} of a local state dict is not the model's tensor, and ranks that share a folder would "
                "write over each other's rows: save state_dict() as it is, or a SHARDED_STATE_DICT."
            )
        shards[f"{prefix}{name}"] = tensor.detach()
    return shards


def clean(name: str) -> str:
    """A parameter's name without the wrappers around its modules."""
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name


def stored_names_of(model: nn.Module) -> dict[str, str]:
    """`stored_names` without wrappers: name of a parameter or buffer in the model → in state dicts."""
    return {clean(name): clean(stored) for name, stored in stored_names(model).items()}


def sharded_in(model: Any) -> list[Any]:
    """Every `ShardedModel` in `model`, itself included, in wrappers of any kind.

    Wrappers may forward attributes, so `__dict__` decides what belongs to an object. A wrapper that hides its model from
    `modules()` forwards `sharded_model`.
    """
    modules = getattr(model, "modules", None)
    sharded = [module for module in modules() if "state_settings" in vars(module)] if callable(modules) else []
    hidden = None if sharded else getattr(model, "sharded_model", None)
    return [hidden] if hasattr(hidden, "state_settings") else sharded


@contextlib.contextmanager
def typed(owners: list[Any], settings: Settings) -> Iterator[None]:
    """Context in which state dicts of these models have this type."""
    before = [owner.state_settings for owner in owners]
    for owner in owners:
        owner.state_settings = settings
    try:
        yield
    finally:
        for owner, one in zip(owners, before, strict=True):
            owner.state_settings = one


def sm_state_dict_type(
    model: Any, state_dict_type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> contextlib.AbstractContextManager[Any]:
    """Context in which state dicts of `model` have this type, SMP's or FSDP's. For PyTorch's FSDP, SMP's is the local type.

    Raises:
        InputError: nothing in the model is sharded.
    """
    if owners := sharded_in(model):
        return typed(owners, Settings(state_dict_type, state_dict_config, optim_state_dict_config))
    native = (
        [one for one in model.modules() if isinstance(one, FullyShardedDataParallel)] if isinstance(model, nn.Module) else []
    )
    if not native:
        raise InputError("sm_state_dict_type: wrap the model in FullyShardedDataParallel first.")
    if not isinstance(state_dict_type, SMStateDictType):
        return FullyShardedDataParallel.state_dict_type(model, state_dict_type, state_dict_config, optim_state_dict_config)
    return _native_local(model, native, state_dict_config, optim_state_dict_config)


@contextlib.contextmanager
def _native_local(model: nn.Module, native: list[FullyShardedDataParallel], *configs: Any) -> Iterator[None]:
    """PyTorch's local type. With `use_orig_params` it saves a flat parameter and its views; loading drops the flat one."""

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for inside in ("", "_fsdp_wrapped_module."):
            state.pop(f"{prefix}{inside}_flat_param", None)

    hooks = [one.register_load_state_dict_pre_hook(drop) for one in native if one._use_orig_params]
    try:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, *configs):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by stored name, tied ones once, under the first of Octavo's names."""
    way, stored, blocks = conversion_of(model), stored_names_of(model), parameters_of(model)
    tensors = {clean(name): tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    state = {name: with_block(tensor, blocks.get(tensor)) for name, tensor in tensors.items()}
    return {stored.get(name, name): tensor for name, tensor in state.items() if way is None or name not in way.tied}


@torch.no_grad()
def model_state(model: nn.Module, settings: Settings) -> dict[str, Any]:
    """The state of a sharded model by the type of `settings`. Collective for the full type."""
    settle(model)
    tensors = tensors_of(model)
    if settings.state_dict_type is StateDictType.FULL_STATE_DICT:
        return _full(model, tensors, settings.state_dict_config)
    if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        state: dict[str, Any] = {name: tensor.detach() for name, tensor in tensors.items()}
    else:
        # Detached: in some versions of PyTorch FSDP2 leaves hooks on the rows, which torch.save would pickle.
        state = {name: local_shard(tensor).local.detach() for name, tensor in tensors.items()}
    offloads = getattr(settings.state_dict_config, "offload_to_cpu", False)
    if offloads and settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
        state = {name: tensor.cpu() for name, tensor in state.items()}
    return {**state, FP8: Fp8State(encode(model).numpy().tobytes(), model)}


def _full(model: nn.Module, tensors: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    way = conversion_of(model) if getattr(config, "translate_on_save", True) else None
    everywhere, to_cpu = not getattr(config, "rank0_only", False), getattr(config, "offload_to_cpu", False)
    returned = everywhere or not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = whole_tensor(tensor).detach()
        if returned:
            whole = whole.cpu() if to_cpu else whole.clone()
            state |= {name: whole} if way is None else way.split(name, whole)
    if way is not None and returned:
        state |= {way.names(tied)[0]: state[way.names(first)[0]] for tied, first in way.tied.items()}
    return state


@torch.no_grad()
def load_model_state(model: nn.Module, state: Mapping[str, Any], settings: Settings, *, strict: bool) -> _IncompatibleKeys:
    """Load a state of any type: whole tensors by Hugging Face's or Octavo's names, DTensors, or this rank's rows.

    Raises:
        WrongState: missing or unexpected keys, if `strict`; no key of the model (an empty state loads, except by the local
            types); or different shapes.
    """
    settle(model)
    tensors, way = tensors_of(model), conversion_of(model)
    stored = stored_names_of(model)
    entries = {stored.get(clean(name), clean(name)): value for name, value in state.items() if name != FP8}
    local = settings.state_dict_type in (StateDictType.LOCAL_STATE_DICT, SMStateDictType.SM_LOCAL_STATE_DICT)
    weights = {id(getattr(one.module, part, None)): one for _, one in states_of(model) for part in one.parts}
    products = {clean(name): weights[id(p)] for name, p in model.named_parameters() if id(p) in weights}
    products = {stored.get(name, name): one for name, one in products.items()}
    missing, used = [], set()
    for name, tensor in tensors.items():
        value, names = _found(name, entries, way)
        if value is None:
            missing.append(name)
            continue
        used |= names
        _copy(name, tensor, value)
        if name in products and not state.get(FP8):
            weight_is_new(products[name])
    if len(missing) == len(tensors) and (entries or local):
        described = f"none of its keys, such as {next(iter(entries))!r}, is" if entries else "none of its keys is"
        raise WrongState(
            f"this state dict has no key of {type(model).__name__}: {described} one of the model's, such as "
            f"{next(iter(tensors))!r}. Load it into the model, with the wrappers, that saved it."
        )
    tied = set() if way is None else {one for name in way.tied for one in (name, *way.names(name))}
    unexpected = [name for name in entries if name not in used and name not in tied]
    if strict and (missing or unexpected):
        raise WrongState(
            f"Error(s) in loading state_dict for {type(model).__name__}: missing keys: {missing[:6]}, unexpected keys: "
            f"{unexpected[:6]}"
        )
    load_fp8(model, state.get(FP8))
    return _IncompatibleKeys(missing, unexpected)


def load_fp8(model: nn.Module, data: Any) -> None:
    """Restore the FP8 state of `model_state`; no effect for None and empty bytes."""
    if not data:
        return
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if not is_ours(tensor):
        raise InputError(f"the entry {FP8} of this state dict is not an FP8 state: it was changed after it was saved.")
    decode(model, tensor)


def _found(name: str, entries: Mapping[str, Any], way: Conversion | None) -> tuple[Any, set[str]]:
    """(a parameter's value, by Octavo's name or converted from Hugging Face's tensors, or None; the used names)."""
    if name in entries:
        return entries[name], {name}
    names = () if way is None else way.names(name)
    if way is None or not names or any(one not in entries for one in names):
        return None, set()
    parts = tuple(whole_tensor(entries[one]) for one in names)
    return way.join(name, parts), set(names)


def _copy(name: str, tensor: Tensor, value: Tensor) -> None:
    part = local_shard(tensor)
    if has_part(value):
        value = local_of(value) if have_same_parts(value, tensor) else whole_tensor(value)
    if tuple(value.shape) == tuple(part.local.shape) and tuple(value.shape) != part.shape:
        part.local.copy_(value)
    elif tuple(value.shape) == part.shape:
        part.copy_from(value)
    else:
        local = " A local state loads at the ranks and hybrid_shard_degree that saved it; sharded and full ones load at any."
        raise WrongState(
            f"{name}: the state has the shape {list(value.shape)}, and the model {list(part.shape)}, of which this rank has "
            f"{part.local.shape[0] if part.shape else 1} rows.{local if value.shape[1:] == part.local.shape[1:] else ''}"
        )
