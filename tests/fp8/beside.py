"""Small trainings that tests run alone and beside each other: they must not know of each other."""

from __future__ import annotations

import functools
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.fp8.scaling import state_records

RECIPES = {
    "delayed": lambda: octavo.recipe.DelayedScaling(amax_history_len=4),
    "long": lambda: octavo.recipe.DelayedScaling(amax_history_len=16, amax_compute_algo="most_recent", margin=1),
    "current": octavo.recipe.CurrentScaling,
    "rowwise": octavo.recipe.RowwiseScaling,
    "block": octavo.recipe.BlockScaling,
    "none": lambda: None,
}
KINDS = ("", "reentrant", "plain")


class Net(nn.Module):
    """Three layers, the middle one under a checkpoint of some kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.middle, self.last = nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 16)

    def forward(self, x):
        x = torch.relu(self.first(x))
        if self.kind and torch.is_grad_enabled():
            x = checkpoint(self._inner, x, use_reentrant=self.kind == "reentrant")
        else:
            x = self._inner(x)
        return self.last(x)

    def _inner(self, x):
        return torch.relu(self.middle(x))


class Training:
    """A model under a recipe, with data of its own; `log` has the bits of every step."""

    def __init__(self, recipe, seed, kind="", *, make=None, **options):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = octavo.transform(Net(kind), dtype=torch.float32) if make is None else make(kind)
        self.recipe = RECIPES[recipe]()
        self.options = options
        self.draw = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.log = []

    def autocast(self):
        return octavo.fp8_autocast(self.recipe is not None, self.recipe, **self.options)

    def forward(self, pause=lambda: None):
        # Magnitudes that differ from step to step, so that histories do.
        x = torch.randn(8, 32, generator=self.draw) * (1 + 3 * torch.rand((), generator=self.draw))
        target = torch.randn(8, 16, generator=self.draw)
        with self.autocast():
            pause()
            out = self.model(x.requires_grad_())
            out.register_hook(lambda _: pause())
            self.loss = F.mse_loss(out, target)
            pause()

    def evaluate(self):
        self.model.eval()
        with torch.no_grad(), self.autocast():
            self.log.append(self.model(torch.randn(8, 32, generator=self.draw)).clone())
        self.model.train()

    def backward(self):
        self.loss.backward()
        self.log.append(self.loss.detach().clone())
        self.log += [whole(p.grad) for p in self.model.parameters() if p.grad is not None]
        self.log += state_records(self.model).values()
        self.optimizer.step()
        self.optimizer.zero_grad()
        del self.loss

    def step(self, pause=lambda: None):
        self.forward(pause)
        pause()
        self.backward()
        pause()


def whole(tensor):
    """A copy of a tensor, all of it if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def same(one, other):
    """Whether two logs have the same bits."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Turns:
    """Two threads of which one runs at a time, until it calls `pause` or ends."""

    def __init__(self):
        self.changed, self.turn, self.ended = threading.Condition(), 0, [False, False]
        self.errors = [None, None]

    def pause(self, number):
        with self.changed:
            if not self.ended[1 - number]:
                self.turn = 1 - number
                self.changed.notify_all()
                assert self.changed.wait_for(lambda: self.turn == number, timeout=60)

    def run(self, *functions):
        """Each function gets its `pause`; what one raises is in `errors`."""
        threads = [threading.Thread(target=self._run, args=(i, function)) for i, function in enumerate(functions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run(self, number, function):
        with self.changed:
            assert self.changed.wait_for(lambda: self.turn == number, timeout=60)
        try:
            function(lambda: self.pause(number))
        except Exception as error:
            self.errors[number] = error
        with self.changed:
            self.ended[number], self.turn = True, 1 - number
            self.changed.notify_all()


@functools.cache
def alone(*given, steps=3, evaluates=False, **options):
    """The log of a training that has the process for itself; computed once, since many trainings are compared with it."""
    training = Training(*given, **options)
    for _ in range(steps):
        training.step()
        if evaluates:
            training.evaluate()
    return training.log
