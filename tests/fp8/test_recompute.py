"""Activation checkpointing, copies and recipes of Transformer Engine's classes leave the numbers as they are."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import gc
import io
import itertools
import pickle
import weakref
from dataclasses import dataclass

import pytest
import torch
from driving import RECIPES, array, check_states, delayed, gradients, same_bits, snapshot, step, warmed
from restatement import delayed_states
from torch.utils.checkpoint import checkpoint

import octavo
import octavo.fp8.autocast
import octavo.fp8.checkpoints
from octavo.compat.te.recompute import checkpoint as te_checkpoint

WIDTH = 16
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # nested reentrant checkpoints


def layers():
    """A small network of every layer, the same each time."""
    torch.manual_seed(2)
    return torch.nn.Sequential(
        octavo.nn.Linear(WIDTH, WIDTH),
        octavo.nn.LayerNormLinear(WIDTH, WIDTH, normalization="RMSNorm"),
        octavo.nn.LayerNormMLP(WIDTH, 24, normalization="RMSNorm", activation="swiglu"),
    )


def batches(count=3, seed=4):
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(6, WIDTH, generator=draw) * 3**i, torch.randn(6, WIDTH, generator=draw) / 3**i) for i in range(count)]


def whole(model, x):
    for layer in model:
        x = layer(x)
    return x


def recomputed(each, *, use_reentrant=False, **arguments):
    """Forward with each layer, or the network as a whole, checkpointed."""

    def forward(model, x):
        for layer in model if each else [model]:
            x = checkpoint(layer, x, use_reentrant=use_reentrant, **arguments)
        return x

    return forward


def nested(outer, inner, **arguments):
    """The network as a whole, and each layer in it, checkpointed, reentrant or not."""

    def layered(model, x):
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=inner, **arguments)
        return x

    return lambda model, x: checkpoint(functools.partial(layered, model), x, use_reentrant=outer)


class Repeated(torch.autograd.Function):
    """A reentrant checkpoint as other libraries have it."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        y.backward(gradient)
        return None, x.grad


def train(forward, recipe, inside, evaluate=False):
    """Some steps; everything that came out of them."""
    model, results, states = layers(), [], []
    for x, g in batches(3 if isinstance(recipe, octavo.recipe.DelayedScaling) else 2):
        x.requires_grad_()
        with octavo.fp8_autocast(fp8_recipe=recipe):
            y = forward(model, x)
            if inside:
                y.backward(g)
        if evaluate:
            with torch.no_grad(), octavo.fp8_autocast(fp8_recipe=recipe):
                model(x * 100)
        if not inside:
            y.backward(g)
        results += [y, x.grad, *gradients(model).values()]
        states += [snapshot(layer) for layer in model]
    return results, states


@functools.cache
def plain(recipe, inside):
    """The steps without recomputation."""
    return train(whole, RECIPES[recipe](), inside)


WAYS = {
    "each layer": recomputed(True),
    "the whole": recomputed(False),
    "each layer, told": recomputed(True, context_fn=octavo.fp8.autocast.recomputing),
    "the whole, told": recomputed(False, context_fn=octavo.fp8.autocast.recomputing),
    "each layer, reentrant": recomputed(True, use_reentrant=True),
    "the whole, reentrant": recomputed(False, use_reentrant=True, preserve_rng_state=False),
    "nested": nested(False, False),
    "nested, reentrant": nested(True, True),
    "reentrant within": nested(False, True),
    "reentrant around": nested(True, False),
    "told within, reentrant": nested(True, False, context_fn=octavo.fp8.autocast.recomputing),
    "by another library": Repeated.apply,
}


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("way", WAYS)
def test_recomputation_changes_no_bit(way, recipe, inside):
    results, states = plain(recipe, inside)
    again, states_again = train(WAYS[way], RECIPES[recipe](), inside)
    assert states_again == states
    assert all(itertools.starmap(same_bits, zip(again, results, strict=True)))


@pytest.mark.parametrize("way", WAYS)
def test_an_evaluation_before_the_recomputation_changes_no_bit(way):
    results, states = plain("delayed", False)
    again, states_again = train(WAYS[way], delayed(), False, evaluate=True)
    assert states_again == states
    assert all(itertools.starmap(same_bits, zip(again, results, strict=True)))


def searches(count, monkeypatch):
    """How often a checkpoint around so many layers is looked for, by its hook and on the call stack: (forward, backward)."""
    model = torch.nn.Sequential(*(octavo.nn.LayerNormMLP(WIDTH, 24) for _ in range(count)))
    found = []
    for name in ("_innermost", "_stack"):
        plain = getattr(octavo.fp8.checkpoints, name)
        monkeypatch.setattr(octavo.fp8.checkpoints, name, lambda plain=plain, name=name: found.append(name) or plain())
    ((x, g),) = batches(1)
    with octavo.fp8_autocast(fp8_recipe=delayed()):
        y = checkpoint(model, x.requires_grad_(), use_reentrant=False)
        forward, found[:] = list(found), []
        y.backward(g)
    monkeypatch.undo()
    return forward, found


