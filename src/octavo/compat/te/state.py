"""FP8 state of Transformer Engine's layers: scales and histories in a state dict (`_extra_state`), and `fp8_meta`.

Parameters have Transformer Engine's names and order of rows: gate before up, and query, key and value as one or as three
parameters; both forms load. The entry is bytes in a uint8 tensor, never unpickled.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load as _load
from safetensors.torch import save as _save
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from octavo.compat.missing import MissingName, way_of
from octavo.compat.notices import say_once
from octavo.compat.te.device import default_device
from octavo.compat.te.parts import rejoined
from octavo.errors import InputError
from octavo.fp8.formats import Format
from octavo.fp8.recipe import DelayedScaling, Operand
from octavo.fp8.scaling import ModuleState, load_state_records, state_records, states_of
from octavo.nn.attention import MultiheadAttention
from octavo.nn.plain_names import stored_names
from octavo.stored_names import record_name

KEY = "_extra_state"
_MAGIC = b"octavo-fp8:"


def encode(module: nn.Module) -> Tensor:
    """The FP8 state of a module's layers as uint8 [bytes] on the CPU: a header in JSON, and safetensors."""
    recipe = next((state.history_recipe for _, state in states_of(module) if state.records), None)
    header: dict[str, Any] = {}
    if isinstance(recipe, DelayedScaling):
        header = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe) if f.init}
        header["fp8_format"] = recipe.fp8_format.name
    stored = stored_names(module)
    tensors = state_records(module) if header else {}
    records = {record_name(name, stored): tensor.cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(header).encode()
    return torch.frombuffer(bytearray(_MAGIC + len(text).to_bytes(4, "little") + text + _save(records)), dtype=torch.uint8)


def is_ours(state: Any) -> bool:
    """True for an entry of `encode`."""
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.dim() != 1 or len(state) < len(_MAGIC):
        return False
    return bytes(state[: len(_MAGIC)].tolist()) == _MAGIC


def decode(module: nn.Module, state: Tensor) -> None:
    """Restore the FP8 state of a module's layers from uint8 [bytes] of `encode`."""
    data = state.cpu().numpy().tobytes()[len(_MAGIC) :]
    size = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + size])
    if not header:
        return
    recipe = DelayedScaling(**header | {"fp8_format": Format[header["fp8_format"]]})
    object.__setattr__(recipe, "native", False)
    named = {stored: name for name, stored in stored_names(module).items()}
    records = {record_name(name, named): tensor for name, tensor in _load(data[4 + size :]).items()}
    load_state_records(module, records, recipe)


WAYS = {
    **dict.fromkeys(("fp8_meta", "quantizers", "fp8_initialized"), "octavo.fp8.inspect(layer) shows scales and histories."),
    **dict.fromkeys(("fp8", "fp8_calibration"), "Whether FP8 is on is known only inside fp8_autocast."),
    "primary_weights_in_fp8": "Parameters are stored in params_dtype.",
    **dict.fromkeys(("backward_dw", "need_backward_dw"), "Gradients of weights are computed in backward."),
    **dict.fromkeys(
        ("get_weight_workspace", "get_fp8_weights_scratchpad", "set_fp8_weights", "get_quantized_weight"),
        "FP8 weights exist during a forward, or with is_first_microbatch during the forwards of a step.",
    ),
    **dict.fromkeys(
        (
            "init_fp8_metadata", "init_fp8_meta_tensors", "set_meta_tensor", "fp8_init", "prepare_forward", "pre_forward",
            "end_forward", "set_activation_dtype", "set_tensor_parallel_attributes",
        ),
        "A forward within fp8_autocast creates the FP8 state: leave the call out.",
    ),
    **dict.fromkeys(
        ("get_fp8_params", "get_fp8_meta_tensors", "reset_fp8_meta_tensors", "adjust_amax_history_length"),
        "octavo.fp8.inspect(layer) shows scales and histories; their length is amax_history_len of the recipe.",
    ),
}  # fmt: skip
"""Absent attribute of Transformer Engine's layers → the remedy."""


