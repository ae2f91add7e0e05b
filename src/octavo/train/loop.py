"""Training loop: a run from its configuration to its last checkpoint.

All ranks run `train`; rank 0 writes the files of the run. The metrics of a step are written before its checkpoint, and cut on
resume if there is no checkpoint, so that metrics and weights always agree.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from octavo.build import build_model, describe, sharding_of
from octavo.checkpoint.api import Checkpointer
from octavo.checkpoint.reader import check_stored_weights, has_own_code, read_state, restore
from octavo.config.run import RunConfig
from octavo.data.loader import BatchLoader
from octavo.data.packing import Batch
from octavo.data.prefetch import Prefetcher
from octavo.data.prepared import PreparedData, check_vocabulary, prepare
from octavo.data.special_tokens import SpecialTokens, check_overrides
from octavo.dtypes import short_name, torch_dtype
from octavo.errors import InputError, RunStopped, warn
from octavo.models.decoder import Decoder
from octavo.parallel.coordination import all_ranks, writing_ranks
from octavo.parallel.world import init, seed_everything, state
from octavo.run.folder import RunFolder, locked
from octavo.run.metrics import MetricsFile
from octavo.run.progress import StepProgress
from octavo.run.resume import check_resumable, check_same_model, with_keys_of
from octavo.run.summary import Result, Summary, summarise
from octavo.run.trackers import Trackers
from octavo.train import fp8_auto
from octavo.train.evaluate import perplexity, validation_loss
from octavo.train.loss_scale import LossScale
from octavo.train.optimizer import build_optimizer
from octavo.train.own_code_check import check_own_code
from octavo.train.plan import RunPlan, check, model_options
from octavo.train.step import TrainContext, begin_histories, train_step
from octavo.watchdog.stopping import StopRequest
from octavo.watchdog.watchdog import Watchdog


def train(config: RunConfig, *, console: Console, stop: StopRequest | None = None) -> Result:
    """Train a run, or continue it from its newest whole checkpoint. stop: signal handlers already installed.

    Raises:
        InputError: a fault in the configuration or the data, or a run under other settings in the folder; nothing was changed.
        RunStopped: after a signal; the run is saved and the same call continues it.
        OctavoError: no whole checkpoint, no space, or a loss that is not finite.
    """
    plan = check(config)
    with contextlib.nullcontext(stop) if stop is not None else StopRequest() as stop:
        # Longer than the watchdog's timeout: it finds the failed rank before a collective times out.
        timeout = config.launch.timeout + config.launch.grace + 60
        init(config.parallel.model_dump() | {"random_seed": config.train.seed}, timeout=timeout)
        with (
            Watchdog(timeout=config.launch.timeout, grace=config.launch.grace) as watch,
            _locked(config.output) as folder,
        ):
            before = folder.config() if folder.has_checkpoints else None  # a run without checkpoints may change
            if before is not None:
                config, taken = with_keys_of(before, config, plan.config)
                plan = check(config) if taken else plan
                check_resumable(before, plan.config, folder.path)
                if taken:
                    _say(console, f"The run continues with its own values of keys that are not set: {', '.join(taken)}.")
                if has_own_code(folder.checkpoints, plan.weights, writing_ranks()):
                    plan = check(config, blocks="own")
                    _say(console, "The run keeps its own code, not Octavo's blocks: its checkpoints are of it.")
            plan = fp8_auto.choose_layers(plan, folder, resumed=before is not None)
            bf16_plan = without_fp8(plan) if config.train.compare_bf16 and plan.recipe is not None else None
            if bf16_plan is not None:
                _check_bf16_folder(RunFolder(bf16_plan.config.output), bf16_plan.config)  # before the steps in FP8
            prepared = _prepare_on_ranks(config, console, on_change="error" if before is not None else "rebuild")
            check_vocabulary(prepared, plan.hf_config.vocab_size)
            plan = _with_token_ids(plan, prepared, console, resumed=before is not None)
            if bf16_plan is not None:
                bf16_plan = dataclasses.replace(bf16_plan, hf_config=plan.hf_config)
            summary = _train_one(plan, prepared, folder, console=console, stop=stop, watch=watch)
            bf16_summary = None
            if bf16_plan is not None:
                with _locked(bf16_plan.config.output) as bf16_folder:
                    _check_bf16_folder(bf16_folder, bf16_plan.config)
                    bf16_summary = _train_one(bf16_plan, prepared, bf16_folder, console=console, stop=stop, watch=watch)
    return Result(folder.path, config, summary, bf16_summary)


def _with_token_ids(plan: RunPlan, prepared: PreparedData, console: Console, *, resumed: bool) -> RunPlan:
    """The plan with the bos, eos and pad ids of the run's tokenizer in its Hugging Face config."""
    if prepared.tokenizer_folder is None:
        return plan
    config = copy.deepcopy(plan.hf_config)
    tokens = SpecialTokens.of(prepared.tokenizer_folder)
    if plan.weights_folder is not None and (plan.config.data.tokenizer == "train" or not tokens.owns(config)):
        source = plan.config.model.source
        _say(
            console, f"The weights of {source} know other tokens than this tokenizer's. data.tokenizer = {source!r} has theirs."
        )
    ids = tokens.fit(config)
    if not resumed:
        check_overrides(plan.config.model.config, ids)
    pad = ids["pad_token_id"]
    if pad is not None and pad == prepared.manifest.end_token_id:
        _say(console, f"The end token is also the pad (pad_token_id = {pad}): its row of the embedding is not trained.")
    return dataclasses.replace(plan, hf_config=config)


