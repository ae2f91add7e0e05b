"""The table of cases: small trainings through the public surface, whose every bit a refactor has to keep.

A case is one or several starts of `octavo train` on the same run file, or a function that trains in a loop of its own. Models
are a few thousand parameters, so that a case takes about a second. Shapes are awkward on purpose: no size but the hidden one
divides by 16, queries are grouped, dropout draws random numbers.

Left out: `fp8.enabled = "auto"` (it measures time) and `train.compile` (a compiler's order of sums is not Octavo's).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STEPS = 6

BASE: dict[str, Any] = {
    "model.config.vocab_size": 320,
    "model.config.hidden_size": 32,
    "model.config.intermediate_size": 40,
    "model.config.num_hidden_layers": 2,
    "model.config.num_attention_heads": 4,
    "model.config.num_key_value_heads": 2,
    "model.config.attention_dropout": 0.1,
    "data.vocab_size": 300,
    "data.sequence_length": 24,
    "data.validation_fraction": 0.1,
    "fp8.amax_history_len": 4,
    "optimizer.warmup_steps": 2,
    "optimizer.schedule": "constant",
    "train.steps": STEPS,
    "train.global_batch": 4,
    "train.compare_bf16": False,
    "train.validate_every": 3,
    "train.validate_batches": 2,
    "checkpoint.every": 0,
}
"""Over presets/demo.toml. The data are added by the runner."""

OWN_CODE: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "attention_dropout": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}
"""Hugging Face configs by model_type of models that keep their own code."""


@dataclass(frozen=True)
class Start:
    """One start of `octavo train`: its ranks and the keys set over those of the case."""

    ranks: int = 1
    keys: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Train:
    """`octavo train`, once or several times in the same folder. own: a model_type of OWN_CODE in place of the Llama."""

    keys: dict[str, Any] = field(default_factory=dict)
    starts: tuple[Start, ...] = (Start(),)
    own: str | None = None
    launcher: bool = False
    """By torchrun; otherwise the ranks are forked with the environment that torchrun would give them."""


def _on(ranks: int, *, own: str | None = None, launcher: bool = False, **keys: Any) -> Train:
    named = {name.replace("__", "."): value for name, value in keys.items()}
    return Train({"train.micro_batch": 1} | named, (Start(ranks),), own, launcher)


def _resumed(*ranks: int, own: str | None = None, **keys: Any) -> Train:
    """Starts that end after 2 steps, 4 steps, …; the last one ends the run."""
    named = {name.replace("__", "."): value for name, value in keys.items()}
    ends = [2 * (number + 1) for number in range(len(ranks) - 1)] + [STEPS]
    starts = tuple(Start(count, {"train.steps": end}) for count, end in zip(ranks, ends, strict=True))
    return Train({"train.micro_batch": 1} | named, starts, own)


TRAIN: dict[str, Train] = {
    # recipes
    "delayed": Train(),
    "current": Train({"fp8.recipe": "current"}),
    "rowwise": Train({"fp8.recipe": "rowwise"}),
    "block": Train({"fp8.recipe": "block"}),
    "bf16": Train({"fp8.enabled": False}),
    "float32": Train({"fp8.enabled": False, "model.dtype": "float32"}),
    "float16": Train({"fp8.enabled": False, "model.dtype": "float16"}),
    "delayed-most-recent": Train({"fp8.amax_compute_algo": "most_recent", "fp8.margin": 1, "fp8.format": "E4M3"}),
    "current-powers-of-two": Train({"fp8.recipe": "current", "fp8.use_power_2_scales": True}),
    "layers-and-skip": Train({"fp8.layers": {"*.proj": "current", "*fc2*": "block"}, "fp8.skip": ["layers.0.*qkv"]}),
    "head-backward": Train({"fp8.head": "backward"}),
    "head-backward-current": Train({"fp8.head": "backward", "fp8.recipe": "current"}),
    "head": Train({"fp8.head": True}),
    "fast-input-gradient": Train({"fp8.fast_accumulation": "input_gradient"}),
    "fast": Train({"fp8.fast_accumulation": True}),
    "objective": Train({"train.label_smoothing": 0.1, "train.z_loss": 1e-3}),
    "bfloat16-parameters": Train({"model.params_dtype": "bfloat16"}),
    "untied": Train({"model.config.tie_word_embeddings": False, "model.config.attention_bias": True}),
    # memory
    "recompute": Train({"train.recompute": True}),
    "recompute-mlp": Train({"train.recompute": "mlp"}),
    "offload": Train({"train.offload": True}),
    "offload-recompute": Train({"train.offload": True, "train.recompute": True}),
    "accumulation": Train({"train.micro_batch": 1}),
    "accumulation-recompute": Train({"train.micro_batch": 2, "train.recompute": True}),
    # data
    "documents": Train({"data.packing": "documents"}),
    "documents-read-ahead": Train({"data.packing": "documents", "data.workers": 2, "train.micro_batch": 2}),
    # models that keep their code
    "gpt-neox": Train(own="gpt_neox"),
    "gpt-neox-current": Train({"fp8.recipe": "current"}, own="gpt_neox"),
    "gpt-neox-recompute": Train({"train.recompute": True}, own="gpt_neox"),
    # ranks
    "ranks-2-launcher": _on(2, launcher=True),
    "ranks-2": _on(2),
    "ranks-4": _on(4),
    "ranks-2-current": _on(2, fp8__recipe="current"),
    "ranks-4-current": _on(4, fp8__recipe="current"),
    "ranks-2-block": _on(2, fp8__recipe="block"),
    "ranks-2-bf16": _on(2, fp8__enabled=False),
    "ranks-4-hybrid": _on(4, parallel__hybrid_shard_degree=2),
    "ranks-2-documents": _on(2, data__packing="documents", train__recompute=True, parallel__reshard_after_forward=False),
    "ranks-2-gpt-neox": _on(2, own="gpt_neox"),
    # checkpoints
    "resume": _resumed(1, 1, 1),
    "resume-background": _resumed(1, 1, checkpoint__async=True, checkpoint__every=1),
    "resume-gpt-neox": _resumed(1, 1, own="gpt_neox"),
    "resume-ranks": _resumed(2, 2),
    "resume-moving": _resumed(2, 1, 4),
}

SAME_LOSSES = {"resume": "accumulation", "resume-ranks": "ranks-2", "ranks-2-launcher": "ranks-2"}
"""Cases that train the same steps by another way, and so have the same losses, gradients and checkpoint."""
