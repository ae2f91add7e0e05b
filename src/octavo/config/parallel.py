"""[parallel], and the argument of `octavo.init`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octavo.config.section import Section
from octavo.dtypes import DtypeName

HORIZON = 2
"""Blocks whose offloaded activations are loaded ahead, as SMP's `activation_loading_horizon`."""


class ParallelConfig(Section):
    """Degrees of parallelism and dtypes of communication: SMP's names and defaults."""

    hybrid_shard_degree: int = Field(
        0, ge=0, description="Ranks over which parameters are sharded; 0: the world size divided by the tensor degree."
    )
    tensor_parallel_degree: int = Field(
        1,
        ge=1,
        description="Ranks over which each matrix is split, and between products the tokens; divides heads and "
        "intermediate size.",
    )
    context_parallel_degree: int = Field(1, ge=1, description="Ranks over which a sequence is split; divides the shard degree.")
    expert_parallel_degree: int = Field(
        1, ge=1, description="Ranks over which experts are distributed; divides the shard degree times the tensor degree."
    )
    expert_dispatch_fp8: bool = Field(
        False,
        description="Send tokens to their experts, and gradients of results, in E4M3 with a scale per 128 elements: half "
        "the bytes, one additional rounding. Results are sent in model.dtype.",
    )
    cp_comm_type: Literal["all_gather", "p2p", "a2a", "auto"] = Field(
        "all_gather", description="Exchange of keys and values within a context group."
    )
    reshard_after_forward: bool | Literal["auto"] = Field(
        "auto",
        description="true: free a block's gathered weights after its forward (ZeRO-3). false: retain them until its "
        'backward (ZeRO-2): half the all-gathers, more memory. "auto": retain them if those of all blocks take '
        "at most 1/25 of the smallest GPU's memory; on a CPU free them.",
    )
    param_dtype: DtypeName | None = Field(
        None,
        description="Dtype in which sharded parameters are all-gathered, by default model.dtype. Weights with one FP8 "
        "scale per tensor are gathered in FP8.",
    )
    reduce_dtype: DtypeName = Field("float32", description="Dtype in which gradients are reduced over ranks.")
    sync_each_micro_batch: bool = Field(
        False,
        description="Reduce gradients in each micro-batch, not only in the last: in between a rank stores only its shard "
        "of them, for one additional reduction per micro-batch. Replicas are reduced in the last.",
    )
    buffer_dtype: DtypeName = Field("float32", description="Dtype of floating-point buffers, such as rotary tables.")
    sm_activation_offloading: bool = Field(
        False, description="SMP's name of train.offload, for octavo.init. In a run file, either key enables offloading."
    )
    activation_loading_horizon: int = Field(
        HORIZON, ge=1, description="Blocks whose offloaded activations are prefetched in backward."
    )


class InitConfig(ParallelConfig):
    """Argument of `octavo.init`: the keys of [parallel], and a seed."""

    random_seed: int = Field(
        12345,
        ge=0,
        le=2**63 - 1,
        description="Seed of every generator: random_seed + r on rank r of the ranks with different tokens.",
    )
