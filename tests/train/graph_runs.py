"""Whole tiny runs with and without `train.graph`, for tests here and on a GPU."""

import shutil

import torch
from safetensors.torch import load_file

from octavo.cli import main
from octavo.run.metrics import read_metrics

RUNS = {
    "full": ["fp8.enabled=true"],
    "full, current scaling": ["fp8.enabled=true", "fp8.recipe=current", "fp8.amax_history_len=1024"],
    "one micro-batch": ["fp8.enabled=true", "train.micro_batch=4"],
    "without fp8": ["fp8.enabled=false", "fp8.amax_history_len=1024"],
    "adapters": ["fp8.enabled=true", "lora.rank=4", "lora.targets=all-linear", "lora.base=fp8"],
    "adapters with dropout": ["fp8.enabled=true", "lora.rank=4", "lora.targets=all-linear", "lora.dropout=0.1"],
    "adapters, recomputed": ["lora.rank=4", "lora.base=fp8", "train.recompute=true", "model.config.attention_dropout=0.0"],
    "recomputed": ["fp8.enabled=true", "train.recompute=selective", "model.config.attention_dropout=0.0"],
    "adapters of documents": [
        "fp8.enabled=true",
        "lora.rank=4",
        "lora.base=fp8",
        "data.packing=documents",
        "model.config.attention_dropout=0.0",
    ],
    "float32 parameters": ["fp8.enabled=true", "model.params_dtype=float32", "optimizer.clip=0.5"],
}
"""Settings of runs by name; each has two micro-batches a step unless it says otherwise."""


def trained(run, name, *, graph, deterministic=False):
    """Train, and with a graph continue from an earlier checkpoint; figures of all steps, and the last checkpoint's bytes."""
    switches = [f"train.graph={str(graph).lower()}", f"train.deterministic={str(deterministic).lower()}"]
    command = ["train", str(run.file), *RUNS[name], "train.validate_every=2", *switches]
    assert main(command) == 0
    figures = curve(run)
    last = max((run.output / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
    tensors = bytes_of(last)
    if graph:
        shutil.rmtree(last)
        assert main(command) == 0
        assert curve(run) == figures
        assert bytes_of(last) == tensors
    return figures, tensors


def curve(run):
    keys = ("step", "loss", "grad_norm", "validation_loss")
    return [
        [float(record[key]).hex() for key in keys if key in record] for record in read_metrics(run.output / "metrics.jsonl")
    ]


def bytes_of(checkpoint):
    """Name → bytes of each tensor: weights, optimizer states and FP8 records."""
    found = {}
    for path in checkpoint.glob("*.safetensors"):
        tensors = load_file(path)
        found |= {name: tensor.contiguous().flatten().view(torch.uint8).tolist() for name, tensor in tensors.items()}
    assert found
    return found
