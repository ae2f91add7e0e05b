"""`octavo export --fp8`: a folder that transformers loads with compressed-tensors computes what the run's evaluation does."""

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import octavo
import ranks
from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.fp8.recipe import Operand
from octavo.fp8.scaling import states_of
from octavo.kernels import reference
from octavo.models import weight_files
from octavo.models.convert import conversion
from octavo.models.sources import load_config

compressed_tensors = pytest.importorskip("compressed_tensors", reason="needs compressed-tensors, of the dev extra")
E4M3 = torch.float8_e4m3fn
RECIPES = {
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=4),
    "current": octavo.recipe.CurrentScaling(),
    "rowwise": octavo.recipe.RowwiseScaling(),
    "block": octavo.recipe.BlockScaling(),
}
EXACT = [
    "model.dtype=float32",
    "model.config.attention_dropout=0.0",
    "optimizer.schedule=constant",
    "train.micro_batch=4",
    "optimizer.lr=3e-4",
]
WHOLE_BLOCKS = [f"model.config.{key}" for key in ("hidden_size=128", "intermediate_size=256", "num_attention_heads=1")]
IDS = torch.randint(3, 300, (2, 32), generator=torch.Generator().manual_seed(7))


def lines_of(recipe):
    length = [] if recipe == "delayed" else ["fp8.amax_history_len=1024"]
    return [f"fp8.recipe={recipe}", *length, *EXACT, *(WHOLE_BLOCKS if recipe == "block" else [])]


def served(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder).eval()


def evaluated(run, recipe, step=4):
    """Logits of the run's checkpoint as its evaluation computes them: in FP8, with the scales of the checkpoint."""
    config = AutoConfig.from_pretrained(run.output / "model")
    with octavo.delayed_init():
        empty = AutoModelForCausalLM.from_config(config)
    model = octavo.transform(empty, RECIPES[recipe], dtype=torch.float32, params_dtype=torch.float32, device="cpu")
    octavo.load(run.output / "checkpoints" / f"step-{step}", model)
    with torch.no_grad(), octavo.fp8_autocast(fp8_recipe=RECIPES[recipe]):
        return model.eval()(input_ids=IDS).logits, model


def train(file, overrides):
    from rich.console import Console

    from octavo.train.trainer import Trainer

    Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_run_in):
    found = {}

    def make(recipe):
        if recipe not in found:
            found[recipe] = run = tiny_run_in(tmp_path_factory.mktemp(recipe) / "tiny", steps=4)
            assert main(["train", str(run.file), *lines_of(recipe)]) == 0
        return found[recipe]

    return make


