"""Layouts and models at random: drawn from a number alone, and equal."""

import errno
import json
import os
import re
import subprocess
import sys

import pytest
from verified import comparisons

from octavo._version import __version__
from octavo.errors import InputError
from octavo.models.families import DECODER_FAMILIES
from octavo.verify.fuzz import _equal_cases, drawn, fuzz

CASES = range(40)
FAULTY = (1011, 1012, 1035, 1039, 1060, 1121, 1126, 1150, 1191)
"""Of four ranks, in which faults were found."""


def test_a_case_is_drawn_from_its_number_alone(tmp_path):
    cases = [drawn(seed, tmp_path) for seed in CASES]
    assert [each.text for each in cases] == [drawn(seed, tmp_path).text for seed in CASES]
    assert len({each.text for each in cases}) == len(CASES)
    assert {each.model["model_type"] for each in cases} == set(DECODER_FAMILIES)
    for key in ("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree"):
        assert {1, 2} <= {getattr(each.config.parallel, key) for each in cases}
    assert {each.config.fp8.recipe for each in cases} == {"delayed", "current", "rowwise", "block"}
    assert {each.config.optimizer.name for each in cases} == {"adamw", "muon"}
    assert {each.config.lora.base for each in cases if each.config.lora.rank is not None} == {"params_dtype", "fp8"}


@pytest.mark.parametrize("seed", [*CASES, *FAULTY])
@pytest.mark.long
def test_a_case_is_equal(seed, tmp_path):
    case = drawn(seed, tmp_path, 4 if seed in FAULTY else None)
    degrees = case.config.parallel.model_dump(include={name for name in vars(case.config.parallel) if name.endswith("_degree")})
    found = comparisons(case.config, case.ranks, degrees, seeds=[seed])
    assert {name: each.first for name, each in found.items() if each.first is not None} == {}, case.text


@pytest.mark.long
def test_the_command_repeats_a_case(tmp_path):
    output = tmp_path / "cases.json"
    command = ["octavo", "verify", "--fuzz", "1", "--seed", "4", "--output", str(output)]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 cases from seed 4 are equal" in done.stdout
    (case,) = json.loads(output.read_text())["cases"]
    assert (case["seed"], case["fault"]) == (4, None)
    assert re.sub(".*/", "", case["case"]) == re.sub(".*/", "", drawn(4, tmp_path).text)


def test_a_report_goes_on_where_it_ended(tmp_path):
    output, texts = tmp_path / "cases.json", [drawn(seed, tmp_path, 4).text for seed in (7, 8)]
    cases = [{"seed": seed, "case": text, "fault": None, "seconds": 2.0} for seed, text in zip((7, 8), texts, strict=True)]
    output.write_text(json.dumps({"machine": "two cores", "version": __version__, "equal": 1, "cases": cases}))
    figures, text = fuzz(2, 7, 4, output=output, resume=True)  # starts no rank
    assert figures["machine"] == "two cores"
    assert (figures["cases"], figures["equal"], figures["verified"]) == (cases, 2, True)
    assert text == ["2 of 2 cases from seed 7 are equal"]
    assert json.loads(output.read_text()) == figures
    for count, seed, whole in ((1, 7, "--fuzz 2 --seed 7"), (2, 8, "--fuzz 3 --seed 7"), (1, 5, "--fuzz 4 --seed 5")):
        with pytest.raises(InputError, match=f"has cases 7 to 8, .* Give {whole}, or another"):
            fuzz(count, seed, 4, output=output, resume=True)
    assert json.loads(output.read_text()) == figures
    # By another version, with a fault, or drawn as another run: verified.
    for report in (
        {"version": "0", "cases": cases},
        {"version": __version__, "cases": [case | {"fault": "loss of step 1"} for case in cases]},
    ):
        output.write_text(json.dumps(report))
        assert _equal_cases(output) == {}
    output.write_text(json.dumps({"version": __version__, "cases": [case | {"case": "another"} for case in cases]}))
    assert (7, texts[0]) not in _equal_cases(output)
    for other in ("{", "[]", '{"verified": true}'):
        output.write_text(other)
        with pytest.raises(InputError, match="is not a report of octavo verify --fuzz"):
            fuzz(2, 7, 4, output=output, resume=True)


def test_what_was_found_is_printed_where_the_disk_is_full(tmp_path, monkeypatch, capsys):
    from octavo import cli, storage

    output, text = tmp_path / "cases.json", drawn(7, tmp_path, 4).text
    case = {"seed": 7, "case": text, "fault": None, "seconds": 2.0}
    output.write_text(json.dumps({"version": __version__, "cases": [case]}))

    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(storage, "write_atomic", full)
    command = ["verify", "--fuzz", "1", "--seed", "7", "--ranks", "4", "--resume", "--output", str(output)]
    assert cli.main(command) == 1
    said = capsys.readouterr()
    assert "1 of 1 cases from seed 7 are equal" in said.out
    assert "No space left on device" in said.err
    assert "is in" not in said.out


def test_a_reader_that_leaves_early_is_no_fault(tmp_path, monkeypatch):
    from octavo import cli

    output, text = tmp_path / "cases.json", drawn(7, tmp_path, 4).text
    case = {"seed": 7, "case": text, "fault": None, "seconds": 2.0}
    output.write_text(json.dumps({"version": __version__, "cases": [case]}))
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        command = ["verify", "--fuzz", "1", "--seed", "7", "--ranks", "4", "--resume", "--output", str(output)]
        assert cli.main(command) == 0
    assert json.loads(output.read_text())["equal"] == 1


def test_a_closed_stderr_changes_no_exit_code(monkeypatch):
    from octavo import cli

    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["verify", "--fuzz", "1", "--ranks", "1"]) == InputError.exit_code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", "run.toml"], "give --fuzz N, or leave --resume out"),
        ([], "no run file"),
        (["--fuzz", "2", "run.toml"], "leave run.toml out"),
        (["--seed", "2", "run.toml"], "give --fuzz 1"),
        (["--ranks", "1", "run.toml"], "--ranks 1: a layout needs at least 2 ranks"),
        (["--ranks", "100000", "run.toml"], "Give --ranks 256 or less"),
        (["--fuzz", "1", "--ranks", "257"], "Give --ranks 256 or less"),
    ],
)
def test_either_a_run_file_or_draws(arguments, message, capsys):
    from octavo.cli import main

    assert main(["verify", *arguments]) == InputError.exit_code
    assert message in capsys.readouterr().err
