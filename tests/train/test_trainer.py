"""`octavo.Trainer`: the run of a run file as an object, with callbacks, an evaluation, an early end and the best checkpoint."""

import json
import random
import tomllib

import numpy as np
import pytest
import torch
from rich.console import Console

import octavo
from octavo import versions
from octavo.cli import main
from octavo.errors import InputError
from octavo.run.metrics import read_metrics
from octavo.train import setup
from octavo.train.callbacks import CallbackEvents
from octavo.train.evaluate import Validation


def losses(output):
    return [(r["step"], r["loss"].hex()) for r in read_metrics(output / "metrics.jsonl")]


def kept(output):
    return sorted(int(path.name.removeprefix("step-")) for path in (output / "checkpoints").iterdir())


def trainer_of(run, **more):
    return octavo.Trainer(run.file, console=Console(quiet=True), **more)


class Events(octavo.Callback):
    """Writes down every event, and draws random numbers to disturb the run."""

    def __init__(self):
        self.seen = []

    def disturb(self):
        torch.rand(3), np.random.rand(), random.random()

    def on_step(self, trainer, record):
        self.disturb()
        assert trainer.step == record["step"]
        assert trainer.model is not None
        self.seen.append(("step", record["step"]))

    def on_validation(self, trainer, record):
        self.seen.append(("validation", record["step"], round(record["validation_loss"], 4)))

    def on_checkpoint(self, trainer, path):
        assert (path / "manifest.json").is_file()
        self.seen.append(("checkpoint", path.name))

    def on_end(self, trainer, result):
        self.seen.append(("end", result.summary.steps))


def test_a_trainer_has_the_numbers_of_the_command_whatever_its_callbacks_and_evaluation_draw(tiny_run, tmp_path):
    run = tiny_run(steps=4, every=2)
    assert main(["train", str(run.file), "train.validate_every=3", f"train.output={tmp_path / 'command'}"]) == 0
    events, modes = Events(), []

    def evaluate(model, step):
        events.disturb()
        modes.append((step, model.training, torch.is_grad_enabled()))
        return {"accuracy": torch.tensor(0.25), "steps": step}

    trainer = trainer_of(run, callbacks=[events], evaluate=evaluate, train={"validate_every": 3})
    result = trainer.train()
    assert losses(run.output) == losses(tmp_path / "command")
    assert modes == [(3, False, False), (4, False, False)]
    records = read_metrics(run.output / "metrics.jsonl")
    assert [r.get("evaluation/accuracy") for r in records] == [None, None, 0.25, 0.25]
    assert records[3]["evaluation/steps"] == 4
    assert trainer.model.training
    validation = [round(r["validation_loss"], 4) for r in records[2:]]
    assert events.seen == [
        ("step", 1), ("step", 2), ("checkpoint", "step-2"), ("step", 3), ("validation", 3, validation[0]), ("step", 4),
        ("validation", 4, validation[1]), ("checkpoint", "step-4"), ("end", 4),
    ]  # fmt: skip
    assert result.summary.validation_loss == records[-1]["validation_loss"]
    assert result.ended_early == ""


def test_keywords_alone_make_a_run(tiny_run):
    run = tiny_run(steps=2)
    sections = tomllib.loads(run.file.read_text())
    result = octavo.Trainer(console=Console(quiet=True), **sections).train()
    assert result.folder == run.output
    assert main(["train", str(run.file), f"train.output={run.folder / 'file'}"]) == 0
    assert losses(run.output) == losses(run.folder / "file")


def test_keywords_go_into_the_tables_of_the_file(tiny_run):
    trainer = trainer_of(tiny_run(), model={"config": {"num_hidden_layers": 1}}, optimizer={"lr": 1e-4})
    assert trainer.config.model.config["hidden_size"] == 32
    assert trainer.config.model.config["num_hidden_layers"] == 1
    assert trainer.config.optimizer.lr == 1e-4


class StopAt(octavo.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, record):
        if record["step"] == self.step:
            trainer.stop()


