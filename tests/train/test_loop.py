"""Whole runs, in this process: what they leave on disk, what they continue, what they refuse, what they say."""

import contextlib
import json
import math
import re
import shutil
import signal
import subprocess

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

import octavo
from octavo.build import transform
from octavo.checkpoint import opened
from octavo.checkpoint.reader import StoredWeights
from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.data.prepared import prepared_or_none
from octavo.errors import InputError, RunStopped
from octavo.models.convert import conversion
from octavo.models.families import spec_of
from octavo.models.sources import load_config
from octavo.run import provenance
from octavo.run.metrics import read_metrics
from octavo.run.resume import VALIDATED
from octavo.train import loop, setup
from octavo.train.trainer import Trainer
from octavo.watchdog.stopping import StopRequest


def losses(output):
    return [(r["step"], r["loss"].hex()) for r in read_metrics(output / "metrics.jsonl")]


def steps_kept(output):
    return sorted(int(p.name.removeprefix("step-")) for p in (output / "checkpoints").iterdir())


def test_a_run_leaves_what_it_promises(tiny_run, capsys):
    run = tiny_run(steps=7, every=2)
    assert main(["train", str(run.file), "train.validate_every=3", "checkpoint.keep=2"]) == 0
    assert {p.name for p in run.output.iterdir()} == {
        ".lock", "run.toml", "metrics.jsonl", "checkpoints", "model", "tokenizer", "environment.json", "losses.png",
    }  # fmt: skip
    assert steps_kept(run.output) == [6, 7]
    records = read_metrics(run.output / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, 8))
    assert {"loss", "tokens_per_second", "step_seconds", "data_seconds", "memory_gib", "lr", "grad_norm"} <= records[0].keys()
    assert [r["step"] for r in records if "validation_loss" in r] == [3, 6, 7]
    assert records[0]["mfu"] is None
    assert records[-1]["loss"] < records[0]["loss"]
    (start,) = json.loads((run.output / "environment.json").read_text())["starts"]
    assert start["packages"]["torch"] == torch.__version__.split("+")[0] or start["packages"]["torch"] == torch.__version__
    state = json.loads((run.output / "checkpoints" / "step-6" / "state.json").read_text())
    assert state["step"] == 6
    assert state["layout"]["threads"] == torch.get_num_threads()
    out = capsys.readouterr().out
    assert "fp8  step 7/7  loss" in out
    assert "matrices run in FP8" in out
    assert f"octavo export {run.output} --to" in out


def test_the_resolved_run_file_reproduces_the_run_and_a_finished_run_says_so(tiny_run, tmp_path, capsys):
    run = tiny_run(steps=5)
    assert main(["train", str(run.file), "optimizer.lr=1e-2"]) == 0
    assert main(["train", str(run.output / "run.toml"), f"train.output={tmp_path / 'again'}"]) == 0
    assert losses(tmp_path / "again") == losses(run.output)
    before = sorted((p, p.stat().st_mtime_ns) for p in run.output.rglob("*") if p.name != ".lock" and p.is_file())
    capsys.readouterr()
    assert main(["train", str(run.file), "optimizer.lr=1e-2"]) == 0
    assert "already trained, 5 of 5 steps" in capsys.readouterr().out
    after = sorted((p, p.stat().st_mtime_ns) for p in run.output.rglob("*") if p.name != ".lock" and p.is_file())
    assert after == before


