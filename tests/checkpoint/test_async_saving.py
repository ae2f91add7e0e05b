"""Checkpoints that are written while training goes on: the same bits, the same safety, and failures that are not lost."""

import errno
import signal
import threading

import pytest
import rank_saving
import torch
from safetensors.torch import load_file
from torch import nn

import ranks
from octavo.checkpoint import manifest, shard_io, writer
from octavo.checkpoint.api import Checkpointer
from octavo.checkpoint.failpoints import FAILPOINTS
from octavo.checkpoint.pinned_buffer import PinnedBuffer
from octavo.checkpoint.reader import read_state, restore
from octavo.checkpoint.writer import collect
from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.errors import OctavoError
from octavo.parallel.coordination import Ranks
from octavo.run.metrics import read_metrics


def trained(steps=3, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.5), nn.Linear(5, 3, bias=False).bfloat16())
    model[2].register_buffer("count", torch.tensor(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    hidden = model[1](model[0](torch.randn(4, 7)))
    model[2](hidden.bfloat16()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[2].count += 1


def copied(model, optimizer):
    return {name: tensor.clone() for name, tensor in collect(model, optimizer).items()}


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(a[name].contiguous().view(-1).view(torch.uint8), b[name].contiguous().view(-1).view(torch.uint8)), (
            name
        )


def written(path):
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture
def held(monkeypatch):
    """Writes wait until `held.set()`."""
    gate = threading.Event()
    write = shard_io.write_shard

    def waits(*arguments):
        assert gate.wait(300)
        return write(*arguments)

    monkeypatch.setattr(shard_io, "write_shard", waits)
    yield gate
    gate.set()


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpointer(tmp_path / "checkpoints", 2, print) as checkpoints:
        yield checkpoints


def test_what_is_written_is_the_state_at_the_moment_of_the_save(checkpoints, held):
    model, optimizer = trained()
    wanted = copied(model, optimizer)
    path = checkpoints.save(3, model, optimizer, {"samples": 12}, background=True)
    for _ in range(5):
        step(model, optimizer)
        checkpoints.poll()
        assert not path.exists()
    assert any(not torch.equal(wanted[name], tensor) for name, tensor in collect(model, optimizer).items())
    held.set()
    checkpoints.wait()
    same(written(path), wanted)
    manifest.verify(path)
    other, fresh = trained(seed=9, steps=1)
    assert restore(path, other, fresh, Ranks())["samples"] == 12
    same(copied(other, fresh), wanted)


def test_files_are_those_that_a_save_in_the_foreground_writes(checkpoints, tmp_path):
    model, optimizer = trained()
    path = checkpoints.save(3, model, optimizer, {"samples": 12}, background=True)
    checkpoints.wait()
    other = Checkpointer(tmp_path / "other", 2, print).save(3, model, optimizer, {"samples": 12})
    names = sorted(file.name for file in path.iterdir())
    assert names == sorted(file.name for file in other.iterdir())
    for name in names:
        assert (path / name).read_bytes() == (other / name).read_bytes(), name


def test_the_next_save_waits_for_the_one_before_and_reuses_its_memory(checkpoints, held):
    model, optimizer = trained()
    first, begun = checkpoints.save(3, model, optimizer, {}, background=True), copied(model, optimizer)
    step(model, optimizer)
    second = []
    saver = threading.Thread(target=lambda: second.append(checkpoints.save(4, model, optimizer, {}, background=True)))
    saver.start()
    saver.join(0.2)
    assert saver.is_alive()
    held.set()
    saver.join()
    checkpoints.wait()
    same(written(first), begun)
    block = checkpoints._buffer._block.data_ptr()
    step(model, optimizer)
    third = checkpoints.save(5, model, optimizer, {}, background=True)
    checkpoints.wait()
    assert checkpoints._buffer._block.data_ptr() == block
    same({k: v for k, v in written(third).items() if k != "random.0.cpu"}, {
        k: v for k, v in copied(model, optimizer).items() if k != "random.0.cpu"
    })  # fmt: skip
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["step-4", "step-5"]
    assert [read_state(path)["step"] for path in (*second, third)] == [4, 5]


def full_disk(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_raised_by_the_next_look_and_leaves_nothing(checkpoints, monkeypatch):
    model, optimizer = trained()
    checkpoints.save(3, model, optimizer, {})
    monkeypatch.setattr(writer, "write_atomic", full_disk)
    checkpoints.save(4, model, optimizer, {}, background=True)
    checkpoints._background.exception()
    with pytest.raises(OctavoError, match=r"no space for a checkpoint in .*No space left") as error:
        checkpoints.poll()
    assert error.value.exit_code == 1
    checkpoints.poll()  # it was said once
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-3"]
    monkeypatch.undo()
    checkpoints.save(4, model, optimizer, {}, background=True)
    checkpoints.wait()
    assert checkpoints.latest().name == "step-4"


FOLLOWING = {
    "wait": lambda checkpoints, *_: checkpoints.wait(),
    "save": lambda checkpoints, *state: checkpoints.save(5, *state, {}, background=True),
    "end": lambda *_: None,
}


def save_and(then, checkpoints, model, optimizer):
    with checkpoints:
        checkpoints.save(4, model, optimizer, {}, background=True)
        then(checkpoints, model, optimizer)


@pytest.mark.parametrize("then", FOLLOWING)
def test_a_failure_is_not_lost_whatever_comes_next(checkpoints, monkeypatch, then):
    monkeypatch.setattr(writer, "write_atomic", full_disk)
    with pytest.raises(OctavoError, match="no space for a checkpoint"):
        save_and(FOLLOWING[then], checkpoints, *trained())


def fail(*_):
    raise ZeroDivisionError


def test_an_exception_on_its_way_is_not_hidden_by_a_failed_write(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "write_atomic", full_disk)
    messages = []
    with pytest.raises(ZeroDivisionError):
        save_and(fail, Checkpointer(tmp_path, 2, messages.append), *trained())
    assert len(messages) == 1
    assert "is lost: no space for a checkpoint" in messages[0]


def test_a_whole_checkpoint_is_there_after_an_exception_in_training(tmp_path, held):
    threading.Timer(0.2, held.set).start()
    with pytest.raises(ZeroDivisionError):
        save_and(fail, Checkpointer(tmp_path, 2, print), *trained())
    manifest.verify(tmp_path / "step-4")


def test_the_buffer_copies_every_dtype_and_shape_and_grows():
    buffer = PinnedBuffer()
    for size in (1, 50, 2):
        odd = [
            torch.tensor(1.5), torch.zeros(0, 3), torch.randn(size, 5).bfloat16(), torch.randn(4, 4).to(torch.float8_e4m3fn),
            torch.tensor([True, False, True]), torch.randn(6, 6)[::2, 1:].t(), torch.tensor([2**62, -1]),
        ]  # fmt: skip
        wanted = [tensor.clone() for tensor in odd]
        copies = buffer.copy(odd)
        for tensor in odd:
            tensor.zero_()
        assert all(copy.is_contiguous() for copy in copies)
        same(dict(enumerate(copies)), dict(enumerate(wanted)))
    assert not buffer.copy([])


def final(output, step):
    (file,) = (output / "checkpoints" / f"step-{step}").glob("*.safetensors")
    return file.read_bytes()


def test_a_run_ends_in_the_same_bits_and_keeps_the_same_checkpoints(tiny_run):
    plain, other = tiny_run("plain", steps=7, every=2), tiny_run("async", steps=7, every=2)
    assert main(["train", str(plain.file)]) == 0
    assert main(["train", str(other.file), "checkpoint.async=true"]) == 0
    for run in (plain, other):
        assert sorted(path.name for path in (run.output / "checkpoints").iterdir()) == ["step-6", "step-7"]
    assert final(other.output, 7) == final(plain.output, 7)
    assert final(other.output, 6) == final(plain.output, 6)
    assert RunConfig.from_file(other.output / "run.toml").checkpoint.async_


def test_a_run_whose_disk_fills_up_in_the_background_stops_with_exit_1_within_a_step(tiny_run, monkeypatch, capsys):
    run = tiny_run(steps=30, every=4)
    write, poll = shard_io.write_shard, Checkpointer.poll

    def fails(folder, *arguments):
        return full_disk() if "step-8" in folder.name else write(folder, *arguments)

    def poll_after_the_write(self):
        if self._background is not None:
            self._background.exception()
        poll(self)

    monkeypatch.setattr(shard_io, "write_shard", fails)
    monkeypatch.setattr(Checkpointer, "poll", poll_after_the_write)
    assert main(["train", str(run.file), "checkpoint.async=true"]) == 1
    err = capsys.readouterr().err
    assert "no space for a checkpoint" in err
    assert "Traceback" not in err
    assert [path.name for path in (run.output / "checkpoints").iterdir()] == ["step-4"]
    assert len(read_metrics(run.output / "metrics.jsonl")) == 9  # the step in which it was found


@pytest.mark.parametrize("name", FAILPOINTS)
def test_a_kill_while_the_background_writes_leaves_the_last_whole_one(tmp_path, name):
    process = ranks.context.Process(target=rank_saving.save_until_killed, args=(tmp_path / "checkpoints", name))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    with Checkpointer(tmp_path / "checkpoints", 1, print) as checkpoints:
        left = sorted(path.name for path in checkpoints.folder.iterdir())
        in_place = name in ("after-rename", "while-pruning")
        assert ("step-2" in left) == in_place
        checkpoints.clean()
        assert checkpoints.latest().name == ("step-2" if in_place else "step-1")
        assert not list(checkpoints.folder.glob(".tmp-*"))
