"""Checks of a run before any work: FP8 without an FP8 matrix, offloading, GPT-2 under every recipe, and defaults of a run."""

import json
import shutil
import tomllib

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.hardware import lookup
from octavo.models.sources import load_config
from octavo.plan.run import Target, check


def plan(run, *overrides):
    return check(RunConfig.from_file(run.file, overrides))


@pytest.mark.parametrize("override", ['fp8.skip=["*"]', 'fp8.layers={"*" = "bf16"}'])
def test_fp8_without_an_fp8_matrix_is_refused_and_auto_says_it(override, tiny_run):
    run = tiny_run()
    with pytest.raises(InputError, match=r"fp8\.enabled = true, but fp8\.skip and fp8\.layers leave out all 9 matrices"):
        plan(run, override)
    found = plan(run, override, "fp8.enabled=auto", "fp8.emulate=true")
    assert found.recipe is None
    assert found.fp8_note == "no FP8: fp8.skip and fp8.layers leave out all 9 matrices that could run in FP8"
    assert plan(run, "fp8.skip=['layers.*']").recipe is not None  # the head's


def test_offloading_by_either_key_is_refused_for_own_code_before_work(tiny_run):
    for key in ("train.offload", "parallel.sm_activation_offloading"):
        with pytest.raises(InputError, match=key):
            plan(tiny_run(key), f"{key}=true", "model.blocks=own")


def test_gpt2_trains_in_fp8_and_its_resolved_file_takes_every_recipe(tiny_run, tmp_path, capsys):
    size = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    GPT2Config(**size, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM").save_pretrained(tmp_path / "gpt2")
    run = tiny_run(steps=3)
    arguments = [str(run.file), f"model.source={tmp_path / 'gpt2'}", "model.config={}", "optimizer.warmup_steps=1"]
    assert main(["train", *arguments]) == 0
    assert "8 of 11 matrices run in FP8" in capsys.readouterr().out
    resolved = run.output / "run.toml"
    for recipe in ("current", "rowwise", "block", "delayed"):
        output = tmp_path / recipe
        assert main(["train", str(resolved), f"fp8.recipe={recipe}", f"train.output={output}"]) == 0
        err = capsys.readouterr().err
        assert ("fp8.amax_history_len = 4" in err) == (recipe != "delayed")
        for other in ("delayed", "current", "rowwise", "block"):
            again = RunConfig.from_file(output / "run.toml", [f"fp8.recipe={other}", "train.output=x"])
            assert again.fp8.recipe == other
        assert main(["train", str(output / "run.toml")]) == 0
        assert "already trained" in capsys.readouterr().out


def test_a_router_in_float32_beside_bf16_trains_on_one_rank_and_is_refused_on_several(tiny_run, tmp_path, capsys):
    """transformers keeps it in float32; a run that is interrupted continues with the same bits."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 320}
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1}
    config = AutoConfig.for_model("ernie4_5_moe", **shape, **experts, num_key_value_heads=2, moe_layer_end_index=1)
    model = AutoModelForCausalLM.from_config(config)
    model.model.layers[1].mlp.gate.weight.data.normal_()
    model.save_pretrained(tmp_path / "ernie")
    change = [f"model.source={tmp_path / 'ernie'}", "model.config={}", "model.load=true", "model.params_dtype=bfloat16"]
    change.append("train.global_batch=4")
    run = tiny_run(steps=4, every=2)
    with pytest.raises(
        InputError, match=r"ernie4_5_moe leaves model\.layers\.1\.mlp\.gate\.weight.*params_dtype = \"float32\""
    ):
        check(RunConfig.from_file(run.file, change), target=Target(2, lookup("h200")))
    check(RunConfig.from_file(run.file, [*change, "model.params_dtype=float32"]), target=Target(2, lookup("h200")))
    exported = {}
    for name, steps in (("whole", [4]), ("parts", [2, 4])):
        for count in steps:
            output = ["optimizer.schedule=constant", f"train.steps={count}", f"train.output={tmp_path / name}"]
            assert main(["train", str(run.file), *change, *output]) == 0
        assert main(["export", str(tmp_path / name), "--to", str(tmp_path / f"{name}-out")]) == 0
        exported[name] = load_file(tmp_path / f"{name}-out" / "model.safetensors")
    capsys.readouterr()
    assert {n: t.dtype for n, t in exported["whole"].items()} == {n: t.dtype for n, t in exported["parts"].items()}
    assert all(torch.equal(tensor, exported["parts"][name]) for name, tensor in exported["whole"].items())
    assert exported["whole"]["model.layers.1.mlp.gate.weight"].dtype == torch.float32
    assert exported["whole"]["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_run_does_not_continue_with_another_config_of_the_source(tiny_run, tmp_path, capsys):
    """Sizes are compared with the weights; a rotary base, say, leaves them alone."""
    source = tmp_path / "llama"
    load_config("llama-tiny", {"vocab_size": 320, "rope_parameters": {"rope_theta": 5000.0}}).save_pretrained(source)
    run = tiny_run(steps=3)
    arguments = [str(run.file), f"model.source={source}", "model.config={}", "optimizer.schedule=constant"]
    assert main(["train", *arguments, "train.steps=2"]) == 0
    assert main(["train", *arguments]) == 0
    path = source / "config.json"
    path.write_text(path.read_text().replace("5000.0", "6000.0"))
    capsys.readouterr()
    assert main(["train", *arguments, "train.steps=4"]) == 2
    err = capsys.readouterr().err
    assert "rope_parameters.rope_theta was 5000.0 and is now 6000.0" in err
    assert err.count("\n") == 1


def kept(run):
    """The [fp8] section of the run's own file."""
    return tomllib.loads((run.output / "run.toml").read_text())["fp8"]


def test_a_run_records_the_defaults_that_it_began_with(tiny_run):
    run = tiny_run(steps=1)
    assert main(["train", str(run.file)]) == 0
    assert (kept(run)["head"], kept(run)["fast_accumulation"]) == ("backward", "input_gradient")
    own = tiny_run("own", steps=1)
    assert main(["train", str(own.file), "model.blocks=own"]) == 0
    assert (kept(own)["head"], kept(own)["fast_accumulation"]) == (False, "input_gradient")
    block = tiny_run("block", steps=1)
    assert main(["train", str(block.file), "fp8.recipe=block"]) == 0
    assert kept(block)["head"] == "backward"
    assert "fast_accumulation" not in kept(block)


@pytest.mark.parametrize("written", [True, False], ids=["with the keys", "older than the keys"])
def test_a_run_with_other_defaults_continues_with_its_own(written, tiny_run, capsys):
    before = ["fp8.head=false", "fp8.fast_accumulation=false"]
    whole, cut = tiny_run("whole"), tiny_run("cut", every=2)
    assert main(["train", str(whole.file), *before]) == 0
    assert main(["train", str(cut.file), *before, "checkpoint.keep=9"]) == 0
    for folder in cut.output.glob("checkpoints/step-*"):
        if folder.name != "step-4":
            shutil.rmtree(folder)
    if not written:
        file = cut.output / "run.toml"
        lines = file.read_text().splitlines()
        file.write_text("\n".join(line for line in lines if not line.startswith(("head = ", "fast_accumulation = "))))
    capsys.readouterr()
    assert main(["train", str(cut.file)]) == 0
    said = capsys.readouterr().out
    assert said.count("its earlier values of keys that are not set: fp8.fast_accumulation = false, fp8.head = false") == 1
    losses = [
        [json.loads(line)["loss"] for line in (run.output / "metrics.jsonl").read_text().splitlines()] for run in (whole, cut)
    ]
    assert losses[0] == losses[1]
    assert (kept(cut)["head"], kept(cut)["fast_accumulation"]) == (False, False)
    assert main(["train", str(cut.file), "fp8.head=backward"]) == 2
    assert "fp8.head was False and is now 'backward'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("t5", "an encoder-decoder"),
        ("bart", "an encoder-decoder"),
        ("whisper", "an encoder-decoder"),
        ("bert", r"an encoder \(model.config.is_decoder = true makes it causal\)"),
        ("roberta", "an encoder"),
        ("modernbert", "an encoder"),
        ("vit", "a vision model"),
        ("wav2vec2", "an audio model"),
        ("llava", "a model of text and other inputs"),
    ],
)
def test_a_model_that_is_not_causal_is_refused_by_name_and_kind(tiny_run, kind, what):
    run = tiny_run()
    AutoConfig.for_model(kind).save_pretrained(run.folder / "model")
    with pytest.raises(InputError, match=f"{kind} is no causal language model but {what}.* octavo.transform"):
        plan(run, f"model.source={run.folder / 'model'}", "model.config={}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", 'has no "model_type"'),
        ('{"model_type": ["llama"]}', 'has no "model_type"'),
        (
            '{"model_type": "llama", "hidden_size": "x"}',
            r"refused by transformers: Field 'hidden_size' expected int, got str .*'x'\)\. Correct",
        ),
        ('{"model_type": "llama", "num_attention_heads": 0}', "refused by transformers"),
        ('{"model_type": "llama", "rope_theta": null}', "rope_parameters.rope_theta = None: use a number above 0"),
        (
            '{"model_type": "gpt_neox", "rope_parameters": {"partial_rotary_factor": null}}',
            "partial_rotary_factor = None: the share",
        ),
        ('{"model_type": "llama", "hidden_act": "foo"}', "the value 'foo', which transformers"),
    ],
)
def test_a_broken_config_is_named(tiny_run, content, words):
    run = tiny_run()
    (run.folder / "model").mkdir()
    (run.folder / "model" / "config.json").write_text(content)
    with pytest.raises(InputError, match=f"model.(source|config).*{words}"):
        plan(run, f"model.source={run.folder / 'model'}", "model.config={}")


