"""Steps of the small run on a rank, and the whole tensors after them; `octavo.verify.pool` forks the ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from octavo.build import build_model
from octavo.checkpoint.api import load, save
from octavo.collectives.blocks import fill, local_of, parameters_of, part_of, shape_of, with_block
from octavo.collectives.whole import whole_tensor
from octavo.config.degrees import Degrees
from octavo.config.run import RunConfig
from octavo.errors import OctavoError
from octavo.fp8.autocast import fp8_autocast
from octavo.fp8.recipe import Operand
from octavo.fp8.scaling import states_of
from octavo.hardware import describe_device
from octavo.kernels.experts import assignment
from octavo.models.families import decoder_spec
from octavo.models.sources import load_config
from octavo.parallel import averaging, offload
from octavo.parallel.fsdp2 import direct_reduce
from octavo.parallel.sharding import sharding_of
from octavo.parallel.world import init, shutdown, state
from octavo.plan.run import RunPlan, recipe_from_config
from octavo.train.optimizer import build_optimizer
from octavo.train.step import TrainContext, train_step
from octavo.verify import causality, small
from octavo.verify.compare import MOMENTS, NAN
from octavo.watchdog.watchdog import Watchdog

_PATIENCE_SECONDS = 180.0
"""Of ranks with one another: a small model's steps take less, and ranks that wait in a circle end."""


@dataclasses.dataclass(frozen=True)
class Task:
    """The trainings of a worker.

    Attributes:
        run: the run file's keys, its degrees those of this layout.
        like: degrees by which the model shrinks, those of the layout that is verified.
        layers: those of the whole model that the small one has.
        fp8: the run's recipe; False: without FP8.
        wide: in float64; False: in the dtypes that the run trains in.
        rows: samples of a micro-batch, of all ranks.
        seeds: of weights and samples, one training each.
        trains: from the first step.
        saves: a folder for a checkpoint of each seed after the first steps; None: nothing is saved.
        loads: the folder of such checkpoints, from which another training continues; None: none does.
        then: degrees of the layout that continues; None: the same.
        further: go on after the first steps, for a training that continues from the checkpoint.
        causality: ask what other tokens change, after the first steps.
    """

    run: dict[str, Any]
    like: dict[str, int]
    layers: list[int]
    fp8: bool
    rows: int
    seeds: list[int]
    wide: bool = True
    trains: bool = True
    saves: str | None = None
    loads: str | None = None
    then: dict[str, int] | None = None
    further: bool = False
    causality: bool = False


Results = dict[str, dict[str, Tensor]]
"""Whole tensors that `_Training.steps` and `held` compute, by name, of each phase:

    trained      the first steps
    further      the next ones
    loaded       the tensors of a model of other weights after it has loaded the checkpoint of `trained`
    continued    the next steps from there
    causality    the result of `causality.changed`, after the first steps

A rank's copy that differs from rank 0's in any bit, as of a norm that all hold, is in them as "… of rank N".
Beside them are the `parts` of ranks that train and `parts continued`: by parameter [rank, first indices, sizes] of each box of
elements.
"""


def results(task: Task) -> Results:
    """The results of a task; on every rank."""
    with _of_a_large_model():
        return _results(task)


def _results(task: Task) -> Results:
    config = RunConfig.from_dict(task.run, where="octavo verify")
    init(config.parallel.model_dump(), timeout=_PATIENCE_SECONDS)
    found: Results = {}

    def keep(phase: str, seed: int, values: dict[str, Tensor]) -> None:
        found.setdefault(phase, {}).update({f"{name}, seed {seed}": value for name, value in values.items()})

    for seed in task.seeds if task.trains else ():
        training = _Training(task, config, seed)
        keep("trained", seed, training.steps(1, small.STEPS))
        if task.saves is not None:
            save(_checkpoint(task.saves, seed), training.model, training.optimizer)
        if task.causality:
            keep("causality", seed, training.changed_by_others())
        if task.further:
            keep("further", seed, training.steps(small.STEPS + 1, small.LAST))
        found["parts"] = training.parts()
    if task.loads is not None:
        if task.then is not None:
            shutdown()
            config = RunConfig.from_dict(task.run | {"parallel": task.run["parallel"] | task.then}, where="octavo verify")
            init(config.parallel.model_dump(), timeout=_PATIENCE_SECONDS)
        for seed in task.seeds:
            training = _Training(task, config, seed, weights=seed + 1000)
            load(_checkpoint(task.loads, seed), training.model, training.optimizer)
            keep("loaded", seed, training.held())
            keep("continued", seed, training.steps(small.STEPS + 1, small.LAST))
            found["parts continued"] = training.parts()
    return found


