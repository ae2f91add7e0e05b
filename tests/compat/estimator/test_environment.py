"""Variables and arguments of a script, as SageMaker's training toolkit makes them."""

import json
from pathlib import Path

import pytest

import octavo
from octavo.compat.sagemaker.distribution import Layout
from octavo.compat.sagemaker.environment import (
    DRIVERS,
    TOOLKIT,
    arguments_of,
    check_hyperparameters,
    check_variables,
    inherited,
    shared_variables,
    variables_of,
)
from octavo.errors import InputError

VALUES = {"lr": 1e-4, "bf16": True, "name": "a b", "none": None, "sizes": [1, 2], "k": 3, "table": {"b": 1, "a": "x"}}


def test_arguments_are_sorted_text():
    assert arguments_of(VALUES) == [
        "--bf16", "True", "-k", "3", "--lr", "0.0001", "--name", "a b", "--none", "", "--sizes", "[1, 2]", "--table", "a=x,b=1",
    ]  # fmt: skip


def test_variables_are_json_and_text_as_it_is():
    layout = Layout(8, 0, None, {"context_parallel_degree": 8, "hybrid_shard_degree": 8})
    found = variables_of(
        layout, VALUES, {"train": "/j/input/data/train"}, Path("/j"), script="train.py", instance_type="ml.p5.48xlarge",
        arguments=["--k", "3"],
    )  # fmt: skip
    assert found["SM_HP_BF16"] == "true"
    assert found["SM_HP_LR"] == "0.0001"
    assert found["SM_HP_NAME"] == "a b"
    assert found["SM_HP_NONE"] == ""
    assert found["SM_HP_SIZES"] == "[1,2]"
    assert json.loads(found["SM_HP_MP_PARAMETERS"]) == layout.parameters
    assert json.loads(found["SM_HPS"]) == VALUES | {"mp_parameters": layout.parameters}
    assert found["SM_CHANNEL_TRAIN"] == "/j/input/data/train"
    assert json.loads(found["SM_CHANNELS"]) == ["train"]
    assert json.loads(found["SM_HOSTS"]) == ["algo-1"]
    assert (found["SM_CURRENT_HOST"], found["SM_NUM_GPUS"]) == ("algo-1", "0")
    assert (found["SM_MODEL_DIR"], found["SM_OUTPUT_DATA_DIR"]) == ("/j/model", "/j/output/data")
    assert json.loads(found["SM_USER_ARGS"]) == ["--k", "3"]
    assert json.loads(found["SM_TRAINING_ENV"])["hyperparameters"]["k"] == 3
    plain = variables_of(
        Layout(None, 0, None, None), {}, {}, Path("/j"), script="train.py", instance_type="local", arguments=[]
    )
    assert "SM_HP_MP_PARAMETERS" not in plain
    assert plain["SM_HPS"] == "{}"


@pytest.mark.parametrize(
    "values",
    [
        {1: 2}, {"": 1}, {"x": {1, 2}}, {"x": float("nan")}, {"x": object()}, {"a=b": 1}, {"a\0": 1}, {"x": "a\0"},
        {"x": {"y": "a\0"}}, {"x": "\ud83d"},
    ],
)  # fmt: skip
def test_what_no_argument_can_carry_is_refused(values):
    with pytest.raises(InputError, match="hyperparameters"):
        check_hyperparameters(values)


def test_what_no_variable_can_carry_is_refused():
    assert check_variables({"A": 1, "B": "x=y 'z'"}) == {"A": "1", "B": "x=y 'z'"}
    for values in ({"A=B": "x"}, {"": "x"}, {"A": "x\0"}, {"A": "\ud83d"}):
        with pytest.raises(InputError, match="environment"):
            check_variables(values)


def test_a_job_has_no_rank_of_its_estimator_and_absolute_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("PYTHONPATH", "own:/other")
    found = inherited()
    assert "RANK" not in found
    assert found["PYTHONPATH"].split(":")[:2] == [f"{tmp_path}/own", "/other"]


def test_a_job_finds_octavo_as_a_package_alone(monkeypatch):
    package = Path(octavo.__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{package}/compat/site:/other")
    assert inherited()["PYTHONPATH"].split(":") == ["/other", str(package.parent)]
    monkeypatch.setenv("PYTHONPATH", "")
    assert inherited()["PYTHONPATH"] == str(package.parent)


def test_hyperparameters_that_share_a_variable_are_named_with_the_one_that_it_has():
    layout, given = Layout(None, 0, None, None), {"lr": 1, "LR": 2, "a-b": 3, "a_b": 4}
    names = {"script": "train.py", "instance_type": "local", "arguments": []}
    said = "hyperparameters 'lr', 'LR' share SM_HP_LR, which has the value of 'LR'."
    assert list(shared_variables(given, TOOLKIT)) == [said]
    assert variables_of(layout, given, {}, Path("/j"), **names)["SM_HP_LR"] == "2"
    assert len(list(shared_variables(given, DRIVERS))) == 2
    assert variables_of(layout, given, {}, Path("/j"), **names, encoding=DRIVERS)["SM_HP_A_B"] == "4"
