"""Adapters over ranks, beside frozen weights in high precision and in FP8, train as on one rank."""

import functools

import pytest
import torch
from lora_ranks import gathered, trained
from safetensors.torch import load_file
from tensor_ranks import ALIGNED, MIXTURE

import octavo
import ranks
from octavo.models.peft_folder import from_folder

FP8, WIDE = octavo.LoRA(4, base="fp8"), octavo.LoRA(4)
BOTH = {"stored": {"lora": FP8}, "cast": {"lora": WIDE}}
EXACT = {"dtype": torch.float64, "params_dtype": torch.float64}
"""Sums do not depend on their order, so that layouts compare to rounding of float64 alone."""
RECOMPUTE = {"stored-recomputed": BOTH["stored"] | {"recompute": True}}


def run(world, degrees, cases, shape=ALIGNED, **options):
    """What the first rank found; all found the same whole tensors."""
    found = ranks.run(world, trained, shape, degrees, cases, **EXACT | options)
    for other in found[1:]:
        for name in cases:
            assert_same(found[0][name], other[name], ("gradients", "parameters"))
            assert other[name]["losses"] == found[0][name]["losses"]
            assert other[name]["base"] == found[0][name]["base"]
    return found[0]


@functools.cache
def of_one_rank(recipe, case="stored"):
    return run(1, None, {case: BOTH[case]}, recipe=recipe)[case]


def assert_same(found, wanted, keys=("losses", "norms", "gradients", "parameters", "base", "evaluation")):
    """Equal to the bit."""
    for key in keys:
        if isinstance(wanted[key], dict):
            assert found[key].keys() == wanted[key].keys()
            assert all(torch.equal(found[key][name], wanted[key][name]) for name in wanted[key]), key
        else:
            assert found[key] == wanted[key], key


def assert_near(found, wanted, limit=1e-9):
    """Each gradient and each adapter, relative to its largest value."""
    assert found["base"] == wanted["base"]
    assert found["norms"] == pytest.approx(wanted["norms"], rel=limit)
    for key in ("losses", "evaluation"):  # in float32
        assert found[key] == pytest.approx(wanted[key], rel=1e-6)
    for key in ("gradients", "parameters"):
        assert found[key].keys() == wanted[key].keys()
        for name, value in wanted[key].items():
            assert value.abs().max() > 0, name
            torch.testing.assert_close(found[key][name], value, rtol=0, atol=limit * value.abs().max().item(), msg=name)


SHARDED = {
    "shard": (2, {}),
    "replicate": (2, {"hybrid_shard_degree": 1}),
    "hybrid": (4, {"hybrid_shard_degree": 2}),
    "shard of 4": (4, {}),
    "context": (2, {"context_parallel_degree": 2}),
    "ring": (4, {"context_parallel_degree": 2, "cp_comm_type": "p2p"}),
    "heads": (4, {"context_parallel_degree": 4, "cp_comm_type": "a2a"}),
}


@pytest.mark.long(lambda layout, recipe: (layout, recipe) != ("context", "block"))
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("layout", SHARDED)
def test_a_base_in_fp8_is_sharded_as_bytes_and_computes_as_one_that_is_cast(layout, recipe):
    world, degrees = SHARDED[layout]
    found = run(world, degrees, BOTH | RECOMPUTE, recipe=recipe)
    assert_same(found["stored"], found["cast"])
    assert_same(found["stored-recomputed"], found["stored"])
    wanted = of_one_rank(recipe)
    if recipe == "block":
        assert_near(found["stored"], wanted)
    else:  # a rank's samples have scales of their own at first
        assert found["stored"]["losses"] == pytest.approx(wanted["losses"], rel=2e-2)
        assert found["stored"]["base"] == wanted["base"]
    assert found["stored"]["stored"] == 8
    assert found["stored"]["bytes"] < 1.1 * found["stored"]["elements"] < found["cast"]["bytes"]


def test_a_forward_gathers_a_byte_a_frozen_parameter():
    options = {"dtype": torch.bfloat16, "params_dtype": torch.bfloat16}
    for sent, stored in ranks.run(2, gathered, ALIGNED, {"reshard_after_forward": True}, "delayed", **options):
        assert sent == stored


@pytest.mark.long
def test_checkpoints_of_adapters_continue_on_other_ranks(tmp_path):
    where = functools.partial(run, cases={"stored": BOTH["stored"]}, recipe="block")
    where(2, {}, save=tmp_path / "two")
    wanted = where(1, None, load=tmp_path / "two")["stored"]
    for world, degrees in ((2, {}), (4, {"hybrid_shard_degree": 2})):
        assert_near(where(world, degrees, load=tmp_path / "two")["stored"], wanted)


TENSOR = {"tensor_parallel_degree": 2}
SHAPES = {
    "llama": ALIGNED,
    "fewer-keys": ALIGNED | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "shared-keys": ALIGNED | {"num_key_value_heads": 1},
    "phi3": ALIGNED | {"model_type": "phi3", "num_key_value_heads": 1},
    "neox": ALIGNED | {"model_type": "gpt_neox"},
    "qwen3": ALIGNED | {"model_type": "qwen3"},
    "mixtral": MIXTURE,
}


def check_tensor(world, degrees, shape, cases, **options):
    found = run(world, degrees, cases, shape, **options)
    wanted = run(1, None, cases, shape, **options)
    for name in cases:
        assert_near(found[name], wanted[name])


