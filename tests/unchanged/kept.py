"""The checkpoints under tests/fixtures/checkpoints: how they were written, and what loading them must give.

    PYTHONPATH=src:FOLDER_WITH_TIMM python tests/unchanged/kept.py            writes all of them anew

They were written before the inner modules moved, and stay as they are: later versions have to load them. Write them anew only
for a format that is new on purpose. Beside each lies `expected.json`: hashes of its tensors by name, and the losses of the next
three steps, with the machine that had them. Dropout is off, since its masks differ between builds of torch.

    llama, gpt_neox, mistral, mixtral        run folders of `octavo train`, one rank
    llama-2-ranks, gpt_neox-2-ranks          the same, two ranks
    vit-sgd, vit-adamw                       `octavo.save` of a timm VisionTransformer in a user's own loop
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from bits import elements_bits, machine, stored_tensors
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import octavo

FOLDER = Path(__file__).parents[1] / "fixtures" / "checkpoints"
CORPUS = FOLDER / "corpus.jsonl"
VOCABULARY, SAVED, STEPS = 64, 4, 7

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SHAPE | {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "gpt_neox": SHAPE,
    "mistral": SHAPE | {"num_key_value_heads": 2, "sliding_window": None},
    "mixtral": SHAPE | {"num_key_value_heads": 2, "intermediate_size": 16, "num_local_experts": 4},
}
"""Hugging Face's, by model_type."""

LATER = ("mixtral",)
"""Written when the head's gradients were in FP8 by default, and norms, first matrices and routers were one module each."""

RUN_FILE = """\
[model]
source = "source"

[data]
source = "corpus.jsonl"
sequence_length = 24
validation_fraction = 0.1
folder = "data"

[fp8]
amax_history_len = 4

[optimizer]
lr = 1e-2
warmup_steps = 2
schedule = "constant"

[train]
output = "run"
steps = 4
global_batch = 4
micro_batch = 2

[checkpoint]
every = 0
"""
"""Paths are relative, so that the folder of a test may be anywhere."""

RUNS = {"llama": 1, "gpt_neox": 1, "mistral": 1, "mixtral": 1, "llama-2-ranks": 2, "gpt_neox-2-ranks": 2}
"""Run folders, and the ranks that wrote them."""

VISION = ("vit-sgd", "vit-adamw")


def family(name: str) -> str:
    """The model_type of a run."""
    return name.partition("-")[0]


def checkpoint(name: str) -> Path:
    """The checkpoint of a fixture."""
    return FOLDER / name / ("run/checkpoints/step-4" if name in RUNS else "saved")


def expected(name: str) -> dict[str, Any]:
    """What loading a fixture must give."""
    return json.loads((FOLDER / name / "expected.json").read_text(encoding="utf-8"))


def place(name: str, folder: Path) -> None:
    """Put a run into a folder as `octavo train` left it there, for a start in that folder."""
    AutoConfig.for_model(family(name), **CONFIGS[family(name)]).save_pretrained(folder / "source")
    shutil.copyfile(CORPUS, folder / "corpus.jsonl")
    (folder / "tiny.toml").write_text(RUN_FILE, encoding="utf-8")
    if (FOLDER / name / "run").is_dir():
        shutil.copytree(FOLDER / name / "run", folder / "run")


def train(folder: Path, steps: int) -> list[float]:
    """`octavo train` in a folder, to this step; the losses of all steps. Each of several ranks calls it."""
    from octavo.cli import main

    with contextlib.chdir(folder):
        arguments = ["train", "tiny.toml", f"train.steps={steps}"]
        if (code := main(arguments)) != 0:
            raise AssertionError(f"octavo {' '.join(arguments)} ended with {code}")
    return losses(folder)


def losses(folder: Path) -> list[float]:
    """Of the run in a folder, step by step."""
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def language_model(
    kind: str, *, seed: int = 5, blocks: Literal["auto", "own"] = "auto"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A transformed model with random weights, and an optimizer with the parameter groups of `octavo train`."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIGS[kind]))
    head = None if kind in LATER else False
    model = octavo.transform(model, params_dtype=torch.float32, fp8_head=head, blocks=blocks).train()
    groups = [[p for p in model.parameters() if p.ndim >= 2], [p for p in model.parameters() if p.ndim < 2]]
    return model, torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)


