"""Functions of the ranks in the tests of checkpoints: sharded models, saved and loaded."""

import contextlib
import errno
import hashlib
import os
import random
import threading

import numpy as np
import torch
import torch.distributed as dist
from changed_files import change
from llamas import llama_config
from torch import nn
from torch.distributed.fsdp import fully_shard

import octavo
from building import built_model
from octavo.checkpoint import shard_io
from octavo.checkpoint.api import Checkpointer
from octavo.checkpoint.manifest import OpenCheckpoint
from octavo.checkpoint.reader import read_state, restore
from octavo.checkpoint.writer import collect
from octavo.errors import InputError, OctavoError
from octavo.fp8.autocast import fp8_autocast
from octavo.fp8.recipe import DelayedScaling
from octavo.parallel import world
from octavo.parallel.coordination import writing_ranks

SIZES = {"vocab_size": 17, "hidden_size": 9, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4}
SIZES |= {"intermediate_size": 21, "attention_bias": True}
"""No size divides by 4 ranks, and of 9 rows the last of 4 ranks has none."""
RECIPE = DelayedScaling(amax_history_len=3)


def sharded(degrees=None, seed=0, **sizes):
    """A decoder over all ranks, and its optimizer."""
    world.init(degrees or {})
    config = llama_config(**SIZES | sizes)
    model = built_model(config, dtype=torch.float32, params_dtype=torch.float32, device="cpu", seed=seed)
    if world.state.world_size > 1:
        for part in (*model.layers, model):
            fully_shard(part, mesh=world.state.shard_mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(model, optimizer, steps, first=0):
    """Losses as text; every rank has different tokens."""
    losses = []
    for step in range(first, first + steps):
        draw = torch.Generator().manual_seed(100 * step + world.state.rank)
        ids = torch.randint(0, 17, (2, 12), generator=draw)
        with fp8_autocast(enabled=True, fp8_recipe=RECIPE):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def hashes(model, optimizer):
    """Of every tensor of the state, whole; random states are left out."""
    found = {}
    for name, tensor in collect(model, optimizer).items():
        if not name.startswith("random."):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            content = whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[name] = (str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(content).hexdigest())
    return found


def drawn():
    return [random.random(), float(np.random.rand()), *torch.rand(3).tolist()]


def save(path, degrees, steps=3):
    """Train and save; hashes, and the random numbers and losses that follow."""
    model, optimizer = sharded(degrees)
    train(model, optimizer, steps)
    octavo.save(path, model, optimizer, epoch=7)
    found = hashes(model, optimizer)
    return found, drawn(), train(model, optimizer, 2, first=steps)


def load(path, degrees, steps=3):
    """The same after loading into a model that began otherwise."""
    model, optimizer = sharded(degrees, seed=5)
    train(model, optimizer, 1, first=77)
    assert octavo.load(path, model, optimizer) == {"epoch": 7}
    found = hashes(model, optimizer)
    return found, drawn(), train(model, optimizer, 2, first=steps)


def said(function, *arguments):
    """The exception of a call: its class and text."""
    try:
        function(*arguments)
    except OctavoError as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")


def full_disk(*arguments, **settings):
    raise OSError(errno.ENOSPC, "No space left on device")


def fail_on_one_rank(folder, rank, background):
    """Save twice, the second time with a full disk on one rank: the error, the files left on disk, the latest checkpoint."""
    model, optimizer = sharded()
    train(model, optimizer, 1)
    checkpoints = Checkpointer(folder, 2, print)
    checkpoints.save(1, model, optimizer, {}, background=background)
    checkpoints.wait()
    write = shard_io.write_shard
    if world.state.rank == rank:
        shard_io.write_shard = full_disk
    try:
        if background:
            checkpoints.save(2, model, optimizer, {}, background=True)
            error = said(poll_to_the_end, checkpoints)
        else:
            error = said(checkpoints.save, 2, model, optimizer, {})
    finally:
        shard_io.write_shard = write
    left = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    checkpoints.save(2, model, optimizer, {}, background=background)
    checkpoints.wait()
    return error, left, checkpoints.latest().name


def poll_to_the_end(checkpoints):
    while checkpoints._background is not None:
        checkpoints.poll()


class Odd(torch.optim.SGD):
    """Has states that no checkpoint can hold."""

    def keep(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = {"a": 1}


def refused_on_one_rank(folder):
    model, _ = sharded()
    optimizer = Odd(model.parameters(), lr=0.1)
    if world.state.rank == 0:
        optimizer.keep()
    return said(octavo.save, folder / "c", model, optimizer), sorted(path.name for path in folder.iterdir())


def save_three(folder):
    model, optimizer = sharded()
    checkpoints = Checkpointer(folder, 3, print)
    for number in (1, 2, 3):
        train(model, optimizer, 1, first=number)
        checkpoints.save(number, model, optimizer, {"samples": number})
    return hashes(model, optimizer)


def look(folder):
    """Results of `clean`, `latest` and `restore`: (path and scalars, or the exception), and the messages."""
    messages = []
    model, optimizer = sharded(seed=3)
    checkpoints = Checkpointer(folder, 3, messages.append)
    checkpoints.clean()
    left = sorted(path.name for path in folder.iterdir())
    try:
        path = checkpoints.latest()
    except OctavoError as error:
        return (type(error), str(error)), messages, left
    restore(path, model, optimizer, checkpoints.io_ranks)
    return (path.name, read_state(path)["samples"]), messages, left


def delayed_save(folder, degrees):
    """Save in the background, delayed on every rank while training goes on; hashes before, after, and of the checkpoint."""
    model, optimizer = sharded(degrees)
    train(model, optimizer, 2)
    before = hashes(model, optimizer)
    gate, write = threading.Event(), shard_io.write_shard
    shard_io.write_shard = lambda *arguments: gate.wait(60) and write(*arguments)
    with Checkpointer(folder, 2, print) as checkpoints:
        path = checkpoints.save(2, model, optimizer, {}, background=True)
        for step in range(3):
            train(model, optimizer, 1, first=2 + step)
            checkpoints.poll()
            assert not path.exists()
        after = hashes(model, optimizer)
        dist.barrier()
        if world.state.rank != 1:
            gate.set()
        train(model, optimizer, 1, first=9)  # collectives of training, while all ranks but one write
        gate.set()
        poll_to_the_end(checkpoints)
    restore(checkpoints.latest(), model, optimizer, checkpoints.io_ranks)
    return before, after, hashes(model, optimizer)


def after_a_validation(folder):
    """Save while FSDP2 holds whole parameters of the root, as it does after a forward without a backward."""
    model, optimizer = sharded()
    train(model, optimizer, 1)
    with torch.no_grad():
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))
    octavo.save(folder / "c", model, optimizer)
    other, fresh = sharded(seed=4)
    octavo.load(folder / "c", other, fresh)
    assert hashes(other, fresh) == hashes(model, optimizer)
    return hashes(model, optimizer)


