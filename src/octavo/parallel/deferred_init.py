"""Delayed initialisation: a model is built without memory, sharded, and then each rank fills its part.

    with delayed_init(): model = …        parameters on the meta device, buffers with their values
    shard the model                       each rank knows its rows
    materialise(model, device, values)    storage for those rows, and their values

Values come from a counter (`CounterInit`), the modules' initialisation (`octavo.parallel.module_init`), files (`Loaded`) or
rank 0 (`FromRank0`), and are the same on any number of ranks. No rank holds more than its part and one whole parameter.
Buffers (rotary tables, causal masks) are small and computed in constructors, so they are never delayed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from octavo.collectives.blocks import has_part
from octavo.errors import InputError, some
from octavo.nn.lora import is_adapter
from octavo.nn.plain_names import stored_names
from octavo.parallel.coordination import Ranks
from octavo.parallel.shards import local_shard, named_tensors

_CHUNK = 1 << 18
"""Elements drawn at a time, in temporary 64-bit integers: six times as fast on a CPU as 2^22, and 20 MB instead of 200."""
_CHUNK_ON_GPU = 1 << 23
"""The same on a GPU, where a chunk is two dozen launches: 70B parameters in chunks of 2^18 would be 6 million."""
_MIX_1, _MIX_2, _GOLDEN = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15, -0x61C8864680B583EB  # as signed 64-bit integers


@contextlib.contextmanager
def delayed_init(enabled: bool = True) -> Iterator[None]:
    """Build modules with parameters on the meta device and real buffers.

    A parameter moves to the meta device when it is registered, so that its initialisation costs nothing. `requires_grad`, ties,
    the parameter's class and attributes stay. Modules built on other threads are not affected.

    Args:
        enabled: False builds as usual, for the rank that has the weights.

    Raises:
        InputError: inside, `from_pretrained` reads weights, which would be lost.
    """
    thread = threading.get_ident()
    on_meta = WeakIdKeyDictionary()  # real parameter → meta one, so that a tied parameter stays one

    def hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or threading.get_ident() != thread:
            return None
        if parameter.is_meta or isinstance(parameter, UninitializedParameter):
            return None
        if getattr(parameter, "_is_hf_initialized", False):  # transformers marks tensors read from files
            raise InputError(
                f"from_pretrained under octavo.delayed_init: the weights it reads ({name} of {type(module).__name__} was the"
                " first) would be lost. Build the model by from_config and give the folder as load_from, or use"
                " from_pretrained outside of delayed_init."
            )
        if parameter not in on_meta:
            on_meta[parameter] = _with_data(parameter, torch.empty_like(parameter.data, device="meta"))
        return on_meta[parameter]

    # The result of the hook is registered instead; torch's annotation leaves that out.
    handle = register_module_parameter_registration_hook(hook) if enabled else None  # type: ignore[arg-type]
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def _with_data(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter over `data` of the same class and attributes."""
    plain = isinstance(parameter, DTensor) or type(parameter) is nn.Parameter
    cls = nn.Parameter if plain else type(parameter)
    # Not the constructor of a subclass, which may take other arguments.
    new = nn.Parameter(data, parameter.requires_grad) if plain else Tensor._make_subclass(cls, data, parameter.requires_grad)
    for name, value in vars(parameter).items():
        vars(new).setdefault(name, value)
    return new


class Values(Protocol):
    """The source of a model's values."""

    def check(self, model: nn.Module, names: Sequence[str]) -> None:
        """Raise an InputError if one of the named tensors, all on meta, would get no value."""

    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        """Fill the named tensors, which have storage by now."""


def materialise(model: nn.Module, device: torch.device | str, values: Values) -> nn.Module:
    """Allocate and fill a model on the meta device, in place; tensors with values are moved to `device` unchanged.

    Ties, `requires_grad` and the parts of a sharded model stay.

    Args:
        model: wholly or partly on meta, sharded by FSDP2 or not.
        device: of all parameters and buffers.
        values: their source. `Loaded` and `FromRank0` also replace existing values.

    Raises:
        InputError: a parameter or buffer that `values` cannot fill, by name; the model is unchanged.
    """
    names = [name for name, tensor in named_tensors(model) if tensor.is_meta]
    values.check(model, names)
    _give_storage(model, torch.device(device))
    values.fill(model, names)
    return model