def test_the_json_of_a_run_with_its_bf16_twin(tiny_run, capsys):
    run = tiny_run(steps=4)
    assert main(["train", str(run.file), "train.compare_bf16=true", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert "step 4/4" in captured.err
    fp8, bf16 = losses(run.output), losses(run.output / "bf16")
    assert result["run"]["loss"] == float.fromhex(fp8[-1][1])
    assert result["bf16"]["loss"] == float.fromhex(bf16[-1][1])
    assert result["gap_percent"] == pytest.approx(100 * (result["run"]["loss"] / result["bf16"]["loss"] - 1))
    assert fp8 != bf16
    assert RunConfig.from_file(run.output / "bf16" / "run.toml").fp8.enabled is False


def test_a_constant_schedule_can_be_prolonged(tiny_run, tmp_path, capsys):
    run = tiny_run(steps=4)
    constant = "optimizer.schedule=constant"
    assert main(["train", str(run.file), constant]) == 0
    assert main(["train", str(run.file), constant, "train.steps=8"]) == 0
    assert main(["train", str(run.file), constant, "train.steps=8", f"train.output={tmp_path / 'whole'}"]) == 0
    assert losses(run.output) == losses(tmp_path / "whole")
    assert main(["train", str(run.file), constant, "train.steps=6"]) == 2
    assert "has trained 8 steps: set train.steps = 8 or more" in capsys.readouterr().err


def rates(output):
    return [r["lr"] for r in read_metrics(output / "metrics.jsonl")]


def test_a_finished_cosine_is_extended_on_request_and_its_run_file_reproduces_it(tiny_run, tmp_path, capsys):
    run = tiny_run("cosine", steps=4)
    assert main(["train", str(run.file)]) == 0
    assert main(["train", str(run.file), "train.steps=8"]) == 2
    assert "set train.extended=[4] too" in capsys.readouterr().err
    assert main(["train", str(run.file), "train.steps=8", "train.extended=[3]"]) == 2
    assert main(["train", str(run.file), "train.steps=8", "train.extended=[4]"]) == 0
    found = rates(run.output)
    assert found[3] == pytest.approx(3e-4)
    assert found[4] == pytest.approx(3e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * 3 / 6)) / 2))  # two steps of warm-up
    assert main(["train", str(run.output / "run.toml"), f"train.output={tmp_path / 'again'}"]) == 0
    assert losses(tmp_path / "again") == losses(run.output)
    assert main(["train", str(run.file), "train.steps=8"]) == 0  # the key of the run's own past
    assert main(["train", str(run.file), "train.steps=6"]) == 2
    assert "Set train.steps = 8" in capsys.readouterr().err
    own, edited = run.output / "run.toml", r"extended = \[\s*4,\s*\]"
    for ends in ("[]", "[3]", "[4, 7]"):
        before = own.read_text()
        own.write_text(re.sub(edited, f"extended = {ends}", before))
        assert main(["train", str(run.file), "train.steps=8"]) == 2
        assert f"run.toml: train.extended = {ends}, but the run was trained with [4]" in capsys.readouterr().err
        own.write_text(before)


def test_an_extension_that_was_killed_before_its_first_checkpoint_goes_on(tiny_run, tmp_path):
    run, whole = tiny_run("cosine", steps=4), tmp_path / "whole"
    assert main(["train", str(run.file)]) == 0
    extended = ["train", str(run.file), "train.steps=8", "train.extended=[4]", "checkpoint.keep=9"]
    assert main(extended) == 0
    shutil.copytree(run.output, whole)
    shutil.rmtree(run.output / "checkpoints" / "step-8")
    assert main(extended) == 0
    assert losses(run.output) == losses(whole)


def test_the_length_of_an_extended_run_is_named_as_it_was_given(tiny_run, capsys):
    run = tiny_run("tokens", steps=9)
    assert main(["train", str(run.file), "train.tokens=512"]) == 0
    for given, words in (
        (["train.tokens=1000"], "train.tokens = 1000 (8 steps), but the run has ended at step 4"),
        (["train.tokens=384"], "train.tokens = 384 (3 steps), but the run was started with 4 steps"),
        (["train.tokens=384"], "Set train.tokens = 512."),
        (
            ["train.tokens=1000", "train.extended=[9]"],
            "train.extended = [9], but train.tokens = 1000 (8 steps): the former last steps lie below the last one. Set "
            "train.tokens = 1280 or more.",
        ),
    ):
        capsys.readouterr()
        assert main(["train", str(run.file), *given]) == 2
        assert words in capsys.readouterr().err


