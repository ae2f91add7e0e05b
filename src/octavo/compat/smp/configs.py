"""SMP's configuration classes: of `torch.sagemaker.init`, and of experts (`MoEConfig`).

Loads no torch: `octavo migrate` checks a script's values with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field

from octavo.config.section import Section
from octavo.errors import InputError, check_flags, unknown

BALANCING = ("aux_loss", "sinkhorn", "balanced", "none")


class SmpConfig(Section):
    """SMP's configuration: its names and defaults."""

    hybrid_shard_degree: int = Field(0, ge=0, description="Ranks over which parameters are sharded; 0: by sharding_strategy.")
    tensor_parallel_degree: int = Field(1, ge=1, description="Ranks over which each matrix is split.")
    context_parallel_degree: int = Field(1, ge=1, description="Ranks over which a sequence is split.")
    expert_parallel_degree: int = Field(1, ge=1, description="Ranks over which experts are spread.")
    sm_activation_offloading: bool = Field(True, description="offload_wrapper offloads; without it nothing does.")
    activation_loading_horizon: int = Field(2, ge=1, description="Blocks whose activations are loaded ahead.")
    fsdp_cache_flush_warnings: bool = Field(True, description="Without effect.")
    allow_empty_shards: bool = Field(False, description="Without effect: shards may be empty.")
    delayed_parameter_initialization: bool = Field(False, description="Without effect: DelayedParamIniter does it.")
    random_seed: int = Field(12345, ge=0, le=2**63 - 1, description="Seed of every generator.")


@dataclass
class MoEConfig:
    """SMP's configuration of experts: its names and defaults. `transform` refuses unsupported values.

    Attributes:
        smp_moe: False: the fields below are ignored, and the model's config decides.
        random_seed: without effect: generators and initial values have the `random_seed` of `torch.sagemaker.init`.
        moe_load_balancing: as in `[moe]`. "sinkhorn" is Megatron-LM's. SMP publishes no definition of "balanced": here it is
            round robin.
        global_token_shuffle: False.
        moe_all_to_all_dispatcher: no effect: both dispatchers give the same numbers.
        moe_aux_loss_coeff, moe_z_loss_coeff: apply to means over the layers; Megatron-LM sums over layers.
        use_cpu_initialization: without effect: initial values are the same on every device.

    Raises:
        InputError: a value of the wrong type, or a `moe_load_balancing` unknown to SMP.
    """

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
        flags = ("smp_moe", "global_token_shuffle", "moe_all_to_all_dispatcher", "use_cpu_initialization")
        values = {name: getattr(self, name) for name in flags}
        # SMP's scripts pass flags as 0, 1 or None.
        check_flags("MoEConfig", **{name: bool(value) if value in (None, 0, 1) else value for name, value in values.items()})
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise InputError(f"MoEConfig: {name} = {value!r} is no coefficient: use a number of at least 0.")