class Named(nn.Module):
    """Base of layers: an absent attribute of Transformer Engine's layers raises MissingName with the remedy."""

    def __getattr__(self, name: str) -> Any:
        if name in WAYS:
            raise MissingName(way_of(f"{type(self).__name__}.{name}", WAYS))
        return super().__getattr__(name)


class Stateful(Named):
    """Base of the layers that have FP8 state."""

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Accepted without effect for a group of one rank.

        Raises:
            InputError: a group of several ranks.
        """
        if tp_group is not None and dist.get_world_size(tp_group) > 1:
            raise InputError(
                f"set_tensor_parallel_group with a group of {dist.get_world_size(tp_group)} ranks: a single layer is not "
                "split. Leave it out; octavo.init's tensor_parallel_degree splits a whole decoder."
            )

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register_load_state_dict_pre_hook(_before_loading)
        self.register_load_state_dict_post_hook(_after_loading)

    def get_extra_state(self) -> Tensor:
        """FP8 scales and amax histories, uint8 [bytes]."""
        return encode(self)

    def set_extra_state(self, state: Any) -> None:
        """Restore them; Transformer Engine's own state is skipped, logged once."""
        vars(self)["loaded_state"] = state if is_ours(state) else None
        if is_ours(state):
            decode(self, state)
        elif isinstance(state, Tensor) and state.numel():
            say_once(
                KEY,
                "this checkpoint has Transformer Engine's FP8 scales, which are pickled and therefore skipped: weights are "
                "loaded, and the amax histories start empty.",
            )


_COPIES = (
    "fp8_meta has copies of scales and histories, and a write would be lost: give the recipe to fp8_autocast, and load scales "
    "by load_state_dict."
)


class Meta(dict[str, Any]):
    """`fp8_meta` of a layer: it refuses writes."""

    def _refuse(self, *args: Any, **words: Any) -> Any:
        raise InputError(_COPIES)

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = _refuse
    __ior__ = _refuse


class Copy(Tensor):
    """A read-only copy of scales or histories: writes raise an InputError; results computed from it are plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if (writes and args and isinstance(args[0], cls)) or isinstance((kwargs or {}).get("out"), cls):
            raise InputError(_COPIES)
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(Tensor) if isinstance(result, cls) and name != "__getitem__" else result


_IN_PLACE = tuple(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor"))


class Scaling(NamedTuple):
    """Scales and amax histories of forward or backward, in Transformer Engine's order of tensors: read-only copies."""

    scale: Tensor
    """float32 [n]; 1 for a tensor that is not cast."""
    amax_history: Tensor
    """float32 [L, n], the newest amax first."""


class Resettable:
    """Base of layers whose `reset_parameters` moves parameters off the meta device, as Transformer Engine's does.

    Attributes:
        is_constructed: the constructor, which leaves parameters on the meta device, has returned.
    """

    is_constructed = False

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        """Initialize; parameters on the meta device get memory on the GPU, or the CPU without one. defer_init: do nothing."""
        if not defer_init:
            self.take_from_meta()
            super().reset_parameters()  # type: ignore[misc]

    def take_from_meta(self) -> None:
        """Give this module's parameters on the meta device memory, once the layer is constructed.

        Not under a dispatch mode: deferred initialisation runs `reset_parameters` on meta tensors to see what it writes.
        """
        layer: Any = self
        if not layer.is_constructed or _get_current_dispatch_mode() is not None:
            return
        for name, parameter in list(layer._parameters.items()):
            if parameter is not None and parameter.is_meta:
                new = nn.Parameter(torch.empty_like(parameter, device=default_device() or "cpu"), parameter.requires_grad)
                new.__dict__.update(parameter.__dict__)
                layer._parameters[name] = new


class OneRank(Named):
    """Base of layers: the attributes of tensor parallelism that libraries read, for a single rank."""

    tp_size = 1
    tp_group = None
    sequence_parallel = False


