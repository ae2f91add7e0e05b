"""Two models in one process, under other recipes, do not know of each other: each has the bits that it has alone."""

import gc
import itertools
import threading

import pytest
import torch
from beside import KINDS, RECIPES, Net, Training, Turns, alone, same
from torch import nn
from torch._dynamo.utils import counters

import octavo
from octavo.errors import InputError
from octavo.fp8.scaling import load_state_records, state_records

PAIRS = [*itertools.combinations(RECIPES, 2), ("delayed", "delayed")]


def in_steps(a, b):
    a.step()
    b.step()


def forwards_first(a, b):
    a.forward()
    b.forward()
    a.backward()
    b.backward()


def one_inside(a, b):
    a.forward()
    b.step()
    a.backward()


def crossed(a, b):
    a.forward()
    b.forward()
    b.backward()
    a.backward()


ORDERS = (in_steps, forwards_first, one_inside, crossed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_trained_in_turns(pair, order, kind):
    a, b = Training(pair[0], 1, kind), Training(pair[1], 2, "")
    for _ in range(3):
        order(a, b)
    assert same(a.log, alone(pair[0], 1, kind))
    assert same(b.log, alone(pair[1], 2, ""))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_an_evaluation_between_forward_and_backward(pair):
    a, b = Training(pair[0], 1, "plain"), Training(pair[1], 2, "reentrant")
    for _ in range(3):
        a.forward()
        if b.log:
            b.evaluate()
        a.backward()
        b.step()
    b.evaluate()
    assert same(a.log, alone(pair[0], 1, "plain"))
    assert same(b.log, alone(pair[1], 2, "reentrant", evaluates=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_nested_autocasts(pair, kind):
    """The student's forward, inside the teacher's context that its own one replaces."""
    a, b = Training(pair[0], 1, kind), Training(pair[1], 2, kind)
    for _ in range(3):
        with b.autocast():
            a.forward()
            b.forward()
        b.backward()
        a.backward()
    assert same(a.log, alone(pair[0], 1, kind))
    assert same(b.log, alone(pair[1], 2, kind))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_frozen_teacher(pair, trained):
    teacher, student = Training(pair[0], 1), Training(pair[1], 2, "plain")
    own = Training(pair[0], 1)
    for each in (teacher, own):
        if trained:
            each.step()
        each.model.requires_grad_(False)
    for _ in range(3):
        teacher.evaluate()
        student.forward()
        teacher.evaluate()
        student.backward()
    for _ in range(6):
        own.evaluate()
    assert same(teacher.log, own.log)
    assert same(student.log, alone(pair[1], 2, "plain"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gradient_through_a_frozen_teacher(recipe):
    """Its weights take no gradient and its output gradients are cast: other scales than the student's."""

    def distance(teacher, student):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
        with teacher.autocast():
            hidden = x + 0 * x.requires_grad_()
            goal = teacher.model(hidden)
        goal.square().mean().backward()
        found = [x.grad.clone(), *state_records(teacher.model).values()]
        if student is not None:
            student.step()
        return found

    teacher, again = Training(recipe, 1), Training(recipe, 1)
    student = Training("long", 2)
    for each in (teacher, again):
        each.model.requires_grad_(False).eval()
    with_student = [one for _ in range(3) for one in distance(teacher, student)]
    assert same(with_student, [one for _ in range(3) for one in distance(again, None)])
    assert same(student.log, alone("long", 2))


@pytest.mark.long(lambda pair: PAIRS.index(pair) % 2 == 0)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_model_is_deleted_and_another_made(pair):
    a, b = Training(pair[0], 1, "plain"), Training(pair[1], 2)
    a.step()
    b.forward()
    del b
    gc.collect()
    a.forward()
    c = Training(pair[1], 3, "reentrant")
    a.backward()
    c.step()
    a.step()
    c.step()
    c.step()
    assert same(a.log, alone(pair[0], 1, "plain"))
    assert same(c.log, alone(pair[1], 3, "reentrant"))


def fail(training):
    """A backward that an exception leaves after the last layer has recorded its amaxes."""
    training.forward()
    hook = training.model.first.register_full_backward_hook(lambda *_: 1 / 0)
    del training.loss
    training.forward()
    with pytest.raises(ZeroDivisionError):
        training.loss.backward()
    hook.remove()
    training.optimizer.zero_grad()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_backward_that_fails(recipe):
    """What it has recorded waits for the model's own next backward."""
    a, b = Training(recipe, 1), Training("long", 2)
    a.step()
    fail(a)
    b.step()
    a.step()
    b.step()
    b.step()
    own = Training(recipe, 1)
    own.step()
    fail(own)
    own.step()
    assert same(a.log, own.log)
    assert same(b.log, alone("long", 2))


def test_a_loaded_history_stays_beside_a_shorter_one():
    """An autocast of another model, before the first forward of one whose history was loaded, does not cut that."""
    a = Training("long", 1)
    for _ in range(8):
        a.step()
    records = state_records(a.model)
    b, other = Training("long", 1), Training("delayed", 2)
    load_state_records(b.model, records, b.recipe)
    other.step()
    found = state_records(b.model)
    assert found.keys() == records.keys()
    assert all(torch.equal(found[name], records[name]) for name in records)


@pytest.mark.long(lambda pair, kind: (PAIRS.index(pair) + list(KINDS).index(kind)) % 3 != 0)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_two_threads(pair, kind):
    """Each is inside its autocast, behind it, or in its backward while the other one trains."""
    a, b = Training(pair[0], 1, kind), Training(pair[1], 2, kind)
    turns = Turns()
    turns.run(lambda pause: [a.step(pause) for _ in range(3)], lambda pause: [b.step(pause) for _ in range(3)])
    assert turns.errors == [None, None]
    assert same(a.log, alone(pair[0], 1, kind))
    assert same(b.log, alone(pair[1], 2, kind))


def test_threads_that_run_as_they_like():
    trainings = [Training(recipe, seed, "plain") for seed, recipe in enumerate(RECIPES)]
    turns = [lambda training=training: [training.step() for _ in range(6)] for training in trainings]
    threads = [threading.Thread(target=turn) for turn in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, (recipe, training) in enumerate(zip(RECIPES, trainings, strict=True)):
        assert same(training.log, alone(recipe, seed, "plain", steps=6)), recipe


def layers(kind):
    """A model whose layers are made by hand."""
    model = Net(kind)
    for name in ("first", "middle", "last"):
        old = getattr(model, name)
        new = octavo.nn.Linear(old.in_features, old.out_features)
        new.load_state_dict(old.state_dict())
        setattr(model, name, new)
    return model


def test_layers_outside_of_transform_on_two_threads_are_refused():
    a, b = Training("delayed", 1, make=layers), Training("delayed", 2, make=layers)
    turns = Turns()
    turns.run(a.step, b.step)
    assert isinstance(turns.errors[1], InputError)
    assert "Pass each model to octavo.transform" in str(turns.errors[1])
    assert turns.errors[0] is None
    b = Training("delayed", 2, make=layers)
    b.step()  # one after the other
    assert same(a.log, alone("delayed", 1, make=layers, steps=1))
    assert same(b.log, alone("delayed", 2, make=layers, steps=1))


def test_a_backward_on_another_thread_than_its_forward():
    a, b = Training("delayed", 1, "plain"), Training("long", 2, "reentrant")
    for _ in range(3):
        a.forward()
        b.forward()
        for each in (b, a):
            turns = Turns()
            turns.run(lambda pause, each=each: each.backward(), lambda pause: None)
            assert turns.errors == [None, None]
    assert same(a.log, alone("delayed", 1, "plain"))
    assert same(b.log, alone("long", 2, "reentrant"))


def test_a_context_is_of_its_thread():
    """As `torch.autocast`: a layer on a thread without one runs in high precision, which is said once."""
    layer, x = octavo.nn.Linear(32, 16), torch.randn(4, 32)
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    turns, found = Turns(), []
    with octavo.fp8_autocast():
        with pytest.warns(UserWarning, match="on this thread"):
            turns.run(lambda pause: found.append(layer(x)), lambda pause: found.append(layer(x)))
        assert not torch.equal(layer(x), plain)
    assert turns.errors == [None, None]
    assert all(torch.equal(one, plain) for one in found)


class Compiled(Training):
    def forward(self, pause=lambda: None):
        if not hasattr(self, "eager"):
            self.eager = self.model
            self.model = torch.compile(self.eager, fullgraph=True, backend="aot_eager")
        super().forward(pause)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
@pytest.mark.parametrize("other", ["long", "current"])
def test_a_compiled_model_is_compiled_once_beside_another(other):
    torch.compiler.reset()
    a, b = Compiled("delayed", 1), Training(other, 2)
    graphs = []
    for _ in range(4):
        a.step()
        b.step()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 4
    torch.compiler.reset()
    own = Compiled("delayed", 1)
    for _ in range(4):
        own.step()
    assert same(a.log, own.log)
    assert same(b.log, alone(other, 2, steps=4))
