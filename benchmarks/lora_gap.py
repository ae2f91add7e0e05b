"""Loss of LoRA over a base in FP8 against a bfloat16 base: pairs of runs that share weights, adapters and samples.

    python -m benchmarks.lora_gap FOLDER --output gap.json

A small model is pretrained on bytes of Python source (transformers), in FP8 with float32 weights. Its folder is the base of
both runs of a pair: adapters on bytes of C++ headers (torch), a seed each for the adapters' first values and the order of the
samples. One run has no FP8; the other stores the base in FP8 and multiplies in it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Target
from benchmarks.records import document
from octavo.build import BuildOptions, build_model, transform
from octavo.config.lora import LoRA
from octavo.errors import InputError
from octavo.fp8.autocast import fp8_autocast
from octavo.fp8.recipe import RECIPES
from octavo.hardware import describe_device
from octavo.models.shapes import SHAPES
from octavo.parallel.deferred_init import delayed_init
from octavo.run.export import export
from octavo.storage import write_atomic
from octavo.train.adamw import AdamW
from octavo.train.optimizer import clip_grad_norm_

VOCABULARY = 256
PRETRAINING, ADAPTATION = ("transformers", (".py",)), ("torch", (".h", ".hpp", ".cuh"))
"""Package and ends of the names of files with text for the base, and for its adapters."""
TINY: dict[str, Any] = SHAPES["llama-tiny"] | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL: dict[str, Any] = SHAPES["llama-tiny"] | {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 12, "head_dim": 64,
}  # fmt: skip


def text_of(package: str, ends: tuple[str, ...], size: int) -> Tensor:
    """About so many bytes of a package's files whose names end so, in an order by their names' hash: uint8."""
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    root, parts, read = Path(found.origin).parent, [], 0
    for path in sorted(root.rglob("*"), key=lambda path: hash_of(path.name)):
        if path.suffix in ends and path.is_file():
            parts.append(path.read_bytes()[:100_000])
            read += len(parts[-1])
            if read >= size:
                break
    if read < size // 8:
        raise InputError(f"{root} has {read:,} bytes of {', '.join(ends)}, of {size:,} that are wanted: use --tiny.")
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)


def hash_of(name: str) -> int:
    """A number by a name, the same in each process."""
    number = 0
    for byte in name.encode():
        number = (number * 1_000_003 + byte) % (1 << 61)
    return number


def batches(text: Tensor, shape: tuple[int, int], seed: int, device: torch.device) -> Iterator[Tensor]:
    """Random places of a text without end: int64 [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - shape[1], shape[:1], generator=generator)
        yield torch.stack([text[start : start + shape[1]] for start in starts.tolist()]).to(device, torch.int64)


def train(
    model: nn.Module,
    samples: Iterator[Tensor],
    steps: int,
    rate: float,
    around: Callable[[], Any],
) -> list[float]:
    """AdamW with a warm-up and a linear decay; returns the loss of each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=0.0), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / min(50, steps), 1.05 - step / steps)
        ids = next(samples)
        with around():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@torch.no_grad()
def evaluated(model: nn.Module, text: Tensor, shape: tuple[int, int], count: int, around: Callable[[], Any]) -> float:
    """Mean loss of so many batches, the same in each call."""
    samples, losses = batches(text, shape, 12345, next(model.parameters()).device), []
    model.eval()
    for _ in range(count):
        ids = next(samples)
        with around():
            losses.append(float(model(input_ids=ids, labels=ids).loss))
    model.train()
    return statistics.fmean(losses)


def empty(sizes: dict[str, Any], length: int) -> nn.Module:
    """Hugging Face's model of a shape on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    changes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": length,
        "use_cache": False,
        "tie_word_embeddings": False,
    }
    changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    with delayed_init():
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**sizes, **changes}))
    return model


