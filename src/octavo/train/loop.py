"""A training run from its configuration to its last checkpoint.

`train` is the order of a run: everything that can be wrong is checked before anything is built, the ranks are joined, the
folder is locked, the newest whole checkpoint is continued, and the same steps are trained without FP8 where that was asked for.
Every rank runs this; the first one writes what is written once. What one step
does is in `octavo.train.step`. A step's line of metrics is written before the checkpoint that says the step is done, and
cut again if the checkpoint never came, so that the file and the weights always tell the same story.
"""

from __future__ import annotations

import contextlib
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

from octavo.build import DTYPES, build_model, describe, sharding_of
from octavo.checkpoint.api import Checkpointer, check_weights, read_state, restore
from octavo.config.run import RunConfig
from octavo.data.loader import Batch, BatchLoader
from octavo.data.prefetch import Prefetcher
from octavo.data.prepared import PreparedData, check_vocabulary, prepare
from octavo.errors import InputError, RunStopped
from octavo.parallel.coordination import all_ranks, writing_ranks
from octavo.parallel.world import init, seed_everything, state
from octavo.run.folder import RunFolder, locked, report
from octavo.run.metrics import MetricsFile
from octavo.run.progress import StepProgress
from octavo.run.resume import check_resumable
from octavo.run.summary import Result, Summary, dtype_name, summarise
from octavo.run.trackers import Trackers, numbers, open_trackers
from octavo.train import fp8_auto
from octavo.train.evaluate import perplexity, validation_loss
from octavo.train.loss_scale import LossScale
from octavo.train.optimizer import build_optimizer
from octavo.train.plan import RunPlan, check, model_options
from octavo.train.step import TrainContext, begin_histories, train_step
from octavo.watchdog.stopping import StopRequest
from octavo.watchdog.watchdog import Watch


def train(config: RunConfig, *, console: Console, stop: StopRequest | None = None) -> Result:
    """Train a run, or continue it from its newest whole checkpoint.

    Args:
        config: the whole run.
        console: where progress goes; what is wrong with a checkpoint goes to stderr.
        stop: signal handlers that the caller has already installed.

    Raises:
        InputError: the configuration, the data or the folder's earlier run do not fit; nothing was changed.
        RunStopped: a signal came; the run is saved and the same call continues it.
        OctavoError: no whole checkpoint, no space, a loss that is not finite.
    """
    plan = check(config)
    with contextlib.nullcontext(stop) if stop is not None else StopRequest() as stop:
        join(config)
        with Watch.of_job(timeout=config.launch.timeout, grace=config.launch.grace) as watch, held(config.output) as folder:
            before = folder.config() if folder.has_checkpoints else None  # what never saved binds nobody
            if before is not None:
                check_resumable(before, config, folder.path)
            plan = fp8_auto.choose_layers(plan, folder, resumed=before is not None)
            other = without_fp8(plan) if config.train.compare_bf16 and plan.recipe is not None else None
            if other is not None:
                _check_beside(RunFolder(other.config.output), other.config)  # before an FP8 run that it would be compared with
            prepared = prepare_together(config, console, on_change="error" if before is not None else "rebuild")
            check_vocabulary(prepared, plan.hf_config.vocab_size)
            summary = train_one(plan, prepared, folder, console=console, stop=stop, watch=watch)
            beside = None
            if other is not None:
                with held(other.config.output) as beside_folder:
                    _check_beside(beside_folder, other.config)
                    beside = train_one(other, prepared, beside_folder, console=console, stop=stop, watch=watch)
    return Result(folder.path, config, summary, beside)


def train_one(
    plan: RunPlan, prepared: PreparedData, folder: RunFolder, *, console: Console, stop: StopRequest, watch: Watch
) -> Summary:
    """Train one model in a locked folder, to the end or to a signal."""
    config, leads = plan.config, state.rank == 0
    watch.start()
    checkpoints = Checkpointer(folder.checkpoints, config.checkpoint.keep, report)
    checkpoints.clean()
    latest = checkpoints.latest()
    done = _steps_done(latest, plan, prepared)
    label = "fp8" if plan.recipe is not None else dtype_name(config)
    if done == config.train.steps:
        _say(console, f"{label}: already trained, {done} of {done} steps, in {folder.path}")
        return _summary(folder, config)
    with contextlib.ExitStack() as opened:
        trackers = open_trackers(config.log.trackers if leads else [], folder.path, config.model_dump(mode="json"), done + 1)
        opened.callback(trackers.close)
        opened.enter_context(checkpoints)  # does not leave while one is being written
        if leads:
            folder.record(config, plan.hf_config, prepared.tokenizer_folder, plan.hardware.name)
            fp8_auto.record(plan, folder)
        _say(console, f"{label}: {'continues after' if done else 'starts in'} {latest or folder.path}. {plan.fp8_note}.")
        if latest is not None and leads:
            _warn_of_other_bits(latest, plan)
        run, validation = build(plan, prepared, watch)
        opened.callback(run.loader.close)
        if plan.recipe is not None:
            found = describe(run.model)
            share = f"{found.fp8_layers} of {len(found.layers)} matrices"
            _say(console, f"{label}: {share} run in FP8 (octavo.describe names them)")
        if latest is None:
            begin_histories(run)
        seed_everything(config.train.seed + state.dp_rank)
        if latest is not None:
            saved = restore(latest, run.model, run.optimizer)  # random states last: nothing may draw after it
            if run.loss_scale is not None:
                run.loss_scale.load(saved["loss_scale"])
        metrics = MetricsFile(folder.metrics, done) if leads else None
        if metrics is not None:
            opened.callback(metrics.close)
        progress = StepProgress(console, label=label, steps=config.train.steps, done=done, every=config.log.every)
        with progress:
            _train_steps(
                Session(plan, prepared.fingerprint, run, validation, metrics, checkpoints, trackers, progress), done, stop
            )
    return _summary(folder, config)


