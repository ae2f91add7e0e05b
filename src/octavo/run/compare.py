"""`octavo compare`: losses of runs of the same steps, as a table and as JSON with the runs' environments.

A gap is meaningful only relative to the noise of training, which a second run of the reference with another order of sums
shows. Losses on different tokens are not comparable. That is a warning, not an error, since validations on the same text may
be.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config.effects import value_of
from octavo.config.moe import MoeConfig
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.run.metrics import lacking, read_metrics
from octavo.run.records import layout_at, newest_state, read_json
from octavo.run.resume import VALIDATED
from octavo.run.summary import averaged_steps, losses_of_sets, median_speed, percent_above

_TEXT_KEYS = (
    *("data.source", "data.text_field", "data.subset", "data.split", "data.tokenizer", "data.vocab_size"),
    *("data.format", "data.chat_template", "data.chat_template_variables", "data.train_on", "data.faulty_rows"),
    *("data.max_documents", "data.max_tokens", "data.validation_fraction", "data.validation_source", "data.validation_split"),
)
"""Keys that determine the tokens; not compared if the tokens' fingerprints are equal."""
_LOSS_KEYS = (
    *("data.weights", "data.sequence_length", "data.packing", "data.overlong", "data.seed"),
    *("train.global_batch", "train.label_smoothing", "train.z_loss"),
)
"""Keys that determine the samples of a step, and the meaning of its loss."""
_TOKENS, _VOCABULARY, _STEPS = "tokens (fingerprint of the data)", "vocab_size of the model", "train.steps"


@dataclass(frozen=True)
class _Run:
    """A run's folder with its name in the table and its steps."""

    folder: Path
    name: str
    curve: Mapping[int, Mapping[str, Any]]


def compare(runs: Sequence[Path], *, last: int | None = None) -> dict[str, Any]:
    """Losses and speeds of runs against the first of them.

    Args:
        runs: run folders; the first is the reference.
        last: steps at the end whose mean loss is compared; by default those of a run's summary.

    Returns:
        `{"last", "steps", "numbers", "validation_step", "warnings", "rows": [{"run", "loss", "gap_percent", "validation_loss",
        "validation_gap_percent", "validation_losses", "tokens_per_second", "losses", "environment"}]}`. `run` is the shortest
        unique suffix of the run's path, `numbers` are the steps that all runs have, `steps` their count and `losses` the
        losses at them; `loss` is the mean of the last `last`, `gap_percent` its distance from the reference's,
        `tokens_per_second` a median. Validations are those of `validation_step`, the last step at which all runs have one;
        None without such a step.

    Raises:
        InputError: a folder is not a run, or the runs have fewer than `last` steps in common.
    """
    known = [_Run(folder, name, _curve(folder)) for folder, name in zip(runs, names_of(runs), strict=True)]
    numbers = sorted(set.intersection(*(set(run.curve) for run in known)))
    steps = len(numbers)
    if not steps:
        ranges = ", ".join(f"{run.folder} has steps {min(run.curve)} to {max(run.curve)}" for run in known)
        raise InputError(f"the runs have no step in common: {ranges}.")
    last = averaged_steps(steps) if last is None else last
    if not 1 <= last <= steps:
        shortest = min(known, key=lambda run: len(run.curve))
        has = (
            f"{shortest.folder} has {steps} steps" if len(shortest.curve) == steps else f"the runs have {steps} steps in common"
        )
        raise InputError(f"--last {last}: {has}; use 1 to {steps}.")
    validated = [n for n in numbers if all(run.curve[n].get("validation_loss") is not None for run in known)]
    at = validated[-1] if validated else None
    with_sets = [n for n in numbers if all(losses_of_sets(run.curve[n]) for run in known)]
    of_sets = with_sets[-1] if with_sets else None
    means = [math.fsum(run.curve[number]["loss"] for number in numbers[-last:]) / last for run in known]
    checked: list[Any] = [None if at is None else run.curve[at]["validation_loss"] for run in known]
    rows = [
        {
            "run": run.name,
            "loss": loss,
            "gap_percent": percent_above(loss, means[0]),
            "validation_loss": validation,
            "validation_gap_percent": None if at is None else percent_above(validation, checked[0]),
            "validation_losses": {} if of_sets is None else losses_of_sets(run.curve[of_sets]),
            "tokens_per_second": median_speed(run.curve.values()),
            "losses": [run.curve[number]["loss"] for number in numbers],
            "environment": read_json(run.folder / "environment.json"),
        }
        for run, loss, validation in zip(known, means, checked, strict=True)
    ]
    warnings = _warnings(known, numbers) + ([] if at is None else _other_validations(known, at))
    return {"last": last, "steps": steps, "numbers": numbers, "validation_step": at, "warnings": warnings, "rows": rows}


def lines(comparison: dict[str, Any]) -> list[str]:
    """The comparison as a table."""
    width = max(len("run"), *(len(row["run"]) for row in comparison["rows"]))
    first, last, at = comparison["numbers"][-comparison["last"]], comparison["numbers"][-1], comparison["validation_step"]
    head = f"{'run':<{width}}  {'loss':>8}  {'gap':>8}"
    note = f"loss: mean of steps {first} to {last}" if first < last else f"loss: step {last}"
    if at is not None:
        head += f"  {'validation':>10}  {'gap':>8}"
        note += f"; validation: step {at}"
    table = [f"{head}  {'tokens/s':>10}"]
    for row in comparison["rows"]:
        line = f"{row['run']:<{width}}  {row['loss']:8.4f}  {row['gap_percent']:+7.2f}%"
        if at is not None:
            line += f"  {row['validation_loss']:10.4f}  {row['validation_gap_percent']:+7.2f}%"
        table.append(f"{line}  {row['tokens_per_second']:10,.0f}")
    for name in dict.fromkeys(name for row in comparison["rows"] for name in row["validation_losses"]):
        losses = (
            f"{row['run']} {row['validation_losses'][name]:.4f}"
            for row in comparison["rows"]
            if name in row["validation_losses"]
        )
        table.append(f"validation of {name}: {', '.join(losses)}")
    return [*table, note]