def _train_one(
    plan: RunPlan, prepared: PreparedData, folder: RunFolder, *, console: Console, stop: StopRequest, watch: Watchdog
) -> Summary:
    """Train one model in a locked folder, to the last step or to a signal."""
    config = plan.config
    first_rank = state.rank == 0
    watch.start()
    checkpoints = Checkpointer(folder.checkpoints, config.checkpoint.keep, warn)
    checkpoints.clean()
    latest = checkpoints.latest()
    done = _steps_done(latest, plan, prepared)
    if latest is not None:
        all_ranks().on_rank_0(lambda: check_same_model(folder.model / "config.json", plan.hf_config))
    label = "fp8" if plan.recipe is not None else short_name(config.model.dtype)
    if done == config.train.steps:
        _say(console, f"{label}: already trained, {done} of {done} steps, in {folder.path}")
        return _summary(folder, config)
    with contextlib.ExitStack() as opened:
        names = config.log.trackers if first_rank else []
        trackers = Trackers(names, folder.path, config.model_dump(mode="json"), done + 1)
        opened.callback(trackers.close)
        opened.enter_context(checkpoints)  # waits on exit for a checkpoint in the background
        if first_rank:
            folder.record(config, plan.hf_config, prepared.tokenizer_folder, plan.hardware.name)
            fp8_auto.record(plan, folder)
        _say(console, f"{label}: {'continues after' if done else 'starts in'} {latest or folder.path}. {plan.fp8_note}.")
        if latest is not None and first_rank:
            _warn_of_other_layout(latest, plan)
        context, validation = build(plan, prepared, watch)
        opened.callback(context.loader.close)
        if not isinstance(context.model, Decoder):
            check_own_code(
                context.model,
                vocab_size=plan.hf_config.vocab_size,
                sequence_length=config.data.sequence_length,
                documents=config.data.packing == "documents",
                device=plan.device,
            )
        if plan.recipe is not None:
            found = describe(context.model)
            share = f"{found.fp8_layers} of {len(found.layers)} matrices"
            _say(console, f"{label}: {share} run in FP8 (octavo.describe names them)")
        _restore(context, latest, config.train.seed)
        metrics = MetricsFile(folder.metrics, done) if first_rank else None
        if metrics is not None:
            opened.callback(metrics.close)
            if metrics.lost:
                warn(f"{folder.metrics} lacks the last {metrics.lost} of the {done} steps that are done: it was damaged.")
        progress = StepProgress(console, label=label, steps=config.train.steps, done=done, every=config.log.every)
        session = _Session(context, validation, prepared.manifest.fingerprint, metrics, checkpoints, trackers, progress)
        with progress:
            _train_steps(session, done, stop)
    return _summary(folder, config)


def _restore(context: TrainContext, latest: Path | None, seed: int) -> None:
    """Continue from a checkpoint; a new run gets its first amax histories and its random state."""
    if latest is None:
        begin_histories(context)
    seed_everything(seed + state.dp_rank)
    if latest is not None:
        # Random states last: nothing may draw after it.
        saved = restore(latest, context.model, context.optimizer, writing_ranks())
        if context.loss_scale is not None:
            context.loss_scale.load(saved["loss_scale"])


@dataclass(frozen=True)
class _Session:
    """A training with its open files; `metrics` is None on ranks other than 0."""

    context: TrainContext
    validation: list[Batch]
    fingerprint: str
    metrics: MetricsFile | None
    checkpoints: Checkpointer
    trackers: Trackers
    progress: StepProgress


