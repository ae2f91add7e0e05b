"""Tensor parallelism: losses, gradients, steps, casts and checkpoints of several ranks are those of one."""

import itertools
import re

import pytest
import tensor_ranks
import torch
from transformers import AutoModelForCausalLM

import ranks
from octavo.config import MoeConfig

FAMILIES = (
    *(
        "plain",
        "pad-token-tied",
        "one-group",
        "all-biases",
        "wide-heads",
        "mistral-window",
        "qwen2-tied",
        "qwen2-mixed-windows",
    ),
    *("qwen3-biases", "phi3-partial", "neox", "neox-serial", "neox-tanh-tied"),
)
"""Of `llamas.SHAPES`. At 4 ranks most have fewer key-value heads, and no whole block of gate and up."""
TENSOR = {"tensor_parallel_degree": 2}
LAYOUTS = {
    "shard": TENSOR,
    "replicate": TENSOR | {"hybrid_shard_degree": 1},
    "gathered": TENSOR | {"context_parallel_degree": 2},
    "ring": TENSOR | {"context_parallel_degree": 2, "cp_comm_type": "p2p"},
    "heads": TENSOR | {"context_parallel_degree": 2, "cp_comm_type": "a2a"},
}
OPTIONS = {
    "odd lengths": ("plain", {"given": {"tokens": 13}}),
    "documents": ("qwen3", {"given": {"documents": True}}),
    "padding": ("neox", {"given": {"padding": True}}),
    "accumulation": ("all-biases", {"micro_batches": 2}),
    "frozen": ("all-biases", {"frozen": ("norm.weight", "fc1.weight", "embedding.weight")}),
    "recompute": ("neox", {"recompute": True}),
    "selective": ("qwen3-biases", {"recompute": "selective"}),
    "mlp": ("all-biases", {"recompute": "mlp"}),
    "chunks": ("plain", {"recompute": "mlp", "mlp_chunks": 2}),
    "offload": ("plain", {"offload": True}),
}
ONE_RANK: dict = {}


def of_one_rank(shape, options):
    """`tensor_ranks.trained` on one rank, once."""
    key = repr((shape, options))
    if key not in ONE_RANK:
        ONE_RANK[key] = tensor_ranks.trained(shape, None, **options)
    return ONE_RANK[key]


DROPOUT = {"gpt_neox": {"hidden_dropout": 0.2}, "phi3": {"resid_pdrop": 0.2, "embd_pdrop": 0.1}}
"""Of what a block adds to the stream, and of embeddings."""


def check(world, degrees, cells, limit=1e-5):
    found, *_ = ranks.run(world, tensor_ranks.cells, degrees, cells, timeout=600)
    wrong = {}
    for (shape, options), each in zip(cells, found, strict=True):
        errors = tensor_ranks.errors(each, of_one_rank(shape, options))
        if not max(errors.values()) < limit:
            wrong[repr((shape, options))] = errors
    assert wrong == {}


@pytest.mark.long(lambda world: world == 4)
@pytest.mark.parametrize("world", [2, 4])
def test_every_family_trains_as_on_one_rank(world):
    check(world, {"tensor_parallel_degree": world}, [(family, {}) for family in FAMILIES], limit=3e-5)


MIXTURES = {
    "mixtral": ("mixtral", {}),
    "balanced": ("mixtral-balanced", {"moe": MoeConfig(moe_z_loss_coeff=0.3)}),
    "qwen3": ("qwen3-moe", {"given": {"tokens": 13}}),
    "dense layers": ("qwen3-moe-mixed", {"given": {"documents": True}}),
    "padding": ("mixtral-balanced", {"given": {"padding": True}}),
    "accumulation": ("qwen3-moe-mixed", {"micro_batches": 2}),
    "frozen": ("mixtral", {"frozen": ("router.weight", "fc1_weight", "norm.weight")}),
    "recompute": ("mixtral-balanced", {"recompute": True}),
    "selective": ("qwen3-moe", {"recompute": "selective"}),
    "offload": ("mixtral", {"offload": True}),
}


