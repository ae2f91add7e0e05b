"""FP8 with SMP and Transformer Engine: the published snippet, with the ellipses filled and the backward inside, then outside.

Filled: ModelConfig, inp. Mended: nothing.
"""

import torch
import torch.sagemaker as tsm
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format
from transformers import AutoModelForCausalLM, LlamaConfig

# Initialize the SMP torch.sagemaker API.
tsm.init()

# Define a transformer model and wrap it with the torch.sagemaker.transform API.
ModelConfig = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(ModelConfig)
model = tsm.transform(model)
inp = torch.arange(32).view(2, 16)

# Enable E4M3 during forward pass, E5M2 during backward pass.
fp8_format = Format.HYBRID

# Create an FP8 recipe.
fp8_recipe = DelayedScaling(fp8_format=fp8_format, amax_history_len=32, amax_compute_algo="max")

norms = []
for inside in (True, False):
    for _ in range(2):
        model.zero_grad()
        # Enable FP8 autocasting.
        with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe, fp8_group=tsm.state.world_process_group):
            out = model(inp)
            loss = out.sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
print("norms", *norms, "loss", loss.item())
