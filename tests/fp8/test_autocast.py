"""When scales move: contexts, nesting, evaluation, micro-batches, several backwards, what is frozen, what is refused."""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy as np
import pytest
import torch
from driving import RECIPES, array, check_state, check_states, delayed, gradients, same_bits, snapshot, step, warmed
from restatement import delayed_states, operands, round_trip

import octavo
from octavo.fp8 import buffers, scaling
from octavo.fp8.recipe import Operand

ROWS, INNER, OUTER = 6, 12, 10


@pytest.fixture
def draw():
    return torch.Generator().manual_seed(3)


@pytest.fixture
def layer():
    """A layer whose scales have left 1."""
    torch.manual_seed(11)
    return warmed(octavo.nn.Linear(INNER, OUTER), delayed())


def states_of(layer, length=4):
    """The restated states of a layer, read from what the library says."""
    report = octavo.fp8.inspect(layer)
    states = delayed_states(True, length, "max", 0)
    for name, state in states.items():
        state.scale, state.history = np.float32(report[name]["scale"].item()), report[name]["amax_history"].numpy().copy()
        state.begun = report[name]["begun"]
    return states


def batch(draw, size=1.0, width=INNER):
    return torch.randn(ROWS, width, generator=draw) * size


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_backward_inside_the_context_gives_the_same_bits_as_one_after_it(recipe, draw):
    base = warmed(octavo.nn.Linear(INNER, OUTER), RECIPES[recipe]())
    batches = [(batch(draw, 2.0**i), batch(draw, 2.0**-i, OUTER)) for i in range(3)]
    results = []
    for inside in (True, False):
        layer, result = warmed(base, RECIPES[recipe](), steps=0), []
        for x, g in batches:
            x = x.clone().requires_grad_()
            with octavo.fp8_autocast(fp8_recipe=RECIPES[recipe]()):
                y = layer(x)
                if inside:
                    y.backward(g)
            if not inside:
                y.backward(g)
            result += [y, x.grad, *gradients(layer).values()]
            states = snapshot(layer)
        results.append((result, states))
    assert all(map(same_bits, results[0][0], results[1][0]))
    assert results[0][1] == results[1][1]


def test_only_the_outermost_context_updates(layer, draw):
    states = states_of(layer)
    small, large = batch(draw), batch(draw, 3)
    with octavo.fp8_autocast(fp8_recipe=delayed()):
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            layer(small)
            with octavo.fp8_autocast(fp8_recipe=delayed()):
                layer(large)
            states["input"].record(array(small))
            states["input"].record(array(large))
            states["weight"].record(array(layer.weight))
            check_states(layer, states, "inside")
        check_states(layer, states, "after the inner one")
    states["input"].update()
    states["weight"].update()
    check_states(layer, states, "after the outer one")


def test_disabled_contexts_run_in_the_dtype_of_the_input(layer, draw):
    x, before = batch(draw), snapshot(layer)
    plain = torch.nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), plain)
    with octavo.fp8_autocast(enabled=False, fp8_recipe=delayed()):
        assert torch.equal(layer(x), plain)
    assert snapshot(layer) == before
    states = states_of(layer)
    with octavo.fp8_autocast(fp8_recipe=delayed()):
        with octavo.fp8_autocast(enabled=False):
            assert torch.equal(layer(x * 100), torch.nn.functional.linear(x * 100, layer.weight, layer.bias))
        assert snapshot(layer) == before
        assert not torch.equal(layer(x), plain)
    for name, tensor in {"input": x, "weight": layer.weight}.items():
        states[name].step(array(tensor))
    check_states(layer, states)


def test_an_enabled_context_within_a_disabled_one_runs_in_fp8(layer, draw):
    x = batch(draw)
    want = round_trip(array(x), states_of(layer)["input"].scale, states_of(layer)["input"].format)
    with octavo.fp8_autocast(enabled=False), octavo.fp8_autocast(fp8_recipe=delayed()):
        y = layer(x)
    weight = array(layer.weight)
    plain = array(x) @ weight.T + array(layer.bias)
    assert np.abs(array(y) - plain).max() > 1e-3
    assert np.abs(array(y) - (want @ weight.T + array(layer.bias))).max() < 0.2


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_without_gradients_nothing_is_recorded(layer, draw, where):
    before, x = snapshot(layer), batch(draw, 50)
    want = operands(array(x), array(layer.weight), np.zeros((ROWS, OUTER)), "delayed", states_of(layer)).output
    autocast = octavo.fp8_autocast(fp8_recipe=delayed())
    with contextlib.ExitStack() as stack:
        for context in (torch.no_grad(), autocast) if where == "outside" else (autocast, torch.no_grad()):
            stack.enter_context(context)
        y = layer(x)
        assert snapshot(layer) == before
    assert snapshot(layer) == before
    np.testing.assert_allclose(array(y), want[0] @ want[1].T + array(layer.bias), rtol=1e-5, atol=1e-4)
    with torch.inference_mode(), octavo.fp8_autocast(fp8_recipe=delayed()):
        assert same_bits(layer(x), y)
    assert snapshot(layer) == before


