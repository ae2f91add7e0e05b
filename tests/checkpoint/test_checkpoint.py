"""Checkpoints: every bit comes back, damage of each kind is found, and a full disk costs nothing."""

import copy
import functools
import json
import math
import os
import random
import re
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper

import octavo
from octavo.build import transform
from octavo.checkpoint import manifest, shard_io
from octavo.checkpoint.api import Checkpointer, load, save
from octavo.checkpoint.opened import OpenFolder
from octavo.checkpoint.reader import StoredWeights, restore
from octavo.checkpoint.stored import StoredTensors, read_headers
from octavo.checkpoint.writer import collect, weights
from octavo.errors import InputError, OctavoError
from octavo.fp8.autocast import fp8_autocast
from octavo.fp8.recipe import CurrentScaling, DelayedScaling
from octavo.fp8.scaling import state_records
from octavo.parallel.coordination import Ranks
from octavo.train.adamw import AdamW


def bits(tensor):
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].shape == b[name].shape, name
        assert torch.equal(bits(a[name]), bits(b[name])), name


class Net(nn.Module):
    """A little of everything: shared weights, a buffer that is kept and one that is not, dropout."""

    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.hidden = nn.Linear(width, width, dtype=torch.float32)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids):
        return self.head(self.dropout(self.hidden(self.embedding(ids))))


def trained(seed=0, steps=3, width=8):
    torch.manual_seed(seed)
    model = Net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9), fused=True)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    ids = torch.randint(11, (4, 6)) + random.randint(0, 0) + int(np.random.randint(1))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item().hex()


def test_save_and_load_continue_with_the_same_bits(tmp_path):
    model, optimizer = trained()
    save(tmp_path / "c", model, optimizer, epoch=2, best=0.1, names=["a", "b"])
    wanted = [step(model, optimizer) for _ in range(4)] + [random.random(), float(np.random.rand())]
    other, other_optimizer = trained(seed=99, steps=1)
    assert load(tmp_path / "c", other, other_optimizer) == {"epoch": 2, "best": 0.1, "names": ["a", "b"]}
    found = [step(other, other_optimizer) for _ in range(4)] + [random.random(), float(np.random.rand())]
    assert found == wanted


def test_a_load_leaves_nothing_of_the_state_before(tmp_path):
    def fresh(seed):
        torch.manual_seed(seed)
        model = transform(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)), params_dtype=torch.float32)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model, optimizer, seed):
        for number in range(3):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed + number)) * (1 + number)
            with fp8_autocast(fp8_recipe=RECIPES["delayed"]):
                model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: tensor.clone() for name, tensor in collect(model, optimizer).items()}

    model, optimizer = fresh(0)
    save(tmp_path / "c", model, optimizer)  # before the first step: no moments, no histories
    wanted = train(model, optimizer, 10)
    other, other_optimizer = fresh(1)
    train(other, other_optimizer, 20)
    load(tmp_path / "c", other, other_optimizer)
    assert not other_optimizer.state
    same(train(other, other_optimizer, 10), wanted)


def test_parameters_in_another_group_are_refused(tmp_path):
    def grouped(*names):
        model = Net()
        own = dict(model.named_parameters())
        groups = [{"params": [own[name] for name in group], "weight_decay": 0.1 * n} for n, group in enumerate(names)]
        return model, torch.optim.AdamW(groups, fused=True)

    decayed, others = ["embedding.weight", "hidden.weight"], ["hidden.bias"]
    model, optimizer = grouped(decayed, others)
    step(model, optimizer)
    save(tmp_path / "c", model, optimizer)
    load(tmp_path / "c", *grouped(decayed[::-1], others))
    other, other_optimizer = grouped(others, decayed)
    step(other, other_optimizer)
    before = {name: tensor.clone() for name, tensor in collect(other, other_optimizer).items()}
    with pytest.raises(InputError, match=r"embedding.weight in the optimizer's parameter group 0, but this .* group 1"):
        load(tmp_path / "c", other, other_optimizer)
    same(collect(other, other_optimizer), before)
    assert [group["weight_decay"] for group in other_optimizer.param_groups] == [0.0, 0.1]


