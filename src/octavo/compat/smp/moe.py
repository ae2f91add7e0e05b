"""SMP's configuration of experts, as Octavo's [moe], and the name of its layer of experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from octavo.compat.notices import say_once
from octavo.compat.smp.configs import MoEConfig
from octavo.config.moe import MoeConfig
from octavo.errors import InputError
from octavo.nn.moe import LayerNormMoE

_NO_SHUFFLE = (
    "global_token_shuffle = True: tokens are not shuffled between ranks, and need not be, since none is dropped and the "
    "balancing loss counts those of all ranks. Set it to False."
)


class _Name(type):
    """Layers of experts are instances of SMP's name for them."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, LayerNormMoE)


class MoELayer(nn.Module, metaclass=_Name):
    """A name for policies and `isinstance`: the experts of a transformed model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(
            "MoELayer is a name for policies here: torch.sagemaker.transform makes the experts of a model. For a layer "
            "of your own take octavo.nn.LayerNormMoE."
        )


def moe_of(config: Any) -> MoeConfig | None:
    """The settings of a `config` of `transform`; None for one that asks for nothing.

    Raises:
        InputError: it asks for what Octavo does not have, or is no MoEConfig.
    """
    if config is None or config == {}:
        return None
    if not isinstance(config, MoEConfig):
        raise InputError(
            f"transform(config={config!r}): it is a MoEConfig, or left out; Octavo reads the model's own config from the model."
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
    """Say once what is another thing here, or has no effect."""
    if config.moe_z_loss_coeff or (config.moe_load_balancing == "aux_loss" and config.moe_aux_loss_coeff):
        say_once(
            "MoEConfig",
            "MoEConfig: the losses of routers are means over the layers, and part of the loss that the model returns. "
            "Megatron-LM, from which SMP has its experts, adds layers up, in the gradients alone: docs/migrating.md.",
        )
    if config.moe_load_balancing in ("sinkhorn", "balanced") and config.moe_aux_loss_coeff not in (
        0,
        MoEConfig.moe_aux_loss_coeff,
    ):
        say_once(
            "MoEConfig.moe_aux_loss_coeff",
            f"MoEConfig(moe_aux_loss_coeff={config.moe_aux_loss_coeff:g}) has no effect with moe_load_balancing="
            f'"{config.moe_load_balancing}", which has no loss: "aux_loss" has.',
        )
    if config.moe_load_balancing == "balanced":
        say_once(
            "MoEConfig.balanced",
            'MoEConfig(moe_load_balancing="balanced"): SMP publishes no definition; in training token t visits k experts '
            "from k·t on in turn, whatever its probabilities.",
        )
    if config.random_seed != MoEConfig.random_seed:
        say_once(
            "MoEConfig.random_seed", "MoEConfig(random_seed=…) has no effect: that of torch.sagemaker.init seeds experts too."
        )
    if not config.moe_all_to_all_dispatcher:
        say_once(
            "MoEConfig.dispatcher",
            "MoEConfig(moe_all_to_all_dispatcher=False) has no effect: any exchange has the same result.",
        )
    if config.use_cpu_initialization:
        say_once(
            "MoEConfig.cpu", "MoEConfig(use_cpu_initialization=True) has no effect: initial values are the same on any device."
        )
