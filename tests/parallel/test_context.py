"""Context parallelism of the decoder equals one rank: loss, logits and every gradient, for masks, exchanges and recipes."""

import pytest
import split_sequences

import ranks

pytestmark = ranks.alone

CASES = ("plain", "documents", "padding", "window", "narrow window", "odd", "short")
LAYOUTS = {
    "context 2": (2, {"context_parallel_degree": 2}),
    "context 4": (4, {"context_parallel_degree": 4}),
    "shard 2 x context 2": (4, {"context_parallel_degree": 2}),
    "replicate 2 x context 2": (4, {"context_parallel_degree": 2, "hybrid_shard_degree": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_gradients_and_logits_are_one_ranks(layout):
    size, degrees = LAYOUTS[layout]
    cases = CASES if layout == "context 2" else ("documents", "odd")
    for errors in ranks.run(size, split_sequences.exact_cells, degrees, cases):
        for cell, (loss, gradient, logits) in errors.items():
            assert loss < 1e-5, cell
            assert gradient < 1e-5, cell
            assert logits < 1e-4, cell


@pytest.mark.parametrize("layout", ["context 2", "shard 2 x context 2"])
def test_a_loss_of_whole_logits_has_one_ranks_gradients(layout):
    for error, same_shapes in ranks.run(LAYOUTS[layout][0], split_sequences.logits_with_gradients, LAYOUTS[layout][1]):
        assert error < 1e-5
        assert same_shapes


FP8 = [
    ("delayed", "all_gather", {}),
    ("delayed", "p2p", {"micro_batches": 2}),
    ("delayed", "a2a", {"recompute": True}),
    ("current", "all_gather", {"recompute": "mlp"}),
    ("current", "a2a", {"micro_batches": 2, "offload": True}),
    ("rowwise", "all_gather", {}),
    ("block", "p2p", {}),
    (None, "p2p", {"recompute": True, "offload": True}),
]


@pytest.mark.parametrize(("recipe", "strategy", "options"), FP8)
def test_fp8_trains_as_on_one_rank(recipe, strategy, options):
    degrees = {"context_parallel_degree": 2}
    (one, scales), *_ = ranks.run(1, split_sequences.fp8_steps, {}, recipe, strategy, split=False, **options)
    many = ranks.run(2, split_sequences.fp8_steps, degrees, recipe, strategy, **options)
    assert many[0] == many[1]  # scales and losses too
    for (loss, norm), (wanted, wanted_norm) in zip(many[0][0], one, strict=True):
        assert loss == pytest.approx(wanted, rel=5e-3)
        assert norm == pytest.approx(wanted_norm, rel=5e-2)
    assert many[0][1].keys() == scales.keys()
    if recipe == "delayed":  # amaxes are joined: most scales are one rank's to the last bit
        same = sum(many[0][1][key] == pytest.approx(scales[key], rel=0.1) for key in scales)
        assert same >= 0.9 * len(scales)


@pytest.mark.parametrize("change", ["other_sample", "one_label", "shorter", "no_positions"])
def test_ranks_that_are_given_different_sequences_are_refused(change):
    for said in ranks.run(2, split_sequences.different_samples, getattr(split_sequences, change)):
        assert "were given different ones: give all of them the samples of octavo.state.dp_rank" in said
