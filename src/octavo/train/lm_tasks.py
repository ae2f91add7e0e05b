"""Tasks of lm-eval (EleutherAI's lm-evaluation-harness, extra `octavo[eval]`) on the model in training.

Every rank runs the harness over all questions, and ranks with different samples answer a share of the texts each; then all have
all answers, and the figures equal those of one rank. Every rank runs equally many forwards, since sharded ranks run them
together. They run in FP8 if training does, under delayed scaling with its scales; other recipes scale each batch separately. If
the run's data are conversations, questions are written by the chat template, as in training.

No code is fetched: data sets with scripts, metrics of the Hub and tasks that run generated code are refused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.config.run import EVALUATION
from octavo.config.train import TrainConfig
from octavo.data.prepared import PreparedData
from octavo.data.special_tokens import SpecialTokens
from octavo.data.tokenizer import transformers_tokenizer
from octavo.errors import InputError, first_line, install_extra, unknown, warn
from octavo.fp8.autocast import fp8_autocast
from octavo.models.decoder import Decoder
from octavo.parallel.coordination import all_ranks
from octavo.parallel.world import state
from octavo.train.evaluation import unchanged
from octavo.train.step import TrainContext

_STEP = 16
"""Lengths of batches are multiples of this, and of the multiple that context ranks need."""


_SEED = 1234
"""Seed of the examples before questions: lm-eval's default."""


def load_tasks(config: TrainConfig) -> Any:
    """lm-eval's tasks of `train.eval`, by name.

    Raises:
        InputError: lm-eval is not installed, there is no such task, or one would run code from elsewhere.
    """
    return _tasks(tuple(config.lm_eval_names), config.eval_tasks, config.eval_shots)


@functools.cache  # a run, its check and its twin load them once
def _tasks(names: tuple[str, ...], folder: str | None, shots: int | None) -> Any:
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(f'train.eval = "lm-eval:{names[0]}" needs lm-eval: {install_extra("eval")}.')
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    path = None if folder is None else Path(folder).expanduser()
    if path is not None and not path.is_dir():
        raise InputError(f"train.eval_tasks = {folder!r}: there is no such folder.")
    manager = TaskManager(include_path=None if path is None else str(path), include_defaults=path is None)
    for name in names:
        if name not in manager.all_tasks:
            where = "train.eval" if path is None else f"train.eval (tasks of {folder!r})"
            raise unknown("lm-eval task", name, manager.all_tasks, key=where)
    try:
        with _no_code_of_the_hub():
            found = manager.load(list(names))
    except Exception as error:  # exceptions of a data set or a task's code
        raise InputError(f"train.eval: lm-eval cannot load {', '.join(names)}: {first_line(error)}.") from error
    for name, task in found["tasks"].items():
        _check_task(name, task)
        given = task.get_config("num_fewshot")
        if shots and given == 0:
            raise InputError(
                f'train.eval_shots = {shots}, but "lm-eval:{name}" has no examples (num_fewshot: 0 in its file). '
                "Leave train.eval_shots out, or write a task of your own (train.eval_tasks)."
            )
        if shots is not None or given is None:
            task.set_config(key="num_fewshot", value=shots or 0)
    return found


@contextlib.contextmanager
def _no_code_of_the_hub() -> Iterator[None]:
    """Inside, `evaluate.load` raises: metrics of the Hub are Python files, which it would run."""
    import evaluate

    load = evaluate.load

    def refuse(path: str, *_: Any, **__: Any) -> None:
        raise InputError(f"the metric {path!r} is code of the Hugging Face Hub, which Octavo does not run")

    evaluate.load = refuse
    try:
        yield
    finally:
        evaluate.load = load


def _check_task(name: str, task: Any) -> None:
    """Refuse tasks that run downloaded or generated code."""
    config = task.config
    for metric in getattr(config, "metric_list", None) or []:
        known = isinstance(metric.get("metric"), str) and _is_registered(metric["metric"])
        if metric.get("hf_evaluate") or not (known or callable(metric.get("metric"))):
            raise InputError(
                f'train.eval = "lm-eval:{name}": its metric {metric.get("metric")!r} is code of the Hugging Face Hub, which '
                "Octavo does not run. Use a metric of lm-eval in a task of your own (train.eval_tasks)."
            )
    if getattr(config, "unsafe_code", False) or getattr(task, "UNSAFE_CODE", False):
        raise InputError(f'train.eval = "lm-eval:{name}" runs code that the model writes. Leave it out.')


def _is_registered(metric: str) -> bool:
    from lm_eval.api import registry

    return metric in registry.metric_registry


