"""Runs steps of the small run on a rank, and collects whole tensors; `octavo.verify.pool` forks the ranks."""

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
"""Timeout of collectives: a small model's steps take less, and deadlocked ranks end."""


@dataclasses.dataclass(frozen=True)
class Task:
    """The trainings that a worker runs.

    Attributes:
        run: keys of the run file, with this layout's degrees.
        like: degrees of the verified layout, by which the model is shrunk.
        layers: indices of the full model's layers that the small model has.
        fp8: use the run's recipe; False: no FP8.
        wide: compute in float64; False: in the run's dtypes.
        rows: samples of a micro-batch, over all ranks.
        seeds: seeds of weights and samples, with one training each.
        trains: train from the first step.
        saves: folder for a checkpoint of each seed after the first steps; None: save nothing.
        loads: folder of such checkpoints, from which another training continues; None: none.
        then: degrees of the continuing layout; None: the same.
        further: continue after the first steps, as reference for a training that continues from the checkpoint.
        causality: check after the first steps which logits other tokens change.
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
"""Phase → whole tensors of `_Training.steps` and `held`, by name:

    trained      the first steps
    further      the next ones
    loaded       the tensors of a model with other weights after loading the checkpoint of `trained`
    continued    the next steps from there
    causality    the result of `causality.changed`, after the first steps

A rank's copy that differs from rank 0's in any bit, as of a replicated norm, is included as "… of rank N". Further entries are
the `parts` of ranks that train, and `parts continued`: by parameter [rank, first indices, sizes] of each box of elements.

