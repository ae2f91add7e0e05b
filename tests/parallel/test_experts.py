"""Mixtures of experts over ranks compute what one rank computes: sharded, and with different experts on different ranks."""

import pytest
import sharded
import torch
from test_fsdp import compare

import ranks

pytestmark = ranks.alone

EXPERTS = {
    "model_type": "mixtral", "num_local_experts": 4, "sliding_window": None, "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}  # fmt: skip
LAYOUTS = {
    "shard 2": (2, {}),
    "replicate 2": (2, {"hybrid_shard_degree": 1}),
    "expert 2": (2, {"expert_parallel_degree": 2}),
    "expert 4": (4, {"expert_parallel_degree": 4}),
    "expert 2 x shard 2": (4, {"expert_parallel_degree": 2}),
    "expert 2 x replicate 2": (4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_and_the_loss_that_balances_them_equal_one_rank(layout):
    ranks_, degrees = LAYOUTS[layout]
    setting, sizes = (torch.float32, None, 1), sharded.SIZES | EXPERTS
    one = sharded.train({}, *setting, steps=3, sizes=sizes)
    many = ranks.run(ranks_, sharded.train, degrees, *setting, steps=3, sizes=sizes)
    compare(one, many, loss=1e-6, gradient=1e-4)
