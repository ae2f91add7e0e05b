"""Set-up of a training: model, optimizer and data of a plan, and the checkpoint from which it continues."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from octavo import versions
from octavo.build import build_model
from octavo.checkpoint.reader import check_stored_weights, read_state, restore
from octavo.config.data import DataConfig
from octavo.data.loader import BatchLoader
from octavo.data.packing import Batch
from octavo.data.prefetch import Prefetcher
from octavo.data.prepared import PreparedData, prepare_all
from octavo.errors import InputError, install_extra, warn
from octavo.kernels.attention import flash
from octavo.models.families import with_moe
from octavo.models.spec import ModelSpec
from octavo.models.tensor_parallel import part_of_rank
from octavo.parallel.coordination import writing_ranks
from octavo.parallel.sharding import sharding_of
from octavo.parallel.world import repeat_bits, seed_everything, state
from octavo.plan.precision import PrecisionSchedule
from octavo.plan.run import RunPlan
from octavo.run.resume import ASSIGNED, BALANCED, DRAWN, SCALED, SHARED, VALIDATED
from octavo.train.graph import StepGraph
from octavo.train.loss_scale import LossScale
from octavo.train.optimizer import build_optimizer
from octavo.train.step import TrainContext, loss_of
from octavo.watchdog.watchdog import Watchdog


def steps_done(latest: Path | None, plan: RunPlan, prepared: PreparedData) -> int:
    """Steps of the checkpoint, 0 without one, after a check that it belongs to this run.

    Raises:
        InputError: it belongs to another model or other data, or is beyond the last step.
    """
    if latest is None:
        return 0
    saved = read_state(latest)
    check_stored_weights(latest, plan.weights, writing_ranks())
    if saved["data"] != prepared.manifest.fingerprint:
        raise InputError(
            f"the data has changed since {latest}: its fingerprint was {saved['data'][:12]} and is now "
            f"{prepared.manifest.fingerprint[:12]}. Restore the old data, or set another train.output."
        )
    for name, fingerprint in saved.get("validation_sets", {}).items():
        if name in prepared.sets and prepared.sets[name].manifest.fingerprint != fingerprint:
            raise InputError(
                f"data.validation.{name} is another text than at {latest}: its losses would not be comparable with earlier "
                "ones. Restore the old text, or give the new one another name."
            )
    step, steps = int(saved["step"]), plan.steps
    if step > steps:
        least = plan.config.key_of_length(step)
        raise InputError(f"{plan.config.length(steps)}, but {latest} has trained {step} steps: set {least} or more.")
    return step


@functools.cache  # warn once for a run and its comparison without FP8
def _warn_of_untested_versions() -> None:
    for package in versions.TESTED:
        if sentence := versions.untested(package):
            warn(f"{sentence}: pip install '{versions.requirement(package)}'")


def build(plan: RunPlan, prepared: PreparedData, watch: Watchdog | None = None) -> tuple[TrainContext, list[Batch]]:
    """Model, optimizer and data; and the validation batches by set (`validation_batches`), empty without validation."""
    config = plan.config
    if state.rank == 0:
        _warn_of_untested_versions()
    if plan.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(plan.device)  # the run without FP8 has a separate peak
        if config.train.deterministic:
            repeat_bits()
            if state.rank == 0 and (absent := flash.missing()):
                slower = f"attention runs in plain PyTorch, several times slower: {absent}"
                warn(f"train.deterministic: {slower}. {install_extra('flash')}")
    # First: data without a sequence, or without a target, is refused before a model is built.
    validation: list[Batch] = []
    if prepared.manifest.splits["validation"].tokens >= 2:
        validation = list(_loader(plan, prepared, "validation").validation(config.train.validation_sequences))
    train_loader = _loader(plan, prepared, "train")
    model = build_model(
        plan.hf_config,
        replace(plan.build_options, base_recipe=plan.recipe),
        device=plan.device,
        load_from=plan.weights_folder,
        sharding=sharding_of(state, plan.recipe, dtype=plan.dtype, params_dtype=plan.params_dtype),
    )
    model.train()
    end = plan.steps * config.train.global_batch
    loader = Prefetcher(train_loader, workers=config.data.workers, device=plan.device, end=end)
    scheduled = plan.recipe is not None and config.fp8.schedule
    schedule = PrecisionSchedule(model, config.fp8.schedule, plan.steps) if scheduled else None
    context = TrainContext(
        plan,
        model,
        build_optimizer(model, config.optimizer),
        loader,
        loss_scale=LossScale(config.train.loss_scale) if plan.dtype == torch.float16 else None,
        group=state.dp_process_group if state.world_size > 1 else None,
        world_group=state.world_process_group if state.world_size > 1 else None,
        watch=watch or Watchdog(),
        precision=schedule,
    )
    if plan.graph:
        documents = config.data.packing == "documents"
        loss = functools.partial(loss_of, context, max_documents=train_loader.most_documents if documents else None)
        required = config.train.graph is True
        graph = StepGraph(model, loss, plan.device, plan.accumulation, documents=documents, required=required)
        context = replace(context, graph=graph)
    return context, validation


def validation_batches(plan: RunPlan, prepared: PreparedData) -> dict[str, list[Batch]]:
    """This rank's validation batches of each set of `data.validation`, by name.

    Raises:
        InputError: a set has no sequence with a target.
    """
    batches = {}
    for name, each in prepared.sets.items():
        try:
            loader = _loader(plan, each, "train", weights=())
        except InputError as error:
            raise InputError(f"data.validation.{name}: {error}") from None
        batches[name] = list(loader.validation(plan.config.train.validation_sequences))
    return batches


def _loader(
    plan: RunPlan, prepared: PreparedData, split: Literal["train", "validation"], *, weights: Sequence[float] | None = None
) -> BatchLoader:
    """weights: None for those of `data.weights`."""
    config = plan.config
    return BatchLoader(
        prepared,
        split,
        sequence_length=config.data.sequence_length,
        packing=prepared.packing(config.data),
        seed=config.data.seed,
        global_batch=config.train.global_batch,
        micro_batch=plan.micro_batch,
        dp_rank=state.dp_rank,
        dp_size=plan.degrees.data,
        weights=config.data.weights if weights is None else weights,
        overlong=config.data.overlong,
    )


def restore_or_begin(context: TrainContext, latest: Path | None, seed: int, fresh: Collection[str] = ()) -> None:
    """Continue from a checkpoint; a new run gets its random state. fresh: layers without the FP8 state of the checkpoint."""
    seed_everything(seed + state.token_rank)
    if latest is not None:
        # Random states last: nothing may draw random numbers after this.
        saved = restore(latest, context.model, context.optimizer, writing_ranks(), fresh=fresh)
        if context.loss_scale is not None:
            context.loss_scale.load(saved["loss_scale"])


def run_layout(plan: RunPlan) -> dict[str, Any]:
    """The layout of a run: device, threads and ranks, which determine the order of sums, and what else depends on them.

    Keys are those of `octavo.run.resume`: sequences of a validation, and those of experts; draws of masks; FP8 scales.
    """
    spec = plan.spec
    spec = with_moe(spec, plan.hf_config, plan.config.moe)
    balances = spec is not None and spec.mixtures and spec.balance
    assigns = spec is not None and spec.mixtures and spec.assignment != "largest"
    degrees = plan.degrees
    group = f"{plan.micro_batch} sequences on each of {degrees.data} data-parallel x {degrees.context} context-parallel ranks"
    scaled = "; ".join(_scaled_parts(plan, spec))
    return {
        **({ASSIGNED: group} if assigns else {}),
        **({BALANCED: plan.micro_batch * plan.degrees.data} if balances else {}),
        **(
            {DRAWN: f"{group}, over {degrees.tensor} tensor-parallel ranks, on {plan.device.type}"}
            if _draws(plan, spec)
            else {}
        ),
        **({SHARED: max(1, degrees.tensor // spec.kv_heads)} if spec is not None and plan.recipe is not None else {}),
        **({SCALED: scaled} if scaled else {}),
        VALIDATED: plan.config.train.validation_sequences,
        "device": plan.hardware.name,
        "threads": torch.get_num_threads(),
        "ranks": plan.degrees.world,
        "hybrid_shard_degree": plan.degrees.hybrid_shard,
        "tensor_parallel_degree": plan.degrees.tensor,
        "context_parallel_degree": plan.degrees.context,
        "expert_parallel_degree": plan.degrees.expert,
    }


def _draws(plan: RunPlan, spec: ModelSpec | None) -> bool:
    """True if training draws random numbers: masks of dropout, or noise of routers; for original code by the config's keys."""
    if spec is not None:
        return any((spec.attention_dropout, spec.hidden_dropout, spec.embedding_dropout, spec.jitter))
    values = plan.hf_config.to_dict()
    rates = {key: value for key, value in values.items() if "drop" in key and not key.startswith("classifier")}
    return any(isinstance(rate, float) and rate > 0 for rate in rates.values())


