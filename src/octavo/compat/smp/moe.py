"""Translates SMP's `MoEConfig` to Octavo's [moe] settings, and defines the class name of SMP's expert layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from octavo.compat.notices import say_once
from octavo.compat.smp.configs import MoEConfig
from octavo.config.moe import MoeConfig
from octavo.errors import InputError
from octavo.nn.moe import LayerNormMoE

_NO_SHUFFLE = (
    "global_token_shuffle = True: tokens are not shuffled between ranks, which is unnecessary, since none is dropped and the "
    "balancing loss counts the tokens of all ranks. Set it to False."
)


class _Name(type):
    """Metaclass: for `isinstance`, Octavo's MoE layers are instances of SMP's class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, LayerNormMoE)


class MoELayer(nn.Module, metaclass=_Name):
    """The experts of a transformed model, for wrapping policies and `isinstance`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(
            "MoELayer is only for wrapping policies: torch.sagemaker.transform creates the experts of a model. For a layer "
            "in your model use octavo.nn.LayerNormMoE."
        )


def moe_of(config: Any) -> MoeConfig | None:
    """The [moe] settings of `transform`'s `config`; None for a `config` without settings.

    Raises:
        InputError: an unsupported setting, or not a MoEConfig.
    """
    if config is None or config == {}:
        return None
    if not isinstance(config, MoEConfig):
        raise InputError(
            f"transform(config={config!r}): give a MoEConfig, or leave it out; the model's config is read from the model."
        )
    if not config.smp_moe:
        return None
    if config.global_token_shuffle:
        raise InputError(f"transform(config=MoEConfig(…)): {_NO_SHUFFLE}")
    _tell(config)
    balances = config.moe_load_balancing == "aux_loss"
    settings = {
        "moe_load_balancing": config.moe_load_balancing,
        "moe_z_loss_coeff": config.moe_z_loss_coeff,
        **({"moe_aux_loss_coeff": config.moe_aux_loss_coeff} if balances else {}),
    }
    return MoeConfig.from_dict(settings, where="MoEConfig(…)")


def _tell(config: MoEConfig) -> None:
    """Log once which fields differ from SMP's meaning or have no effect."""
    if config.moe_z_loss_coeff or (config.moe_load_balancing == "aux_loss" and config.moe_aux_loss_coeff):
        say_once(
            "MoEConfig",
            "MoEConfig: router losses are means over the layers, and part of the loss that the model returns. "
            "Megatron-LM, whose experts SMP uses, sums over layers, in the gradients only: docs/migrating.md.",
        )
    if config.moe_load_balancing in ("sinkhorn", "balanced") and config.moe_aux_loss_coeff not in (
        0,
        MoEConfig.moe_aux_loss_coeff,
    ):
        say_once(
            "MoEConfig.moe_aux_loss_coeff",
            f"MoEConfig(moe_aux_loss_coeff={config.moe_aux_loss_coeff:g}) has no effect with moe_load_balancing="
            f'"{config.moe_load_balancing}", which has no loss: use "aux_loss".',
        )
    if config.moe_load_balancing == "balanced":
        say_once(
            "MoEConfig.balanced",
            'MoEConfig(moe_load_balancing="balanced"): SMP publishes no definition; in training token t is routed to k experts '
            "from number k·t on, whatever its probabilities.",
        )
    if config.random_seed != MoEConfig.random_seed:
        say_once(
            "MoEConfig.random_seed",
            "MoEConfig(random_seed=…) has no effect: random_seed of torch.sagemaker.init seeds experts too.",
        )
    if not config.moe_all_to_all_dispatcher:
        say_once(
            "MoEConfig.dispatcher",
            "MoEConfig(moe_all_to_all_dispatcher=False) has no effect: both dispatchers have the same result.",
        )
    if config.use_cpu_initialization:
        say_once(
            "MoEConfig.cpu", "MoEConfig(use_cpu_initialization=True) has no effect: initial values are the same on any device."
        )