"""


def results(task: Task) -> Results:
    """Run a task; returns its results on every rank."""
    with _of_a_large_model():
        return _results(task)


def _results(task: Task) -> Results:
    config = RunConfig.from_dict(task.run, where="octavo verify")
    init(config.parallel.model_dump(), timeout=_PATIENCE_SECONDS)
    phases: Results = {}

    def keep(phase: str, seed: int, values: dict[str, Tensor]) -> None:
        phases.setdefault(phase, {}).update({f"{name}, seed {seed}": value for name, value in values.items()})

    for seed in task.seeds if task.trains else ():
        training = _Training(task, config, seed)
        keep("trained", seed, training.steps(1, small.STEPS))
        if task.saves is not None:
            save(_checkpoint(task.saves, seed), training.model, training.optimizer)
        if task.causality:
            keep("causality", seed, training.changed_by_others())
        if task.further:
            keep("further", seed, training.steps(small.STEPS + 1, small.LAST))
        phases["parts"] = training.parts()
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
            phases["parts continued"] = training.parts()
    return phases


def _checkpoint(folder: str, seed: int) -> Path:
    return Path(folder) / f"seed-{seed}"


class _Training:
    """The small run of a seed on this rank.

    weights: a different seed for the weights; beside a frozen base only for the trained ones, since a checkpoint names its
    base.
    """

    def __init__(self, task: Task, config: RunConfig, seed: int, *, weights: int | None = None) -> None:
        whole, like = load_config(config.model.source, config.model.config), Degrees(**task.like)
        spec = decoder_spec(whole)[0]
        assert spec is not None  # `certificate` refuses other models
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
            sharding = dataclasses.replace(sharding, reshard_after_forward=seed % 2 == 1)
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
        """Results of these steps in chronological order, so that the first difference is near the fault.

        Before the steps, from an evaluation: hidden states, scales and logits. In the first step: forward histories, loss,
        unclipped gradients from the last parameter to the first, norm, and backward histories. In later steps: losses and
        norms. After the last step: parameters and optimizer states.
        """
        tensors, gradients, frozen = self._evaluated(first), dict[str, Tensor](), _frozen(self.model)

        def keep(*_: Any) -> None:
            if not gradients:  # only in the first step
                gradients.update(_whole(self.model, "gradient", lambda p: p.grad))

        hook = self.optimizer.register_step_pre_hook(keep)
        for step in range(first, last + 1):
            done = train_step(self._context, step)
            loss, norm = torch.tensor([done.loss, done.grad_norm], dtype=torch.float64).unbind()
            histories = _histories(self.model, f" after step {step}") if step == first else {}
            backward = {name: value for name, value in histories.items() if f".{Operand.GRAD_OUTPUT.value} " in name}
            tensors |= {name: value for name, value in histories.items() if name not in backward}
            tensors[f"loss of step {step}"] = loss
            if step == first:
                factor = max(1.0, (done.grad_norm + 1e-6) / self._clip) if self._clip > 0 else 1.0  # before clipping
                tensors |= {name: gradients[name] * factor for name in reversed(gradients)}
            tensors |= {f"norm of step {step}": norm} | backward
        hook.remove()
        for name, local in _frozen(self.model).items():
            if not torch.equal(local, frozen[name]):
                raise OctavoError(f"{name} is frozen, but changed in steps {first} to {last} on rank {state.rank}.")
        return _with_other_ranks(tensors | self._held() | _scales(self.model, " after the last step"))

    def held(self) -> dict[str, Tensor]:
        """Parameters, optimizer states and histories. Collective."""
        return _with_other_ranks(self._held())

    def _held(self) -> dict[str, Tensor]:
        tensors = _whole(self.model, "parameter", lambda p: p)
        for moment in ("step", *MOMENTS):
            tensors |= _whole(self.model, moment, partial(_moment, self.optimizer, moment))
        return tensors | _histories(self.model)

    def parts(self) -> dict[str, Tensor]:
        """The elements of each parameter that each rank holds. Collective."""
        blocks = parameters_of(self.model)
        here = {name: part_of(with_block(p, blocks[p])).boxes for name, p in self.model.named_parameters()}
        boxes_of: dict[str, list[tuple[int, ...]]] = {name: [] for name in here}
        for rank, boxes in enumerate(_objects_of_all_ranks(here)):
            for name, those in boxes.items():
                boxes_of[name] += [(rank, *box.whole, *box.sizes) for box in those]
        return {name: torch.tensor(boxes) for name, boxes in boxes_of.items()}

    def changed_by_others(self) -> dict[str, Tensor]:
        """The result of `causality.changed` for a micro-batch after the last step. Collective."""
        config = self._context.plan.config
        batch = self._samples.step(small.LAST * config.train.global_batch)[0]
        documents = config.data.packing == "documents"
        positions = batch.position_ids if documents else None
        return causality.changed(batch, lambda ids: self._evaluation(ids, positions).logits, documents=documents)

    def _evaluation(self, ids: Tensor, positions: Tensor | None, **options: Any) -> Any:
        """The model's output without gradients, in the recipe, without changes of FP8 state. Collective."""
        recipe = self._context.plan.recipe
        self.model.eval()
        with torch.no_grad(), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe, emulate=True):
            output = self.model(input_ids=ids, position_ids=positions, **options)
        self.model.train()
        return output

    def _evaluated(self, step: int) -> dict[str, Tensor]:
        """Hidden states after each block, scales, and logits, of a step's first micro-batch over all samples. Collective."""
        plan = self._context.plan
        batch = self._samples.step((step - 1) * plan.config.train.global_batch)[0]
        positions = batch.position_ids if plan.config.data.packing == "documents" else None
        for _, fp8 in states_of(self.model):
            fp8.observed.clear()  # drop training's records
        output = self._evaluation(batch.input_ids, positions, output_hidden_states=True)
        casts, tensors = _scales(self.model, f" before step {step}"), dict[str, Tensor]()
        for layer, states in enumerate(output.hidden_states):
            tensors[f"states after {layer} blocks, before step {step}"] = _of_all_samples(states)
            tensors |= {name: scale for name, scale in casts.items() if f" layers.{layer}." in name}
        return tensors | casts | {f"logits before step {step}": _of_all_samples(output.logits)}


def _of_all_samples(here: Tensor) -> Tensor:
    """Gather the rows of all data-parallel ranks. Collective."""
    if state.dp_size == 1:
        return here
    every = [torch.empty_like(here) for _ in range(state.dp_size)]
    dist.all_gather(every, here.contiguous(), group=state.dp_process_group)
    return torch.cat(every)


def _moment(optimizer: torch.optim.Optimizer, name: str, parameter: Any) -> Tensor | None:
    moment = optimizer.state[parameter].get(name)
    return None if moment is None else torch.as_tensor(moment, dtype=torch.float64)


def _plan(config: RunConfig, hf_config: Any, recipe: Any, micro_batch: int) -> RunPlan:
    cpu = torch.device("cpu")
    return RunPlan(
        config=config, hf_config=hf_config, device=cpu, hardware=describe_device(cpu), degrees=state.degrees, recipe=recipe,
        fp8_note="", micro_batch=micro_batch, accumulation=small.ACCUMULATION, layers={}, flops=None, weights={},
        weights_folder=None, blocks="auto", parameters=0, fp8_head=config.fp8.head or False,
    )  # fmt: skip


