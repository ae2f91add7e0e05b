"""The closing text of a run: its figures, its sample, and commands that work as they are printed."""

import dataclasses
import json
import shlex
import shutil

import pytest

from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.run.compare import compare
from octavo.run.summary import Result, summarise, summary_lines

SUMMARY_OF = {"steps": 380, "first_loss": 8.3612, "averaged": 38, "tokens_per_second": 3167.4, "seconds": 120.0}


@pytest.fixture
def result(tmp_path, monkeypatch):
    """A finished demo with its bf16 twin, in a folder with the usual files."""
    from octavo.run.summary import Summary

    monkeypatch.chdir(tmp_path)
    config = RunConfig.from_dict(
        {"model": {"source": "llama-tiny"}, "data": {"source": "a.txt", "sequence_length": 32},
         "train": {"steps": 380, "global_batch": 8, "output": "runs/demo"}}
    )  # fmt: skip
    for name in ("checkpoints", "model", "tokenizer"):
        (config.output / name).mkdir(parents=True)
    for name in ("run.toml", "metrics.jsonl", "losses.png", "model/config.json"):
        (config.output / name).touch()
    return Result(
        config.output,
        config,
        Summary(loss=5.3154, validation_loss=5.3852, **SUMMARY_OF),
        Summary(loss=5.3042, validation_loss=5.3637, **SUMMARY_OF),
    )


def test_the_text_of_a_demo(result):
    assert summary_lines(result) == [
        "",
        "The run is in runs/demo: run.toml, metrics.jsonl, losses.png, checkpoints/,",
        "  model/config.json, tokenizer/.",
        "Loss 8.3612 → 5.3154 (mean of 38 steps); validation 5.3852; 3,167 tok/s.",
        "Cost of FP8: loss 5.3154 in FP8 and 5.3042 in bf16, a gap of +0.21%.",
        "In validation 5.3852 and 5.3637, a gap of +0.40%.",
        "",
        "Next:",
        "  octavo sample runs/demo --prompt 'The first'",
        "  octavo export runs/demo --to runs/demo/export",
        "  octavo compare runs/demo/bf16 runs/demo",
        "  octavo train runs/demo/run.toml fp8.recipe=current train.output=runs/demo-current",
    ]


def test_a_run_on_token_ids_has_no_tokenizer_to_sample_with(result):
    (result.folder / "tokenizer").rmdir()
    assert commands_of(result)[0][1] == "export"


def test_a_sample_is_shown_in_a_few_lines_that_a_terminal_only_prints(result):
    sample = "Return the \x1b[31mtuple\x07 of\tits items.\n\n" + "word " * 200
    lines = summary_lines(dataclasses.replace(result, sample=sample))
    start = lines.index("Sample:")
    shown = lines[start + 1 : lines.index("Next:") - 1]
    assert shown[0] == "  Return the  [31mtuple  of   its items."
    assert shown[1] == ""
    assert (len(shown), shown[-1]) == (7, "  …")
    assert all(len(line) <= 80 for line in shown)
    assert json.dumps(dataclasses.replace(result, sample=sample).as_dict()["sample"]) == json.dumps(sample)
    assert "Sample:" not in summary_lines(result)
    assert "  Once." in summary_lines(dataclasses.replace(result, sample="Once."))


def test_a_result_is_shown_in_a_line(result):
    assert repr(result) == "Result(steps=380, loss=5.3154, validation_loss=5.3852, folder='runs/demo')"
    without = dataclasses.replace(result, summary=dataclasses.replace(result.summary, validation_loss=None))
    assert repr(without) == "Result(steps=380, loss=5.3154, folder='runs/demo')"


def commands_of(result):
    return [shlex.split(line) for line in summary_lines(result) if line.startswith("  octavo ")]


def test_on_several_ranks_the_second_training_has_as_many(result, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert commands_of(result)[-1][-2:] == ["--ranks", "4"]
    monkeypatch.setenv("WORLD_SIZE", "8")  # two hosts: each would need its own command
    assert [command[1] for command in commands_of(result)] == ["sample", "export", "compare"]


def test_each_command_works_as_printed_in_a_folder_with_spaces_that_was_moved(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = tiny_run(steps=2)
    assert main(["train", str(run.file), "train.compare_bf16=true"]) == 0
    capsys.readouterr()
    moved = tmp_path / "my runs" / "-it's here"
    moved.parent.mkdir()
    shutil.move(run.output, moved)
    monkeypatch.chdir(moved.parent)
    for number in (1, 2):  # a second time too: the export of the first is there
        assert main(["train", str(moved / "run.toml"), f"train.output={moved.name}"]) == 0
        printed = capsys.readouterr().out.split("Next:\n")[1].splitlines()
        commands = [shlex.split(line) for line in printed]
        assert [command[:2] for command in commands] == [["octavo", name] for name in ("sample", "export", "compare", "train")]
        assert commands[0] == ["octavo", "sample", f"./{moved.name}", "--prompt", "The first"]
        for command in commands[1:]:
            assert main(command[1:]) == 0, command
        assert len(list(moved.glob("export*"))) == number
        capsys.readouterr()
    again = RunConfig.from_file(moved.parent / f"{moved.name}-current" / "run.toml")
    assert again.fp8.recipe == "current"


def test_a_comparison_gives_the_gap_of_the_summary(tmp_path):
    folders = [tmp_path / "run" / "bf16", tmp_path / "run"]
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        records = ({"step": n, "loss": (3 + number) / n, "tokens_per_second": 1.0, "step_seconds": 1.0} for n in range(1, 381))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    bf16, own = (summarise(folder / "metrics.jsonl", 380) for folder in folders)
    found = compare(folders)
    assert (found["last"], own.averaged) == (38, 38)
    assert [row["loss"] for row in found["rows"]] == [bf16.loss, own.loss]
    assert found["rows"][1]["gap_percent"] == Result(folders[1], None, own, bf16).gap_percent
