"""Context parallelism of the decoder equals one rank: loss, logits and every gradient, for masks, exchanges and recipes."""

import pytest
import split_sequences

import ranks

pytestmark = ranks.alone

CASES = (
    "plain",
    "documents",
    "padding",
    "window",
    "narrow window",
    "odd",
    "short",
    "parallel block",
    "normed queries",
    "experts",
)
LAYOUTS = {
    "context 2": (2, {"context_parallel_degree": 2}),
    "context 4": (4, {"context_parallel_degree": 4}),
    "shard 2 x context 2": (4, {"context_parallel_degree": 2}),
    "replicate 2 x context 2": (4, {"context_parallel_degree": 2, "hybrid_shard_degree": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_gradients_and_logits_are_one_ranks(layout):
    size, degrees = LAYOUTS[layout]
    cases = CASES if layout == "context 2" else ("documents", "odd", "experts")
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
    ("delayed", "a2a", {"recompute": True, "case": "odd"}),
    ("current", "all_gather", {"recompute": "mlp"}),
    ("current", "a2a", {"micro_batches": 2, "offload": True}),
    ("rowwise", "all_gather", {}),
    ("block", "p2p", {}),
    (None, "p2p", {"recompute": True, "offload": True}),
]


def test_fp8_trains_as_on_one_rank():
    one = ranks.run(1, split_sequences.fp8_runs, {}, FP8, split=False)[0]
    first, second = ranks.run(2, split_sequences.fp8_runs, {"context_parallel_degree": 2}, FP8)
    assert first == second  # scales and losses too
    for cell, (steps, found), (wanted_steps, scales) in zip(FP8, first, one, strict=True):
        for (loss, norm), (wanted, wanted_norm) in zip(steps, wanted_steps, strict=True):
            assert loss == pytest.approx(wanted, rel=5e-3), cell
            assert norm == pytest.approx(wanted_norm, rel=5e-2), cell
        assert found.keys() == scales.keys()
        if cell[0] == "delayed":  # amaxes are joined: most scales are one rank's to the last bit
            same = sum(found[key] == pytest.approx(scales[key], rel=0.1) for key in scales)
            assert same >= 0.9 * len(scales)


def test_ranks_that_are_given_different_sequences_are_refused():
    changes = [
        getattr(split_sequences, name) for name in ("other_sample", "one_label", "shorter", "no_positions", "another_count")
    ]
    for said in ranks.run(2, split_sequences.different_samples, *changes):
        assert len(said) == len(changes)
        assert all("were given different ones: give all of them the samples of octavo.state.dp_rank" in one for one in said)