def _checkpoint(folder: str, seed: int) -> Path:
    return Path(folder) / f"seed-{seed}"


class _Training:
    """The small run of a seed on this rank.

    weights: another seed, of the weights alone, and beside a frozen base of what is trained: a checkpoint has the base by name.
    """

    def __init__(self, task: Task, config: RunConfig, seed: int, *, weights: int | None = None) -> None:
        whole, like = load_config(config.model.source, config.model.config), Degrees(**task.like)
        spec = decoder_spec(whole)[0]
        assert spec is not None  # `certificate` has refused others
        hf_config = small.small_config(whole, spec, like, task.layers)
        config = small.small_run(config, like, task.rows * small.ACCUMULATION)
        recipe = recipe_from_config(config.fp8) if task.fp8 else None
        plan = _plan(config, hf_config, recipe, task.rows // state.dp_size)
        options = plan.build_options
        if task.wide:
            options = dataclasses.replace(options, dtype=torch.float64, params_dtype=torch.float64)
        if options.lora is not None and options.lora.base == "fp8":
            options = dataclasses.replace(options, base_recipe=recipe)
        sharding = sharding_of(state, recipe, dtype=options.dtype, params_dtype=options.params_dtype)
        if sharding is not None and task.wide:
            sharding = dataclasses.replace(sharding, param_dtype=None)  # gathered as they are computed with
        if sharding is not None and sharding.reshard_after_forward == "auto":  # of which GPUs decide: either way is trained
            sharding = dataclasses.replace(sharding, reshard_after_forward=seed % 2 == 0)
        drawn = seed if weights is None else weights
        source = _random_model(hf_config, seed if options.lora is not None else drawn)
        self.model = build_model(source, options, device="cpu", sharding=sharding).train()
        if options.lora is not None:
            _draw_adapters(self.model, drawn)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self._clip = config.optimizer.clip
        several = state.world_size > 1
        self._samples = small.Samples(
            hf_config.vocab_size, config.data.sequence_length, rank=state.dp_rank, ranks=state.dp_size,
            micro_batch=plan.micro_batch, documents=config.data.packing == "documents", padding=like.context == 1, seed=seed,
        )  # fmt: skip
        loader: Any = self._samples
        self._context = TrainContext(
            plan, self.model, self.optimizer, loader, None, state.dp_process_group if several else None,
            state.world_process_group if several else None, Watchdog(),
        )  # fmt: skip

    def steps(self, first: int, last: int) -> dict[str, Tensor]:
        """Results of these steps, in the order of time, so that the first difference is where a fault is.

        States, scales and logits of an evaluation before them; of the first step histories of its forwards, loss, gradients
        before clipping, from the last parameter to the first, norm and histories of its backwards; losses and norms of the
        others; states after the last step.
        """
        found, gradients, frozen = self._evaluated(first), dict[str, Tensor](), _frozen(self.model)

        def keep(*_: Any) -> None:
            if not gradients:  # in the first step
                gradients.update(_whole(self.model, "gradient", lambda p: p.grad))

        hook = self.optimizer.register_step_pre_hook(keep)
        for step in range(first, last + 1):
            done = train_step(self._context, step)
            loss, norm = torch.tensor([done.loss, done.grad_norm], dtype=torch.float64).unbind()
            histories = _histories(self.model, f" after step {step}") if step == first else {}
            backward = {name: value for name, value in histories.items() if f".{Operand.GRAD_OUTPUT.value} " in name}
            found |= {name: value for name, value in histories.items() if name not in backward}
            found[f"loss of step {step}"] = loss
            if step == first:
                factor = max(1.0, (done.grad_norm + 1e-6) / self._clip) if self._clip > 0 else 1.0  # as they were before
                found |= {name: gradients[name] * factor for name in reversed(gradients)}
            found |= {f"norm of step {step}": norm} | backward
        hook.remove()
        for name, local in _frozen(self.model).items():
            if not torch.equal(local, frozen[name]):
                raise OctavoError(f"{name} is frozen, and has changed in steps {first} to {last} on rank {state.rank}.")
        return _with_other_ranks(found | self._held() | _scales(self.model, " after the last step"))

    def held(self) -> dict[str, Tensor]:
        """Parameters, states of the optimizer and histories. Collective."""
        return _with_other_ranks(self._held())

    def _held(self) -> dict[str, Tensor]:
        found = _whole(self.model, "parameter", lambda p: p)
        for moment in ("step", *MOMENTS):
            found |= _whole(self.model, moment, partial(_moment, self.optimizer, moment))
        return found | _histories(self.model)

    def parts(self) -> dict[str, Tensor]:
        """The elements of each parameter that each rank holds. Collective."""
        blocks = parameters_of(self.model)
        here = {name: part_of(with_block(p, blocks[p])).boxes for name, p in self.model.named_parameters()}
        found: dict[str, list[tuple[int, ...]]] = {name: [] for name in here}
        for rank, boxes in enumerate(_objects_of_all_ranks(here)):
            for name, those in boxes.items():
                found[name] += [(rank, *box.whole, *box.sizes) for box in those]
        return {name: torch.tensor(boxes) for name, boxes in found.items()}

    def changed_by_others(self) -> dict[str, Tensor]:
        """The result of `causality.changed` of a micro-batch after the last step. Collective."""
        config = self._context.plan.config
        batch = self._samples.step(small.LAST * config.train.global_batch)[0]
        documents = config.data.packing == "documents"
        positions = batch.position_ids if documents else None
        return causality.changed(batch, lambda ids: self._evaluation(ids, positions).logits, documents=documents)

    def _evaluation(self, ids: Tensor, positions: Tensor | None, **options: Any) -> Any:
        """The model's output without gradients, in the recipe, whose records stay the same. Collective."""
        recipe = self._context.plan.recipe
        self.model.eval()
        with torch.no_grad(), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe, emulate=True):
            output = self.model(input_ids=ids, position_ids=positions, **options)
        self.model.train()
        return output

    def _evaluated(self, step: int) -> dict[str, Tensor]:
        """States after each block, scales, and logits of the first micro-batch of all samples of a step. Collective."""
        plan = self._context.plan
        batch = self._samples.step((step - 1) * plan.config.train.global_batch)[0]
        positions = batch.position_ids if plan.config.data.packing == "documents" else None
        for _, fp8 in states_of(self.model):
            fp8.observed.clear()  # of training
        output = self._evaluation(batch.input_ids, positions, output_hidden_states=True)
        casts, found = _scales(self.model, f" before step {step}"), dict[str, Tensor]()
        for layer, states in enumerate(output.hidden_states):
            found[f"states after {layer} blocks, before step {step}"] = _of_all_samples(states)
            found |= {name: scale for name, scale in casts.items() if f" layers.{layer}." in name}
        return found | casts | {f"logits before step {step}": _of_all_samples(output.logits)}