def test_a_callback_ends_the_run_which_is_saved_and_continues(tiny_run, tmp_path):
    run = tiny_run(steps=4)
    assert main(["train", str(run.file), f"train.output={tmp_path / 'whole'}"]) == 0
    result = trainer_of(run, callbacks=[StopAt(2)], train={"compare_bf16": True}).train()
    assert result.ended_early == "by Trainer.stop"
    assert result.summary.steps == 2
    assert result.bf16 is None
    assert kept(run.output) == [2]
    assert trainer_of(run).train().ended_early == ""
    assert losses(run.output) == losses(tmp_path / "whole")


def test_an_untested_version_is_said_once_by_a_run_and_its_twin(tiny_run, monkeypatch, capsys):
    monkeypatch.setitem(versions.TESTED, "triton", ((1, 0), (1, 1)))
    setup._warn_of_untested_versions.cache_clear()
    trainer_of(tiny_run(steps=1), train={"compare_bf16": True}).train()
    setup._warn_of_untested_versions.cache_clear()
    said = capsys.readouterr().err
    assert said.count("was not tested with Octavo; versions 1.0 to 1.1 were: pip install 'triton>=1.0,<1.2'") == 1


def worsening(monkeypatch, values):
    """Validation losses of a run, given by step."""
    monkeypatch.setattr("octavo.train.loop.validate", lambda context, batches: Validation(values[0], values.pop(0)))


def test_early_stopping_ends_the_run_for_good_and_keeps_the_best_checkpoint(tiny_run, monkeypatch, capsys):
    run = tiny_run(steps=12)
    arguments = ["train", str(run.file), "train.validate_every=1", "train.early_stopping=3", "checkpoint.best=true"]
    worsening(monkeypatch, [5.0, 4.0, float("nan"), 4.5, 4.0, 3.0])
    assert main([*arguments, "checkpoint.keep=1"]) == 0
    assert "ended at step 5 of 12: train.early_stopping = 3: the lowest validation loss was 4.0000 at step 2" in " ".join(
        capsys.readouterr().out.split()
    )
    assert kept(run.output) == [2, 5]
    before = losses(run.output)
    assert main([*arguments, "--json"]) == 0  # it has ended
    assert losses(run.output) == before
    ended = json.loads(capsys.readouterr().out)
    assert (ended["run"]["steps"], ended["best_step"]) == (5, 2)
    more = [argument.replace("early_stopping=3", "early_stopping=4") for argument in arguments]
    worsening(monkeypatch, [3.9, 5.0, 5.0, 5.0, 5.0, 5.0])
    assert main([*more, "checkpoint.keep=1"]) == 0
    assert kept(run.output) == [6, 10]


def test_what_a_trainer_refuses(tiny_run):
    run = tiny_run()
    with pytest.raises(InputError, match=r"Did you mean optimizer\.lr"):
        trainer_of(run, optimizer={"lrr": 1e-4})
    with pytest.raises(InputError, match="a section is a dict"):
        trainer_of(run, train=3)
    with pytest.raises(InputError, match=r"not an octavo\.Callback"):
        trainer_of(run, callbacks=[print])
    with pytest.raises(InputError, match="a function of model and step"):
        trainer_of(run, evaluate=3)
    with pytest.raises(InputError, match="no training is running"):
        trainer_of(run).stop()
    with pytest.raises(InputError, match="the RunConfig alone"):
        octavo.Trainer(trainer_of(run).config, train={"steps": 3})
    with pytest.raises(InputError, match="returned list"):
        trainer_of(run, evaluate=lambda model, step: [1.0]).train()
    for name in ("", " ", 3, None):
        with pytest.raises(InputError, match=f"returned the name {name!r}: a name is text"):
            CallbackEvents(trainer_of(run), (), lambda model, step, name=name: {name: 1.0}).evaluate(torch.nn.Linear(1, 1), 1)
    with pytest.raises(InputError, match="returned x = 'high'"):
        trainer_of(tiny_run("other"), evaluate=lambda model, step: {"x": "high"}).train()
    with pytest.raises(InputError, match=r"train\.early_stopping = 2 has no effect"):
        trainer_of(run, train={"early_stopping": 2})
    with pytest.raises(InputError, match=r"train\.steps, train\.tokens or train\.epochs"):
        octavo.Trainer(model={"source": "llama-tiny"}, data={"source": "x", "sequence_length": 8}, train={"global_batch": 1})


