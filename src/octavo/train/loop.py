"""Training loop: one model from its newest checkpoint, or its first weights, to the last step.

All ranks run `train_one`; rank 0 writes the files of the run. The metrics of a step are written before its checkpoint, and cut
on resume if there is no checkpoint, so that metrics and weights always agree.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from octavo.build import build_model, describe
from octavo.checkpoint.api import Checkpointer
from octavo.checkpoint.manifest import step_folders
from octavo.checkpoint.reader import check_stored_weights, read_state, restore
from octavo.data.loader import BatchLoader, passes, unused_sources
from octavo.data.packing import Batch
from octavo.data.prefetch import Prefetcher
from octavo.data.prepared import PreparedData
from octavo.dtypes import short_name, torch_dtype
from octavo.errors import InputError, OctavoError, RunStopped, install_extra, warn
from octavo.kernels.attention import flash
from octavo.models.decoder import Decoder
from octavo.models.families import decoder_spec, with_moe
from octavo.parallel.coordination import all_ranks, writing_ranks
from octavo.parallel.sharding import sharding_of
from octavo.parallel.world import repeat_bits, seed_everything, state
from octavo.run.folder import RunFolder
from octavo.run.metrics import MetricsFile, read_metrics
from octavo.run.progress import StepProgress
from octavo.run.resume import BALANCED, check_same_model, warn_of_other_layout
from octavo.run.summary import Result, Summary, summarise
from octavo.run.trackers import Trackers
from octavo.train import fp8_auto
from octavo.train.callbacks import Events
from octavo.train.evaluate import perplexity, sample_of, validate
from octavo.train.loss_scale import LossScale
from octavo.train.nonfinite import NotFinite
from octavo.train.optimizer import build_optimizer
from octavo.train.own_code_check import check_own_code
from octavo.train.plan import RunPlan, model_options
from octavo.train.step import TrainContext, begin_histories, train_step
from octavo.watchdog.stopping import StopRequest
from octavo.watchdog.watchdog import Watchdog


@dataclass
class BestValidation:
    """The lowest validation loss so far, and the validations since."""

    step: int = 0
    loss: float = math.inf
    since: int = 0

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]]) -> BestValidation:
        """From the lines of metrics.jsonl."""
        best = cls()
        for record in records:
            if "validation_loss" in record:
                best.add(record["step"], record["validation_loss"])
        return best

    def add(self, step: int, loss: float) -> None:
        """Count a validation; NaN is never lower."""
        if loss < self.loss:
            self.step, self.loss, self.since = step, loss, 0
        else:
            self.since += 1


def train_one(
    plan: RunPlan,
    prepared: PreparedData,
    folder: RunFolder,
    *,
    console: Console,
    stop: StopRequest,
    watch: Watchdog,
    events: Events,
) -> Result:
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
    best = all_ranks().on_rank_0(lambda: BestValidation.of(r for r in read_metrics(folder.metrics) if r["step"] <= done))
    checkpoints.protected = best.step if config.checkpoint.best else 0
    early = _early_end(plan, best)
    if done == plan.steps or early:
        why = f" ({early})" if early else ""
        say(console, f"{label}: already trained, {done} of {plan.steps} steps{why}, in {folder.path}")
        return Result(folder.path, config, _summary(folder, done), None, ended_early=early)
    with contextlib.ExitStack() as opened:
        names = config.log.trackers if first_rank else []
        trackers = Trackers(names, folder.path, config.model_dump(mode="json"), done + 1)
        opened.callback(trackers.close)
        opened.enter_context(checkpoints)  # waits on exit for a checkpoint in the background
        if first_rank:
            folder.record(config, plan.hf_config, prepared.tokenizer_folder, plan.hardware.name)
            fp8_auto.record(plan, folder)
        if config.data.weights:
            samples = plan.steps * config.train.global_batch
            epochs = passes(prepared, config.data, samples)
            say(console, f"{label}: passes over the sources: {'; '.join(f'{each.source} {each}' for each in epochs)}")
            if first_rank and (unused := unused_sources(config.data, samples)):
                warn(unused)
        say(console, f"{label}: {'continues after' if done else 'starts in'} {latest or folder.path}. {plan.fp8_note}.")
        if plan.degrees.context > 1:
            say(console, f"{label}: {plan.shared_sequences}")
        if latest is not None and first_rank:
            warn_of_other_layout(latest, read_state(latest)["layout"], _layout(plan))
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
            say(console, f"{label}: {share} run in FP8 (octavo describe names them)")
        _restore(context, latest, config.train.seed)
        metrics = MetricsFile(folder.metrics, done) if first_rank else None
        if metrics is not None:
            opened.callback(metrics.close)
            if metrics.lost:
                lost = f"{folder.metrics} lacks the last {metrics.lost} of the {done} steps that are done"
                warn(f"{lost}: it was damaged. The run goes on without their records.")
        progress = StepProgress(console, label=label, steps=plan.steps, done=done, every=config.log.every)
        session = _Session(context, validation, prepared, metrics, checkpoints, trackers, progress, events, best)
        events.started(context.model, context.optimizer)
        with progress:
            done, early = _train_steps(session, done, stop)
        sample = sample_of(context, prepared.tokenizer_folder) if events.samples else None
        if early:
            say(console, f"{label}: ended at step {done} of {plan.steps}: {early}")
    return Result(folder.path, config, _summary(folder, done), None, ended_early=early, sample=sample)


def _early_end(plan: RunPlan, best: BestValidation) -> str:
    """The reason to end now by `train.early_stopping`; else empty."""
    patience = plan.config.train.early_stopping
    if not patience or best.since < patience:
        return ""
    return f"train.early_stopping = {patience}: the lowest validation loss was {best.loss:.4f} at step {best.step}"


def _restore(context: TrainContext, latest: Path | None, seed: int) -> None:
    """Continue from a checkpoint; a new run gets its first amax histories and its random state."""
    if latest is None:
        begin_histories(context)
    seed_everything(seed + state.token_rank)
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
    prepared: PreparedData
    metrics: MetricsFile | None
    checkpoints: Checkpointer
    trackers: Trackers
    progress: StepProgress
    events: Events = field(default_factory=Events)
    best: BestValidation = field(default_factory=BestValidation)


def _train_steps(session: _Session, done: int, stop: StopRequest) -> tuple[int, str]:
    """Steps `done + 1` to the last: train, validate, record, save; returns the last step, and the reason if it is early."""
    plan = session.context.plan
    config, steps = plan.config, plan.steps
    every, validate_every = config.checkpoint.every, config.train.validate_every
    checkpoint_seconds = 0.0
    stop.training()
    for step in range(done + 1, steps + 1):
        record, stopping, ending = _train_step(session, step, checkpoint_seconds, stop)
        validates = step == steps or (validate_every and step % validate_every == 0)
        is_best = _validate(session, record) if validates else False
        if session.metrics is not None:
            session.metrics.append(record)
        session.trackers.log(record)
        session.progress.step(record)
        session.checkpoints.poll()
        if session.events.samples and config.train.sample_every and step % config.train.sample_every == 0 and step < steps:
            _show_sample(session, step)
        with _saved_first(session, record):
            session.events.stepped(record)
            if "validation_loss" in record:
                session.events.validated(record)
        checkpoint_seconds = 0.0
        if state.world_size == 1:  # no other rank has to agree: stop after this step
            stopping, ending = stop.received is not None, stop.ending
        early = "by Trainer.stop" if ending else _early_end(plan, session.best)
        last = step == steps or stopping or bool(early)
        if last or is_best or (every and step % every == 0):
            checkpoint_seconds = _save(session, step, wait=last)
        if stopping and step < steps:
            by = stop.received or "a signal to another rank"
            raise RunStopped(f"stopped by {by} after step {step} of {steps}, saved. Run the same command again to continue.")
        if early and step < steps:
            return step, early
    return steps, ""


def _validate(session: _Session, record: dict[str, Any]) -> bool:
    """Add validation loss and the user's evaluation to a step's record; True if `checkpoint.best` saves this step."""
    config, step = session.context.plan.config, record["step"]
    if session.validation:
        found = validate(session.context, session.validation)
        loss, cross_entropy = all_ranks().on_rank_0(lambda: found)  # all ranks end together
        record |= {"validation_loss": loss, "perplexity": perplexity(cross_entropy)}
        session.best.add(step, loss)
    with _saved_first(session, record, recorded=False):
        record |= session.events.evaluate(session.context.model, step)
    session.context.optimizer.zero_grad()  # of an evaluation that went backward
    is_best = config.checkpoint.best and session.best.step == step
    if config.checkpoint.best:
        session.checkpoints.protected = session.best.step
    return is_best


@contextlib.contextmanager
def _saved_first(session: _Session, record: Mapping[str, Any], *, recorded: bool = True) -> Iterator[None]:
    """Around a user's code: if it raises, the step is recorded and saved before the error goes on.

    On one rank: several save together, and the others know nothing of the error.
    """
    try:
        yield
    except BaseException:
        if state.world_size == 1:
            if session.metrics is not None and not recorded:
                session.metrics.append(record)
            _write_checkpoint(session, record["step"], wait=True)
        raise


def _show_sample(session: _Session, step: int) -> None:
    text = sample_of(session.context, session.prepared.tokenizer_folder)
    if text is not None:
        session.progress.say(f"sample at step {step}: {text}")


def _save(session: _Session, step: int, *, wait: bool) -> float:
    """Save a checkpoint; returns the seconds that the training waited for it."""
    started = time.perf_counter()
    session.events.saved(_write_checkpoint(session, step, wait=wait))
    return time.perf_counter() - started


def _write_checkpoint(session: _Session, step: int, *, wait: bool) -> Path:
    context = session.context
    context.watch.phase("checkpoint")
    if session.metrics is not None:
        session.metrics.sync()
    scalars = {
        "data": session.prepared.manifest.fingerprint,
        "layout": _layout(context.plan),
        "schedule_ends": [*context.plan.config.train.extended, context.plan.steps],
        "loss_scale": None if context.loss_scale is None else context.loss_scale.state(),
    }
    background = context.plan.config.checkpoint.async_
    path = session.checkpoints.save(step, context.model, context.optimizer, scalars, background=background)
    if wait:
        session.checkpoints.wait()
    return path


def build(plan: RunPlan, prepared: PreparedData, watch: Watchdog | None = None) -> tuple[TrainContext, list[Batch]]:
    """Model, optimizer and data; and the validation batches, empty without a validation split."""
    config = plan.config
    if plan.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(plan.device)  # the run without FP8 has its own peak
        if config.train.deterministic:
            repeat_bits()
            if state.rank == 0 and (absent := flash.missing()):
                slower = f"attention takes plain PyTorch, several times slower: {absent}"
                warn(f"train.deterministic: {slower}. {install_extra('flash')}")
    model = build_model(
        plan.hf_config,
        dtype=plan.dtype,
        device=plan.device,
        excluded=plan.excluded,
        load_from=plan.weights_folder,
        offload=config.train.offload or config.parallel.sm_activation_offloading,
        horizon=config.parallel.activation_loading_horizon,
        blocks=plan.blocks,
        sharding=sharding_of(state, plan.recipe, dtype=plan.dtype, params_dtype=plan.params_dtype),
        buffer_dtype=torch_dtype(config.parallel.buffer_dtype),
        **model_options(config),
    )
    model.train()
    validation: list[Batch] = []
    if prepared.manifest.splits["validation"].tokens >= 2:
        validation = list(_loader(plan, prepared, "validation").validation(config.train.validate_batches))
    end = plan.steps * config.train.global_batch
    loader = Prefetcher(_loader(plan, prepared, "train"), workers=config.data.workers, device=plan.device, end=end)
    context = TrainContext(
        plan,
        model,
        build_optimizer(model, config.optimizer),
        loader,
        loss_scale=LossScale(config.train.loss_scale) if plan.dtype == torch.float16 else None,
        group=state.dp_process_group if state.world_size > 1 else None,
        token_group=state.token_process_group if state.world_size > 1 else None,
        watch=watch or Watchdog(),
    )
    return context, validation


def _summary(folder: RunFolder, done: int) -> Summary:
    """Figures of a finished training, read by rank 0, which wrote the file: another host may still see an older one."""
    return all_ranks().on_rank_0(lambda: summarise(folder.metrics, done))


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
    step, steps = int(saved["step"]), plan.steps
    if step > steps:
        least = plan.config.key_of_length(step)
        raise InputError(f"{plan.config.length(steps)}, but {latest} has trained {step} steps: set {least} or more.")
    return step


def _train_step(
    session: _Session, step: int, checkpoint_seconds: float, stop: StopRequest
) -> tuple[dict[str, Any], bool, bool]:
    """Train a step; its metrics, and whether some rank received a signal or was told to end."""
    plan = session.context.plan
    try:
        result = train_step(session.context, step, stop)
    except NotFinite as error:
        raise OctavoError(f"{error} {_left_behind(session.checkpoints)}") from None
    rate = result.tokens / result.step_seconds
    tflops, mfu = plan.rates(rate)
    record = {
        "step": step,
        "epoch": session.context.loader.loader.epoch(step),
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
        **result.routing,
    }
    if result.loss_scale is not None:
        record |= {"loss_scale": result.loss_scale, "skipped": result.skipped}
    return record, result.stopping, result.ending


def _left_behind(checkpoints: Checkpointer) -> str:
    """Text for a run that ends without a save: its checkpoint on disk, and where it may start again. Collective."""
    checkpoints.wait()
    newest = next(iter(step_folders(checkpoints.folder)), None)
    if newest is None:
        return "Nothing was saved yet, so the same train.output may start again."
    return f"The checkpoint of step {newest[0]} is kept. Its run keeps its settings: for others set another train.output."


def _layout(plan: RunPlan) -> dict[str, Any]:
    """Device, threads and ranks, which set the order of sums; and the sequences over which experts are balanced."""
    spec = decoder_spec(plan.hf_config)[0] if plan.blocks == "auto" else None
    spec = with_moe(spec, plan.hf_config, plan.config.moe)
    balances = spec is not None and spec.mixtures and spec.balance
    return {
        **({BALANCED: plan.micro_batch * plan.degrees.data} if balances else {}),
        "device": plan.hardware.name,
        "threads": torch.get_num_threads(),
        "ranks": plan.degrees.world,
        "hybrid_shard_degree": plan.degrees.hybrid_shard,
        "expert_parallel_degree": plan.degrees.expert,
    }


def _peak_memory_gib(device: torch.device) -> float:
    """Peak memory: of the allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 2**30


def say(console: Console, message: str) -> None:
    """Print a line as it is."""
    console.print(message, markup=False, highlight=False, soft_wrap=True)
