"""What the tests of checkpoints at any degrees run on every rank: a model saved in one layout and continued in others.

In float64 sums have no order, so a step of any layout is that of one rank that continues from the same files. Samples come from
the loader of runs, by the number of those that the checkpoint says are done.
"""

import random
from typing import NamedTuple

import numpy as np
import tensor_ranks
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import octavo
from octavo.checkpoint.writer import collect
from octavo.collectives.blocks import local_of
from octavo.collectives.whole import whole_tensor
from octavo.data.loader import BatchLoader
from octavo.errors import OctavoError
from octavo.fp8.recipe import DelayedScaling
from octavo.parallel import world
from octavo.parallel.fsdp import accumulate
from octavo.parallel.shards import LocalShard, local_shard

SAMPLES, TOKENS = 12, 16
"""12 are shared by 1, 2, 3 or 4 data-parallel ranks, and 16 tokens by 4 context ranks."""
BOUND = 1e-11
"""The largest relative error of a step in float64."""
RECIPE = DelayedScaling(amax_history_len=3)


class Case(NamedTuple):
    """A model (keys of `llamas.llama_config`), the data of its steps, and whether it trains in FP8."""

    shape: dict
    data: object
    fp8: bool
    dtype: torch.dtype = torch.float64
    recipe: object = RECIPE
    micro_batch: int | None = None

    def built(self, seed):
        """In the layout of `octavo.init`: the model and its optimizer."""
        model = tensor_ranks.llama(seed=seed, **self.shape)
        model = octavo.transform(model, self.recipe if self.fp8 else None, dtype=self.dtype, params_dtype=self.dtype)
        # Fused: one call for all parameters, where each has a dozen of DTensor's.
        return model, torch.optim.AdamW(octavo.parameter_groups(model, 0.1), lr=1e-2, eps=1e-3, fused=True)

    def step(self, model, optimizer, first_sample):
        """Loss of all samples and norm of all gradients."""
        ranks = world.state
        loader = BatchLoader(
            self.data, "train", sequence_length=TOKENS, packing="join", seed=7, global_batch=SAMPLES,
            micro_batch=self.micro_batch, dp_rank=ranks.dp_rank, dp_size=ranks.dp_size,
        )  # fmt: skip
        batches, loss = loader.step(first_sample), torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(batches, 1):
            ids = batch.input_ids.remainder(self.shape.get("vocab_size", tensor_ranks.VOCABULARY))
            accumulate(model, last=number == len(batches))
            with octavo.fp8_autocast(enabled=self.fp8, fp8_recipe=self.recipe if self.fp8 else None):
                found = model(input_ids=ids, labels=ids, num_items_in_batch=SAMPLES * (TOKENS - 1)).loss
            found.backward()
            loss += found.detach()
        if ranks.world_size > 1 and ranks.dp_size > 1:
            dist.all_reduce(loss, group=ranks.dp_process_group)
        norm = octavo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()


def tensors_of(model, optimizer):
    """Every tensor of model and optimizer, and every FP8 record, by its name in a checkpoint."""
    return {name: tensor for name, tensor in collect(model, optimizer).items() if not name.startswith("random.")}


def state_of(model, optimizer):
    """The same, whole."""
    return {
        name: whole_tensor(tensor).detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors_of(model, optimizer).items()
    }


def error(found, wanted):
    """The relative error of this rank's elements of a tensor, beside the same ones of a whole; NaN where one is NaN alone."""
    if tuple(found.shape) != tuple(wanted.shape):
        return float("inf")
    shard = local_shard(found)
    theirs = LocalShard(torch.empty_like(shard.local), shard.part)
    theirs.copy_from(wanted)
    if torch.equal(shard.local, theirs.local):
        return 0.0
    # A gradient that is 0 but for rounding, as of the router of one expert a token, is no larger than this.
    size = theirs.local.double().norm().clamp(min=1e-5)
    return ((shard.local.double() - theirs.local.double()).norm() / size).item()