def test_wsd_is_extended_before_its_decay_as_if_longer_from_the_start_and_afterwards_by_a_second_decay(tiny_run, tmp_path):
    wsd = ["optimizer.schedule=wsd", "optimizer.decay_steps=2"]
    run = tiny_run("wsd", steps=6, every=4)
    whole = tmp_path / "whole"
    assert main(["train", str(run.file), *wsd, "train.steps=9", f"train.output={whole}"]) == 0
    assert main(["train", str(run.file), *wsd]) == 0
    assert rates(run.output) == pytest.approx([1.5e-3, 3e-3, 3e-3, 3e-3, 1.65e-3, 3e-4])
    shutil.rmtree(run.output / "checkpoints" / "step-6")  # stopped before the decay
    assert main(["train", str(run.file), *wsd, "train.steps=9"]) == 0
    assert losses(run.output) == losses(whole)
    assert main(["train", str(run.file), *wsd, "train.steps=12"]) == 0
    assert rates(run.output)[8:] == pytest.approx([3e-4, 3e-3, 1.65e-3, 3e-4])
    assert RunConfig.from_file(run.output / "run.toml").train.extended == [9]


def test_wsd_is_not_extended_inside_its_decay(tiny_run, capsys):
    wsd = ["optimizer.schedule=wsd", "optimizer.decay_steps=3"]
    run = tiny_run("wsd", steps=6, every=5)
    assert main(["train", str(run.file), *wsd]) == 0
    shutil.rmtree(run.output / "checkpoints" / "step-6")
    assert main(["train", str(run.file), *wsd, "train.steps=9"]) == 2
    assert "has done 5 of 6 steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("length", "steps"),
    [("train.tokens=257", 3), ("train.tokens=256", 2), ("train.epochs=0.25", None), ("train.epochs=1", None)],
)
def test_the_length_of_a_run_in_tokens_or_epochs(tiny_run, capsys, length, steps):
    run = tiny_run("length", steps=100)
    assert main(["train", str(run.file), length, "model.config.num_hidden_layers=1"]) == 0
    assert "train.steps = 100 has no effect" in capsys.readouterr().err
    done = len(losses(run.output))
    if steps is None:
        tokens = prepared_or_none(RunConfig.from_file(run.file).data).manifest.splits["train"].tokens
        steps = math.ceil(float(length.partition("=")[2]) * math.ceil((tokens - 1) / 32) / 4)
    assert done == steps
    recorded = RunConfig.from_file(run.output / "run.toml").train
    assert (recorded.steps, recorded.tokens, recorded.epochs) == (steps, None, None)
    assert main(["train", str(run.file), length, "model.config.num_hidden_layers=1"]) == 0
    assert "already trained" in capsys.readouterr().out


def test_keys_that_the_losses_depend_on_may_not_change_and_the_others_may(tiny_run, capsys):
    run = tiny_run(steps=4, every=2)
    assert main(["train", str(run.file)]) == 0
    before = losses(run.output)
    assert main(["train", str(run.file), "optimizer.lr=1e-2", "fp8.recipe=current"]) == 2
    err = capsys.readouterr().err
    assert "optimizer.lr was 0.003 and is now 0.01" in err
    assert "fp8.recipe was 'delayed' and is now 'current'" in err
    assert "amax_history_len was" not in err  # which goes with the recipe
    assert err.endswith("Restore them to continue it, or set another train.output.\n")
    assert losses(run.output) == before
    assert main(["train", str(run.file), "fp8.enabled=false"]) == 2  # all steps are done
    assert "other settings: fp8.enabled was True and is now False. Restore them" in capsys.readouterr().err
    assert main(["train", str(run.file), "log.every=2", "checkpoint.keep=1", "train.validate_every=1"]) == 0


def test_a_checkpoint_of_another_model_is_refused_with_the_shapes_that_differ(tiny_run, capsys):
    run = tiny_run(steps=2)
    assert main(["train", str(run.file), "optimizer.warmup_steps=1"]) == 0
    kept = run.output / "run.toml"
    capsys.readouterr()
    kept.write_text(kept.read_text().replace("hidden_size = 32", "hidden_size = 64"))
    assert main(["train", str(kept)]) == 2
    err = capsys.readouterr().err
    assert "embedding.weight is [320, 32] float32 in the checkpoint and [320, 64] float32 in the model" in err
    assert err.count("\n") == 1
    assert main(["train", str(run.file), "optimizer.warmup_steps=1"]) == 2  # and the other way round: the key is named
    assert "model.config.hidden_size was 64 and is now 32" in capsys.readouterr().err


