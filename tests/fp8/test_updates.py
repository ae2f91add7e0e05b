"""Scales of forward and backward updated together are those that are updated apart."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from driving import delayed, gradients, same_bits, snapshot, warmed

import octavo
from octavo.fp8 import buffers
from octavo.fp8.recipe import Operand

ROWS, INNER, OUTER = 6, 12, 10


@pytest.fixture
def layer():
    torch.manual_seed(5)
    return warmed(octavo.nn.Linear(INNER, OUTER), delayed())


def loss(layer, x, contexts):
    """Through as many outermost contexts one after the other, the layer's scales moving in between."""
    total = 0
    for part in x.chunk(contexts):
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            total = total + layer(part).square().sum()
    return total


@pytest.mark.parametrize("contexts", [1, 2, 3])
@pytest.mark.parametrize("evaluates", [False, True])
def test_updates_together_are_those_apart(contexts, evaluates, layer):
    results = []
    inputs = [torch.randn(ROWS, INNER) * 2.0**i for i in (0, 3, -2, 1)]
    for around in (buffers.updates_together, contextlib.nullcontext):
        own, seen = copy.deepcopy(layer), []
        own.train(not evaluates)
        for x in inputs:
            own.zero_grad()
            with around():
                loss(own, x, contexts).backward()
            seen.append((gradients(own), snapshot(own)))
        results.append(seen)
    for (found, states), (wanted, others) in zip(*results, strict=True):
        assert all(map(same_bits, found.values(), wanted.values()))
        assert states == others
    assert results[0][0][1] != results[0][-1][1]


def test_they_move_when_the_function_is_called(layer):
    before = snapshot(layer)
    with buffers.updates_together() as update:
        loss(layer, torch.randn(ROWS, INNER) * 8, 1).backward()
        assert {name: scale for name, (scale, _) in snapshot(layer).items()} == {n: scale for n, (scale, _) in before.items()}
        update()
        after = snapshot(layer)
        assert after != before
        update()
        assert snapshot(layer) == after
    assert snapshot(layer) == after


def test_a_failure_leaves_nothing_outstanding(layer):
    """The amaxes wait for the next forward, as those of a forward that an exception ended."""
    broken = copy.deepcopy(layer)
    large, small = torch.randn(ROWS, INNER) * 64, torch.randn(ROWS, INNER)

    def fail(own):
        own(large)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), octavo.fp8_autocast(fp8_recipe=delayed()):
        fail(layer)
    with pytest.raises(ValueError, match="broken"), buffers.updates_together(), octavo.fp8_autocast(fp8_recipe=delayed()):
        fail(broken)
    for each in (broken, layer):
        loss(each, small, 1).backward()
    assert snapshot(broken) == snapshot(layer)


def test_slots_follow_their_buffer_when_it_grows():
    buffer = buffers.BufferSet().buffer(Operand.INPUT, torch.device("cpu"), octavo.recipe.DelayedScaling().history)
    first = buffer.allocate(448.0, 0)
    assert (first.scale, first.amax) == (1, 0)  # seen before it grows
    buffer.allocate(448.0, 64)
    first.present()[0].fill_(2)
    first.amax.fill_(3)
    assert (buffer.scale[0], buffer.history[0, 0]) == (2, 3)
