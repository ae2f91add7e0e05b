"""Paths below /opt/ml as those of a job: in arguments and variables of a script that runs, and those that no job has."""

import json
from pathlib import Path

import pytest

from octavo.compat.sagemaker.container_paths import mapped
from octavo.errors import InputError
from octavo.launch import PyTorch

SCRIPT = """
import json, os, pathlib, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
pathlib.Path(given["--checkpoint_dir"], "state.json").write_text("{}")
seen = {"argv": given, "cache": os.environ["CACHE"], "hps": json.loads(os.environ["SM_HPS"]),
        "data": sorted(path.name for path in pathlib.Path(given["--training_dir"]).iterdir())}
pathlib.Path(given["--model_dir"], "seen.json").write_text(json.dumps(seen))
"""
GIVEN = {
    "checkpoint_dir": "/opt/ml/checkpoints",
    "training_dir": "/opt/ml/input/data/train",
    "model_dir": "/opt/ml/model/",
    "elsewhere": "/data/opt/ml/model",
    "steps": 3,
}


def test_a_script_reads_and_writes_in_its_job(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.json").write_text("{}")
    environment = {"CACHE": "/opt/ml/output/data:/tmp"}
    one = PyTorch("train.py", hyperparameters=GIVEN, environment=environment, instance_type="local", wait=False)
    one.fit({"train": "data"}, job_name="first", logs=False)
    folder = tmp_path / "jobs" / "first"
    error = capfd.readouterr().err
    assert "estimator: wait has no effect on this machine." in error
    assert f"paths below /opt/ml are those of the job: {folder}" in error
    seen = json.loads((folder / "model" / "seen.json").read_text())
    assert seen["data"] == ["a.json"]
    assert seen["argv"]["--checkpoint_dir"] == seen["hps"]["checkpoint_dir"] == str(folder / "checkpoints")
    assert (seen["argv"]["--elsewhere"], seen["argv"]["--steps"]) == ("/data/opt/ml/model", "3")
    assert seen["cache"] == f"{folder}/output/data:/tmp"
    assert (folder / "checkpoints" / "state.json").is_file()
    assert one.hyperparameters() == GIVEN


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("/opt/ml", "/job"),
        ("--out=/opt/ml/output/x.json", "--out=/job/output/x.json"),
        (["/opt/ml/model", 3, None], ["/job/model", 3, None]),
        ({"a": "/opt/ml/code/b.py"}, {"a": "/job/code/b.py"}),
        ("'/opt/ml/model' and /opt/ml/model", "'/job/model' and /job/model"),
        ("/opt/mlx/model", "/opt/mlx/model"),
        ("file:///opt/ml/output/runs", "file:///job/output/runs"),
        ("s3://bucket/opt/ml/model", "s3://bucket/opt/ml/model"),
        ('{"path": "/opt/ml/model"}', '{"path": "/job/model"}'),
        (True, True),
    ],
)
def test_values(value, wanted):
    assert mapped(value, Path("/job"), ["train"], "x") == wanted


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "/opt/ml/input/data/test/a",
            r"hyperparameters\['data'\] = .* no channel 'test'.*Channels of fit\(inputs=\{…\}\): train",
        ),
        ("/opt/ml/failure", "a job has the folders /opt/ml/checkpoints, /opt/ml/code"),
        ("/opt/ml/model/../../etc", "a job has the folders"),
    ],
)
def test_a_folder_that_no_job_has_is_refused_before_anything_starts(value, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "data").mkdir()
    with pytest.raises(InputError, match=message):
        PyTorch("train.py", hyperparameters={"data": value}, instance_type="local").fit({"train": "data"})
    assert not (tmp_path / "jobs").exists()


@pytest.mark.parametrize("name", ["training_recipe", "recipe_overrides"])
def test_recipes_are_refused_with_the_way(name):
    with pytest.raises(InputError, match=rf"{name} = 'x': HyperPod recipes are not supported: give a script as entry_point"):
        PyTorch("train.py", instance_type="local", **{name: "x"})
