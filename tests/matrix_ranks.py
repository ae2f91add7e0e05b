"""What the tests of `octavo.matrices` run on every rank."""

import torch
from llamas import llama, tokens
from torch.optim import Adafactor, AdamW, Muon

import octavo
from octavo.collectives.whole import whole_tensor
from octavo.errors import InputError
from octavo.parallel import world


def muon(parameters):
    return Muon(parameters, lr=0.02, weight_decay=0.1)


def adafactor(parameters):
    return Adafactor(parameters, lr=0.02)


def refused(degrees):
    """The messages of optimizers that are given the parameters of a sharded model."""
    octavo.init(degrees)
    model = octavo.transform(llama(), dtype=torch.float32)
    ids, messages = tokens(2, 16), []
    model(input_ids=ids, labels=ids).loss.backward()
    for make in (muon, adafactor):
        try:
            make([p for p in model.parameters() if p.ndim == 2]).step()
        except InputError as error:
            messages.append(str(error))
    octavo.shutdown()
    return messages


def trained(changes, make, degrees=None, steps=3):
    """Losses, whole weights and this rank's matrices after some steps: `make`'s optimizer for blocks, AdamW for all else."""
    if degrees is not None:
        octavo.init(degrees)
    model = octavo.transform(llama(**changes), dtype=torch.float32)
    parts = octavo.matrices(model, "model.layers.*")
    first, second = make(parts.values()), AdamW(parts.others(), lr=1e-3)
    parts.attach(first)
    ids, losses = tokens(4, 16), []
    share = 4 // world.state.dp_size
    mine = ids[world.state.dp_rank * share : (world.state.dp_rank + 1) * share]
    for _ in range(steps):
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        octavo.clip_grad_norm_(model, 1.0)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name: whole_tensor(p).detach().clone() for name, p in model.named_parameters()}
    states = sorted(name for name, p in parts.items() if p in first.state)
    octavo.shutdown()
    return losses, weights, states