def test_changed_data_is_refused(tiny_run, tmp_path, capsys):
    corpus = tmp_path / "own.jsonl"
    corpus.write_text("".join(f'{{"text": "a line of text with the number {i} in it"}}\n' for i in range(200)))
    run = tiny_run(steps=4, corpus=corpus)
    constant = "optimizer.schedule=constant"
    assert main(["train", str(run.file), constant, "train.steps=2"]) == 0
    corpus.write_text(corpus.read_text().replace("number 7 ", "number 8 "))
    before = losses(run.output)
    assert main(["train", str(run.file), constant]) == 2
    assert "changed since" in capsys.readouterr().err
    assert losses(run.output) == before
    # Tokenised again elsewhere, it is still not what the checkpoint has seen.
    assert main(["train", str(run.file), constant, f"data.folder={tmp_path / 'other-data'}"]) == 2
    assert "the data has changed since" in capsys.readouterr().err


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_gradients(tiny_run, capsys):
    run = tiny_run(steps=6)
    assert main(["train", str(run.file), "optimizer.lr=1e30", "optimizer.clip=0", "optimizer.warmup_steps=0"]) == 1
    err = capsys.readouterr().err
    assert "Lower optimizer.lr" in err
    assert "gradient norm" in err
    assert "Traceback" not in err
    assert "Nothing was saved yet, so the same train.output can be used" in err
    assert all(math.isfinite(record["loss"]) for record in read_metrics(run.output / "metrics.jsonl"))
    # Nothing was saved, so better settings may start anew in the same folder.
    assert main(["train", str(run.file)]) == 0
    assert [step for step, _ in losses(run.output)] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_ends_on_no_number_names_its_checkpoint(tiny_run, capsys):
    run = tiny_run(steps=8, every=1)
    assert main(["train", str(run.file), "optimizer.lr=1e30", "optimizer.clip=0", "optimizer.schedule=constant"]) == 1
    err = capsys.readouterr().err
    (newest, *_) = sorted(steps_kept(run.output), reverse=True)
    assert f"The checkpoint of step {newest} remains" in err
    assert "set another train.output" in err
    assert len(losses(run.output)) == newest


def test_checkpoints_without_their_run_file_are_not_guessed_at(tiny_run, capsys):
    run = tiny_run(steps=2)
    assert main(["train", str(run.file)]) == 0
    (run.output / "run.toml").unlink()
    assert main(["train", str(run.file)]) == 2
    assert "run.toml is missing" in capsys.readouterr().err


@pytest.mark.parametrize("own_code", [False, True], ids=["decoder", "gpt-neo"])
def test_export_writes_what_hugging_face_loads_to_the_bit(tiny_run, tmp_path, capsys, own_code):
    run = tiny_run(steps=3, every=2)
    if own_code:
        use_gpt_neo(run, tmp_path / "neo")
    assert main(["train", str(run.file)]) == 0
    assert main(["export", str(run.output), "--to", str(tmp_path / "out")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights = StoredWeights(run.output / "checkpoints" / "step-3")
    if not own_code:
        way = conversion(spec_of(theirs.config))
        weights = {hf_name: part for name, tensor in weights.items() for hf_name, part in way.split(name, tensor).items()}
    loaded = dict(theirs.named_parameters())
    assert loaded.keys() <= weights.keys()
    for name, parameter in loaded.items():
        assert torch.equal(parameter, weights[name]), name
    text = "a scale for each tensor"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    capsys.readouterr()
    assert main(["export", str(run.output), "--to", str(tmp_path / "out")]) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_run_from_a_published_folder_is_exported_as_it_was_published(tiny_run, tmp_path):
    sizes = {"vocab_size": 320, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1, "num_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts_per_tok": 2}
    source = tmp_path / "source"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes, **heads)).save_pretrained(source)
    run = tiny_run(steps=1)
    text = run.file.read_text()
    run.file.write_text(f'[model]\nsource = "{source}"\nload = true\n' + text[text.index("[data]") :])
    assert main(["train", str(run.file), "optimizer.lr=1e-30", "optimizer.warmup_steps=0"]) == 0
    assert main(["export", str(run.output), "--to", str(tmp_path / "out")]) == 0
    published, written = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in published
    assert written.keys() == published.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in published.items())