def saved(degrees, path, case):
    """A checkpoint behind a step; rank 0 writes the state of all ranks beside it."""
    octavo.init(degrees)
    model, optimizer = case.built(0)
    case.step(model, optimizer, 0)
    octavo.save(path, model, optimizer, samples=SAMPLES)
    whole = state_of(model, optimizer)
    if world.state.rank == 0:
        save_file(whole, path.with_suffix(".state"))
    octavo.shutdown()


def continued(degrees, paths, case, steps_of=1):
    """Of each checkpoint this rank's faults: of its load over another state, else, for one in `steps_of`, of a further step.

    The step is compared with that of one rank, which has to continue before.
    """
    octavo.init(degrees)
    model, optimizer = case.built(3)
    found = {path.name: _continued(path, model, optimizer, case, number % steps_of == 0) for number, path in enumerate(paths)}
    octavo.shutdown()
    return {name: faults for name, faults in found.items() if faults}


def _continued(path, model, optimizer, case, further):
    with torch.no_grad():
        for parameter in model.parameters():
            local_of(parameter.data).fill_(torch.nan)
    extra = octavo.load(path, model, optimizer)
    wanted, found = load_file(path.with_suffix(".state")), tensors_of(model, optimizer)
    wrong = sorted(found.keys() ^ wanted.keys())
    if wrong := wrong + [name for name in wanted if name in found and error(found[name], wanted[name]) != 0.0]:
        return {"loaded": wrong}
    if not further:
        return {}
    numbers = case.step(model, optimizer, extra["samples"])
    of_one_rank = path.with_suffix(".one")
    if world.state.world_size == 1:
        save_file(state_of(model, optimizer) | {"numbers": torch.tensor(numbers, dtype=torch.float64)}, of_one_rank)
        return {}
    wanted = load_file(of_one_rank)
    wanted_numbers = wanted.pop("numbers").tolist()
    errors = {name: error(tensor, wanted[name]) for name, tensor in tensors_of(model, optimizer).items()}
    errors |= {name: abs(a / b - 1) for name, a, b in zip(("loss", "norm"), numbers, wanted_numbers, strict=True)}
    # Key-value rows of several ranks: each casts its own part of their gradient, so what comes behind that is alike.
    shares = case.fp8 and world.state.tp_size > case.shape.get("num_key_value_heads", 2)
    bounds = {name: _bound(name, shares) for name in errors}
    return {name: each for name, each in errors.items() if not each <= bounds[name]}


def _bound(name, shares):
    if not shares or name == "loss":
        return 0.0 if name.startswith("fp8.") else BOUND
    if name.startswith("fp8."):
        return float("inf") if ".grad_output." in name else 0.0
    return {"norm": 0.1, "model": 0.05}.get(name.partition(".")[0], float("inf"))


def refused(degrees, paths, case):
    """Of each folder the error of its load and the text, and True if nothing of this rank's state was changed."""
    octavo.init(degrees)
    model, optimizer = case.built(3)
    case.step(model, optimizer, 0)

    def held():
        tensors = {name: local_of(tensor).detach().clone() for name, tensor in tensors_of(model, optimizer).items()}
        return tensors | {"random": torch.get_rng_state()}

    found = {}
    for path in paths:
        before, error = held(), None
        try:
            octavo.load(path, model, optimizer)
        except OctavoError as raised:
            error = raised
        same = all(torch.equal(value, before[name]) for name, value in held().items())
        found[path.name] = type(error), str(error), same
    octavo.shutdown()
    return found


def drawing(degrees, path, save):
    """Random numbers that follow a save or a load, of each kind, and of the tracker; this rank's number by its tokens."""
    octavo.init(degrees)
    layer, ranks = torch.nn.Linear(2, 2), world.state
    tracker = ranks.get_rng_state_tracker()
    if save:
        world.seed_everything(100 + ranks.token_rank)
        with tracker.fork():
            torch.rand(3)
        octavo.save(path, layer)
    else:
        octavo.load(path, layer)
    with tracker.fork():
        tracked = torch.rand(2).tolist()
    found = ranks.token_rank, ranks.tp_rank, (random.random(), float(np.random.rand()), *torch.rand(3).tolist()), tracked
    octavo.shutdown()
    return found


def every(function, cells):
    """`function` of each of the arguments `cells`, one after the other in the same processes."""
    return [function(*cell) for cell in cells]
