"""`octavo.Trainer`: the run of a run file as a Python object, and what `octavo train` runs.

A run is its folder: it is locked, checked against its past, continued, and followed by the run without FP8 if requested
(`train.compare_bf16`). The steps of one training are in `octavo.train.loop`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from rich.console import Console
from torch import nn

from octavo.checkpoint.manifest import step_folders
from octavo.checkpoint.reader import has_own_code
from octavo.config.effects import with_values
from octavo.config.run import EVALUATION, RunConfig
from octavo.data.prepared import PreparedData, check_vocabulary, with_packing
from octavo.data.special_tokens import SpecialTokens, check_overrides
from octavo.data.tokenizer import other_beside, tokenizer_files
from octavo.errors import InputError, print_in_any_encoding
from octavo.job_ranks import adopt_ranks
from octavo.models.generation import load_generation_config
from octavo.parallel.coordination import all_ranks, writing_ranks
from octavo.parallel.world import init, rank_variable, state
from octavo.plan import advice, fp8_auto
from octavo.plan.graph import check_graph
from octavo.plan.run import RunPlan, check, steps_of_epochs
from octavo.plan.verified import refuse_unverified
from octavo.run import finished
from octavo.run.folder import RunFolder, locked
from octavo.run.plots import plot_run
from octavo.run.records import newest_state
from octavo.run.resume import check_extended, check_resumable, extend, with_keys_of, with_own_scale
from octavo.run.summary import Result
from octavo.train.callbacks import EVALUATE, Callback, CallbackEvents, Events, check_callbacks
from octavo.train.evaluation import Evaluation, check_function, load_functions
from octavo.train.loop import say, train_one
from octavo.train.setup import prepare_on_ranks
from octavo.watchdog.stopping import StopRequest
from octavo.watchdog.watchdog import Watchdog


class Trainer:
    """A run: `octavo.Trainer("run.toml", optimizer={"lr": 1e-4}).train()`.

    It leaves the same folder and the same numbers as `octavo train` on the same keys, and continues from its newest checkpoint
    if there is one. On several ranks every rank creates a Trainer.

    Args:
        run_file: path of a run file, or a `RunConfig`; None: all keys are keywords.
        callbacks: objects with methods of `Callback`, called on every rank; checkpoints store the state of those that have one.
        evaluate: function of model and step, called on every rank every `train.eval_every` steps, or after each validation; its
            figures go to metrics.jsonl as `evaluation/NAME`. It gets the model in training, in evaluation mode, without
            gradients.
        console: for progress; None: standard output.
        sections: keys by section; they override the run file.

    Attributes:
        config: the run's configuration.
        model: the model in training, from the first step on; also after the end, except with `train.compare_bf16`.
        optimizer: the same for the optimizer.
        step: the last finished step.

    Raises:
        InputError: an unknown key or a value out of range; a callback with a misspelt method.
    """

    def __init__(
        self,
        run_file: str | Path | RunConfig | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        evaluate: Evaluation | None = None,
        console: Console | None = None,
        **sections: Mapping[str, Any],
    ) -> None:
        for name, keys in sections.items():
            if not isinstance(keys, Mapping):
                raise InputError(f"Trainer({name}={keys!r}): a section is a dict of keys, such as train={{'steps': 100}}.")
        check_callbacks(callbacks)
        if evaluate is not None:
            check_function(evaluate, EVALUATE)
        if isinstance(run_file, RunConfig):
            if sections:
                raise InputError("Trainer: a RunConfig has all keys. Give a run file with keywords, or the RunConfig alone.")
            self.config = run_file
        elif run_file is None:
            self.config = RunConfig.from_dict(sections, where="Trainer")
        else:
            self.config = RunConfig.from_file(run_file, sections=sections)
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.step = 0
        self._console = console
        self._events = CallbackEvents(self, callbacks, evaluate)
        self._stop: StopRequest | None = None

    def stop(self) -> None:
        """End the training after this step: it is saved, and `train` returns. For callbacks, on one rank or on all."""
        if self._stop is None:
            raise InputError("Trainer.stop: no training is running; call it from a callback.")
        self._stop.end()

    def train(self, *, stop: StopRequest | None = None) -> Result:
        """Train the run, or continue it from its newest whole checkpoint. stop: signal handlers already installed.

        Raises:
            InputError: a fault in the configuration or the data, or the folder has a run with other settings; nothing was
                changed.
            RunStopped: after a signal; the run is saved and the same call continues it.
            OctavoError: no whole checkpoint, no space, or a loss that is not finite.
        """
        with _defaults():
            return self._train(stop)

    def _train(self, stop: StopRequest | None) -> Result:
        config = self.config
        print_in_any_encoding()
        adopt_ranks()
        console = self._console or Console(quiet=rank_variable("RANK", 0) > 0)
        plan = check(config)
        load_functions(config.train)
        if config.train.lm_eval_names:
            from octavo.train.lm_tasks import load_tasks

            load_tasks(config.train)
        with contextlib.nullcontext(stop) if stop is not None else StopRequest() as stop, self._running(stop):
            # Longer than the watchdog's timeout: it finds the failed rank before a collective times out.
            timeout = config.launch.timeout + config.launch.grace + 60
            init(config.parallel.model_dump() | {"random_seed": config.train.seed}, timeout=timeout)
            with (
                Watchdog(timeout=config.launch.timeout, grace=config.launch.grace) as watch,
                _locked(config.output) as folder,
            ):
                run = _Run(folder, console, stop, watch)
                plan, prepared = run.settle(config, plan)
                self.config = plan.config
                if self.config.train.lm_eval_names and prepared.of_chats:
                    console.print("lm-eval: questions are written by the chat template, since the data are conversations.")
                bf16_plan = without_fp8(plan) if plan.config.train.compare_bf16 and plan.recipe is not None else None
                if bf16_plan is not None:  # before the steps in FP8
                    bf16_plan = _fit_to_past(bf16_plan, RunFolder(bf16_plan.config.output))
                result = run.train(plan, prepared, folder, self._events)
                if bf16_plan is not None and not result.ended_early:
                    self.model = self.optimizer = None  # frees memory for the run without FP8
                    with _locked(bf16_plan.config.output) as bf16_folder:
                        bf16_plan = _fit_to_past(bf16_plan, bf16_folder)
                        twin = run.train(bf16_plan, prepared, bf16_folder, Events())
                        result = dataclasses.replace(result, bf16=twin.summary)
                if state.rank == 0:
                    plot_run(folder.path)
                self._events.ended(result)
        return result

    @contextlib.contextmanager
    def _running(self, stop: StopRequest) -> Iterator[None]:
        """Store the request object that `stop` uses."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run in its locked folder."""

    folder: RunFolder
    console: Console
    stop: StopRequest
    watch: Watchdog

    def settle(self, config: RunConfig, plan: RunPlan) -> tuple[RunPlan, PreparedData]:
        """The plan, adapted to the run's past, with the number of steps and the tokenizer's ids; and the data."""
        before = self.folder.config() if self.folder.has_checkpoints else None  # a run without checkpoints may change
        if before is None:
            packing = plan.config.data.packing  # resolved from the data, where their form is known
            refuse_unverified(with_values(config, {"data.packing": packing}), plan.degrees)
        else:
            config, taken = with_keys_of(before, config, plan.config)
            # Changed data may not determine the packing that the run began with.
            plan = check(config) if taken or plan.config.data.packing is None else plan
            if taken:
                say(self.console, f"The run continues with its earlier values of keys that are not set: {', '.join(taken)}.")
        prepared: PreparedData | None = None
        on_change: Literal["error", "rebuild"] = "error" if before is not None else "rebuild"
        # The number of steps, and of tokens, depends on the data, which may have changed.
        if config.train.epochs is not None or config.model.resize:
            prepared = prepare_on_ranks(config.data, self.console, on_change)
        if config.model.resize:
            plan = check(config, prepared=prepared)
            _say_resized(plan, self.console, resumed=before is not None)
        if prepared is not None and config.train.epochs is not None:
            plan = dataclasses.replace(plan, config=plan.config.with_steps(steps_of_epochs(config, prepared)))
        if before is not None:
            plan = _fit_to_past(plan, self.folder)
            if has_own_code(self.folder.checkpoints, plan.weights, writing_ranks()):
                own = check(config, blocks="own", prepared=prepared)
                plan = dataclasses.replace(own, config=own.config.model_copy(update={"train": plan.config.train}))
                say(
                    self.console,
                    "The run continues with the model's original code, not Octavo's blocks, like its checkpoints.",
                )
        plan = fp8_auto.choose_layers(plan, self.folder, resumed=before is not None)
        prepared = prepared or prepare_on_ranks(plan.config.data, self.console, on_change)
        data = with_packing(plan.config.data, prepared)  # for a data set whose columns were not known before
        if before is None and plan.config.data.packing is None:
            refuse_unverified(with_values(config, {"data.packing": data.packing}), plan.degrees)
        plan = dataclasses.replace(plan, config=plan.config.model_copy(update={"data": data}))
        if plan.config.train.graph is True:  # for data whose packing was not known before
            check_graph(plan.config, plan.model_on_meta, plan.degrees.world)
        for each in (prepared, *prepared.sets.values()):
            check_vocabulary(each, plan.hf_config.vocab_size, load=config.model.load)
        return _with_token_ids(plan, prepared, self.console, resumed=before is not None), prepared

    def train(self, plan: RunPlan, prepared: PreparedData, folder: RunFolder, events: Events) -> Result:
        """Train one model in a locked folder."""
        with advice.explaining(plan):
            return train_one(plan, prepared, folder, console=self.console, stop=self.stop, watch=self.watch, events=events)


