"""Verifies random layouts and model features; a case is reproduced by its number.

A case is drawn from its number alone: a model family, sizes that are or are not divisible by the ranks, degrees, an exchange of
context parallelism, a recipe, and run settings that decide how ranks share the work. A run that `octavo train` would refuse is
drawn again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from octavo._version import __version__
from octavo.config.degrees import DEGREES, divisors
from octavo.config.run import RunConfig
from octavo.errors import InputError, OctavoError, RunStopped
from octavo.models.families import DECODER_FAMILIES
from octavo.plan.run import Target, check
from octavo.storage import write_atomic
from octavo.verify.certificate import ON_CPUS, verify
from octavo.verify.pool import Pool

_ATTEMPTS = 200
_EXPERTS = ("mixtral", "qwen3_moe")


@dataclasses.dataclass(frozen=True)
class Case:
    """A drawn run, with the Hugging Face config of its model in a folder, and its ranks."""

    config: RunConfig
    ranks: int
    model: dict[str, Any]

    @property
    def text(self) -> str:
        """Drawn ranks, family, degrees and settings, as text."""
        run = self.config.model_dump(mode="json", exclude_unset=True)
        settings = {f"{section}.{key}": run[section][key] for section in _DRAWN for key in run.get(section, {})}
        listed = ", ".join(f"{key} {value}" for key, value in settings.items() if key not in _FIXED)
        sizes = ", ".join(f"{key} {value}" for key, value in self.model.items() if key != "model_type")
        return f"{self.ranks} ranks, {self.model['model_type']} ({sizes}): {listed}"


_DRAWN = ("parallel", "moe", "lora", "data", "fp8", "optimizer", "train")
_FIXED = ("data.source", "data.vocab_size", "data.sequence_length", "train.steps", "train.global_batch", "train.output")


def drawn(seed: int, folder: Path, ranks: int | None = None) -> Case:
    """The case with this number.

    Args:
        seed: the number.
        folder: where the model's config is written.
        ranks: CPU ranks; None: 2 or 4.

    Raises:
        OctavoError: none of 200 draws was a valid run.
    """
    draw = random.Random(seed)
    for _ in range(_ATTEMPTS):
        world, model = ranks or draw.choice((2, 4)), _model(draw)
        source = folder / f"case-{seed}"
        AutoConfig.for_model(**model).save_pretrained(source)
        sections = {"model": {"source": str(source)}, **_sections(draw, world, model)}
        adapters = random.Random(f"adapters {seed}")  # a separate generator, so that cases without adapters do not change
        if adapters.random() < 0.2:
            sections |= _with_adapters(adapters, sections, model)
        if (case := _case(sections, world, model)) is not None:
            further = _with_further(random.Random(f"further {seed}"), sections)
            return (_case(further, world, model) if further != sections else None) or case
    raise OctavoError(f"case {seed}: none of {_ATTEMPTS} draws was a valid run on {ranks or '2 or 4'} ranks.")


def _case(sections: dict[str, Any], ranks: int, model: dict[str, Any]) -> Case | None:
    """A case; None if `octavo train` refuses it."""
    try:
        config = RunConfig.from_dict(sections, where="a case")
        check(config, target=Target(world_size=ranks), notes=False)
    except InputError:
        return None
    return Case(config, ranks, model)


def fuzz(
    count: int,
    seed: int,
    ranks: int | None = None,
    *,
    output: Path | None = None,
    resume: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], list[str]]:
    """Verify `count` cases from number `seed` on: returns the report as a dict and as lines of text.

    Args:
        count, seed: number of cases, and the first case's number.
        ranks: ranks of each case; None: 2 or 4, as drawn.
        output: file for the report of finished cases, written after each case.
        resume: take cases that `output` reports as equal from there; verify those that differed. Other keys of the report are
            preserved.
        say: called with progress messages.

    Raises:
        InputError: `ranks` is 1, which is not a layout; or `output` is not a report of cases, or has other cases.
        RunStopped: after a signal; `output` has the finished cases.
    """
    if ranks is not None and ranks < 2:
        raise InputError(f"--ranks {ranks}: a layout needs at least 2 ranks, to be compared with fewer.")
    before, notes = {}, {}
    if resume and output is not None and output.exists():
        before, notes = _equal_cases(output), _notes(output)
        _refuse_to_lose(output, seed, count)
    cases: list[dict[str, Any]] = []
    pool: Pool | None = None
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        for number in range(seed, seed + count):
            case = drawn(number, Path(folder), ranks)
            known = before.get((number, case.text))
            if known is None:
                pool = pool or started.enter_context(Pool(ON_CPUS))
                known = _verified(case, number, pool)
                say(_line(known))
            cases.append(known)
            if output is not None:
                later = [
                    case for (other, _), case in before.items() if number < other < seed + count
                ]  # not reached in this run
                write_atomic(output, json.dumps(notes | _report([*cases, *later]), indent=1) + "\n")
    figures = notes | _report(cases)
    faults = [case for case in cases if case["fault"] is not None]
    head = f"{count - len(faults)} of {count} cases from seed {seed} are equal"
    of_ranks = "" if ranks is None else f" --ranks {ranks}"
    return figures, [
        head,
        *map(_line, faults),
        *[f"octavo verify --fuzz 1 --seed {case['seed']}{of_ranks} reproduces it" for case in faults[:1]],
    ]


def _verified(case: Case, number: int, pool: Pool) -> dict[str, Any]:
    """The report of a case: its first difference, or the error of a rank."""
    started, overridden = time.monotonic(), [f"parallel.{key}" for key in DEGREES]
    try:
        figures, _ = verify(case.config, case.ranks, overridden=overridden, seeds=[number], pool=pool)
        first = next((each for each in figures["comparisons"] if not each["verified"]), None)
        fault = None
        if first is not None:
            where = f" of ranks {first['ranks']}" if first["ranks"] else ""
            fault = f"{first['precision']}, {first['beside']}: {first['first']}{where}"
    except RunStopped:
        raise
    except OctavoError as error:
        fault = str(error)
    return {"seed": number, "case": case.text, "fault": fault, "seconds": round(time.monotonic() - started, 1)}


_WRITTEN = ("version", "torch", "verified", "equal", "median_seconds", "cases")


def _report(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = sorted(case["seconds"] for case in cases)
    return {
        "version": __version__,
        "torch": torch.__version__,
        "verified": all(case["fault"] is None for case in cases),
        "equal": sum(case["fault"] is None for case in cases),
        "median_seconds": seconds[len(seconds) // 2],
        "cases": list(cases),
    }


def _refuse_to_lose(path: Path, seed: int, count: int) -> None:
    """Raise an InputError if a report has cases other than the requested ones, which would be overwritten."""
    numbers = [case["seed"] for case in json.loads(path.read_text(encoding="utf-8"))["cases"]]
    if any(not seed <= number < seed + count for number in numbers):
        first, last = min(numbers), max(numbers)
        of_all = f"--fuzz {max(last, seed + count - 1) - min(first, seed) + 1} --seed {min(first, seed)}"
        raise InputError(
            f"--resume: {path} has cases {first} to {last}, but {seed} to {seed + count - 1} are requested: the others would "
            f"be lost. Give {of_all}, or another --output."
        )


def _notes(path: Path) -> dict[str, Any]:
    """Keys of a report that `fuzz` does not write."""
    return {key: value for key, value in json.loads(path.read_text(encoding="utf-8")).items() if key not in _WRITTEN}


def _equal_cases(path: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """(number, text) → the equal cases of an earlier report of the same version."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        cases = report["cases"] if report["version"] == __version__ else []
        return {(case["seed"], case["case"]): case for case in cases if case["fault"] is None}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--resume: {path} is not a report of octavo verify --fuzz ({type(error).__name__}: {error}): leave --resume out, "
            "or give another --output."
        ) from None


