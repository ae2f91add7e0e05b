"""Evaluation, copies and looks at the state leave training as it is: one rank may do them alone."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from driving import RECIPES, delayed, snapshot

import octavo
import ranks
from octavo.fp8.autocast import microbatch

WIDTH = 16


def network(seed=2):
    torch.manual_seed(seed)
    return torch.nn.Sequential(octavo.nn.Linear(WIDTH, WIDTH), octavo.nn.LayerNormLinear(WIDTH, WIDTH))


def evaluate_without_gradients(model, x):
    with torch.no_grad(), octavo.fp8_autocast(fp8_recipe=delayed()):
        model(x)


def evaluate_without_gradients_inside(model, x):
    with octavo.fp8_autocast(fp8_recipe=delayed()), torch.no_grad():
        model(x)


def evaluate_in_inference_mode(model, x):
    with torch.inference_mode(), octavo.fp8_autocast(fp8_recipe=delayed(2)):
        model(x)


def evaluate_in_evaluation_mode(model, x):
    model.eval()
    for recipe in (delayed(), delayed(2), delayed(9)):
        with octavo.fp8_autocast(fp8_recipe=recipe):
            model(x)
    model.train()


def evaluate_by_other_recipes(model, x):
    for recipe in (*(make() for make in RECIPES.values()), delayed(2), delayed(9, "most_recent", 1, hybrid=False)):
        with torch.no_grad(), octavo.fp8_autocast(fp8_recipe=recipe):
            model(x)


def evaluate_in_high_precision(model, x):
    for enabled in (False, True):
        with torch.no_grad(), octavo.fp8_autocast(enabled=enabled), octavo.fp8_autocast(enabled=False):
            model(x)
    with octavo.fp8_autocast(enabled=False):
        model(x)
    model(x)


def evaluate_as_micro_batches(model, x):
    for first in (True, False):
        with torch.no_grad(), microbatch(first), octavo.fp8_autocast(fp8_recipe=delayed()):
            model(x)


def evaluate_a_copy(model, x):
    twin = copy.deepcopy(model)
    evaluate_by_other_recipes(twin, x)
    fresh = network(5)
    evaluate_in_evaluation_mode(fresh, x)


def look(model, x):
    octavo.fp8.inspect(model)
    octavo.describe(model)
    octavo.fp8.scaling.state_records(model)
    network(5).load_state_dict(model.state_dict())


EVALUATIONS = [
    evaluate_without_gradients,
    evaluate_without_gradients_inside,
    evaluate_in_inference_mode,
    evaluate_in_evaluation_mode,
    evaluate_by_other_recipes,
    evaluate_in_high_precision,
    evaluate_as_micro_batches,
    evaluate_a_copy,
    look,
]


def train(evaluations, *, alone=False, recipe="delayed", before=False):
    """Outputs, gradients and scales of three steps of two micro-batches; evaluations between, on rank 0 if alone."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    draw = torch.Generator().manual_seed(rank)
    model, found = network(), []

    def evaluate():
        if rank == 0 or not alone:
            for evaluation in evaluations:
                evaluation(model, torch.full((6, WIDTH), 1000.0))

    if before:
        evaluate()
    for step in range(3):
        for number in range(2):
            x, g = torch.randn(6, WIDTH, generator=draw) * 2**step, torch.randn(6, WIDTH, generator=draw) / 2**step
            with microbatch(number == 0), octavo.fp8_autocast(fp8_recipe=RECIPES[recipe]()):
                y = model(x)
            evaluate()
            y.backward(g)
            found.append(y.tolist())
            evaluate()
            if dist.is_initialized():
                for p in model.parameters():
                    dist.all_reduce(p.grad)
        with torch.no_grad():
            for p in model.parameters():
                found.append(p.grad.tolist())
                p.sub_(p.grad, alpha=0.01)
                p.grad = None
        found.append(snapshot(model) if recipe == "delayed" else None)
    return found