def test_a_checkpoint_is_found_once_whatever_number_of_layers_is_in_it(monkeypatch):
    of_one = searches(1, monkeypatch)
    assert of_one[1] == ["_innermost", "_stack"]  # the stack at the end of the backward
    assert searches(3, monkeypatch) == of_one


@pytest.mark.parametrize("where", ["within the second context", "after both"])
@pytest.mark.parametrize("way", WAYS)
def test_recomputation_after_a_later_forward_uses_its_own_forwards_scales(way, where):
    """A schedule that runs the next forward before the backward of the first."""
    found = []
    for forward in (whole, WAYS[way]):
        model, results = layers(), []
        for (x0, g0), (x1, g1) in [batches(2, 4), batches(2, 5)]:
            with octavo.fp8_autocast(fp8_recipe=delayed()):
                y0 = forward(model, x0.requires_grad_())
            with octavo.fp8_autocast(fp8_recipe=delayed()):
                y1 = forward(model, x1.requires_grad_())
                if where == "within the second context":
                    y0.backward(g0)
            if where == "after both":
                y0.backward(g0)
            y1.backward(g1)
            results += [y0, y1, x0.grad, x1.grad, *gradients(model).values()]
        found.append((results, [snapshot(layer) for layer in model]))
    assert found[1][1] == found[0][1]
    assert all(itertools.starmap(same_bits, zip(found[1][0], found[0][0], strict=True)))


def shared(model, x, run):
    """The first layer in two checkpoints and outside, the gradients of each of another size."""
    first, *others = model
    x = run(first, x) * 8
    x = run(first, torch.tanh(x))
    return whole(others, first(x * 3))


def with_contexts(model, x, run):
    """Autocasts that end within the checkpoint, one of another recipe and one without FP8."""

    def contexts(x):
        with octavo.fp8_autocast(enabled=False):
            x = model[0](x)
        x = model[1](x)
        with octavo.fp8_autocast(fp8_recipe=octavo.recipe.CurrentScaling()):
            return model[2](x)

    return run(contexts, x)


def a_context_of_its_own(model, x, run):
    """The outermost autocast begins and ends within the checkpoint."""

    def context(x):
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            return whole(model, x)

    return run(context, x)


def contexts_of_its_own(model, x, run):
    """Several of them, some without a layer, and one layer in all others: its scales change between them."""

    def contexts(x):
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            x = model[0](x) * 8
        with octavo.fp8_autocast(enabled=False):
            x = model[1](x)
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            pass
        with octavo.fp8_autocast(fp8_recipe=delayed()), octavo.fp8_autocast(fp8_recipe=octavo.recipe.CurrentScaling()):
            x = model[0](torch.tanh(x))
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            return whole(model, x * 3)

    return run(contexts, x)


def a_checkpoint_in_each_context(model, x, run):
    """Nested: within a checkpoint, contexts, and in each of them checkpoints."""

    def contexts(x):
        for layer in (model[0], *model):
            with octavo.fp8_autocast(fp8_recipe=delayed()):
                x = run(layer, x * 2)
        return x

    return run(contexts, x)


def contexts_in_nested_checkpoints(model, x, run):
    """Nested: the inner checkpoints enter the contexts."""

    def inner(layer, x):
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            x = layer(x * 2)
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            return layer(x / 3)

    def outer(x):
        for layer in model:  # twice each: gradients of more uses are summed in another order by nested reentrant checkpoints
            x = run(functools.partial(inner, layer), x)
        return x

    return run(outer, x)


def another_recipe_each_time(model, x, run):
    """Each step's history is of another length: layers get other slots within the checkpoint."""
    model.calls = getattr(model, "calls", 0) + 1
    recipe = octavo.recipe.DelayedScaling(amax_history_len=model.calls + 1)

    def context(x):
        with octavo.fp8_autocast(fp8_recipe=recipe):
            return whole(model, x)

    return run(context, x)


def another_recipe_around(model, x, run):
    """The same by the context around the checkpoint."""
    model.calls = getattr(model, "calls", 0) + 1
    with octavo.fp8_autocast(fp8_recipe=octavo.recipe.DelayedScaling(amax_history_len=model.calls + 1)):
        return run(functools.partial(whole, model), x)


CHECKPOINTS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "told": functools.partial(checkpoint, use_reentrant=False, context_fn=octavo.fp8.autocast.recomputing),
    "not stopped": functools.partial(checkpoint, use_reentrant=False, early_stop=False),
    "Transformer Engine's": te_checkpoint,
    "Transformer Engine's, reentrant": functools.partial(te_checkpoint, use_reentrant=True),
    "by another library": Repeated.apply,
}
AROUND = [shared, with_contexts, another_recipe_around]
"""Forwards within a context, if they do not enter one themselves."""