def test_export_of_a_model_in_memory(tmp_path):
    config = load_config("llama-tiny", {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1})
    hf_model = AutoModelForCausalLM.from_config(config)
    model = transform(hf_model, dtype=torch.float32)
    octavo.export(model, tmp_path / "out")
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    for name, parameter in hf_model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
    with pytest.raises(InputError, match="not empty"):
        octavo.export(model, tmp_path / "out")
    with pytest.raises(InputError, match="no Hugging Face config"):
        octavo.export(torch.nn.Linear(2, 2), tmp_path / "linear")


def test_gpt_neo_continues_with_the_same_bits(tiny_run, tmp_path):
    whole, cut = tiny_run("whole", steps=6), tiny_run("cut", steps=6)
    for run in (whole, cut):
        use_gpt_neo(run, tmp_path / "neo")
    assert main(["train", str(whole.file)]) == 0
    stop = StopRequest()
    config = RunConfig.from_file(cut.file)
    stop.received = "SIGTERM"  # asked for before the first step has ended
    with pytest.raises(RunStopped, match="after step 1 of 6, saved"):
        Trainer(config, console=Console(quiet=True)).train(stop=stop)
    assert main(["train", str(cut.file)]) == 0
    assert losses(cut.output) == losses(whole.output)


def use_gpt_neo(run, source):
    from transformers import GPTNeoConfig

    config = GPTNeoConfig(
        vocab_size=320, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64, window_size=8, attention_dropout=0.1, resid_dropout=0.1, embed_dropout=0.1,
    )  # fmt: skip
    config.save_pretrained(source)
    text = run.file.read_text()
    run.file.write_text(f'[model]\nsource = "{source}"\n' + text[text.index("[data]") :])


def test_a_signal_before_the_first_step_ends_the_run_with_75():
    with pytest.raises(RunStopped, match="before the first step") as stopped, StopRequest():
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.exit_code == 75


def signalled():
    signal.raise_signal(signal.SIGTERM)


def swallowing(*args, **settings):
    with contextlib.suppress(Exception):
        signalled()
    raise InputError("the library says: your input is wrong")


def translating(*args, **settings):
    try:
        signalled()
    except BaseException as error:
        raise InputError("the library says: your input is wrong") from error


@pytest.mark.parametrize("library", [swallowing, translating])
def test_a_signal_inside_a_library_that_catches_exceptions_is_75_as_well(tiny_run, monkeypatch, capsys, library):
    monkeypatch.setattr(setup, "prepare_all", library)
    assert main(["train", str(tiny_run().file)]) == 75
    assert "stopped by SIGTERM before the first step" in capsys.readouterr().err