def moments_bits(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A hash of each kind of moment, whatever the parameters are called and how they are joined."""
    kinds: dict[str, list[Tensor]] = {}
    for states in optimizer.state.values():
        for kind, value in states.items():
            if isinstance(value, Tensor) and value.dim():
                kinds.setdefault(kind, []).append(value)
    return {kind: elements_bits(tensors) for kind, tensors in sorted(kinds.items())}


def weights_bits(model: nn.Module) -> str:
    """A hash of all weights, whatever they are called and how they are joined."""
    return elements_bits(model.parameters())


class Vision:
    """A small timm VisionTransformer in a loop of a user's own: images of 16 × 16 in ten classes.

    dtype: of activations; float32 and no FP8 for figures that do not depend on where values are rounded.
    """

    def __init__(self, name: str, dtype: torch.dtype = torch.bfloat16) -> None:
        from timm.models.vision_transformer import VisionTransformer

        torch.manual_seed(3)
        model = VisionTransformer(img_size=16, patch_size=8, num_classes=10, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2)
        self.recipe = octavo.recipe.DelayedScaling(amax_history_len=4) if dtype == torch.bfloat16 else None
        self.model = octavo.transform(model, recipe=self.recipe, dtype=dtype, params_dtype=torch.float32).train()
        if name == "vit-sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.03, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, number: int) -> float:
        """Train a step; its loss before it."""
        draw = torch.Generator().manual_seed(number)
        images = torch.rand(6, 3, 16, 16, generator=draw) * 2 - 1
        labels = torch.randint(10, (6,), generator=draw)
        with octavo.fp8_autocast(enabled=self.recipe is not None, fp8_recipe=self.recipe):
            loss = nn.functional.cross_entropy(self.model(images).float(), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Of a fixed batch, without FP8."""
        draw = torch.Generator().manual_seed(99)
        return self.model(torch.rand(4, 3, 16, 16, generator=draw) * 2 - 1).float()


def exported_bits(folder: Path) -> dict[str, str]:
    """Hashes of what `octavo.export` makes of the run in a folder, by Hugging Face's names."""
    octavo.export(folder / "run", folder / "export")
    return stored_tensors(folder / "export")


def _write_run(name: str) -> dict[str, Any]:
    ranks = RUNS[name]
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    with tempfile.TemporaryDirectory() as made:
        first, folder = Path(made) / "first", Path(made) / "again"
        first.mkdir()
        place(name, first)
        train_on(ranks, first, SAVED)
        kept = FOLDER / name / "run"
        kept.mkdir(parents=True)
        for part in ("run.toml", "metrics.jsonl", "model", "checkpoints"):  # environment.json is of the machine
            if (first / "run" / part).is_dir():
                shutil.copytree(first / "run" / part, kept / part)
            else:
                shutil.copyfile(first / "run" / part, kept / part)
        found: dict[str, Any] = {"machine": machine()}
        model, optimizer = language_model(family(name))
        octavo.load(checkpoint(name), model, optimizer)
        octavo.save(Path(made) / "saved", model, optimizer)
        found["tensors"] = stored_tensors(Path(made) / "saved")
        found["weights"], found["moments"] = weights_bits(model), moments_bits(optimizer)
        folder.mkdir()
        place(name, folder)
        found["exported"] = exported_bits(folder)
        train_on(ranks, folder, STEPS)
        found["losses"] = losses(folder)[SAVED:]
        return found


def _write_vision(name: str) -> dict[str, Any]:
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    (FOLDER / name).mkdir(parents=True)
    trained = Vision(name)
    for step in range(SAVED):
        trained.step(step)
    octavo.save(checkpoint(name), trained.model, trained.optimizer, step=SAVED)
    found: dict[str, Any] = {"machine": machine(), "tensors": stored_tensors(checkpoint(name))}
    found["weights"], found["moments"] = weights_bits(trained.model), moments_bits(trained.optimizer)
    found["losses"] = [trained.step(step) for step in range(SAVED, STEPS)]
    precise = Vision(name, torch.float32)
    octavo.load(checkpoint(name), precise.model, precise.optimizer)
    found["logits"] = precise.logits().tolist()
    found["losses_float32"] = [precise.step(step) for step in range(SAVED, STEPS)]
    forgetful = Vision(name, torch.float32)
    octavo.load(checkpoint(name), forgetful.model, forgetful.optimizer)
    forgetful.optimizer.state.clear()
    without = [forgetful.step(step) for step in range(SAVED, STEPS)]
    found["losses_float32_without_moments"] = without
    if max(abs(a / b - 1) for a, b in zip(without, found["losses_float32"], strict=True)) < 3e-3:
        raise SystemExit(f"{name}: the losses do not show whether the moments were loaded")
    return found


def _documents() -> Iterator[str]:
    """Documents of token ids, by a linear congruential generator: half of them follow the one before by a rule."""
    number, token = 1, 1
    for _ in range(40):
        ids = []
        number = (number * 1103515245 + 12345) % 2**31
        for _ in range(8 + (number >> 8) % 40):
            number = (number * 1103515245 + 12345) % 2**31
            token = (3 * token + 1) % VOCABULARY if number >> 30 else (number >> 8) % VOCABULARY
            ids.append(token)
        yield json.dumps({"input_ids": ids})


def train_on(ranks_wanted: int, folder: Path, steps: int) -> None:
    """`octavo train` in a folder on so many ranks."""
    import ranks

    if ranks_wanted == 1:
        train(folder, steps)
    elif any(codes := ranks.exit_codes(ranks_wanted, train, folder, steps)):
        raise SystemExit(f"octavo train ended with {codes} on its ranks")


def main() -> None:
    """Write every fixture."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    FOLDER.mkdir(parents=True, exist_ok=True)
    CORPUS.write_text("".join(line + "\n" for line in _documents()), encoding="utf-8")
    writers: dict[str, Callable[[], dict[str, Any]]] = {name: lambda name=name: _write_run(name) for name in RUNS}
    writers |= {name: lambda name=name: _write_vision(name) for name in VISION}
    for name, write in writers.items():
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            found = write()
            (FOLDER / name / "expected.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(name, found["losses"])


if __name__ == "__main__":
    # Ranks are started by a server that imports this file by its name.
    import kept

    kept.main()
