"""`octavo verify --gpu`: two layers of each kind, at full width, on the present GPUs, in training precision.

The same steps are computed three times with deterministic kernels: twice normally, with collectives and copies that overlap
products, and once with serialised kernels (CUDA_LAUNCH_BLOCKING=1). A kernel that reads data before another stream has written
it gets different bits in one of the three. The bits of losses, norms, gradients, parameters and moments are compared on every
rank.


    python -m octavo.verify.gpu FOLDER NAME TIMES

runs one rank; it reads FOLDER/run.json and writes FOLDER/NAME-RANK.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.build import build_model
from octavo.collectives.blocks import local_of
from octavo.config.effects import with_values
from octavo.config.run import RunConfig
from octavo.data.packing import IGNORED, Batch
from octavo.errors import EXIT_FAILED, InputError, OctavoError, warn
from octavo.fp8.scaling import states_of
from octavo.models.families import decoder_spec
from octavo.models.sources import load_config
from octavo.parallel.sharding import sharding_of
from octavo.parallel.world import init, repeat_bits, seed_everything, state
from octavo.plan.run import RunPlan, Target, check
from octavo.train.optimizer import build_optimizer
from octavo.train.step import TrainContext, train_step
from octavo.verify.compare import MOMENTS
from octavo.verify.layers import with_few_layers
from octavo.verify.small import check_small, of_layers, with_packing_of_format, without_files
from octavo.verify.start import start
from octavo.watchdog.watchdog import Watchdog

STEPS, ACCUMULATION = 3, 2
SEQUENTIAL = {"CUDA_LAUNCH_BLOCKING": "1"}
Bits = dict[str, int]
"""Name of a result → a hash of its bits."""


def verify_on_gpus(
    config: RunConfig, ranks: int | None = None, *, say: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, Any], list[str]]:
    """Compare a run's layers on the present GPUs; returns the report as a dict and as lines of text.

    Args:
        config: the run. Its data and weights are not read.
        ranks: number of ranks, one per GPU; None: all GPUs.
        say: shows progress.

    Raises:
        InputError: there are too few GPUs, the run does not fit the ranks, or its model is not Octavo's decoder.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = gpus if ranks is None else ranks
    if not 0 < ranks <= gpus:
        asked = f", and --ranks is {ranks}" if ranks else ""
        raise InputError(f"octavo verify --gpu: there are {gpus} GPUs{asked}. Without --gpu the layout is compared on CPUs.")
    config = of_few_layers(config, ranks)
    plan = check(config, target=Target(world_size=ranks), notes=False)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.json").write_text(json.dumps(config.model_dump(mode="json")), encoding="utf-8")
        say(f"{STEPS} steps on {ranks} GPU{'s'[: ranks > 1]}, twice …")
        beside = _run(Path(folder), "beside", 2, ranks, {})
        say("one kernel after the other …")
        after = _run(Path(folder), "after", 1, ranks, SEQUENTIAL)
    return report(plan, beside, after)


def of_few_layers(config: RunConfig, ranks: int) -> RunConfig:
    """The run with two layers of each kind, random weights and two micro-batches in a step, by deterministic kernels.

    Raises:
        InputError: its model is not Octavo's decoder.
    """
    hf_config = load_config(config.model.source, config.model.config)
    spec, reason = (None, 'blocks = "own"') if config.model.blocks == "own" else decoder_spec(hf_config)
    spec = check_small(spec, hf_config.model_type, reason)
    config, layers = with_few_layers(config, hf_config, spec, spec.experts)
    few = of_layers(hf_config, spec, layers)
    changed = {key: value for key, value in few.to_dict().items() if value != hf_config.to_dict().get(key)}
    micro_batch = config.train.micro_batch or 1
    samples = ranks // (config.parallel.tensor_parallel_degree * config.parallel.context_parallel_degree)
    values = {
        "model.config": {**config.model.config, **changed},
        "train.deterministic": True,
        "train.micro_batch": micro_batch,
        "train.global_batch": max(samples, 1) * micro_batch * ACCUMULATION,
        "train.steps": STEPS,
        "train.compare_bf16": False,
        "optimizer.warmup_steps": 0,
        "optimizer.schedule": "constant",
    }
    return without_files(with_values(with_packing_of_format(config), values))


def trained(config: RunConfig) -> Bits:
    """Hashes of this rank's tensors during and after the steps."""
    plan = check(config)
    seed_everything(config.train.seed + state.token_rank)
    sharding = sharding_of(state, plan.recipe, dtype=plan.dtype, params_dtype=plan.params_dtype)
    model = build_model(plan.hf_config, plan.build_options, device=plan.device, sharding=sharding).train()
    several = state.world_size > 1
    loader: Any = _Samples(plan)
    context = TrainContext(
        plan, model, build_optimizer(model, config.optimizer), loader, None, state.dp_process_group if several else None,
        state.world_process_group if several else None, Watchdog(),
    )  # fmt: skip
    bits: Bits = {}

    def keep(*_: Any) -> None:
        bits.update(_bits_of(model, f"gradient of step {step}:", lambda p: p.grad))

    hook = context.optimizer.register_step_pre_hook(keep)
    for step in range(1, STEPS + 1):
        done = train_step(context, step)
        numbers = torch.tensor([done.loss, done.grad_norm], dtype=torch.float64)
        bits |= {f"{name} of step {step}": bits_of(x) for name, x in zip(("loss", "norm"), numbers, strict=True)}
    hook.remove()
    bits |= _bits_of(model, "parameter", lambda p: p)
    for moment in MOMENTS:
        bits |= _bits_of(model, moment, partial(_moment, context.optimizer, moment))
    for layer, fp8 in states_of(model):
        bits |= {f"history {layer}.{operand.value}": bits_of(slot.history) for operand, slot in fp8.slots.items()}
    return bits