RECIPES = {
    "delayed": DelayedScaling(margin=1, amax_history_len=3, amax_compute_algo="most_recent"),
    "one step": DelayedScaling(amax_history_len=1),
    "current": CurrentScaling(),
}


@pytest.mark.parametrize("name", RECIPES)
def test_save_and_load_keep_the_fp8_scales_and_histories(tmp_path, name):
    def fresh(seed):
        torch.manual_seed(seed)
        model = transform(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)), dtype=torch.float32)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def train(model, optimizer, first):
        losses = []
        for number in range(first, first + 4):
            x = torch.randn(48, 32, generator=torch.Generator().manual_seed(number)) * number
            with fp8_autocast(enabled=True, fp8_recipe=RECIPES[name]):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
        return losses

    model, optimizer = fresh(0)
    train(model, optimizer, 1)
    save(tmp_path / "c", model, optimizer)
    records = state_records(model)
    assert bool(records) == (name != "current")
    wanted = train(model, optimizer, 5)
    other, other_optimizer = fresh(1)
    load(tmp_path / "c", other, other_optimizer)
    same(state_records(other), records)
    assert train(other, other_optimizer, 5) == wanted


def test_every_tensor_comes_back_to_the_bit_adams_step_included(tmp_path):
    model, optimizer = trained(steps=5)
    before = {name: tensor.clone() for name, tensor in collect(model, optimizer).items()}
    assert before["optimizer.step.hidden.weight"].shape == ()
    assert before["optimizer.step.hidden.weight"] == 5
    save(tmp_path / "c", model, optimizer)
    fresh = Net()
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.5, fused=True)
    load(tmp_path / "c", fresh, fresh_optimizer)
    same(collect(fresh, fresh_optimizer), before)
    assert fresh_optimizer.param_groups[0]["lr"] == 1e-2
    assert fresh_optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert fresh.head.weight is fresh.embedding.weight


def test_shared_weights_are_written_once_and_scratch_buffers_never(tmp_path):
    model, _ = trained()
    save(tmp_path / "c", model)
    names = {name for file in (tmp_path / "c").glob("*.safetensors") for name in load_file(file)}
    assert {n for n in names if n.startswith("model.")} == {
        "model.embedding.weight", "model.hidden.weight", "model.hidden.bias", "model.count",
    }  # fmt: skip
    same(StoredWeights(tmp_path / "c"), weights(model))


ODD = {
    "scalar": torch.tensor(1.25),
    "empty": torch.zeros(0, 3),
    "bf16": torch.randn(3, 5).bfloat16(),
    "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "e5m2": torch.randn(7).to(torch.float8_e5m2),
    "int": torch.tensor([2**62, -1]),
    "bool": torch.tensor([True, False]),
    "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
    "strided": torch.randn(6, 6)[::2, 1:].t(),
    "one of a column": torch.randn(1, 6)[:, 2],
}


def checkpointed(model):
    """Its linear layers in PyTorch's wrapper, which state dicts do not show."""
    apply_activation_checkpointing(model, checkpoint_wrapper, check_fn=lambda module: isinstance(module, nn.Linear))
    return model


