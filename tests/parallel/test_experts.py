"""Mixtures of experts over ranks compute what one rank computes: sharded, and with different experts on different ranks."""

import pytest
import split_sequences
import spread_experts
import torch
from test_fsdp import differences
from transformers import AutoModelForCausalLM

import ranks

LAYOUTS = {
    "shard 2": (2, {}),
    "replicate 2": (2, {"hybrid_shard_degree": 1}),
    "expert 2": (2, {"expert_parallel_degree": 2}),
    "expert 4": (4, {"expert_parallel_degree": 4}),
    "expert 2 x shard 2": (4, {"expert_parallel_degree": 2}),
    "expert 2 x replicate 2": (4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}),
}


@pytest.fixture(scope="module")
def on_one_rank():
    """Results of one rank, made once for each setting."""
    made = {}

    def run(*setting):
        if setting not in made:  # in a process of its own: a setting may force a router
            made[setting] = ranks.run(1, spread_experts.train, {}, *setting)[0]
        return made[setting]

    return run


@pytest.mark.long(lambda layout: layout != "expert 2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_and_the_loss_that_balances_them_equal_one_rank(layout, on_one_rank):
    size, degrees = LAYOUTS[layout]
    assert differences(on_one_rank(None), ranks.run(size, spread_experts.train, degrees, None), loss=1e-6, gradient=1e-4) == []


@pytest.mark.long(lambda layout: layout == "expert 2")
@pytest.mark.parametrize("layout", ["expert 2", "expert 2 x shard 2"])
def test_a_family_of_which_some_layers_have_no_experts_equals_one_rank(layout, on_one_rank):
    size, degrees = LAYOUTS[layout]
    setting = (None, None, 1, True)
    assert (
        differences(on_one_rank(*setting), ranks.run(size, spread_experts.train, degrees, *setting), loss=1e-6, gradient=1e-4)
        == []
    )


@pytest.mark.long(lambda size, balancing: size == 4 or balancing != "balanced")
@pytest.mark.parametrize("balancing", ["sinkhorn", "balanced"])
@pytest.mark.parametrize(
    ("size", "degrees"),
    [(2, {"expert_parallel_degree": 2}), (4, {"expert_parallel_degree": 2}), (4, {"hybrid_shard_degree": 2})],
    ids=str,
)
def test_each_rank_assigns_its_own_tokens_as_one_rank_in_micro_batches_does(size, degrees, balancing):
    one = ranks.run(1, spread_experts.train_assigned, {}, balancing, size)[0]
    many = ranks.run(size, spread_experts.train_assigned, degrees, balancing)
    assert differences(one, many, loss=1e-6, gradient=1e-4) == []


@pytest.mark.long(lambda size, balancing: (size == 4) == (balancing == "sinkhorn"))
@pytest.mark.parametrize("balancing", ["sinkhorn", "balanced"])
@pytest.mark.parametrize(("size", "more"), [(2, {}), (4, {"expert_parallel_degree": 2})], ids=str)
def test_each_rank_assigns_its_own_part_of_sequences_without_padding(size, more, balancing):
    for loss, gradient in ranks.run(size, split_sequences.assigned_errors, {"context_parallel_degree": 2} | more, balancing):
        assert loss < 1e-5
        assert gradient < 1e-4


@pytest.mark.long(lambda recipe, layout: (recipe, layout) != ("block", "expert 2"))
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        *(("delayed", layout) for layout in ("shard 2", "expert 4", "expert 2 x shard 2")),
        *((recipe, "expert 2") for recipe in ("delayed", "current", "rowwise", "block")),
    ],
)
def test_fp8_equals_one_rank(recipe, layout, on_one_rank):
    size, degrees = LAYOUTS[layout]
    one, many = on_one_rank(recipe), ranks.run(size, spread_experts.train, degrees, recipe)
    # Joined amaxes are one rank's; other scales are of the rows that a rank has.
    assert (
        differences(one, many, loss=1e-6 if recipe == "delayed" else 2e-3, gradient=1e-3 if recipe == "delayed" else 0.25) == []
    )
    if recipe == "delayed":
        for name in ("layers.0.moe.experts.fc1.input.scale", "layers.2.moe.experts.fc2.weight.scale"):
            assert many[0][1][name].shape == (4,)
            torch.testing.assert_close(many[0][1][name], one[1][name], rtol=1e-4, atol=0)


@pytest.mark.long(lambda recipe: recipe is None)
@pytest.mark.parametrize(("recipe", "layout"), [(None, "shard 2"), (None, "expert 2"), ("delayed", "expert 2")])
def test_frozen_experts_stay_and_the_rest_equals_one_rank(recipe, layout):
    size, degrees = LAYOUTS[layout]
    options = {"frozen": ["*.experts.*"]}
    one = ranks.run(1, spread_experts.train, {}, recipe, **options)[0]
    many = ranks.run(size, spread_experts.train, degrees, recipe, **options)
    assert differences(one, many, loss=1e-6, gradient=1e-4 if recipe is None else 1e-3) == []
    gradients = many[0][0][0][2]
    assert "layers.0.moe.router.weight" in gradients
    assert "layers.0.moe.experts.fc1_weight" not in gradients


