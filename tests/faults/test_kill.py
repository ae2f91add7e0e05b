"""A run that is killed continues with the same bits.

Every trial kills a real process with SIGKILL, runs the same command again to the end, and compares the loss of every step, the
norm of every gradient and the final checkpoint with an undisturbed run. The tiny model has dropout, two micro-batches
a step and delayed scaling, so that weights, optimizer, random states, sample number and FP8 histories all matter; the controls
at the end show that they do.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from octavo.checkpoint import manifest
from octavo.checkpoint.failpoints import FAILPOINTS
from octavo.run.metrics import read_metrics

pytestmark = pytest.mark.faults

STEPS = 20
HELD = {"HELD_STEP": "3", "HELD_RUN": "fp8"}


def curve(output):
    return [(r["step"], r["loss"].hex(), r["grad_norm"].hex(), r["lr"].hex()) for r in read_metrics(output / "metrics.jsonl")]


def final_tensors(output):
    return {
        n: t for file in (output / "checkpoints" / f"step-{STEPS}").glob("*.safetensors") for n, t in load_file(file).items()
    }


def differences(output, undisturbed):
    """Names of tensors and steps that differ from the undisturbed run; empty if all bits agree."""
    wanted, found = final_tensors(undisturbed), final_tensors(output)
    assert wanted.keys() == found.keys()
    assert any(name.startswith("fp8.") for name in wanted)
    raw = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in wanted.items()}
    names = [name for name in wanted if not torch.equal(raw[name], found[name].reshape(-1).view(torch.uint8))]
    return names + [str(a) for a, b in zip(curve(output), curve(undisturbed), strict=True) if a != b]


def finish(octavo, run, undisturbed):
    """Run to the end and hold every bit against the undisturbed run."""
    process = octavo("train", run.file)
    assert process.wait() == 0, process.stderr
    assert differences(run.output, undisturbed[0].output) == []
    assert not list(run.output.glob("**/.tmp-*"))
    return process


@pytest.mark.long(lambda trial: trial % 12 != 3)
@pytest.mark.parametrize("trial", range(24))
def test_a_kill_at_a_random_moment(octavo, tiny_run, undisturbed, trial):
    run = tiny_run(steps=STEPS, every=4)
    process = octavo("train", run.file)
    # Equal parts of the run's length, a random moment in each: from the first import to the last checkpoint.
    time.sleep(undisturbed[1] * (trial + random.random()) / 24)
    process.kill()
    process.wait()  # −9, or 0 if it was just done: then there is nothing to continue, which must hold as well
    finish(octavo, run, undisturbed)


@pytest.mark.long(lambda name, step: step == 12 and name != FAILPOINTS[-1])
@pytest.mark.parametrize("name", FAILPOINTS)
@pytest.mark.parametrize("step", [4, 12])
def test_a_kill_inside_a_checkpoint_write(octavo, tiny_run, undisturbed, name, step):
    if (name, step) == ("while-pruning", 4):
        step = 16  # nothing is pruned before three checkpoints exist
    run = tiny_run(steps=STEPS, every=4)
    process = octavo("train", run.file, OCTAVO_FAILPOINT=name, OCTAVO_FAILPOINT_STEP=str(step))
    assert process.wait() == -signal.SIGKILL, process.stderr
    assert curve(run.output)[-1][0] == step
    left = sorted(path.name for path in (run.output / "checkpoints").iterdir())
    visible = f"step-{step}" in left
    assert visible == (name in ("after-rename", "while-pruning"))
    assert any(part.startswith(".tmp-") for part in left) != (name == "after-rename")
    finish(octavo, run, undisturbed)


def test_killed_again_and_again(octavo, tiny_run, undisturbed):
    run = tiny_run(steps=STEPS, every=4)
    for name, step in (("within-shard", 8), ("before-rename", 12), ("after-rename", 16), ("before-manifest", 20)):
        process = octavo("train", run.file, OCTAVO_FAILPOINT=name, OCTAVO_FAILPOINT_STEP=str(step))
        assert process.wait() == -signal.SIGKILL, process.stderr
    finish(octavo, run, undisturbed)


@pytest.mark.long(lambda number: number in (signal.SIGUSR1, signal.SIGUSR2))
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_signal_finishes_the_step_saves_and_exits_75(octavo, tiny_run, undisturbed, number):
    run = tiny_run(steps=STEPS, every=0)
    process = octavo("train", run.file, **HELD)
    process.wait_for_steps(run.output / "metrics.jsonl", 2)
    process.kill(number)
    if number == signal.SIGTERM:
        process.kill(number)  # a scheduler may send it twice
    assert process.wait() == 75, process.stderr
    last = curve(run.output)[-1][0]
    assert last < STEPS
    assert [p.name for p in (run.output / "checkpoints").iterdir()] == [f"step-{last}"]
    assert f"stopped by {number.name} after step {last} of {STEPS}, saved" in process.stderr
    assert "Traceback" not in process.stderr
    finish(octavo, run, undisturbed)


def saved_at_a_closed_output(run, said):
    last = curve(run.output)[-1][0]
    assert last < STEPS
    assert [p.name for p in (run.output / "checkpoints").iterdir()] == [f"step-{last}"]
    assert f"stopped by a closed output after step {last} of {STEPS}, saved" in said
    assert "Traceback" not in said


def test_a_pipe_without_a_reader_finishes_the_step_saves_and_exits_75(octavo, tiny_run, undisturbed, tmp_path):
    run = tiny_run(steps=STEPS, every=0)
    pipe = tmp_path / "process-0" / "stdout"  # of the first process
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    process = octavo("train", run.file, **HELD)
    process.wait_for_steps(run.output / "metrics.jsonl", 2)
    os.close(reader)
    assert process.wait() == 75, process.stderr
    saved_at_a_closed_output(run, process.stderr)
    finish(octavo, run, undisturbed)


def start_piped(run, *, until_asked=True):
    program = [str(Path(__file__).with_name("held.py"))] if until_asked else ["-m", "octavo"]
    process = subprocess.Popen(
        [sys.executable, *program, "train", str(run.file)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | HELD,
    )  # fmt: skip
    metrics = run.output / "metrics.jsonl"
    while process.poll() is None and (not metrics.is_file() or metrics.read_bytes().count(b"\n") < 2):
        time.sleep(0.002)
    return process


@pytest.mark.long
def test_an_interpreter_whose_output_is_closed_saves_as_well(octavo, tiny_run, undisturbed):
    run = tiny_run(steps=STEPS, every=0)
    with start_piped(run) as process:
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait() == 75, said
    saved_at_a_closed_output(run, said)
    finish(octavo, run, undisturbed)


@pytest.mark.long
def test_both_outputs_closed_save_as_well(octavo, tiny_run, undisturbed):
    run = tiny_run(steps=STEPS, every=0)
    with start_piped(run) as process:
        process.stdout.close()
        process.stderr.close()
        assert process.wait() == 75
    assert [p.name for p in (run.output / "checkpoints").iterdir()] == [f"step-{curve(run.output)[-1][0]}"]
    finish(octavo, run, undisturbed)


def test_under_nohup_a_hangup_changes_nothing(octavo, tiny_run, undisturbed):
    run = tiny_run(steps=STEPS, every=0)
    process = octavo("train", run.file, UNDER_NOHUP="1", HELD_STEP="0", HELD_RUN="fp8")
    process.wait_for_steps(run.output / "metrics.jsonl", 2)
    process.kill(signal.SIGHUP)
    assert process.wait() == 0, process.stderr
    assert curve(run.output)[-1][0] == STEPS
    assert "stopped by" not in process.stderr
    finish(octavo, run, undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("under_nohup", [False, True])
def test_an_interpreter_saves_at_a_hangup_and_under_nohup_changes_nothing(octavo, tiny_run, undisturbed, under_nohup):
    run = tiny_run(steps=STEPS, every=0)
    inherited = signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    try:
        process = start_piped(run, until_asked=not under_nohup)
    finally:
        signal.signal(signal.SIGHUP, inherited)
    process.send_signal(signal.SIGHUP)
    _, said = process.communicate()
    assert process.returncode == (0 if under_nohup else 75), said
    last = curve(run.output)[-1][0]
    assert (last == STEPS) == under_nohup
    assert (f"stopped by SIGHUP after step {last} of {STEPS}, saved" in said) != under_nohup
    finish(octavo, run, undisturbed)


def test_the_bf16_run_beside_it_continues_too(octavo, tiny_run, undisturbed):
    run, whole = tiny_run("killed", steps=STEPS, every=4), tiny_run("whole", steps=STEPS, every=4)
    assert octavo("train", whole.file, "train.compare_bf16=true").wait() == 0
    process = octavo("train", run.file, "train.compare_bf16=true", HELD_STEP="4", HELD_RUN="bf16")
    process.wait_for_steps(run.output / "bf16" / "metrics.jsonl", 3)
    process.kill(signal.SIGTERM)
    assert process.wait() == 75
    process = octavo("train", run.file, "train.compare_bf16=true")
    assert process.wait() == 0
    assert f"already trained, {STEPS} of {STEPS} steps" in process.stdout
    assert "Cost of FP8" in process.stdout
    assert curve(run.output) == curve(undisturbed[0].output)
    assert curve(run.output / "bf16") == curve(whole.output / "bf16")
    assert curve(run.output / "bf16") != curve(run.output)


def test_a_second_run_in_the_same_folder_is_refused_naming_the_first(octavo, tiny_run, undisturbed):
    run = tiny_run(steps=100_000)
    first = octavo("train", run.file)
    first.wait_for_steps(run.output / "metrics.jsonl", 1)
    second = octavo("train", run.file)
    assert second.wait() == 2
    assert f"in use by pid {first.pid} on host" in second.stderr
    assert second.stderr.count("\n") == 1
    first.kill(signal.SIGTERM)
    assert first.wait() == 75, first.stderr


def shard(output, step):
    return next((output / "checkpoints" / f"step-{step}").glob("*.safetensors"))


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def test_a_damaged_newest_is_named_and_the_one_before_continues(octavo, tiny_run, undisturbed):
    run = tiny_run(steps=STEPS, every=4)
    process = octavo("train", run.file, OCTAVO_FAILPOINT="after-rename", OCTAVO_FAILPOINT_STEP="16")
    assert process.wait() == -signal.SIGKILL
    flip_a_bit(shard(run.output, 16))
    process = finish(octavo, run, undisturbed)
    assert f"checkpoint step-16 is damaged: {shard(run.output, 16)} has other content" in process.stderr
    assert "step-12" in process.stdout


def test_no_whole_checkpoint_is_exit_1_and_never_a_start_from_zero(octavo, tiny_run, undisturbed):
    run = tiny_run(steps=STEPS, every=4)
    process = octavo("train", run.file, OCTAVO_FAILPOINT="after-rename", OCTAVO_FAILPOINT_STEP="12")
    assert process.wait() == -signal.SIGKILL
    before = curve(run.output)
    flip_a_bit(shard(run.output, 12))
    shard(run.output, 8).unlink()
    (run.output / "checkpoints" / "step-4" / "state.json").write_text("")
    process = octavo("train", run.file)
    assert process.wait() == 1
    assert "is complete (step-12, step-8, step-4)" in process.stderr
    assert "Traceback" not in process.stderr
    assert curve(run.output) == before


def test_no_space_is_exit_1_with_the_old_checkpoint_intact(octavo, tiny_run, undisturbed):
    run = tiny_run(steps=STEPS, every=4)
    process = octavo("train", run.file, OCTAVO_FAILPOINT="after-rename", OCTAVO_FAILPOINT_STEP="8")
    assert process.wait() == -signal.SIGKILL
    process = octavo("train", run.file, file_limit=shard(run.output, 8).stat().st_size // 2)
    assert process.wait() == 1
    assert "no space for a checkpoint" in process.stderr
    assert "Traceback" not in process.stderr
    assert sorted(p.name for p in (run.output / "checkpoints").iterdir()) == ["step-4", "step-8"]
    finish(octavo, run, undisturbed)


def without_random_states(tensors, state):
    torch.manual_seed(0)  # the state of a fresh start
    tensors["random.0.cpu"] = torch.get_rng_state()


def without_fp8_histories(tensors, state):
    for name in [name for name in tensors if name.startswith("fp8.")]:
        tensors[name].fill_(1.0 if name.endswith(".scale") else 0.0)


def without_moments(tensors, state):
    for name in [name for name in tensors if name.startswith("optimizer.exp_avg")]:
        tensors[name].zero_()


def unchanged(tensors, state):
    pass


@pytest.mark.long
@pytest.mark.parametrize("leave_out", [without_random_states, without_fp8_histories, without_moments, unchanged])
def test_control_what_is_left_out_of_a_checkpoint_is_missed(octavo, tiny_run, undisturbed, leave_out):
    run = tiny_run(steps=STEPS, every=4)
    process = octavo("train", run.file, OCTAVO_FAILPOINT="after-rename", OCTAVO_FAILPOINT_STEP="8")
    assert process.wait() == -signal.SIGKILL
    rewrite(run.output / "checkpoints" / "step-8", leave_out)
    process = octavo("train", run.file)
    assert process.wait() == 0, process.stderr
    found = differences(run.output, undisturbed[0].output)
    assert bool(found) == (leave_out is not unchanged)
    assert curve(run.output)[:8] == curve(undisturbed[0].output)[:8]


def rewrite(checkpoint, change):
    """Change a checkpoint and make it whole again."""
    path = next(checkpoint.glob("*.safetensors"))
    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors, state = load_file(path), json.loads((checkpoint / "state.json").read_text())
    change(tensors, state)
    save_file(tensors, path, metadata=header)
    (checkpoint / "manifest.json").unlink()
    manifest.write_manifest(checkpoint, state["step"])