@dataclass(frozen=True)
class Session:
    """The open parts of a training that runs."""

    plan: RunPlan
    fingerprint: str
    run: TrainContext
    validation: list[Batch]
    metrics: MetricsFile | None
    """On the first rank."""
    checkpoints: Checkpointer
    trackers: Trackers
    progress: StepProgress


def _train_steps(session: Session, done: int, stop: StopRequest) -> None:
    """Steps `done + 1` to the last: train, validate, record, save."""
    config, steps = session.plan.config, session.plan.config.train.steps
    every, validate_every = config.checkpoint.every, config.train.validate_every
    checkpoint_seconds = 0.0
    stop.training()
    for step in range(done + 1, steps + 1):
        record, stopping = _measured(session, step, checkpoint_seconds, stop)
        if session.validation and (step == steps or (validate_every and step % validate_every == 0)):
            loss = validation_loss(session.run, session.validation)
            record |= {"validation_loss": loss, "perplexity": perplexity(loss)}
        if session.metrics is not None:
            session.metrics.append(record)
        session.trackers.log(step, numbers(record))
        session.progress.step(record)
        session.checkpoints.poll()
        checkpoint_seconds = 0.0
        if state.world_size == 1:  # nobody has to agree, so the step that has just ended is the last
            stopping = stop.received is not None
        if step == steps or stopping or (every and step % every == 0):
            started = time.perf_counter()
            session.run.watch.phase("checkpoint")
            if session.metrics is not None:
                session.metrics.sync()
            in_background = config.checkpoint.async_
            session.checkpoints.save(step, session.run.model, session.run.optimizer, _state(session), background=in_background)
            if step == steps or stopping:
                session.checkpoints.wait()
            checkpoint_seconds = time.perf_counter() - started
        if stopping and step < steps:
            by = stop.received or "a signal to another rank"
            raise RunStopped(f"stopped by {by} after step {step} of {steps}, saved. Run the same command again to continue.")


def build(plan: RunPlan, prepared: PreparedData, watch: Watch | None = None) -> tuple[TrainContext, list[Batch]]:
    """The model on its device, its optimizer and its data; and the batches of a validation, empty without a split."""
    config = plan.config
    if plan.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(plan.device)  # the bf16 run beside an FP8 run has a peak of its own
        if config.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats only with a fixed workspace
            torch.use_deterministic_algorithms(True)
    model = build_model(
        plan.hf_config,
        dtype=plan.dtype,
        params_dtype=plan.params_dtype,
        device=plan.device,
        seed=config.train.seed,
        excluded=plan.excluded,
        load_from=plan.weights_folder,
        recompute=config.train.recompute,
        offload=config.train.offload or config.parallel.sm_activation_offloading,
        compile=plan.compile,
        sharding=sharding_of(state, plan.recipe, dtype=plan.dtype, params_dtype=plan.params_dtype),
        buffer_dtype=DTYPES[config.parallel.buffer_dtype],
        **model_options(config),
    )
    model.train()
    validation: list[Batch] = []
    if prepared.token_counts["validation"] >= 2:
        validation = list(_loader(plan, prepared, "validation").validation(config.train.validate_batches))
    run = TrainContext(
        model=model,
        optimizer=build_optimizer(model, config.optimizer),
        loader=Prefetcher(
            _loader(plan, prepared, "train"),
            workers=config.data.workers,
            device=plan.device,
            end=config.train.steps * config.train.global_batch,
        ),
        recipe=plan.recipe,
        device=plan.device,
        documents=config.data.packing == "documents",
        global_batch=config.train.global_batch,
        steps=config.train.steps,
        config=config.optimizer,
        loss_scale=LossScale(config.train.loss_scale) if plan.dtype == torch.float16 else None,
        group=state.dp_process_group if state.world_size > 1 else None,
        watch=watch or Watch(),
    )
    return run, validation


