"""What of a run file decides what is minimised and by which recipe a layer runs: it reaches the model, and binds the run."""

import json

import pytest

from octavo.build import describe
from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.data.prepared import prepare
from octavo.plan.run import check
from octavo.run.metrics import read_metrics
from octavo.train.setup import build

LAYERS = 'fp8.layers={"layers.0.*" = "bf16", "*.proj" = "rowwise", "*.fc2" = "delayed"}'


def losses(output):
    return [(r["step"], r["loss"].hex()) for r in read_metrics(output / "metrics.jsonl")]


def built(run, *overrides):
    config = RunConfig.from_file(run.file, overrides)
    return build(check(config), prepare(config.data))[0].model


def test_layers_and_head_of_a_run_file(tiny_run):
    model = built(tiny_run(), LAYERS, "fp8.head=true", "fp8.recipe=current", "fp8.margin=1")
    found = {report.name: (report.fp8, report.recipe) for report in describe(model).layers}
    assert found["layers.0.ffn.fc1"] == (False, "")
    assert found["layers.0.self_attention.proj"] == (True, "rowwise")
    assert found["layers.1.ffn.fc1"] == (True, "")
    assert found["layers.1.ffn.fc2"] == (True, "delayed")
    assert found["head"] == (True, "")
    override = model.layers[1].ffn.fc2_fp8_state.override
    assert (override.margin, override.amax_history_len) == (1, 4)  # of the section


def test_a_run_with_all_of_them_continues_with_the_same_bits(tiny_run):
    given = [LAYERS, "fp8.head=true", "train.label_smoothing=0.1", "train.z_loss=1e-3", "optimizer.schedule=constant"]
    whole, cut = tiny_run("whole", steps=6, every=3), tiny_run("cut", steps=6, every=3)
    assert main(["train", str(whole.file), *given]) == 0
    assert main(["train", str(cut.file), *given, "train.steps=3"]) == 0
    assert main(["train", str(cut.file), *given]) == 0
    assert losses(cut.output) == losses(whole.output)
    kept = str(whole.output / "run.toml")
    assert main(["train", kept, f"train.output={cut.folder / 'again'}"]) == 0  # the resolved file says all of it
    assert losses(cut.folder / "again") == losses(whole.output)


def test_they_may_not_change_nor_their_order(tiny_run, capsys):
    run = tiny_run(steps=2)
    assert main(["train", str(run.file), LAYERS]) == 0
    other = 'fp8.layers={"*.proj" = "rowwise", "layers.0.*" = "bf16", "*.fc2" = "delayed"}'
    capsys.readouterr()
    assert main(["train", str(run.file)]) == 0  # keys that are not set are those that the run began with
    assert "continues with its earlier values of keys that are not set: fp8.layers = {" in capsys.readouterr().out
    for changed, word in (
        ([other], "fp8.layers was [("),
        ([LAYERS, "train.z_loss=0.1"], "train.z_loss was 0.0 and is now 0.1"),
        ([LAYERS, "fp8.head=true"], "fp8.head was 'backward' and is now True"),
    ):
        assert main(["train", str(run.file), *changed]) == 2
        assert word in capsys.readouterr().err


def test_the_training_loss_has_the_objective_and_validation_the_cross_entropy(tiny_run):
    given = ["model.config.attention_dropout=0.0", "fp8.enabled=false", "optimizer.lr=1e-12", "optimizer.warmup_steps=0"]
    plain, smooth = tiny_run("plain", steps=1), tiny_run("smooth", steps=1)
    assert main(["train", str(plain.file), *given]) == 0
    assert main(["train", str(smooth.file), *given, "train.label_smoothing=0.1", "train.z_loss=0.01"]) == 0
    (one,), (other,) = (read_metrics(run.output / "metrics.jsonl") for run in (plain, smooth))
    assert other["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-6)
    assert other["loss"] > one["loss"] + 0.1  # z-loss: 0.01 · (about log 320)²


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (['fp8.layers={"nope" = "bf16"}'], ["fp8.layers pattern 'nope'", "matches no FP8 layer"]),
        (['fp8.layers={"*" = "fast"}'], ["fp8.layers", "'fast'", "rowwise"]),
        (["fp8.layers=rowwise"], ["fp8.layers"]),
        (["train.label_smoothing=1.0"], ["train.label_smoothing"]),
        (["train.z_loss=-1"], ["train.z_loss"]),
        (["fp8.head=maybe"], ["fp8.head"]),
    ],
)
def test_mistakes_are_one_message_before_anything_is_made(tiny_run, capsys, settings, words):
    run = tiny_run()
    assert main(["train", str(run.file), *settings]) == 2
    err = capsys.readouterr().err
    for word in words:
        assert word in err
    assert err.count("\n") == 1
    assert not run.output.exists()


def test_a_dry_run_says_what_auto_does(tiny_run, capsys):
    assert main(["train", str(tiny_run().file), 'fp8.enabled="auto"', "--dry-run", "--json"]) == 0
    assert "never faster" in json.loads(capsys.readouterr().out)["fp8"]
