"""One rank of a job has a fault: the job ends in time, and the first message names the rank, its phase and its failure.

Real ranks under torchrun on this machine's CPU, joined by gloo, with real signals (`faulty.py`): `octavo train`, or, for the
end of the launcher, a loop of collectives without a model. torchrun's own lines in between are ignored. A job ends in time if
it ends before the timeout of a rank that is late.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import command_lines
from octavo.run.metrics import read_metrics

pytestmark = pytest.mark.faults

TIMEOUT, GRACE = 100, 20  # of ranks that a busy host leaves waiting
SHORT = ["launch.timeout=5", "launch.grace=4"]  # of ranks that do not come back
BUSY_SECONDS = 60  # for a launcher to notice, to end the others and to leave
STEP, STEPS = 4, 6
FAULTY = Path(__file__).with_name("faulty.py")
TORCHRUN_LINE = re.compile(r"[EWI]\d{4} \d\d:\d\d:\d\d.* .*torch/distributed/elastic/")


class Job:
    """torchrun with several ranks, its output in files."""

    def __init__(self, folder, command, *, fault="none", ranks=3, restarts=0, **environment):
        self._fault = folder / "fault"
        launcher = ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        self.process = command_lines.CommandLine(
            command_lines.torchrun,
            folder,
            [*launcher, *rendezvous, str(FAULTY), fault, *map(str, command)],
            ranks * (1 + restarts),
            environment={"FAULT_FILE": str(self._fault), "OMP_NUM_THREADS": "1"} | environment,
        )

    def wait(self):
        code = self.process.wait(timeout=500)
        self.ended = time.time()
        return code

    @property
    def after_fault(self):
        """Seconds between the fault and the end of the job."""
        return self.ended - float(self._fault.read_text())

    @property
    def said(self):
        """The lines on stderr that are not the launcher's, up to its report."""
        ours = self.process.stderr.partition('Traceback (most recent call last):\n  File "<frozen runpy>"')[0]
        return [line for line in ours.splitlines() if not TORCHRUN_LINE.match(line)]

    def pids(self, count):
        """Of the ranks, once they are all training."""
        while len(found := re.findall(r"pid (\d+)\n", self.process.stdout)) < count:
            assert self.process.poll() is None, self.process.stderr
            time.sleep(0.01)
        return [int(pid) for pid in found]


@pytest.fixture
def job(tmp_path):
    """Starts jobs; jobs of a failed test are killed."""
    with contextlib.ExitStack() as stack:

        def start(command, name="job", **settings):
            started = Job(tmp_path / name, command, **settings)
            stack.callback(started.process.close)
            return started

        yield start


@pytest.fixture
def command(tiny_run):
    """The command of the three ranks."""
    return train(tiny_run(steps=STEPS, every=2), "train.global_batch=6")


def train(run, *overrides):
    return ["train", run.file, f"launch.timeout={TIMEOUT}", f"launch.grace={GRACE}", *overrides]


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return False


def ends_with(job, failure):
    """The job fails in time; the first line of any rank matches the failure (an expression), which is reported once."""
    assert job.wait() == 1, job.process.stderr
    assert re.match(f"octavo: {failure}", job.said[0]), job.process.stderr
    assert job.process.stderr.count("octavo:") == 1, job.process.stderr
    assert job.after_fault < TIMEOUT, job.process.stderr


@pytest.mark.long(lambda phase: phase == "data")
@pytest.mark.parametrize("phase", ["data", "backward", "checkpoint"])
def test_a_rank_that_is_killed(job, command, phase):
    job = job(command, fault=f"kill:{phase}:{STEP}:1")
    ends_with(job, f"rank 1 of 3 was killed in {phase} of step {STEP} ")
    assert job.said[1:] == []


def test_rank_0_killed_before_the_first_step(job, command):
    ends_with(job(command, fault="kill:start:0:0"), "rank 0 of 3 was killed in start, before the first step ")


@pytest.mark.long
def test_a_rank_that_is_frozen(job, command):
    job = job([*command, *SHORT], fault=f"freeze:backward:{STEP}:0")
    ends_with(job, f"rank 0 of 3 has been silent for [5-7] s in backward of step {STEP} ")
    assert job.said[1:] == []


def test_a_rank_that_raises(job, command):
    job = job(command, fault=f"raise:forward:{STEP}:2")
    ends_with(job, f"rank 2 of 3 failed in forward of step {STEP}: ValueError: the planted fault")
    assert job.said[1].startswith("[rank2]: Traceback")
    assert job.said[-2] == "[rank2]: ValueError: the planted fault"
    assert "octavo doctor --json" in job.said[-1]
    assert all(line.startswith("[rank2]:") for line in job.said[1:])