def join(config: RunConfig) -> None:
    """Join the ranks that torchrun's environment names; none for one rank."""
    # A collective gives up after the watch has found out why it would.
    patience = config.launch.timeout + config.launch.grace + 60
    init(config.parallel.model_dump() | {"random_seed": config.train.seed}, timeout=patience)


@contextlib.contextmanager
def held(path: Path) -> Iterator[RunFolder]:
    """The run folder at `path`, locked by the first rank for all."""
    with contextlib.ExitStack() as stack:
        all_ranks().on_rank_0(lambda: stack.enter_context(locked(path)).path)
        yield RunFolder(path)


def prepare_together(config: RunConfig, console: Console, on_change: Literal["error", "rebuild"]) -> PreparedData:
    """The data on every rank: the first prepares it; where hosts do not share `data.folder`, one rank of each does."""
    prepared: PreparedData | None = None
    turn = 0 if state.rank == 0 else 1 if state.local_rank == 0 else 2
    for now in range(3 if state.world_size > 1 else 1):
        with writing_ranks().sharing_errors():
            if now == turn:
                prepared = prepare(config.data, console=console, on_change=on_change)
    assert prepared is not None
    return prepared


def _summary(folder: RunFolder, config: RunConfig) -> Summary:
    """The figures of a finished training, as the rank reads them that wrote them: another host may yet see an older file."""
    return all_ranks().on_rank_0(lambda: summarise(folder.metrics, config.train.steps))


def without_fp8(plan: RunPlan) -> RunPlan:
    """The same run in the model's own dtype, in the folder `bf16` inside the run's."""
    config = plan.config
    output = str(config.output / "bf16")
    config = config.model_copy(
        update={
            "fp8": config.fp8.model_copy(update={"enabled": False}),
            "train": config.train.model_copy(update={"output": output, "compare_bf16": False}),
        }
    )
    return dataclasses.replace(
        plan, config=config, recipe=None, excluded={}, fp8_note="The same steps without FP8, to compare the loss"
    )


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
    )


def _steps_done(latest: Path | None, plan: RunPlan, prepared: PreparedData) -> int:
    """Steps that the checkpoint has, after it was found to belong to this run."""
    if latest is None:
        return 0
    saved = read_state(latest)
    check_weights(latest, plan.weights)
    if saved["data"] != prepared.fingerprint:
        raise InputError(
            f"the data has changed since {latest}: its fingerprint was {saved['data'][:12]} and is now "
            f"{prepared.fingerprint[:12]}. Put the old data back, or set another train.output."
        )
    step, steps = int(saved["step"]), plan.config.train.steps
    if step > steps:
        raise InputError(f"train.steps = {steps}, but {latest} has trained {step} steps: set train.steps to {step} or more.")
    return step


def _measured(session: Session, step: int, checkpoint_seconds: float, stop: StopRequest) -> tuple[dict[str, Any], bool]:
    """Train a step; its line of metrics, and whether some rank was asked to stop."""
    result = train_step(session.run, step, stop)
    rate = result.tokens / result.step_seconds
    tflops, mfu = session.plan.rates(rate)
    scaled = {} if result.loss_scale is None else {"loss_scale": result.loss_scale, "skipped": result.skipped}
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
        "memory_gib": peak_memory_gib(session.plan.device),
        "tflops": tflops,
        "mfu": mfu,
        **scaled,
    }
    return record, result.stopping


def _state(session: Session) -> dict[str, Any]:
    """The scalars of a checkpoint, beside the random states."""
    scale = session.run.loss_scale
    return {
        "data": session.fingerprint,
        "layout": _layout(session.plan),
        "loss_scale": None if scale is None else scale.state(),
    }


def _layout(plan: RunPlan) -> dict[str, Any]:
    """What the last bits depend on besides the configuration: the order of sums."""
    degrees = plan.degrees
    return {
        "device": plan.hardware.name,
        "threads": torch.get_num_threads(),
        "ranks": degrees.world,
        "hybrid_shard_degree": degrees.hybrid_shard,
    }


def _warn_of_other_bits(latest: Path, plan: RunPlan) -> None:
    saved = read_state(latest)["layout"]
    differ = [f"{key} was {saved[key]} and is now {now}" for key, now in _layout(plan).items() if saved.get(key, now) != now]
    if differ:
        report(
            f"{latest} continues, but {'; '.join(differ)}: sums are taken in another order, so the losses are not promised "
            "to be those of an uninterrupted run to the last bit."
        )


def _check_beside(folder: RunFolder, config: RunConfig) -> None:
    """Refuse a `bf16` folder of an earlier run under other settings: its loss would be compared with this one's."""
    before = folder.config() if folder.has_checkpoints else None
    if before is not None:
        remedy = f"Put them back, move {str(folder.path)!r} away to train it anew, or set another train.output."
        check_resumable(before, config, folder.path, remedy=remedy)


def peak_memory_gib(device: torch.device) -> float:
    """Peak of the allocator on a GPU; of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 2**30


def _say(console: Console, message: str) -> None:
    console.print(message, markup=False, highlight=False, soft_wrap=True)
