"""Checkpoints at an address: shared by jobs, copied before and after, and addresses that are refused."""

import pytest

from octavo.compat.sagemaker.checkpoints import checkpoints_of
from octavo.compat.sagemaker.keys import ESTIMATOR
from octavo.errors import InputError
from octavo.launch import JobFailed, PyTorch

SCRIPT = """
import pathlib, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "--resume_from_checkpoint" in given:
    print("resumed at", pathlib.Path(given["--resume_from_checkpoint"], "step").read_text())
folder = pathlib.Path(given["--checkpoint_dir"], "llama_v2-10steps")
folder.mkdir(parents=True, exist_ok=True)
(folder / "step").write_text("10")
if "--fails" in given:
    sys.exit(3)
"""
GIVEN = {"checkpoint_dir": "/opt/ml/checkpoints"}


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(values, **arguments):
        one = PyTorch("train.py", hyperparameters=GIVEN | values, instance_type="local", **arguments)
        one.fit()
        return one.latest_training_job.folder

    return run


@pytest.mark.long(lambda address: "file:" in address)
@pytest.mark.parametrize("address", ["kept", "file://{}/kept", "local://{}/kept"])
def test_the_next_job_resumes_from_the_address_also_of_a_failed_one(job, tmp_path, capfd, address):
    address = address.format(tmp_path)
    with pytest.raises(JobFailed, match="exit code 3"):
        job({"fails": 1}, checkpoint_s3_uri=address)
    assert (tmp_path / "kept" / "llama_v2-10steps" / "step").read_text() == "10"
    capfd.readouterr()
    values = {"resume_from_checkpoint": "/opt/ml/checkpoints/llama_v2-10steps"}
    folder = job(values, checkpoint_s3_uri=address)
    assert capfd.readouterr().out == "resumed at 10\n"
    assert (folder / "checkpoints").is_symlink() == (not address.startswith("local:"))


def test_without_an_address_they_stay_in_the_job(job, capfd):
    folder = job({}, checkpoint_local_path="/opt/ml/checkpoints")
    assert (folder / "checkpoints" / "llama_v2-10steps" / "step").is_file()
    assert "estimator: checkpoint_local_path has no effect" in capfd.readouterr().err


def test_a_folder_in_the_jobs_own(job, tmp_path):
    path = "/opt/ml/checkpoints/deep"
    folder = job({"checkpoint_dir": path}, checkpoint_s3_uri="kept", checkpoint_local_path=path)
    assert (folder / "checkpoints" / "deep").resolve() == tmp_path / "kept"
    assert (tmp_path / "kept" / "llama_v2-10steps" / "step").is_file()


@pytest.mark.parametrize(
    ("address", "path", "part"),
    [
        ("", None, "checkpoint_s3_uri is empty"),
        ("train.py", None, "checkpoint_s3_uri = 'train.py' is not a folder"),
        ("train.py/below", None, "cannot be used"),
        ("nonsense://x", None, "checkpoint_s3_uri = 'nonsense://x'"),
        ("kept", "/tmp/checkpoints", "checkpoint_local_path = '/tmp/checkpoints'"),
        ("kept", "/opt/ml/checkpoints/../model", "checkpoint_local_path"),
    ],
)
def test_what_is_no_address_of_checkpoints_is_refused(tmp_path, monkeypatch, address, path, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(InputError) as refused:
        checkpoints_of(address, path, ESTIMATOR)
    assert part in str(refused.value)
