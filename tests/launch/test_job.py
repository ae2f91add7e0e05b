"""Jobs as processes: what a script is given, how its end is told, and how another process reaches it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from octavo.errors import InputError, RunStopped
from octavo.launch import Job, JobFailed, PyTorch
from octavo.supervision import children, start_time

RANKS = {"torch_distributed": {"enabled": True}}
SCRIPT = """
import argparse, json, os, pathlib, signal, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--mode")
mode = parser.parse_args().mode
rank = os.environ.get("RANK")
data = pathlib.Path(os.environ.get("SM_CHANNEL_TRAIN", "."))
seen = {"argv": sys.argv[1:], "rank": rank, "world": os.environ.get("WORLD_SIZE"), "cwd": os.getcwd(),
        "files": sorted(path.name for path in data.iterdir()), "elastic": os.environ.get("TORCHELASTIC_RUN_ID")}
pathlib.Path(os.environ["SM_MODEL_DIR"], f"rank-{rank}.json").write_text(json.dumps(seen))
print("begun", rank, flush=True)
if mode == "saves":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
if mode in ("wait", "saves"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], f"pids-{rank}").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
if mode == "leaves":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], f"pids-{rank}").write_text(f"{child.pid}")
if mode == "error" and rank in (None, "1"):
    raise ValueError("no such thing")
if mode == "code":
    sys.exit(7)
if mode == "says":
    sys.exit("no data for 'rank'.")
if mode == "signal":
    os.kill(os.getpid(), 40)
if mode == "removes":
    import shutil
    shutil.rmtree(pathlib.Path(os.environ["SM_MODEL_DIR"]).parent)
if mode == "memory":
    sys.stderr.write("RuntimeError: [enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: 9 bytes\\n")
    sys.exit(1)
