"""A sharded model beside one that is not, under other recipes: each has the bits that it has alone on these ranks."""

import itertools

import pytest
import sharded
import torch
import torch.distributed as dist
from llamas import llama_config

import ranks
from building import built_model
from octavo.fp8 import scaling
from octavo.fp8.autocast import fp8_autocast
from octavo.fp8.recipe import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from octavo.parallel import world

RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "own": lambda: DelayedScaling(amax_history_len=8, reduce_amax=False),
    "current": CurrentScaling,
    "rowwise": RowwiseScaling,
    "block": BlockScaling,
}


class Training:
    """Steps of a small decoder, whose bits are in `log`: on this rank alone, or sharded over both."""

    def __init__(self, recipe, *, shards, seed, recompute=False, group=None, frozen=False):
        self.recipe, self.group, self.log = RECIPES[recipe](), group, []
        if shards:
            self.model = sharded.build(torch.float32, self.recipe, seed=seed, recompute=recompute)
        else:
            self.model = built_model(
                llama_config(**sharded.SIZES), dtype=torch.float32, params_dtype=torch.float32, device=sharded.DEVICE,
                seed=seed, recompute=recompute,
            )  # fmt: skip
        self.model.requires_grad_(not frozen)
        self.optimizer = None if frozen else torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.draw = torch.Generator().manual_seed(100 * seed + dist.get_rank())

    def ids(self):
        return torch.randint(0, 17, (2, 12), generator=self.draw)

    def forward(self):
        ids = self.ids()
        with fp8_autocast(fp8_recipe=self.recipe, fp8_group=self.group):
            self.loss = self.model(input_ids=ids, labels=ids).loss

    def evaluate(self):
        self.model.eval()
        with torch.no_grad(), fp8_autocast(fp8_recipe=self.recipe, fp8_group=self.group):
            self.log.append(self.model(input_ids=self.ids()).logits.clone())
        self.model.train()

    def backward(self):
        self.loss.backward()
        self.log.append(self.loss.detach().clone())
        self.log += [sharded.full(p.grad) for p in self.model.parameters()]
        self.log += scaling.state_records(self.model).values()
        self.optimizer.step()
        self.optimizer.zero_grad()
        del self.loss

    def step(self):
        self.forward()
        self.backward()


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def alone(recipe, *, evaluates=False, **options):
    training = Training(recipe, **options)
    for _ in range(3):
        training.step()
        if evaluates:
            training.evaluate()
    return training.log


def in_turns(a, b):
    a.step()
    b.step()


def forwards_first(a, b):
    a.forward()
    b.forward()
    a.backward()
    b.backward()


def crossed(a, b):
    a.forward()
    b.forward()
    b.backward()
    a.backward()


def nested(a, b):
    with fp8_autocast(fp8_recipe=b.recipe, fp8_group=b.group):
        b.forward()
        a.forward()
    a.backward()
    b.backward()


def both(first, second, orders, recompute):
    """By order, whether each model has the bits that it has alone. `second` is not sharded."""
    world.init({})
    wanted = alone(first, shards=True, seed=1, recompute=recompute), alone(second, shards=False, seed=2, recompute=recompute)
    found = {}
    for order in orders:
        a = Training(first, shards=True, seed=1, recompute=recompute)
        b = Training(second, shards=False, seed=2, recompute=recompute)
        for _ in range(3):
            order(a, b)
        found[order.__name__] = [same(a.log, wanted[0]), same(b.log, wanted[1])]
    return found


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("first", "second"), [("delayed", "current"), ("current", "delayed"), ("rowwise", "delayed"), ("delayed", "block")]
)
def test_sharded_beside_whole(first, second, recompute):
    for found in ranks.run(2, both, first, second, (in_turns, forwards_first, crossed, nested), recompute):
        assert len(found) == 4
        assert all(map(all, found.values())), found


def joined_over_other_ranks():
    """Amaxes of one model are joined over both ranks, those of the other are each rank's own, by its recipe or its group."""
    world.init({})
    alone_here = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    wanted = {
        "all": alone("delayed", shards=False, seed=1),
        "recipe": alone("own", shards=False, seed=2),
        "group": alone("delayed", shards=False, seed=3, group=alone_here),
    }
    found = {}
    for order, (one, other) in itertools.product((in_turns, forwards_first, crossed), itertools.permutations(wanted, 2)):
        made = {
            "all": lambda: Training("delayed", shards=False, seed=1),
            "recipe": lambda: Training("own", shards=False, seed=2),
            "group": lambda: Training("delayed", shards=False, seed=3, group=alone_here),
        }
        a, b = made[one](), made[other]()
        for _ in range(3):
            order(a, b)
        found[order.__name__, one, other] = same(a.log, wanted[one]) and same(b.log, wanted[other])
    return found


@pytest.mark.long
def test_amaxes_are_joined_over_the_ranks_of_their_own_autocast():
    for found in ranks.run(2, joined_over_other_ranks):
        assert len(found) == 18
        assert all(found.values()), found


def teacher_and_student(recipe, of_student):
    """A frozen teacher that is sharded, a student that is not, and a teacher that rank 0 alone has."""
    world.init({})
    own = Training(recipe, shards=True, seed=1, frozen=True)
    for _ in range(6):
        own.evaluate()
    wanted = alone(of_student, shards=False, seed=2)
    teacher, student = Training(recipe, shards=True, seed=1, frozen=True), Training(of_student, shards=False, seed=2)
    third = Training("delayed", shards=False, seed=3, frozen=True) if dist.get_rank() == 0 else None
    for _ in range(3):
        teacher.evaluate()
        student.forward()
        if third is not None:
            third.evaluate()
        teacher.evaluate()
        student.backward()
    return same(teacher.log, own.log), same(student.log, wanted)


@pytest.mark.long(lambda recipe: recipe != "delayed")
@pytest.mark.parametrize(("recipe", "of_student"), [("delayed", "current"), ("current", "delayed"), ("block", "delayed")])
def test_a_frozen_teacher(recipe, of_student):
    assert ranks.run(2, teacher_and_student, recipe, of_student) == [(True, True)] * 2
