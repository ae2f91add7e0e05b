"""Parameter groups for an optimizer: which parameters decay. `octavo train` and loops of one's own use this one rule.

Matrices decay, embeddings and the stacked ones of experts among them; norms, biases and other vectors do not. The rule reads
dimensions, classes of norms and the parameters' own names, so that it holds for models of any library. Rules of names, as of
transformers' Trainer, agree with it on Octavo's decoder, whose parameters are named for that (`octavo.nn.plain_names`).
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from octavo.errors import InputError

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The groups of a model's trained parameters for any optimizer of PyTorch's kind, matrices first.

        optimizer = torch.optim.AdamW(octavo.parameter_groups(model, 0.1), lr=3e-4)

    Each trained parameter is in one group, a shared one once; frozen ones are in none. A group without parameters is left out.

    Args:
        model: of `octavo.transform`, with `octavo.nn` layers, of PEFT or any other; sharded by Octavo or FSDP2 or not.
        weight_decay: of matrices, from 0; all else has 0.

    Returns:
        A dictionary each, with `params`, in the model's order, and `weight_decay`.

    Raises:
        InputError: `model` is no module, trains nothing, or its parameters do not show their shapes (FSDP1, lazy modules);
            `weight_decay` is negative or not finite.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"octavo.parameter_groups: model is of type {type(model).__name__}: give a torch.nn.Module.")
    number = isinstance(weight_decay, int | float) and not isinstance(weight_decay, bool)
    if not number or not math.isfinite(weight_decay) or weight_decay < 0:
        raise InputError(f"octavo.parameter_groups: weight_decay = {weight_decay!r}: give a finite number from 0, such as 0.1.")
    exempt = _norms_and_biases(model)
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, UninitializedParameter):
            raise InputError(f"octavo.parameter_groups: {name} has no shape yet: run a forward of the lazy module before.")
        (others if parameter in exempt or _dimensions(parameter) < 2 else decayed).append(parameter)
    if not decayed and not others:
        raise InputError(f"octavo.parameter_groups: {type(model).__name__} has no parameter that is trained (requires_grad).")
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": float(weight_decay)},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _dimensions(parameter: nn.Parameter) -> int:
    """Of the whole: DeepSpeed leaves an empty vector of a parameter whose parts are on all ranks."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def _norms_and_biases(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of norms, by the class of their module or their own name, and biases, which may be stacked as matrices."""
    found: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        if type(module).__module__ == _FSDP1:
            raise InputError(
                f"octavo.parameter_groups: {name or 'the model'} is PyTorch's FullyShardedDataParallel, whose parameters are "
                "flat, so that matrices and vectors look alike. Shard by octavo.transform or fully_shard, or "
                "choose by name."
            )
        is_norm = type(module).__name__.endswith("Norm")
        for own, parameter in module.named_parameters(recurse=False):
            if is_norm or own.startswith("layer_norm") or "bias" in own:
                found.add(parameter)
    return found
