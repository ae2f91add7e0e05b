"""The first cast of delayed scaling: by the tensor's own amax, whose bits are those of current scaling."""

import copy
import functools
import gc
import math
from unittest import mock

import numpy as np
import pytest
import torch
from driving import array, delayed, gradients, same_bits, snapshot, step
from restatement import E4M3, round_trip
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.compat.te import recipes as te_recipes
from octavo.fp8 import buffers, quantizer, scaling
from octavo.fp8.recipe import Operand
from octavo.nn.moe import Experts, LayerNormMoE

ROWS, INNER, OUTER = 6, 24, 18
CURRENT = octavo.recipe.CurrentScaling
THEIRS = te_recipes.DelayedScaling
torch_warns_of_itself = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture
def draw():
    return torch.Generator().manual_seed(5)


def linear(draw, size=1.0):
    layer = octavo.nn.Linear(INNER, OUTER)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(OUTER, INNER, generator=draw) * size)
    return layer


LAYERS = {
    "linear": lambda: octavo.nn.Linear(INNER, INNER),
    "norm and linear": lambda: octavo.nn.LayerNormLinear(INNER, INNER),
    "mlp": lambda: octavo.nn.LayerNormMLP(INNER, 32, activation="swiglu", normalization="RMSNorm"),
    "gelu mlp": lambda: octavo.nn.LayerNormMLP(INNER, 32),
}


def relative_error(found, want):
    return ((found - want).norm() / want.norm()).item()


@pytest.mark.parametrize(("weights", "inputs"), [(1e-3, 1.0), (1e-5, 1.0), (1.0, 1e4), (1e-4, 3e5)])
def test_an_evaluation_of_a_model_that_never_trained_is_as_exact_as_current_scaling(draw, weights, inputs):
    layer = linear(draw, weights)
    x = torch.randn(ROWS, INNER, generator=draw) * inputs
    want = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    with torch.no_grad(), octavo.fp8_autocast(fp8_recipe=CURRENT()):
        current = layer(x)
    with torch.no_grad(), octavo.fp8_autocast():
        found = layer(x)
        assert same_bits(layer(x), current)
    assert same_bits(found, current)
    assert relative_error(found, want) < 0.06
    report = octavo.fp8.inspect(layer)
    assert [(report[name]["scale"].item(), report[name]["begun"]) for name in ("input", "weight")] == [(1, False)] * 2
    assert not report["input"]["amax_history"].any()


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_the_first_step_has_the_bits_of_current_scaling_and_the_second_those_of_the_histories(make, draw):
    base = make()
    batches = [(torch.randn(ROWS, INNER, generator=draw), torch.randn(ROWS, INNER, generator=draw) * 1e-6) for _ in range(2)]
    first, second = copy.deepcopy(base), copy.deepcopy(base)
    for layer, recipe in ((first, delayed()), (second, CURRENT())):
        layer.found = [*step(layer, *batches[0], recipe), *gradients(layer).values()]
    assert all(map(same_bits, first.found, second.found))
    assert all(begun(first))
    # The scales are those of amaxes of the first step, whatever that was cast by.
    theirs = copy.deepcopy(base)
    if make is LAYERS["linear"]:  # whose operands do not depend on a cast
        step(theirs, *batches[0], THEIRS(amax_history_len=4))
        assert snapshot(first) == snapshot(theirs)


def begun(module):
    return [bool(slot.begun.all()) for _, state in scaling.states_of(module) for slot in state.slots.values()]


def test_transformer_engines_rule_is_the_scale_one(draw):
    layer = linear(draw, 1e-3)
    x, g = torch.randn(ROWS, INNER, generator=draw), torch.randn(ROWS, OUTER, generator=draw) * 1e-6
    y, dx = step(layer, x, g, THEIRS())
    one = np.float32(1)
    want = round_trip(array(x), one, E4M3) @ round_trip(array(layer.weight), one, E4M3).T + array(layer.bias)
    np.testing.assert_allclose(array(y), want, rtol=1e-5, atol=1e-6)
    assert not dx.any()  # 1e-6 is below E5M2's smallest number
    again, _ = step(layer, x, g, THEIRS())
    exact = nn.functional.linear(x, layer.weight, layer.bias).detach()
    assert relative_error(again, exact) < 0.06


