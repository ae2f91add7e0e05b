"""Hugging Face's GPT-NeoX with context parallelism: torchrun --nproc-per-node 2 examples/gpt_neox_context.py.

On one rank, python examples/gpt_neox_context.py, the same code computes whole sequences.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import octavo
from octavo import context_parallel


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float | None = None, **others: Any
) -> tuple[Tensor, None]:
    """Hugging Face's layout is [B, H, T, D], Octavo's [B, T, H, D]."""
    out = context_parallel.attention(*(x.transpose(1, 2) for x in (query, key, value)), scale=scaling)
    return out, None


ALL_ATTENTION_FUNCTIONS.register("octavo-context", attention)
ranks = int(os.environ.get("WORLD_SIZE", "1"))
octavo.init({"context_parallel_degree": ranks})
torch.manual_seed(0)  # the same weights on every rank
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = GPTNeoXConfig(**sizes, max_position_embeddings=64)
config._attn_implementation = "octavo-context"
model = GPTNeoXForCausalLM(config)
model = octavo.transform(model, dtype=torch.float32, device=octavo.state.device, blocks="own", cp_comm_type="own")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

for step in range(1, 41):
    ids = (torch.arange(32) + torch.randint(64, (8, 1))) % 64  # consecutive numbers; whole sequences, the same on every rank
    targets = functional.pad(ids[:, 1:], (0, 1), value=-100)  # shifted before the split
    positions = torch.arange(32)[None]
    parts = (context_parallel.split(x).to(octavo.state.device) for x in (ids, targets, positions))
    own_ids, own_targets, own_positions = parts
    with octavo.fp8_autocast(emulate=True):  # on a CPU too
        logits = model(input_ids=own_ids, position_ids=own_positions, use_cache=False).logits
    total = functional.cross_entropy(logits.float().flatten(0, 1), own_targets.flatten(), reduction="sum")
    loss = total * ranks / int((targets != -100).sum())  # gradients are averaged over the ranks
    loss.backward()
    octavo.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    if ranks > 1:
        torch.distributed.all_reduce(mean)
    if octavo.state.rank == 0 and step in (1, 40):
        print(f"step {step}: loss {mean.item():.3f}", flush=True)
octavo.shutdown()
