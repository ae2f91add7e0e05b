"""Checkpoints that change while they are loaded: one save is read, or none; links and read-only folders."""

import os
import shutil

import pytest
import rank_saving
import torch
from torch import nn

import ranks
from octavo.checkpoint import manifest
from octavo.checkpoint.api import Checkpointer, load, save
from octavo.checkpoint.manifest import OpenCheckpoint
from octavo.checkpoint.reader import StoredWeights
from octavo.checkpoint.writer import collect, remove_checkpoint
from octavo.errors import InputError, OctavoError


def trained(seed=None, kind=torch.optim.AdamW):
    if seed is not None:
        torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = kind(model.parameters(), lr=1e-2)
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def copied(model, optimizer):
    return {name: tensor.clone() for name, tensor in collect(model, optimizer).items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def after_verifying(monkeypatch, change):
    """Call `change` once, after the files were verified and before they are read."""
    verify = OpenCheckpoint.verify

    def verify_and_change(self):
        verify(self)
        monkeypatch.setattr(OpenCheckpoint, "verify", verify)
        state = torch.get_rng_state()
        change()
        torch.set_rng_state(state)

    monkeypatch.setattr(OpenCheckpoint, "verify", verify_and_change)


def shard(folder):
    return next(folder.glob("*.safetensors"))


def replace_file(path):
    other = path.with_name("other")
    other.write_bytes(bytes(len(path.read_bytes())))
    other.replace(path)


UNNOTICED = {
    "saved again": lambda path: save(path, *trained(), turn=2),
    "another folder": lambda path: (path.rename(path.with_name("old")), save(path, *trained(), turn=2)),
    "a file replaced": lambda path: replace_file(shard(path)),
    "pruned": remove_checkpoint,
    "renamed": lambda path: path.rename(path.with_name("old")),
    "files touched": lambda path: [os.utime(file) for file in path.iterdir()],
}


@pytest.mark.parametrize("kind", UNNOTICED)
def test_a_save_that_is_replaced_or_removed_during_its_load_is_loaded(tmp_path, monkeypatch, kind):
    saved = trained()
    save(tmp_path / "c", *saved, turn=1)
    wanted = copied(*saved)
    other = trained()
    after_verifying(monkeypatch, lambda: UNNOTICED[kind](tmp_path / "c"))
    assert load(tmp_path / "c", *other) == {"turn": 1}
    assert equal(copied(*other), wanted)


def write_in_place(path, at):
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END)
        file.write(b"\x55\x55\x55")


def rewrite_with_old_times(path):
    times = path.stat()
    write_in_place(path, -9)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