def _of_all_samples(here: Tensor) -> Tensor:
    """Rows of all data-parallel ranks. Collective."""
    if state.dp_size == 1:
        return here
    every = [torch.empty_like(here) for _ in range(state.dp_size)]
    dist.all_gather(every, here.contiguous(), group=state.dp_process_group)
    return torch.cat(every)


def _moment(optimizer: torch.optim.Optimizer, name: str, parameter: Any) -> Tensor | None:
    found = optimizer.state[parameter].get(name)
    return None if found is None else torch.as_tensor(found, dtype=torch.float64)


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


def _draw_adapters(model: nn.Module, seed: int) -> None:
    """Random values in all that is trained beside a frozen base: both matrices of each adapter, and modules that are whole."""
    blocks = parameters_of(model)
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            draw = torch.Generator().manual_seed(1_000_003 * seed + number)
            shape = shape_of(parameter, blocks)
            with torch.no_grad():
                fill(with_block(parameter, blocks[parameter]), 0.1 * torch.randn(shape, generator=draw, dtype=torch.float64))


def _frozen(model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each parameter that is not trained."""
    return {name: local_of(p).detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def _whole(model: nn.Module, kind: str, value: Callable[[Any], Tensor | None]) -> dict[str, Tensor]:
    """A tensor of each parameter, whole, with this rank's elements where others hold them too. Collective."""
    blocks, found = parameters_of(model), {}
    for name, parameter in model.named_parameters():
        part = value(parameter)
        if part is None:
            continue
        if part.dim() > 0:
            held = with_block(part.detach(), blocks[parameter])
            part = whole_tensor(held).detach().clone()
            for box in part_of(held).boxes:
                part[box.in_whole] = local_of(held)[box.in_local]
        found[f"{kind} {name}"] = part.detach().clone()
    return found


def _scales(model: nn.Module, when: str) -> dict[str, Tensor]:
    """The one scale of each operand in its last cast, of all experts. Collective."""
    found = {}
    for layer, fp8 in states_of(model):
        for operand, scale in fp8.observed.items():
            if scale.dim() > 1:  # of rows or blocks
                continue
            every = torch.zeros(fp8.experts or 1)
            every[fp8.local_experts or slice(None)] = scale
            if fp8.local_experts is not None and state.world_size > 1:
                dist.all_reduce(every, dist.ReduceOp.MAX)
            found[f"scale {layer}.{operand.value}{when}"] = every
    return found


def _histories(model: nn.Module, when: str = "") -> dict[str, Tensor]:
    """The record of each operand under delayed scaling: its scale and its history."""
    return {
        f"history {layer}.{operand.value}{when}": torch.cat((slot.scale.flatten(), slot.history.flatten())).clone()
        for layer, fp8 in states_of(model)
        for operand, slot in fp8.slots.items()
    }


def _with_other_ranks(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results, and after each those of the ranks that have other bits; scales alone may differ by rank. Collective."""
    if state.world_size == 1:
        return found
    here = {name: _digest(each) for name, each in found.items() if not name.startswith("scale ")}
    first, *others = _objects_of_all_ranks(here)
    differing = [{name for name in (*first, *there) if first.get(name) != there.get(name)} for there in others]
    if not any(differing):
        return found
    mine = {name: found.get(name, torch.zeros(())) for name in differing[state.rank - 1]} if state.rank else {}
    result: dict[str, Tensor] = {}
    every = _objects_of_all_ranks(mine)
    for name in dict.fromkeys((*found, *(name for there in every for name in there))):
        if name in found:
            result[name] = found[name]
        result |= {f"{name} of rank {rank}": there[name] for rank, there in enumerate(every) if name in there}
    return result


def _digest(tensor: Tensor) -> int:
    """A number of the bits, of which each NaN counts as one."""
    return zlib.crc32(tensor.detach().double().nan_to_num(NAN).contiguous().numpy().tobytes())


def _objects_of_all_ranks(here: Any) -> list[Any]:
    if state.world_size == 1:
        return [here]
    every: list[Any] = [None] * state.world_size
    dist.all_gather_object(every, here, group=state.control)
    return every


@contextlib.contextmanager
def _of_a_large_model() -> Iterator[None]:
    """Treat the small model's tensors as a large one's, of which some are offloaded or reduced alone.

    And have routers choose the largest probabilities: other assignments are by the tokens of a rank.
    """
    changed: list[tuple[Any, str, Any]] = [
        (offload, "SMALLEST_BYTES", 1), (direct_reduce, "LARGE_BYTES", 1 << 15), (averaging, "LARGE_BYTES", 1 << 15),
        (assignment, "sinkhorn", _largest), (assignment, "round_robin", _largest),
    ]  # fmt: skip
    before = [getattr(owner, name) for owner, name, _ in changed]
    for owner, name, value in changed:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(changed, before, strict=True):
            setattr(owner, name, value)


def _largest(logits: Tensor, top_k: int, counted: Tensor | None = None) -> Tensor:
    return torch.topk(logits.detach(), top_k, dim=-1).indices


def do(folder: Path, names: Sequence[str]) -> None:
    """Do tasks, one after the other, and write the results of each. Collective.

    Reads FOLDER/NAME.json of each, and rank 0 writes FOLDER/NAME.safetensors.
    """
    for number, name in enumerate(names):
        if number:
            shutdown()
        found = results(Task(**json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))))
        if state.rank == 0:
            tensors = {f"{phase}: {key}": value for phase, values in found.items() for key, value in values.items()}
            file = folder / f"{name}.safetensors"
            save_file({key: value.contiguous().clone() for key, value in tensors.items()}, file, {"order": "\n".join(tensors)})
        if state.world_size > 1:
            dist.barrier()  # one that leaves early would break the connections of the others