def test_evaluation_between_steps_changes_nothing(layer, draw):
    batches = [(batch(draw, 2.0**i), batch(draw, 2.0**-i, OUTER)) for i in range(4)]
    results = []
    for evaluate in (False, True):
        copy = warmed(layer, delayed(), steps=0)
        result = []
        for number, (x, g) in enumerate(batches):
            result += step(copy, x, g, delayed(), is_first_microbatch=number % 2 == 0)
            if evaluate:
                copy.eval()
                with torch.no_grad(), octavo.fp8_autocast(fp8_recipe=delayed()):
                    copy(x * 1000)
                copy.train()
        results.append((result, snapshot(copy), gradients(copy)["weight"]))
    assert all(map(same_bits, results[0][0], results[1][0]))
    assert results[0][1] == results[1][1]
    assert same_bits(results[0][2], results[1][2])


def test_one_backward_of_two_uses_records_the_larger(layer, draw):
    states = states_of(layer)
    small, large = batch(draw), batch(draw, 9)
    with octavo.fp8_autocast(fp8_recipe=delayed()):
        loss = (layer(large) * 7).sum() + layer(small).sum()
    loss.backward()
    states["input"].record(array(large))
    states["input"].step(array(small))
    states["weight"].step(array(layer.weight))
    states["grad_output"].step(np.full(1, 7))
    check_states(layer, states)


@pytest.mark.parametrize("contexts", ["one context", "two contexts"])
@pytest.mark.parametrize("look", [False, True], ids=["unseen", "inspected between"])
def test_each_of_two_backwards_updates(layer, draw, contexts, look):
    """Whether somebody looks between them makes no difference."""
    states = states_of(layer)
    xs, gs = [batch(draw), batch(draw, 5)], [batch(draw, 8, OUTER), batch(draw, 0.01, OUTER)]
    if contexts == "one context":
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            ys = [layer(x) for x in xs]
        states["input"].record(array(xs[0]))
        states["input"].step(array(xs[1]))
        states["weight"].step(array(layer.weight))
    else:
        ys = []
        for x in xs:
            with octavo.fp8_autocast(fp8_recipe=delayed()):
                ys.append(layer(x))
            states["input"].step(array(x))
            states["weight"].step(array(layer.weight))
    for y, g in zip(ys, gs, strict=True):
        y.backward(g)
        states["grad_output"].step(array(g))
        if look:
            check_states(layer, states)
    check_states(layer, states)


def test_a_backward_uses_the_scales_of_its_forward(layer, draw):
    """Input and weight were cast in the forward: a later forward does not move them under a backward that comes after it."""
    states = states_of(layer)
    x, g = batch(draw), batch(draw, 1, OUTER)
    want = operands(array(x), array(layer.weight), array(g), "delayed", states)
    x.requires_grad_()
    with octavo.fp8_autocast(fp8_recipe=delayed()):
        y = layer(x)
    with octavo.fp8_autocast(fp8_recipe=delayed()):
        layer(x * 1000)
    y.backward(g)
    for tensor, (left, right) in ((x.grad, want.input_gradient), (layer.weight.grad, want.weight_gradient)):
        np.testing.assert_allclose(array(tensor), left @ right.T, rtol=1e-5, atol=1e-5)


def fail_inside(layer, x):
    with octavo.fp8_autocast(fp8_recipe=delayed()):
        layer(x)
        with octavo.fp8_autocast(enabled=False):
            raise ZeroDivisionError


def test_an_exception_leaves_the_context_and_loses_no_amax(layer, draw):
    """Whether a forward that failed counts as one is open: its amaxes are in the history, or wait in slot 0 for the next."""
    states, x, g = states_of(layer), batch(draw), batch(draw, 1, OUTER)
    with pytest.raises(ZeroDivisionError):
        fail_inside(layer, x * 5)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    states["input"].record(array(x * 5))
    states["weight"].record(array(layer.weight))
    if not octavo.fp8.inspect(layer)["input"]["amax_history"][0]:
        states["input"].update()
        states["weight"].update()
    check_states(layer, states)
    step(layer, x, g, delayed())
    for name, tensor in {"input": x, "weight": layer.weight, "grad_output": g}.items():
        states[name].step(array(tensor))
    check_states(layer, states)


