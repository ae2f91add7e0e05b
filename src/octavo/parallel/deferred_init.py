"""Delayed initialisation: a model is built without memory, sharded, and only then given values, each rank its own part.

    with delayed_init(): model = …        parameters on the meta device, buffers with their values
    shard the model                       each rank knows which rows it holds
    materialise(model, device, values)    storage for those rows, and their values

Values come from a counter (`CounterInit`), from the modules' own initialisation (`octavo.parallel.module_init`), from files
(`Loaded`) or from rank 0 (`FromRank0`). Whichever it is, the model is the same on any number of ranks, and none of them holds
more of it than its own part and one parameter. A parameter or buffer that would be left without a value is an error, raised
before anything is changed.

Buffers are small and computed when a module is built (rotary tables, causal masks), so they are never delayed: a table that is
lost on the meta device could only be guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter

from octavo.errors import InputError
from octavo.parallel.coordination import Ranks
from octavo.parallel.shards import local_shard, named_tensors

_CHUNK = 1 << 18
"""Elements drawn at a time, in temporary 64-bit integers: six times as fast on a CPU as 2^22, and 20 MB instead of 200."""
_MIX_1, _MIX_2, _GOLDEN = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15, -0x61C8864680B583EB  # as signed 64-bit integers


@contextlib.contextmanager
def delayed_init(enabled: bool = True) -> Iterator[None]:
    """Build modules whose parameters are on the meta device and whose buffers are real.

    A parameter becomes a meta one when it is registered, so what its module does afterwards to initialise it costs nothing.
    `requires_grad`, ties, the parameter's class and its attributes stay. Only modules that this thread builds are concerned.

    Args:
        enabled: False builds as usual, for one rank of several that has the weights.

    Raises:
        InputError: inside, `from_pretrained` reads weights, which would be lost.
    """
    thread, seen = threading.get_ident(), _Seen()

    def hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or threading.get_ident() != thread:
            return None
        if parameter.is_meta or isinstance(parameter, UninitializedParameter):
            return None
        if getattr(parameter, "_is_hf_initialized", False):  # transformers marks so what it has read from a file
            raise InputError(
                f"from_pretrained under octavo.delayed_init: the weights it reads ({name} of {type(module).__name__} was the"
                " first) would be lost. Build the model by from_config and give the folder as load_from, or use"
                " from_pretrained outside of delayed_init."
            )
        return seen.on_meta(parameter)

    # torch's annotation of the hook leaves out that what it returns is registered instead.
    handle = register_module_parameter_registration_hook(hook) if enabled else None  # type: ignore[arg-type]
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


class _Seen:
    """Real parameters and what they became, so that one parameter in two modules stays one; forgotten when they are freed."""

    def __init__(self) -> None:
        self._became: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def on_meta(self, parameter: nn.Parameter) -> nn.Parameter:
        key = id(parameter)
        if key not in self._became:
            gone = weakref.ref(parameter, lambda _: self._became.pop(key, None))
            self._became[key] = gone, _with_data(parameter, torch.empty_like(parameter.data, device="meta"))
        return self._became[key][1]


def _with_data(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter over `data` of the same class and attributes."""
    plain = isinstance(parameter, DTensor) or type(parameter) is nn.Parameter
    cls = nn.Parameter if plain else type(parameter)
    # Not the constructor of a subclass, which may want arguments of its own.
    new = nn.Parameter(data, parameter.requires_grad) if plain else Tensor._make_subclass(cls, data, parameter.requires_grad)
    for name, value in vars(parameter).items():
        vars(new).setdefault(name, value)
    return new


class Values(Protocol):
    """Where the values of a model come from."""

    def check(self, model: nn.Module, names: Sequence[str]) -> None:
        """Raise an InputError if one of the named parameters and buffers, which are on meta, would get no value."""

    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        """Give the named parameters and buffers, which have storage now, their values."""


def names_on_meta(model: nn.Module) -> list[str]:
    """The parameters and buffers that have no storage, tied ones under their first name."""
    return [name for name, tensor in named_tensors(model) if tensor.is_meta]


