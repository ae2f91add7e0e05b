"""What the tests of routers' noise run on every rank."""

import contextlib
from unittest import mock

import tensor_ranks
import torch

import octavo
from octavo.config import MoeConfig
from octavo.nn.moe import LayerNormMoE
from octavo.parallel import world

JITTER = 0.25
NOISE = MoeConfig(router_jitter_noise=JITTER)


@contextlib.contextmanager
def recorded():
    """A list of the noise of each call, on this rank."""
    found = []

    def noise(layer, *arguments):
        found.append(of_layer(layer, *arguments))
        return found[-1]

    of_layer = LayerNormMoE._noise
    with mock.patch.object(LayerNormMoE, "_noise", noise):
        yield found


def noises(degrees, shape, recompute):
    """Noise of a forward of two micro-batches, by call [tokens, hidden], and of its backward; in evaluation how many calls."""
    model = tensor_ranks.started(shape, degrees, moe=NOISE, recompute=recompute)
    given = tensor_ranks.batch()
    parts = [{name: value.clone() for name, value in tensor_ranks.own_samples(given).items()} for _ in range(2)]
    forward, backward = [], []
    with recorded() as found:
        for part in parts:
            loss = model(**part).loss
            forward += [each.clone() for each in found]
            found.clear()
            loss.backward()
            backward += [each.clone() for each in found]
            found.clear()
        model.eval()(**parts[0])
        return torch.stack(forward), backward, len(found)


def saved(path, degrees, shape):
    """A checkpoint behind one step, and two more steps: their losses, norms and noise."""
    model = tensor_ranks.started(shape, degrees, moe=NOISE)
    optimizer = tensor_ranks.optimizer_of(model)
    tensor_ranks.step(model, optimizer, tensor_ranks.batch(), degrees=degrees)
    octavo.save(path, model, optimizer)
    return further(model, optimizer, degrees)


def continued(path, degrees, shape):
    """`saved` of a loaded checkpoint, with other random numbers before."""
    model = tensor_ranks.started(shape, degrees, moe=NOISE)
    optimizer = tensor_ranks.optimizer_of(model)
    torch.manual_seed(99 + world.state.rank)
    octavo.load(path, model, optimizer)
    return further(model, optimizer, degrees)


def further(model, optimizer, degrees):
    """Losses, norms and noise of two steps."""
    with recorded() as found:
        steps = [tensor_ranks.step(model, optimizer, tensor_ranks.batch(), degrees=degrees) for _ in range(2)]
    return [each[:2] for each in steps], torch.stack(found)
