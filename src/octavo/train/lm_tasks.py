"""Tasks of lm-eval (EleutherAI's lm-evaluation-harness, extra `octavo[eval]`) on the model in training.

Every rank runs the harness over all questions, and the ranks share the forwards (`octavo.train.lm_answers`), so the figures
equal those of one rank. Forwards run in FP8 if training does, under delayed scaling with its scales; other recipes scale each
batch separately. If the run's data are conversations, questions are written by the chat template, as in training.

No code is fetched: data sets with scripts, metrics of the Hub and tasks that run generated code are refused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from octavo.config.run import EVALUATION
from octavo.config.train import TrainConfig
from octavo.data.prepared import PreparedData
from octavo.errors import InputError, first_line, install_extra, unknown
from octavo.fp8.autocast import fp8_autocast
from octavo.train.evaluation import unchanged
from octavo.train.lm_answers import Scoring
from octavo.train.step import TrainContext

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
            loaded = manager.load(list(names))
    except Exception as error:  # exceptions of a data set or a task's code
        raise InputError(f"train.eval: lm-eval cannot load {', '.join(names)}: {first_line(error)}.") from error
    for name, task in loaded["tasks"].items():
        _check_task(name, task)
        examples = task.get_config("num_fewshot")
        if shots and examples == 0:
            raise InputError(
                f'train.eval_shots = {shots}, but "lm-eval:{name}" has no examples (num_fewshot: 0 in its file). '
                "Leave train.eval_shots out, or write a task of your own (train.eval_tasks)."
            )
        if shots is not None or examples is None:
            task.set_config(key="num_fewshot", value=shots or 0)
    return loaded


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


def evaluate_tasks(settings: Scoring, tasks: Any, *, limit: int | None) -> dict[str, float]:
    """See `run_tasks`."""
    from lm_eval.evaluator import evaluate

    from octavo.train.lm_model import LanguageModel  # imports lm-eval

    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=_SEED)  # each evaluation of a run draws the same examples
    options = {"bootstrap_iters": 0, "log_samples": False, "confirm_run_unsafe_code": False}
    if settings.chat is not None:  # as in lm-eval's command, with each example as separate turns
        options |= {"apply_chat_template": True, "fewshot_as_multiturn": True}
    with _no_code_of_the_hub():
        results = evaluate(LanguageModel(settings), tasks, limit=limit, **options)
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