class Failing(octavo.Callback):
    def on_step(self, trainer, record):
        if record["step"] == 3:
            raise KeyError("a typing error")


def failing_evaluation(model, step):
    raise KeyError("a typing error")


@pytest.mark.parametrize("user", [{"callbacks": [Failing()]}, {"evaluate": failing_evaluation}], ids=["callback", "evaluate"])
def test_a_users_error_loses_no_step(tiny_run, tmp_path, user):
    run = tiny_run(steps=4)
    assert main(["train", str(run.file), "train.validate_every=3", f"train.output={tmp_path / 'whole'}"]) == 0
    with pytest.raises(KeyError, match="typing error"):
        trainer_of(run, train={"validate_every": 3}, **user).train()
    assert kept(run.output) == [3]
    assert len(losses(run.output)) == 3
    trainer_of(run, train={"validate_every": 3}).train()
    assert losses(run.output) == losses(tmp_path / "whole")


def test_a_finished_run_has_its_last_step_and_nothing_to_stop(tiny_run):
    run = tiny_run(steps=3)
    trainer = trainer_of(run, callbacks=[Failing()])
    with pytest.raises(KeyError, match="typing error"):
        trainer.train()
    with pytest.raises(InputError, match="no training is running"):
        trainer.stop()
    again = trainer_of(run)
    again.train()
    assert again.step == 3
    with pytest.raises(InputError, match="no training is running"):
        again.stop()


def test_gradients_of_an_evaluation_enter_no_step(tiny_run, tmp_path):
    run = tiny_run(steps=3)
    given = {"validate_every": 1}
    assert main(["train", str(run.file), "train.validate_every=1", f"train.output={tmp_path / 'whole'}"]) == 0

    def evaluate(model, step):
        ids = torch.arange(16)[None]
        with torch.enable_grad():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        return {"loss": loss}

    trainer_of(run, evaluate=evaluate, train=given).train()
    assert losses(run.output) == losses(tmp_path / "whole")


class Freezing(octavo.Callback):
    """Keeps the first block without dropout from step 1 on."""

    def on_step(self, trainer, record):
        if record["step"] == 1:
            trainer.model.layers[0].eval()


def test_modules_in_evaluation_mode_stay_so_after_a_validation(tiny_run):
    plain, validated = tiny_run("plain", steps=4), tiny_run("validated", steps=4)
    trainer_of(plain, callbacks=[Freezing()]).train()
    trainer = trainer_of(validated, callbacks=[Freezing()], evaluate=lambda model, step: {}, train={"validate_every": 1})
    trainer.train()
    assert losses(validated.output) == losses(plain.output)
    assert not trainer.model.layers[0].training
    assert trainer.model.layers[1].training


def test_a_moved_run_is_the_one_that_continues(tiny_run, tmp_path, capsys):
    run = tiny_run(steps=4)
    constant = "optimizer.schedule=constant"
    assert main(["train", str(run.file), constant]) == 0
    moved = tmp_path / "moved"
    run.output.rename(moved)
    assert main(["train", str(moved / "run.toml"), "train.steps=6"]) == 0
    assert "belongs to the run in its folder" in capsys.readouterr().err
    assert len(losses(moved)) == 6
    assert not run.output.exists()


def test_no_export_among_the_checkpoints(tiny_run, capsys):
    run = tiny_run(steps=1)
    assert main(["train", str(run.file)]) == 0
    assert main(["export", str(run.output), "--to", str(run.output / "checkpoints" / "step-15")]) == 2
    assert "among the run's checkpoints" in capsys.readouterr().err


def test_a_decay_that_begins_too_early_is_said(tiny_run, capsys):
    run = tiny_run(steps=4)
    assert main(["train", str(run.file), "optimizer.schedule=wsd", "optimizer.decay_steps=3", "--dry-run"]) == 0
    assert "before step 2 of the full rate" in capsys.readouterr().err