@torch.no_grad()
def _give_storage(model: nn.Module, device: torch.device) -> None:
    new: dict[int, Tensor] = {}  # by the id of the tensor on meta, so that a tied one stays one
    marks: list[tuple[dict[str, Any], str, dict[str, Any]]] = []
    members: list[dict[str, Any]] = [slots for module in model.modules() for slots in (module._parameters, module._buffers)]
    for slots in members:
        for name, tensor in slots.items():
            if isinstance(tensor, DTensor):
                marks.append((slots, name, dict(vars(tensor._local_tensor))))
            if tensor is not None and tensor.is_meta:
                if id(tensor) not in new:
                    data = torch.empty_like(tensor, device=device)
                    new[id(tensor)] = _with_data(tensor, data) if isinstance(tensor, nn.Parameter) else data
                slots[name] = new[id(tensor)]
    # FSDP2 takes note of new parameters, and pads its parts, after any `_apply`. It pads with a new local tensor.
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(False)  # True would untie parameters
    try:
        model._apply(lambda tensor: tensor.to(device))
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
    for slots, name, attributes in marks:  # such as the functions by which a weight is gathered in FP8
        slots[name]._local_tensor.__dict__.update(attributes)


def refuse_buffers(model: nn.Module, names: Collection[str]) -> None:
    """Raise an InputError if one of the names is a buffer: only the model's constructor can compute it."""
    if lost := [name for name, _ in model.named_buffers() if name in names]:
        raise InputError(
            f"buffers {some(lost, 3)} are computed when {type(model).__name__} is built and have no value on the meta device:"
            " build the model under octavo.delayed_init(), which does not delay buffers."
        )


@dataclass(frozen=True)
class CounterInit:
    """Octavo's initialisation: matrices normal by counter, norms 1, biases 0, as Hugging Face's Llama has them.

    The counter of a parameter is that of its stored name.
    """

    seed: int
    std: float

    def check(self, model: nn.Module, names: Sequence[str]) -> None:
        """Refuse buffers without a value."""
        refuse_buffers(model, names)

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        """Fill this rank's part of each named parameter."""
        stored = stored_names(model)
        for name, parameter in named_tensors(model):
            if name not in names:
                continue
            part = local_shard(parameter)
            if parameter.dim() >= 2:
                counter_normal_(part.local, part.numbers, seed=self.seed, name=stored.get(name, name), std=self.std)
            else:
                part.local.fill_(0 if name.endswith("bias") else 1)
            part.clear_padding()


@dataclass(frozen=True)
class BesideAdapters:
    """The values of `base`, and initial ones of adapters: B 0, and A [r, K] normal with PEFT's variance 1 / (3 · K)."""

    base: Values
    seed: int

    def check(self, model: nn.Module, names: Sequence[str]) -> None:
        """`base`'s check of its tensors."""
        self.base.check(model, [name for name in names if not is_adapter(name)])

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        """Fill this rank's part of each named tensor."""
        self.base.fill(model, [name for name in names if not is_adapter(name)])
        stored = stored_names(model)
        for name, parameter in named_tensors(model):
            if name not in names or not is_adapter(name):
                continue
            part = local_shard(parameter)
            if name.endswith("lora_A"):
                std = (3 * part.shape[1]) ** -0.5
                counter_normal_(part.local, part.numbers, seed=self.seed, name=stored.get(name, name), std=std)
            else:
                part.local.zero_()
            part.clear_padding()


class Load(Protocol):
    """Reads a model's weights row by row, as `octavo.models.weight_loader.WeightLoader` does."""

    @property
    def names(self) -> Collection[str]:
        """The model's parameters and buffers."""

    def __call__(self, name: str, out: Tensor, start: int) -> None:
        """Fill `out` [n, …] with the rows from `start` on of the named tensor [N, …]."""