def _fit_to_past(plan: RunPlan, folder: RunFolder) -> RunPlan:
    """The plan of a run that continues in `folder`, extended if it has more steps; refuses another run there."""
    before = folder.config() if folder.has_checkpoints else None
    if before is None:
        return plan
    remedy = "Restore them to continue it, or set another train.output."
    if folder.path.name == "bf16" and plan.recipe is None:  # its loss is compared with the other run's
        remedy = f"Restore them, move {str(folder.path)!r} away to retrain it, or set another train.output."
    newest = max(step for step, _ in step_folders(folder.checkpoints))
    check_extended(before, newest_state(folder.path), folder.run_file)
    config = with_own_scale(before, plan.config)
    same_end = with_values(config, {"train.extended": before.train.extended})
    steps, auto = plan.config.train.steps, "auto" in (before.fp8.enabled, config.fp8.enabled)
    if steps is not None and newest < steps and (not auto or before.fp8.enabled == config.fp8.enabled):
        # `octavo.plan.fp8_changes` reports the effects, and refuses changes that would be wrong.
        before = before.model_copy(update={"fp8": config.fp8})
    check_resumable(before, same_end, folder.path, remedy=remedy)  # other keys first: they may be why the steps differ
    config = extend(before, config, newest)
    check_resumable(before, config, folder.path, remedy=remedy)
    return dataclasses.replace(plan, config=config)