def _train_steps(session: _Session, done: int, stop: StopRequest) -> None:
    """Steps `done + 1` to the last: train, validate, record, save."""
    config = session.context.plan.config
    steps = config.train.steps
    every, validate_every = config.checkpoint.every, config.train.validate_every
    checkpoint_seconds = 0.0
    stop.training()
    for step in range(done + 1, steps + 1):
        record, stopping = _train_step(session, step, checkpoint_seconds, stop)
        if session.validation and (step == steps or (validate_every and step % validate_every == 0)):
            loss = validation_loss(session.context, session.validation)
            record |= {"validation_loss": loss, "perplexity": perplexity(loss)}
        if session.metrics is not None:
            session.metrics.append(record)
        session.trackers.log(record)
        session.progress.step(record)
        session.checkpoints.poll()
        checkpoint_seconds = 0.0
        if state.world_size == 1:  # no other rank has to agree: stop after this step
            stopping = stop.received is not None
        if step == steps or stopping or (every and step % every == 0):
            checkpoint_seconds = _save(session, step, wait=step == steps or stopping)
        if stopping and step < steps:
            by = stop.received or "a signal to another rank"
            raise RunStopped(f"stopped by {by} after step {step} of {steps}, saved. Run the same command again to continue.")


def _save(session: _Session, step: int, *, wait: bool) -> float:
    """Save a checkpoint; returns the seconds that the training waited for it."""
    started = time.perf_counter()
    context = session.context
    context.watch.phase("checkpoint")
    if session.metrics is not None:
        session.metrics.sync()
    scalars = {
        "data": session.fingerprint,
        "layout": _layout(context.plan),
        "loss_scale": None if context.loss_scale is None else context.loss_scale.state(),
    }
    background = context.plan.config.checkpoint.async_
    session.checkpoints.save(step, context.model, context.optimizer, scalars, background=background)
    if wait:
        session.checkpoints.wait()
    return time.perf_counter() - started


def build(plan: RunPlan, prepared: PreparedData, watch: Watchdog | None = None) -> tuple[TrainContext, list[Batch]]:
    """Model, optimizer and data; and the validation batches, empty without a validation split."""
    config = plan.config
    if plan.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(plan.device)  # the run without FP8 has its own peak
        if config.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed workspace
            torch.use_deterministic_algorithms(True)
    model = build_model(
        plan.hf_config,
        dtype=plan.dtype,
        device=plan.device,
        excluded=plan.excluded,
        load_from=plan.weights_folder,
        offload=config.train.offload or config.parallel.sm_activation_offloading,
        blocks=plan.blocks,
        sharding=sharding_of(state, plan.recipe, dtype=plan.dtype, params_dtype=plan.params_dtype),
        buffer_dtype=torch_dtype(config.parallel.buffer_dtype),
        **model_options(config),
    )
    model.train()
    validation: list[Batch] = []
    if prepared.manifest.splits["validation"].tokens >= 2:
        validation = list(_loader(plan, prepared, "validation").validation(config.train.validate_batches))
    end = config.train.steps * config.train.global_batch
    loader = Prefetcher(_loader(plan, prepared, "train"), workers=config.data.workers, device=plan.device, end=end)
    context = TrainContext(
        plan,
        model,
        build_optimizer(model, config.optimizer),
        loader,
        loss_scale=LossScale(config.train.loss_scale) if plan.dtype == torch.float16 else None,
        group=state.dp_process_group if state.world_size > 1 else None,
        watch=watch or Watchdog(),
    )
    return context, validation


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[RunFolder]:
    """The run folder at `path`, locked by rank 0 for all ranks."""
    with contextlib.ExitStack() as stack:
        all_ranks().on_rank_0(lambda: stack.enter_context(locked(path)).path)
        yield RunFolder(path)


def _prepare_on_ranks(config: RunConfig, console: Console, on_change: Literal["error", "rebuild"]) -> PreparedData:
    """The data on every rank: rank 0 prepares it, then the first rank of each host if hosts do not share `data.folder`."""
    prepared: PreparedData | None = None
    own_turn = 0 if state.rank == 0 else 1 if state.local_rank == 0 else 2
    for turn in range(3 if state.world_size > 1 else 1):
        with writing_ranks().sharing_errors():
            if turn == own_turn:
                prepared = prepare(config.data, console=console, on_change=on_change)
    assert prepared is not None
    return prepared


