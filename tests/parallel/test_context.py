"""Context parallelism of the decoder equals one rank: loss, logits and every gradient, for masks, exchanges and recipes."""

import itertools

import pytest
import split_sequences
import torch
import torch.distributed as dist

import octavo
import ranks
from octavo.fp8.autocast import fp8_autocast
from octavo.fp8.recipe import CurrentScaling
from octavo.parallel import world

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


@pytest.mark.long(lambda layout: layout != "shard 2 x context 2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_gradients_and_logits_are_one_ranks(layout):
    size, degrees = LAYOUTS[layout]
    cases = CASES if layout == "context 2" else ("documents", "odd", "experts")
    for errors in ranks.run(size, split_sequences.exact_cells, degrees, cases):
        for cell, (loss, gradient, logits) in errors.items():
            assert loss < 1e-5, cell
            assert gradient < 1e-5, cell
            assert logits < 1e-4, cell


FACTORS = {
    "layout": ("context 2", "shard 2 x context 2", "replicate 2 x context 2"),
    "exchange": ("all_gather", "p2p", "a2a"),
    "mask": ("plain", "window", "documents", "padding"),
    "key-value heads of 8 queries": (2, 8),
    "recipe": (None, "delayed", "current", "rowwise", "block"),
    "recompute": (False, "mlp", "selective", True),
    "offload": (False, True),
}
COVER = (
    ("context 2", "a2a", "plain", 2, "delayed", "selective", False),
    ("context 2", "all_gather", "window", 2, "current", "mlp", False),
    ("context 2", "a2a", "window", 8, "rowwise", True, True),
    ("context 2", "all_gather", "padding", 8, "block", False, True),
    ("context 2", "p2p", "documents", 8, "current", "selective", True),
    ("context 2", "all_gather", "padding", 2, "rowwise", "selective", True),
    ("context 2", "all_gather", "documents", 8, "delayed", True, True),
    ("context 2", "a2a", "window", 2, None, True, False),
    ("shard 2 x context 2", "p2p", "padding", 8, "delayed", "mlp", False),
    ("shard 2 x context 2", "a2a", "documents", 2, "rowwise", False, False),
    ("shard 2 x context 2", "all_gather", "plain", 8, "block", True, False),
    ("shard 2 x context 2", "a2a", "window", 2, "block", "selective", True),
    ("shard 2 x context 2", "a2a", "padding", 2, None, "mlp", False),
    ("shard 2 x context 2", "a2a", "plain", 2, "current", False, True),
    ("replicate 2 x context 2", "all_gather", "documents", 8, None, "selective", True),
    ("replicate 2 x context 2", "p2p", "padding", 2, "current", True, True),
    ("replicate 2 x context 2", "p2p", "plain", 8, None, False, False),
    ("replicate 2 x context 2", "a2a", "documents", 2, "block", "mlp", False),
    ("replicate 2 x context 2", "a2a", "window", 2, "delayed", False, True),
    ("replicate 2 x context 2", "p2p", "plain", 2, "rowwise", "mlp", True),
    ("replicate 2 x context 2", "p2p", "documents", 2, "block", True, True),
)
"""Every two values of different factors are in one cell."""


def test_every_two_settings_are_in_a_cell():
    wanted = {((a, x), (b, y)) for a, b in itertools.combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b]} - {
        (("exchange", "p2p"), ("mask", "window"))
    }  # refused
    named = [list(zip(FACTORS, cell, strict=True)) for cell in COVER]
    assert {pair for cell in named for pair in itertools.combinations(cell, 2)} == wanted


@pytest.mark.long
@pytest.mark.parametrize("layout", FACTORS["layout"])
def test_every_two_settings_together_are_one_ranks(layout):
    size, degrees = LAYOUTS[layout]
    cells = [cell[1:] for cell in COVER if cell[0] == layout]
    for errors in ranks.run(size, split_sequences.covering_cells, degrees, cells):
        for cell, (loss, norm, gradient, stores) in zip(cells, errors, strict=True):
            exact = cell[3] is None
            assert loss < (1e-5 if exact else 5e-3), cell
            assert norm < (1e-5 if exact else 5e-2), cell
            assert gradient < (1e-5 if exact else 0.1), cell
            assert (stores > 0) == cell[5], cell


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


def test_layers_begin_to_gather_before_attentions_backward():
    cells = [
        {}, {"recompute": True}, {"recompute": "selective"}, {"recompute": "mlp", "offload": True}, {"family": "gpt_neox"},
        {"family": "mixtral"},
    ]  # fmt: skip
    for found in ranks.run(2, split_sequences.gathers, {"context_parallel_degree": 2}, cells):
        for cell, begun in zip(cells, found, strict=True):
            assert begun == [True] * len(begun), cell
            assert begun


def test_ranks_that_are_given_different_sequences_are_refused():
    changes = [
        getattr(split_sequences, name) for name in ("other_sample", "one_label", "shorter", "no_positions", "another_count")
    ]
    for said in ranks.run(2, split_sequences.different_samples, *changes):
        assert len(said) == len(changes)
        assert all("were given different ones: give all of them the samples of octavo.state.dp_rank" in one for one in said)


def current_scaling(compiled):
    """The second output of a layer and its gradient; the tokens of rank 1 are larger."""
    world.init({"context_parallel_degree": 2})
    torch.manual_seed(0)
    layer = octavo.nn.Linear(32, 32, params_dtype=torch.float32)
    layer.fp8_state.context_group = dist.group.WORLD
    x = torch.randn(16, 32) * (1 + 9 * world.state.rank)
    run = torch.compile(layer, backend="aot_eager") if compiled else layer
    for _ in range(2):
        layer.zero_grad()
        with fp8_autocast(fp8_recipe=CurrentScaling()):
            y = run(x)
        y.sum().backward()
    return y.detach(), layer.weight.grad


@pytest.mark.long
def test_a_compiled_layer_joins_its_amax_too():
    eager, compiled = (ranks.run(2, current_scaling, how) for how in (False, True))
    for wanted, found in zip(eager, compiled, strict=True):
        assert all(map(torch.equal, wanted, found))