def test_while_training_a_signal_waits_a_second_sigterm_changes_nothing_and_a_second_sigint_is_at_once():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        stop.training()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.received == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_schedulers_notice_stops_a_run_unless_the_program_has_a_use_for_it(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with StopRequest() as stop:
            stop.training()
            signal.raise_signal(number)
            assert stop.received == number.name
        assert signal.getsignal(number) == signal.SIG_DFL
        for taken in (signal.SIG_IGN, taken_by_the_program):
            signal.signal(number, taken)
            with StopRequest() as stop:
                stop.training()
                signal.raise_signal(number)
                assert stop.received is None
                assert signal.getsignal(number) == taken
        signal.signal(number, signal.SIG_DFL)
        with StopRequest() as outer, pytest.raises(RunStopped, match=f"stopped by {number.name} before"), StopRequest():
            signal.raise_signal(number)
        assert outer.received is None
    finally:
        signal.signal(number, before)


def taken_by_the_program(number, frame):
    """A handler of a user's script, such as one that prints the stack."""


def test_ranks_that_nobody_started_are_refused(tiny_run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = tiny_run()
    with pytest.raises(InputError, match=r"WORLD_SIZE = 2 in the environment, but RANK, .* start the ranks with torchrun"):
        Trainer(RunConfig.from_file(run.file), console=Console(quiet=True)).train()
    assert not run.output.exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.config.attention_dropout=0.1"], r"model\.config\.attention_dropout = 0\.1 .*Set .* = 0\.0"),
        (["model.blocks=own"], "LlamaForCausalLM runs its original code"),
        (["model.config.hidden_size=48", "model.config.num_attention_heads=3", "model.config.num_key_value_heads=1",
          "parallel.cp_comm_type=a2a"], "3 query heads with 1 key-value heads do not divide\\. .*degree of 1, or cp_comm_type"),
        (["parallel.hybrid_shard_degree=1"], "context 2 does not divide hybrid_shard 1"),
    ],
)  # fmt: skip
def test_what_cannot_share_a_sequence_is_refused(tiny_run, monkeypatch, overrides, words):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    run = tiny_run()
    exact = ["model.config.attention_dropout=0.0", "parallel.context_parallel_degree=2"]
    with pytest.raises(InputError, match=words):
        Trainer(RunConfig.from_file(run.file, [*exact, *overrides]), console=Console(quiet=True)).train()
    assert not run.output.exists()


def test_a_bf16_run_of_other_settings_is_not_compared_with(tiny_run, capsys):
    run = tiny_run(steps=3)
    compare = "train.compare_bf16=true"
    assert main(["train", str(run.file), compare]) == 0
    shutil.rmtree(run.output / "checkpoints")  # the run begins anew; what lies beside it does not
    capsys.readouterr()
    assert main(["train", str(run.file), compare, "optimizer.lr=1e-2"]) == 2
    err = capsys.readouterr().err
    assert f"the run in '{run.output / 'bf16'}' was started with other settings: optimizer.lr was 0.003 and is now 0.01" in err
    assert f"move '{run.output / 'bf16'}' away" in err
    assert not (run.output / "checkpoints").exists()  # said before anything was trained
    assert main(["train", str(run.file), compare]) == 0
    shutil.rmtree(run.output / "bf16")
    assert main(["train", str(run.file), compare]) == 0


def test_a_run_is_exported_after_its_source_is_gone(tiny_run, tmp_path):
    run = tiny_run(steps=2)
    use_gpt_neo(run, tmp_path / "neo")
    assert main(["train", str(run.file)]) == 0
    shutil.rmtree(tmp_path / "neo")
    assert main(["export", str(run.output), "--to", str(tmp_path / "out")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.config.window_size == 8
    weights = StoredWeights(run.output / "checkpoints" / "step-2")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_export_reads_the_checkpoint_for_its_sums_once(tiny_run, tmp_path, monkeypatch):
    run = tiny_run(steps=2)
    assert main(["train", str(run.file)]) == 0
    summed = []
    whole = opened.OpenFolder._hash
    monkeypatch.setattr(opened.OpenFolder, "_hash", lambda self, name, size: summed.append(name) or whole(self, name, size))
    monkeypatch.setattr(opened, "_SETTLED", 0)  # the files of a run that ended just now
    octavo.export(run.output, tmp_path / "out")
    assert sorted(set(summed)) == sorted(summed)
    assert "state.json" in summed


@pytest.mark.parametrize("key", ["threads", "device"])
def test_a_run_that_continues_on_another_machine_says_that_bits_may_differ(tiny_run, monkeypatch, capsys, key):
    run = tiny_run(steps=4)
    stop = StopRequest()
    stop.received = "SIGTERM"
    with pytest.raises(RunStopped):
        Trainer(RunConfig.from_file(run.file), console=Console(quiet=True)).train(stop=stop)
    before = loop.run_layout
    monkeypatch.setattr(loop, "run_layout", lambda plan: before(plan) | {key: "another"})
    capsys.readouterr()
    assert main(["train", str(run.file)]) == 0
    err = capsys.readouterr().err
    assert f"{key} was " in err
    assert "is now another" in err
    assert "in the last bits" in err
    assert err.count("\n") == 1


def test_a_run_that_continues_with_other_validations_says_so(tiny_run, capsys):
    run = tiny_run(steps=6)
    constant = ["optimizer.schedule=constant", "optimizer.warmup_steps=0"]
    for steps, batches, changed in ((2, 1, False), (4, 1, False), (6, 2, True)):
        assert main(["train", str(run.file), f"train.steps={steps}", f"train.validate_batches={batches}", *constant]) == 0
        said = capsys.readouterr().err
        assert (f"{VALIDATED} was 2 and is now 4" in said) == changed
        assert "in the last bits" not in said


def test_the_code_version_is_octavos_own_and_not_that_of_a_repository_around_it(tmp_path, monkeypatch):
    package = tmp_path / "venv" / "octavo"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "theirs.py").write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "theirs.py"], ["commit", "-qm", "theirs"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "run" / "provenance.py"))
    assert provenance.code_version() is None
    for command in (["add", "-f", "."], ["commit", "-qm", "ours"]):
        subprocess.run([*git, *command], check=True)
    assert re.fullmatch("[0-9a-f]{40}", provenance.code_version())


