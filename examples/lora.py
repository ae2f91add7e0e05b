"""LoRA adapters on FP8 layers, sharded or not, in PEFT's format: python examples/lora.py FOLDER."""

import sys

import torch
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

import octavo

folder = sys.argv[1]
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64)).save_pretrained(f"{folder}/base")
samples = (torch.arange(32) + torch.randint(64, (96, 1))) % 64  # consecutive numbers

octavo.init()
base = LlamaForCausalLM.from_pretrained(f"{folder}/base")
model = octavo.transform(base, lora=octavo.LoRA(rank=16, targets="all-linear", save_whole=["lm_head"]))
optimizer = torch.optim.AdamW(octavo.parameter_groups(model, 0.0), lr=5e-3)  # trains only adapters and the head
losses = []
for ids in samples.split(4):
    with octavo.fp8_autocast():
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

octavo.export(model, f"{folder}/adapter")  # adapter_config.json and adapter_model.safetensors
loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(f"{folder}/base"), f"{folder}/adapter")
with torch.no_grad():
    there = loaded(input_ids=samples[:8], labels=samples[:8]).loss.item()
print(f"Loss {losses[0]:.3f} → {losses[-1]:.3f} in FP8; {folder}/adapter loads in PEFT, with loss {there:.3f} there.")
