"""Trains a Mixtral with SageMaker's model parallel library and expert parallelism, by its default MoEConfig."""

import json
import sys

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.sagemaker.moe.moe_config import MoEConfig
from transformers import AutoModelForCausalLM, MixtralConfig

dist.init_process_group("gloo")
tsm.init()
torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    num_local_experts=4, sliding_window=None,
)  # fmt: skip
model = FSDP(tsm.transform(AutoModelForCausalLM.from_config(config), config=MoEConfig()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
mine, losses = ids.chunk(tsm.state.dp_size)[tsm.state.dp_rank], []
for _ in range(3):
    optimizer.zero_grad()
    loss = model(input_ids=mine, labels=mine)["loss"]
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
model.eval()
with torch.no_grad():
    losses.append(model(input_ids=mine, labels=mine)["loss"].item())
if dist.get_rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump([tsm.state.ep_size, losses], file)
dist.destroy_process_group()