def test_a_wrong_input_that_every_rank_finds_is_said_once(job, command):
    job = job(command, fault="input:start:0:*")
    ends_with(job, "data.source = 'nowhere' does not exist: name another")
    assert job.said[1:] == []
    assert set(re.findall(r"exitcode  : (\S+) \(pid", job.process.stderr)) <= {"2", "-15"}  # −15: by torchrun, on its way out


def test_a_rank_that_keeps_the_others_waiting(job, command):
    job = job([*command, *SHORT], fault=f"stall:data:{STEP}:2")
    ends_with(job, f"rank 2 of 3 has not moved for [5-7] s in data of step {STEP}, and the")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_launcher_is_killed_or_asked_to_stop(job, number):
    job = job(["demo", TIMEOUT, GRACE], DEMO_STEPS="100000")
    pids = job.pids(3)
    job.process.kill(number)
    job.wait()
    deadline = time.time() + BUSY_SECONDS
    while any(map(alive, pids)) and time.time() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))
    if number == signal.SIGTERM:
        assert job.said == [job.said[0]] * 3  # a stop is no failure; octavo train reports it once
        assert re.fullmatch(r"octavo: stopped after step \d+ of 100000, saved\.", job.said[0])


def test_a_restarted_job_does_not_find_the_fault_of_the_one_before(job):
    job = job(["demo", TIMEOUT, GRACE], fault=f"kill:backward:{STEP}:1", restarts=1)
    assert job.wait() == 0, job.process.stderr
    assert job.process.stderr.count("octavo:") == 1
    assert len(re.findall(r"pid (\d+)\n", job.process.stdout)) == 6


# octavo train on two ranks, restarted by torchrun.


def losses(run):
    return [
        (record["step"], record["loss"].hex(), record["grad_norm"].hex())
        for record in read_metrics(run.output / "metrics.jsonl")
    ]


@pytest.fixture(scope="session")
def of_two_ranks(tmp_path_factory, tiny_run_in):
    """An undisturbed run on two ranks."""
    folder = tmp_path_factory.mktemp("two-ranks")
    run = tiny_run_in(folder / "tiny", steps=STEPS, every=2)
    job = Job(folder / "job", train(run), ranks=2)
    try:
        assert job.wait() == 0, job.process.stderr
    finally:
        job.process.close()
    return losses(run)


@pytest.mark.long(lambda asked: asked == "launcher")
@pytest.mark.parametrize("asked", ["1", "launcher"])
def test_a_stop_is_saved_and_said_once_and_continues_exactly(job, tiny_run, of_two_ranks, asked):
    run = tiny_run(steps=STEPS, every=0)
    if asked == "launcher":
        stopped = job(train(run, "train.steps=100000"), ranks=2)
        while not read_metrics(run.output / "metrics.jsonl"):
            time.sleep(0.01)
        stopped.process.kill(signal.SIGTERM)
    else:
        stopped = job(train(run), fault=f"term:forward:{STEP}:{asked}", ranks=2)
    assert stopped.wait() == 1  # whatever the ranks' own codes are, torchrun's is 1
    by = "a signal to another rank" if asked == "1" else "SIGTERM"
    pattern = rf"octavo: stopped by {by} after step (\d+) of \d+, saved\. Run the same command again to continue\."
    found = re.fullmatch(pattern, stopped.said[0])
    assert found, stopped.process.stderr
    assert stopped.said[1:] == []
    assert [path.name for path in (run.output / "checkpoints").iterdir()] == [f"step-{found[1]}"]
    if asked != "launcher":
        assert found[1] == str(STEP)
        assert set(re.findall(r"exitcode  : (\S+) \(pid", stopped.process.stderr)) <= {"75", "-15"}
        again = job(train(run), name="again", ranks=2)
        assert again.wait() == 0, again.process.stderr
        assert losses(run) == of_two_ranks


def test_a_stop_of_one_rank_before_the_first_step(job, tiny_run):
    job = job(train(tiny_run(steps=STEPS)), fault="term:start:0:1", ranks=2)
    assert job.wait() == 1
    assert job.said[1:] == []
    assert "stopped by SIGTERM before the first step: nothing to save. Run the same command again." in job.said[0]
    assert set(re.findall(r"exitcode  : (\S+) \(pid", job.process.stderr)) <= {"75", "-15"}


