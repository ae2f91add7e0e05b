"""Degrees: accepted ones obey the factor equation, refused ones come with degrees that fit."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config.degrees import Degrees, check_composed, divisors, fit_batch, fit_degrees
from octavo.errors import InputError

WORLDS = st.one_of(st.integers(1, 64), st.sampled_from([96, 120, 128, 256, 360, 512, 1024]))
DEGREE = st.integers(-1, 16)


@settings(deadline=None)
@given(world=WORLDS, hybrid=DEGREE, tensor=DEGREE, context=DEGREE, expert=DEGREE)
def test_accepted_degrees_multiply_to_the_world_and_refused_ones_name_some_that_do(world, hybrid, tensor, context, expert):
    asked = {
        "hybrid_shard_degree": hybrid,
        "tensor_parallel_degree": tensor,
        "context_parallel_degree": context,
        "expert_parallel_degree": expert,
    }
    refused = None
    try:
        degrees = fit_degrees(**asked, world_size=world)
    except InputError as error:
        refused = str(error)
    if refused is None:
        check_equation(degrees)
        assert (degrees.world, degrees.tensor, degrees.context, degrees.expert) == (world, tensor, context, expert)
        assert degrees.hybrid_shard == (hybrid or world // tensor)
        return
    nearest = nearest_in(refused)
    check_equation(fit_degrees(**nearest, world_size=world))
    for key in asked:
        if nearest[key] != asked[key]:
            assert f"parallel.{key} to {nearest[key]}" in refused


def nearest_in(message: str) -> dict[str, int]:
    """The degrees that a refusal names."""
    found = re.search(r"Nearest that fit: (.*?)\.", message)
    assert found
    return {key: int(value) for key, value in (pair.split() for pair in found[1].split(", "))}


def check_equation(degrees: Degrees) -> None:
    assert degrees.replicate * degrees.hybrid_shard * degrees.tensor == degrees.world
    assert degrees.replicate * degrees.shard * degrees.context * degrees.tensor == degrees.world
    assert degrees.shard * degrees.context == degrees.hybrid_shard
    assert degrees.data == degrees.replicate * degrees.shard
    assert degrees.hybrid_shard * degrees.tensor % degrees.expert == 0
    assert 0 in (degrees.tensor % degrees.expert, degrees.expert % degrees.tensor)


@settings(deadline=None)
@given(world=st.integers(1, 40), hybrid=st.integers(0, 40), tensor=st.integers(1, 40), context=st.integers(1, 40))
def test_degrees_are_refused_only_when_the_equation_fails(world, hybrid, tensor, context):
    fits = world % tensor == 0 and (hybrid == 0 or world % (hybrid * tensor) == 0)
    fits = fits and (hybrid or world // tensor) % context == 0
    arguments = {"hybrid_shard_degree": hybrid, "tensor_parallel_degree": tensor, "context_parallel_degree": context}
    if fits:
        fit_degrees(**arguments, world_size=world)
    else:
        with pytest.raises(InputError):
            fit_degrees(**arguments, world_size=world)


def test_the_degrees_of_one_rank_and_of_a_full_cluster():
    assert fit_degrees(world_size=1) == Degrees(1, 1, 1, 1, 1)
    degrees = fit_degrees(
        hybrid_shard_degree=16, tensor_parallel_degree=2, context_parallel_degree=4, expert_parallel_degree=8, world_size=64
    )
    assert (degrees.replicate, degrees.shard, degrees.data) == (2, 4, 8)


def test_a_refusal_keeps_what_it_can_and_names_every_factor():
    with pytest.raises(InputError) as caught:
        fit_degrees(hybrid_shard_degree=3, tensor_parallel_degree=2, world_size=8)
    message = str(caught.value)
    assert nearest_in(message) == {
        "hybrid_shard_degree": 4,
        "tensor_parallel_degree": 2,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
    }
    assert "hybrid_shard 3 x tensor 2 = 6 does not divide the world of 8" in message
    for factor in (
        "hybrid_shard_degree 3",
        "tensor_parallel_degree 2",
        "context_parallel_degree 1",
        "expert_parallel_degree 1",
    ):
        assert factor in message
    assert message.endswith("Change parallel.hybrid_shard_degree to 4.")


def test_a_degree_that_was_left_at_zero_stays_at_zero():
    with pytest.raises(InputError) as caught:
        fit_degrees(context_parallel_degree=3, world_size=8)
    nearest = nearest_in(str(caught.value))
    assert nearest["hybrid_shard_degree"] == 0
    assert nearest["context_parallel_degree"] == 4


def test_expert_groups_are_parts_of_tensor_groups_or_several():
    """Of degrees that divide the ranks of a replica; the nearest of the others are named, with the world and without it."""
    for tensor in (1, 2, 4, 6):
        for expert in range(1, 25):
            fits = 24 * tensor % expert == 0 and (tensor % expert == 0 or expert % tensor == 0)
            asked = {"hybrid_shard_degree": 24, "tensor_parallel_degree": tensor, "expert_parallel_degree": expert}
            if fits:
                assert fit_degrees(**asked, world_size=24 * tensor).expert == expert
                check_composed(tensor, expert)
                continue
            with pytest.raises(InputError) as caught:
                fit_degrees(**asked, world_size=24 * tensor)
            assert nearest_in(str(caught.value))["tensor_parallel_degree"] == tensor
            if tensor % expert and expert % tensor:
                with pytest.raises(InputError, match=f"expert_parallel_degree = {expert} with") as caught:
                    check_composed(tensor, expert)
                near = [int(number) for number in re.findall(r"\d+", str(caught.value).partition(" to ")[2])]
                assert near[0] < expert < near[-1]
                for other in near:
                    check_composed(tensor, other)


def test_an_impossible_world_is_refused():
    with pytest.raises(InputError, match="world of 0 ranks"):
        fit_degrees(world_size=0)


@settings(deadline=None)
@given(global_batch=st.integers(1, 300), micro=st.none() | st.integers(0, 64), dp_size=st.integers(1, 32))
def test_batches_multiply_back_and_refusals_name_batches_that_work(global_batch, micro, dp_size):
    refused = None
    try:
        size, accumulation = fit_batch(global_batch, micro, dp_size)
    except InputError as error:
        refused = str(error)
    if refused is None:
        assert size * accumulation * dp_size == global_batch
        assert micro is None or size == micro
        assert micro is not None or accumulation == 1
        return
    works = [int(number) for number in re.findall(r"\d+", refused.partition("Nearest that works:")[2].partition(".")[0])]
    assert works
    batches = [(number, None) for number in works]
    if pair := re.search(r"set train\.global_batch = (\d+) and train\.micro_batch = (\d+)", refused):
        batches = [*((global_batch, number) for number in works), (int(pair[1]), int(pair[2]))]
    for works_global, works_micro in batches:
        size, accumulation = fit_batch(works_global, works_micro, dp_size)
        assert size * accumulation * dp_size == works_global


def test_batch_messages_name_the_key():
    with pytest.raises(InputError, match=r"multiple of 4\. Nearest that works: 8 or 12\. Change train\.global_batch"):
        fit_batch(9, None, 4)
    with pytest.raises(InputError, match=r"share of 6 sequences .* works: 3 or 6\. Change train\.micro_batch"):
        fit_batch(24, 4, 4)


def test_divisors():
    assert divisors(1) == [1]
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_no_torch_is_needed():
    code = "import sys, octavo.config.degrees; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