WRAPPERS = {
    "checkpointed": checkpointed,
    "around": checkpoint_wrapper,
    "compiled": functools.partial(torch.compile, backend="eager"),
    "both": lambda model: torch.compile(checkpointed(model), backend="eager"),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_weights_inside_of_wrappers_are_saved_and_loaded(tmp_path, wrap):
    """Parameters have the wrapper in their names, and those of a state dict may not."""
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(wrap(Net()))
    first, second = models
    names = [name for name, _ in first.named_parameters()]
    assert names == [name for name in weights(first) if not name.endswith("count")]
    assert not any(name.endswith("scratch") for name in weights(first))
    first.get_buffer(next(name for name, _ in first.named_buffers() if name.endswith("count"))).add_(4)
    octavo.save(tmp_path / "saved", first)
    assert not torch.equal(dict(second.named_parameters())[names[1]], dict(first.named_parameters())[names[1]])
    octavo.load(tmp_path / "saved", second)
    same(weights(second), weights(first))
    assert [one.item() for name, one in second.named_buffers() if name.endswith("count")] == [7]


def test_tensors_of_every_kind_survive(tmp_path):
    entries = shard_io.write_shard(tmp_path, shard_io.pieces_of(ODD))
    assert list(entries) == [path.name for path in tmp_path.iterdir()]
    opened = OpenFolder(tmp_path)
    stored = StoredTensors(opened, read_headers(opened, list(entries)))
    assert stored.layout == shard_io.layout_of(ODD)
    found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored.layout.items()}
    stored.read(found)
    same(found, ODD)
    (file,) = tmp_path.iterdir()
    same(load_file(file), {name: tensor.contiguous() for name, tensor in ODD.items()})
    assert file.stat().st_size == entries[file.name]["size"]
    assert manifest.sha256_file(file) == entries[file.name]["sha256"]


