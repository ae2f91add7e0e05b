"""What the tests of `octavo.muon` run on every rank."""

import torch
from llamas import llama, tokens

import octavo
from octavo.collectives.blocks import BlockTensor, with_block
from octavo.collectives.whole import whole_tensor
from octavo.parallel import world
from octavo.parallel.shards import named_tensors
from octavo.train import muon

SETTINGS = {"lr": 0.01, "adamw_lr": 0.003, "weight_decay": 0.1, "scale": "original", "eps": 1e-3}
FACTORS = SETTINGS | {"rates": {"*.o_proj": 0.5, "*norm*": 3.0}, "layer_decay": 0.8}
"""With the rate of each parameter by its name and depth."""


def built(shape, settings=SETTINGS):
    model = octavo.transform(llama(dtype=torch.float64, **shape), dtype=torch.float64, params_dtype=torch.float64)
    return model, octavo.muon(model, **settings)


def stepped(model, optimizer, seed):
    """One step on four samples, shared by the data-parallel ranks; the number of matrices that this rank orthogonalised."""
    ids = tokens(4, 16, seed)
    share = 4 // world.state.dp_size
    mine = ids[world.state.dp_rank * share : (world.state.dp_rank + 1) * share]
    model(input_ids=mine, labels=mine, num_items_in_batch=4 * 15).loss.backward()
    octavo.clip_grad_norm_(model, 0.5)
    counted, plain = [], muon.orthogonalised

    def counting(stack, dtype):
        counted.append(len(stack))
        return plain(stack, dtype)

    muon.orthogonalised = counting
    try:
        optimizer.step()
    finally:
        muon.orthogonalised = plain
    optimizer.zero_grad()
    return sum(counted)


def whole_state(model, optimizer):
    """Weights and states of the optimizer, whole, by name."""
    found = {}
    by_name = dict(model.named_parameters())
    for name, tensor in named_tensors(model):
        found[name] = whole_tensor(tensor).detach().clone()
        for key, value in optimizer.state.get(by_name.get(name), {}).items():
            if value.dim():
                value = with_block(value, tensor.block if isinstance(tensor, BlockTensor) else None)
                found[f"{key}.{name}"] = whole_tensor(value).detach().clone()
    return found


def continued(shape, degrees, load_from, save_to, steps=2):
    """State after some steps from a checkpoint, which is then saved, and the matrices of each step."""
    if degrees is not None:
        octavo.init(degrees)
    model, optimizer = built(shape, FACTORS)
    octavo.load(load_from, model, optimizer)
    counts = [stepped(model, optimizer, seed) for seed in range(steps)]
    octavo.save(save_to, model, optimizer)
    state = whole_state(model, optimizer)
    if degrees is not None:
        octavo.shutdown()
    return counts, state