@dataclass(frozen=True)
class Loaded:
    """Weights read from files or memory, by each rank its rows."""

    load: Load

    def check(self, model: nn.Module, names: Sequence[str]) -> None:
        """Refuse tensors on meta that are not among the weights."""
        missing = [name for name in names if name not in self.load.names]
        refuse_buffers(model, missing)
        if missing:
            raise InputError(f"{some(missing, 3)} of {type(model).__name__} is not among the weights that are loaded.")

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        """Fill this rank's part of every tensor among the weights."""
        for name, tensor in named_tensors(model):
            if name in self.load.names:
                local_shard(tensor).load(functools.partial(self.load, name))


@dataclass(frozen=True)
class FromRank0:
    """Parameters and buffers broadcast from rank 0 of several, one whole tensor at a time.

    Attributes:
        load: rank 0's weights, None on the others; a tensor missing there is sent from rank 0's model.
        ranks: all ranks.
    """

    load: Load | None
    ranks: Ranks

    def check(self, model: nn.Module, names: Sequence[str]) -> None:
        """Refuse models that differ between the ranks, and tensors without a value on rank 0; every rank raises.

        Rank 0 must `load` a tensor that is on meta or sharded there: it has no whole to send.
        """
        tensors = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named_tensors(model)]
        has = self.load.names if self.load is not None else ()
        missing = [name for name, t in named_tensors(model) if (t.is_meta or has_part(t)) and name not in has]
        digests = self.ranks.all_gather(hashlib.sha256(repr(tensors).encode()).digest())
        if other := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise InputError(
                f"load_state_dict_from_rank0: rank {other[0]} has another model than rank 0: names, shapes or dtypes differ."
                " Build the same model on every rank."
            )
        missing = self.ranks.all_gather(missing)[0]
        refuse_buffers(model, missing)
        if missing:
            raise InputError(
                f"load_state_dict_from_rank0: rank 0 has no value for {some(missing, 3)}. Build its model with weights."
            )

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        """Fill this rank's part of every parameter and buffer; every rank raises rank 0's error."""
        for name, tensor in named_tensors(model):
            part = local_shard(tensor)
            whole = torch.empty(part.shape, dtype=tensor.dtype, device=part.local.device)
            with self.ranks.sharing_errors():
                if self.load is not None and name in self.load.names:
                    self.load(name, whole, 0)
                elif self.ranks.rank == 0:
                    whole.copy_(tensor)
            dist.broadcast(whole.view(-1).view(torch.uint8), 0)  # bytes: no backend knows every dtype
            part.copy_from(whole)


# Initial values by a counter, so that any rank can compute any slice; a generator's stream depends on the draws before. The
# hash is splitmix64's finaliser over the element number, offset by a key from SHA-256; Box and Muller make normal values of it.


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift: torch has no unsigned 64-bit arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def key_of(seed: int, name: str) -> int:
    """A signed 64-bit number for a seed and a name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big", signed=True)


@torch.no_grad()
def counter_normal_(tensor: Tensor, numbers: Callable[[int, int], Tensor], *, seed: int, name: str, std: float) -> Tensor:
    """Fill `tensor`, contiguous and of any float dtype, in place with normal values of mean 0.

    numbers: of its flattened elements from start to stop, int64: the index of each in the flattened parameter `name`, as
    `LocalShard.numbers` has them.
    """
    flat = tensor.view(-1)
    key, chunk = key_of(seed, name), _CHUNK_ON_GPU if tensor.is_cuda else _CHUNK
    for start in range(0, flat.numel(), chunk):
        stop = min(start + chunk, flat.numel())
        bits = _mix(_mix(numbers(start, stop) * _GOLDEN + key) ^ key)
        # 24 bits each for radius and angle: uniform in (0, 1] and [0, 1), exact in float32.
        radius = (_shift_right(bits, 40).float() + 1) / (1 << 24)
        angle = (_shift_right(bits << 24, 40).float()) / (1 << 24)
        flat[start:stop] = (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos() * std
    return tensor
