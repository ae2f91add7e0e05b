"""PEFT's LoRA adapters in FP8, merged and exported: python examples/peft_lora.py FOLDER."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import octavo

folder = sys.argv[1]
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
base = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64))
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
model = octavo.transform(get_peft_model(base, lora))  # adapters first: the model runs its original code, with FP8 linear layers
samples = (torch.arange(32) + torch.randint(64, (96, 1))) % 64  # consecutive numbers

optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
losses = []
for ids in samples.split(4):
    with octavo.fp8_autocast():
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

model.save_pretrained(f"{folder}/adapter")  # only the adapters, as PEFT writes them
octavo.export(model.merge_and_unload(), f"{folder}/merged")
loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/merged")
with torch.no_grad():
    there = loaded(input_ids=samples[:8], labels=samples[:8]).loss.item()
print(f"Loss {losses[0]:.3f} → {losses[-1]:.3f} in FP8; {folder}/merged loads in transformers, with loss {there:.3f} there.")