def steps(forward, run, evaluated=False, later=False):
    """Some steps, and what came out of them; later: each backward behind the next step's forward."""
    model, results, states, waiting = layers(), [], [], []
    if evaluated:
        with torch.no_grad():
            for recipe in (delayed(), octavo.recipe.DelayedScaling(amax_history_len=7)):
                with octavo.fp8_autocast(fp8_recipe=recipe):
                    model(batches()[0][0] * 50)
    for x, g in batches():
        x.requires_grad_()
        with octavo.fp8_autocast(fp8_recipe=delayed()) if forward in AROUND else contextlib.nullcontext():
            y = forward(model, x, run)
        waiting.append((y, x, g))
        while len(waiting) > later:
            y, x, g = waiting.pop(0)
            y.backward(g)
            results += [y, x.grad, *gradients(model).values()]
            states.append(snapshot(model))
    return results, states


@functools.cache
def plain_steps(forward, **options):
    """The same without a checkpoint."""
    return steps(forward, lambda function, x: function(x), **options)


@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize("state", ["", "evaluated", "later"])
@pytest.mark.parametrize(
    "forward",
    [
        shared,
        with_contexts,
        a_context_of_its_own,
        contexts_of_its_own,
        a_checkpoint_in_each_context,
        contexts_in_nested_checkpoints,
        another_recipe_each_time,
        another_recipe_around,
    ],
)
def test_contexts_and_uses_within_a_checkpoint(forward, state, way):
    options = {state: True} if state else {}
    results, states = plain_steps(forward, **options)
    again, states_again = steps(forward, CHECKPOINTS[way], **options)
    assert states_again == states
    assert all(itertools.starmap(same_bits, zip(again, results, strict=True)))


def test_a_backward_that_fails_loses_no_amax_of_the_next():
    """In a reentrant checkpoint too, whose backward is one within another."""
    scales = []
    for run in (lambda layer, x: layer(x), functools.partial(checkpoint, use_reentrant=True)):
        model, ((x, g), (other, _), _) = layers(), batches()
        x.requires_grad_()
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            y = run(model, x)
        handle = model[0].weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.backward(g * 100)
        handle.remove()
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            y = run(model, other.requires_grad_())
        y.backward(g)
        scales.append(snapshot(model))
    assert scales[0] == scales[1]
    assert scales[0]["2.fc2.grad_output"][1][-1] == torch.tensor(100 * g.abs().max().item()).view(torch.int32)


@pytest.mark.parametrize("order", ["each", "last"])
@pytest.mark.parametrize("way", ["told", "found", "reentrant"])
@pytest.mark.parametrize("by", ["argument", "context"])
def test_recomputation_of_micro_batches_uses_the_kept_weight(by, way, order):
    """The first micro-batch by the layer's argument or the loop's context; backward after each or after the last."""
    found = []
    context = {"use_reentrant": way == "reentrant"} | ({"context_fn": octavo.fp8.autocast.recomputing} if way == "told" else {})
    for recompute in (False, True):
        torch.manual_seed(6)
        layer, results = octavo.nn.Linear(WIDTH, WIDTH), []
        for _ in range(2):
            waiting = []
            for number, (x, g) in enumerate(batches()):
                x.requires_grad_()
                first = number == 0 if by == "argument" else None
                micro = octavo.fp8.autocast.microbatch(number == 0) if by == "context" else contextlib.nullcontext()
                with micro, octavo.fp8_autocast(fp8_recipe=delayed()):
                    y = checkpoint(layer, x, first, **context) if recompute else layer(x, first)
                waiting.append((x, y, g))
                with torch.no_grad(), octavo.fp8_autocast(fp8_recipe=octavo.recipe.CurrentScaling()):
                    layer(x * 10)
                if order == "last" and number < 2:
                    continue
                for x_of, y_of, g_of in waiting:
                    y_of.backward(g_of)
                    results += [y_of, x_of.grad, *gradients(layer).values()]
                waiting = []
            with torch.no_grad():
                layer.weight.mul_(1.7)
        found.append((results, snapshot(layer)))
    assert found[1][1] == found[0][1]
    assert all(itertools.starmap(same_bits, zip(found[1][0], found[0][0], strict=True)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["deep", "pickled"])  # noqa: S301
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_a_copy_has_the_same_scales_and_moves_on_by_itself(kind, copied):
    layer = warmed(layers()[kind], delayed())
    twin = copied(layer)
    before = snapshot(layer)
    assert snapshot(twin) == before
    (x, g), (other_x, other_g), _ = batches()
    mine = step(layer, x, g, delayed())
    after = snapshot(layer)
    assert after != before
    assert snapshot(twin) == before
    assert all(map(same_bits, step(twin, x, g, delayed()), mine))
    assert snapshot(twin) == after
    step(twin, other_x, other_g, delayed())
    assert snapshot(twin) != after
    assert snapshot(layer) == after


def test_tensors_of_a_pickle_outlive_it():
    """A model that goes to a process by `mp.spawn` gives it memory, not values."""
    layer, found = warmed(layers()[2], delayed()), []

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing):
            if isinstance(thing, torch.Tensor):
                found.append(weakref.ref(thing))
                return "memory"
            return None

    Pickler(io.BytesIO()).dump(layer)
    gc.collect()
    assert len(found) > len(list(layer.parameters()))
    assert all(tensor() is not None for tensor in found)