@pytest.mark.long(lambda recorded: not recorded)
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "before-it-was-recorded"])
def test_a_run_whose_checkpoint_is_of_the_models_own_code_continues_with_it(tiny_run, tmp_path, capsys, recorded):
    from transformers import MistralConfig

    losses = []
    for name in ("own", "continued"):
        run = tiny_run(name, steps=4, every=2)
        config = MistralConfig(
            vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, sliding_window=None,
        )  # fmt: skip
        config.save_pretrained(tmp_path / f"{name}-mistral")
        text = run.file.read_text()
        text = f'[model]\nsource = "{tmp_path / name}-mistral"\n' + text[text.index("[data]") :]
        run.file.write_text(text)
        assert main(["train", str(run.file), "model.blocks=own"]) == 0
        if name == "continued":
            # As a version wrote it that gave Mistral no blocks: nothing says so but the names in the checkpoint.
            shutil.rmtree(run.output / "checkpoints" / "step-4")
            file = run.output / "run.toml"
            file.write_text(file.read_text().replace('blocks = "own"\n', 'blocks = "auto"\n' if recorded else ""))
            assert main(["train", str(run.file)]) == 0
            assert "original code" in capsys.readouterr().out
            names = StoredWeights(run.output / "checkpoints" / "step-4").keys()
            assert "model.layers.0.self_attn.q_proj.weight" in names
            assert 'blocks = "auto"' in (run.output / "run.toml").read_text()
        losses.append([json.loads(line)["loss"] for line in (run.output / "metrics.jsonl").read_text().splitlines()])
    assert losses[0] == losses[1]
    fresh = tiny_run("fresh", steps=2)
    fresh.file.write_text(text.replace(str(run.output), str(fresh.output)))
    assert main(["train", str(fresh.file), "train.steps=2"]) == 0
    assert "layers.0.self_attention.layernorm_qkv.weight" in StoredWeights(fresh.output / "checkpoints" / "step-2")


def test_compiled_blocks_are_refused_with_the_way_out(tiny_run, capsys):
    run = tiny_run()
    assert main(["train", str(run.file), "train.compile=true"]) == 2
    assert 'Set train.compile = false, or "auto".' in capsys.readouterr().err
    assert not run.output.exists()


def _with_source(run, folder, **ids):
    """Train from a folder with these token ids in its config, instead of the built-in shape."""
    LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        **ids,
    ).save_pretrained(folder)
    text = run.file.read_text()
    run.file.write_text(f'[model]\nsource = "{folder}"\n' + text[text.index("[data]") :])
    return folder


def _exported(run, to):
    """The config, generation config, model and tokenizer that transformers loads from an export."""
    octavo.export(run.output, to)
    model = AutoModelForCausalLM.from_pretrained(to)
    return AutoConfig.from_pretrained(to), GenerationConfig.from_pretrained(to), model, AutoTokenizer.from_pretrained(to)