def test_their_first_cast_reports_saturation_and_ours_has_none(draw):
    x = torch.full((2, INNER), 449.0)
    for recipe, saturated in ((THEIRS(), True), (octavo.recipe.DelayedScaling(), False)):
        layer = linear(draw)
        step(layer, x, torch.ones(2, OUTER), recipe)
        assert octavo.fp8.inspect(layer)["input"]["saturated"] is saturated


CHECKPOINTS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "saved tensors": functools.partial(checkpoint, use_reentrant=False),
    "recomputing": functools.partial(checkpoint, use_reentrant=False, context_fn=octavo.fp8.autocast.recomputing),
}


@pytest.mark.parametrize("inside", [False, True], ids=["backward after", "backward inside"])
@pytest.mark.parametrize("around", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_checkpoints_repeat_the_choice_of_their_forward(around, inside, draw):
    """At the backward the operand has begun, and its scale is there: the recomputation takes the forward's all the same."""
    model = nn.Sequential(*(make() for make in LAYERS.values()))
    batches = [(torch.randn(ROWS, INNER, generator=draw), torch.randn(ROWS, INNER, generator=draw) * 10.0**i) for i in range(3)]
    results = []
    for run in (lambda f, x: f(x), around):
        twin = copy.deepcopy(model)
        found = []
        for x, g in batches:
            x = x.clone().requires_grad_()
            with octavo.fp8_autocast(fp8_recipe=delayed()):
                y = x
                for layer in twin:
                    y = run(layer, y)
                if inside:
                    y.backward(g)
            if not inside:
                y.backward(g)
            found += [y.detach(), x.grad, *gradients(twin).values()]
        results.append((found, snapshot(twin[0]), snapshot(twin[2])))
    assert all(map(same_bits, results[0][0], results[1][0]))
    assert results[0][1:] == results[1][1:]


def test_two_forwards_before_their_backwards_each_have_a_first_cast(draw):
    """The first update comes between them and their backwards, and changes neither."""
    base = LAYERS["mlp"]()
    batches = [(torch.randn(ROWS, INNER, generator=draw) * 4.0**i, torch.randn(ROWS, INNER, generator=draw)) for i in range(2)]
    alone = []
    for x, g in batches:
        layer = copy.deepcopy(base)
        alone.append([*step(layer, x, g, CURRENT()), *gradients(layer).values()])
    layer = copy.deepcopy(base)
    xs = [x.clone().requires_grad_() for x, _ in batches]
    with octavo.fp8_autocast(fp8_recipe=delayed()):  # one context: nothing begins between the two
        ys = [layer(x) for x in xs]
    for (_, g), x, y, want in zip(batches, xs, ys, alone, strict=True):
        if x is xs[1]:
            break  # its gradients are cast by the first one's amax
        y.backward(g)
        found = [y.detach(), x.grad, *gradients(layer).values()]
        assert all(map(same_bits, found, want))
    assert same_bits(ys[1].detach(), alone[1][0])


def test_later_micro_batches_use_the_first_ones_weight(draw):
    layer = linear(draw, 1e-4)
    x, g = torch.randn(ROWS, INNER, generator=draw), torch.randn(ROWS, OUTER, generator=draw)
    want = None
    for number in range(3):
        y, dx = step(layer, x, g, delayed(), is_first_microbatch=number == 0)
        with torch.no_grad():
            layer.weight.mul_(-3)  # that nobody reads before the next step
        want = want or (y, dx)
        assert relative_error(y, want[0]) < 0.05
        assert relative_error(dx, want[1]) < 0.2


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_what_is_not_finite_or_zero_begins_nothing(draw, value):
    layer = linear(draw)
    x, g = torch.randn(ROWS, INNER, generator=draw), torch.randn(ROWS, OUTER, generator=draw)
    for _ in range(2):
        step(layer, torch.full_like(x, value), g, delayed())
        report = octavo.fp8.inspect(layer)
        assert (report["input"]["begun"], report["input"]["scale"].item()) == (False, 1)
        assert report["weight"]["begun"]
    layer.fp8_state.slots[Operand.INPUT].history.zero_()  # of an infinity
    with torch.no_grad(), octavo.fp8_autocast(fp8_recipe=CURRENT()):
        want = layer(x)
    y, _ = step(layer, x, g, delayed())
    assert same_bits(y, want)  # the weight has not moved: its delayed scale is its current one
    assert octavo.fp8.inspect(layer)["input"]["begun"]


def test_a_tensor_that_has_begun_keeps_its_scale_over_zeros(draw):
    layer = linear(draw)
    g = torch.randn(ROWS, OUTER, generator=draw)
    step(layer, torch.randn(ROWS, INNER, generator=draw), g, delayed())
    before = octavo.fp8.inspect(layer)["input"]["scale"].item()
    step(layer, torch.zeros(ROWS, INNER), g, delayed())
    assert octavo.fp8.inspect(layer)["input"]["scale"].item() == before != 1


def test_records_say_what_has_begun(draw):
    layer, x, g = linear(draw), torch.randn(ROWS, INNER, generator=draw), torch.zeros(ROWS, OUTER)
    model = nn.Sequential(layer)
    step(model, x, g, delayed())
    records = scaling.state_records(model)
    flags = {name: records[f"0.{name}.begun"].item() for name in ("input", "weight", "grad_output")}
    assert flags == {"input": True, "weight": True, "grad_output": False}
    assert records["0.grad_output.scale"] == 1
    older = {name: value for name, value in records.items() if not name.endswith("begun")}
    for stored in (records, older):
        other = nn.Sequential(copy.deepcopy(layer))
        scaling.reset_states(other)
        assert not any(begun(other))
        scaling.load_state_records(other, stored, delayed())
        assert scaling.state_records(other).keys() == records.keys()
        assert all(torch.equal(value, records[name]) for name, value in scaling.state_records(other).items())
    # A scale of exactly 1 that was given by an amax: the flag knows it, a history of zeros would not.
    one = dict(records) | {"0.input.scale": torch.ones(()), "0.input.amax_history": torch.zeros(4)}
    scaling.load_state_records(other, one, delayed())
    assert scaling.state_records(other)["0.input.begun"]
    scaling.load_state_records(other, {k: v for k, v in one.items() if not k.endswith("begun")}, delayed())
    assert not scaling.state_records(other)["0.input.begun"]
    # An older version's scale of 1 has begun by the amaxes in its history.
    one["0.input.amax_history"] = torch.tensor([448.0, 0.0, 0.0, 0.0])
    scaling.load_state_records(other, {k: v for k, v in one.items() if not k.endswith("begun")}, delayed())
    assert scaling.state_records(other)["0.input.begun"]
    assert scaling.state_records(other)["0.input.scale"] == 1


def test_copies_and_pickles_keep_what_has_begun(draw, tmp_path):
    layer = linear(draw)
    step(layer, torch.randn(ROWS, INNER, generator=draw), torch.zeros(ROWS, OUTER), delayed())
    torch.save(layer, tmp_path / "layer")
    for other in (copy.deepcopy(layer), torch.load(tmp_path / "layer", weights_only=False)):
        assert begun(other) == begun(layer) == [True, True, False]


def test_loaded_weights_begin_anew_and_nothing_else_does(draw):
    layer, small = linear(draw), linear(draw, 1e-4)
    x, g = torch.randn(ROWS, INNER, generator=draw), torch.randn(ROWS, OUTER, generator=draw)
    step(layer, x, g, delayed())
    layer.load_state_dict({"bias": small.bias}, strict=False)
    assert begun(layer) == [True, True, True]
    scale = octavo.fp8.inspect(layer)["input"]["scale"].item()
    layer.load_state_dict(small.state_dict())
    assert begun(layer) == [True, False, True]
    assert octavo.fp8.inspect(layer)["input"]["scale"].item() == scale
    with torch.no_grad(), octavo.fp8_autocast(fp8_recipe=delayed()):
        assert relative_error(layer(x), nn.functional.linear(x, layer.weight, layer.bias)) < 0.06


def test_loaded_weights_keep_their_scale_by_transformer_engines_rule(draw):
    layer, small = linear(draw), linear(draw, 1e-4)
    step(layer, torch.randn(ROWS, INNER, generator=draw), torch.randn(ROWS, OUTER, generator=draw), THEIRS())
    before = snapshot(layer)
    layer.load_state_dict(small.state_dict())
    assert snapshot(layer) == before


@pytest.mark.parametrize("last", ["theirs", "ours"])
@pytest.mark.parametrize("between", ["trained", "evaluated", "offered"])
def test_the_rule_for_loaded_weights_is_that_of_the_last_training(draw, last, between):
    """Equal recipes of both rules share their slots, which any autocast may have made."""
    layer, small = linear(draw), linear(draw, 1e-4)
    x, g = torch.randn(ROWS, INNER, generator=draw), torch.randn(ROWS, OUTER, generator=draw)
    mine, other = (THEIRS, octavo.recipe.DelayedScaling) if last == "theirs" else (octavo.recipe.DelayedScaling, THEIRS)
    if between == "offered":
        step(linear(draw), x, g, other())
    elif between == "trained":
        step(layer, x, g, other())
    step(layer, x, g, mine())
    if between == "evaluated":
        with torch.no_grad(), octavo.fp8_autocast(fp8_recipe=other()):
            layer(x)
    layer.load_state_dict(small.state_dict())
    assert begun(layer) == [True, last == "theirs", True]


def test_weights_that_a_load_refuses_keep_their_scale(draw):
    model = nn.Sequential(linear(draw), octavo.nn.Linear(OUTER, INNER))
    step(model, torch.randn(ROWS, INNER, generator=draw), torch.randn(ROWS, INNER, generator=draw), delayed())
    state = model.state_dict() | {"0.weight": torch.ones(2, 2)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state)
    assert begun(model) == [True, True, True, True, False, True]  # PyTorch has written the other


def test_a_weight_that_is_loaded_between_micro_batches_is_cast_anew(draw):
    layer, other = linear(draw), linear(draw, 50.0)
    x, g = torch.randn(ROWS, INNER, generator=draw), torch.randn(ROWS, OUTER, generator=draw)
    step(layer, x, g, delayed(), is_first_microbatch=True)
    layer.load_state_dict(other.state_dict())
    y, _ = step(layer, x, g, delayed(), is_first_microbatch=False)
    assert relative_error(y, nn.functional.linear(x, other.weight, other.bias)) < 0.06


@pytest.mark.long
@torch_warns_of_itself
def test_compiled_code_in_a_checkpoint_repeats_its_forward_behind_another_forward(draw):
    base = LAYERS["linear"]()
    x, g = torch.randn(ROWS, INNER, generator=draw), torch.randn(ROWS, INNER, generator=draw)
    results = []
    for compiled in (False, True):
        layer = copy.deepcopy(base)
        forward = torch.compile(layer) if compiled else layer
        own = x.clone().requires_grad_()
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            y = CHECKPOINTS["recomputing"](forward, own)
        with octavo.fp8_autocast(fp8_recipe=delayed()):  # by now the input has begun
            layer(x * 100)
        y.backward(g)
        results.append([y.detach(), own.grad, *gradients(layer).values()])
    torch._dynamo.reset()
    for eager, other in zip(*results, strict=True):
        assert eager.isfinite().all()
        torch.testing.assert_close(other, eager, rtol=1e-5, atol=1e-5 * eager.abs().max().item())


@pytest.mark.long
@torch_warns_of_itself
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_compiled_code_casts_the_first_time_as_eager_code(make, draw):
    base = make()
    batches = [(torch.randn(ROWS, INNER, generator=draw), torch.randn(ROWS, INNER, generator=draw) * 1e-5) for _ in range(3)]
    results = []
    for compiled in (False, True):
        layer = copy.deepcopy(base)
        forward = torch.compile(layer) if compiled else layer
        found = []
        for x, g in batches:
            found += [*step(forward, x, g, delayed()), *gradients(layer).values()]
        results.append((found, begun(layer)))
    torch._dynamo.reset()
    for eager, other in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-5, atol=1e-5 * eager.abs().max().item())
    assert results[0][1] == results[1][1]
    assert all(results[0][1])


