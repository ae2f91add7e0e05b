"""Training loop: one model from its newest checkpoint, or its first weights, to the last step.

All ranks run `train_one`; rank 0 writes the run's files. The metrics of a step are written before its checkpoint, and removed
on resume if there is no checkpoint, so that metrics and weights always agree.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from octavo.build import describe
from octavo.checkpoint.api import Checkpointer
from octavo.checkpoint.manifest import step_folders
from octavo.checkpoint.reader import read_rank_file, read_state
from octavo.config.run import EVALUATION, RunConfig
from octavo.data.loader import passes, unused_sources
from octavo.data.packing import Batch
from octavo.data.prepared import PreparedData
from octavo.dtypes import short_name
from octavo.errors import InputError, OctavoError, RunStopped, warn
from octavo.models.decoder import Decoder
from octavo.parallel.coordination import all_ranks
from octavo.parallel.world import state
from octavo.plan import fp8_auto, fp8_changes
from octavo.plan.run import RunPlan
from octavo.run.folder import RunFolder
from octavo.run.metrics import MetricsFile, read_metrics
from octavo.run.progress import StepProgress
from octavo.run.resume import check_same_model, warn_of_other_layout
from octavo.run.summary import Result, Summary, summarise
from octavo.run.trackers import Trackers
from octavo.train.callbacks import EVALUATE, Events
from octavo.train.evaluate import BestValidation, Validation, perplexity, sample_of, validate
from octavo.train.evaluation import figures_of, load_function
from octavo.train.nonfinite import NotFinite
from octavo.train.own_code_check import check_own_code
from octavo.train.setup import build, restore_or_begin, run_layout, steps_done, validation_batches
from octavo.train.step import TrainContext, train_step
from octavo.watchdog.stopping import StopRequest
from octavo.watchdog.watchdog import Watchdog

CALLBACKS = "callbacks"
"""Name of the file of a checkpoint with the state of a rank's callbacks."""


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
    done = steps_done(latest, plan, prepared)
    if latest is not None:
        all_ranks().on_rank_0(lambda: check_same_model(folder.model / "config.json", plan.hf_config))
    changes = None
    if latest is not None and (before := folder.config()) is not None and done < plan.steps:
        with all_ranks().sharing_errors():  # rank 0 writes the run's file below
            changes = fp8_changes.find(plan, before, read_state(latest))
    label = "fp8" if plan.recipe is not None else short_name(config.model.dtype)
    figure, lowest = config.best_figure
    best = all_ranks().on_rank_0(
        lambda: BestValidation.of((r for r in read_metrics(folder.metrics) if r["step"] <= done), figure, lowest=lowest)
    )
    checkpoints.protected = best.step if config.checkpoint.best else 0
    if checkpoints.protected and first_rank and not (folder.checkpoints / f"step-{best.step}").is_dir():
        warn(
            f"checkpoint.best: the best {best.key} was {best.loss:.4g} at step {best.step}, whose checkpoint was not saved. "
            "The next better one will be saved."
        )
    early = _early_end(plan, best)
    if latest is not None:
        events.restore(read_rank_file(latest, CALLBACKS, state.rank))
    if done == plan.steps or early:
        why = f" ({early})" if early else ""
        say(console, f"{label}: already trained, {done} of {plan.steps} steps{why}, in {folder.path}")
        return Result(folder.path, config, _summary(folder, done), None, ended_early=early, best=_better(best, config, done))
    with contextlib.ExitStack() as opened:
        names = config.log.trackers if first_rank else []
        trackers = Trackers(names, folder.path, config.model_dump(mode="json"), done + 1)
        opened.callback(trackers.close)
        opened.enter_context(checkpoints)  # waits on exit for a checkpoint in the background
        if first_rank:
            folder.record(
                config, plan.hf_config, prepared.tokenizer_folder, plan.hardware.name, state.world_size, prepared.turn_ends
            )
            fp8_auto.record(plan, folder)
        _announce(console, label, plan, prepared, f"{'continues after' if done else 'starts in'} {latest or folder.path}")
        if latest is not None and first_rank:
            warn_of_other_layout(latest, read_state(latest)["layout"], run_layout(plan))
            if changes is not None:
                warn(f"{latest} continues with other FP8: {changes}.")
        context, validation = build(plan, prepared, watch)
        sets = validation_batches(plan, prepared)
        opened.callback(context.loader.close)
        if not isinstance(context.model, Decoder):
            check_own_code(
                context.model,
                vocab_size=plan.hf_config.vocab_size,
                sequence_length=config.data.sequence_length,
                documents=config.data.packing == "documents",
                device=plan.device,
            )
        description = describe(context.model)
        if description.gathered:
            say(console, f"{label}: {description.gathered}")
        if plan.recipe is not None:
            share = f"{description.fp8_layers} of {len(description.layers)} matrices"
            say(console, f"{label}: {share} run in FP8 (octavo describe names them)")
        restore_or_begin(context, latest, config.train.seed, () if changes is None else changes.fresh)
        metrics = opened.enter_context(_open_metrics(folder, done)) if first_rank else None
        progress = StepProgress(console, label=label, steps=plan.steps, done=done, every=config.log.every)
        history = [] if latest is None else list(read_state(latest).get("fp8_changes", []))
        if changes is not None:
            history.append({"after": done, "keys": {key: list(pair) for key, pair in changes.keys.items()}})
        for past in history[: -1 if changes is not None else None]:
            say(console, f"{label}: {', '.join(past['keys'])} changed after step {past['after']}.")
        session = _Session(
            context,
            validation,
            prepared,
            metrics,
            checkpoints,
            trackers,
            progress,
            events,
            best,
            fp8_changes=history,
            sets=sets,
        )
        events.started(context.model, context.optimizer)
        events.state()  # refuse a state that a checkpoint cannot store before the first step
        with progress:
            done, early = _train_steps(session, done, stop)
        sample = sample_of(context, prepared.tokenizer_folder) if events.samples else None
        if early:
            say(console, f"{label}: ended at step {done} of {plan.steps}: {early}")
    better = _better(session.best, config, done)
    return Result(folder.path, config, _summary(folder, done), None, ended_early=early, sample=sample, best=better)


