"""Folders in FP8: values and bytes as they are stored, and a refusal by name for all that would silently be other values."""

import copy
import json
import re
import shutil
import warnings

import pytest
import torch
from expectations import refused
from fp8_folders import bases, config_of, quantise
from llamas import hugging_face, llama, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import octavo
import ranks
from building import built_model
from octavo.fp8.scaling import states_of
from octavo.models import weight_loader
from octavo.models.sources import load_config
from octavo.models.weight_files import WeightFiles

SIZES = {"hidden_size": 160, "intermediate_size": 144, "head_dim": 40}
ALIGNED = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}
LAYER = "model.layers.1.mlp.down_proj"


@pytest.fixture(autouse=True)
def each_warning_again():
    weight_loader._warn_once.cache_clear()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    llama(**SIZES, num_hidden_layers=2).save_pretrained(folder)
    return folder


def saved(folder, **changes):
    sizes = {key: value for key, value in (SIZES | changes).items() if value is not None}
    llama(**sizes).save_pretrained(folder)


def build(folder, dtype=torch.float32, **options):
    config = load_config(str(folder))
    return built_model(
        config, load_from=folder, **{"dtype": dtype, "params_dtype": dtype, "device": "cpu", "seed": 0} | options
    )


@pytest.mark.long(
    lambda kind, family: (kind, family) not in (("block", "qwen3_moe"), ("tensor", "phi3"), ("channel", "gpt_neox"))
)
@pytest.mark.parametrize("kind", ["block", "tensor", "channel"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_neox", "phi3", "qwen3_moe"])
def test_masters_are_bytes_times_scales_rounded_once(tmp_path, family, kind):
    sizes = {"head_dim": None} if family in ("gpt_neox", "phi3") else {}
    sizes |= {"num_experts": 4, "moe_intermediate_size": 136, "num_experts_per_tok": 2} if family == "qwen3_moe" else {}
    saved(tmp_path, model_type=family, **sizes)
    values = quantise(tmp_path, kind)
    model = build(tmp_path)
    found = hugging_face(dict(model.state_dict()), model.spec)
    experts = {name for name in values if "expert" in name}
    assert bool(experts) == (family in ("mixtral", "qwen3_moe"))
    for name, value in values.items():
        if name not in experts and not name.endswith("gate.weight") and name != "embed_out.weight":
            assert torch.equal(found[name], value.float()), name
    stacked = [name for name in found if "experts.down_proj" in name]
    for layer, name in enumerate(stacked):
        behind = f"model.layers.{layer}.{'block_sparse_moe' if family == 'mixtral' else 'mlp'}.experts."
        last = "w2" if family == "mixtral" else "down_proj"
        for expert in range(len(found[name])):
            assert torch.equal(found[name][expert], values[f"{behind}{expert}.{last}.weight"].float())
    dense = AutoModelForCausalLM.from_config(model.config).eval()
    theirs = {name: found[name] for name in dense.state_dict()}
    dense.load_state_dict({name: tensor.float() for name, tensor in theirs.items()})
    ids = tokens(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(input_ids=ids).logits, dense(input_ids=ids).logits, rtol=2e-4, atol=2e-4)


@pytest.mark.long(lambda kind: kind == "channel")
@pytest.mark.parametrize("kind", ["block", "tensor", "channel"])
def test_values_are_those_that_transformers_dequantises(tmp_path, kind):
    saved(tmp_path, **ALIGNED)  # of other blocks than whole ones transformers 5.24 takes 128 for another number
    quantise(tmp_path, kind)
    if kind != "block":
        pytest.importorskip("compressed_tensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = build(tmp_path, blocks="own")
    found = dict(theirs.named_modules())
    for name, module in ours.named_modules():
        if hasattr(module, "weight") and module.weight is not None and name != "lm_head":
            weight = found[name].weight
            if weight.dtype == torch.float8_e4m3fn:  # before the first forward
                weight = weight.float() * found[name].weight_scale.float()
            torch.testing.assert_close(module.weight, weight.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_16_bits_and_of_powers_of_two_are_exact(tmp_path, dtype):
    saved(tmp_path)
    values = quantise(tmp_path, "block", scale_dtype=dtype)
    model = build(tmp_path)
    found = hugging_face(dict(model.state_dict()), model.spec)
    for name, value in values.items():
        assert torch.equal(found[name], value.float()), name
    other = tmp_path / "e8m0"
    other.mkdir()
    saved(other)

    def in_powers(tensors):
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name] = torch.exp2(tensors[name].log2().round()).to(torch.float8_e8m0fnu)

    quantise(other, "block", in_powers, edit=lambda config: config.update(scale_fmt="ue8m0"))
    stored = load_file(other / "model.safetensors")
    model = build(other)
    scale = stored[f"{LAYER}.weight_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    wanted = stored[f"{LAYER}.weight"].float() * scale[:160, :144]
    assert torch.equal(hugging_face(dict(model.state_dict()), model.spec)[f"{LAYER}.weight"], wanted)


def test_each_row_is_read_alone_as_within_the_whole(tmp_path):
    saved(tmp_path)
    values = quantise(tmp_path, "block")
    files = WeightFiles(tmp_path)
    name = f"{LAYER}.weight"
    for start, stop in ((0, 160), (5, 7), (120, 140), (159, 160), (128, 160), (3, 3)):
        assert torch.equal(files.read(name, start, stop), values[name][start:stop].float())


# As stored --------------------------------------------------------------------------------------------------------------------


def adapters(folder, recipe, base="fp8", **options):
    with octavo.delayed_init():
        empty = AutoModelForCausalLM.from_config(load_config(str(folder)))
    lora = octavo.LoRA(4, base=base)
    how = {"dtype": torch.bfloat16, "params_dtype": torch.bfloat16, "load_from": folder, "device": "cpu"}
    return octavo.transform(empty, recipe, lora=lora, **how | options)


def same_scale(tensors):
    """One scale for query, key and value, and for gate and up, as vLLM's fused matrices need them."""
    for name in list(tensors):
        for first, *others in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            if name.endswith(f"{first}.weight_scale"):
                for other in others:
                    tensors[name.replace(first, other)] = tensors[name].clone()


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_bytes_of_one_scale_become_the_base_as_they_are(tmp_path, recipe, capsys):
    recipe = {"delayed": octavo.recipe.DelayedScaling(amax_history_len=4), "current": octavo.recipe.CurrentScaling()}[recipe]
    saved(tmp_path)
    quantise(tmp_path, "tensor", same_scale)
    stored = load_file(tmp_path / "model.safetensors")
    model = adapters(tmp_path, recipe)
    assert "second time" not in capsys.readouterr().err
    found = {name: state for name, state in states_of(model) if state.stored is not None}
    assert len(found) == 8
    names = {parameter: name for name, parameter in model.named_parameters()}
    values = {names[state.weight]: state.stored.values(state, torch.float32) for state in found.values()}
    for name, tensor in hugging_face(values, model.spec).items():
        scale = stored[f"{name}_scale"]
        assert torch.equal(tensor, stored[name].float() * scale), name
    ids = tokens(2, 16)
    for _ in range(2):
        with octavo.fp8_autocast(fp8_recipe=recipe):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    octavo.save(tmp_path / "saved", model)


def test_experts_are_cast_once_more_from_their_values_in_float32_and_said(tmp_path, capsys):
    saved(tmp_path, model_type="qwen3_moe", num_experts=4, moe_intermediate_size=144, num_experts_per_tok=2)
    values = quantise(tmp_path, "channel")
    model = adapters(tmp_path, octavo.recipe.CurrentScaling())
    said = capsys.readouterr().err
    assert re.search(r"8 of 8 matrices .* second time .* matrices of experts, which are one stack here \(4: ", said)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = hugging_face(
        {
            names[state.weight]: state.stored.values(state, torch.float32)
            for _, state in states_of(model)
            if state.stored is not None
        },
        model.spec,
    )
    stacks = [name for name in found if name.endswith("experts.down_proj")]
    assert len(stacks) == 2
    for name in stacks:
        for expert, matrix in enumerate(found[name]):
            exact = values[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"].float()
            scale = 448 / exact.abs().max()
            torch.testing.assert_close(
                matrix.view_as(exact), (exact * scale).to(torch.float8_e4m3fn).float() / scale, rtol=1e-6, atol=0
            )


def test_blocks_become_the_base_where_no_block_has_rows_of_two_matrices(tmp_path, capsys):
    saved(tmp_path, **ALIGNED)
    quantise(tmp_path, "block")
    stored, recipe = load_file(tmp_path / "model.safetensors"), octavo.recipe.BlockScaling()
    model = adapters(tmp_path, recipe)
    assert re.search(r"2 of 8 matrices .* second time .* blocks with rows of several matrices", capsys.readouterr().err)
    dense = {name: stored[name].float() for name in stored if name.endswith(("_proj.weight",))}
    for name in dense:
        scale = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        dense[name] *= scale[: dense[name].shape[0], : dense[name].shape[1]]
    for name, state in states_of(model):
        if state.stored is None:
            continue
        values = state.stored.values(state, torch.float32)
        layer, kind = f"model.layers.{name.split('.')[1]}", name.split(".", 2)[2]
        if kind == "self_attention.qkv":
            wanted = torch.cat([dense[f"{layer}.self_attn.{one}_proj.weight"] for one in "qkv"])
            assert torch.equal(values, wanted)  # one key-value head: all queries, then the key, then the value
        elif kind in ("self_attention.proj", "ffn.fc2"):
            source = {"self_attention.proj": "self_attn.o_proj", "ffn.fc2": "mlp.down_proj"}[kind]
            assert torch.equal(values, dense[f"{layer}.{source}.weight"])
        else:
            gates, ups = (dense[f"{layer}.mlp.{one}_proj.weight"].unflatten(0, (-1, 32)) for one in ("gate", "up"))
            wanted = torch.stack([gates, ups], 1).flatten(0, 2)
            error = (values - wanted).abs()
            assert error.max() > 0
            assert bool((error <= wanted.abs() * 2**-4 + wanted.abs().max() * 2**-17).all())  # one cast: half a step of E4M3
    ids = tokens(1, 128)
    with octavo.fp8_autocast(fp8_recipe=recipe):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    # The products of these bytes are those of their values, in backward too: scales need not be powers of two.
    state = dict(states_of(model))["layers.0.self_attention.proj"]
    operand = state.stored.operand(state, recipe, torch.bfloat16, rowwise=True, columnwise=True)
    from octavo.kernels import reference

    assert torch.equal(reference.dequantize(*operand.columnwise).t(), reference.dequantize(*operand.rowwise))


@pytest.mark.parametrize(
    ("kind", "recipe", "reason"),
    [
        ("block", octavo.recipe.CurrentScaling(), "8 of 8 .* more than one scale a matrix"),
        ("channel", octavo.recipe.DelayedScaling(), "8 of 8 .* more than one scale a matrix"),
        ("tensor", octavo.recipe.BlockScaling(), "8 of 8 .* other scales than one for each 128 by 128"),
        ("tensor", octavo.recipe.CurrentScaling(), "4 of 8 .* matrices of different scales"),
        ("tensor", octavo.recipe.CurrentScaling(use_power_2_scales=True), "8 of 8 .* no powers of two"),
    ],
)
def test_a_second_cast_is_said_with_its_reason_and_is_the_only_one(tmp_path, kind, recipe, reason, capsys):
    saved(tmp_path)
    values = quantise(tmp_path, kind)
    model = adapters(tmp_path, recipe)
    assert re.search(reason, capsys.readouterr().err)
    state = dict(states_of(model))["layers.1.ffn.fc2"]
    found, wanted = state.stored.values(state, torch.float32), values[f"{LAYER}.weight"].float()
    if "8 of 8" in reason:
        how = copy.deepcopy(state.stored)
        how.fill(state.module, state.weight_name, wanted, state.weight.detach())  # from float32: not by way of bfloat16
        assert torch.equal(found, how.values(state, torch.float32))
    else:
        assert torch.equal(found, wanted)


@pytest.mark.long(lambda kind, recipe: kind == "tensor" or recipe != "block")
@pytest.mark.parametrize(
    ("kind", "recipe"), [("block", "block"), ("block", "delayed"), ("tensor", "delayed"), ("tensor", "block")]
)
def test_ranks_have_the_base_of_one_rank_in_parts(plain, tmp_path, kind, recipe):
    if kind == "block":
        saved(tmp_path, **ALIGNED)
    else:
        shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    quantise(tmp_path, kind, same_scale)
    (wanted,) = ranks.run(1, bases, tmp_path, recipe, None)
    assert len(wanted) == 8
    for found in ranks.run(2, bases, tmp_path, recipe, {}):
        assert found.keys() == wanted.keys()
        for name, parts in wanted.items():
            assert all(torch.equal(a, b) for a, b in zip(found[name], parts, strict=True)), name


@pytest.mark.long
def test_tensor_ranks_cast_their_parts_once_more(tmp_path, capfd):
    llama(**SIZES | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}).save_pretrained(tmp_path)
    values = quantise(tmp_path, "tensor", same_scale)
    found = ranks.run(2, bases, tmp_path, "current", {"tensor_parallel_degree": 2})
    assert "8 of 8 matrices" in (said := capfd.readouterr().err)
    assert "parts of a matrix on several ranks" in said
    wanted = values["model.layers.0.mlp.down_proj.weight"].float()  # columns, one half on each rank
    whole = torch.cat(
        [data.view(torch.float8_e4m3fn).float() * scale for data, scale in (one["layers.0.ffn.fc2"] for one in found)], 1
    )
    assert whole.shape == wanted.shape
    assert bool(((whole - wanted).abs() <= wanted.abs() * 2**-4 + wanted.abs().max() * 2**-17).all())


def test_scales_that_training_does_not_read_are_said(tmp_path, capsys):
    saved(tmp_path)

    def cache(tensors):
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)

    quantise(tmp_path, "tensor", cache, edit=lambda config: config.update(kv_cache_scheme={"num_bits": 8, "type": "float"}))
    build(tmp_path)
    assert re.search(r"k_scale.* for inference, not loaded", capsys.readouterr().err)


# Refused ----------------------------------------------------------------------------------------------------------------------


def config(**changes):
    return lambda values: values.update(changes)


def weights(**changes):
    return lambda values: values["config_groups"]["group_0"]["weights"].update(changes)


def tensor(name, value):
    def change(tensors):
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value(tensors[name]) if callable(value) else value

    return change


def at(value, *place):
    def change(scale):
        scale = scale.clone()
        scale[place or ...] = value
        return scale

    return change


BLOCK_SCALE, TENSOR_SCALE, DATA = f"{LAYER}.weight_scale_inv", f"{LAYER}.weight_scale", f"{LAYER}.weight"
FOLDERS = {
    # name: (kind, change of tensors, change of the config, words of the message)
    "missing scale": ("block", tensor(BLOCK_SCALE, None), None, (DATA, "no scale")),
    "missing tensor scale": ("tensor", tensor(TENSOR_SCALE, None), None, (DATA, "no scale")),
    "two scales": ("block", tensor(TENSOR_SCALE, torch.ones(1)), None, (DATA, "two scales")),
    "scale of a bf16 weight": ("block", tensor(DATA, lambda w: w.to(torch.bfloat16)), None, (BLOCK_SCALE, "not FP8")),
    "scale of no weight": ("block", tensor("model.layers.0.mlp.extra.weight_scale_inv", torch.ones(1)), None, ("extra",)),
    "transposed scales": ("block", tensor(BLOCK_SCALE, torch.ones(1, 2)), None, (BLOCK_SCALE, "[1, 2]", "[2, 2]")),
    "scale a tensor where blocks are said": ("block", tensor(BLOCK_SCALE, torch.ones(1)), None, (BLOCK_SCALE, "blocks of 128")),
    "scale a row where one is said": ("tensor", tensor(TENSOR_SCALE, torch.ones(160, 1)), None, (TENSOR_SCALE, "one a tensor")),
    "scale a column": ("channel", tensor(TENSOR_SCALE, torch.ones(1, 144)), None, (TENSOR_SCALE, "[160, 1]")),
    "blocks of another size": ("block", None, config(weight_block_size=[64, 64]), ("blocks of 64 by 64",)),
    "block size of one number": ("block", None, config(weight_block_size=[128]), ("weight_block_size", "[128]")),
    "no block size for blocks": ("block", None, config(weight_block_size=None), ("one a tensor",)),
    "NaN scale": ("block", tensor(BLOCK_SCALE, at(torch.nan, 1, 0)), None, (BLOCK_SCALE, "nan")),
    "zero scale": ("channel", tensor(TENSOR_SCALE, at(0.0, 7)), None, (TENSOR_SCALE, "the scale 0", "1 of 160")),
    "negative scale": ("tensor", tensor(TENSOR_SCALE, lambda s: -s), None, (TENSOR_SCALE, "-0.0")),
    "infinite scale": ("tensor", tensor(TENSOR_SCALE, at(torch.inf)), None, (TENSOR_SCALE, "inf")),
    "reciprocal of a tensor's scale": ("tensor", tensor(TENSOR_SCALE, lambda s: 1 / s), None, (TENSOR_SCALE, "reciprocal")),
    "reciprocals of blocks": ("block", tensor(BLOCK_SCALE, lambda s: 1 / s), None, (BLOCK_SCALE, "1 / scale")),
    "bytes without their dtype": ("block", tensor(DATA, lambda w: w.view(torch.uint8)), None, (BLOCK_SCALE, "U8, not FP8")),
    "all experts in one": (
        "block", lambda tensors: tensors.update({DATA: tensors[DATA][None].clone()}), None, (DATA, "[1, 160, 144]"),
    ),
    "scale of an activation without a weight": (
        "tensor", tensor("model.layers.0.input_layernorm.input_scale", torch.ones(1)), None, ("input_scale", "quantised"),
    ),
    "integer scale": ("tensor", tensor(TENSOR_SCALE, torch.ones(1, dtype=torch.int32)), None, (TENSOR_SCALE, "I32")),
    "NaN bytes": (
        "block", tensor(DATA, lambda w: w.view(torch.uint8).index_fill(0, torch.tensor(3), 0x7F).view(w.dtype)), None,
        (DATA, "NaN"),
    ),
    "E5M2": ("block", tensor(DATA, lambda w: w.float().to(torch.float8_e5m2)), None, (DATA, "F8_E5M2")),
    "E4M3 FNUZ": ("block", tensor(DATA, lambda w: w.float().to(torch.float8_e4m3fnuz)), None, (DATA, "FNUZ")),
    "fmt e5m2": ("block", None, config(fmt="e5m2"), ("fmt = 'e5m2'",)),
    "experts in FP4": ("block", None, config(expert_dtype="fp4"), ("expert_dtype = 'fp4'",)),
    "a key that nobody knows": ("block", None, config(rotation="hadamard"), ("rotation", "hadamard")),
    "a weight in FP8 that is left out": ("block", None, config(modules_to_not_convert=[LAYER]), (DATA, "leaves it out")),
    "ignored and in FP8": ("channel", None, config(ignore=["re:.*down_proj"]), ("down_proj", "leaves it out")),
    "rotated weights": (
        "channel", None, config(transform_config={"config_groups": {"u": {"type": "hadamard"}}}),
        ("transform_config", "rotated"),
    ),
    "sparse": ("channel", None, config(sparsity_config={"format": "sparse-24-bitmask"}), ("sparse-24-bitmask",)),
    "fake-quantised": ("channel", None, config(quantization_status="frozen"), ("quantization_status", "frozen")),
    "int8": ("channel", None, weights(type="int"), ("int 8 bits",)),
    "int-quantized": ("channel", None, config(format="int-quantized"), ("int-quantized",)),
    "NVFP4": ("channel", None, config(format="nvfp4-pack-quantized"), ("nvfp4-pack-quantized",)),
    "groups of columns": ("channel", None, weights(strategy="group", group_size=128), ("strategy 'group'",)),
    "with zero points": ("channel", None, weights(symmetric=False), ("group_0.weights.symmetric = false",)),
    "scales of each call": ("channel", None, weights(dynamic=True), ("group_0.weights.dynamic = true",)),
    "a zero point's tensor": (
        "channel", tensor(f"{LAYER}.weight_zero_point", torch.zeros(160, 1)), None,
        (f"{LAYER}.weight_zero_point", "zero point"),
    ),
    "blocks said to be channels": ("channel", None, weights(strategy="block", block_structure=[128, 128]), ("blocks of 128",)),
    "outputs too": (
        "channel", None, lambda v: v["config_groups"]["group_0"].update(output_activations={"num_bits": 8}),
        ("output_activations",),
    ),
    "targets elsewhere": (
        "channel", None, lambda v: v["config_groups"]["group_0"].update(targets=["re:.*self_attn.*"]), ("among its targets",),
    ),
    "a scheme by a name alone": ("channel", None, config(config_groups={"W4A16": ["Linear"]}), ("W4A16",)),
    "embedding in FP8 without a scale": (
        "block", tensor("model.embed_tokens.weight", lambda w: w.to(torch.float8_e4m3fn)), None, ("embed_tokens", "no scale"),
    ),
    "files of another model": (
        "block",
        lambda tensors: [
            tensors.pop(name) if name.endswith("scale_inv") else tensors.update({name: tensors[name].to(torch.bfloat16)})
            for name in list(tensors)
        ],
        None, ("no weight is in FP8",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_what_would_silently_be_other_values_is_refused(plain, tmp_path, case):
    kind, change, edit, words = FOLDERS[case]
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    quantise(tmp_path, kind, change, edit=edit)
    refused(words, build, tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, ("'gptq'", "bits 4")),
        ({"quant_method": "awq", "w_bit": 4}, ("'awq'", "w_bit 4")),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, ("'bitsandbytes'", "nf4", "dequantize()")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("'modelopt'", "NVFP4")),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, ("'modelopt'", "FP8")),
        ({"quant_method": "fbgemm_fp8"}, ("fbgemm_fp8",)),
        ({"quant_method": "mxfp4"}, ("mxfp4",)),
        ({"bits": 8}, ("None", "bits 8")),
    ],
)
def test_other_schemes_are_refused_by_name(plain, tmp_path, values, words):
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    plain = json.loads(path.read_text())
    path.write_text(json.dumps(plain | {"quantization_config": values}))
    refused((*words, "quantised", "bf16"), build, tmp_path)
    path.write_text(json.dumps(plain | {"text_config": {"quantization_config": values}}))
    refused("text_config.quantization_config", WeightFiles, tmp_path)


def test_two_configs_that_differ_and_modelopts_file_are_refused(tmp_path):
    saved(tmp_path)
    quantise(tmp_path, "channel")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"compression_config": config_of("tensor")}))
    refused("which differ", build, tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}})
    )
    refused(("hf_quant_config.json", "modelopt FP8"), build, tmp_path)


def test_a_second_shard_of_another_save_lacks_the_scales(tmp_path):
    saved(tmp_path)
    quantise(tmp_path, "block")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    parts = [{n: t for n, t in tensors.items() if n.endswith("scale_inv") == is_scale} for is_scale in (False, True)]
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for part, file in zip(parts, files, strict=True):
        save_file(part, tmp_path / file, metadata={"format": "pt"})
    index = {name: file for part, file in zip(parts, files, strict=True) for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    build(tmp_path)
    index = {name: file for name, file in index.items() if file == files[0]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    refused(".weight is in FP8 and has no scale", build, tmp_path)