def test_nothing_on_disk_is_a_pickle_and_nothing_is_unpickled(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    model, optimizer = trained()
    save(tmp_path / "c", model, optimizer)
    files = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert [re.sub(r"\d+", "N", name) for name in files] == [
        "manifest.json", "shard-N-model-N-of-N.safetensors", "state.json",
    ]  # fmt: skip
    import pickle

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    load(tmp_path / "c", model, optimizer)


@pytest.fixture
def three(tmp_path):
    """Checkpoints of steps 1 to 3, with the messages about them."""
    model, optimizer = trained()
    messages = []
    checkpoints = Checkpointer(tmp_path / "checkpoints", 3, messages.append)
    for number in (1, 2, 3):
        checkpoints.save(number, model, optimizer, {"samples": number})
    return checkpoints, model, optimizer, messages


def shard(folder):
    return next(folder.glob("*.safetensors"))


def flip(path, position, bit=1):
    content = bytearray(path.read_bytes())
    content[position] ^= bit
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit in the middle of a shard": (lambda f: flip(shard(f), shard(f).stat().st_size // 2), "other content"),
    "a flipped bit in the last byte": (lambda f: flip(shard(f), -1, 128), "other content"),
    "a flipped bit in a shard's header": (lambda f: flip(shard(f), 3), "other content"),
    "a truncated shard": (lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-1]), "bytes instead of"),
    "an empty shard": (lambda f: shard(f).write_bytes(b""), "0 bytes instead of"),
    "a missing shard": (lambda f: shard(f).unlink(), "is missing"),
    "a missing state.json": (lambda f: (f / "state.json").unlink(), "state.json is missing"),
    "a flipped bit in state.json": (lambda f: flip(f / "state.json", 20), "state.json has other content"),
    "a missing manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "a truncated manifest": (lambda f: (f / "manifest.json").write_text('{"format": '), "is not a manifest"),
    "a flipped bit in the manifest": (lambda f: flip(f / "manifest.json", -90), "manifest.json"),
    "a shard of another save": (lambda f: shutil.copy(shard(f), f / "shard-9.safetensors"), "does not belong"),
    "an empty folder": (lambda f: [p.unlink() for p in f.iterdir()], "manifest.json is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_is_named_and_the_one_before_is_used(three, kind):
    checkpoints, model, optimizer, messages = three
    harm, says = DAMAGE[kind]
    harm(checkpoints.folder / "step-3")
    assert checkpoints.latest() == checkpoints.folder / "step-2"
    assert len(messages) == 1
    assert "step-3 is damaged" in messages[0]
    assert says in messages[0]
    assert restore(checkpoints.folder / "step-2", model, optimizer, Ranks())["samples"] == 2
    checkpoints.save(3, model, optimizer, {"samples": 3})  # the continued run writes step 3 again
    assert checkpoints.latest() == checkpoints.folder / "step-3"


def test_a_renamed_checkpoint_is_not_taken_for_another_step(three):
    checkpoints, *_, messages = three
    (checkpoints.folder / "step-2").rename(checkpoints.folder / "step-7")
    assert checkpoints.latest() == checkpoints.folder / "step-3"
    assert "the folder was renamed" in messages[0]


def test_if_none_is_whole_it_stops_with_exit_1_rather_than_start_from_zero(three):
    checkpoints, *_, messages = three
    for number in (1, 2, 3):
        shard(checkpoints.folder / f"step-{number}").unlink()
    with pytest.raises(OctavoError, match=r"no checkpoint .* is complete .*step-3, step-2, step-1") as error:
        checkpoints.latest()
    assert error.value.exit_code == 1
    assert len(messages) == 3


def test_no_checkpoint_at_all_is_a_fresh_start(tmp_path):
    assert Checkpointer(tmp_path / "none", 2, print).latest() is None


def test_the_newest_are_kept_a_damaged_one_does_not_count_and_leftovers_go(three):
    checkpoints, model, optimizer, _ = three
    checkpoints.keep = 2
    flip(shard(checkpoints.folder / "step-3"), 100)
    (checkpoints.folder / ".tmp-step-4-123").mkdir()
    checkpoints.clean()
    assert checkpoints.latest().name == "step-2"
    checkpoints.save(4, model, optimizer, {})
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["step-2", "step-4"]


def test_another_model_is_refused_by_names_and_shapes_and_nothing_is_touched(tmp_path):
    model, optimizer = trained()
    save(tmp_path / "c", model, optimizer)
    other, other_optimizer = trained(seed=5, width=16)
    before = {name: tensor.clone() for name, tensor in collect(other, other_optimizer).items()}
    with pytest.raises(InputError) as error:
        load(tmp_path / "c", other, other_optimizer)
    assert "hidden.weight is [8, 8] float32 in the checkpoint and [16, 16] float32 in the model" in str(error.value)
    assert "hidden.bias is [8] float32 in the checkpoint and [16] float32 in the model" in str(error.value)
    same(collect(other, other_optimizer), before)
    with pytest.raises(InputError, match=r"hidden.weight \[8, 8\] float32 is not in the model"):
        load(tmp_path / "c", nn.Linear(2, 2))
    with pytest.raises(InputError, match="bfloat16 in the model"):
        load(tmp_path / "c", Net().bfloat16())


def test_weights_without_their_optimizer(tmp_path):
    model, optimizer = trained()
    save(tmp_path / "weights", model)
    save(tmp_path / "both", model, optimizer)
    load(tmp_path / "both", Net())
    with pytest.raises(InputError, match="has no optimizer state"):
        load(tmp_path / "weights", model, optimizer)


def test_saving_before_the_first_step(tmp_path):
    model, optimizer = trained(steps=0)
    save(tmp_path / "c", model, optimizer)
    other, other_optimizer = trained(seed=4, steps=0)
    load(tmp_path / "c", other, other_optimizer)
    same(weights(other), weights(model))
    assert step(other, other_optimizer) == step(*reload(tmp_path / "c"))


def reload(path):
    model, optimizer = trained(seed=8, steps=0)
    load(path, model, optimizer)
    return model, optimizer


def test_saving_over_a_checkpoint_replaces_it_and_over_anything_else_is_refused(tmp_path):
    model, _ = trained()
    save(tmp_path / "c", model, turn=1)
    save(tmp_path / "c", model, turn=2)
    assert load(tmp_path / "c", model) == {"turn": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="is not a checkpoint"):
        save(tmp_path / "mine", model)
    with pytest.raises(InputError, match="there is no checkpoint"):
        load(tmp_path / "absent", model)
    with pytest.raises(InputError, match=r"octavo\.save: path = .* cannot be used: File name too long\. Give a shorter path\."):
        save(tmp_path / ("x" * 300), model)
    with pytest.raises(InputError, match=r"extra 'thing' cannot be stored \(it is of type builtins\.object\)"):
        save(tmp_path / "d", model, thing=object())
    assert not (tmp_path / "d").exists()


SCHEDULERS = {
    "milestones": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),  # numbers as keys
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),  # infinities
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_continues_from_its_state_in_the_extras(tmp_path, kind):
    def one(scheduler, optimizer):
        step(model, optimizer)
        scheduler.step(*([1.0] if kind == "plateau" else []))
        return optimizer.param_groups[0]["lr"]

    model, optimizer = trained()
    scheduler = SCHEDULERS[kind](optimizer)
    one(scheduler, optimizer)
    save(tmp_path / "c", model, optimizer, scheduler=scheduler.state_dict(), turn=1)
    wanted = [one(scheduler, optimizer) for _ in range(4)]
    assert len(set(wanted)) > 1

    model, optimizer = trained(1, steps=1)
    scheduler = SCHEDULERS[kind](optimizer)
    found = load(tmp_path / "c", model, optimizer)
    assert found["turn"] == 1
    scheduler.load_state_dict(found["scheduler"])
    assert [one(scheduler, optimizer) for _ in range(4)] == wanted


