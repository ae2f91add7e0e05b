"""`octavo describe`: the matrices of a run file or of a run's folder, without weights and without a GPU."""

import json

import pytest
from rich.console import Console
from transformers import GPT2Config

import octavo
from octavo.cli import main
from octavo.config.degrees import DEGREES, fit_degrees, least_world
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.models.description import kernels_on
from octavo.plan.run import check


@pytest.fixture
def described(tiny_run, capsys):
    """`described(*arguments, run=tiny_run())` → the JSON document."""

    def call(*arguments, run=None):
        assert main(["describe", str(run or tiny_run().file), *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def test_a_run_file(described, tiny_run, capsys):
    run = tiny_run("own")
    found = described(run=run.file)
    assert (found["recipe"], found["head"], found["fp8_matrices"]) == ("delayed", "backward", 9)
    assert found["parameters"] == check(RunConfig.from_file(run.file)).parameters
    names = [matrix["name"] for matrix in found["matrices"]]
    assert names == ["embedding", *(f"layers.{i}.{part}" for i in (0, 1) for part in PARTS), "head"]
    out = {matrix["name"]: matrix["reason"] for matrix in found["matrices"] if not matrix["fp8"]}
    assert out == {"embedding": "an embedding looks up rows and multiplies nothing"}
    assert found["memory"]["fits"] is True
    assert main(["describe", str(run.file), "fp8.skip=['*.fc1']", "--gpu", "h200", "--world-size", "2"]) == 0
    text = capsys.readouterr().out
    assert "7 of 10 matrices run in FP8" in text
    assert "fp8.skip" in text or "skip" in text
    assert "on each of 2 ranks: fits H200 with 139.0 GiB" in text
    assert "head        gradients in FP8, logits in high precision" in text
    assert not run.output.exists()


@pytest.mark.parametrize(
    ("given", "world"),
    [((), 1), ((1, 2, 1, 1), 2), ((0, 2, 2, 1), 4), ((4, 1, 2, 1), 4), ((0, 2, 1, 2), 2), ((0, 2, 3, 4), 12)],
)
def test_degrees_of_a_run_file_are_described_on_the_fewest_ranks(given, world):
    asked = dict(zip(DEGREES, given, strict=False)) if given else {}
    assert least_world(*(given or (0, 1, 1, 1))) == world
    assert fit_degrees(**asked, world_size=world).world == world
    for less in range(1, world):
        with pytest.raises(InputError):
            fit_degrees(**asked, world_size=less)


def test_a_run_file_with_degrees_needs_no_number_of_ranks(described, tiny_run, capsys):
    assert main(["describe", str(tiny_run("own").file), "parallel.tensor_parallel_degree=2"]) == 0
    assert "on each of 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(("mask", "said"), [("no_mask", "Octavo's kernel up to 512 tokens; cuDNN"), ("causal", "cuDNN")])
def test_layers_that_see_all_tokens_have_a_kernel_of_their_own(mask, said):
    layer = octavo.nn.TransformerLayer(64, 128, 2, self_attn_mask_type=mask, device="meta")
    attention, _, _ = kernels_on("cuda", (9, 0), layer, native=True)
    assert attention.startswith(said)
    assert ("document by document" in attention) == (mask == "causal")


PARTS = ("self_attention.qkv", "self_attention.proj", "ffn.fc1", "ffn.fc2")


def test_a_run_without_fp8_has_no_matrix_in_fp8(described, tiny_run):
    found = described("fp8.enabled=false", run=tiny_run().file)
    assert (found["recipe"], found["head"], found["fp8_matrices"]) == (None, False, 0)
    assert found["matrices"][1]["reason"] == "FP8 is off (fp8.enabled = false)"
    without = described("--gpu", "A100 40GB", run=tiny_run("a100").file)
    assert without["fp8_matrices"] == 0
    assert "no FP8 products, which need 8.9 or more" in without["matrices"][1]["reason"]


def test_the_folder_of_a_run(described, tiny_run, tmp_path, capsys):
    run = tiny_run(steps=1)
    assert main(["train", str(run.file)]) == 0
    capsys.readouterr()
    found, by_file = described(run=run.output), described(run=run.file)
    assert found | {"run": ""} == by_file | {"run": ""}
    assert main(["describe", str(run.output), "fp8.enabled=false"]) == 2
    message = capsys.readouterr().err
    assert "fp8.enabled=false overrides a key" in message
    assert str(run.output / "run.toml") in message
    (tmp_path / "empty").mkdir()
    assert main(["describe", str(tmp_path / "empty")]) == 2
    assert "is not the folder of a run: it has no run.toml" in capsys.readouterr().err
    assert main(["describe", str(tmp_path / "none.toml")]) == 2


def test_a_run_is_described_in_the_words_of_its_model(tiny_run, capsys):
    run = tiny_run(steps=1)
    trainer = octavo.Trainer(run.file, console=Console(quiet=True))
    trainer.train()
    assert main(["describe", str(run.output)]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n{octavo.describe(trainer.model)}\n")
    assert main(["describe", str(run.file), "--gpu", "h200"]) == 0
    text = capsys.readouterr().out
    assert "products: FP8 units, cuBLAS" in text
    assert "attention: cuDNN's kernel through scaled_dot_product_attention" in text
    assert main(["describe", str(run.file), "train.deterministic=true", "--gpu", "h200"]) == 0
    assert "attention: plain PyTorch, whose bits repeat" in capsys.readouterr().out
    assert main(["describe", str(run.file), "fp8.enabled=false"]) == 0
    assert "products: FP8 is off" in capsys.readouterr().out


def test_own_code_says_why_and_needs_no_weights(described, tiny_run, tmp_path):
    GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=64).save_pretrained(tmp_path / "gpt2")
    found = described(f"model.source={tmp_path / 'gpt2'}", "model.config={}", "model.load=true", run=tiny_run().file)
    assert found["own_code"] == "no decoder for the family 'gpt2'"
    assert found["memory"]["parts_gib"]["activations"] is None
    assert found["fp8_matrices"] == 8


def test_the_choice_of_auto_is_the_folder_s(described, tiny_run):
    run = tiny_run()
    run.output.mkdir()
    config = RunConfig.from_file(run.file, ["fp8.enabled=auto", "fp8.emulate=true"])
    (run.output / "run.toml").write_text(config.to_toml())
    kept_out = {"layers.0.ffn.fc2": "slower in FP8: 1.00 and 2.00 ms"}
    (run.output / "choices.json").write_text(json.dumps({"fp8": True, "device": "H200", "kept_out": kept_out}))
    found = described(run=run.output)
    out = {matrix["name"]: matrix["reason"] for matrix in found["matrices"] if not matrix["fp8"]}
    assert out["layers.0.ffn.fc2"] == kept_out["layers.0.ffn.fc2"]
    assert "as chosen when the run began, on H200" in found["fp8"]