def with_own_buffers(layer):
    """The layer, whose buffers no other test's layers share."""
    scaling.use_separate_buffers(layer)
    return layer


def test_a_layer_that_is_gone_holds_no_graph_and_is_not_named(draw, capsys):
    """Layers outside of `octavo.transform` share their buffers."""
    layer, other = linear(draw), linear(draw)
    other.fp8_state.buffers = with_own_buffers(layer).fp8_state.buffers
    x = torch.randn(ROWS, INNER, generator=draw)
    step(other, x, torch.zeros(ROWS, OUTER), delayed())
    step(layer, x, torch.ones(ROWS, OUTER), delayed())
    backward = list(layer.fp8_state.buffers.backward.values())
    assert any(buffer.holds_graphs for buffer in backward)
    del other
    gc.collect()
    assert not any(buffer.holds_graphs for buffer in backward)
    for _ in range(12):
        step(layer, x, torch.ones(ROWS, OUTER), delayed())
    assert not any(buffer.waiting for buffer in backward)
    assert capsys.readouterr().err == ""


def test_what_does_not_begin_is_named_once(draw, capsys):
    layer = with_own_buffers(linear(draw))
    x, g = torch.randn(ROWS, INNER, generator=draw), torch.zeros(ROWS, OUTER)
    for _ in range(25):
        step(layer, x, g, delayed())
    said = capsys.readouterr().err
    assert said.count("grad_output of Linear (weight [18, 24])") == 1
    assert said.count("octavo:") == 1
    with buffers.updates_together() as update:
        step(layer, x, g, delayed())
    assert any(buffer.holds_graphs for buffer in update.buffers)
    with buffers.updates_together() as update:
        step(layer, x, torch.ones(ROWS, OUTER), delayed())
    assert update.buffers
    assert not any(buffer.holds_graphs for buffer in update.buffers)