def _line(case: dict[str, Any]) -> str:
    end = "equal" if case["fault"] is None else f"DIFFERS {case['fault']}"
    return f"seed {case['seed']}: {case['case']}: {end}"


def _model(draw: random.Random) -> dict[str, Any]:
    """Keys of a Hugging Face config."""
    kind, heads = draw.choice(DECODER_FAMILIES), draw.choice((4, 8, 12, 16))
    values: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": 32 * heads,
        "num_attention_heads": heads,
        "num_hidden_layers": draw.choice((2, 3)),
        "intermediate_size": draw.choice((256, 384, 448, 512, 544, 704, 768)),
        "vocab_size": draw.choice((512, 509, 1000, 1024, 1037)),
        "max_position_embeddings": 256,
        "tie_word_embeddings": draw.random() < 0.4,
        **{f"{token}_token_id": number for number, token in enumerate(("pad", "bos", "eos"))},
    }
    if kind == "gpt_neox":
        return values | {"use_parallel_residual": draw.random() < 0.5, "attention_bias": draw.random() < 0.7}
    values["num_key_value_heads"] = draw.choice([n for n in divisors(heads) if n < 9])
    if kind in ("llama", "qwen3", "qwen3_moe"):
        values["attention_bias"] = draw.random() < 0.4
    if kind == "llama":
        values["mlp_bias"] = draw.random() < 0.3
    if kind in ("mistral", "mixtral", "phi3"):
        values["sliding_window"] = draw.choice((None, 40))
    if kind in ("qwen3", "qwen3_moe"):
        values["head_dim"] = 32
    if kind in ("qwen2", "qwen3") and draw.random() < 0.5:
        values |= {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    if kind in _EXPERTS:
        experts = draw.choice((4, 6, 8))
        name = "num_local_experts" if kind == "mixtral" else "num_experts"
        values |= {name: experts, "num_experts_per_tok": draw.choice((1, 2, 3))}
    if kind == "qwen3_moe":
        values |= {"moe_intermediate_size": draw.choice((128, 192, 256)), "mlp_only_layers": draw.choice(([], [0]))}
    return values


def _with_adapters(draw: random.Random, sections: dict[str, Any], model: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections with [lora], without keys that exclude it."""
    kind = model["model_type"]
    ends = {"phi3": ["qkv_proj"], "gpt_neox": ["query_key_value"]}.get(kind, ["q_proj", "v_proj"])
    lora: dict[str, Any] = {"rank": draw.choice((1, 4, 8)), "targets": ends}
    if kind not in _EXPERTS and draw.random() < 0.6:
        lora["targets"] = "all-linear"
    if draw.random() < 0.3:
        lora["rslora"] = True
    train = {key: value for key, value in sections["train"].items() if key not in ("freeze", "mlp_chunks")}
    if train.get("recompute") == "mlp":
        train["recompute"] = True
    return {"lora": lora, "train": train, "parallel": sections["parallel"] | {"tensor_parallel_degree": 1}}


def _with_further(draw: random.Random, sections: dict[str, Any]) -> dict[str, Any]:
    """Sections with Muon, or with a frozen base stored in FP8; in most draws unchanged."""
    further = dict(sections)
    if draw.random() < 0.15:
        further["optimizer"] = sections["optimizer"] | {"name": "muon"}
    if "lora" in sections and draw.random() < 0.5:
        further["lora"] = sections["lora"] | {"base": "fp8"}
    return further


def _sections(draw: random.Random, world: int, model: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections of a run file without the model's, each key drawn or absent."""

    def some(**values: Sequence[Any]) -> dict[str, Any]:
        return {key: draw.choice(choices) for key, choices in values.items() if draw.random() < 0.35}

    tensor = draw.choice(divisors(world))
    shards = draw.choice(divisors(world // tensor))
    context = draw.choice(divisors(shards))
    parallel: dict[str, Any] = {
        "hybrid_shard_degree": shards,
        "tensor_parallel_degree": tensor,
        "context_parallel_degree": context,
    }
    if context > 1:
        parallel["cp_comm_type"] = draw.choice(("all_gather", "p2p", "a2a", "auto"))
    sections: dict[str, dict[str, Any]] = {}
    if model["model_type"] in _EXPERTS:
        parallel["expert_parallel_degree"] = draw.choice(divisors(shards * tensor))
        if parallel["expert_parallel_degree"] > 1:
            parallel |= some(expert_dispatch_fp8=(True,))
        sections["moe"] = some(
            moe_load_balancing=("aux_loss", "none", "sinkhorn"), moe_aux_loss_coeff=(0.01, 0.1), moe_z_loss_coeff=(0.001,)
        )
    parallel |= some(reshard_after_forward=(True, False), sync_each_micro_batch=(True,))
    recipe = draw.choice(("delayed", "delayed", "delayed", "current", "rowwise", "block"))
    fp8 = {"recipe": recipe} | some(
        head=(True, False, "backward"), skip=(["*.1.*"],), layers=({"*.0.*": "current"}, {"*": "bf16"})
    )
    if recipe == "delayed":
        fp8 |= some(amax_history_len=(1, 2, 4), amax_compute_algo=("most_recent",), margin=(1,))
    if recipe in ("delayed", "current"):
        fp8 |= some(format=("E4M3",))
    data = {"source": "python:docstrings", "sequence_length": 64, "vocab_size": 300} | some(packing=("documents",))
    train = {"steps": 3, "global_batch": 2 * world, "output": "runs/never"}
    train |= some(recompute=(True, "selective", "mlp"), offload=(True,), mlp_chunks=(2, 3))
    train |= some(label_smoothing=(0.1,), z_loss=(1e-3,), freeze=(["*embed*"], ["*layers.0.*"], ["*norm*"]))
    optimizer = some(clip=(0.0,), weight_decay=(0.0,))
    return sections | {"parallel": parallel, "fp8": fp8, "data": data, "train": train, "optimizer": optimizer}