@pytest.mark.parametrize("pad", [None, 7])
def test_an_export_has_the_ids_of_the_trained_tokenizer_and_generation_stops(tiny_run, tmp_path, pad):
    run = tiny_run(steps=3)
    source = _with_source(run, tmp_path / "source", bos_token_id=318, eos_token_id=[2, 319], pad_token_id=pad)
    GenerationConfig(bos_token_id=318, eos_token_id=[2, 319], pad_token_id=pad).save_pretrained(source)
    assert main(["train", str(run.file)]) == 0
    shutil.rmtree(source)
    config, generation, model, tokenizer = _exported(run, tmp_path / "out")
    assert tokenizer.eos_token_id == 0
    for found in (config, generation, model.config, model.generation_config, tokenizer):
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (0, 0, None)
    for token, tokens in ((9, [5, 6, 9, 9, 9, 9]), (0, [5, 6, 0])):
        made = model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False, sequence_bias={(token,): 1e4})
        assert made[0].tolist() == tokens


def test_the_row_of_the_pad_of_another_vocabulary_is_trained(tiny_run, tmp_path):
    """Token 78 is a letter of the trained tokenizer: with and without it as the source's pad the run is the same."""
    found = []
    for name, pad in (("with", 78), ("without", None)):
        run = tiny_run(name, steps=3)
        _with_source(run, tmp_path / f"{name} source", bos_token_id=1, eos_token_id=2, pad_token_id=pad)
        assert main(["train", str(run.file)]) == 0
        found.append(losses(run.output))
        weights = StoredWeights(run.output / "checkpoints" / "step-3")
        found.append(weights["embedding.weight"])
    assert found[0] == found[2]
    assert torch.equal(found[1], found[3])


def test_a_run_with_its_models_tokenizer_keeps_the_models_ids(tiny_run, tmp_path):
    run = tiny_run(steps=2)
    source = _with_source(run, tmp_path / "source", bos_token_id=1, eos_token_id=2, pad_token_id=4)
    values = {
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": 4,
        "top_k": 3,
    }  # without do_sample, as some of the Hub's
    (source / "generation_config.json").write_text(json.dumps(values))
    names = ["<unk>", "<s>", "</s>", "<|turn|>", "<pad>"]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate([*names, "a", "scale"])}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(names)
    made.save(str(source / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|turn|>", "unk_token": "<unk>"}
    (source / "tokenizer_config.json").write_text(json.dumps(values))
    assert main(["train", str(run.file), f"data.tokenizer={source}"]) == 0
    config, generation, _, tokenizer = _exported(run, tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, [2, 3], 4)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, [2, 3], 4)
    assert (generation.top_k, tokenizer.eos_token_id) == (3, 3)


def test_an_id_of_the_run_file_that_is_not_the_tokenizers_is_refused(tiny_run, capsys):
    run = tiny_run(steps=2)
    assert main(["train", str(run.file), "model.config.eos_token_id=5"]) == 2
    err = capsys.readouterr().err
    assert "model.config.eos_token_id = 5, but the run's tokenizer has 0" in err
    assert not (run.output / "metrics.jsonl").exists()
    assert main(["train", str(run.file), "model.config.eos_token_id=0"]) == 0


def test_validation_without_a_split_is_refused_before_any_work(tiny_run, capsys):
    run = tiny_run(steps=2)
    none = "data.validation_fraction=0"
    assert main(["train", str(run.file), none, "train.validate_every=1"]) == 2
    assert "train.validate_every = 1 has no effect with data.validation_fraction = 0.0" in capsys.readouterr().err
    assert not run.output.exists()


def test_weights_with_a_tokenizer_trained_here_are_said(tiny_run, tmp_path, capsys):
    run = tiny_run(steps=2)
    source = _with_source(run, tmp_path / "source", bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    assert main(["train", str(run.file), "model.load=true"]) == 0
    assert f"data.tokenizer = {str(source)!r} is their tokenizer" in " ".join(capsys.readouterr().out.split())
