"""What a model that keeps its own code needs: dtypes, recomputation by its own switch, and refusals of what it cannot do."""

from __future__ import annotations

import functools
import json
from typing import Any, Literal

import torch
from torch import nn

from octavo.errors import InputError
from octavo.kernels.cross_entropy import Objective
from octavo.models.families import DECODER_FAMILIES

_SWITCHES = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""Of recomputation in Hugging Face's models: transformers 5.2x gave it the first name and warns of the second."""


def refuse_head_settings(model: nn.Module, fp8_head: bool | Literal["backward"], objective: Objective | None) -> None:
    """Refuse what only the head of Octavo's decoder does.

    Raises:
        InputError: naming the key to change.
    """
    what = _kind(model)
    objective = objective or Objective()
    asked = {
        f"fp8.head = {json.dumps(fp8_head)}": fp8_head,
        f"train.label_smoothing = {objective.label_smoothing:g}": objective.label_smoothing,
        f"train.z_loss = {objective.z_loss:g}": objective.z_loss,
    }
    if said := [setting for setting, is_asked in asked.items() if is_asked]:
        defaults = ", ".join(f"{setting.partition(' =')[0]} = {'false' if 'head' in setting else '0.0'}" for setting in said)
        raise InputError(
            f"{', '.join(said)}: {what} keeps its own code with its own head and loss, and only those of Octavo's decoder can"
            f" do that ({', '.join(DECODER_FAMILIES)}). Set {defaults}."
        )


def refuse_block_settings(model: nn.Module, recompute: bool | Literal["mlp"], *, offload: bool) -> None:
    """Refuse what only Octavo's blocks do.

    Raises:
        InputError: naming the key to change.
    """
    what = _kind(model)
    if offload:
        raise InputError(
            f"train.offload = true: {what} keeps its own code, and only the blocks of Octavo's decoder are offloaded"
            f" ({', '.join(DECODER_FAMILIES)}). Use train.recompute = true instead."
        )
    if recompute == "mlp":
        raise InputError(
            f'train.recompute = "mlp": {what} keeps its own code, and only the MLPs of Octavo\'s decoder make their first'
            f" product again ({', '.join(DECODER_FAMILIES)}). Use train.recompute = true instead."
        )
    if recompute and not any(hasattr(model, switch) for switch in _SWITCHES):
        raise InputError(
            f"recompute = True: {what} keeps its own code and has no {_SWITCHES[1]}(), the switch of Hugging Face's models:"
            " use recompute = False, and torch.utils.checkpoint in the model's forward."
        )


def _kind(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__


def recompute_own_code(model: nn.Module) -> None:
    """Turn recomputation on in a Hugging Face model."""
    switch = next(switch for switch in _SWITCHES if hasattr(model, switch))
    getattr(model, switch)({"use_reentrant": False})


def cast(model: nn.Module, params_dtype: torch.dtype, buffer_dtype: torch.dtype) -> nn.Module:
    """Parameters into one dtype; buffers only into a lower one: a rotary table or a running mean keeps its precision."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(params_dtype)
        for buffer in model.buffers() if buffer_dtype != torch.float32 else ():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(buffer_dtype)
    return model


def compute_in(model: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Let a model that keeps its own code compute in `dtype` with parameters of another, by PyTorch's autocast.

    The class changes and not the instance, so that a deep copy computes with its own weights.
    """
    params_dtype = next((p.dtype for p in model.parameters()), dtype)
    if params_dtype == dtype or device.type == "meta":
        return model
    if dtype == torch.float32:
        raise InputError(
            f"{type(model).__name__} keeps its own code, which computes in the dtype of its parameters or below: with"
            f" params_dtype {params_dtype}, dtype float32 is not possible. Use params_dtype float32."
        )
    base = type(model)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            return base.forward(self, *args, **kwargs)

    model.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})
    return model