def test_extras_come_back_with_their_keys(tmp_path):
    model, _ = trained()
    given = {"of": {1: 2, None: (3, math.inf)}, "text": {"a": [1.5, None, True]}}
    save(tmp_path / "c", model, **given)
    assert load(tmp_path / "c", model) == given
    inside: list[object] = []
    inside.append(inside)
    for wrong, why in (
        (torch.ones(2), "it has a tensor"),
        ({1: {2}}, r"\[1\] is of type builtins.set"),
        (inside, "contains itself"),
    ):
        with pytest.raises(InputError, match=f"extra 'thing' cannot be stored .*{why}"):
            save(tmp_path / "d", model, thing=wrong)


def test_a_replacement_killed_between_its_renames_is_found_again(tmp_path):
    model, _ = trained()
    save(tmp_path / "c", model, turn=1)
    interrupt_replacement(tmp_path, model)
    assert load(tmp_path / "c", model) == {"turn": 2}
    save(tmp_path / "c", model, turn=3)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def interrupt_replacement(folder, model):
    """The state after a kill between the two renames of a replacement: turn 1 is aside, turn 2 has no name yet."""
    save(folder / "c", model, turn=2)
    (folder / "c").rename(folder / ".tmp-c-999999999")
    save(folder / "elsewhere" / "c", model, turn=1)
    (folder / "elsewhere" / "c").rename(folder / ".tmp-old-c")
    (folder / "elsewhere").rmdir()


