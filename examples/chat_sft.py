"""Fine-tunes a model on conversations in FP8: python examples/chat_sft.py MODEL CHATS OUTPUT.

MODEL is a Hugging Face folder or id with a chat template, CHATS a .jsonl, .parquet or data set with `messages`.
"""

import sys

import octavo
from octavo.config.data import DataConfig
from octavo.data import show
from octavo.data.prepared import prepare

model, chats, output = sys.argv[1:4]
data = {"source": chats, "tokenizer": model, "sequence_length": 2048}
prepared = prepare(DataConfig(**data))
for line in show.lines_of(prepared, DataConfig(**data)):  # conversations, tokens, trained share, dropped rows
    print(line)
for run in show.documents(prepared, 1)[0]:
    print(f"{'trained' if run.trained else 'read':8}{run.text!r}")

trainer = octavo.Trainer(
    model={"source": model, "load": True},
    data=data,
    optimizer={"lr": 1e-5, "schedule": "cosine", "warmup_steps": 10},
    train={"output": output, "epochs": 1, "global_batch": 16},
)
result = trainer.train()
print(f"Loss {result.summary.loss:.4f}. octavo export {output} --to FOLDER writes the model for Hugging Face.")