def test_weights_that_are_loaded_hold_a_graph_until_they_have_begun(draw):
    """One that was recorded before would read scales that are gone."""
    layer = with_own_buffers(linear(draw))
    x, g = torch.randn(ROWS, INNER, generator=draw), torch.randn(ROWS, OUTER, generator=draw)
    holds = []
    with buffers.updates_together() as update:
        for load in (False, True, False):
            step(layer, x, g, delayed())
            update()
            if load:
                layer.load_state_dict(linear(draw).state_dict())
            holds.append(any(buffer.holds_graphs for buffer in update.buffers))
    assert holds == [False, True, False]


def test_an_operand_that_is_never_cast_holds_no_graph_and_is_not_named(draw, capsys):
    layer = with_own_buffers(linear(draw))
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(False)
    with buffers.updates_together() as update:
        for _ in range(12):
            with octavo.fp8_autocast(fp8_recipe=delayed()):
                layer(torch.randn(ROWS, INNER, generator=draw))
            update()
    assert update.buffers
    assert not any(buffer.holds_graphs for buffer in update.buffers)
    assert capsys.readouterr().err == ""


def mixture(draw, size=1.0):
    layer = LayerNormMoE(INNER, 32, 1e-5, Experts(4, 1))
    with torch.no_grad():
        for weight in (layer.experts.fc1_weight, layer.experts.fc2_weight):
            sizes = torch.logspace(0, -1, 4)[:, None, None]  # of each expert
            weight.copy_((torch.randn(4, len(weight) // 4, weight.shape[1], generator=draw) * sizes * size).flatten(0, 1))
    return layer


def choose(layer, experts):
    """Route token i to `experts[i % len(experts)]`."""

    def route(logits):
        chosen = torch.tensor(experts)[torch.arange(len(logits)) % len(experts), None]
        return logits.softmax(-1).gather(1, chosen), chosen

    vars(layer)["_route"] = route
    return layer


def evaluated(layer, x):
    with torch.no_grad(), octavo.fp8_autocast(fp8_recipe=delayed()):
        return layer(x)[1]


def with_scales(layer, scale_of):
    """A copy whose entries that have not begun have the scale that `scale_of` gives of a slot's scales."""
    twin = copy.deepcopy(layer)
    for (_, state), (_, other) in zip(scaling.states_of(layer), scaling.states_of(twin), strict=True):
        for operand, slot in other.slots.items():
            scales = state.slots[operand].present()[0]
            scaling.fill(slot, torch.where(scales.isnan(), scale_of(state, operand, scales), scales), slot.history.clone())
    return twin


def test_an_expert_that_has_not_begun_takes_the_largest_amax_of_its_stack(draw):
    layer = choose(mixture(draw, 1e-3), [0, 2])
    x = torch.randn(12, INNER, generator=draw)
    step_of_experts(layer, x)
    flags = {name: state.slots[Operand.INPUT].begun.tolist() for name, state in scaling.states_of(layer)}
    assert flags == {key: [True, False, True, False] for key in flags}
    assert len(flags) == 2
    choose(layer, [0, 1, 2, 3])

    def smallest(_, __, scales):
        return scales[~scales.isnan()].min()

    assert same_bits(evaluated(layer, x), evaluated(with_scales(layer, smallest), x))
    assert not any(buffer.holds_graphs for _, state in scaling.states_of(layer) for buffer in state.buffers.forward.values())
    step_of_experts(layer, x)
    assert all(begun(layer))


def step_of_experts(layer, x):
    with octavo.fp8_autocast(fp8_recipe=delayed()):
        y = layer(x)[1]
    y.sum().backward()
    layer.zero_grad()


def test_the_first_cast_of_a_stack_is_by_the_largest_amax_of_its_matrices(draw):
    layer = choose(mixture(draw, 1e-3), [0, 1, 2, 3])
    x = torch.randn(12, INNER, generator=draw)
    found = evaluated(layer, x)

    def of_weights(state, operand, scales):
        if operand is Operand.WEIGHT:
            return torch.full_like(scales, 448 / state.weight.detach().abs().max().item())
        return scales  # casts of their own

    assert same_bits(evaluated(with_scales(layer, of_weights), x), found)
    exact = layer(x)[1].detach()
    assert relative_error(found, exact) < 0.15  # two products, and between them a product of two casts; 1 at a scale of 1


def test_a_restored_model_measures_nothing_before_its_casts(draw):
    """It may evaluate for good: no update will come from which the host could learn what has begun."""
    layer = linear(draw)
    x = torch.randn(ROWS, INNER, generator=draw)
    step(layer, x, torch.randn(ROWS, OUTER, generator=draw), delayed())
    records = scaling.state_records(layer)
    for other in (copy.deepcopy(layer), linear(draw)):
        scaling.load_state_records(other, records, delayed())
        unused = mock.patch.object(quantizer, "first_scale", side_effect=AssertionError)
        with unused, torch.no_grad(), octavo.fp8_autocast(fp8_recipe=delayed()):
            other(x)