def tracked(folder):
    """Octavo's own generators are part of the state."""
    model = nn.Linear(2, 2)
    world.init()
    tracker = world.state.get_rng_state_tracker()

    def draw():
        with tracker.fork():
            return torch.rand(2).tolist()

    draw()
    octavo.save(folder / "c", model)
    wanted = draw()
    assert draw() != wanted
    octavo.load(folder / "c", model)
    return wanted, draw()


def export(folder, degrees, tied):
    """Export a sharded model; the error of a second export to the same folder."""
    model, _ = sharded(degrees, tie_word_embeddings=tied)
    octavo.export(model, folder / "out")
    kind, text = said(octavo.export, model, folder / "out")
    assert kind is InputError
    return text


def export_on_a_full_disk(folder):
    model, _ = sharded()
    from octavo.models import weight_files

    weight_files.save_file = full_disk
    try:
        octavo.export(model, folder / "out")
    except (OctavoError, OSError) as error:
        return str(error)
    return None


def save_until_killed(folder, failpoint):
    """Save step 1, then step 2 in the background, where the process is killed."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    with contextlib.suppress(OctavoError), Checkpointer(folder, 1, print) as checkpoints:
        checkpoints.save(1, model, None, {}, background=True)
        checkpoints.wait()
        os.environ |= {"OCTAVO_FAILPOINT": failpoint, "OCTAVO_FAILPOINT_STEP": "2"}
        checkpoints.save(2, model, None, {}, background=True)


def killed_together(folder, failpoint):
    """The same over ranks: the others must not take the checkpoint for whole."""
    model, optimizer = sharded()
    checkpoints = Checkpointer(folder, 1, print)
    checkpoints.save(1, model, optimizer, {})
    dist.barrier()
    os.environ |= {"OCTAVO_FAILPOINT": failpoint, "OCTAVO_FAILPOINT_STEP": "2"}
    checkpoints.save(2, model, optimizer, {}, background=True)
    checkpoints.wait()


def save_for_changes(folder):
    """A checkpoint of all ranks; the bytes of its files by name."""
    model, optimizer = sharded()
    train(model, optimizer, 2)
    octavo.save(folder / "c", model, optimizer, schedule={"step": 2, "rates": [0.5, 0.25]})
    return hashes(model, optimizer), {path.name: path.read_bytes() for path in (folder / "c").iterdir()}


def settings(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def load_changed(folder, files, seeds):
    """Load the checkpoint with each change over another state: the state before and after each load, and the error or None."""
    model, optimizer = sharded(seed=5)
    train(model, optimizer, 1, first=77)
    before = hashes(model, optimizer), settings(optimizer), drawn_later()
    found = []
    for seed in seeds:
        path = folder / f"{seed}" / "c"
        if world.state.rank == 0:
            path.mkdir(parents=True)
            for name, content in change(files, seed).items():
                (path / name).write_bytes(content)
        if dist.is_initialized():
            dist.barrier()
        random_states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        error = extra = None
        try:
            extra = octavo.load(path, model, optimizer)
        except OctavoError as raised:
            error = raised
        after = hashes(model, optimizer), settings(optimizer), drawn_later()
        found.append((seed, error, extra, after))
        if error is None:  # back to the state before
            model, optimizer = sharded(seed=5)
            train(model, optimizer, 1, first=77)
            random.setstate(random_states[0])
            np.random.set_state(random_states[1])
            torch.set_rng_state(random_states[2])
    return before, found


def drawn_later():
    """The random numbers that would come next."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    found = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return found