def _say_resized(plan: RunPlan, console: Console, *, resumed: bool) -> None:
    """Print the rows that `model.resize` adds to the pretrained weights."""
    tokens, added = plan.hf_config.vocab_size, plan.tokens_added
    if resumed:
        return
    if not added:
        say(console, f"model.resize = true adds nothing: the model's vocabulary of {tokens:,} tokens is large enough.")
        return
    tied = getattr(plan.hf_config, "tie_word_embeddings", False)
    rows = "rows of the embedding, which is the head too," if tied else "rows of embedding and head"
    say(
        console,
        f"model.resize: the vocabulary grows from {tokens - added:,} to {tokens:,} tokens; the {added:,} new {rows} are the "
        f"mean of the old ones.{_untrained_rows(plan, tied=tied)}",
    )


def _untrained_rows(plan: RunPlan, *, tied: bool) -> str:
    """A sentence about new rows that adapters leave frozen."""
    lora = plan.config.lora
    if lora.rank is None or lora.save_whole:
        return ""
    way = (
        "train without lora, since embedding and head are one matrix"
        if tied
        else 'lora.save_whole = ["embed_tokens", "lm_head"], or their names in this family, trains them'
    )
    return f" With lora they are frozen there, and new tokens are not learnt: {way}."


def without_fp8(plan: RunPlan) -> RunPlan:
    """The plan of the same run without FP8."""
    note = "The same steps without FP8, to compare the loss"
    config = finished.without_fp8(plan.config)
    if config.best_figure[0].startswith(EVALUATION):  # it may be the Trainer's, and nothing uses this run's best
        config = with_values(config, {"checkpoint.best": False, "checkpoint.best_is": None, "train.early_stopping": 0})
    return dataclasses.replace(plan, config=config, recipe=None, excluded={}, fp8_note=note)


