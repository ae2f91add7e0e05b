"""The plan of memory of tensor-parallel ranks, against what a model on two of them holds and saves."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
from planned import CONFIG, FAMILIES, SIZES, STACK, saved_bytes, setup_of
from transformers import LlamaConfig, MixtralConfig

import octavo
import ranks
from benchmarks.cases import CASES
from building import built_model
from octavo import build
from octavo.cli import main
from octavo.collectives.blocks import local_of
from octavo.config.run import RunConfig
from octavo.fp8.columnwise import cache_columnwise
from octavo.hardware import GIB, lookup
from octavo.kernels.experts.assignment import round_robin
from octavo.models.families import spec_of
from octavo.nn import mlp
from octavo.nn.moe import LayerNormMoE
from octavo.parallel.experts import experts_in, spread_experts
from octavo.parallel.sharding import sharding_of
from octavo.parallel.world import state
from octavo.plan import fp8_auto, saved
from octavo.plan.advice import lines, memory_of
from octavo.plan.advice import setup_of as setup_of_plan
from octavo.plan.memory import _moments, estimate
from octavo.plan.run import Target, check

DTYPES = {2: torch.bfloat16, 4: torch.float32}


def on_a_rank(cells):
    """For each (config, setup, recipe): parameters of this rank's part, and bytes that a forward saves, and that are cached.

    The parts are not sharded any further, as over a shard group of one rank: a plan of shards has tests of its own. Of experts
    that are spread each gets as many copies.
    """
    octavo.init({"tensor_parallel_degree": 2, "expert_parallel_degree": cells[0][1].expert})

    def spread(model, parts, how, **_):
        for experts in (each for part in parts for each in experts_in(part) if how.expert_mesh is not None):
            LayerNormMoE._route = routed_in_turn
            spread_experts(experts, how.expert_mesh, fp8=False)

    found = []
    for config, setup, recipe in cells:
        dtype, params_dtype = DTYPES[setup.compute_bytes], DTYPES[setup.params_bytes]
        dtype = torch.float16 if setup.late else dtype
        unsharded = {
            "shard": mock.Mock(side_effect=spread),
            "save_whole": mock.DEFAULT,
            "extend_gathers": mock.Mock(side_effect=lambda model, parts, _: cache_columnwise(parts, None)),
        }
        with mock.patch.multiple(build, **unsharded), mock.patch.object(mlp, "CHUNK_ROWS", 16):
            model = built_model(
                config, dtype=dtype, params_dtype=params_dtype, device="cpu", seed=0, recompute=setup.recompute,
                mlp_chunks=setup.mlp_chunks, fp8_head=setup.head,
                sharding=sharding_of(state, None, dtype=dtype, params_dtype=params_dtype),
            )  # fmt: skip
            counts = saved_bytes(model, recipe, setup.documents, True if setup.accumulates else None)
        found.append((sum(local_of(parameter).numel() for parameter in model.parameters()), *counts))
    return found


def routed_in_turn(self, logits):
    """As `LayerNormMoE._route`, with equal numbers of tokens."""
    chosen = round_robin(logits, self.config.top_k)
    return logits.softmax(-1).gather(1, chosen), chosen


WIDE = LlamaConfig(
    hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=32,
    vocab_size=97, max_position_embeddings=64,
)  # fmt: skip
"""Shared rows of keys and values, and a vocabulary that is padded."""
MIXTURE = MixtralConfig(**STACK, **SIZES, num_local_experts=4)
CELLS = [
    (CONFIG, None, {}),
    (CONFIG, "delayed", {}),
    (CONFIG, "current", {"recompute": "mlp", "params_bytes": 2}),
    (CONFIG, "delayed", {"recompute": "selective"}),
    (CONFIG, "delayed", {"recompute": True}),
    (CONFIG, "delayed", {"accumulates": True, "head": "backward"}),
    (CONFIG, "delayed", {"mlp_chunks": 3, "documents": True}),
    (CONFIG, None, {"compute_bytes": 4, "documents": True}),
    (WIDE, "delayed", {"head": True}),
    (FAMILIES["neox"], "delayed", {}),
    (CONFIG, "rowwise", {}),
    (CONFIG, "block", {}),
    (FAMILIES["neox"], "rowwise", {"recompute": "mlp"}),
    (WIDE, "block", {"recompute": "mlp", "accumulates": True}),
    (CONFIG, "rowwise", {"recompute": True}),
    (FAMILIES["qwen3"], None, {}),
    (WIDE, None, {"late": True}),
    (CONFIG, "delayed", {"late": True, "recompute": "selective", "head": "backward"}),
    (FAMILIES["neox"], "rowwise", {"late": True}),
]


def test_what_two_ranks_hold_and_save_is_in_the_plan():
    """Every byte that autograd saves, and every cached FP8 weight, as of one rank (tests/plan/test_memory.py)."""
    setups = [setup_of(spec_of(config), 2, 48, recipe, tensor=2, **setting) for config, recipe, setting in CELLS]
    cells = [(config, setup, recipe) for (config, recipe, _), setup in zip(CELLS, setups, strict=True)]
    both = ranks.run(2, on_a_rank, cells)
    assert both[0] == both[1]
    for (_, recipe, _), whole, (parameters, kept, cached) in zip(CELLS, setups, both[0], strict=True):
        setup = saved.of_tensor_rank(whole)
        spec = setup.spec
        assert setup.parameters == parameters
        blocks = sum(one.bytes for recipes in setup.recipes for one in saved.saved_in_forward(setup, spec, recipes))
        # The gradients of the head's input, of all tokens, and of its weight.
        weight = spec.vocabulary * (4 if setup.late else saved.root_bytes(setup))
        head = spec.hidden_size * (setup.tokens * setup.compute_bytes + weight)
        ends = saved.saved_by_ends(setup, spec) + head
        if setup.recompute in (True, "selective"):  # the tables are alive as arguments of the recomputation
            ends -= 2 * 48 * int(spec.head_dim * spec.rotary_fraction) * 4
        assert kept == pytest.approx(blocks + ends, abs=64), whole  # a few scales of one number
        assert cached == pytest.approx(saved.kept_weights(setup, spec) if recipe else 0, abs=256), whole


@pytest.mark.long(lambda recipe, expert: recipe == "current" or (recipe == "block") == (expert == 1))
@pytest.mark.parametrize("expert", [1, 2], ids=["slices", "whole"])
@pytest.mark.parametrize("recipe", [None, "delayed", "current", "block"])
def test_what_two_ranks_hold_and_save_of_experts_is_in_the_plan(recipe, expert):
    """Small tensors of the router are estimates, as on one rank. Two experts of four are as many elements as a half of each."""
    check_experts(setup_of(spec_of(MIXTURE), 2, 48, recipe, tensor=2, expert=expert, row_tile=1), recipe)


def test_what_two_ranks_save_of_experts_in_float16_is_in_the_plan():
    check_experts(setup_of(spec_of(MIXTURE), 2, 48, None, tensor=2, row_tile=1, late=True), None)


def check_experts(whole, recipe):
    (parameters, kept, cached), other = (row[0] for row in ranks.run(2, on_a_rank, [(MIXTURE, whole, recipe)]))
    setup = saved.of_tensor_rank(whole)
    assert other[0] == parameters == setup.parameters
    blocks = sum(one.bytes for recipes in setup.recipes for one in saved.saved_in_forward(setup, setup.spec, recipes))
    weight = setup.spec.vocabulary * (4 if setup.late else saved.root_bytes(setup))
    head = setup.spec.hidden_size * (setup.tokens * setup.compute_bytes + weight)
    assert kept == pytest.approx(blocks + saved.saved_by_ends(setup, setup.spec) + head, rel=0.02)
    assert cached == pytest.approx(saved.kept_weights(setup, setup.spec) if recipe else 0, abs=256)


def test_whole_experts_are_planned_as_they_are_held_gathered_and_sharded():
    """Mixtral 8x7B over 8 ranks: shards of all degrees are alike, and a block gathers a rank's own experts."""
    spec = CASES["mixtral-8x7b-2layers"].spec
    experts = 8 * 3 * 4096 * 14336
    dense = saved.block_parameters(spec) - experts - 8 * 4096 - 2 * 4096
    for expert in (1, 2, 4, 8):
        setup = saved.of_tensor_rank(setup_of(spec, 1, 4096, None, world=8, shard=4, tensor=2, expert=expert))
        one = setup.spec
        assert saved.block_parameters(one) == dense // 2 + experts // 2 + 8 * 4096 + 2 * 4096
        held = experts // 2 if expert == 1 else experts // expert
        assert saved.local_block_parameters(setup, one) == dense // 2 + held + 8 * 4096 + 2 * 4096
        rows = saved.rows_of_experts(setup, one)
        assert rows == pytest.approx(2 * 4096 // (1 if expert == 1 else 2), rel=0.4)  # experts of tiles of 128
        found = estimate(setup_of(spec, 1, 4096, None, world=8, shard=4, tensor=2, expert=expert))
        assert found.parts["parameters"] == 4 * -(-setup.parameters // 4)
        not_ahead = held if expert == 8 else 0  # whole on a rank: not received ahead
        gathered = (saved.root_parameters(one) + 2 * saved.local_block_parameters(setup, one) - not_ahead) * 2
        assert found.parts["gathered weights"] in (gathered, saved.root_parameters(one) * 2)


def test_matrices_are_divided_and_norms_are_not():
    case = CASES["llama-8b-8k"]
    one, two = (estimate(setup_of(case.spec, 2, 8192, "delayed", world=n, shard=1, tensor=n)) for n in (1, 2))
    norms = (2 * case.spec.layers + 1) * case.spec.hidden_size
    assert two.exact == one.exact // 2 + 16 * norms // 2
    assert 0.5 < two.parts["activations"] / one.parts["activations"] < 0.52
    assert 0.5 < two.total / one.total < 0.62
    shards = estimate(setup_of(case.spec, 1, 8192, "delayed", world=2, shard=2))
    assert two.exact == pytest.approx(shards.exact, rel=1e-3)


def test_a_sequence_that_the_ranks_do_not_divide_is_padded():
    spec = CASES["llama-1b"].spec
    assert setup_of(spec, 3, 31, tensor=4, world=4).tokens == 3 * 32
    assert setup_of(spec, 3, 31, tensor=4, world=4).own_tokens == 3 * 8
    assert setup_of(spec, 3, 31, tensor=3, context=2, world=6).own_length == 18  # 31 of 36, in chunks that three ranks divide
    assert not replace(setup_of(spec, 3, 31), world=4, shard=2, tensor=2).replicated
    assert replace(setup_of(spec, 3, 31), world=4, shard=1, tensor=2).replicated


DEGREE = "parallel.tensor_parallel_degree"
LARGE = ["model.source=llama-8b", "model.config={}", "data.sequence_length=16384", "train.global_batch=64"]


def planned(file, *overrides, ranks=8, gpu="h100 sxm"):
    return check(RunConfig.from_file(file, overrides), target=Target(ranks, lookup(gpu)))


def test_a_dry_run_says_who_shares_matrices_and_counts_their_samples(tiny_run, capsys):
    run = tiny_run()
    given = ["train", str(run.file), "--dry-run", "--world-size", "8", "--gpu", "h200", *LARGE, f"{DEGREE}=4"]
    assert main([*given, "train.micro_batch=1"]) == 0
    text = capsys.readouterr().out
    assert "matrices    4 ranks hold parts of each matrix, and between products parts of the tokens" in text
    assert "batch       64 sequences = 2 data-parallel x 1 micro-batch x 32 accumulation" in text
    assert main([*given, "train.micro_batch=1", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    norms, parameters = (2 * 32 + 1) * 4096, 8_030_261_248
    assert memory["parts_gib"]["parameters"] * GIB == pytest.approx(4 * ((parameters - norms) / 8 + norms / 2), rel=1e-6)


@pytest.mark.parametrize("before", [1, 2])
def test_a_tensor_degree_that_fits_is_advised_and_really_fits(tiny_run, before):
    """Of 8B in micro-batches of 4 x 16,384 tokens."""
    run, given = tiny_run(), [*LARGE, "train.micro_batch=4", f"{DEGREE}={before}"]
    plan = planned(run.file, *given)
    found = memory_of(plan)
    assert found.fits is False
    assert any(DEGREE in option.changes for option in found.options)
    for option in found.options:
        changes = [f"{key}={json.dumps(value)}" for key, value in option.changes.items() if key != "ranks"]
        again = memory_of(planned(run.file, *given, *changes, ranks=option.changes.get("ranks", 8)))
        assert again.fits
        assert again.estimate == option.estimate
        assert option.changes.get(DEGREE, before + 1) > before


@pytest.mark.long
def test_what_is_advised_beside_whole_experts_really_fits(tiny_run):
    """Mixtral 8x7B, whose experts are over two ranks of each tensor group of four."""
    run, given = tiny_run(), [*LARGE, "model.source=mixtral-8x7b", f"{DEGREE}=4", "parallel.expert_parallel_degree=2"]
    found = memory_of(planned(run.file, *given, "train.micro_batch=8", ranks=16))
    assert found.fits is False
    assert any(option.changes.get(DEGREE) == 8 for option in found.options)
    for option in found.options:
        changes = [
            f"{key}={json.dumps(value)}" for key, value in {"train.micro_batch": 8, **option.changes}.items() if key != "ranks"
        ]
        again = memory_of(planned(run.file, *given, *changes, ranks=option.changes.get("ranks", 16)))
        assert again.fits
        assert again.estimate == option.estimate


def test_ranks_that_cannot_share_matrices_are_not_advised(tiny_run):
    run, given = tiny_run(), [*LARGE, "train.micro_batch=4"]
    experts = "model.source=mixtral-8x7b"
    for changed, advised in (
        ([experts, "moe.moe_load_balancing=sinkhorn"], False),
        (["fp8.recipe=block"], True),
        (["fp8.recipe=rowwise"], True),
        (["model.dtype=float16"], True),
    ):
        found = memory_of(planned(run.file, *given, *changed))
        assert found.fits is False
        assert any(DEGREE in option.changes for option in found.options) == advised, changed


def test_the_choice_of_gathering_and_timings_are_of_a_rank_s_part(tiny_run):
    """Blocks of eight layers of 8B take 3.3 GiB (tests/plan/test_advice.py), a half of each 1.6 GiB."""
    sizes = ["model.source=llama-8b", 'model.config={"num_hidden_layers" = 8}', "train.micro_batch=1"]
    file = tiny_run().file
    plan = planned(file, *sizes, f"{DEGREE}=2", ranks=4, gpu="h200")
    assert plan.gathering.why.startswith("blocks stay gathered from forward to backward: 1.6 GiB, at most")
    assert f"gathered    {plan.gathering.why}" in lines(plan, memory_of(plan))
    given = planned(file, *sizes, f"{DEGREE}=2", "parallel.reshard_after_forward=false", ranks=4, gpu="h200")
    freed = planned(file, *sizes, f"{DEGREE}=2", "parallel.reshard_after_forward=true", ranks=4, gpu="h200")
    gathered = [estimate(setup_of_plan(each)).parts["gathered weights"] for each in (plan, given, freed)]
    assert gathered[0] == gathered[1] > gathered[2]
    timed = []

    def timer(shape, recipe):
        timed.append(tuple(shape))
        return fp8_auto.Timing(2.0, 1.0)

    with mock.patch.object(fp8_auto, "cached_timings", lambda pairs, setting, timer: {p: timer(*p) for p in set(pairs)}):
        assert fp8_auto.slower_layers(plan, timer) == {}
    rows = plan.config.data.sequence_length
    assert sorted(timed) == sorted(
        [(rows, 3072, 4096), (rows, 4096, 2048), (rows, 14336, 4096), (rows, 4096, 7168)]
    )  # of 6144, 4096, 28672 and 14336


def test_sums_of_float16_over_tensor_ranks_are_float32_in_the_plan():
    """In the backward of a block: partial sums of all tokens, and this rank's tokens of the sum."""
    setup = setup_of(spec_of(CONFIG), 2, 48, None, tensor=2)
    late = replace(setup, late=True)
    assert (setup.summand_bytes, late.summand_bytes, replace(late, tensor=1).summand_bytes) == (2, 4, 2)
    found = [dict(_moments(saved.of_tensor_rank(each), saved.of_tensor_rank(each).spec)) for each in (setup, late)]
    bf16, float16 = (moments["in the backward of the first block"]["temporaries"] for moments in found)
    assert float16 - bf16 == (2 * 48 + 48) * setup.spec.hidden_size * 2