if mode == "helper":
    import helper
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SCRIPT)
    (tmp_path / "code" / "helper.py").write_text("print('helped')\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "training.json").write_text("{}")
    return tmp_path


def estimator(mode, **changes):
    given = {"entry_point": "train.py", "source_dir": "code", "hyperparameters": {"mode": mode}, "instance_type": "local"}
    return PyTorch(**(given | changes))


def ends(pids, seconds=100):
    deadline = time.monotonic() + seconds
    while any(start_time(pid) is not None for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def pids_of(job, count):
    files = [job.folder / "output" / "data" / f"pids-{rank}" for rank in (range(count) if count else [None])]
    assert job.until(lambda: all(file.exists() and file.read_text() for file in files), 100)
    return [int(pid) for file in files for pid in file.read_text().split()]


def test_a_job_gets_its_channels_and_gives_its_model(place, capfd):
    one = estimator("ok", role="arn", volume_size=30)
    assert "octavo: estimator: role, volume_size have no effect on this machine." in capfd.readouterr().err
    one.fit({"train": "data"}, job_name="first")
    assert "begun None" in capfd.readouterr().out
    folder = place / "jobs" / "first"
    assert one.model_data == str(folder / "model")
    seen = json.loads((folder / "model" / "rank-None.json").read_text())
    assert seen["argv"] == ["--mode", "ok"]
    assert seen["files"] == ["training.json"]
    assert seen["cwd"] == str(folder / "code")
    assert seen["rank"] is seen["elastic"] is None
    found = PyTorch.attach("first")
    assert found.latest_training_job.status == "Completed"
    assert found.hyperparameters() == {"mode": "ok"}
    found.logs()
    assert "begun None" in capfd.readouterr().out
    before = sorted(path.stat().st_mtime_ns for path in folder.rglob("*"))
    with pytest.raises(InputError, match="is not overwritten"):
        one.fit(job_name="first")
    assert sorted(path.stat().st_mtime_ns for path in folder.rglob("*")) == before
    with pytest.raises(InputError, match="Did you mean 'first'"):
        PyTorch.attach("frist")
    (folder / "state.json").write_text('{"status": ')
    with pytest.raises(InputError, match=r"state\.json was changed by hand"):
        PyTorch.attach("first").latest_training_job.wait()
    (folder / "job.json").write_text("{}")
    with pytest.raises(InputError, match="its estimator is missing"):
        PyTorch.attach("first")


def test_ranks_pass_on_the_first_error_and_its_exit_code(place, capfd):
    with pytest.raises(JobFailed, match="ValueError: no such thing") as failed:
        estimator("error", distribution=RANKS, instance_count=2).fit({"train": "data"}, logs=False)
    assert failed.value.exit_code == 1
    (folder,) = (place / "jobs").iterdir()
    ranks = [json.loads((folder / "model" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["world"] for one in ranks] == ["2", "2"]
    assert all(one["elastic"] for one in ranks)
    assert (folder / "output" / "failure").read_text() == "ValueError: no such thing\n"
    assert capfd.readouterr().out == ""
    with pytest.raises(JobFailed) as failed:
        estimator("code").fit(logs=False)
    assert failed.value.exit_code == 7
    with pytest.raises(JobFailed, match="exit code 1: its log ends with: no data for 'rank'"):
        estimator("says").fit(logs=False)
    with pytest.raises(JobFailed, match="exit code 168: the script was ended by signal 40"):
        estimator("signal").fit(logs=False)


def test_full_memory_is_answered_with_the_setting_that_divides_it(place):
    parameters = {"hybrid_shard_degree": 2}
    smp = RANKS | {"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}}
    values = {"mode": "memory", "max_context_width": 16384}
    code = (
        (place / "code" / "train.py").read_text().replace('"--mode")', '"--mode")\nparser.add_argument("--max_context_width")')
    )
    (place / "code" / "train.py").write_text(code)
    with pytest.raises(JobFailed, match="out of memory") as failed:
        estimator("memory", distribution=smp, instance_count=2, hyperparameters=values).fit(logs=False)
    advice = "= 1 puts whole sequences of 16384 tokens on each rank: a degree of 2 divides their activations"
    assert advice in str(failed.value)


def test_another_process_stops_a_job_and_nothing_of_it_stays(place):
    running = estimator("saves", distribution=RANKS, instance_count=2)
    running.fit(wait=False, job_name="background")
    job = running.latest_training_job
    pids = pids_of(job, 2)
    assert job.status == "InProgress"
    code = "from octavo.launch import PyTorch; PyTorch.attach('background').stop()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=place)
    assert (job.status, job.exit_code) == ("Stopped", 75)
    ends(pids, 0)
    with pytest.raises(RunStopped, match="had saved; run it again") as stopped:
        job.wait()
    assert stopped.value.exit_code == 75
    job.stop()  # nothing happens


@pytest.mark.parametrize(("distribution", "ranks"), [(RANKS, 2), (None, 0)])
def test_a_killed_job_is_told_from_a_finished_one_and_takes_its_ranks_along(place, distribution, ranks):
    one = estimator("wait", distribution=distribution, instance_count=max(1, ranks))
    one.fit(wait=False)
    job = one.latest_training_job
    pids = pids_of(job, ranks)
    os.kill(job.state["pid"], signal.SIGKILL)
    ends(pids[::2])
    for pid in pids[1::2]:  # what the ranks have started, in sessions of its own, is nobody's now
        os.kill(pid, signal.SIGKILL)
    assert job.until(lambda: job.status == "Failed", 100)
    assert "was killed" in job.describe()["FailureReason"]
    with pytest.raises(JobFailed, match="was killed"):
        job.wait()


def test_a_job_whose_launcher_is_killed_has_failed_and_leaves_nothing(place):
    """Its ranks end with it, and what they have started becomes the supervisor's, out of sessions of their own too."""
    one = estimator("wait", distribution=RANKS, instance_count=2)
    one.fit(wait=False)
    job = one.latest_training_job
    pids = pids_of(job, 2)
    (launcher,) = children(job.state["pid"])
    os.kill(launcher, signal.SIGKILL)
    assert job.until(lambda: job.status == "Failed", 100)
    assert job.exit_code == 128 + signal.SIGKILL
    ends(pids, 0)


def test_a_job_whose_folder_is_removed_has_failed_and_ends(place):
    with pytest.raises(JobFailed, match="its folder was removed"):
        estimator("removes").fit(logs=False)
    one = estimator("wait")
    one.fit(wait=False)
    job = one.latest_training_job
    pids = pids_of(job, 0)
    shutil.rmtree(job.folder)
    assert job.status == "Failed"
    ends(pids)


@pytest.mark.parametrize("mode", ["removes", "ok"])
def test_a_job_may_have_ended_before_it_is_looked_at(place, monkeypatch, mode):
    processes, until = [], Job.until

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            processes.append(self)

    def late(job, reached, seconds):
        processes[0].wait(60)
        return until(job, reached, seconds)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(Job, "until", late)
    one = estimator(mode)
    one.fit(wait=False)
    assert one.latest_training_job.status == {"removes": "Failed", "ok": "Completed"}[mode]


def test_an_interrupt_while_a_job_starts_leaves_nothing_of_it(place, monkeypatch):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self.pid)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(Job, "until", interrupt)
    with pytest.raises(KeyboardInterrupt):
        estimator("wait").fit(wait=False)
    assert [start_time(pid) for pid in started] == [None]
    assert not list((place / "jobs").iterdir())


def test_what_a_script_leaves_behind_ends_with_the_job(place):
    one = estimator("leaves")
    one.fit(logs=False)
    pids = pids_of(one.latest_training_job, 0)
    assert pids
    assert [start_time(pid) for pid in pids] == [None] * len(pids)


def test_a_job_ends_with_the_process_that_waits_for_it_and_at_max_run(place):
    code = """from octavo.launch import PyTorch
PyTorch("train.py", "code", {"mode": "wait"}, "local").fit(job_name="waited")"""
    waiting = subprocess.Popen([sys.executable, "-c", code], cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not (place / "jobs" / "waited" / "output" / "data" / "pids-None").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job = PyTorch.attach("waited").latest_training_job
    pids = pids_of(job, 0)
    waiting.kill()
    waiting.wait()
    ends(pids)
    assert job.until(lambda: job.status == "Stopped", 100)
    with pytest.raises(RunStopped, match="max_run = 1 seconds were over"):
        estimator("wait", max_run=1).fit(logs=False)


def test_a_job_whose_waiting_process_has_ended_before_it_began_is_stopped(place):
    """The kernel tells a supervisor of an end that comes later; an earlier one it has to see by itself."""
    one = estimator("ok")
    one.fit(logs=False, job_name="first")
    folder = place / "jobs" / "second"
    shutil.copytree(place / "jobs" / "first", folder)
    (folder / "state.json").unlink()
    content = json.loads((folder / "job.json").read_text()) | {
        "command": [sys.executable, "-c", "import time; time.sleep(600)"]
    }
    (folder / "job.json").write_text(json.dumps(content))
    gone = subprocess.Popen(["true"])
    gone.wait()
    command = [sys.executable, "-m", "octavo.launch.supervisor", str(folder)]
    subprocess.run(command, env=os.environ | {"OCTAVO_LAUNCH_WAITS": str(gone.pid)}, check=False)
    assert PyTorch.attach("second").latest_training_job.status == "Stopped"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_supervisor_lets_the_script_save(place, number):
    """Whichever comes, the script gets SIGTERM, which ends this one with 75."""
    if signal.getsignal(number) is signal.SIG_IGN:  # tests under nohup
        signal.signal(number, signal.SIG_DFL)
    running = estimator("saves")
    running.fit(wait=False)
    job = running.latest_training_job
    pids = pids_of(job, 0)
    os.kill(job.state["pid"], number)
    assert job.until(lambda: job.status not in ("InProgress", "Stopping"), 100)
    assert (job.status, job.exit_code) == ("Stopped", 75)
    ends(pids, 0)


def test_a_script_of_the_sdk_starts_its_job_unchanged_and_passes_its_exit_code_on(place):
    (place / "launch.py").write_text(
        """import sagemaker
from sagemaker.inputs import TrainingInput
from sagemaker.pytorch import PyTorch
estimator = PyTorch("train.py", "2.3.1", "py311", "code", {"mode": "code"}, role=sagemaker.get_execution_role(),
                    instance_type="local", sagemaker_session=sagemaker.Session())
estimator.fit(inputs={"train": TrainingInput("data")}, job_name="sdk")
"""
    )
    done = subprocess.run([sys.executable, "-m", "octavo.compat", "launch.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert "estimator: framework_version, py_version, role, sagemaker_session have no effect" in done.stderr
    assert "job sdk failed with exit code 7" in done.stderr
    assert "Traceback" not in done.stderr
    seen = json.loads((place / "jobs" / "sdk" / "model" / "rank-None.json").read_text())
    assert seen["files"] == ["training.json"]


def test_links_in_circles_are_copied_once_and_jobs_are_no_code(place):
    (place / "code" / "again").symlink_to(place / "code")
    (place / "code" / "lib").mkdir()
    (place / "code" / "lib" / "part.py").write_text("")
    estimator("ok", output_path=str(place / "code" / "others")).fit(logs=False)
    one = estimator("ok", output_path=f"file://{place}/code/jobs")
    one.fit(logs=False)
    one.fit(logs=False, job_name="second")
    code = PyTorch.attach("second", output_path=f"file://{place}/code/jobs").latest_training_job.folder / "code"
    copied = sorted(path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file())
    assert copied == ["helper.py", "lib/part.py", "train.py"]


def test_a_helper_that_was_not_taken_along_is_named(place):
    with pytest.raises(JobFailed, match="Give source_dir"):
        PyTorch("code/train.py", hyperparameters={"mode": "helper"}, instance_type="local").fit(logs=False)
    PyTorch("train.py", "code", {"mode": "helper"}, "local").fit(logs=False)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"entry_pont": "x"}, "unknown argument 'entry_pont' of PyTorch. Did you mean 'entry_point'?"),
        ({"hyperparametres": {}}, "Did you mean 'hyperparameters'?"),
        ({"git_config": {"repo": "x"}}, "clone the repository"),
        ({"instance_type": None}, "instance_type is missing"),
        ({"entry_point": "trian.py"}, "Did you mean 'train.py'?"),
        ({"entry_point": "run.sh"}, "not a Python script"),
        ({"entry_point": "../outside.py"}, "outside.py"),
        ({"source_dir": "nowhere"}, "not a folder"),
        ({"source_dir": "s3://bucket/code.tar.gz"}, "folder of this machine"),
        ({"input_mode": "Pipe"}, "'Pipe'"),
        ({"max_run": 0}, "max_run = 0"),
        ({"max_run": float("nan")}, "max_run = nan"),
        ({"dependencies": ["nowhere"]}, "dependencies: 'nowhere' does not exist"),
        ({"entry_point": "~no-such-user/train.py"}, "no such user"),
        ({"hyperparameters": {"mode": "x" * 200_000}}, "too long for the variables of a process"),
        ({"hyperparameters": {"mp_parameters": {}}}, "distribution"),
        ({"output_path": "nonsense://x"}, "nonsense"),
        ({"output_path": ""}, "output_path is empty"),
    ],
)
def test_a_wrong_call_is_refused_and_leaves_nothing(place, arguments, part):
    (place / "outside.py").write_text("")
    with pytest.raises(InputError) as refused:
        estimator("ok", **arguments).fit()
    assert part in str(refused.value)
    assert not list(place.glob("jobs/*"))


def test_dependencies_lie_beside_the_script_and_replace_nothing(place):
    (place / "lib").mkdir()
    (place / "lib" / "part.py").write_text("")
    (place / "train.py").write_text("")
    one = estimator("ok", dependencies=["lib", "data/training.json"])
    one.fit(logs=False)
    code = one.latest_training_job.folder / "code"
    copied = sorted(path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file())
    assert copied == ["helper.py", "lib/part.py", "train.py", "training.json"]
    with pytest.raises(InputError, match=r"would replace 'train\.py'"):
        estimator("ok", dependencies=["train.py"]).fit(job_name="twice")
    assert not (place / "jobs" / "twice").exists()


@pytest.mark.parametrize(
    ("fit", "part"),
    [({"inputs": "nowhere"}, "nowhere"), ({"job_name": "../up"}, "not a job name"), ({"inputs": "nonsense://x"}, "nonsense")],
)
def test_a_wrong_fit_is_refused_and_leaves_no_job(place, fit, part):
    with pytest.raises(InputError, match=part):
        estimator("ok").fit(**fit)
    assert not list(place.glob("jobs/*"))