@pytest.mark.long(lambda degrees: degrees != LAYOUTS["shard"])
@pytest.mark.parametrize("degrees", [{"tensor_parallel_degree": 4}, *LAYOUTS.values()], ids=["4", *LAYOUTS])
def test_slices_of_experts_train_as_whole_ones(degrees):
    """Tokens, router losses and gradients of routers are counted once, whatever the ranks."""
    heads = degrees.get("cp_comm_type") == "a2a"
    cells = [MIXTURES["qwen3"], *([] if "cp_comm_type" in degrees else [MIXTURES["balanced"]])]
    if heads:
        shape = {"model_type": "mixtral", "num_local_experts": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
        cells = [(shape | {"output_router_logits": True, "router_aux_loss_coef": 0.5}, {})]
    check(4, degrees, cells, limit=3e-5)


@pytest.mark.long
def test_slices_of_experts_with_other_options():
    check(2, TENSOR, list(MIXTURES.values()), limit=3e-5)


SLICES = {"2": (2, TENSOR), "4": (4, {"tensor_parallel_degree": 4})}
SPREAD = {
    "2 of 2": (2, TENSOR | {"expert_parallel_degree": 2}),
    "2 of 4": (4, {"tensor_parallel_degree": 4, "expert_parallel_degree": 2}),
    "4 of 4": (4, {"tensor_parallel_degree": 4, "expert_parallel_degree": 4}),
    "4 over samples": (4, TENSOR | {"expert_parallel_degree": 4}),
    "2, shard": (4, TENSOR | {"expert_parallel_degree": 2}),
    "2, replicate": (4, TENSOR | {"expert_parallel_degree": 2, "hybrid_shard_degree": 1}),
    "4 over sequences": (4, TENSOR | {"expert_parallel_degree": 4, "context_parallel_degree": 2}),
    "2, sequences": (4, TENSOR | {"expert_parallel_degree": 2, "context_parallel_degree": 2}),
}
"""Whole experts: how many ranks hold different ones, and where. world, degrees."""
FOUR = {
    "model_type": "mixtral", "num_local_experts": 4, "tie_word_embeddings": True, "intermediate_size": 45,
    "output_router_logits": True, "router_aux_loss_coef": 0.5,
}  # fmt: skip
"""An intermediate size that no two ranks divide."""
WHOLE = {
    "balanced": (FOUR, {"moe": MoeConfig(moe_z_loss_coeff=0.3)}),
    "dense layers": ("qwen3-moe-mixed", {"given": {"tokens": 13}, "micro_batches": 2}),
    "documents": ("qwen3-moe-mixed", {"given": {"documents": True}, "recompute": True}),
    "padding": (FOUR, {"given": {"padding": True}, "recompute": "selective"}),
    "frozen": ("mixtral", {"frozen": ("router.weight", "fc1_weight", "norm.weight"), "micro_batches": 2}),
    "frozen experts": ("mixtral", {"frozen": ("fc1_weight", "fc2_weight")}),
    "offload": ("mixtral", {"offload": True}),
}


@pytest.mark.long(lambda layout: layout != "2 of 2")
@pytest.mark.parametrize("layout", SPREAD)
def test_whole_experts_over_tensor_ranks_train_as_on_one_rank(layout):
    world, degrees = SPREAD[layout]
    check(world, degrees, [WHOLE[name] for name in ("balanced", "dense layers", "documents")])


@pytest.mark.long
def test_whole_experts_with_other_options():
    check(2, SPREAD["2 of 2"][1], list(WHOLE.values()))
    check(4, SPREAD["2 of 4"][1], [WHOLE["padding"], WHOLE["frozen"]])
    check(4, SPREAD["2, replicate"][1] | {"sync_each_micro_batch": True}, [WHOLE["frozen"]])


def test_weights_of_rank_0_reach_whole_experts_and_slices():
    for world, degrees in (SLICES["2"], SPREAD["2 of 2"], SPREAD["2, shard"]):
        for wrong, described in ranks.run(world, tensor_ranks.from_rank_0, degrees, "qwen3-moe-mixed"):
            assert wrong == []
            assert ("whole experts" in described) == ("expert_parallel_degree" in degrees)


def test_expert_groups_are_consecutive_ranks():
    for layout, groups in {
        "2 of 4": [[0, 1], [2, 3]],
        "4 over samples": [[0, 1, 2, 3]],
        "2, replicate": [[0, 1], [2, 3]],
    }.items():
        world, degrees = SPREAD[layout]
        for rank, found in enumerate(ranks.run(world, tensor_ranks.expert_groups, degrees)):
            group = next(each for each in groups if rank in each)
            assert found == (group.index(rank), len(group), group)


@pytest.mark.long
@pytest.mark.parametrize("shape", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize("tensor", [2, 4])
def test_slices_of_experts_accumulate_and_recompute(tensor, shape):
    cells = [(shape, {"recompute": how, "micro_batches": times}) for how in (False, True, "selective") for times in (1, 2)]
    check(tensor, {"tensor_parallel_degree": tensor}, cells)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_beside_other_degrees(layout):
    cells = [("all-biases", {}), ("multi-head", {"given": {"tokens": 11}}), ("neox", {"given": {"documents": True}})]
    if layout == "heads":  # two of a rank's, on two ranks
        cells = [({"num_attention_heads": 8, "num_key_value_heads": 4}, {})]
    check(4, LAYOUTS[layout], cells, limit=3e-5)


def test_gradients_of_what_all_tensor_ranks_hold_are_summed_at_once():
    for found, held in ranks.run(2, tensor_ranks.sums_of_backward, TENSOR, "all-biases"):
        assert found == [sum(held)]
        assert len(held) > 8
    shape = tensor_ranks.MIXTURE | {"num_key_value_heads": 2}
    for found, held in ranks.run(2, tensor_ranks.sums_of_backward, TENSOR, shape, recompute=True):
        assert found == [sum(held)]
    for found, held in ranks.run(4, tensor_ranks.sums_of_backward, TENSOR, "all-biases"):  # with shards
        assert sum(found) == sum(held)
        assert len(found) == 4  # of the last norm, the second block and the first, whose parts FSDP2 gathers one by one


@pytest.mark.long
def test_with_other_options():
    check(2, TENSOR, list(OPTIONS.values()), limit=3e-5)


@pytest.mark.long(lambda world: world == 4)
@pytest.mark.parametrize(("world", "degrees"), [(2, TENSOR), (4, TENSOR), (4, {"tensor_parallel_degree": 4})], ids=str)
def test_casts_and_scales_are_those_of_one_rank_to_the_bit(world, degrees):
    cells = [("delayed", "all"), ("delayed", "samples"), ("delayed", "none"), ("current", "all")]
    if world != degrees["tensor_parallel_degree"]:
        cells = cells[:2]  # without a join, or by its own amax, each replica has scales of its own
    samples = world // degrees["tensor_parallel_degree"]
    wanted = [tensor_ranks.scaled(None, cells)] if samples == 1 else ranks.run(samples, tensor_ranks.scaled, {}, cells)
    for rank, found in enumerate(ranks.run(world, tensor_ranks.scaled, degrees, cells)):
        of_samples = wanted[rank // degrees["tensor_parallel_degree"]]
        for (hidden, scales), (their_hidden, theirs) in zip(found, of_samples, strict=True):
            assert torch.equal(hidden, their_hidden)
            assert len(theirs) == 24
            assert [name for name, scale in theirs.items() if not torch.equal(scales[name], scale)] == []


@pytest.mark.long(lambda name, world: world == 4 or name == "rowwise")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["rowwise", "block"])
def test_scales_of_rows_and_blocks_are_those_of_slices_on_one_rank(world, name):
    """Of slices and tokens that are no multiples of 128, and of those that are: to the bit but for sums in float32."""
    size = 128 * world
    wide = {"hidden_size": size, "intermediate_size": size, "num_attention_heads": 4, "num_key_value_heads": 4}
    for shape, tokens in ((tensor_ranks.ALIGNED, 12), (wide, 36), (wide, 32 * world)):
        slices = 1 if name == "block" and tokens == 32 * world else world  # then one rank's own casts are the same
        hidden, gradients = tensor_ranks.with_scales_of_rows(None, name, slices, shape, tokens)
        for found, others in ranks.run(
            world, tensor_ranks.with_scales_of_rows, {"tensor_parallel_degree": world}, name, world, shape, tokens
        ):
            assert torch.equal(found, hidden)
            apart = {n: ((others[n] - g).norm() / (g.norm() + 1e-9)).item() for n, g in gradients.items()}
            assert {n: error for n, error in apart.items() if not error < 1e-6} == {}


@pytest.mark.long
@pytest.mark.parametrize("name", ["rowwise", "block"])
def test_steps_with_scales_of_rows_and_blocks(name):
    """As far from unrounded gradients as one rank, whose rows are longer; what changes no cast here changes no number."""
    same = ({}, {"recompute": True}, {"recompute": "selective"}, {"recompute": "mlp"}, {"offload": True})
    others = (
        {"fp8_head": True},
        {"frozen": ("fc1.weight", "qkv.weight")},
        {"frozen": ("proj.weight", "norm.weight", "embedding.weight")},
        {"micro_batches": 2},
        {"recompute": "mlp", "mlp_chunks": 2},
        {"given": {"tokens": 13}},
    )
    biases = tensor_ranks.ALIGNED | {"attention_bias": True, "mlp_bias": True}
    cells = [(biases, {"steps": 1} | options) for options in (*same, *others)]
    cells += [(tensor_ranks.MIXTURE, {"steps": 1}), (biases | {"num_key_value_heads": 1}, {"steps": 1})]
    cells += [(tensor_ranks.ALIGNED | {"model_type": "gpt_neox"}, {"steps": 1, "dtype": torch.bfloat16})]
    in_fp8 = [(shape, options | {"recipe": name}) for shape, options in cells]
    found, *_ = ranks.run(2, tensor_ranks.cells, TENSOR, in_fp8, timeout=600)
    for (_, options), each in zip(in_fp8[: len(same)], found, strict=False):
        assert max(tensor_ranks.errors(each, found[0]).values()) < 1e-6, options
    for (shape, options), each in zip(cells, found, strict=True):
        exact, one = of_one_rank(shape, options), of_one_rank(shape, options | {"recipe": name})
        assert each["losses"][0] == pytest.approx(exact["losses"][0], rel=0.02), options
        for parameter, value in exact["gradients"].items():
            apart, theirs = (((of["gradients"][parameter] - value).norm() / value.norm()).item() for of in (each, one))
            assert apart < 1.5 * theirs + 0.05, (options, parameter, apart, theirs)


@pytest.mark.long(lambda layout: layout not in ("2", "2 of 2"))
@pytest.mark.parametrize("layout", [*SLICES, *(name for name in SPREAD if name.endswith((" of 2", " of 4")))])
def test_casts_and_scales_of_experts_are_those_of_one_rank_to_the_bit(layout):
    """Of slices, and of whole experts, whose scales are on their ranks."""
    world, degrees = (SLICES | SPREAD)[layout]
    cells = [("delayed", "all"), ("delayed", "none"), ("current", "all")]
    wanted = tensor_ranks.scaled(None, cells, tensor_ranks.MIXTURE)
    every = ranks.run(world, tensor_ranks.scaled, degrees, cells, tensor_ranks.MIXTURE)
    for number, (their_hidden, theirs) in enumerate(wanted):
        assert len(theirs) == 24
        held = [found[number][1] for found in every]
        for name, scale in theirs.items():
            assert torch.equal(torch.stack([scales[name] for scales in held]).amax(0), scale), name
            assert all(((scales[name] == scale) | (scales[name] == 0)).all() for scales in held), name
        assert all(torch.equal(found[number][0], their_hidden) for found in every)


def test_steps_in_fp8():
    for recipe in ("delayed", "current"):
        check(2, TENSOR, [(tensor_ranks.ALIGNED, {"recipe": recipe, "steps": 1})], limit=1e-4)
        # A sum in another order, at the edge of two codes of E5M2, is another code.
        check(2, TENSOR, [(tensor_ranks.MIXTURE, {"recipe": recipe, "steps": 1})], limit=5e-3)
        check(2, SPREAD["2 of 2"][1], [(tensor_ranks.MIXTURE, {"recipe": recipe, "steps": 1})], limit=5e-3)


def test_tokens_of_tensor_ranks_travel_in_fp8():
    """Outside of an autocast nothing is rounded; inside, once more."""
    degrees = SPREAD["2 of 2"][1] | {"expert_dispatch_fp8": True}
    check(2, degrees, [(tensor_ranks.MIXTURE, {"steps": 1})])
    cells = [(tensor_ranks.MIXTURE, {"recipe": "delayed", "steps": 1})]
    found, *_ = ranks.run(2, tensor_ranks.cells, degrees, cells)
    losses, norms, *others = tensor_ranks.errors(found[0], of_one_rank(*cells[0])).values()
    assert 0 < losses < 0.02
    assert norms < 0.05
    assert max(others) < 0.6


@pytest.mark.long
def test_experts_under_other_recipes():
    """Blocks of 128 are one rank's; rows of slices, as those of other parts, are shorter."""
    block, rowwise = ((tensor_ranks.MIXTURE, {"recipe": recipe, "steps": 1}) for recipe in ("block", "rowwise"))
    for degrees in (TENSOR, SPREAD["2 of 2"][1]):
        check(2, degrees, [block])
        found, *_ = ranks.run(2, tensor_ranks.cells, degrees, [rowwise])
        losses, norms, *others = tensor_ranks.errors(found[0], of_one_rank(*rowwise)).values()
        assert losses < 0.02
        assert norms < 0.05
        assert max(others) < 0.6  # FP8 itself is as far from float32


@pytest.mark.long(lambda layout, recipe: layout != "2, sequences" or recipe == "delayed")
@pytest.mark.parametrize(
    ("layout", "recipe"),
    [*itertools.product(("4 over samples", "2, shard", "2, sequences"), ("delayed",)), ("2, sequences", "current")],
)
def test_scales_of_whole_experts_are_those_of_one_rank(layout, recipe):
    """By the tokens of all ranks that share samples; under delayed scaling of all."""
    world, degrees = SPREAD[layout]
    begun_by_one = layout in ("4 over samples", "2, shard")
    wanted = tensor_ranks.scales_of_experts(None, recipe, begun_by_one)
    assert len(wanted) == 2 * 2 * 3
    every = ranks.run(world, tensor_ranks.scales_of_experts, degrees, recipe, begun_by_one)
    for name, scales in wanted.items():
        for found in every:
            there = found[name].where(~found[name].isnan(), scales) if recipe == "current" else found[name]
            torch.testing.assert_close(there, scales, rtol=1e-5, atol=0.0, equal_nan=True)
        if recipe == "current":
            assert not torch.stack([found[name] for found in every]).isnan().all(0).any(), name


@pytest.mark.long(lambda world: world == 4)
@pytest.mark.parametrize("world", [2, 4])
def test_dropout_of_hidden_states_has_the_masks_of_one_rank(world):
    """Under recomputation too, which draws them once more, and in FP8."""
    cells = [
        (tensor_ranks.SHAPES[name] | {"num_key_value_heads": 2} | DROPOUT[tensor_ranks.SHAPES[name]["model_type"]], options)
        for name in ("neox", "neox-serial", "phi3")
        for options in ({"seed": 7}, {"seed": 8, "recompute": True}, {"seed": 9, "micro_batches": 2})
    ]
    check(world, {"tensor_parallel_degree": world}, cells, limit=3e-5)


@pytest.mark.long(lambda world: world == 4)
@pytest.mark.parametrize("world", [2, 4])
def test_dropout_of_attention_draws_the_heads_of_each_rank_apart(world):
    """Equal to one rank whose heads draw from as many streams."""
    four = {"num_key_value_heads": 4, "attention_dropout": 0.3}
    cells = [
        (four, {"seed": 10 * world}),
        (four | {"model_type": "mistral", "sliding_window": 5}, {"seed": 10 * world + 1}),
        (four, {"seed": 10 * world + 2, "recompute": True}),
        (four | {"model_type": "gpt_neox", "hidden_dropout": 0.2}, {"seed": 10 * world + 3, "given": {"documents": True}}),
    ]
    with tensor_ranks.attention_by_streams(world):
        for shape, options in cells:
            of_one_rank(shape, options)
    check(world, {"tensor_parallel_degree": world}, cells, limit=3e-5)


def test_streams_of_ranks_differ_and_leave_their_common_state_alike():
    found = ranks.run(4, tensor_ranks.numbers_of_ranks)
    assert len({tuple(numbers) for rank in found for numbers in rank[:2]}) == 8
    assert len({tuple(rank[2]) for rank in found}) == 1


def test_an_evaluation_drops_nothing():
    shape = {"model_type": "gpt_neox", "attention_dropout": 0.3, "hidden_dropout": 0.2}
    wanted, _ = tensor_ranks.evaluated(None, {"model_type": "gpt_neox"})
    for loss, same in ranks.run(2, tensor_ranks.evaluated, TENSOR, shape):
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert same


def test_bf16():
    cells = [("plain", {"dtype": torch.bfloat16, "steps": 2})]
    check(2, TENSOR, cells, limit=0.05)


@pytest.mark.long(lambda degrees: degrees == {"tensor_parallel_degree": 4})
@pytest.mark.parametrize("degrees", [TENSOR, TENSOR | {"context_parallel_degree": 2}, {"tensor_parallel_degree": 4}], ids=str)
def test_logits_and_hidden_states_are_whole(degrees):
    world = 4 if len(degrees) > 1 else degrees["tensor_parallel_degree"]
    logits, states, gradients, last, loss = tensor_ranks.logits_and_states(None)
    for found in ranks.run(world, tensor_ranks.logits_and_states, degrees):
        torch.testing.assert_close(found[0], logits, rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(found[1], states, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        for name, gradient in gradients.items():
            assert (found[2][name] - gradient).norm() <= 1e-5 * gradient.norm(), name
        torch.testing.assert_close(found[3], last, rtol=1e-4, atol=1e-4)
        assert found[4] == pytest.approx(loss, rel=1e-5)


@pytest.mark.long(lambda world, fp8_dtype: (world == 4) == (fp8_dtype is None))
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("fp8_dtype", [None, torch.float8_e5m2], ids=str)
def test_the_loss_of_slices_is_that_of_all_words(world, fp8_dtype):
    for objective in ((-100, 0.0, 0.0), (-100, 0.1, 0.0), (-100, 0.1, 0.02)):
        for vocabulary in (97, 128, 20):  # padded, even, and ranks without a word
            for loss, gradient, raised in ranks.run(world, tensor_ranks.loss_of_slices, vocabulary, objective, fp8_dtype):
                assert loss < 1e-6
                assert gradient < (1e-6 if fp8_dtype is None else 0.02)
                assert raised


def test_what_cannot_be_split_is_refused():
    shapes = {
        "heads": ({"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 48}, {}),
        "size": ({"intermediate_size": 45}, {}),
        "assignment": ("mixtral", {"moe": MoeConfig(moe_load_balancing="sinkhorn")}),
        "expert size": (tensor_ranks.MIXTURE | {"intermediate_size": 45}, {}),
    }
    words = {
        "heads": r"3 query heads \(num_attention_heads\) are not divisible.*to 1 or 3",
        "size": r"an intermediate size \(intermediate_size\) of 45 is not divisible.*to 1,",
        "assignment": 'moe_load_balancing = "sinkhorn" with tensor_parallel_degree = 2.*Set moe_load_balancing = "aux_loss"',
        "expert size": r"an intermediate size \(intermediate_size\) of 45 is not divisible.*to 1,",
        "samples": r"the 2 ranks that share each sequence \(tensor_parallel_degree\) were given different ones",
        "embedding": r"this rank's tokens.*hidden_states\[0\]",
        "head": r"this rank's words.*model\(input_ids\)\.logits",
        "embedding behind an error": "this rank's tokens",
        "clip": r"octavo\.clip_grad_norm_\(model, max_norm\)",
        "id": "97",
        "label": "100",
        "own code": "Sequential runs its original code",
        "adapter": "layers.0.ffn.lora was added",
    }
    for said, described in ranks.run(2, tensor_ranks.refusals, 2, shapes):
        assert said.keys() == words.keys()
        for name, text in words.items():
            with pytest.raises(ValueError, match=text):
                raise ValueError(said[name])
        assert "split: 2 ranks hold parts of each matrix" in described
        assert "96x48" in described  # of the whole


@pytest.mark.parametrize("degrees", [TENSOR, {"context_parallel_degree": 2}], ids=["tensor", "context"])
def test_ranks_of_a_group_have_the_same_settings(degrees):
    words = {
        "same": "^$",
        "evaluation": r"differ in model\.train\(\): training on the first, evaluation on rank 1",
        "no gradients": r"differ in torch\.no_grad: gradients on the first, no gradients on rank 1",
        "FP8": r"differ in fp8_autocast: no FP8 on the first, DelayedScaling.* on rank 1",
        "frozen": r"differ in requires_grad: nothing is frozen on the first, frozen are layers\.0\.",
    }
    for name, text in words.items():
        for said in ranks.run(2, tensor_ranks.other_settings, degrees, name):
            assert re.search(text, said), said


def test_what_takes_a_part_for_a_whole_is_refused():
    words = {
        "deepcopy": r"octavo\.to_huggingface\(model\) has whole weights",
        "DDP": "DistributedDataParallel, also inside Trainer and Accelerate",
        "FSDP1": "leave FullyShardedDataParallel and fully_shard out",
        "FSDP2": "leave FullyShardedDataParallel and fully_shard out",
        "FSDP2 of a block": "leave FullyShardedDataParallel and fully_shard out",
        "compile": r"torch\.compile of a model with tensor_parallel_degree = 2.*Leave torch\.compile out",
    }
    for name, text in words.items():
        for said in ranks.run(2, tensor_ranks.taken_for_whole, TENSOR, name):
            assert re.search(text, said), said


def test_optimizers_that_measure_whole_parameters_are_refused():
    words = {
        "Muon": r"Muon .*each of 2 tensor ranks.* layers\.0\.self_attention\.proj\.weight .* Give Muon octavo\.matrices",
        "fc2": r"layers\.1\.ffn\.fc2\.weight",
        "Adafactor": r"embedding\.weight \[97, 48\].* octavo\.matrices\(.*tensor_parallel_degree = 1",
        "bias": "Adafactor .* Leave it to another optimizer",
        "LBFGS": r"LBFGS .*: Set tensor_parallel_degree = 1\.",
        "Lamb": r"Lamb .* octavo\.matrices",
        "norms": "^$",
        "SGD": "^$",
    }
    for said, changed in ranks.run(2, tensor_ranks.steps_of_whole_matrices, TENSOR, "neox"):
        assert changed == []
        assert {name: bool(re.search(text, said[name])) for name, text in words.items()} == dict.fromkeys(words, True), said


@pytest.mark.parametrize(
    ("shape", "degrees"),
    [("one-group", TENSOR), ("qwen3-moe-mixed", TENSOR), ("qwen3-moe-mixed", SPREAD["2 of 2"][1])],
    ids=["one-group", "slices", "whole experts"],
)
def test_an_optimizer_of_matrices_joins_the_parts(shape, degrees):
    wanted = tensor_ranks.stepped_by_matrices(None, shape)
    for found in ranks.run(2, tensor_ranks.stepped_by_matrices, degrees, shape):
        # Its five bf16 products widen what a sum in another order leaves.
        for name, value in wanted.items():
            assert (found[name] - value).norm() <= 0.02 * value.norm(), name


def test_norms_and_whole_tensors_of_parts_are_refused():
    words = dict.fromkeys(("total", "foreach", "weights", "clip", "known", "norm"), r"octavo\.clip_grad_norm_\(model")
    words |= dict.fromkeys(("whole", "gradient", "state"), r"octavo\.to_huggingface\(model\) has whole weights")
    for said, wrong in ranks.run(2, tensor_ranks.norms_and_whole_tensors, TENSOR):
        assert {name: bool(re.search(text, said[name])) for name, text in words.items()} == dict.fromkeys(words, True), said
        assert wrong == []


@pytest.mark.long(lambda world: world == 4)
@pytest.mark.parametrize("world", [2, 4])
def test_pytorch_loads_a_whole_state_dict(world):
    assert ranks.run(world, tensor_ranks.loaded_whole, TENSOR) == [[]] * world


@pytest.mark.long(lambda world, degrees, shape: world == 4 or (shape == "qwen2-tied") == (degrees == {}))
@pytest.mark.parametrize("shape", ["all-biases", "qwen2-tied"])
@pytest.mark.parametrize(("world", "degrees"), [(2, TENSOR), (2, {}), (4, TENSOR), (4, LAYOUTS["gathered"])], ids=str)
def test_states_without_a_head(world, degrees, shape):
    wanted = tensor_ranks.base_states(None, shape)
    samples = world // degrees.get("tensor_parallel_degree", 1) // degrees.get("context_parallel_degree", 1)
    for rank, found in enumerate(ranks.run(world, tensor_ranks.base_states, degrees, shape)):
        number = rank * samples // world
        for (states, last, gradients, loss, norm), theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(states, theirs[0].chunk(samples)[number], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(last, theirs[1], rtol=1e-4, atol=1e-4)
            assert gradients.keys() == theirs[2].keys()
            for name, gradient in theirs[2].items():
                assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
            assert (loss, norm) == pytest.approx(theirs[3:], rel=1e-5)


def test_states_that_pytorch_gives_are_whole_or_refused():
    words = dict.fromkeys(("get", "whole", "set"), r"octavo\.save\(path, model, optimizer\)")
    one = tensor_ranks.started("neox", None)
    numbers = one.num_parameters(), one.num_parameters(exclude_embeddings=True)
    for rank, (said, state, host, wanted, counts) in enumerate(ranks.run(4, tensor_ranks.torch_states, TENSOR)):
        assert {name: bool(re.search(text, said[name])) for name, text in words.items()} == dict.fromkeys(words, True), said
        for found in (state, host) if rank == 0 else (state,):
            assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []
            assert not any(type(value) is not torch.Tensor for value in found.values())
        assert rank == 0 or host == {}
        assert counts == numbers


def check_continuations(path, shape, of, others):
    """Checkpoints of some ranks, (world, degrees), continue on others with the same numbers."""
    wanted = ranks.run(of[0], tensor_ranks.saved, path, of[1], shape)[0]
    results = []
    for world, degrees in others:
        for wrong, (loss, norm, _), after in ranks.run(world, tensor_ranks.continued, path, degrees, wanted, shape):
            assert wrong == []
            results.append((loss, norm, after))
    for loss, norm, after in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        assert norm == pytest.approx(results[0][1], rel=1e-5)
        assert all((after[name] - value).norm() <= 1e-5 * value.norm() + 1e-9 for name, value in results[0][2].items())


ALONE = {"1": (1, None)}


@pytest.mark.long
@pytest.mark.parametrize("shape", ["all-biases", "qwen3-moe-mixed"])
@pytest.mark.parametrize("of", ALONE | SLICES)
def test_a_checkpoint_continues_at_any_degree(tmp_path, of, shape):
    layouts = ALONE | SLICES
    check_continuations(tmp_path / "checkpoint", shape, layouts[of], layouts.values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("of", "others"),
    [("1", ("2 of 2", "2 of 4")), ("2", ("4 over samples",)), ("2 of 2", ("1", "4")), ("2 of 4", ("2", "2, shard"))],
)
def test_a_checkpoint_continues_with_slices_or_whole_experts(tmp_path, of, others):
    layouts = ALONE | SLICES | SPREAD
    names = of, *others
    check_continuations(tmp_path / "checkpoint", "qwen3-moe-mixed", layouts[of], [layouts[name] for name in names])


@pytest.mark.long(lambda world, tensor, shape: (world, tensor, shape) not in ((2, 2, "one-group"), (2, 2, "qwen3-moe-mixed")))
@pytest.mark.parametrize("shape", ["one-group", "qwen3-moe-mixed"])
@pytest.mark.parametrize(("world", "tensor"), [(2, 2), (4, 4), (4, 2)])
def test_exported_weights_are_whole(tmp_path, world, tensor, shape):
    check_export(tmp_path / "model", world, {"tensor_parallel_degree": tensor}, shape)


@pytest.mark.long(lambda layout: layout != "2 of 2")
@pytest.mark.parametrize("layout", ["2 of 2", "2 of 4", "2, replicate"])
def test_exported_experts_are_whole(tmp_path, layout):
    check_export(tmp_path / "model", *SPREAD[layout], "qwen3-moe-mixed")


def check_export(path, world, degrees, shape):
    wanted = ranks.run(world, tensor_ranks.exported, path, degrees, shape)[0]
    found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