def callback_with(**methods):
    return type("Mine", (octavo.Callback,), methods)()


async def waiting(self, trainer, record):
    """Nothing would wait for it."""


def yielding(self, trainer, record):
    """A call of it runs nothing."""
    yield


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        (
            {"on_step_ends": lambda self, trainer, record: None},
            r"Mine\.on_step_ends would never be called.*Did you mean on_step\?",
        ),
        ({"on_step_end": lambda self, trainer, record: None}, r"Did you mean on_step\?"),
        ({"on_validate": lambda self, trainer, record: None}, r"Did you mean on_validation\?"),
        ({"onCheckpoint": lambda self, trainer, path: None}, r"Did you mean on_checkpoint\?"),
        ({"onstep": lambda self, trainer, record: None}, r"Did you mean on_step\?"),
        ({"on_save": lambda self, trainer, path: None}, r"Events are on_step, on_validation, on_checkpoint, on_end;"),
        ({"on_step": lambda self, record: None}, r"Mine\.on_step\(record\) cannot be called as on_step\(trainer, record\)"),
        ({"on_end": None}, r"Mine\.on_end is None, which cannot be called: define on_end\(trainer, result\)"),
        ({"on_step": waiting}, r"Mine\.on_step is async"),
        ({"on_step": yielding}, r"Mine\.on_step has a yield"),
        ({"state_dict": lambda self: {}}, r"Mine has state_dict without load_state_dict"),
        ({"load_state_dict": lambda self, state: None}, r"Mine has load_state_dict without state_dict"),
        (
            {"state_dict": lambda self, destination: {}, "load_state_dict": lambda self, state: None},
            r"Mine\.state_dict\(destination\) cannot be called as state_dict\(\)",
        ),
    ],
)
def test_a_callback_that_would_not_be_called_is_refused(tiny_run, methods, said):
    with pytest.raises(InputError, match=said):
        trainer_of(tiny_run(), callbacks=[callback_with(**methods)])


def set_rate(trainer):
    trainer.optimizer.param_groups[0]["lr"] = 1e-5


def set_model(trainer):
    trainer.model = torch.nn.Linear(1, 1)


def set_mode(trainer):
    trainer.model.eval()


def add_group(trainer):
    trainer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_rate, r"set the learning rate of parameter group 0 to 1e-05, and each step sets it by optimizer\.schedule"),
        (set_model, r"set trainer\.model, which the training does not read"),
        (set_mode, r"left the model in evaluation mode: call trainer\.model\.train\(\)"),
        (add_group, r"changed the parameter groups"),
    ],
)
def test_a_setting_that_the_run_would_overwrite_is_refused_with_its_step_saved(tiny_run, change, said):
    run = tiny_run(steps=3)
    callback = callback_with(on_step=lambda self, trainer, record: change(trainer) if record["step"] == 2 else None)
    with pytest.raises(InputError, match=rf"Mine\.on_step {said}"):
        trainer_of(run, callbacks=[callback]).train()
    if change is not add_group:  # its state has no name in a checkpoint
        assert kept(run.output) == [2]
    other = tiny_run("other", steps=2)
    trainer = trainer_of(
        other, train={"validate_every": 1}, evaluate=lambda model, step: {"x": 1.0 if change(trainer) else 2.0}
    )
    if change is not set_mode:  # its evaluation mode is its own
        with pytest.raises(InputError, match=rf"Trainer\(evaluate=…\) {said}"):
            trainer.train()


def test_gradients_of_a_callback_enter_no_step(tiny_run, tmp_path):
    run = tiny_run(steps=3)
    assert main(["train", str(run.file), f"train.output={tmp_path / 'whole'}"]) == 0

    def probe(self, trainer, record):
        for parameter in trainer.model.parameters():
            parameter.sum().backward()

    trainer_of(run, callbacks=[callback_with(on_step=probe)]).train()
    assert losses(run.output) == losses(tmp_path / "whole")


