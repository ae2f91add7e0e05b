"""[parallel], and the same keys as `octavo.init` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from octavo.config.section import Section, explain
from octavo.errors import InputError


class ParallelConfig(Section):
    """How the model is spread over ranks: SMP's names and defaults."""

    hybrid_shard_degree: int = Field(0, ge=0, description="Ranks over which parameters are sharded; 0: all that remain.")
    tensor_parallel_degree: int = Field(1, ge=1, description="Ranks over which each matrix is split.")
    context_parallel_degree: int = Field(1, ge=1, description="Ranks over which a sequence is split; divides the shard degree.")
    expert_parallel_degree: int = Field(1, ge=1, description="Ranks over which experts are spread; divides the shard degree.")
    cp_comm_type: Literal["all_gather", "p2p", "a2a"] = Field(
        "all_gather", description="How keys and values travel within a context group; one rank has none."
    )
    reshard_after_forward: bool = Field(
        True, description="Free a block's gathered parameters after its forward (ZeRO-3); false keeps them (ZeRO-2)."
    )
    param_dtype: Literal["bfloat16", "float16", "float32"] | None = Field(
        None,
        description="Dtype in which sharded parameters are gathered; model.dtype when absent. Weights of FP8 products with one "
        "scale a tensor travel in FP8.",
    )
    reduce_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "float32", description="Dtype in which gradients are summed over ranks."
    )
    buffer_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "float32", description="Dtype of floating-point buffers, rotary tables among them."
    )
    sm_activation_offloading: bool = Field(
        False, description="Keep what blocks save for backward in host memory, as train.offload does."
    )
    activation_loading_horizon: int = Field(
        2,
        description="Blocks ahead whose offloaded activations are brought back in backward; this version has no choice but 2.",
    )

    @field_validator("activation_loading_horizon")
    @classmethod
    def _one_horizon(cls, value: int) -> int:
        if value != 2:
            raise ValueError(
                "this version brings a block's activations back when its backward begins, and has no horizon: use 2"
            )
        return value


class InitConfig(ParallelConfig):
    """What `octavo.init` takes: the [parallel] section, and a seed."""

    random_seed: int = Field(12345, ge=0, description="Of every generator; data-parallel rank r starts from random_seed + r.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str) -> InitConfig:
        """Validate a flat table; every fault is reported at once in one InputError."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise InputError(f"{where}: {explain(cls, error)}") from None