def names_of(runs: Sequence[Path]) -> list[str]:
    """For each run the shortest unique suffix of its path."""
    paths = [Path(os.path.abspath(run)) for run in runs]  # noqa: PTH100 - `resolve` would follow links, and so rename runs

    def end(path: Path, parts: int) -> Path:
        return Path(*path.parts[-parts:])

    def name(path: Path) -> str:
        others = {other for other in paths if other != path}
        lengths = range(1, len(path.parts) + 1)
        distinct = (end(path, n) for n in lengths if all(end(other, n) != end(path, n) for other in others))
        return str(next(distinct, path))

    return [name(path) for path in paths]


def _curve(run: Path) -> dict[int, dict[str, Any]]:
    """The records of a run by step; records without a loss are left out."""
    records = [record for record in read_metrics(run / "metrics.jsonl") if {"loss", "tokens_per_second"} <= record.keys()]
    if not records:
        raise InputError(f"{str(run)!r} has no metrics.jsonl with whole lines. Give the folder of a run, such as runs/demo.")
    return {record["step"]: record for record in records}


def _warnings(runs: Sequence[_Run], numbers: Sequence[int]) -> list[str]:
    """Warnings about data that differs from the reference's, and about runs of other lengths."""
    reference, *others = runs
    facts = {run.name: _facts(run.folder) for run in runs}
    warnings = []
    for run in others:
        one, two = facts[reference.name], facts[run.name]
        same_tokens = _TOKENS in one and one[_TOKENS] == two.get(_TOKENS)  # whatever the file names
        keys = [key for key in one if key in two and not (same_tokens and key in _TEXT_KEYS) and key != _STEPS]
        changed = [f"{key} ({_shown(one[key])} and {_shown(two[key])})" for key in keys if one[key] != two[key]]
        if changed:
            warnings.append(f"{reference.name} and {run.name} differ in {', '.join(changed)}: their losses are not comparable.")
    for run in runs:
        newest, planned = max(run.curve), facts[run.name].get(_STEPS)
        done = newest_state(run.folder).get("step", 0)
        if newest < done:
            metrics = run.folder / "metrics.jsonl"
            warnings.append(
                f"{run.name} has done {done} steps, but {lacking(metrics, done)} Compared are steps up to {numbers[-1]}."
            )
        elif planned is not None and newest < planned:
            warnings.append(f"{run.name} has {newest} of its {planned} steps; compared are steps up to {numbers[-1]}.")
        elif newest > numbers[-1]:
            warnings.append(
                f"{run.name} continues to step {newest}; compared are steps up to {numbers[-1]}, at which its learning rate "
                "may differ."
            )
    return warnings


def _other_validations(runs: Sequence[_Run], at: int) -> list[str]:
    """Runs whose validation at step `at` covers another number of sequences than the reference's."""
    reference, *others = [(run.name, _validated(run.folder, at)) for run in runs]
    return [
        f"{reference[0]} and {name} differ in {VALIDATED} ({reference[1]} and {count}; train.validate_batches x "
        "train.micro_batch or train.global_batch): validation losses are not comparable, unless the split has no more than "
        f"{min(reference[1], count)}."
        for name, count in others
        if reference[1] is not None and count is not None and count != reference[1]
    ]


def _validated(run: Path, at: int) -> int | None:
    """Sequences of a run's validation at step `at`: from a checkpoint, else the run file; None if neither has them."""
    layout = layout_at(run, at)
    if layout is not None:
        count = layout.get(VALIDATED)  # absent in checkpoints of older versions, which counted differently
        return count if isinstance(count, int) else None
    file = run / "run.toml"
    return RunConfig.from_file(file, recorded=True).train.validation_sequences if file.is_file() else None


def _facts(run: Path) -> dict[str, Any]:
    """The values that must agree, as far as the folder has them: an old or copied one may have only metrics."""
    facts: dict[str, Any] = {}
    model = read_json(run / "model" / "config.json") or {}
    if (run / "run.toml").is_file():
        config = RunConfig.from_file(run / "run.toml", recorded=True)
        facts |= {key: value_of(config, key) for key in (*_TEXT_KEYS, *_LOSS_KEYS, _STEPS)}
        facts |= _router_losses(config.moe, model)
    for name, source, key in ((_VOCABULARY, model, "vocab_size"), (_TOKENS, newest_state(run), "data")):
        if key in source:
            facts[name] = source[key]
    return facts


def _router_losses(moe: MoeConfig, model: Mapping[str, Any]) -> dict[str, float]:
    """The coefficients in the loss, by [moe] or else by the model's config; 0 without experts."""
    asked, coefficient = moe.moe_load_balancing, moe.moe_aux_loss_coeff
    balances = model.get("output_router_logits", False) if asked is None else asked == "aux_loss"
    balance = model.get("router_aux_loss_coef", 0.0) if coefficient is None else coefficient
    return {"moe.moe_aux_loss_coeff": balance if balances else 0.0, "moe.moe_z_loss_coeff": moe.moe_z_loss_coeff or 0.0}


def _shown(value: Any) -> str:
    return "none" if value is None else value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