@pytest.mark.long(lambda recipe: recipe != "delayed")
@pytest.mark.parametrize("recipe", [None, "delayed", "block"])
def test_tokens_that_travel_in_fp8_cost_one_rounding(recipe):
    plain, narrow = (
        ranks.run(
            2,
            spread_experts.train,
            LAYOUTS["expert 2"][1],
            recipe,
            own_first_casts=True,
            settings={"expert_dispatch_fp8": fp8},
        )
        for fp8 in (False, True)
    )
    assert differences(plain[0], narrow, loss=2e-3, gradient=0.25) == []
    # Without an autocast nothing is rounded; block scaling casts the rows that arrive to the same bits again.
    assert (plain[0][0][0][0] == narrow[0][0][0][0]) == (recipe != "delayed")


def test_micro_batches_equal_sharded_experts():
    setting = "delayed", None, 2
    sharded, spread = (ranks.run(2, spread_experts.train, LAYOUTS[layout][1], *setting) for layout in ("shard 2", "expert 2"))
    assert differences(sharded[0], spread, loss=1e-6, gradient=1e-3) == []


@pytest.mark.long(lambda recipe: recipe != "delayed")
@pytest.mark.parametrize("recipe", [None, "delayed", "current", "rowwise", "block"])
def test_experts_without_tokens_on_a_rank(recipe, on_one_rank):
    """Experts 0 and 1 are on rank 0: nothing reaches rank 1."""
    one, many = on_one_rank(recipe, 0), ranks.run(2, spread_experts.train, {"expert_parallel_degree": 2}, recipe, 0)
    assert differences(one, many, loss=2e-3 if recipe else 1e-6, gradient=0.25 if recipe else 1e-4) == []
    weight = many[1][0][0][2]["layers.0.moe.experts.fc1_weight"].unflatten(0, (4, -1))
    assert weight[:2].any()
    assert not weight[2:].any()


@pytest.mark.long(lambda options: options == {"recompute": True})
@pytest.mark.parametrize("options", [{"recompute": True}, {"recompute": "selective"}, {"offload": True}], ids=str)
def test_recomputation_and_offloading_equal_one_rank(options, on_one_rank):
    many = ranks.run(2, spread_experts.train, {"expert_parallel_degree": 2}, "delayed", **options)
    assert differences(on_one_rank("delayed"), many, loss=1e-6, gradient=1e-3) == []


@pytest.mark.long(lambda degrees: "hybrid_shard_degree" not in degrees)
@pytest.mark.parametrize("degrees", [{"context_parallel_degree": 2}, {"context_parallel_degree": 2, "hybrid_shard_degree": 2}])
def test_experts_and_sequences_over_the_same_ranks(degrees):
    size = 2 if "hybrid_shard_degree" in degrees else 4
    for errors in ranks.run(size, split_sequences.exact_cells, degrees | {"expert_parallel_degree": 2}, ("experts",)):
        for cell, (loss, gradient, logits) in errors.items():
            assert loss < 1e-5, cell
            assert gradient < 1e-5, cell
            assert logits < 1e-4, cell


@pytest.mark.long(lambda layout: layout == "shard 4")
@pytest.mark.parametrize("layout", ["shard 4", "expert 2 x shard 2", "expert 3"])
def test_initial_weights_are_one_ranks_and_rows_of_an_expert_may_be_on_two_ranks(layout):
    size, degrees = {"shard 4": (4, {}), "expert 3": (3, {"expert_parallel_degree": 3})}.get(layout) or LAYOUTS[layout]
    found = ranks.run(size, spread_experts.placed, degrees)
    for wrong, _ in found:
        assert set(wrong.values()) == {0}, wrong
    assert sum(rows for _, rows in found) == 6 * 144


def test_scales_of_all_experts_are_on_every_rank_where_an_autocast_joins_none():
    found = ranks.run(2, spread_experts.apart, {"expert_parallel_degree": 2}, "delayed")
    for name, scale in found[0].items():
        assert torch.equal(found[1][name], scale), name
        assert (scale != (0 if "history" in name else 1)).any(), name


@pytest.mark.long
def test_what_one_expert_degree_saves_another_loads_to_the_bit(tmp_path):
    wrote = ranks.run(4, spread_experts.save, tmp_path / "0", LAYOUTS["expert 2 x shard 2"][1])
    for after in ("expert 2 x shard 2", "expert 4", "shard 2", "one"):
        size, degrees = LAYOUTS.get(after, (1, {}))
        found = ranks.run(size, spread_experts.load, tmp_path / "0", degrees)
        assert all(hashes == wrote[0][0] for hashes, _ in found), after
        if size == 4 and after != "expert 4":
            assert [losses for _, losses in found] == [losses for _, losses in wrote]


def test_an_export_has_every_expert(tmp_path):
    found = ranks.run(2, spread_experts.exported, tmp_path / "model", {"expert_parallel_degree": 2})[0]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    for layer in range(3):
        for ours, name in (("fc1_weight", "gate_up_proj"), ("fc2_weight", "down_proj")):
            own = found[f"layers.{layer}.moe.experts.{ours}"]
            assert torch.equal(theirs[f"model.layers.{layer}.mlp.experts.{name}"].flatten(0, 1), own)


def test_experts_that_cannot_be_spread_are_refused():
    three = spread_experts.EXPERTS | {"num_local_experts": 3}
    for said in ranks.run(2, spread_experts.refusal, {"expert_parallel_degree": 2}, three):
        assert "expert_parallel_degree = 2 does not divide the 3 experts of mixtral" in said
        assert said.endswith("to 1.")  # of 3 experts and 2 ranks
    for said in ranks.run(2, spread_experts.refusal, {"expert_parallel_degree": 2}, {}):
        assert "llama has no experts" in said