def test_later_micro_batches_keep_the_first_ones_weight(layer, draw):
    for _ in range(2):
        states = states_of(layer)
        kept = round_trip(array(layer.weight), states["weight"].of_cast(array(layer.weight)), states["weight"].format)
        for number in range(3):
            x, g = batch(draw, 2.0**number), batch(draw, 1, OUTER)
            want = operands(array(x), array(layer.weight), array(g), "delayed", states)
            layer.zero_grad()
            y, dx = step(layer, x, g, delayed(), is_first_microbatch=number == 0)
            np.testing.assert_allclose(array(y), want.output[0] @ kept.T + array(layer.bias), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(array(dx), want.input_gradient[0] @ kept, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(
                array(layer.weight.grad), want.weight_gradient[0] @ want.weight_gradient[1].T, rtol=1e-5, atol=1e-5
            )
            states["input"].step(array(x))
            states["grad_output"].step(array(g))
            if number == 0:
                states["weight"].step(array(layer.weight))
            check_states(layer, states, f"micro-batch {number}")
            with torch.no_grad():
                layer.weight.mul_(3).add_(1)


@pytest.mark.parametrize("recipe", ["current", "rowwise", "block"])
def test_recipes_without_a_history_keep_the_first_weight_too(recipe, draw):
    layer = octavo.nn.Linear(INNER, OUTER)
    x, g = batch(draw), batch(draw, 1, OUTER)
    results = []
    for first in (True, False, True):
        results.append(step(layer, x, g, RECIPES[recipe](), is_first_microbatch=first))
        with torch.no_grad():
            layer.weight.mul_(-2)
    assert all(map(same_bits, results[0], results[1]))
    assert not any(map(same_bits, results[1], results[2]))


def test_without_the_argument_each_forward_casts_the_weight(layer, draw):
    x, g = batch(draw), batch(draw, 1, OUTER)
    step(layer, x, g, delayed(), is_first_microbatch=True)
    for _ in range(2):
        states = states_of(layer)
        with torch.no_grad():
            layer.weight.mul_(-1.7)
        want = operands(array(x), array(layer.weight), array(g), "delayed", states).output
        y, _ = step(layer, x, g, delayed())
        np.testing.assert_allclose(array(y), want[0] @ want[1].T + array(layer.bias), rtol=1e-5, atol=1e-5)
        states["weight"].step(array(layer.weight))
        check_state(octavo.fp8.inspect(layer)["weight"], states["weight"])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("frozen", ["weight", "input", "bias", "no bias"])
def test_what_needs_no_gradient_changes_no_other_bit(recipe, frozen, draw):
    x, g = batch(draw), batch(draw, 1, OUTER)
    full = octavo.nn.Linear(INNER, OUTER, bias=frozen != "no bias")
    part = octavo.nn.Linear(INNER, OUTER, bias=frozen != "no bias")
    part.load_state_dict(full.state_dict())
    if frozen in ("weight", "bias"):
        getattr(part, frozen).requires_grad_(False)
    for _ in range(2):
        y, dx = step(full, x, g, RECIPES[recipe]())
        inner = x.clone().requires_grad_(frozen != "input")
        with octavo.fp8_autocast(fp8_recipe=RECIPES[recipe]()):
            part_y = part(inner)
        part_y.backward(g)
        want, found = gradients(full), gradients(part)
        assert same_bits(part_y, y)
        assert same_bits(inner.grad, None if frozen == "input" else dx)
        for name in found:
            assert same_bits(found[name], None if name == frozen else want[name])
    if recipe == "delayed":
        assert snapshot(part) == snapshot(full)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_empty_batch_and_one_row(recipe):
    layer = warmed(octavo.nn.Linear(INNER, OUTER), RECIPES[recipe]())
    before = snapshot(layer)
    for shape in ((0,), (2, 0)):
        y, dx = step(layer, torch.zeros(*shape, INNER), torch.zeros(*shape, OUTER), RECIPES[recipe]())
        assert (y.shape, dx.shape) == ((*shape, OUTER), (*shape, INNER))
        assert not any(grad.any() for grad in gradients(layer).values())
    if recipe == "delayed":
        # An amax of 0 changes nothing; the weight was used and recorded as ever.
        after = snapshot(layer)
        assert (after["input"], after["grad_output"]) == (before["input"], before["grad_output"])
    x = torch.linspace(-1, 1, INNER)
    y, dx = step(layer, x, torch.ones(OUTER), RECIPES[recipe]())
    assert (y.shape, dx.shape) == ((OUTER,), (INNER,))
    np.testing.assert_allclose(array(y), array(torch.nn.functional.linear(x, layer.weight, layer.bias)), atol=0.2)


def penalise(y, x):
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.sum() + dx.square().sum()).backward()


@pytest.mark.parametrize("recipe", RECIPES)
def test_double_backward_is_refused(recipe, draw):
    """A penalty on a gradient must not train as if it were a constant."""
    layer, x = octavo.nn.Linear(INNER, OUTER), batch(draw).requires_grad_()
    penalise(layer(x), x)
    with octavo.fp8_autocast(fp8_recipe=RECIPES[recipe]()):
        y = layer(x)
    with pytest.raises(RuntimeError, match=r"(?i)twice|double|create_graph|second"):
        penalise(y, x)


def test_another_format_on_a_live_model_keeps_the_amaxes_and_scales_for_its_own_range():
    """HYBRID → E4M3 → HYBRID: gradients stay near float32, and the scale fits the format at once."""
    torch.manual_seed(2)
    layer, exact = octavo.nn.Linear(32, 32), torch.nn.Linear(32, 32)
    exact.load_state_dict(layer.state_dict())
    for name in ("HYBRID", "HYBRID", "E4M3", "E4M3", "HYBRID", "HYBRID"):
        recipe = octavo.recipe.DelayedScaling(amax_history_len=4, fp8_format=octavo.recipe.Format[name])
        before = octavo.fp8.inspect(layer) if layer.fp8_state.slots else None
        x, g = torch.randn(64, 32), torch.randn(64, 32) * 1e-3
        for module in (layer, exact):
            module.zero_grad()
            with octavo.fp8_autocast(fp8_recipe=recipe):
                module(x).backward(g)
        if before is not None:
            error = (layer.weight.grad - exact.weight.grad).norm() / exact.weight.grad.norm()
            assert error < 0.1, (name, error)
        state = octavo.fp8.inspect(layer)["grad_output"]
        assert state["format"] == {"HYBRID": "E5M2", "E4M3": "E4M3"}[name]
        largest = state["amax_history"].max()
        assert state["scale"] == torch.tensor({"HYBRID": 57344.0, "E4M3": 448.0}[name]) / largest


def test_a_training_inside_of_one_context_is_warned_of(layer, draw):
    """Its scales of inputs and weights would never move."""
    with octavo.fp8_autocast(fp8_recipe=delayed()):
        for _ in range(99):
            layer(batch(draw)).sum().backward()
        with pytest.warns(UserWarning, match="Enter it around each forward"):
            layer(batch(draw)).sum().backward()
        layer(batch(draw)).sum().backward()
    for _ in range(120):
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            y = layer(batch(draw)).sum()
        y.backward()


def test_an_entry_that_fails_leaves_the_context_closed(layer, draw, monkeypatch):
    monkeypatch.setattr(scaling, "prepare_all", mock.Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError), octavo.fp8_autocast():
        pass
    assert not buffers.is_open()


def test_a_reset_layer_has_not_saturated(draw):
    layer = octavo.nn.Linear(INNER, OUTER)
    for size in (1, 1000):
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            layer(batch(draw, size)).sum().backward()
    assert octavo.fp8.inspect(layer)["input"]["saturated"]
    scaling.reset_states(layer)
    assert not octavo.fp8.inspect(layer)["input"]["saturated"]


def test_scales_are_copied_once_until_they_change(draw):
    layer = octavo.nn.Linear(INNER, OUTER)
    recipe = octavo.recipe.DelayedScaling(amax_history_len=2)
    for _ in range(2):
        with octavo.fp8_autocast(fp8_recipe=recipe):
            layer(batch(draw)).sum().backward()
    slot = layer.fp8_state.slots[Operand.INPUT]
    with octavo.fp8_autocast(fp8_recipe=recipe):
        layer(batch(draw, 5.0)).sum().backward()
        kept = slot.buffer.copied_scale()
        assert slot.buffer.copied_scale() is kept
        before = kept.clone()
    after = slot.buffer.copied_scale()
    assert not torch.equal(after[slot.entries], before[slot.entries])  # the end of the autocast has updated them
    assert kept.nan_to_num(-1).equal(before.nan_to_num(-1))
    scaling.fill(slot, torch.tensor(3.0), torch.zeros(2))
    assert slot.saved_scale == 3