def run_tasks(context: TrainContext, prepared: PreparedData, alive: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Figures of the tasks of `train.eval`, `evaluation/TASK/METRIC`, the same on all ranks. All ranks call it.

    A metric with a filter other than lm-eval's "none" is named METRIC,FILTER. Standard errors are left out.

    Args:
        prepared: the run's data, with its tokenizer.
        alive: called before each forward, for a watchdog.

    Raises:
        InputError: the data has no tokenizer, a task asks for sampled answers, or a question has more tokens than the model.
    """
    plan, train, tokenizer = context.plan, context.plan.config.train, prepared.tokenizer_folder
    if tokenizer is None:
        raise InputError("train.eval has tasks of lm-eval, which need text, but the data has no tokenizer: set data.tokenizer.")
    positions = getattr(plan.hf_config, "max_position_embeddings", None) or plan.config.data.sequence_length
    settings = Scoring(
        context.model,
        tokenizer,
        plan.device,
        longest=int(positions),
        vocabulary=int(plan.hf_config.vocab_size),
        batch=train.eval_batch,
        autocast=functools.partial(fp8_autocast, enabled=plan.recipe is not None, fp8_recipe=plan.recipe, emulate=True),
        chat=plan.config.data.chat_template_variables if prepared.of_chats else None,
        turn_ends=tuple(prepared.turn_ends),
    )
    with unchanged(context.model, "lm-eval", alive), torch.no_grad():
        return evaluate_tasks(settings, load_tasks(train), limit=train.eval_limit)


class Scoring(NamedTuple):
    """A model and how questions are put to it.

    longest: most tokens in a forward. batch: texts in a rank's forward. chat: variables of the chat template that writes
    questions; None for plain text. turn_ends: ids at which an answer ends, in addition to the end token.
    """

    model: nn.Module
    tokenizer: Path
    device: torch.device
    longest: int
    vocabulary: int
    batch: int
    autocast: Callable[[], Any]
    chat: Mapping[str, Any] | None = None
    turn_ends: tuple[int, ...] = ()


def evaluate_tasks(settings: Scoring, tasks: Any, *, limit: int | None) -> dict[str, float]:
    """See `run_tasks`."""
    from lm_eval.evaluator import evaluate

    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=_SEED)  # each evaluation of a run draws the same examples
    options = {"bootstrap_iters": 0, "log_samples": False, "confirm_run_unsafe_code": False}
    if settings.chat is not None:  # as in lm-eval's command, with each example as separate turns
        options |= {"apply_chat_template": True, "fewshot_as_multiturn": True}
    with _no_code_of_the_hub():
        results = evaluate(_language_model(settings), tasks, limit=limit, **options)
    assert results is not None
    return dict(_figures(results["results"]))


def _figures(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    for task, metrics in results.items():
        for key, value in metrics.items():
            metric, _, chosen = key.partition(",")
            if metric in ("alias", "sample_len", "name") or metric.endswith("stderr") or isinstance(value, bool | str):
                continue
            if isinstance(value, int | float) or hasattr(value, "item"):
                yield f"{EVALUATION}{task}/{metric}" + (f",{chosen}" if chosen not in ("", "none") else ""), float(value)


class Scored(NamedTuple):
    """A text of which the last `scored` tokens are scored."""

    ids: list[int]
    scored: int


class Answerer:
    """The forwards of an evaluation: log-likelihoods and greedy continuations over all ranks."""

    def __init__(self, settings: Scoring) -> None:
        self._own = settings
        self._ranks = max(1, state.dp_size)
        self._rank = state.dp_rank if self._ranks > 1 else 0

    def score(self, texts: Sequence[Scored]) -> list[tuple[float, bool]]:
        """(sum of the log-probabilities of the scored tokens, whether each is the most probable one) of each text."""
        size = self._own.batch
        order = sorted(range(len(texts)), key=lambda at: -len(texts[at].ids))  # texts of about equal length in a forward
        found: dict[int, tuple[float, bool]] = {}
        for first in range(0, len(order), size * self._ranks):
            mine = order[first : first + size * self._ranks][self._rank * size :][:size]
            length = len(texts[order[first]].ids) - 1  # the same on all ranks: they may share forwards
            asked = mine or [order[first]]
            results = self._scores([texts[at] for at in asked], length)
            found |= dict(zip(mine, results, strict=False))
        whole: dict[int, tuple[float, bool]] = {}
        for part in all_ranks().all_gather(found):
            for at, value in part.items():
                whole.setdefault(at, value)  # ranks that share samples have equal values
        return [whole[at] for at in range(len(texts))]

    def _scores(self, texts: Sequence[Scored], length: int) -> list[tuple[float, bool]]:
        """Scores of a batch; the model reads each text without its last token."""
        first = min(len(text.ids) - 1 - text.scored for text in texts)
        logits = self.logits([text.ids[:-1] for text in texts], length, torch.arange(first, length))
        results = []
        for row, text in zip(logits, texts, strict=True):
            end = len(text.ids) - 1 - first
            kept = row[end - text.scored : end].float()
            targets = torch.tensor(text.ids[-text.scored :], device=kept.device)
            own = kept.log_softmax(-1).gather(-1, targets[:, None])
            results.append((float(own.double().sum()), bool((kept.argmax(-1) == targets).all())))
        return results

    def continued(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], ended: Callable[[int, list[int]], bool]
    ) -> list[list[int]]:
        """The greedy continuation of each prompt, up to its limit, or until `ended(number, tokens so far)`."""
        size = self._own.batch
        found: dict[int, list[int]] = {}
        order = sorted(range(len(prompts)), key=lambda at: -len(prompts[at]))
        for first in range(0, len(order), size * self._ranks):
            mine = order[first : first + size * self._ranks][self._rank * size :][:size]
            together = order[first : first + size * self._ranks]
            length = min(self._own.longest, max(len(prompts[at]) + limits[at] for at in together))
            new: dict[int, list[int]] = {at: [] for at in mine}
            open_ = {at for at in mine if limits[at] > 0}
            while all_ranks().max(len(open_)):
                asked = mine or [order[first]]
                rows = [[*prompts[at], *new.get(at, [])] for at in asked]
                ends = torch.tensor([len(row) - 1 for row in rows])
                span = torch.arange(int(ends.min()), int(ends.max()) + 1)
                logits = self.logits(rows, length, span)
                for number, at in enumerate(asked):
                    if at in open_:
                        row = logits[number, int(ends[number]) - int(span[0])].float()
                        new[at].append(int(row.argmax()))
                        if len(new[at]) == limits[at] or ended(at, new[at]):
                            open_.remove(at)
            found |= new
        whole: dict[int, list[int]] = {}
        for part in all_ranks().all_gather(found):
            whole |= {at: value for at, value in part.items() if at not in whole}
        return [whole[at] for at in range(len(prompts))]

    def logits(self, rows: Sequence[Sequence[int]], length: int, positions: Tensor) -> Tensor:
        """Logits [B, len(positions), V] of rows that are right-padded to a length: no token attends to later ones."""
        own = self._own
        unit = _STEP * (2 * state.cp_size if state.cp_size > 1 else 1)
        padded = -(-length // unit) * unit
        padded = padded if padded <= own.longest or state.cp_size > 1 else max(length, 1)
        ids = torch.zeros(len(rows), padded, dtype=torch.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row, dtype=torch.int64)
        ids = ids.to(own.device)
        with own.autocast():
            if isinstance(own.model, Decoder):
                logits: Tensor = own.model(input_ids=ids, logits_to_keep=positions.to(own.device)).logits
                return logits
            output = own.model(input_ids=ids)
        whole: Tensor = getattr(output, "logits", output)
        return whole[:, positions.to(whole.device)]


def _language_model(settings: Scoring) -> Any:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    answerer = Answerer(settings)
    tokenizer = transformers_tokenizer(str(settings.tokenizer))
    special = SpecialTokens.of(settings.tokenizer)
    prefix = special.bos if special.bos is not None else special.eos
    said: set[str] = set()

    def say_once(message: str) -> None:
        if message not in said and state.rank == 0:
            warn(message)
        said.add(message)

    def plainly(text: str) -> bool:
        """True if the tokenizer should add its special tokens: False after a BOS in the text."""
        return special.bos is None or not text.startswith(tokenizer.decode([special.bos]))

    class LanguageModel(TemplateLM):
        """The model in training."""

        @property
        def eot_token_id(self) -> int:
            found = special.eos if special.eos is not None else prefix
            if found is None:
                raise InputError("lm-eval: the tokenizer has no token that begins or ends a text.")
            return found

        @property
        def prefix_token_id(self) -> int:
            return prefix if prefix is not None else self.eot_token_id

        @property
        def tokenizer_name(self) -> str:
            return str(settings.tokenizer)

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            def written(messages: list[dict[str, str]]) -> str:
                text: str = tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                    **(settings.chat or {}),
                )
                return text

            try:
                return written(chat_history)
            except Exception as error:  # of Jinja, and of Python within expressions
                others = [message for message in chat_history if message["role"] != "system"]
                if len(others) == len(chat_history):
                    raise InputError(f"lm-eval: the chat template refuses a question: {first_line(error)}.") from None
                say_once(
                    "lm-eval: the chat template refuses the system message with a task's description "
                    f"({first_line(error)}): questions are asked without it, as lm-eval does."
                )
                return written(others)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            # A template writes all special tokens of a conversation, as training reads it.
            adds = settings.chat is None and plainly(string) if add_special_tokens is None else add_special_tokens
            ids: list[int] = tokenizer.encode(string, add_special_tokens=adds)
            if ids and max(ids) >= settings.vocabulary:
                raise InputError(
                    f"lm-eval: a question has the token {max(ids)}, but the model has {settings.vocabulary} tokens."
                )
            return ids

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            texts, cut = [], 0
            for (_context, continuation), before, after in requests:
                if not after:
                    raise InputError(f"lm-eval: the answer {continuation!r} has no separate token after its question.")
                if len(after) > settings.longest:
                    raise InputError(
                        f"lm-eval: an answer has {len(after)} tokens, but the model has {settings.longest} positions. "
                        "Leave the task out."
                    )
                cut += len(before) + len(after) > settings.longest + 1
                texts.append(Scored([*before, *after][-(settings.longest + 1) :], len(after)))
            _say_cut(cut, len(requests), settings.longest)
            return answerer.score(texts)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            texts, owners = [], []
            for number, request in enumerate(requests):
                (string,) = request.args
                ids = self.tok_encode(string, add_special_tokens=plainly(string))
                windows = get_rolling_token_windows(
                    token_list=ids, prefix_token=self.prefix_token_id, max_seq_len=settings.longest, context_len=1
                )
                for before, after in map(make_disjoint_window, windows):
                    texts.append(Scored([*before, *after], len(after)))
                    owners.append(number)
            sums = [0.0] * len(requests)
            for number, (value, _) in zip(owners, answerer.score(texts), strict=True):
                sums[number] += value
            return sums

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            prompts, limits, stops, cut = [], [], [], 0
            for request in requests:
                context, options = request.args
                _refuse_sampling(options)
                limit = int(options.get("max_gen_toks", 256))
                until = options.get("until") or []
                stops.append([until] if isinstance(until, str) else list(until))
                if limit >= settings.longest:
                    raise InputError(
                        f"lm-eval: a task asks for answers of {limit} tokens (max_gen_toks), but the model has "
                        f"{settings.longest} positions. Set max_gen_toks in a task of your own (train.eval_tasks)."
                    )
                ids = self.tok_encode(context)
                cut += len(ids) > settings.longest - limit
                prompts.append(ids[-(settings.longest - limit) :] or [self.prefix_token_id])
                limits.append(limit)
            _say_cut(cut, len(requests), settings.longest)
            ends = {token for token in (special.eos, *settings.turn_ends) if token is not None}

            def ended(number: int, ids: list[int]) -> bool:
                return ids[-1] in ends or any(stop in tokenizer.decode(ids, skip_special_tokens=True) for stop in stops[number])

            answers = answerer.continued(prompts, limits, ended)
            return [
                _until(tokenizer.decode(ids, skip_special_tokens=True), stop) for ids, stop in zip(answers, stops, strict=True)
            ]

    return LanguageModel()


def _say_cut(cut: int, total: int, longest: int) -> None:
    if cut and state.rank == 0:
        warn(f"lm-eval: {cut} of {total} questions are longer than the model's {longest} positions, and lose their beginning.")


def _refuse_sampling(options: Mapping[str, Any]) -> None:
    """Refuse options of sampling: answers are the most probable tokens."""
    sampled = {
        "do_sample": options.get("do_sample", False),
        "temperature": options.get("temperature", 0.0),
        "num_beams": options.get("num_beams", 1) != 1,
    }
    for key, value in sampled.items():
        if value:
            raise InputError(
                f"lm-eval: a task sets {key} = {options[key]!r}, but answers are the most probable tokens here. "
                "Set do_sample = false in a task of your own (train.eval_tasks)."
            )
    known = {"do_sample", "temperature", "num_beams", "until", "max_gen_toks", "top_p", "top_k"}
    for key in options:
        if key not in known:
            raise unknown("key of generation_kwargs", key, sorted(known), key="the task")


def _until(text: str, stops: Iterable[str]) -> str:
    for stop in stops:
        if stop:
            text = text.split(stop)[0]
    return text
