"""Parameter groups for an optimizer: weight decay and rates. `octavo train` and users' loops use this rule.

Matrices decay, including embeddings and stacked experts; norms, biases and other vectors do not. The rule reads dimensions,
classes of norms and parameter names, so it holds for models of any library. Rules by names, as in transformers' Trainer, agree
with it on Octavo's decoder, whose parameters are named for that (`octavo.nn.plain_names`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from octavo.errors import InputError
from octavo.models.rates import check_rates, rate_factors

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    lr: float | None = None,
    rates: Mapping[str, float] | None = None,
    layer_decay: float = 1.0,
) -> list[dict[str, Any]]:
    """The groups of a model's trained parameters for any optimizer of PyTorch's kind, matrices first.

        optimizer = torch.optim.AdamW(octavo.parameter_groups(model, 0.1), lr=3e-4)

    Each trained parameter is in one group, a shared one once; frozen ones are in none. Empty groups are dropped.

    Args:
        model: from `octavo.transform`, with `octavo.nn` layers, from PEFT or any other; sharded by Octavo or FSDP2 or not.
        weight_decay: decay of matrices, from 0; other parameters have 0.
        lr: the rate that `rates` and `layer_decay` multiply; required with them. Groups then have separate rates, which
            PyTorch's schedulers multiply.
        rates: pattern (`fnmatch`) of names of parameters, or of modules that contain them, Octavo's or the source's → factor of
            the rate; the last match applies, 1 without a match.
        layer_decay: d, above 0 and at most 1. The rate of the last of L blocks is multiplied by d, that of the first by d^L,
            and that of embeddings, also tied ones, by d^(L + 1); a final norm and a head have the full rate.

    Returns:
        Dictionaries with `params`, in the model's order, `weight_decay`, and `lr` if it is given. Groups with higher rates come
        first.

    Raises:
        InputError: `model` is not a module, trains nothing, or its parameters have no shapes (FSDP1, lazy modules);
            `weight_decay` or `lr` is negative or not finite; `rates` or `layer_decay` is invalid.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"octavo.parameter_groups: model is of type {type(model).__name__}: give a torch.nn.Module.")
    if not _is_rate(weight_decay):
        raise InputError(f"octavo.parameter_groups: weight_decay = {weight_decay!r}: give a finite number from 0, such as 0.1.")
    if lr is not None and not _is_rate(lr):
        raise InputError(f"octavo.parameter_groups: lr = {lr!r}: give a finite number from 0, such as 3e-4.")
    keys = ("octavo.parameter_groups: rates", "octavo.parameter_groups: layer_decay")
    factors = factors_of(model, rates or {}, layer_decay, keys=keys)
    if factors is not None and lr is None:
        raise InputError("octavo.parameter_groups: rates and layer_decay are factors of a rate: give lr too, such as lr=3e-4.")
    groups = decay_groups(model, weight_decay, factors)
    for group in groups:
        factor = group.pop("lr_scale", 1.0)
        if lr is not None:
            group["lr"] = lr * factor
    return groups


def factors_of(
    model: nn.Module, rates: Mapping[str, float], layer_decay: float, *, keys: tuple[str, str]
) -> dict[str, float] | None:
    """The factor of the rate of each trained parameter; None if all have the same. See `octavo.models.rates`."""
    check_rates(rates, layer_decay, keys=keys)
    return rate_factors(model, rates, layer_decay, keys=keys) if rates or layer_decay != 1 else None


def decay_groups(model: nn.Module, weight_decay: float, factors: Mapping[str, float] | None = None) -> list[dict[str, Any]]:
    """See `parameter_groups`. factors: rate factor by parameter; each group stores its factor as `lr_scale`."""
    exempt = _norms_and_biases(model)
    by_settings: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, UninitializedParameter):
            raise InputError(f"octavo.parameter_groups: {name} has no shape yet: run a forward of the lazy module first.")
        other = parameter in exempt or _dimensions(parameter) < 2
        by_settings.setdefault((other, 1.0 if factors is None else factors[name]), []).append(parameter)
    if not by_settings:
        raise InputError(f"octavo.parameter_groups: {type(model).__name__} has no parameter that is trained (requires_grad).")
    groups = []
    for other, factor in sorted(by_settings, key=lambda each: (each[0], -each[1])):
        group = {"params": by_settings[other, factor], "weight_decay": 0.0 if other else float(weight_decay)}
        groups.append(group if factors is None else group | {"lr_scale": factor})
    return groups


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _dimensions(parameter: nn.Parameter) -> int:
    """Dimensions of the whole parameter: DeepSpeed replaces a partitioned one by an empty vector."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def _norms_and_biases(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of norms, by the class of their module or their name, and biases, which may be stacked as matrices."""
    if flat := first_fsdp1(model):
        raise InputError(
            f"octavo.parameter_groups: {flat} is PyTorch's FullyShardedDataParallel, whose parameters are flat, so that "
            "matrices and vectors look alike. Shard by octavo.transform or fully_shard, or choose by name."
        )
    exempt: set[nn.Parameter] = set()
    for module in model.modules():
        is_norm = type(module).__name__.endswith("Norm")
        for leaf, parameter in module.named_parameters(recurse=False):
            if is_norm or leaf.startswith("layer_norm") or "bias" in leaf:
                exempt.add(parameter)
    return exempt


def first_fsdp1(model: nn.Module) -> str | None:
    """The first module wrapped by FSDP1, whose flat parameters have neither names nor shapes; None without one."""
    names = (name or "the model" for name, module in model.named_modules() if type(module).__module__ == _FSDP1)
    return next(names, None)