def _summary(folder: RunFolder, config: RunConfig) -> Summary:
    """Figures of a finished training, read by rank 0, which wrote the file: another host may still see an older one."""
    return all_ranks().on_rank_0(lambda: summarise(folder.metrics, config.train.steps))


def without_fp8(plan: RunPlan) -> RunPlan:
    """The plan of the same run without FP8, in the folder `bf16` inside the run's."""
    config = plan.config
    fp8 = config.fp8.model_copy(update={"enabled": False})
    train = config.train.model_copy(update={"output": str(config.output / "bf16"), "compare_bf16": False})
    config = config.model_copy(update={"fp8": fp8, "train": train})
    note = "The same steps without FP8, to compare the loss"
    return dataclasses.replace(plan, config=config, recipe=None, excluded={}, fp8_note=note)


def _loader(plan: RunPlan, prepared: PreparedData, split: Literal["train", "validation"]) -> BatchLoader:
    config = plan.config
    return BatchLoader(
        prepared,
        split,
        sequence_length=config.data.sequence_length,
        packing=config.data.packing,
        seed=config.data.seed,
        global_batch=config.train.global_batch,
        micro_batch=plan.micro_batch,
        dp_rank=state.dp_rank,
        dp_size=plan.degrees.data,
        weights=config.data.weights,
    )


def _steps_done(latest: Path | None, plan: RunPlan, prepared: PreparedData) -> int:
    """Steps of the checkpoint, after a check that it belongs to this run."""
    if latest is None:
        return 0
    saved = read_state(latest)
    check_stored_weights(latest, plan.weights, writing_ranks())
    if saved["data"] != prepared.manifest.fingerprint:
        raise InputError(
            f"the data has changed since {latest}: its fingerprint was {saved['data'][:12]} and is now "
            f"{prepared.manifest.fingerprint[:12]}. Put the old data back, or set another train.output."
        )
    step, steps = int(saved["step"]), plan.config.train.steps
    if step > steps:
        raise InputError(f"train.steps = {steps}, but {latest} has trained {step} steps: set train.steps to {step} or more.")
    return step


def _train_step(session: _Session, step: int, checkpoint_seconds: float, stop: StopRequest) -> tuple[dict[str, Any], bool]:
    """Train a step; its metrics, and True if some rank received a signal."""
    plan = session.context.plan
    result = train_step(session.context, step, stop)
    rate = result.tokens / result.step_seconds
    tflops, mfu = plan.rates(rate)
    record = {
        "step": step,
        "loss": result.loss,
        "lr": result.lr,
        "grad_norm": result.grad_norm,
        "tokens": result.tokens,
        "tokens_per_second": rate,
        "step_seconds": result.step_seconds,
        "data_seconds": result.data_seconds,
        "checkpoint_seconds": checkpoint_seconds,
        "memory_gib": _peak_memory_gib(plan.device),
        "tflops": tflops,
        "mfu": mfu,
    }
    if result.loss_scale is not None:
        record |= {"loss_scale": result.loss_scale, "skipped": result.skipped}
    return record, result.stopping


def _layout(plan: RunPlan) -> dict[str, Any]:
    """Device, threads and ranks: the order of sums depends on them, and so do the last bits of losses."""
    return {
        "device": plan.hardware.name,
        "threads": torch.get_num_threads(),
        "ranks": plan.degrees.world,
        "hybrid_shard_degree": plan.degrees.hybrid_shard,
    }


def _warn_of_other_layout(latest: Path, plan: RunPlan) -> None:
    saved = read_state(latest)["layout"]
    changed = [f"{key} was {saved[key]} and is now {now}" for key, now in _layout(plan).items() if saved.get(key, now) != now]
    if changed:
        warn(
            f"{latest} continues, but {'; '.join(changed)}: sums have another order, so the losses may differ from those of an "
            "uninterrupted run in the last bits."
        )


def _check_bf16_folder(folder: RunFolder, config: RunConfig) -> None:
    """Refuse a `bf16` folder with a run under other settings: its loss is to be compared with this run's."""
    before = folder.config() if folder.has_checkpoints else None
    if before is not None:
        remedy = f"Put them back, move {str(folder.path)!r} away to train it again, or set another train.output."
        check_resumable(before, config, folder.path, remedy=remedy)


def _peak_memory_gib(device: torch.device) -> float:
    """Peak memory: of the allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 2**30


def _say(console: Console, message: str) -> None:
    console.print(message, markup=False, highlight=False, soft_wrap=True)
