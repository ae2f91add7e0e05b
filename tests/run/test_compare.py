"""The gap between runs, from files written by hand."""

import json
import math

import pytest

from octavo.cli import main
from octavo.errors import InputError
from octavo.run.compare import compare, lines, names_of
from octavo.run.resume import VALIDATED

RUN_TOML = """\
[model]
source = "llama-tiny"
[data]
source = "{source}"
sequence_length = {sequence_length}
[train]
steps = {steps}
global_batch = {global_batch}
"""


def run(folder, losses, speed=10.0, first=1):
    folder.mkdir(parents=True)
    records = [{"step": i + first, "loss": loss, "tokens_per_second": speed} for i, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_gap_of_the_last_steps(tmp_path):
    reference = run(tmp_path / "bf16", [9.0, 4.0, 2.0, 2.0])
    other = run(tmp_path / "fp8", [9.0, 5.0, 2.1, 1.98, 50.0], speed=20.0)
    found = compare([reference, other], last=2)
    assert found["steps"] == 4
    assert [row["run"] for row in found["rows"]] == ["bf16", "fp8"]
    assert found["rows"][0]["gap_percent"] == 0.0
    assert math.isclose(found["rows"][1]["gap_percent"], 2.0)
    assert found["rows"][1]["losses"] == [9.0, 5.0, 2.1, 1.98]
    assert lines(found) == [
        "run       loss       gap    tokens/s",
        "bf16    2.0000    +0.00%          10",
        "fp8     2.0400    +2.00%          20",
        "loss: mean of steps 3 to 4",
    ]


def test_command(tmp_path, capsys):
    runs = [str(run(tmp_path / name, losses)) for name, losses in (("bf16", [2.0, 2.0]), ("fp8", [2.0, 2.2]))]
    assert main(["compare", *runs, "--last", "1", "--plot", str(tmp_path / "curves.png"), "--json"]) == 0
    assert math.isclose(json.loads(capsys.readouterr().out)["rows"][1]["gap_percent"], 10.0)
    assert main(["compare", *runs, "--last", "1"]) == 0
    assert "+10.00%" in capsys.readouterr().out
    assert main(["compare", *runs, "--last", "3"]) == 2
    assert "use 1 to 2" in capsys.readouterr().err


def test_too_few_steps_names_the_shortest(tmp_path):
    with pytest.raises(InputError, match=r"short has 2 steps; use 1 to 2"):
        compare([run(tmp_path / "long", [1.0] * 5), run(tmp_path / "short", [1.0] * 2)], last=3)


def test_no_run(tmp_path):
    with pytest.raises(InputError, match=r"no metrics\.jsonl"):
        compare([tmp_path], last=1)


def test_a_run_beside_itself_is_two_rows(tmp_path):
    folder = run(tmp_path / "a", [3.0, 2.0])
    found = compare([folder, folder], last=1)
    assert [(row["run"], row["gap_percent"]) for row in found["rows"]] == [("a", 0.0), ("a", 0.0)]


def test_losses_are_compared_at_the_same_steps(tmp_path):
    whole = run(tmp_path / "whole", [9.0, 4.0, 2.0, 1.0])
    late = run(tmp_path / "late", [4.4, 2.2, 1.1, 0.5], first=2)
    found = compare([whole, late], last=2)
    assert (found["steps"], found["numbers"]) == (3, [2, 3, 4])
    assert [row["losses"] for row in found["rows"]] == [[4.0, 2.0, 1.0], [4.4, 2.2, 1.1]]
    assert math.isclose(found["rows"][1]["gap_percent"], 10.0)
    assert "steps 3 to 4" in lines(found)[-1]
    with pytest.raises(InputError, match=r"no step in common: .*whole has steps 1 to 4, .*later has steps 7 to 7"):
        compare([whole, run(tmp_path / "later", [1.0], first=7)], last=1)


def test_json_of_a_run_that_diverged_is_valid(tmp_path, capsys):
    folder = run(tmp_path / "a", [3.0, math.nan])
    assert main(["compare", str(folder), "--last", "1", "--json"]) == 0

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    row = json.loads(capsys.readouterr().out, parse_constant=refuse)["rows"][0]
    assert row["losses"] == [3.0, "NaN"]
    assert row["gap_percent"] == "NaN"


def described(folder, losses, *, fingerprint=None, vocab_size=320, last_step=None, **keys):
    """A run with its run file, model config and the state of a checkpoint."""
    run(folder, losses)
    values = {"source": "a.jsonl", "sequence_length": 32, "global_batch": 4, "steps": len(losses)} | keys
    (folder / "run.toml").write_text(RUN_TOML.format(**values))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    if fingerprint is not None:
        checkpoint = folder / "checkpoints" / f"step-{len(losses)}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(json.dumps({"data": fingerprint}))
    return folder


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, []),
        ({"sequence_length": 64}, ["data.sequence_length (32 and 64)"]),
        ({"global_batch": 8, "vocab_size": 400}, ["train.global_batch (4 and 8)", "vocab_size of the model (320 and 400)"]),
        ({"source": "b.jsonl"}, ["data.source (a.jsonl and b.jsonl)"]),
        ({"source": "b.jsonl", "fingerprint": "0" * 64}, []),  # the same tokens under another name
        ({"fingerprint": "1" * 64}, [f"tokens (fingerprint of the data) ({'0' * 12} and {'1' * 12})"]),
    ],
)
def test_runs_on_other_data_are_named_with_the_keys_that_differ(tmp_path, capsys, other, words):
    fingerprint = {"fingerprint": "0" * 64} if "fingerprint" in other else {}
    folders = [described(tmp_path / "a", [2.0, 2.0], **fingerprint), described(tmp_path / "b", [2.0, 2.2], **other)]
    warnings = [f"a and b differ in {', '.join(words)}: their losses are not comparable."] if words else []
    assert main(["compare", *map(str, folders), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["warnings"] == warnings
    assert captured.err == "".join(f"octavo: {warning}\n" for warning in warnings)


def test_other_weights_of_the_same_tokens_are_other_samples(tmp_path):
    folders = [described(tmp_path / name, [2.0, 2.0], fingerprint="0" * 64) for name in "ab"]
    for folder, weights in zip(folders, ("[1, 2]", "[2, 1]"), strict=True):
        text = (folder / "run.toml").read_text()
        (folder / "run.toml").write_text(text.replace('"a.jsonl"', f'["a.jsonl", "b.jsonl"]\nweights = {weights}'))
    (warning,) = compare(folders)["warnings"]
    assert "data.weights ([1.0, 2.0] and [2.0, 1.0])" in warning


def test_a_run_that_goes_on_and_a_longer_one_are_compared_at_the_steps_of_both(tmp_path):
    whole = described(tmp_path / "whole", [3.0, 2.0, 1.0, 1.0])
    going_on = described(tmp_path / "going", [3.0, 2.2], steps=4)
    with (going_on / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.')  # just being written
    found = compare([whole, going_on])
    assert found["numbers"] == [1, 2]
    assert math.isclose(found["rows"][1]["gap_percent"], 10.0)
    assert found["warnings"] == [
        "whole continues to step 4; compared are steps up to 2, at which its learning rate may differ.",
        "going has 2 of its 4 steps; compared are steps up to 2.",
    ]


def test_validations_are_columns_where_all_runs_have_one(tmp_path):
    folders = [run(tmp_path / name, [3.0, 2.0, 2.0]) for name in ("a", "b")]
    assert "validation" not in "".join(lines(compare(folders)))
    for folder, losses in zip(folders, ({1: 4.0, 2: 2.0}, {2: 2.1, 3: 9.0}), strict=True):
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        text = (json.dumps(r | ({"validation_loss": losses[r["step"]]} if r["step"] in losses else {})) for r in records)
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in text))
    found = compare(folders)
    assert found["validation_step"] == 2
    assert [row["validation_loss"] for row in found["rows"]] == [2.0, 2.1]
    assert math.isclose(found["rows"][1]["validation_gap_percent"], 5.0)
    table = lines(found)
    assert table[0].split() == ["run", "loss", "gap", "validation", "gap", "tokens/s"]
    assert table[2].split() == ["b", "2.0000", "+0.00%", "2.1000", "+5.00%", "10"]
    assert table[3] == "loss: step 3; validation: step 2"
    assert all(len(line) == len(table[0]) for line in table[:3])


def validated(folder, *, at, keys="", saved=None):
    """A run whose step `at` has a validation; saved: {step: the layout of its checkpoint}."""
    folder = described(folder, [3.0, 2.0, 2.0, 2.0])
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records[at - 1]["validation_loss"] = 2.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with (folder / "run.toml").open("a") as file:
        file.write(keys)
    for step, layout in (saved or {}).items():
        checkpoint = folder / "checkpoints" / f"step-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(json.dumps({"data": "0" * 64, "step": 4, "layout": layout}))
    return folder


@pytest.mark.parametrize(
    ("other", "count"),
    [
        ({}, None),
        ({"keys": "validate_batches = 16"}, None),  # the default
        ({"keys": "validate_batches = 8"}, 32),
        ({"keys": "micro_batch = 1"}, 16),
        ({"keys": "validate_batches = 32\nmicro_batch = 2"}, None),
        # A start that went on behind the step that is compared had another number.
        ({"keys": "validate_batches = 8", "saved": {2: {VALIDATED: 64}, 4: {VALIDATED: 32}}}, None),
        ({"saved": {1: {VALIDATED: 64}, 4: {VALIDATED: 32}}}, 32),
        ({"keys": "validate_batches = 8", "saved": {4: {"ranks": 2}}}, None),  # of an older version
        ({"keys": "validate_batches = 8", "saved": {1: {VALIDATED: 64}}}, 32),  # the start that is training
    ],
)
def test_validations_over_other_numbers_of_sequences_are_named(tmp_path, capsys, other, count):
    folders = [str(validated(tmp_path / "a", at=2)), str(validated(tmp_path / "b", at=2, **other))]
    said = (
        f"a and b differ in the number of sequences in a validation (64 and {count}; train.validate_batches x "
        "train.micro_batch or train.global_batch): validation losses are not comparable, unless the split has no more than "
        f"{count}."
    )
    assert main(["compare", *folders, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [line for line in found["warnings"] if "sequences" in line] == ([said] if count else [])
    assert main(["compare", *folders]) == 0
    assert (f"octavo: {said}\n" in capsys.readouterr().err) == (count is not None)


def test_validations_that_are_not_compared_may_cover_any_sequences(tmp_path):
    folders = [validated(tmp_path / "a", at=2), validated(tmp_path / "b", at=3, keys="validate_batches = 8")]
    assert compare(folders)["warnings"] == []


def test_a_name_is_the_shortest_end_of_the_path_that_no_other_run_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    paths = ["x/one/bf16", "x/two/bf16", "x/two", "x/two/../two/bf16", "."]
    assert names_of([tmp_path / path for path in paths]) == ["one/bf16", "two/bf16", "two", "two/bf16", tmp_path.name]
    monkeypatch.chdir("x")
    assert names_of([type(tmp_path)("."), type(tmp_path)("one")]) == ["x", "one"]


def test_a_reference_without_loss_has_no_gap(tmp_path):
    found = compare([run(tmp_path / "a", [0.0, 0.0]), run(tmp_path / "b", [1.0, 1.0])])
    assert math.isnan(found["rows"][1]["gap_percent"])


def test_losses_of_routers_count_by_their_coefficients_wherever_they_are_set(tmp_path):
    settings = {"source": "a", "sequence_length": 32, "steps": 2, "global_batch": 4}
    moe = {
        "none": "moe_load_balancing = 'none'",
        "some": "moe_load_balancing = 'aux_loss'",
        "coefficient": "moe_aux_loss_coeff = 0.02",
    }
    runs = {}
    for name, config in (("absent", False), ("on", True), ("none", True), ("some", False), ("coefficient", True)):
        runs[name] = run(tmp_path / name, [2.0, 2.0])
        (runs[name] / "run.toml").write_text(RUN_TOML.format(**settings) + (f"[moe]\n{moe[name]}\n" if name in moe else ""))
        (runs[name] / "model").mkdir()
        config = {"vocab_size": 8, "output_router_logits": config, "router_aux_loss_coef": 0.01}
        (runs[name] / "model" / "config.json").write_text(json.dumps(config))
    (warning,) = compare([runs["absent"], runs["on"]])["warnings"]
    assert "moe.moe_aux_loss_coeff (0.0 and 0.01)" in warning
    assert compare([runs["on"], runs["coefficient"]])["warnings"]
    assert not compare([runs["absent"], runs["none"]])["warnings"]
    assert not compare([runs["on"], runs["some"]])["warnings"]