def measure(
    folder: Path,
    *,
    tiny: bool = False,
    recipe: str = "delayed",
    seeds: int = 5,
    first: int = 1,
    pretraining: int = 500,
    steps: int = 120,
    batch: int = 16,
    length: int = 1024,
    rank: int = 16,
    device: str = "cuda",
    say: Callable[[str], None] = print,
    done: Callable[[dict[str, Any]], object] = lambda found: None,
) -> dict[str, Any]:
    """Pretrain the base in `folder`, or take it from there, and train the pairs; returns rows and the mean gap.

    first: the first of so many seeds. With seeds = 0 the base alone is pretrained.
    done: takes the same after each pair.

    Raises:
        InputError: there is too little text.
    """
    begun = time.perf_counter()
    where, shape, sizes = torch.device(device), (batch, length), TINY if tiny else SMALL
    scaling = RECIPES[recipe]()

    def in_fp8() -> Any:
        return fp8_autocast(fp8_recipe=scaling)

    def in_bf16() -> Any:
        return fp8_autocast(enabled=False)

    if not (folder / "config.json").exists():
        model = transform(empty(sizes, length), scaling, device=where, params_dtype=torch.float32)
        python = text_of(*PRETRAINING, 200_000 if tiny else 24_000_000)
        losses = train(model, batches(python, shape, 0, where), pretraining, 1e-3, in_fp8)
        export(model, folder)
        size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        seconds = time.perf_counter() - begun
        say(f"base: {size:.1f}M parameters, loss {losses[0]:.3f} to {losses[-1]:.3f}, {seconds:.0f} s so far")
        del model
    other = text_of(*ADAPTATION, 200_000 if tiny else 16_000_000)
    cut = len(other) * 9 // 10
    learned, held_out = other[:cut], other[cut:]
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    for seed in range(first, first + seeds):
        pair: dict[str, dict[str, float]] = {}
        for name, around in (("bf16", in_bf16), ("fp8", in_fp8)):
            options = BuildOptions(
                dtype=torch.bfloat16,
                params_dtype=torch.bfloat16,
                fp8_head=None if name == "fp8" else False,
                seed=seed,  # of the adapters' first values
                lora=LoRA(rank=rank, base="fp8" if name == "fp8" else "params_dtype"),
                base_recipe=scaling,
            )
            model = build_model(empty(sizes, length), options, device=where, load_from=folder)
            before = evaluated(model, held_out, shape, 8, around)
            losses = train(model, batches(learned, shape, seed, where), steps, 5e-4, around)
            loss, held = statistics.fmean(losses[len(losses) // 2 :]), evaluated(model, held_out, shape, 8, around)
            pair[name] = {"before": before, "loss": loss, "held_out": held}
            if name == "fp8":  # without the casts of activations: the base's bytes and the adapters alone
                pair[name]["held_out_without_fp8"] = evaluated(model, held_out, shape, 8, in_bf16)
            del model
        gap = {what: 100 * (pair["fp8"][what] / pair["bf16"][what] - 1) for what in ("before", "loss", "held_out")}
        gap["held_out_without_fp8"] = 100 * (pair["fp8"]["held_out_without_fp8"] / pair["bf16"]["held_out"] - 1)
        rows.append({"seed": seed, **pair, "gap_percent": gap})
        before, (bf16, fp8) = pair["bf16"]["before"], (pair[name]["held_out"] for name in ("bf16", "fp8"))
        say(
            f"{time.perf_counter() - begun:.0f} s, seed {seed}: held out {before:.4f} before, bf16 {bf16:.5f}, FP8 {fp8:.5f} "
            f"({gap['held_out']:+.3f}%; {gap['held_out_without_fp8']:+.3f}% without casts of activations, "
            f"{gap['before']:+.3f}% before); training {gap['loss']:+.3f}%"
        )
        found = {"recipe": recipe, "steps": steps, "rank": rank, "rows": rows, "mean_gap_and_error_percent": _summary(rows)}
        done(found)
    for what, (mean, error) in _summary(rows).items() if rows else ():
        say(f"{what}: mean gap {mean:+.4f}%, standard error {error:.4f}%")
    return found


def _summary(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    return {what: _mean_of([row["gap_percent"][what] for row in rows]) for what in rows[0]["gap_percent"]}


def _mean_of(gaps: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    return statistics.fmean(gaps), error


def main(arguments: list[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora_gap", description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="of the base: written, or read where it is there")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--recipe", default="delayed", choices=[name for name in RECIPES if name != "rowwise"])
    numbers = {"seeds": 5, "first": 1, "pretraining": 500, "steps": 120, "batch": 16, "length": 1024, "rank": 16}
    for name, usual in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--tiny", action="store_true", help="a shape for CPUs; measures nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = vars(parser.parse_args(arguments))
    output = given.pop("output")
    target = Target(describe_device(given["device"]), given["device"])
    command = f"python -m benchmarks.lora_gap {shlex.join(sys.argv[1:] if arguments is None else arguments)}"

    def done(found: dict[str, Any]) -> None:
        if output is not None:
            whole = document("lora-gap", command, target, (), found["rows"]) | found
            write_atomic(output, json.dumps(whole, indent=1) + "\n")

    measure(given.pop("folder"), **given, done=done)


if __name__ == "__main__":
    main()