def _better(best: BestValidation, config: RunConfig, done: int) -> tuple[int, str] | None:
    """Step and figure, in words, of the checkpoint that `checkpoint.best` retains, if it is not the last one."""
    if not config.checkpoint.best or best.step in (0, done):
        return None
    return best.step, f"the {best.named} was {best.loss:.4f}"


def _announce(console: Console, label: str, plan: RunPlan, prepared: PreparedData, where: str) -> None:
    """Print where a training starts, its precision, and the passes over its sources."""
    data, samples = plan.config.data, plan.steps * plan.config.train.global_batch
    if data.weights:
        epochs = passes(prepared, data, samples)
        say(console, f"{label}: passes over the sources: {'; '.join(f'{each.source} {each}' for each in epochs)}")
        if state.rank == 0 and (unused := unused_sources(data, samples)):
            warn(unused)
    say(console, f"{label}: {where}. {plan.fp8_note}.")
    if (graphs := plan.graph_note) is not None:
        say(console, f"{label}: {graphs}.")
    for shared in filter(None, (plan.shared_sequences, plan.shared_matrices)):
        say(console, f"{label}: {shared}")


@contextlib.contextmanager
def _open_metrics(folder: RunFolder, done: int) -> Iterator[MetricsFile]:
    """The metrics of a training after step `done`; warns of lost records."""
    with contextlib.closing(MetricsFile(folder.metrics, done)) as metrics:
        if metrics.lost:
            lost = f"{folder.metrics} lacks the last {metrics.lost} of the {done} finished steps"
            warn(f"{lost}: it was damaged. The run continues without their records.")
        yield metrics


def _early_end(plan: RunPlan, best: BestValidation) -> str:
    """The reason for an early end by `train.early_stopping`; else empty."""
    patience = plan.config.train.early_stopping
    if not patience or best.since < patience:
        return ""
    return f"train.early_stopping = {patience}: the {best.named} was {best.loss:.4f} at step {best.step}"


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
    fp8_changes: list[dict[str, Any]] = field(default_factory=list)
    sets: Mapping[str, list[Batch]] = field(default_factory=dict)


def _train_steps(session: _Session, done: int, stop: StopRequest) -> tuple[int, str]:
    """Steps `done + 1` to the last: train, validate, record, save; returns the last step, and the reason for an early end."""
    plan = session.context.plan
    config, steps = plan.config, plan.steps
    every, validate_every = config.checkpoint.every, config.train.validate_every
    eval_every = config.train.eval_every
    checkpoint_seconds = 0.0
    stop.training()
    for step in range(done + 1, steps + 1):
        record, stopping, ending = _train_step(session, step, checkpoint_seconds, stop)
        validates = step == steps or (validate_every and step % validate_every == 0)
        evaluates = bool(step == steps or (step % eval_every == 0 if eval_every else validates))
        is_best = _validate(session, record, texts=bool(validates), evaluations=evaluates) if validates or evaluates else False
        if session.metrics is not None:
            session.metrics.append(record)
        session.trackers.log(record)
        session.progress.step(record)
        session.checkpoints.poll()
        if session.events.samples and config.train.sample_every and step % config.train.sample_every == 0 and step < steps:
            _show_sample(session, step)
        with _saved_first(session, record):
            session.events.stepped(record)
            if any(key.startswith(("validation_loss", "evaluation/")) for key in record):
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


