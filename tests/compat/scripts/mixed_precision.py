"""SMP's half precision: the model in float32, and FSDP casts by a policy. The published snippet with its ellipses filled.

Filled: the model, its inputs, the arguments of FSDP that stood for "...".
"""

import sys

import torch
import torch.distributed as dist
import torch.sagemaker as tsm

# Native PyTorch API
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from transformers import AutoModelForCausalLM, LlamaConfig

dist.init_process_group("gloo")
tsm.init({"hybrid_shard_degree": 2})
for name in sys.argv[1:]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    model = tsm.transform(model)

    dtype = getattr(torch, name)
    mixed_precision_policy = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)

    model = FSDP(model, use_orig_params=True, mixed_precision=mixed_precision_policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(64).view(4, 16)[2 * dist.get_rank() : 2 * dist.get_rank() + 2]
    for step in range(3):
        with model.no_sync():
            model(input_ids=ids, labels=ids).loss.backward()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(name, step, loss.item(), norm.item())
    assert isinstance(model, FSDP)
dist.destroy_process_group()