def _scaled_parts(plan: RunPlan, spec: ModelSpec | None) -> Iterator[str]:
    """For each recipe, the tensors that share a scale, if that depends on the layout."""
    if plan.recipe is None:
        return
    names = {plan.recipe.name, *plan.config.fp8.layers.values()}
    degrees, sequences = plan.degrees, f"{plan.micro_batch} sequences"
    spread = spec is not None and spec.mixtures
    experts = f", of experts those that {degrees.expert} expert-parallel ranks exchange" if spread else ""
    ranks = f"each of {degrees.context} context-parallel x {degrees.tensor} tensor-parallel ranks"
    if "delayed" in names:
        each = "each step" if plan.accumulation == 1 else f"{sequences} on each of {degrees.data} data-parallel ranks"
        yield f"delayed scaling: one of the amaxes before {each}"
    if "current" in names:
        yield f"current scaling: the tensors of {sequences}{experts}"
    if "rowwise" in names:
        yield f"rowwise scaling: rows and columns of {sequences} on {ranks}{experts}"
    if "block" in names:
        own = "as on one rank" if _has_whole_blocks(plan, spec) else f"of {sequences} on {ranks}"
        yield f"block scaling: blocks {own}{experts}"


def _has_whole_blocks(plan: RunPlan, spec: ModelSpec | None) -> bool:
    """True if the ranks' parts are multiples of blocks of 128 tokens, rows and columns."""
    degrees, length = plan.degrees, plan.config.data.sequence_length
    chunk = length // (2 * degrees.context) if degrees.context > 1 else length
    sizes = [length, chunk]
    if degrees.tensor > 1 and spec is not None:
        parts = part_of_rank(spec, degrees.tensor, spread=degrees.expert > 1)
        sizes += [plan.micro_batch * length // (degrees.context * degrees.tensor), parts.heads * parts.head_dim]
        sizes += [(parts.heads + 2 * parts.kv_heads) * parts.head_dim, parts.ffn_size, parts.dense_ffn_size]
    return all(size % 128 == 0 for size in sizes)


def prepare_on_ranks(config: DataConfig, console: Console, on_change: Literal["error", "rebuild"]) -> PreparedData:
    """Prepare the data for every rank: on rank 0, then on the first rank of each host without a shared `data.folder`."""
    prepared: PreparedData | None = None
    own_turn = 0 if state.rank == 0 else 1 if state.local_rank == 0 else 2
    for turn in range(3 if state.world_size > 1 else 1):
        with writing_ranks().sharing_errors():
            if turn == own_turn:
                prepared = prepare_all(config, console=console, on_change=on_change, compare=state.rank == 0)
    assert prepared is not None
    return prepared