def _validate(session: _Session, record: dict[str, Any], *, texts: bool, evaluations: bool) -> bool:
    """Add validation losses and evaluations to a step's record; True if `checkpoint.best` needs a checkpoint of it."""
    config, step = session.context.plan.config, record["step"]
    if texts and session.validation:
        loss, cross_entropy = _of_rank_0(validate(session.context, session.validation))  # all ranks end together
        record |= {"validation_loss": loss, "perplexity": perplexity(cross_entropy)}
    for name, batches in session.sets.items() if texts else ():
        loss, cross_entropy = _of_rank_0(validate(session.context, batches))
        record |= {f"validation_loss/{name}": loss, f"perplexity/{name}": perplexity(cross_entropy)}
    if evaluations:
        with _saved_first(session, record, recorded=False):
            _evaluate(session, record)
    session.context.optimizer.zero_grad()  # from an evaluation that ran a backward
    if session.best.key in record:
        session.best.add(step, record[session.best.key])
    is_best = config.checkpoint.best is not False and session.best.step == step
    if config.checkpoint.best:
        session.checkpoints.protected = session.best.step
    return is_best


def _of_rank_0(validation: Validation) -> Validation:
    return all_ranks().on_rank_0(lambda: validation)


def _evaluate(session: _Session, record: dict[str, Any]) -> None:
    """Add the figures of evaluations to a step's record.

    Raises:
        InputError: two evaluations have a figure of the same name, or none has the figure of `checkpoint.best`.
    """
    context, step = session.context, record["step"]
    train, key = context.plan.config.train, session.best.key
    alive = functools.partial(context.watch.phase, "validation")
    alive()
    evaluations = [(EVALUATE, session.events.evaluate(context.model, step, alive))]
    for name in train.eval_functions:
        called = f"train.eval = {name!r}"
        evaluations.append((called, figures_of(called, load_function(name), context.model, step, train.eval_reduce, alive)))
    if train.lm_eval_names:
        from octavo.train.lm_tasks import run_tasks

        evaluations.append(("lm-eval", run_tasks(context, session.prepared, alive)))
    owner: dict[str, str] = {}
    for name, figures in evaluations:
        for figure, value in figures.items():
            if figure in owner:
                raise InputError(f"{owner[figure]} and {name} both have a figure {figure!r}: rename one of them.")
            owner[figure], record[figure] = name, value
    if key.startswith(EVALUATION) and key not in record:
        raise InputError(
            f"checkpoint.best = {key!r}, but the evaluations at step {step} gave {', '.join(owner) or 'nothing'}. Name "
            "one of these."
        )


@contextlib.contextmanager
def _saved_first(session: _Session, record: Mapping[str, Any], *, recorded: bool = True) -> Iterator[None]:
    """Around a user's code: if it raises, the step is recorded and saved before the error propagates.

    Only on one rank: a save is collective, and other ranks do not know of the error.
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
        "validation_sets": {name: each.manifest.fingerprint for name, each in session.prepared.sets.items()},
        "layout": run_layout(context.plan),
        "fp8": context.plan.config.fp8.model_dump(mode="json"),
        **({"fp8_changes": session.fp8_changes} if session.fp8_changes else {}),
        "schedule_ends": [*context.plan.config.train.extended, context.plan.steps],
        "loss_scale": None if context.loss_scale is None else context.loss_scale.state(),
    }
    background = context.plan.config.checkpoint.async_
    rank_files, fault = {}, None
    try:
        if of_callbacks := session.events.state():
            rank_files[CALLBACKS] = of_callbacks
    except Exception as error:  # from a user's state_dict: save the step first, as after any error of a callback
        fault = error
    path = session.checkpoints.save(
        step, context.model, context.optimizer, scalars, rank_files=rank_files, background=background
    )
    if wait or fault is not None:
        session.checkpoints.wait()
    if fault is not None:
        raise fault
    return path


def _summary(folder: RunFolder, done: int) -> Summary:
    """Figures of a finished training, read by rank 0, which wrote the file: other hosts may still see an older version."""
    return all_ranks().on_rank_0(lambda: summarise(folder.metrics, done))


def _train_step(
    session: _Session, step: int, checkpoint_seconds: float, stop: StopRequest
) -> tuple[dict[str, Any], bool, bool]:
    """Train a step; returns its metrics, and whether any rank received a signal or an end request."""
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
    """Message for a run that ends without a save: its newest checkpoint, and how to restart. Collective."""
    checkpoints.wait()
    newest = next(iter(step_folders(checkpoints.folder)), None)
    if newest is None:
        return "Nothing was saved yet, so the same train.output can be used for a new start."
    return f"The checkpoint of step {newest[0]} remains, with the run's settings: for others set another train.output."


def _peak_memory_gib(device: torch.device) -> float:
    """Peak memory: of the allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 2**30


def say(console: Console, message: str) -> None:
    """Print a line without markup."""
    console.print(message, markup=False, highlight=False, soft_wrap=True)