def test_a_copy_of_a_layer_that_never_ran_in_fp8_starts_anew():
    layer = layers()[0]
    twin = copy.deepcopy(layer)
    (x, g), *_ = batches()
    mine, its = step(layer, x, g, delayed()), step(twin, x, g, delayed())
    assert all(map(same_bits, mine, its))
    assert snapshot(layer) == snapshot(twin)


class Format(enum.Enum):
    """Transformer Engine's: a name and the largest values of forward and backward."""

    E4M3 = (448, 448)
    HYBRID = (448, 57344)


@dataclass
class DelayedScaling:
    """Transformer Engine's fields."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: object = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8CurrentScaling:
    """Transformer Engine's fields, as far as they say what is computed."""

    use_power_2_scales: bool = True  # theirs is read from the environment when it is imported
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8BlockScaling:
    """Transformer Engine's fields, as far as they say what is computed."""

    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1


@pytest.mark.parametrize("name", ["HYBRID", "E4M3"])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_transformer_engines_delayed_recipe_is_accepted(name, algorithm):
    layer, states = layers()[0], delayed_states(name == "HYBRID", 3, algorithm, 1)
    recipe = DelayedScaling(margin=1, fp8_format=Format[name], amax_history_len=3, amax_compute_algo=algorithm)
    for x, g in batches(6):
        step(layer, x, g, recipe)
        for operand, tensor in {"input": x, "weight": layer.weight, "grad_output": g}.items():
            states[operand].step(array(tensor))
        check_states(layer, states)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (DelayedScaling(), octavo.recipe.DelayedScaling()),
        (Float8CurrentScaling(use_power_2_scales=False), octavo.recipe.CurrentScaling()),
        (
            Float8CurrentScaling(use_power_2_scales=False, fp8_format=Format.E4M3),
            octavo.recipe.Float8CurrentScaling(octavo.recipe.Format.E4M3),
        ),
        (Float8CurrentScaling(), octavo.recipe.CurrentScaling(use_power_2_scales=True)),
        (Float8BlockScaling(), octavo.recipe.Float8BlockScaling()),
    ],
    ids=["delayed", "current", "current E4M3", "powers of two", "block"],
)
def test_transformer_engines_recipes_mean_what_ours_do(theirs, ours):
    results = []
    for recipe in (theirs, ours):
        layer, result = layers()[0], []
        step(layer, *batches()[0], ours)  # the first scales differ: tests/fp8/test_first_scale.py
        layer.zero_grad()
        for x, g in batches():
            result += [*step(layer, x, g, recipe), *gradients(layer).values()]
        results.append((result, snapshot(layer)))
    assert all(map(same_bits, results[0][0], results[1][0]))
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (DelayedScaling(fp8_dpa=True), r"DelayedScaling\.fp8_dpa = True: .*leave it at False"),
        (DelayedScaling(scaling_factor_compute_algo=max), r"scaling_factor_compute_algo = <built-in function max>: .*at None"),
        (Float8BlockScaling(x_block_scaling_dim=2), r"x_block_scaling_dim = 2: .*leave it at 1"),
        (Float8BlockScaling(fp8_format=Format.HYBRID), r"fp8_format = <Format\.HYBRID.*leave it at <Format\.E4M3"),
    ],
    ids=["attention", "function", "blocks", "format"],
)
def test_what_octavo_does_not_do_is_not_dropped(recipe, message):
    with pytest.raises(octavo.errors.InputError, match=message), octavo.fp8_autocast(fp8_recipe=recipe):
        pass


def test_other_objects_are_refused():
    with pytest.raises(octavo.errors.InputError), octavo.fp8_autocast(fp8_recipe="delayed"):
        pass


def test_no_recipe_is_delayed_scaling_with_its_defaults():
    layer, (x, g) = layers()[0], batches()[0]
    step(layer, x, g, None)
    states = delayed_states(True, 1024, "max", 0)
    for name, tensor in {"input": x, "weight": layer.weight, "grad_output": g}.items():
        states[name].step(array(tensor))
    check_states(layer, states)