@pytest.mark.parametrize("before", [False, True], ids=["between", "first of all"])
@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_an_evaluation_changes_nothing_of_training(evaluation, before):
    assert train([evaluation], before=before) == train([])


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_an_evaluation_leaves_the_weight_of_the_micro_batches(recipe):
    assert train(EVALUATIONS, recipe=recipe) == train([], recipe=recipe)


@pytest.mark.parametrize("before", [False, True], ids=["between", "first of all"])
def test_one_rank_evaluates_alone(before):
    wanted = ranks.run(2, train, [])
    assert wanted[0][-1] == wanted[1][-1]  # the scales
    assert wanted[0][0] != wanted[1][0]  # the samples
    assert ranks.run(2, train, EVALUATIONS, alone=True, before=before) == wanted


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
def test_training_in_evaluation_mode_is_training(inside):
    """Dropout is turned off in this way, and models are loaded so: what has a backward is recorded."""
    found = []
    for mode in (True, False):
        model, draw = network().train(mode), torch.Generator().manual_seed(0)
        for _ in range(3):
            with octavo.fp8_autocast(fp8_recipe=delayed()):
                y = model(torch.randn(6, WIDTH, generator=draw))
                if inside:
                    y.backward(torch.randn(6, WIDTH, generator=draw))
            if not inside:
                y.backward(torch.randn(6, WIDTH, generator=draw))
        found.append(snapshot(model))
    assert found[0] == found[1]


def test_recipes_of_equal_value_are_one_and_a_changed_history_keeps_its_newest_amaxes():
    model, history = octavo.nn.Linear(WIDTH, WIDTH), []
    for length in (3, 3, 3, 3, 5, 5, 2):
        x = torch.randn(6, WIDTH)
        with octavo.fp8_autocast(fp8_recipe=delayed(length)):
            model(x).sum().backward()
        state = octavo.fp8.inspect(model)["input"]
        seen = [*history[1 - length :], x.abs().max().item()]
        history = seen[1 - length :]  # entry 0 collects
        assert state["amax_history"].tolist() == [0.0] * (length - len(history)) + history
        assert state["scale"] == torch.tensor(448.0) / max(seen)


@pytest.mark.parametrize("last", [evaluate_by_other_recipes, evaluate_in_high_precision, evaluate_in_inference_mode])
def test_a_checkpoint_after_an_evaluation_has_the_state_of_training(last, tmp_path):
    model, x = network(), torch.randn(6, WIDTH)

    def step(model):
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            model(x).sum().backward()

    step(model)
    last(model, x)
    before = snapshot(model)
    octavo.save(tmp_path / "saved", model)
    twin = network(9)
    octavo.load(tmp_path / "saved", twin)
    for each in (model, twin):
        step(each)
    assert snapshot(twin) == snapshot(model) != before


def test_a_checkpoint_amid_a_forward_is_refused(tmp_path):
    model, x = network(), torch.randn(6, WIDTH)
    with octavo.fp8_autocast(fp8_recipe=delayed()):
        with torch.no_grad():
            model(x)
        octavo.save(tmp_path / "evaluated", model)
        model(x)
        with pytest.raises(octavo.errors.InputError, match=r"inside fp8_autocast.*Save after the end of the outermost"):
            octavo.save(tmp_path / "amid", model)
    assert not (tmp_path / "amid").exists()
    octavo.save(tmp_path / "after", model)


def test_an_exception_on_the_way_out_moves_no_scale_and_two_models_share_an_autocast():
    one, other, x = network(), network(), torch.randn(6, WIDTH)
    for _ in range(2):
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            y = one(x) + other(x)
        y.sum().backward()
    assert snapshot(one) == snapshot(other)
    scales = [state[0] for state in snapshot(one).values()]
    with contextlib.suppress(ZeroDivisionError), octavo.fp8_autocast(fp8_recipe=delayed()):
        one(x * 9)
        raise ZeroDivisionError
    assert [state[0] for state in snapshot(one).values()] == scales
    twin = snapshot(other)
    with octavo.fp8_autocast(fp8_recipe=delayed()):
        one(x)
    assert snapshot(one)["0.input"][1][-1] == (x * 9).abs().max().view(torch.int32)
    assert snapshot(other) == twin