def materialise(model: nn.Module, device: torch.device | str, values: Values) -> nn.Module:
    """Give a model on the meta device storage and values; what has them already moves to `device` and keeps them.

    Ties, `requires_grad` and the parts of a sharded model stay as they are.

    Args:
        model: wholly or partly on meta, sharded by FSDP2 or not. It is changed in place and returned.
        device: where parameters and buffers shall live.
        values: what fills them. `Loaded` and `FromRank0` replace values that are there, the others do not.

    Raises:
        InputError: a parameter or buffer that `values` cannot fill, by name; the model is as before.
    """
    names = names_on_meta(model)
    values.check(model, names)
    _give_storage(model, torch.device(device))
    values.fill(model, names)
    if left := names_on_meta(model):
        raise InputError(f"{_some(left)} of {type(model).__name__} has no value.")
    return model


@torch.no_grad()
def _give_storage(model: nn.Module, device: torch.device) -> None:
    new: dict[int, Tensor] = {}
    marks: list[tuple[dict[str, Any], str, dict[str, Any]]] = []
    for module in model.modules():
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slots in both:
            for name, tensor in slots.items():
                if isinstance(tensor, DTensor):
                    marks.append((slots, name, dict(vars(tensor._local_tensor))))
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in new:
                        data = torch.empty_like(tensor, device=device)
                        new[id(tensor)] = _with_data(tensor, data) if isinstance(tensor, nn.Parameter) else data
                    slots[name] = new[id(tensor)]
    # FSDP2 takes note of new parameters, and pads its parts, after any `_apply`. It pads with a new local tensor.
    model._apply(lambda tensor: tensor.to(device))
    for slots, name, attributes in marks:  # such as the functions by which a weight is gathered in FP8
        slots[name]._local_tensor.__dict__.update(attributes)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def refuse_buffers(model: nn.Module, names: Collection[str]) -> None:
    """Raise an InputError if one of the names is a buffer, whose value was computed when the model was built."""
    if lost := [name for name, _ in model.named_buffers() if name in names]:
        raise InputError(
            f"buffers {_some(lost)} are computed when {type(model).__name__} is built and have no value on the meta device:"
            " build the model under octavo.delayed_init(), which leaves buffers alone."
        )


@dataclass(frozen=True)
class CounterInit:
    """Octavo's own initialisation: matrices normal by counter, norms 1, biases 0, as Hugging Face's Llama has them."""

    seed: int
    std: float

    def check(self, model: nn.Module, names: Sequence[str]) -> None:
        """Refuse buffers without a value."""
        refuse_buffers(model, names)

    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        """Fill this rank's part of each named parameter."""
        initialise(model, seed=self.seed, std=self.std, names=names)


@torch.no_grad()
def initialise(model: nn.Module, *, seed: int, std: float, names: Collection[str] | None = None) -> None:
    """Fill this rank's part of a model's parameters (of the named ones alone, with `names`) as `CounterInit` says."""
    for name, parameter in model.named_parameters():
        if names is not None and name not in names:
            continue
        part = local_shard(parameter)
        if parameter.dim() >= 2:
            counter_normal_(part.local, seed=seed, name=name, std=std, first_element=part.first_element)
        else:
            part.local.fill_(0 if name.endswith("bias") else 1)


class Load(Protocol):
    """Reads a model's weights row by row, as `octavo.models.weight_loader.WeightLoader` does."""

    @property
    def names(self) -> Collection[str]:
        """The parameters and buffers that it has."""

    def __call__(self, name: str, out: Tensor, start: int) -> None:
        """Fill `out` with the rows from `start` on of the named tensor."""


@dataclass(frozen=True)
class Loaded:
    """Weights that are read, each rank the rows that it holds."""

    load: Load

    def check(self, model: nn.Module, names: Sequence[str]) -> None:
        """Refuse what is on meta and not among the weights."""
        missing = [name for name in names if name not in self.load.names]
        refuse_buffers(model, missing)
        if missing:
            raise InputError(f"{_some(missing)} of {type(model).__name__} is not among the weights that are loaded.")

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        """Fill this rank's part of all that is among the weights."""
        for name, tensor in named_tensors(model):
            if name in self.load.names:
                part = local_shard(tensor)
                if part.local.numel():
                    self.load(name, part.local, part.start)