IN_PLACE = {
    "bytes of a shard": lambda path: write_in_place(shard(path), -9),
    "with the old times": lambda path: rewrite_with_old_times(shard(path)),
    "a shard cut short": lambda path: os.truncate(shard(path), 3000),
    "an empty shard": lambda path: os.truncate(shard(path), 0),
    "a shard grown": lambda path: write_in_place(shard(path), 0),
    "state.json": lambda path: write_in_place(path / "state.json", -9),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_file_that_is_written_to_during_its_load_is_refused_with_nothing_changed(tmp_path, monkeypatch, kind):
    save(tmp_path / "c", *trained(), turn=1)
    other = trained()
    before = copied(*other)
    after_verifying(monkeypatch, lambda: IN_PLACE[kind](tmp_path / "c"))
    with pytest.raises(OctavoError):
        load(tmp_path / "c", *other)
    assert equal(copied(*other), before)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_ranks_that_would_read_two_saves_all_refuse_with_nothing_changed(tmp_path, kind):
    found = ranks.run(2, rank_saving.load_while_replaced, tmp_path, kind)
    for error, unchanged in found:
        assert error[0] is OctavoError if kind == "folder" else issubclass(error[0], OctavoError)
        assert ("was replaced" if kind == "folder" else "other content") in error[1]
        assert unchanged


def test_weights_are_of_one_save_though_the_folder_is_replaced_between_them(tmp_path):
    model, _ = trained()
    save(tmp_path / "c", model)
    stored = StoredWeights(tmp_path / "c")
    first, *others = stored
    found = {first: stored[first]}
    save(tmp_path / "c", *trained())
    found |= {name: stored[name] for name in others}
    assert equal(found, dict(model.state_dict()))


def test_a_load_in_the_middle_of_a_replacement_changes_nothing_on_disk(tmp_path):
    model, _ = trained()
    save(tmp_path / "c", model, turn=1)
    (tmp_path / "c").rename(tmp_path / ".tmp-old-c")
    save(tmp_path / "d", model, turn=2)
    (tmp_path / "d").rename(tmp_path / f".tmp-c-{os.getpid()}")  # its writer goes on, and renames it
    before = sorted(path.name for path in tmp_path.iterdir())
    assert load(tmp_path / "c", model) == {"turn": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_links_to_a_checkpoint_are_followed_and_what_they_name_is_replaced(tmp_path):
    model, _ = trained()
    (tmp_path / "disk").mkdir()
    save(tmp_path / "disk" / "step-1", model, turn=1)
    (tmp_path / "latest").symlink_to(tmp_path / "disk" / "step-1")
    assert load(tmp_path / "latest", model) == {"turn": 1}
    save(tmp_path / "latest", model, turn=2)
    assert (tmp_path / "latest").is_symlink()
    assert load(tmp_path / "disk" / "step-1", model) == {"turn": 2}
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["step-1"]
    big = shard(tmp_path / "disk" / "step-1")
    big.rename(tmp_path / "elsewhere")
    big.symlink_to(tmp_path / "elsewhere")
    assert load(tmp_path / "latest", model) == {"turn": 2}


def test_a_run_prunes_the_link_to_a_checkpoint_and_not_the_checkpoint(tmp_path):
    model, _ = trained()
    checkpoints = Checkpointer(tmp_path / "checkpoints", 1, print)
    checkpoints.save(1, model, None, {})
    (checkpoints.folder / "step-1").rename(tmp_path / "step-1")
    (checkpoints.folder / "step-1").symlink_to(tmp_path / "step-1")
    checkpoints.save(2, model, None, {})
    (checkpoints.folder / ".tmp-old-step-1").symlink_to(tmp_path / "step-1")  # of a removal that was killed
    checkpoints.clean()
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-2"]
    manifest.verify(tmp_path / "step-1")


def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_refused(tmp_path):
    model, _ = trained()
    for number, make in enumerate((os.mkfifo, os.mkdir)):
        path = tmp_path / f"{number}"
        save(path, model)
        shard(path).rename(tmp_path / f"kept-{number}")
        make(path / "shard-00001-model-00001-of-00001.safetensors")
        with pytest.raises(OctavoError, match="is not a file"):
            load(path, model)


def test_every_file_stays_open_beyond_the_soft_limit(tmp_path):
    model, _ = trained()
    save(tmp_path / "c", model)
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
        load(tmp_path / "c", model)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("older", [False, True])
def test_the_state_of_another_optimizer_is_refused_with_nothing_changed(tmp_path, older):
    save(tmp_path / "c", *trained())
    if older:
        without_class(tmp_path / "c")
    for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.NAdam):
        other = trained(kind=kind)
        before = copied(*other)
        groups = [dict(group) for group in other[1].param_groups]
        with pytest.raises(InputError, match=rf"the state of another optimizer: .*, and this is {kind.__name__}"):
            load(tmp_path / "c", *other)
        assert equal(copied(*other), before)
        assert [dict(group) for group in other[1].param_groups] == groups
    same = trained()
    torch.optim.lr_scheduler.LinearLR(same[1])  # adds initial_lr to the groups
    load(tmp_path / "c", *same)


def without_class(path):
    """A checkpoint as older versions wrote it."""
    import json

    state = json.loads((path / "state.json").read_text())
    del state["optimizer_class"]
    (path / "state.json").write_text(json.dumps(state))
    (path / "manifest.json").unlink()
    manifest.write_manifest(path, None)


def test_a_model_without_values_is_refused(tmp_path):
    save(tmp_path / "c", nn.Linear(3, 2))
    with torch.device("meta"):
        empty = nn.Linear(3, 2)
    with pytest.raises(InputError, match="weight has no values yet"):
        load(tmp_path / "c", empty)


def test_a_checkpoint_without_the_pieces_of_a_rank_is_refused(tmp_path):
    ranks.run(2, rank_saving.save_for_changes, tmp_path)
    path = tmp_path / "c"
    for file in ("shard-00002-model-00001-of-00001.safetensors", "random-1.json", "manifest.json"):
        (path / file).unlink()
    manifest.write_manifest(path, None)
    before = shutil.copytree(path, tmp_path / "d")
    ((error, unchanged),) = ranks.run(1, rank_saving.load_refused, before)
    assert issubclass(error[0], OctavoError)
    assert unchanged
