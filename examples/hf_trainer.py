"""Hugging Face's Trainer trains Octavo's decoder in FP8: python examples/hf_trainer.py FOLDER."""

import contextlib
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import octavo


class Fp8Trainer(Trainer):
    """Trainer with all forwards, in training and evaluation, in FP8."""

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """The context of a forward."""
        context = super().compute_loss_context_manager()
        context.enter_context(octavo.fp8_autocast(fp8_recipe=octavo.recipe.CurrentScaling()))
        return context


folder = sys.argv[1]
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = octavo.transform(LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64)))
samples = [{"input_ids": row, "labels": row} for row in (torch.arange(32) + torch.randint(64, (64, 1))) % 64]  # they count

arguments = TrainingArguments(
    f"{folder}/trainer", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=24, learning_rate=5e-3,
    logging_steps=1, save_steps=12, report_to=[], disable_tqdm=True,
    dataloader_pin_memory=torch.cuda.is_available(),
)  # fmt: skip
trainer = Fp8Trainer(model, arguments, train_dataset=samples, eval_dataset=samples[:8])
before = trainer.evaluate()["eval_loss"]
trainer.train()
after = trainer.evaluate()["eval_loss"]

octavo.export(trainer.model, f"{folder}/model")
loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
with torch.no_grad():
    there = loaded(input_ids=samples[0]["input_ids"][None], labels=samples[0]["labels"][None]).loss.item()
print(f"Loss {before:.3f} → {after:.3f} in FP8; {folder}/model loads in transformers, with loss {there:.3f} there.")