def test_what_an_interrupted_save_left_goes_with_the_next_one_and_never_loses_the_last_whole(tmp_path, monkeypatch):
    model, _ = trained()
    interrupt_replacement(tmp_path, model)
    monkeypatch.setattr(manifest, "write_manifest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "c", model, turn=3)
    monkeypatch.undo()
    assert load(tmp_path / "c", model) == {"turn": 2}
    (tmp_path / ".tmp-c-999999998").mkdir()
    (tmp_path / f".tmp-c-{os.getpid()}").mkdir()
    (tmp_path / ".tmp-c-1").mkdir()  # of a process that runs
    (tmp_path / ".tmp-c-b-999999998").mkdir()  # of another checkpoint
    save(tmp_path / "c", model, turn=4)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tmp-c-1", ".tmp-c-b-999999998", "c"]


def interrupted(*args, **settings):
    raise KeyboardInterrupt


def test_a_replacement_that_fails_between_its_renames_puts_the_old_one_back(tmp_path, monkeypatch):
    model, _ = trained()
    save(tmp_path / "c", model, turn=1)
    rename = Path.rename

    def fails(self, target):
        if self.name.startswith(".tmp-c-"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "c", model, turn=2)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert load(tmp_path / "c", model) == {"turn": 1}


def test_a_deleted_checkpoint_stays_deleted(tmp_path):
    model, _ = trained()
    save(tmp_path / "c", model, turn=1)
    (tmp_path / "c").rename(tmp_path / ".tmp-old-c")
    save(tmp_path / "elsewhere", model, turn=2)
    (tmp_path / "elsewhere").rename(tmp_path / "c")  # killed after both renames, before the old one was removed
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(InputError, match="there is no checkpoint"):
        load(tmp_path / "c", model)


class Counting(torch.optim.Optimizer):
    """Keeps its count as a number, as optimizers outside of torch do."""

    def __init__(self, params, **first):
        super().__init__(params, {"lr": 0.1})
        self.first = first

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(copy.deepcopy(self.first))
                state["step"] = state.get("step", 0) + 1


def test_numbers_that_an_optimizer_keeps_come_back(tmp_path):
    model = nn.Linear(2, 3)
    optimizer = Counting(model.parameters(), mean=0.1, best=float("-inf"), warm=True, last=None, sum=torch.ones(2))
    optimizer.step()
    optimizer.step()
    save(tmp_path / "c", model, optimizer)
    other = nn.Linear(2, 3)
    fresh = Counting(other.parameters())
    load(tmp_path / "c", other, fresh)
    for parameter in other.parameters():
        state = fresh.state[parameter]
        assert torch.equal(state.pop("sum"), torch.ones(2))
        assert state == {"step": 2, "mean": 0.1, "best": float("-inf"), "warm": True, "last": None}
        assert type(state["step"]) is int
        assert state["warm"] is True
    numbers = Counting(model.parameters(), mean=0.1)
    numbers.step()
    save(tmp_path / "numbers", model, numbers)
    half = Counting([other.weight])
    with pytest.raises(InputError, match="a parameter that the optimizer does not hold"):
        load(tmp_path / "numbers", other, half)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_settings_of_parameter_groups_come_back_exactly(tmp_path, kind, dtype):
    def build(rate):
        model = nn.Linear(2, 3)
        groups = [{"params": [model.weight], "lr": torch.tensor(rate, dtype=dtype)}, {"params": [model.bias], "lr": rate}]
        return model, kind(groups, betas=(0.8, 0.9), foreach=False, fused=False)

    model, optimizer = build(torch.rand(()).item())
    optimizer.param_groups[0] |= {"initial_lr": optimizer.param_groups[0]["lr"].clone(), "name": "matrix", "limit": math.inf}
    optimizer.param_groups[1] |= {"nested": (1, [0.5, None], True), "order": torch.arange(4).view(2, 2)}
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    save(tmp_path / "c", model, optimizer)
    other, fresh = build(0.5)
    fresh.param_groups[1]["nested"] = (0, [0, 0], 0)
    held = fresh.param_groups[0]["lr"]
    load(tmp_path / "c", other, fresh)
    for group, saved in zip(fresh.param_groups, optimizer.param_groups, strict=True):
        assert group.keys() == saved.keys()
        for key in saved.keys() - {"params"}:
            assert type(group[key]) is type(saved[key])
            if isinstance(saved[key], torch.Tensor):
                assert group[key].dtype == saved[key].dtype
                assert torch.equal(group[key], saved[key])
            else:
                assert group[key] == saved[key]
    assert fresh.param_groups[0]["lr"] is held
    swapped = kind([{"params": [other.bias]}, {"params": [other.weight]}])
    with pytest.raises(
        InputError,
        match=r"in the optimizer's parameter group 0, but this .* group 1: give the optimizer its groups",
    ):
        load(tmp_path / "c", other, swapped)


@pytest.mark.parametrize("value", [{"a": 1}, torch.zeros(100), print], ids=["dict", "large", "function"])
def test_settings_that_cannot_be_kept_are_refused(tmp_path, value):
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["odd"] = value
    with pytest.raises(InputError, match="setting 'odd' of parameter group 0 is of type"):
        save(tmp_path / "c", model, optimizer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [[torch.ones(1)], "text", {"a": 1}], ids=lambda value: type(value).__name__)
def test_what_cannot_be_kept_of_an_optimizer_is_refused_rather_than_lost(tmp_path, value):
    model = nn.Linear(2, 3)
    optimizer = Counting(model.parameters(), odd=value)
    optimizer.step()
    with pytest.raises(InputError, match=f"the optimizer's state 'odd' of weight is of type {type(value).__name__}"):
        save(tmp_path / "c", model, optimizer)
    assert not list(tmp_path.iterdir())


def test_fp8_state_of_modules_that_do_not_run_in_fp8_is_refused_before_anything_is_changed(tmp_path):
    def fresh(seed, fp8):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        model = transform(model, dtype=torch.float32) if fp8 else model
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    model, optimizer = fresh(0, fp8=True)
    with fp8_autocast(enabled=True, fp8_recipe=RECIPES["delayed"]):
        loss = model(torch.randn(16, 32)).square().mean()
    loss.backward()
    optimizer.step()
    save(tmp_path / "c", model, optimizer)
    other, other_optimizer = fresh(1, fp8=False)
    before = {name: tensor.clone() for name, tensor in collect(other, other_optimizer).items()}
    with pytest.raises(InputError, match="FP8 state for 0, 2, which this model does not run in FP8"):
        load(tmp_path / "c", other, other_optimizer)
    same(collect(other, other_optimizer), before)


def test_a_newer_format_is_refused_rather_than_taken_for_damage(tmp_path):
    model, _ = trained()
    save(tmp_path / "c", model)
    path = tmp_path / "c" / "manifest.json"
    content = {k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"} | {"format_version": 2}
    path.write_text(json.dumps({**content, "sha256": manifest._digest(content)}))
    with pytest.raises(InputError, match=f"octavo-checkpoint 2, .*this is Octavo {octavo.__version__}"):
        load(tmp_path / "c", model)


@pytest.fixture
def file_limit():
    """A real limit of the operating system on the size of a file: writes beyond it fail in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_space_while_writing_leaves_the_old_ones_intact(three, file_limit):
    checkpoints, model, optimizer, _ = three
    file_limit(4096)
    with pytest.raises(OctavoError, match=r"no space for a checkpoint in .*allows no file of that size") as error:
        checkpoints.save(4, model, optimizer, {})
    assert "ulimit -f" in str(error.value)
    assert error.value.exit_code == 1
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["step-1", "step-2", "step-3"]
    assert checkpoints.latest().name == "step-3"


def test_too_little_space_is_found_before_anything_is_written(tmp_path, monkeypatch):
    model, optimizer = trained()
    monkeypatch.setattr(shard_io, "free_bytes", lambda path: 1000)
    monkeypatch.setattr(Path, "open", interrupted)
    with pytest.raises(OctavoError, match=r"needs [\d,]+ bytes and 1,000 are free"):
        save(tmp_path / "c", model, optimizer)
    assert not list(tmp_path.iterdir())


def test_the_estimate_covers_what_is_written(tmp_path):
    pieces = shard_io.pieces_of(collect(*trained(width=64)))
    (entry,) = shard_io.write_shard(tmp_path, pieces).values()
    assert sum(piece.data.nbytes for piece in pieces) < entry["size"] <= shard_io.bytes_needed(pieces)


def test_a_dtype_that_the_files_do_not_hold_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(InputError, match=r"model\.phase has the dtype torch.complex128"):
        save(tmp_path / "c", model)
    assert not list(tmp_path.iterdir())


def test_an_optimizer_with_more_parameters_is_refused(tmp_path):
    model = nn.Linear(2, 3)
    few = torch.optim.AdamW([model.weight])
    model(torch.randn(4, 2)).sum().backward()
    few.step()
    save(tmp_path / "few", model, few)
    with pytest.raises(InputError, match="no optimizer state of bias: its optimizer had fewer parameters"):
        load(tmp_path / "few", model, torch.optim.AdamW(model.parameters()))