class Readable(Resettable, OneRank):
    """Base of layers with matrix products: the attributes that libraries read."""

    parallel_mode = None
    return_bias: bool

    @property
    def use_bias(self) -> bool:
        """True if the layer has a bias, not counting its norm's."""
        names = (name for name, parameter in self._parameters.items() if parameter is not None and "layer_norm" not in name)
        return any("bias" in name for name in names)

    @property
    def apply_bias(self) -> bool:
        """True if the layer adds its bias, False if it returns it."""
        return self.use_bias and not self.return_bias

    @property
    def fp8_meta(self) -> Mapping[str, Any]:
        """Read-only: recipe, num_gemms, fp8_checkpoint and, once there are histories, scaling_fwd and scaling_bwd."""
        states = [state for _, state in states_of(self)]
        recipe = next((state.recipe for state in states if state.recipe is not None), None)
        meta: dict[str, Any] = {"recipe": recipe, "num_gemms": len(states), "fp8_checkpoint": recipe is not None}
        if any(state.records for state in states):
            meta["scaling_fwd"] = _scaling(states, (Operand.INPUT, Operand.WEIGHT, None))
            meta["scaling_bwd"] = _scaling(states, (Operand.GRAD_OUTPUT, None))
        return Meta(meta)


class Products(Readable, Stateful):
    """Base of the layers with products that a script constructs."""


@torch.inference_mode()  # writes to its results raise
def _scaling(states: Sequence[ModuleState], operands: Sequence[Operand | None]) -> Scaling:
    slots = [state.records.get(operand) if operand is not None else None for state in states for operand in operands]
    one = next(slot for state in states for slot in state.records.values())
    length = max(len(slot.history) for slot in slots if slot is not None)
    none = one.scale.new_ones(()), one.scale.new_zeros(length)
    pairs = [none if slot is None else (slot.scale, slot.history) for slot in slots]
    scales, histories = torch.stack([scale for scale, _ in pairs]), torch.stack([history for _, history in pairs], 1)
    return Scaling(scales.as_subclass(Copy), histories.as_subclass(Copy))


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


class Stateless(Resettable, Named):
    """Base of layers without FP8 state: their `_extra_state` is empty, as in Transformer Engine."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register_load_state_dict_pre_hook(_add_entry)

    def get_extra_state(self) -> Tensor:
        """Nothing: uint8 [0]."""
        return _nothing()

    def set_extra_state(self, state: Any) -> None:
        """Accepted without effect."""


def _add_entry(module: Stateless, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Add an empty entry to a state dict that has parameters only."""
    state.setdefault(f"{prefix}{KEY}", _nothing())


def _after_loading(module: Stateful, *others: Any) -> None:
    """Restore the FP8 state of contained layers: they load later, and begin anew with weights that come without scales."""
    if (state := vars(module).pop("loaded_state", None)) is not None:
        decode(module, state)


def _before_loading(module: Stateful, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Convert a state dict of Transformer Engine's layer, or of this one, to this layer's parameters."""
    keys = [key for key in state if key.startswith(prefix) and key.rpartition(".")[2] == KEY]
    if not is_ours(state.get(f"{prefix}{KEY}")):
        foreign = next((state[key] for key in keys if isinstance(state[key], Tensor) and state[key].numel()), None)
        state[f"{prefix}{KEY}"] = _nothing() if foreign is None else foreign
    for key in keys:
        if key != f"{prefix}{KEY}":
            state.pop(key)
    for name, child in module.named_modules():
        if isinstance(child, MultiheadAttention):
            heads = {"query": child.heads, "key": child.groups, "value": child.groups}
            for layer, parts in _PRODUCTS.items():
                if hasattr(child, layer):
                    at = f"{prefix}{name}.{layer}." if name else f"{prefix}{layer}."
                    counts = {part: heads[part] for part in parts}
                    rejoined(state, at, getattr(child, layer), counts, grouped=getattr(child, "rows_grouped", True))


_PRODUCTS = {
    "layernorm_qkv": ("query", "key", "value"), "qkv": ("query", "key", "value"),
    "layernorm_query": ("query",), "key_value": ("key", "value"),
}  # fmt: skip
"""Product of an attention → the parts of its rows."""
