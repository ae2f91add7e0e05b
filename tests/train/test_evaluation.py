"""`train.eval` with functions: figures over ranks, a training that is unchanged whatever they do, and what is refused."""

import importlib.util
import random

import numpy as np
import pytest
import torch
from rich.console import Console

import octavo
import ranks
from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.run.metrics import read_metrics
from octavo.train.evaluation import figures_of, load_function

FUNCTIONS = '''
import os, random
import numpy as np
import torch
import octavo

IDS = torch.arange(64).view(2, 32) % 300

def disturbing(model, step):
    """All that an evaluation may do to a run: random numbers, gradients, training mode, FP8 amaxes, a switched mode."""
    torch.manual_seed(step); np.random.seed(1); random.seed(2)
    torch.nn.functional.dropout(torch.ones(9))
    assert not model.training and not torch.is_grad_enabled()
    first = model(input_ids=IDS, labels=IDS).loss
    model.train()
    with torch.enable_grad(), octavo.fp8_autocast():
        loss = model(input_ids=IDS * 3 % 300, labels=IDS).loss * 1000
        loss.backward()
    model.eval()
    return {"loss": first, "step": np.float32(step), "mode": True}

def ranked(model, step):
    return {"rank": float(os.environ.get("RANK", 0)) + step}

def share(model, step):
    return {"share": float(octavo.state.dp_rank + 1)}

def writing(model, step):
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    return {}

def swapping(model, step):
    parameter = next(model.parameters())
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.mul_(2)
        parameter.copy_(kept)
    return {"swapped": 1}

def failing(model, step):
    raise KeyError("no such key")

def words(model, step):
    return {"loss": "low"}

def other(step):
    return {}
'''


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "my_eval.py"
    file.write_text(FUNCTIONS)
    return file


def train(file, overrides):
    return octavo.Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train().summary.loss


def records(run):
    return read_metrics(run.output / "metrics.jsonl")


@pytest.mark.long(lambda recipe: recipe == "current")
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_training_has_the_same_bits_whatever_an_evaluation_does(recipe, functions, tiny_run):
    plain, checked = (tiny_run(name, steps=5, every=3) for name in ("plain", "checked"))
    given = [f"fp8.recipe={recipe}", "optimizer.schedule=constant"]
    assert main(["train", str(plain.file), *given]) == 0
    asked = [*given, f"train.eval={functions}:disturbing", "train.eval_every=2"]
    assert main(["train", str(checked.file), *asked, "train.steps=3"]) == 0
    assert main(["train", str(checked.file), *asked]) == 0
    for key in ("loss", "grad_norm"):
        assert [r[key].hex() for r in records(checked)] == [r[key].hex() for r in records(plain)]
    found = {r["step"]: r for r in records(checked) if "evaluation/loss" in r}
    assert set(found) == {2, 3, 4, 5}  # the last step of each start too
    assert found[4]["evaluation/step"] == 4.0
    assert found[5]["evaluation/mode"] == 1.0


def of_ranks(functions):
    """What two ranks make of functions, and of errors on one of them."""
    found = {}
    octavo.init()
    model = torch.nn.Linear(2, 2)
    own = {name: load_function(f"{functions}:{name}") for name in ("share",)}
    for reduce in ("same", "mean", "sum"):
        try:
            found[reduce] = figures_of("share", own["share"], model, 1, reduce)
        except InputError as error:
            found[reduce] = str(error)

    def on_one(model, step):
        if octavo.state.rank == 1:
            raise ValueError("lost")
        return {"a": 1.0}

    def other_names(model, step):
        return {f"a{octavo.state.rank}": 1.0}

    for name, function in (("on_one", on_one), ("other_names", other_names)):
        try:
            found[name] = figures_of(name, function, model, 1, "mean")
        except Exception as error:
            found[name] = f"{error} {getattr(error, '__notes__', '')}"
    octavo.shutdown()
    return found


def test_figures_are_the_same_on_all_ranks_or_reduced(functions):
    first, second = ranks.run(2, of_ranks, functions)
    assert first["mean"] == second["mean"] == {"evaluation/share": 1.5}
    assert first["sum"] == second["sum"] == {"evaluation/share": 3.0}
    for found in (first, second):
        assert "share returned share = 1.0 on rank 0 and 2.0 on rank 1. Reduce it over ranks, or set" in found["same"]
        assert "other_names returned a0 on rank 0 and a1 on rank 1" in found["other_names"]
        assert "lost" in found["on_one"]
    assert "raised in on_one at step 1" in second["on_one"]


