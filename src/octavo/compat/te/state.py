"""What the layers keep in a state dict besides parameters: FP8 scales and histories, under Transformer Engine's `_extra_state`.

It also says whose state dict it is. Transformer Engine's has gate and up one below the other where Octavo's has them in blocks
of rows (`octavo.nn.mlp.interleave`), under the same name and in the same shape, and perhaps query, key and value apart: these
are converted on loading. The entry is bytes in a uint8 tensor, never unpickled.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from safetensors.torch import load as _load
from safetensors.torch import save as _save
from torch import Tensor, nn

from octavo.errors import InputError, warn
from octavo.fp8.formats import Format
from octavo.fp8.recipe import DelayedScaling
from octavo.fp8.scaling import load_state_records, state_records, states_of
from octavo.kernels.activation import is_gated
from octavo.nn.attention import MultiheadAttention, merge_qkv
from octavo.nn.mlp import LayerNormMLP, interleave

KEY = "_extra_state"
_MAGIC = b"octavo-fp8:"
_said: list[str] = []


def encode(module: nn.Module) -> Tensor:
    """The FP8 state of a module's layers, uint8 on the CPU."""
    recipe = next((state.history_recipe for _, state in states_of(module) if state.slots), None)
    header: dict[str, Any] = {}
    if isinstance(recipe, DelayedScaling):
        header = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe) if f.init}
        header["fp8_format"] = recipe.fp8_format.name
    records = {name: tensor.cpu().contiguous() for name, tensor in state_records(module).items()} if header else {}
    text = json.dumps(header).encode()
    return torch.frombuffer(bytearray(_MAGIC + len(text).to_bytes(4, "little") + text + _save(records)), dtype=torch.uint8)


def is_ours(state: Any) -> bool:
    """True for an entry of `encode`."""
    if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.dim() != 1 or len(state) < len(_MAGIC):
        return False
    return bytes(state[: len(_MAGIC)].tolist()) == _MAGIC


def decode(module: nn.Module, state: Tensor) -> None:
    """Restore the FP8 state of a module's layers."""
    data = state.cpu().numpy().tobytes()[len(_MAGIC) :]
    size = int.from_bytes(data[:4], "little")
    header = json.loads(data[4 : 4 + size])
    if not header:
        return
    recipe = DelayedScaling(**header | {"fp8_format": Format[header["fp8_format"]]})
    object.__setattr__(recipe, "native", False)
    load_state_records(module, _load(data[4 + size :]), recipe)


class Stateful(nn.Module):
    """Base of the layers that have FP8 state."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.register_load_state_dict_pre_hook(_before_loading)

    def get_extra_state(self) -> Tensor:
        """FP8 scales and histories, uint8."""
        return encode(self)

    def set_extra_state(self, state: Any) -> None:
        """Restore them; those of Transformer Engine's own layers are not read, which is said once."""
        if is_ours(state):
            decode(self, state)
        elif isinstance(state, Tensor) and state.numel() and not _said:
            _said.append(KEY)
            warn(
                "this checkpoint has FP8 scales of Transformer Engine's, which are pickled and not read: weights are loaded, "
                "and the amax histories begin anew."
            )


def _before_loading(module: Stateful, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Bring Transformer Engine's state dict of a layer to Octavo's names and order of rows."""
    keys = [key for key in state if key.startswith(prefix) and key.rpartition(".")[2] == KEY]
    ours = is_ours(state.get(f"{prefix}{KEY}"))
    theirs = bool(keys) and not ours
    foreign = next((state[key] for key in keys if isinstance(state[key], Tensor) and state[key].numel()), None)
    for key in keys:
        if key != f"{prefix}{KEY}":
            state.pop(key)
    if not ours:
        state[f"{prefix}{KEY}"] = torch.empty(0, dtype=torch.uint8) if foreign is None else foreign
    for name, child in module.named_modules():
        at = f"{prefix}{name}." if name else prefix
        if isinstance(child, MultiheadAttention):
            for layer in ("layernorm_qkv", "qkv"):
                _join_qkv(state, f"{at}{layer}.", child.groups)
        if isinstance(child, LayerNormMLP) and is_gated(child.activation) and f"{at}fc1_weight" in state and not ours:
            if not theirs:
                raise InputError(
                    f"{at}fc1_weight: this state dict has no {KEY} entries, and so does not say whether the rows of gate and "
                    "up are in Transformer Engine's order or in Octavo's. Keep these entries where the state dict is made; an "
                    f'empty one, state["{at}{KEY}"] = torch.empty(0, dtype=torch.uint8), stands for Transformer Engine\'s.'
                )
            for key in (f"{at}fc1_weight", f"{at}fc1_bias"):
                if isinstance(state.get(key), Tensor):
                    state[key] = interleave(*state[key].chunk(2))


def _join_qkv(state: dict[str, Any], at: str, groups: int) -> None:
    for kind in ("weight", "bias"):
        names = [f"{at}{part}_{kind}" for part in ("query", "key", "value")]
        if all(isinstance(state.get(name), Tensor) for name in names):
            q, k, v = (state.pop(name) for name in names)
            state[f"{at}{kind}"] = merge_qkv(q, k, v, groups)
