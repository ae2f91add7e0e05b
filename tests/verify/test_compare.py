"""Differences of two results: what is beyond its bound, and the ranks in whose parts it lies."""

import pytest
import torch

from octavo.verify.certificate import ALIKE, EQUAL, _by_parameter
from octavo.verify.compare import LOADED, differences, loaded, with_ranks

PARTS = {"w": torch.tensor([[0, 0, 0, 4, 3], [1, 4, 0, 4, 3], [2, 0, 0, 4, 3], [3, 4, 0, 4, 3]])}
"""Two shards of [8, 3], on two replicas."""
SAMPLES = [range(2), range(2, 4)]


def first_of(found, wanted, every=None):
    every = differences(found, wanted, EQUAL) if every is None else every
    return next((each for each in with_ranks(every, found, wanted, PARTS, SAMPLES) if not each.within), None)


@pytest.mark.parametrize("kind", ["parameter", "gradient", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize(("row", "ranks"), [(1, [0, 2]), (6, [1, 3])])
def test_a_difference_is_of_the_ranks_that_hold_it(kind, row, ranks):
    wanted = {f"{kind} w, seed 0": torch.randn(8, 3, dtype=torch.float64)}
    found = {name: tensor.clone() for name, tensor in wanted.items()}
    assert first_of(found, wanted) is None
    found[f"{kind} w, seed 0"][row, 2] += 1e-3
    assert (first_of(found, wanted).name, first_of(found, wanted).ranks) == (f"{kind} w, seed 0", ranks)
    one = first_of(found, wanted, loaded(found, wanted)) if kind != "gradient" else None  # no checkpoint has gradients
    assert one is None or (one.name, one.ranks) == (f"{kind} w, seed 0{LOADED}", ranks)


def test_states_are_of_the_ranks_with_their_samples():
    wanted = {"logits before step 1, seed 0": torch.randn(4, 5, 3, dtype=torch.float64)}
    found = {name: tensor.clone() for name, tensor in wanted.items()}
    found["logits before step 1, seed 0"][3] *= 2
    assert first_of(found, wanted).ranks == [2, 3]
    found["logits before step 1, seed 0"][0] *= 2
    assert first_of(found, wanted).ranks == [0, 1, 2, 3]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_copy_that_differs_in_a_bit_is_named_with_its_rank(swapped):
    wanted = {"parameter norm.weight, seed 0": torch.randn(16, dtype=torch.float64)}
    copy = wanted["parameter norm.weight, seed 0"].clone()
    copy[3] = torch.nextafter(copy[3], torch.tensor(9.0, dtype=torch.float64))
    found = {**wanted, "parameter norm.weight of rank 2, seed 0": copy}
    first = first_of(*((wanted, found) if swapped else (found, wanted)))
    assert (first.name, first.ranks) == ("parameter norm.weight of rank 2, seed 0", (2,))
    assert 0 < first.error < 1e-15


def test_rounding_in_place_of_a_gradient_of_zero_is_no_difference():
    wanted = {"gradient a, seed 0": torch.randn(50, dtype=torch.float64), "gradient b, seed 0": torch.zeros(9).double()}
    found = wanted | {"gradient b, seed 0": 1e-17 * torch.randn(9, dtype=torch.float64)}
    assert first_of(found, wanted) is None
    found["gradient b, seed 0"][4] = 1e-12
    assert first_of(found, wanted).name == "gradient b, seed 0"
    small = {name: 1e-9 * tensor for name, tensor in wanted.items()}
    assert first_of({name: 1e-9 * tensor for name, tensor in found.items()}, small).name == "gradient b, seed 0"


def test_what_a_result_lacks_differs():
    one = {"loss of step 1, seed 0": torch.ones(())}
    assert first_of({}, one).error == first_of(one, {}).error == float("inf")


@pytest.mark.parametrize(("name", "within"), [("layers.0.moe.router.weight", True), ("layers.0.ffn.fc1.weight", False)])
def test_a_router_whose_tokens_choose_others_has_a_bound_of_its_own(name, within):
    wanted = {f"exp_avg {name}, seed 0": torch.randn(50, dtype=torch.float64)}
    found = {key: 1.7 * tensor for key, tensor in wanted.items()}
    assert [each.within for each in differences(found, wanted, ALIKE)] == [within]
    assert not any(each.within for each in differences({key: 2 * tensor for key, tensor in wanted.items()}, wanted, ALIKE))
    assert not any(each.within for each in differences(found, wanted, EQUAL))


def test_the_largest_error_of_a_parameter_is_of_its_values_gradients_and_moments_in_all_seeds():
    wanted = {f"{kind} w, seed {seed}": torch.ones(4).double() for kind in ("parameter", "gradient") for seed in (0, 1)}
    wanted |= {"history layers.0.qkv.input after step 1, seed 0": torch.ones(3), "loss of step 1, seed 0": torch.ones(())}
    found = wanted | {"gradient w, seed 1": torch.full((4,), 1.25).double(), "loss of step 1, seed 0": torch.zeros(())}
    assert _by_parameter(differences(found, wanted, EQUAL)) == {"w": 0.25, "layers.0.qkv.input": 0.0}