@pytest.mark.long
def test_a_sharded_run_evaluates_the_model_itself(functions, tiny_run):
    exact = ["model.dtype=float32", "fp8.enabled=false", "model.config.attention_dropout=0.0", "train.micro_batch=1"]
    given = [*exact, f"train.eval={functions}:disturbing", "train.eval_every=2"]
    one, two = (tiny_run(name, steps=3) for name in ("one", "two"))
    train(one.file, given)
    ranks.run(2, train, two.file, given)
    for mine, theirs in zip(records(two), records(one), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine.get("evaluation/loss", 0) == pytest.approx(theirs.get("evaluation/loss", 0), rel=1e-5)


def test_the_best_checkpoint_is_by_a_figure(tiny_run, tmp_path):
    run = tiny_run(steps=6)
    values = iter([0.1, 0.7, 0.3, 0.9, 0.2, float("nan")])
    octavo.Trainer(
        run.file,
        console=Console(quiet=True),
        evaluate=lambda model, step: {"accuracy": next(values)},
        train={"eval_every": 1},
        checkpoint={"best": "evaluation/accuracy", "best_is": "highest", "keep": 1},
    ).train()
    assert sorted(path.name for path in (run.output / "checkpoints").iterdir()) == ["step-4", "step-6"]
    lacking = tiny_run("lacking", steps=2)
    with pytest.raises(
        InputError, match=r"checkpoint\.best = 'evaluation/accuracy', but the evaluations at step 1 gave evaluation/f1"
    ):
        octavo.Trainer(
            lacking.file,
            console=Console(quiet=True),
            evaluate=lambda model, step: {"f1": 1.0},
            train={"eval_every": 1},
            checkpoint={"best": "evaluation/accuracy", "best_is": "highest"},
        ).train()


def test_what_an_evaluation_may_not_do_is_refused_by_its_name(functions, tiny_run, capsys):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))

    def call(name):
        return figures_of(f"train.eval = {name!r}", load_function(f"{functions}:{name}"), model, 3, "same")

    assert call("swapping") == {"evaluation/swapped": 1.0}
    with pytest.raises(InputError, match=r"train\.eval = 'writing' changed 0\.weight of the model"):
        call("writing")
    with pytest.raises(KeyError) as raised:
        call("failing")
    assert raised.value.__notes__ == ["raised in train.eval = 'failing' at step 3"]
    with pytest.raises(InputError, match=r"'words' returned loss = 'low': give a number"):
        call("words")

    def normalised(model, step):
        model.train()
        model(torch.ones(4, 2))
        return {}

    with pytest.raises(InputError, match=r"bn changed 1\.running_mean of the model"):
        figures_of("bn", normalised, model, 1, "same")

    def unfreezing(model, step):
        model[0].weight.requires_grad_(False)
        return {}

    with pytest.raises(InputError, match=r"set requires_grad of 0\.weight"):
        figures_of("it", unfreezing, model, 1, "same")
    run = tiny_run(steps=1)
    for given, words in (
        (f"train.eval={functions}:disturbin", "Did you mean 'disturbing'"),
        (f"train.eval={functions}:other", "cannot be called with model and step"),
        ("train.eval=nowhere.py:other", "there is no file"),
        ("train.eval=my_eval.other", "is neither a function nor a task"),
        (f'train.eval=["{functions}:ranked", "{functions}:ranked"]', "is listed twice"),
        ("train.eval=lm-eval:arc", "needs lm-eval: pip install 'octavo[eval]'"),
        ("checkpoint.best=evaluation/acc", "needs checkpoint.best_is"),
    ):
        if words.startswith("needs lm-eval") and importlib.util.find_spec("lm_eval") is not None:
            continue
        assert main(["train", str(run.file), given, *(["train.validate_every=1"] if "best" in given else [])]) == 2
        assert words in " ".join(capsys.readouterr().err.split()), given


def test_random_numbers_of_an_evaluation_are_put_back():
    model = torch.nn.Linear(2, 2)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    first = (torch.rand(3), random.random(), np.random.rand())
    torch.manual_seed(5), random.seed(5), np.random.seed(5)

    def drawing(model, step):
        torch.rand(7), random.random(), np.random.rand(3)
        return {}

    figures_of("it", drawing, model, 1, "same")
    then = (torch.rand(3), random.random(), np.random.rand())
    assert torch.equal(first[0], then[0])
    assert first[1:] == then[1:]