ROUNDS = [
    *(f"save:{name}:2:{rank}" for name, rank in (("within-shard", 0), ("within-shard", 1), ("after-shards", 0))),
    *(f"save:{name}:2:0" for name in ("before-manifest", "before-rename", "after-rename")),
    f"kill:backward:{STEP}:1",
    f"kill:checkpoint:{STEP}:0",
    f"raise:data:{STEP}:0",
    f"save:while-pruning:{STEPS}:0",  # nothing is pruned before three checkpoints exist
]
"""A fault in each start of one job. Saves of step 2 are begun again until one is in place."""


@pytest.mark.long
def test_a_job_of_many_faults_continues_exactly(job, tiny_run, of_two_ranks):
    run = tiny_run(steps=STEPS, every=2)
    job = job(train(run), fault=",".join(ROUNDS), ranks=2, restarts=len(ROUNDS))
    assert job.wait() == 0, job.process.stderr
    told = [line for line in job.process.stderr.splitlines() if line.startswith("octavo: rank")]
    assert len(told) == len(ROUNDS), job.process.stderr
    for fault, line in zip(ROUNDS, told, strict=True):
        kind, phase, step, rank = fault.split(":")
        phase = "checkpoint" if kind == "save" else phase
        word = "failed" if kind == "raise" else "was killed"
        assert line.startswith(f"octavo: rank {rank} of 2 {word} in {phase} of step {step}"), job.process.stderr
    assert losses(run) == of_two_ranks
    assert not list(run.output.glob("**/.tmp-*"))


# The same by `octavo train --ranks`, whose stderr and exit code are those of the ranks alone.


@pytest.fixture
def started(tmp_path):
    """Starts `octavo train … --ranks 2`; returns the process, which is killed if its test fails."""
    with contextlib.ExitStack() as stack:

        def start(command, **how):
            environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "octavo", *map(str, command), "--ranks", "2"],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **how,
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def forked(tmp_path):
    """Starts the same as a `CommandLine` whose ranks are forked; those of a failed test are killed."""
    with contextlib.ExitStack() as stack:

        def start(command, name="launcher"):
            process = command_lines.CommandLine(command_lines.launcher, tmp_path / name, [*map(str, command), "--ranks", "2"])
            stack.callback(process.close)
            return process

        yield start


def test_ranks_of_the_command_say_a_wrong_input_once(forked, tiny_run):
    """One that the launcher finds, and one that every rank does."""
    for override, fault in (
        ("train.global_batch=5", "train.global_batch = 5 sequences cannot be shared equally by 2 data-parallel ranks"),
        ("model.config.num_key_value_heads=3", "num_key_value_heads = 3: 2 attention heads"),
    ):
        process = forked(train(tiny_run(override, steps=STEPS), override), name=f"launcher {override}")
        assert process.wait(timeout=300) == 2
        assert process.stderr.startswith("octavo: ")
        assert fault in process.stderr
        assert process.stderr.count("\n") == 1, process.stderr


def test_ranks_of_the_command_save_at_a_signal_and_continue_exactly(started, forked, tiny_run, of_two_ranks, tmp_path):
    run = tiny_run(steps=STEPS, every=0)
    # Ranks import nothing of the folder that they are started in.
    (tmp_path / "tokenizers.py").write_text("raise SystemExit('a file of the user')\n")
    process = started(train(run), cwd=tmp_path)
    while not read_metrics(run.output / "metrics.jsonl"):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert process.returncode in (0, 75)  # 0: it was in the last step
    if process.returncode == 75:
        assert re.fullmatch(
            r"octavo: stopped by SIGTERM after step \d+ of \d+, saved\. Run the same command again to continue\.\n", said
        )
        again = forked(train(run))
        assert again.wait(timeout=300) == 0
        said = again.stderr
    assert said == ""
    assert losses(run) == of_two_ranks


def test_ranks_of_the_command_end_with_one_that_is_killed(forked, tiny_run):
    run = tiny_run(steps=100000, every=2)
    process = forked(train(run))
    while not read_metrics(run.output / "metrics.jsonl"):
        time.sleep(0.01)
    (last,) = subprocess.run(["pgrep", "-n", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(last), signal.SIGKILL)
    assert process.wait(timeout=300) == 1
    said = process.stderr
    assert re.match(r"octavo: rank 1 of 2 was killed in \w+ of step \d+ ", said)
    assert said.count("\n") == 1


def test_a_rank_killed_before_the_first_step_is_a_failure(started, tiny_run):
    process = started(train(tiny_run(steps=100000), "launch.grace=1"))
    while not (found := subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()):
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(int(found[-1]), signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    assert re.fullmatch(r"octavo: rank \d of 2 was (ended by|killed in start).*\n", said)