def test_tokens_that_changed_on_the_disk_are_prepared_anew(tiny_run, tmp_path, capsys):
    run = tiny_run(steps=2)
    folder = f"data.folder={tmp_path / 'data'}"
    assert main(["train", str(run.file), folder]) == 0
    (tokens,) = (tmp_path / "data").glob("*/train.bin")
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[::-1])
    capsys.readouterr()
    assert main(["train", str(run.file), folder, f"train.output={tmp_path / 'again'}"]) == 0
    assert "train.bin has changed since it was prepared" in capsys.readouterr().out
    (tokens,) = (tmp_path / "data").glob("*/train.bin")
    assert tokens.read_bytes() == whole


def test_metrics_that_are_lost_are_said(tiny_run, capsys):
    run = tiny_run(steps=6, every=2)
    assert main(["train", str(run.file), "optimizer.schedule=constant"]) == 0
    metrics = run.output / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:2]))
    capsys.readouterr()
    assert main(["train", str(run.file), "optimizer.schedule=constant", "train.steps=8"]) == 0
    assert "metrics.jsonl lacks the last 4 of the 6 finished steps" in capsys.readouterr().err


def test_a_dry_run_names_the_files_of_a_folder_that_are_left_out(tiny_run, tmp_path, capsys):
    run = tiny_run()
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text(run.corpus.read_text())
    (folder / "README.md").write_text("about these texts\n")
    command = ["train", str(run.file), f"data.source={folder}", "--dry-run"]
    assert main(command) == 0
    assert "1 file is read; 1 file left out: README.md." in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    (notice,) = json.loads(capsys.readouterr().out)["data"]
    assert "README.md" in notice