def relative(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


CASTS = 2 * 4
"""Casts of activations between a token and its logits: layers by inputs of qkv, proj, fc1 and fc2."""
SAME_CASTS = 2**-7
"""Both cast the same values with the same scales, and differ by roundings of float32, about 2^-22. Of 16,384 values one may lie
that near to a border between two FP8 values. Its cast is then off by a step, 2^-3 of the value, which is 2^-3 / 2048^0.5
= 0.003 of a layer's output; the bound has room for two such."""
OTHER_SCALES = (2 * CASTS / 3) ** 0.5 * 2**-4
"""Both cast the same values with scales of other granularity. A cast is off by at most half a step, 2^-4 of a value, and by
2^-4 / sqrt(3) in the mean square; the errors of all casts of both add up as squares."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_transformers_computes_the_logits_of_the_runs_evaluation(recipe, runs, tmp_path, capsys):
    run, folder = runs(recipe), tmp_path / "served"
    assert main(["export", str(run.output), "--to", str(folder), "--fp8"]) == 0
    assert f"vllm serve {folder}" in capsys.readouterr().out
    theirs = served(folder)
    with torch.no_grad():
        found = theirs(input_ids=IDS).logits
    wanted, model = evaluated(run, recipe)
    assert relative(found, wanted) < (SAME_CASTS if recipe in ("delayed", "rowwise") else OTHER_SCALES)
    with torch.no_grad():  # FP8 is in these logits: in high precision they are others
        assert relative(model(input_ids=IDS).logits, wanted) > 2**-7
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert group["input_activations"]["dynamic"] == (recipe != "delayed")
    names = {parameter: name for name, parameter in model.named_parameters()}
    way = conversion(model.spec)
    for name, state in states_of(model):
        if name == "head":
            continue
        parts = way.split(names[state.weight], state.weight.detach())
        for theirs, part in parts.items():
            data, scale, layer = tensors[theirs], tensors[f"{theirs}_scale"], theirs.removesuffix("weight")
            assert (data.dtype, scale.dtype) == (E4M3, torch.float32)
            rows, columns = part.shape
            assert tuple(scale.shape) == {"rowwise": (rows, 1), "block": (rows // 128, columns // 128)}.get(recipe, (1,))
            if recipe == "block":
                error = reference.dequantize(data, scale) - part
                assert bool((error.abs() <= part.abs() * 2**-4 + scale.max() * 2**-10).all())
            elif recipe == "rowwise":
                assert torch.equal(data.view(torch.uint8), reference.cast_rows(part, E4M3, 448.0)[0].view(torch.uint8))
            else:  # one scale for matrices that are joined: vLLM joins them too
                joint = reference.scale_from_amax(reference.amax(state.weight.detach()), 448.0)
                if recipe == "delayed":
                    joint = state.slots[Operand.WEIGHT].scale
                    inverse = reference.divide(1.0, state.slots[Operand.INPUT].scale)
                    assert torch.equal(tensors[f"{layer}input_scale"], inverse.reshape(1))
                assert torch.equal(scale, reference.divide(1.0, joint).reshape(1))
                assert torch.equal(data.view(torch.uint8), reference.cast(part, joint, E4M3, 448.0).view(torch.uint8))
    assert set(config["quantization_config"]) >= {"config_groups", "format", "quant_method", "quantization_status"}
    compressed_tensors.quantization.QuantizationConfig.model_validate(config["quantization_config"])


SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
OTHERS = {
    "gpt_neox": {},
    "phi3": {"num_key_value_heads": 1, "pad_token_id": 0},
    "qwen2": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 16},
    "mistral": {"num_key_value_heads": 1},
}


@pytest.mark.long(lambda family: family != "gpt_neox")
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_too(family, tiny_run, tmp_path):
    AutoConfig.for_model(family, **SIZES | OTHERS[family]).save_pretrained(tmp_path / "config")
    run, folder = tiny_run(steps=2), tmp_path / "served"
    table = run.file.read_text()
    run.file.write_text(table[: table.index("[model.config]")] + table[table.index("[data]") :])
    lines = [line for line in lines_of("delayed") if "dropout" not in line]
    assert main(["train", str(run.file), f"model.source={tmp_path / 'config'}", *lines]) == 0
    assert main(["export", str(run.output), "--to", str(folder), "--fp8"]) == 0
    with torch.no_grad():
        found = served(folder)(input_ids=IDS).logits
    assert relative(found, evaluated(run, "delayed", 2)[0]) < SAME_CASTS
    matrices = [name for name, tensor in load_file(folder / "model.safetensors").items() if tensor.dtype == E4M3]
    assert len(matrices) == 2 * {"gpt_neox": 4, "phi3": 4}.get(family, 7)


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_model_in_a_loop_is_written_as_a_run(recipe, runs, tmp_path):
    run = runs(recipe)
    _, model = evaluated(run, recipe)
    octavo.export(model, tmp_path / "loop", fp8=True)
    octavo.export(run.output, tmp_path / "run", fp8=True)
    ours, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("loop", "run"))
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name].view(torch.uint8), wanted[name].view(torch.uint8)) for name in wanted)
    ours, wanted = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("loop", "run"))
    assert ours == wanted
    with pytest.raises(InputError, match="no product of the model ran in FP8"):
        octavo.export(octavo.transform(AutoModelForCausalLM.from_config(model.config)), tmp_path / "new", fp8=True)
    adapted = octavo.transform(AutoModelForCausalLM.from_config(model.config), lora=octavo.LoRA(4))
    with pytest.raises(InputError, match="has adapters"):
        octavo.export(adapted, tmp_path / "new", fp8=True)
    assert not (tmp_path / "new").exists()


MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16, "mlp_only_layers": [1],
    },
}  # fmt: skip


@pytest.mark.long(lambda family, recipe: (family, recipe) != ("mixtral", "delayed"))
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_written_one_by_one_as_transformers_reads_them(family, recipe, tiny_run, tmp_path):
    sizes = SIZES | {"num_key_value_heads": 1} | MIXTURES[family]
    AutoConfig.for_model(family, **sizes).save_pretrained(tmp_path / "config")
    run, folder, plain = tiny_run(steps=4), tmp_path / "served", tmp_path / "plain"
    table = run.file.read_text()
    run.file.write_text(table[: table.index("[model.config]")] + table[table.index("[data]") :])
    lines = [line for line in lines_of(recipe) if "dropout" not in line]
    assert main(["train", str(run.file), f"model.source={tmp_path / 'config'}", *lines]) == 0
    for to, more in ((folder, ["--fp8"]), (plain, [])):
        assert main(["export", str(run.output), "--to", str(to), *more]) == 0
    theirs, wanted = served(folder), evaluated(run, recipe)[0]
    with torch.no_grad():
        found, high = theirs(input_ids=IDS).logits, served(plain)(input_ids=IDS).logits
    # A token at the edge between two experts may visit the other one; no few of the others do.
    errors = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert errors.quantile(0.75).item() < OTHER_SCALES
    assert relative(high, wanted) > 2**-7
    tensors, exact = (load_file(one / "model.safetensors") for one in (folder, plain))
    matrices = [name for name, tensor in tensors.items() if tensor.dtype == E4M3]
    experts = [name for name in matrices if ".experts." in name]
    assert len(experts) == {"mixtral": 2, "qwen3_moe": 1}[family] * 4 * 3
    assert len(matrices) == 8 + len(experts) + (3 if family == "qwen3_moe" else 0)
    loaded = dict(theirs.named_parameters())
    for name in matrices:
        scale = tensors[f"{name}_scale"]
        error = (tensors[name].float() * scale - exact[name]).abs()
        assert bool((error <= exact[name].abs() * 2**-4 + scale.max() * 2**-10).all()), name
    first = "model.layers.0.block_sparse_moe.experts.1.w" if family == "mixtral" else "model.layers.0.mlp.experts.1."
    gate, up, down = ("1", "3", "2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    if recipe != "rowwise":  # one scale for matrices that are joined
        assert torch.equal(tensors[f"{first}{gate}.weight_scale"], tensors[f"{first}{up}.weight_scale"])
    values = [tensors[f"{first}{one}.weight"].float() * tensors[f"{first}{one}.weight_scale"] for one in (gate, up, down)]
    assert torch.equal(loaded["model.layers.0.mlp.experts.gate_up_proj"][1], torch.cat(values[:2]))
    assert torch.equal(loaded["model.layers.0.mlp.experts.down_proj"][1], values[2])
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert {"lm_head", "model.layers.0.mlp.gate"} <= set(config["ignore"])
    schemes = {tuple(group["targets"][:1]): group["input_activations"] for group in config["config_groups"].values()}
    assert schemes["Linear",]["dynamic"]  # that of experts
    assert schemes["Linear",]["strategy"] == ("token" if recipe == "rowwise" else "tensor")
    compressed_tensors.quantization.QuantizationConfig.model_validate(config)


def test_a_folder_that_was_written_is_a_base_to_the_byte(runs, tmp_path, capsys):
    folder = tmp_path / "served"
    assert main(["export", str(runs("delayed").output), "--to", str(folder), "--fp8"]) == 0
    stored = load_file(folder / "model.safetensors")
    with octavo.delayed_init():
        empty = AutoModelForCausalLM.from_config(load_config(str(folder)))
    how = {"dtype": torch.bfloat16, "params_dtype": torch.bfloat16, "device": "cpu", "load_from": folder}
    model = octavo.transform(empty, RECIPES["delayed"], lora=octavo.LoRA(4, base="fp8"), **how)
    assert "second time" not in capsys.readouterr().err
    names, way = {parameter: name for name, parameter in model.named_parameters()}, conversion(model.spec)
    states = [state for _, state in states_of(model) if state.stored is not None]
    assert len(states) == 8
    for state in states:
        for theirs, part in way.split(names[state.weight], state.stored.values(state, torch.float32)).items():
            assert torch.equal(part, stored[theirs].float() * stored[f"{theirs}_scale"])


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_merged_adapters_are_cast_once(recipe, tiny_run, tmp_path):
    run = tiny_run(steps=3)
    run.file.write_text(run.file.read_text() + "\n[lora]\nrank = 4\n")
    lines = [line for line in lines_of(recipe) if not line.startswith("model.dtype")] + ["fp8.layers={'layers.0.*'='bf16'}"]
    assert main(["train", str(run.file), *lines, "optimizer.lr=0.1"]) == 0
    for name, more in {"base": [], "peft": [], "merged": ["--merge"], "served": ["--merge", "--fp8"]}.items():
        if name != "base":
            assert main(["export", str(run.output), "--to", str(tmp_path / name), *more]) == 0
    factors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    tensors, rounded = (load_file(tmp_path / name / "model.safetensors") for name in ("served", "merged"))
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    assert config["dtype"] == "bfloat16"
    assert {name.split(".")[2] for name in ignored if "layers" in name} == {"0"}
    assert len(ignored) == 8
    assert "model.layers.0.mlp.up_proj.weight_scale" not in tensors
    for name, data in tensors.items():
        if data.dtype != E4M3:
            assert name.endswith("_scale") or torch.equal(data, rounded[name].to(torch.bfloat16)), name
            continue
        key = f"base_model.model.{name.removesuffix('.weight')}.lora"
        assert factors[f"{key}_B.weight"].any()
        error = (reference.dequantize(data, tensors[f"{name}_scale"].reshape(-1, 1)) - rounded[name].float()).abs()
        assert bool((error <= rounded[name].float().abs() * (2**-4 + 2**-8) + tensors[f"{name}_scale"].max() * 2**-10).all())
        assert ("input_scale" in " ".join(tensors)) == (recipe == "delayed")
    with torch.no_grad():
        found, plain = (served(tmp_path / name)(input_ids=IDS).logits.float() for name in ("served", "merged"))
    assert relative(found, plain) < (2 * CASTS / 2 / 3) ** 0.5 * 2**-4 + 2**-6  # weights and inputs of one layer; bf16


@pytest.mark.long
def test_shards_of_two_ranks_are_written_file_by_file(tiny_run, tmp_path, monkeypatch):
    run = tiny_run(steps=3)
    ranks.run(2, train, run.file, [*lines_of("delayed"), "train.micro_batch=1"])
    monkeypatch.setattr(weight_files, "_SHARD_BYTES", 20_000)
    for name, more in {"plain": [], "served": ["--fp8"]}.items():
        assert main(["export", str(run.output), "--to", str(tmp_path / name), *more]) == 0
    assert len(list((tmp_path / "served").glob("model-*.safetensors"))) > 1
    plain, found = (
        {name: tensor for file in (tmp_path / kind).glob("*.safetensors") for name, tensor in load_file(file).items()}
        for kind in ("plain", "served")
    )
    matrices = [name for name, tensor in found.items() if tensor.dtype == E4M3]
    assert len(matrices) == 14
    for name in matrices:
        error = (found[name].float() * found[f"{name}_scale"] - plain[name]).abs()
        assert bool((error <= plain[name].abs() * 2**-4 + found[f"{name}_scale"] * 2**-10).all())
    served(tmp_path / "served")


def refuses(words, capsys, *command):
    assert main(["export", *command]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_a_weight_beyond_the_scale_of_the_last_step_is_not_clipped(runs, tmp_path, capsys):
    run = runs("delayed")
    other = tmp_path / "run"
    shutil.copytree(run.output, other)
    step = other / "checkpoints" / "step-4"
    file = next(step.glob("*.safetensors"))
    config = AutoConfig.from_pretrained(other / "model")
    with octavo.delayed_init():
        empty = AutoModelForCausalLM.from_config(config)
    model = octavo.transform(empty, RECIPES["delayed"], dtype=torch.float32, params_dtype=torch.float32, device="cpu")
    octavo.load(step, model)
    with torch.no_grad():
        model.layers[0].layernorm_mlp.fc2_weight[0, 0] = 9.0
    with octavo.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        pass
    shutil.rmtree(step)
    octavo.save(step, model)
    assert file.parent == step
    assert main(["export", str(other), "--to", str(tmp_path / "served"), "--fp8"]) == 0
    assert "layers.0.layernorm_mlp.fc2_weight: grown beyond the last step's delayed scale" in capsys.readouterr().err
    tensors = load_file(tmp_path / "served" / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert (tensors[name].float() * tensors[f"{name}_scale"])[0, 0] == pytest.approx(9.0)


def test_folders_that_would_compute_something_else_are_refused(tiny_run, runs, tmp_path, capsys):
    to = ["--to", str(tmp_path / "out"), "--fp8"]
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    AutoConfig.for_model("mixtral", vocab_size=320, num_key_value_heads=1, num_local_experts=2, **sizes).save_pretrained(
        tmp_path / "mixtral"
    )
    refuses(("no adapters", "Leave --merge out"), capsys, str(runs("delayed").output), *to, "--merge")
    cases = {
        "plain": (["fp8.enabled=false"], ("no product", "ran in FP8")),
        "blocks": (["fp8.recipe=block", "fp8.amax_history_len=1024"], ("multiples of 128", "rowwise")),
        "experts": ([f"model.source={tmp_path / 'mixtral'}", "fp8.skip=['*.fc2']"], ("one scheme for both", "without --fp8")),
        "own": (["model.blocks=own"], ("original code",)),
        "scheduled": (["fp8.schedule={ 'last 1' = '*' }"], ("every layer is out of FP8", "fp8.schedule")),
        "skipped": (["fp8.skip=['layers.*']"], ("every layer is out of FP8",)),
    }
    for name, (lines, words) in cases.items():
        run = tiny_run(name, steps=2 if name == "scheduled" else 1)
        if name == "experts":
            table = run.file.read_text()
            run.file.write_text(table[: table.index("[model.config]")] + table[table.index("[data]") :])
        assert main(["train", str(run.file), *lines]) == 0
        capsys.readouterr()
        refuses(words, capsys, str(run.output), *to)
    run = tiny_run("lora", steps=1)
    run.file.write_text(run.file.read_text() + "\n[lora]\nrank = 4\n")
    assert main(["train", str(run.file)]) == 0
    refuses(("has adapters", "--merge"), capsys, str(run.output), *to)
    assert not (tmp_path / "out").exists()