def load_refused(path, opened=OpenCheckpoint):
    """The error of a load over another state, and True if nothing of it was changed."""
    model, optimizer = sharded(seed=5)
    train(model, optimizer, 1, first=77)
    before = hashes(model, optimizer), settings(optimizer), drawn_later()
    error = said(restore, path, model, optimizer, writing_ranks(), opened)
    return error, before == (hashes(model, optimizer), settings(optimizer), drawn_later())


def load_while_replaced(folder, kind):
    """Another save takes the place of the first, or of its files, between the two ranks."""
    for name, steps in (("c", 1), ("d", 2)):
        model, optimizer = sharded(seed=steps)
        train(model, optimizer, steps)
        octavo.save(folder / name, model, optimizer)

    def opened(path):
        if world.state.rank == 0:
            checkpoint = OpenCheckpoint(path)
            dist.barrier()
            return checkpoint
        dist.barrier()
        if kind == "folder":
            path.rename(folder / "old")
            (folder / "d").rename(path)
        checkpoint = OpenCheckpoint(path)
        for name in checkpoint.manifest.shards:
            if kind == "file":  # of this rank: rank 0 has verified its own
                checkpoint.folder._descriptors[name] = os.open(folder / "d" / name, os.O_RDONLY)
        return checkpoint

    return load_refused(folder / "c", opened)