def bits_of(tensor: Tensor) -> int:
    """A hash that depends on bits and their positions, computed on the tensor's device."""
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    digest, numbers = 0, tensor.detach().contiguous().flatten().view(view)
    for first, part in enumerate(numbers.split(1 << 24)):
        places = torch.arange(1, len(part) + 1, device=part.device) * 0x9E3779B97F4A7C1  # products wrap around
        digest = hash((digest, first, int((part.long() * (places | 1)).sum())))
    return digest


def report(
    plan: RunPlan, beside: Sequence[Sequence[Bits]], after: Sequence[Sequence[Bits]]
) -> tuple[dict[str, Any], list[str]]:
    """The report from each rank's hashes: of two normal runs, and one with serialised kernels."""
    of_ranks = [(first, second, third) for (first, second), (third,) in zip(beside, after, strict=True)]
    pairs = {
        "repeated": [(first, second) for first, second, _ in of_ranks],
        "one kernel after the other": [(first, third) for first, _, third in of_ranks],
    }
    comparisons, text = [], [f"{len(beside)} rank{'s'[: len(beside) > 1]} on {plan.hardware.name}, {plan.fp8_note}"]
    text.append(f"{plan.hf_config.num_hidden_layers} layers of {plan.config.model.source}, {STEPS} steps")
    for name, ranks in pairs.items():
        differing = [(rank, key) for rank, (one, other) in enumerate(ranks) for key in one if one[key] != other.get(key)]
        first = f"{differing[0][1]} on rank {differing[0][0]}" if differing else None
        comparisons.append({"comparison": name, "equal": not differing, "first": first, "tensors": len(ranks[0][0])})
        text.append(
            f"DIFFERS  {name}: {first}, and {len(differing) - 1} more"
            if differing
            else f"equal    {name}: {len(ranks[0][0])} results of each rank to the bit"
        )
    figures = {
        "ranks": len(beside),
        "device": plan.hardware.name,
        "layers": plan.hf_config.num_hidden_layers,
        "precision": plan.fp8_note,
        "verified": all(each["equal"] for each in comparisons),
        "comparisons": comparisons,
    }
    return figures, text


class _Samples:
    """Random tokens for each step, in micro-batches of this rank; each sequence has two documents."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan

    def step(self, first: int) -> list[Batch]:
        plan, tokens = self._plan, self._plan.config.data.sequence_length
        draw = torch.Generator().manual_seed(1_000_003 * first + state.dp_rank)
        batches = []
        for _ in range(plan.accumulation):
            shape = plan.micro_batch, tokens
            ids = torch.randint(3, plan.hf_config.vocab_size, shape, generator=draw)
            labels = ids.masked_fill(torch.rand(shape, generator=draw) < 0.2, IGNORED)
            positions = torch.arange(tokens).expand(shape).clone()
            if plan.config.data.packing == "documents":
                positions[:, tokens // 2 :] -= tokens // 2
                labels[:, tokens // 2] = IGNORED
            batches.append(Batch(ids, labels, positions, torch.full(shape[:1], tokens)))
        return batches


def _moment(optimizer: torch.optim.Optimizer, name: str, parameter: Any) -> Tensor | None:
    moment: Tensor | None = optimizer.state[parameter].get(name)
    return moment


def _bits_of(model: nn.Module, kind: str, value: Callable[[Any], Tensor | None]) -> Bits:
    parts = {name: value(parameter) for name, parameter in model.named_parameters()}
    return {f"{kind} {name}": bits_of(local_of(part)) for name, part in parts.items() if part is not None}


def _run(folder: Path, name: str, times: int, ranks: int, environment: dict[str, str]) -> list[list[Bits]]:
    """The results of the steps, by rank and repetition."""
    start("octavo.verify.gpu", str(folder), name, str(times), ranks=ranks, environment=environment)
    return [json.loads((folder / f"{name}-{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def main(folder: Path, name: str, times: int) -> int:
    """Train `times` times and write the hashes; returns the exit code."""
    try:
        config = RunConfig.from_dict(json.loads((folder / "run.json").read_text(encoding="utf-8")), where="octavo verify")
        init(config.parallel.model_dump())
        repeat_bits()
        runs = [trained(config) for _ in range(times)]
        (folder / f"{name}-{state.rank}.json").write_text(json.dumps(runs), encoding="utf-8")
    except OctavoError as error:
        if state.rank == 0:
            warn(str(error))
        return error.exit_code or EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
