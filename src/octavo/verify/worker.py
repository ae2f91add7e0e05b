"""Steps of the small run on a rank, and what all ranks hold behind them, whole.

    python -m octavo.verify.worker FOLDER NAME

reads FOLDER/NAME.json, and rank 0 writes FOLDER/NAME.safetensors. It is started by `octavo.verify.certificate`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from octavo.build import build_model
from octavo.collectives.blocks import parameters_of, with_block
from octavo.collectives.whole import whole_tensor
from octavo.config.degrees import Degrees
from octavo.config.run import RunConfig
from octavo.errors import EXIT_FAILED, OctavoError, warn
from octavo.fp8.scaling import states_of
from octavo.hardware import describe_device
from octavo.models.families import decoder_spec
from octavo.models.sources import load_config
from octavo.parallel.sharding import sharding_of
from octavo.parallel.world import init, state
from octavo.plan.run import RunPlan, recipe_from_config
from octavo.train.optimizer import build_optimizer
from octavo.train.step import TrainContext, train_step
from octavo.verify import small
from octavo.watchdog.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class Task:
    """What a worker trains.

    Attributes:
        run: the run file's keys, its degrees those of this layout.
        like: degrees by which the model shrinks, those of the layout that is verified.
        fp8: the run's recipe; False: without FP8.
        data: data-parallel ranks of the layout that is verified, whose samples are trained.
        seeds: of weights and samples, one training each.
    """

    run: dict[str, Any]
    like: dict[str, int]
    fp8: bool
    data: int
    seeds: list[int]


def results(task: Task) -> dict[str, Tensor]:
    """Losses, norms, first gradients, parameters, moments, scales and histories of the steps; on rank 0, whole."""
    config = RunConfig.from_dict(task.run, where="octavo verify")
    init(config.parallel.model_dump())
    return {f"{name}, seed {seed}": value for seed in task.seeds for name, value in _trained(task, config, seed).items()}


def _trained(task: Task, config: RunConfig, seed: int) -> dict[str, Tensor]:
    """The results of a seed."""
    whole, like = load_config(config.model.source, config.model.config), Degrees(**task.like)
    spec = decoder_spec(whole)[0]
    assert spec is not None  # `certificate` has refused others
    hf_config = small.small_config(whole, spec, like)
    config = small.small_run(config, like, task.data * small.MICRO_BATCH * small.ACCUMULATION)
    recipe = recipe_from_config(config.fp8) if task.fp8 else None
    plan = _plan(config, hf_config, recipe, small.MICRO_BATCH * task.data // state.dp_size)
    options = dataclasses.replace(plan.build_options, dtype=torch.float64, params_dtype=torch.float64)
    sharding = sharding_of(state, recipe, dtype=torch.float64, params_dtype=torch.float64)
    model = build_model(_random_model(hf_config, seed), options, device="cpu", sharding=sharding).train()
    optimizer = build_optimizer(model, config.optimizer)
    several = state.world_size > 1
    loader: Any = small.Samples(
        hf_config.vocab_size, config.data.sequence_length, rank=state.dp_rank, ranks=state.dp_size,
        micro_batch=plan.micro_batch, documents=config.data.packing == "documents", padding=like.context == 1, seed=seed,
    )  # fmt: skip
    context = TrainContext(
        plan, model, optimizer, loader, None, state.dp_process_group if several else None,
        state.world_process_group if several else None, Watchdog(),
    )  # fmt: skip
    found: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        if not found:  # in the first step
            found.update(_whole(model, "gradient", lambda p: p.grad))

    optimizer.register_step_pre_hook(keep)
    for step in range(1, small.STEPS + 1):
        done = train_step(context, step)
        if step == 1 and config.optimizer.clip > 0:  # as they were before
            factor = max(1.0, (done.grad_norm + 1e-6) / config.optimizer.clip)
            found = {name: gradient * factor for name, gradient in found.items()}
        numbers = torch.tensor([done.loss, done.grad_norm], dtype=torch.float64)
        found[f"loss of step {step}"], found[f"norm of step {step}"] = numbers.unbind()
    found |= _whole(model, "parameter", lambda p: p)
    for moment in ("exp_avg", "exp_avg_sq"):
        found |= _whole(model, moment, partial(_moment, optimizer, moment))
    return found | _scales(model)


def _moment(optimizer: torch.optim.Optimizer, name: str, parameter: Any) -> Tensor | None:
    found: Tensor | None = optimizer.state[parameter].get(name)
    return found


def _plan(config: RunConfig, hf_config: Any, recipe: Any, micro_batch: int) -> RunPlan:
    cpu = torch.device("cpu")
    return RunPlan(
        config=config, hf_config=hf_config, device=cpu, hardware=describe_device(cpu), degrees=state.degrees, recipe=recipe,
        fp8_note="", micro_batch=micro_batch, accumulation=small.ACCUMULATION, layers={}, flops=None, weights={},
        weights_folder=None, blocks="auto", parameters=0, fp8_head=config.fp8.head or False,
    )  # fmt: skip


def _random_model(hf_config: Any, seed: int) -> nn.Module:
    """Hugging Face's model with random values in every parameter, norms and biases too."""
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float64, trust_remote_code=False)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(parameter + 0.1 * noise if parameter.dim() == 1 else 0.1 * noise)
    return model


def _whole(model: nn.Module, kind: str, value: Callable[[Any], Tensor | None]) -> dict[str, Tensor]:
    """A tensor of each parameter, whole. Collective."""
    blocks, found = parameters_of(model), {}
    for name, parameter in model.named_parameters():
        part = value(parameter)
        if part is not None:
            found[f"{kind} {name}"] = whole_tensor(with_block(part, blocks[parameter])).detach().clone()
    return found


def _scales(model: nn.Module) -> dict[str, Tensor]:
    """The one scale of each operand in its last cast, of all experts, and its record under delayed scaling. Collective."""
    found = {}
    for layer, fp8 in states_of(model):
        for operand, scale in fp8.observed.items():
            if scale.dim() > 1:  # of rows or blocks
                continue
            every = torch.zeros(fp8.experts or 1)
            every[fp8.own_experts or slice(None)] = scale
            if fp8.own_experts is not None and state.world_size > 1:
                dist.all_reduce(every, dist.ReduceOp.MAX)
            found[f"scale {layer}.{operand.value}"] = every
        for operand, slot in fp8.slots.items():
            found[f"history {layer}.{operand.value}"] = torch.cat((slot.scale.flatten(), slot.history.flatten())).clone()
    return found


def main(folder: Path, name: str) -> int:
    """Train a task and write its results; returns the exit code."""
    torch.set_num_threads(1)
    try:
        found = results(Task(**json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))))
    except OctavoError as error:
        if state.rank == 0:
            warn(str(error))
        return error.exit_code or EXIT_FAILED
    if state.rank == 0:
        save_file({key: value.contiguous().clone() for key, value in found.items()}, folder / f"{name}.safetensors")
    if state.world_size > 1:
        dist.barrier()  # one that leaves early would break the connections of the others
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), sys.argv[2])
    sys.stderr.flush()
    os._exit(code)  # gloo's threads may abort a process that ends as others do