class Patience(octavo.Callback):
    """Ends the run after three steps that have not lowered the loss by much; and keeps one value of each type."""

    def __init__(self):
        self.best, self.since, self.seen = float("inf"), 0, []
        self.others = {"mean": torch.zeros(2, dtype=torch.float64), "pair": (None, True), 3: "text"}

    def on_step(self, trainer, record):
        torch.rand(1)
        self.since = 0 if record["loss"] < self.best - 100 else self.since + 1
        self.best = min(self.best, record["loss"])
        self.others["mean"] += record["loss"] / 3
        self.seen.append(record["step"])
        if self.since > 3:
            trainer.stop()

    def state_dict(self):
        torch.rand(1)
        return {"best": self.best, "since": self.since, "seen": self.seen, "others": self.others}

    def load_state_dict(self, state):
        vars(self).update(state)


@pytest.mark.parametrize("background", [False, True])
def test_the_state_of_callbacks_continues_exactly(tiny_run, tmp_path, capsys, background):
    run = tiny_run(steps=8, every=1)
    settings = {"checkpoint": {"async": background}}
    whole = [Patience(), Patience()]
    whole[1].since = -2
    trainer_of(run, callbacks=whole, train={"output": str(tmp_path / "whole")}, **settings).train()
    cut = [Patience(), Patience()]
    cut[1].since = -2
    with pytest.raises(KeyError, match="typing error"):  # after step 3
        trainer_of(run, callbacks=[*cut, Failing()], **settings).train()
    again = [Patience(), Patience()]
    result = trainer_of(run, callbacks=again, **settings).train()
    assert capsys.readouterr().err == ""
    assert result.ended_early == "by Trainer.stop"
    assert losses(run.output) == losses(tmp_path / "whole")
    for one, other in zip(again, whole, strict=True):
        assert (one.best, one.since, one.seen) == (other.best, other.since, other.seen)
        assert torch.equal(one.others.pop("mean"), other.others.pop("mean"))
        assert one.others == other.others
    assert [len(each.seen) for each in again] == [5, 5]


def test_a_state_without_its_callback_is_said_and_the_other_way_round(tiny_run, capsys):
    run = tiny_run(steps=2)
    trainer_of(run, callbacks=[Patience(), StopAt(1)]).train()
    trainer_of(run, callbacks=[callback_with(state_dict=lambda self: {}, load_state_dict=lambda self, state: None)]).train()
    said = capsys.readouterr().err
    assert "octavo: the checkpoint has no state of the callback Mine, which starts without one.\n" in said
    assert "octavo: the checkpoint has the state of a callback Patience, which this run does not have: it is ignored.\n" in said


def test_a_finished_run_hands_back_the_state_too(tiny_run):
    run = tiny_run(steps=2)
    trainer_of(run, callbacks=[Patience()]).train()
    again = Patience()
    trainer_of(run, callbacks=[again]).train()
    assert again.seen == [1, 2]


def test_a_state_that_no_checkpoint_keeps_is_refused_before_the_first_step(tiny_run):
    run = tiny_run(steps=2)
    values = {"numpy.float64": np.float64(1.0), "numpy.ndarray": np.zeros(2), "builtins.set": {1}, "builtins.type": int}
    for kind, value in values.items():
        callback = callback_with(state_dict=lambda self, value=value: {"x": value}, load_state_dict=lambda self, state: None)
        with pytest.raises(
            InputError, match=rf"Mine\.state_dict\(\) cannot be stored in a checkpoint: \['x'\] is of type {kind}"
        ):
            trainer_of(run, callbacks=[callback]).train()
        assert not (run.output / "checkpoints").exists()


def test_an_error_in_a_state_loses_no_step(tiny_run, tmp_path):
    run = tiny_run(steps=4, every=2)
    assert main(["train", str(run.file), f"train.output={tmp_path / 'whole'}"]) == 0
    calls = []

    def state_dict(self):
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("a typing error")
        return {}

    with pytest.raises(KeyError, match="typing error"):
        trainer_of(run, callbacks=[callback_with(state_dict=state_dict, load_state_dict=lambda self, state: None)]).train()
    assert kept(run.output) == [2]
    trainer_of(run).train()
    assert losses(run.output) == losses(tmp_path / "whole")