def _with_token_ids(plan: RunPlan, prepared: PreparedData, console: Console, *, resumed: bool) -> RunPlan:
    """The plan with the bos, eos and pad ids of the run's tokenizer in its Hugging Face config."""
    if prepared.tokenizer_folder is None:
        return plan
    config = copy.deepcopy(plan.hf_config)
    tokens = SpecialTokens.of(prepared.tokenizer_folder)
    before = config.to_dict()
    ids = tokens.fit(config)
    if plan.weights_folder is not None and not resumed:
        for sentence in _other_tokens(plan, tokens, before, ids):
            say(console, sentence)
    if not resumed and state.rank == 0 and (other := other_beside(prepared.tokenizer_folder, config)):
        say(console, other)
    if not resumed:
        check_overrides(plan.config.model.config, ids)
    pad = ids["pad_token_id"]
    if pad is not None and pad == prepared.manifest.end_token_id:
        say(console, f"The end token is also the pad (pad_token_id = {pad}): its row of the embedding is not trained.")
    return dataclasses.replace(plan, hf_config=config)


def _other_tokens(plan: RunPlan, tokens: SpecialTokens, config: Mapping[str, Any], fitted: Mapping[str, Any]) -> Iterator[str]:
    """Notices about special tokens with different ids in the pretrained weights and the run's tokenizer.

    config: ids in the source's config.json. fitted: the run's ids.
    """
    name, source = plan.config.data.tokenizer, plan.config.model.source
    same = name != "train" and (name == source or Path(name).expanduser().resolve() == Path(source).expanduser().resolve())
    if not same and (name == "train" or not tokens.owns(SimpleNamespace(**config))):
        theirs = tokenizer_files(source) or not Path(source).expanduser().is_dir()  # on the Hub most models have one
        way = f"data.tokenizer = {source!r} is their tokenizer." if theirs else "Set data.tokenizer to theirs."
        yield f"The weights of {source} were trained with other tokens than this tokenizer's. {way}"
        return
    generation = load_generation_config(source)
    named = {"config.json": config} | ({} if generation is None else {"generation_config.json": generation.values})
    for role, sentence in tokens.disagreements(named):
        yield (
            f"{role} of {source}: {sentence}. The run and its exports use {fitted[role]}, from data.tokenizer = {name!r}. "
            f"Correct the file that is wrong: {role.removesuffix('_id')} in tokenizer_config.json, or {role} in the others."
        )


@contextlib.contextmanager
def _defaults() -> Iterator[None]:
    """PyTorch's defaults of dtype, device, autocast and gradients, for the numbers of `octavo train`."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    with contextlib.ExitStack() as around:
        around.enter_context(torch.inference_mode(False))
        around.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            # Only the outermost autocast clears its copies of weights: a run's inner ones would use those of its first step.
            around.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        if device.type != "cpu":
            around.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        around.callback(torch.set_default_dtype, dtype)
        yield


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[RunFolder]:
    """The run folder at `path`, locked by rank 0 for all ranks."""
    with contextlib.ExitStack() as stack:
        all_ranks().on_rank_0(lambda: stack.enter_context(locked(path)).path)
        yield RunFolder(path)
