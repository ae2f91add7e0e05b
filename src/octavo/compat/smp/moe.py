"""SMP's configuration of experts, and the name of its layer of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from octavo.errors import InputError, unknown

_WAY = (
    "leave config out. Experts of Mixtral and Qwen3-MoE run in FP8 without it; for the loss that balances them set "
    "output_router_logits = True and router_aux_loss_coef in the model's config."
)
BALANCING = ("aux_loss", "sinkhorn", "balanced", "none")


@dataclass
class MoEConfig:
    """SMP's configuration of experts: its names and defaults. `transform` says what it has of it."""

    smp_moe: bool = True
    random_seed: int = 12345
    moe_load_balancing: str = "sinkhorn"
    global_token_shuffle: bool = False
    moe_all_to_all_dispatcher: bool = True
    moe_aux_loss_coeff: float = 0.001
    moe_z_loss_coeff: float = 0.001
    use_cpu_initialization: bool = False

    def __post_init__(self) -> None:
        if self.moe_load_balancing not in BALANCING:
            raise unknown("moe_load_balancing", str(self.moe_load_balancing), BALANCING)


class MoELayer(nn.Module):
    """A name for policies: no model has one here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(f"MoELayer: {_WAY}")


def check_config(config: Any) -> None:
    """Raise an InputError for a `config` of `transform` that asks for something."""
    if config is None or config == {} or (isinstance(config, MoEConfig) and not config.smp_moe):
        return
    if isinstance(config, MoEConfig):
        raise InputError(f"transform(config=MoEConfig(moe_load_balancing={config.moe_load_balancing!r}, …)): {_WAY}")
    raise InputError(f"transform(config={config!r}): Octavo reads the model's own config. Leave config out.")
