"""Your training loop with Accelerate trains Octavo's decoder in FP8: python examples/accelerate_loop.py FOLDER."""

import sys

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import octavo

folder = sys.argv[1]
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = octavo.transform(LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64)))  # before the optimizer
samples = (torch.arange(32) + torch.randint(64, (96, 1))) % 64  # consecutive numbers

accelerator = Accelerator()  # no mixed_precision: the decoder computes in bf16 and FP8 with float32 weights
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(samples, batch_size=4))
losses = []
for ids in loader:
    with octavo.fp8_autocast():  # around each forward: scales are updated at its end
        loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

octavo.export(accelerator.unwrap_model(model), folder)
loaded = AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    there = loaded(input_ids=samples[:8], labels=samples[:8]).loss.item()
print(f"Loss {losses[0]:.3f} → {losses[-1]:.3f} in FP8; {folder} loads in transformers, with loss {there:.3f} there.")