@pytest.mark.long(lambda shape: shape != "shared-keys")
@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_ranks_train_the_adapters_of_one_rank(shape):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if shape == "mixtral" else "all-linear"
    cases = {
        "all": {"lora": octavo.LoRA(4, targets=targets), "offload": True},
        "dropped": {"lora": octavo.LoRA(4, dropout=0.3, targets=targets), "recompute": True},
    }
    if "model_type" not in SHAPES[shape]:
        cases["some"] = {"lora": octavo.LoRA(3, targets=["v_proj", "up_proj", "o_proj"])}
    check_tensor(2, TENSOR, SHAPES[shape], cases)


TENSOR_LAYOUTS = {
    "2": (2, TENSOR),
    "4": (4, {"tensor_parallel_degree": 4}),
    "shard": (4, TENSOR | {"hybrid_shard_degree": 2}),
    "replicate": (4, TENSOR | {"hybrid_shard_degree": 1}),
    "context": (4, TENSOR | {"context_parallel_degree": 2}),
}


@pytest.mark.long(lambda layout, recipe: (layout, recipe) != ("2", "delayed"))
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("layout", TENSOR_LAYOUTS)
def test_tensor_ranks_store_their_parts_of_a_base_in_fp8(layout, recipe):
    world, degrees = TENSOR_LAYOUTS[layout]
    found = run(world, degrees, BOTH | RECOMPUTE, recipe=recipe)
    assert_same(found["stored"], found["cast"])
    assert_same(found["stored-recomputed"], found["stored"])
    wanted = of_one_rank(recipe)
    assert found["stored"]["base"] == wanted["base"]
    if layout in ("2", "4") and recipe != "block":  # which see the same samples, and cast whole tensors
        assert_near(found["stored"], wanted)
    else:
        assert found["stored"]["losses"] == pytest.approx(wanted["losses"], rel=2e-2)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["4", "shard", "replicate", "context"])
def test_tensor_ranks_beside_other_degrees_train_the_adapters_of_one_rank(layout):
    cases = {"all": {"lora": WIDE}, "whole": {"lora": octavo.LoRA(4, save_whole=["norm", "lm_head", "embed_tokens"])}}
    check_tensor(*TENSOR_LAYOUTS[layout], SHAPES["fewer-keys"], cases, micro_batches=1)


@pytest.mark.long
def test_checkpoints_and_folders_of_tensor_ranks_continue_at_other_degrees(tmp_path):
    shape = SHAPES["shared-keys"]
    where = functools.partial(run, cases={"all": {"lora": WIDE}}, shape=shape)
    where(2, TENSOR, save=tmp_path / "two", export=tmp_path / "peft")
    wanted = where(1, None, load=tmp_path / "two", export=tmp_path / "one")["all"]
    for world, degrees in ((4, TENSOR), (4, {"tensor_parallel_degree": 4}), (2, {})):
        assert_near(where(world, degrees, load=tmp_path / "two")["all"], wanted)
    # A folder holds the same, whoever writes and reads it.
    lora = from_folder(tmp_path / "peft")
    loaded = functools.partial(run, cases={"loaded": {"lora": lora, "random": False}}, shape=shape, steps=0)
    found = [loaded(world, degrees)["loaded"]["parameters"] for world, degrees in ((1, None), (2, TENSOR), (4, {}))]
    stored = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert {name for name in stored if "k_proj" in name and "lora_B" in name}
    for each in found:
        assert each.keys() == found[0].keys()
        assert all(torch.equal(each[name], found[0][name]) for name in each)


OF_EXPERTS = BOTH | {"recomputed": {"lora": FP8, "recompute": True}}
EXPERTS = {
    "1": (1, None),
    "shard": (2, {}),
    "spread": (2, {"expert_parallel_degree": 2}),
    "spread and shard": (4, {"expert_parallel_degree": 2}),
    "spread, replicate": (4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}),
    "slices": (2, TENSOR),
    "slices, shard": (4, TENSOR),
    "tensor, spread": (2, TENSOR | {"expert_parallel_degree": 2}),
}


@pytest.mark.long(lambda layout, recipe: (layout, recipe) != ("spread", "block"))
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("layout", EXPERTS)
def test_experts_in_fp8_compute_as_ones_that_are_cast(layout, recipe):
    world, degrees = EXPERTS[layout]
    found = run(world, degrees, OF_EXPERTS, SHAPES["mixtral"], recipe=recipe)
    if recipe == "delayed":  # whose first cast is by the largest amax of all experts
        assert found["stored"]["losses"] == pytest.approx(found["cast"]["losses"], rel=2e-2)
        assert found["stored"]["base"] == found["cast"]["base"]
    else:
        assert_same(found["stored"], found["cast"])
    assert_same(found["recomputed"], found["stored"])
    assert found["stored"]["stored"] == 8
    assert found["stored"]["bytes"] < 1.2 * found["stored"]["elements"] < found["cast"]["bytes"]


ADAPTED_EXPERTS = {
    "all": {"lora": octavo.LoRA(4), "offload": True},
    "experts": {"lora": octavo.LoRA(3, targets=["experts.gate_up_proj", "experts.down_proj"]), "recompute": True},
}


@pytest.mark.long
@pytest.mark.parametrize("layout", [name for name in EXPERTS if name != "1"] + ["context"])
def test_adapters_of_experts_and_routers_are_those_of_one_rank(layout):
    world, degrees = {**EXPERTS, "context": SHARDED["context"]}[layout]
    found = run(world, degrees, ADAPTED_EXPERTS, SHAPES["mixtral"])
    wanted = run(1, None, ADAPTED_EXPERTS, SHAPES["mixtral"])
    for name in ADAPTED_EXPERTS:
        assert_near(found[name], wanted[name])