@dataclass(frozen=True)
class FromRank0:
    """Weights that rank 0 has and the others receive, parameter by parameter: one whole parameter is on the wire at a time.

    Buffers come from rank 0 as well: from its `load` if that has them, else as its model has them.

    Attributes:
        load: on rank 0, what reads its weights; ignored elsewhere.
        ranks: all of them.
    """

    load: Load | None
    ranks: Ranks

    def check(self, model: nn.Module, names: Sequence[str]) -> None:
        """Refuse models that differ between the ranks, and what rank 0 has no value for; every rank raises.

        Rank 0 must `load` what is on meta or sharded there: it has no whole of it that it could send.
        """
        tensors = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named_tensors(model)]
        has = self.load.names if self.load is not None else ()
        missing = [name for name, t in named_tensors(model) if (t.is_meta or isinstance(t, DTensor)) and name not in has]
        said = self.ranks.all_gather(
            [hashlib.sha256(repr(tensors).encode()).hexdigest(), missing if self.ranks.rank == 0 else []]
        )
        for rank, (digest, _) in enumerate(said):
            if digest != said[0][0]:
                raise InputError(
                    f"load_state_dict_from_rank0: rank {rank} has another model than rank 0: names, shapes or dtypes differ."
                    " Build the same model on every rank."
                )
        lacking = said[0][1]
        refuse_buffers(model, lacking)
        if lacking:
            raise InputError(
                f"load_state_dict_from_rank0: rank 0 has no value for {_some(lacking)}. Build its model with weights."
            )

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        """Fill this rank's part of every parameter and buffer."""
        for name, tensor in named_tensors(model):
            part = local_shard(tensor)
            whole = torch.empty(part.shape, dtype=tensor.dtype, device=part.local.device)
            if self.ranks.rank == 0 and self.load is not None and name in self.load.names:
                self.load(name, whole, 0)
            elif self.ranks.rank == 0:
                whole.copy_(tensor)
            if self.ranks.size > 1:
                dist.broadcast(whole.view(-1).view(torch.uint8), 0)  # bytes: no backend knows every dtype
            part.copy_from(whole)


# Initial values without a random state. A generator's stream depends on the order and the number of draws, so ranks that
# hold different parts would start from different models. A counter does not: any rank can compute any slice. The hash is
# splitmix64's finaliser over the element number, offset by a key from SHA-256; normal values come from Box and Muller.


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift: torch has no unsigned 64-bit arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def key_of(seed: int, name: str) -> int:
    """A number of 64 bits, signed, for each pair of a seed and a name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big", signed=True)


@torch.no_grad()
def counter_normal_(tensor: Tensor, *, seed: int, name: str, std: float, first_element: int = 0) -> Tensor:
    """Fill `tensor` in place with normal values of mean 0, by its elements' numbers in the whole parameter.

    Args:
        tensor: contiguous, any float dtype; the elements `first_element`, `first_element + 1`, … of parameter `name`.
        seed: of the run.
        name: the parameter's name in the model.
        std: standard deviation.
        first_element: where in the flattened parameter this part begins.
    """
    flat = tensor.view(-1)
    key = key_of(seed, name)
    for start in range(0, flat.numel(), _CHUNK):
        stop = min(start + _CHUNK, flat.numel())
        number = torch.arange(first_element + start, first_element + stop, device=tensor.device)
        bits = _mix(_mix(number * _GOLDEN + key) ^ key)
        # 24 bits each for radius and angle: uniform in (0, 1] and [0, 1), exact in float32.
        radius = (_shift_right(bits, 40).float() + 1) / (1 << 24)
        angle = (_shift_right(bits << 24, 40).float()) / (1 << 24)
        flat[start:stop] = (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos() * std
    return tensor