def _random_model(hf_config: Any, seed: int) -> nn.Module:
    """Hugging Face's model with random values in every parameter, norms and biases included."""
    torch.manual_seed(seed)
    model: nn.Module = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float64, trust_remote_code=False)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(parameter + 0.1 * noise if parameter.dim() == 1 else 0.1 * noise)
    return model


def _draw_adapters(model: nn.Module, seed: int) -> None:
    """Set random values in all trained parameters beside a frozen base: adapters' matrices and whole modules."""
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
    """A whole tensor per parameter, with this rank's copy of replicated elements. Collective."""
    blocks, parts = parameters_of(model), {}
    for name, parameter in model.named_parameters():
        part = value(parameter)
        if part is None:
            continue
        if part.dim() > 0:
            held = with_block(part.detach(), blocks[parameter])
            part = whole_tensor(held).detach().clone()
            for box in part_of(held).boxes:
                part[box.in_whole] = local_of(held)[box.in_local]
        parts[f"{kind} {name}"] = part.detach().clone()
    return parts


def _scales(model: nn.Module, when: str) -> dict[str, Tensor]:
    """The scale of each operand's last cast, if it has a single one, over all experts. Collective."""
    scales = {}
    for layer, fp8 in states_of(model):
        for operand, scale in fp8.observed.items():
            if scale.dim() > 1:  # scales of rows or blocks
                continue
            every = torch.zeros(fp8.experts or 1)
            every[fp8.local_experts or slice(None)] = scale
            if fp8.local_experts is not None and state.world_size > 1:
                dist.all_reduce(every, dist.ReduceOp.MAX)
            scales[f"scale {layer}.{operand.value}{when}"] = every
    return scales


def _histories(model: nn.Module, when: str = "") -> dict[str, Tensor]:
    """Scale and history of each operand under delayed scaling."""
    return {
        f"history {layer}.{operand.value}{when}": torch.cat((slot.scale.flatten(), slot.history.flatten())).clone()
        for layer, fp8 in states_of(model)
        for operand, slot in fp8.slots.items()
    }


def _with_other_ranks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results, each followed by those of ranks with different bits; only scales may differ by rank. Collective."""
    if state.world_size == 1:
        return tensors
    here = {name: _digest(each) for name, each in tensors.items() if not name.startswith("scale ")}
    first, *others = _objects_of_all_ranks(here)
    differing = [{name for name in (*first, *there) if first.get(name) != there.get(name)} for there in others]
    if not any(differing):
        return tensors
    mine = {name: tensors.get(name, torch.zeros(())) for name in differing[state.rank - 1]} if state.rank else {}
    result: dict[str, Tensor] = {}
    every = _objects_of_all_ranks(mine)
    for name in dict.fromkeys((*tensors, *(name for there in every for name in there))):
        if name in tensors:
            result[name] = tensors[name]
        result |= {f"{name} of rank {rank}": there[name] for rank, there in enumerate(every) if name in there}
    return result


def _digest(tensor: Tensor) -> int:
    """A hash of the bits, with all NaN counted as equal."""
    return zlib.crc32(tensor.detach().double().nan_to_num(NAN).contiguous().numpy().tobytes())


def _objects_of_all_ranks(here: Any) -> list[Any]:
    if state.world_size == 1:
        return [here]
    every: list[Any] = [None] * state.world_size
    dist.all_gather_object(every, here, group=state.control)
    return every


@contextlib.contextmanager
def _of_a_large_model() -> Iterator[None]:
    """Treat the small model's tensors like a large model's, so that some are offloaded or reduced separately.

    Also make routers choose the largest probabilities: other assignments depend on a rank's tokens.
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
    """Run tasks one after the other, and write their results. Collective.

    Reads FOLDER/NAME.json of each, and rank 0 writes FOLDER/NAME.safetensors.
    """
    for number, name in enumerate(names):
        if number:
            shutdown()
        phases = results(Task(**json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))))
        if state.rank == 0:
            tensors = {f"{phase}: {key}": value for phase, values in phases.items() for key, value in values.items()}
            file = folder / f"{name}.safetensors"
            save_file({key: value.contiguous().clone() for key, value in tensors.items()}, file, {"order": "\n".join(tensors)})
        if state.world_size > 1:
            dist.barrier()  # a rank that exits early would break the others' connections
