"""`fp8.schedule`: steps without FP8 are those of a run without it, and a run that continues is one that was not stopped."""

import pytest
import torch
from rich.console import Console

import octavo
import ranks
from octavo.build import build_model
from octavo.cli import main
from octavo.config.fp8 import steps_without_fp8
from octavo.config.run import RunConfig
from octavo.fp8.scaling import states_of
from octavo.plan.precision import PrecisionSchedule
from octavo.plan.run import check
from octavo.run.metrics import read_metrics
from octavo.train.trainer import Trainer

GIVEN = ["optimizer.schedule=constant", "model.config.attention_dropout=0.0"]
PLAIN = "fp8.enabled=false"


def scheduled(**steps):
    entries = ", ".join(f'"{when.replace("_", " ")}" = "{pattern}"' for when, pattern in steps.items())
    return f"fp8.schedule={{ {entries} }}"


def run(file, overrides):
    Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train()


def numbers(output):
    return [(record["loss"], record["grad_norm"]) for record in read_metrics(output / "metrics.jsonl")]


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_steps_without_fp8_are_those_of_a_run_without_it(tiny_run, world):
    """To the bit on one rank; shards are gathered in float32 there, whose gradients are not rounded to bf16."""
    found = {}
    for name, more in {
        "plain": [PLAIN],
        "fp8": [],
        "first": [scheduled(first_3="*")],
        "last": ['fp8.schedule={ "last 40%" = "*" }'],
        "head": [scheduled(first_6="head", last_2="layers.*"), "fp8.head=true"],
    }.items():
        tiny = tiny_run(name, steps=6)
        ranks.run(world, run, tiny.file, [*GIVEN, *more] if name != "head" else [*GIVEN, *more, "train.steps=7"])
        found[name] = numbers(tiny.output)
    for mine, plain, fp8 in zip(found["first"][:3], found["plain"], found["fp8"], strict=False):
        assert mine == (plain if world == 1 else pytest.approx(plain, rel=1e-3))
        assert mine != fp8
    assert all(found["first"][step] != found["plain"][step] for step in range(3, 6))
    assert found["last"][:4] == found["fp8"][:4]
    assert found["last"][4] != found["fp8"][4]
    assert found["plain"] != found["head"][:6] != found["fp8"]


@pytest.mark.long(lambda recipe: recipe == "block")
@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_a_run_that_continues_keeps_its_schedule(tiny_run, recipe):
    given = [*GIVEN, f"fp8.recipe={recipe}", scheduled(first_4="layers.0.*", first_2="*")]
    whole, stopped = (tiny_run(name, steps=6, every=1) for name in ("whole", "stopped"))
    ranks.run(1, run, whole.file, given)
    for steps in (1, 3, 6):
        ranks.run(1, run, stopped.file, [*given, f"train.steps={steps}"])
    assert numbers(stopped.output) == numbers(whole.output)


def test_layers_of_a_pattern_are_those_of_skip(tiny_run):
    tiny, logits = tiny_run(steps=10), []
    ids = torch.arange(24).view(2, 12) + 5
    for more, steps in (
        (scheduled(first_5="layers.0.*"), (1, 5, 6)),
        ('fp8.skip=["layers.0.*"]', (1,)),
        (scheduled(last_5="*"), (1,)),
    ):
        plan = check(RunConfig.from_file(tiny.file, [*GIVEN, more]))
        model = build_model(plan.hf_config, plan.build_options, device="cpu").eval()
        schedule = PrecisionSchedule(model, plan.config.fp8.schedule, plan.steps)
        for step in steps:
            schedule.begin(step)
            with torch.no_grad(), octavo.fp8_autocast(fp8_recipe=octavo.recipe.CurrentScaling()):
                logits.append(model(input_ids=ids).logits)
    first, fifth, sixth, skipped, whole = logits
    assert torch.equal(first, skipped)
    assert torch.equal(fifth, skipped)
    assert torch.equal(sixth, whole)
    assert not torch.equal(sixth, skipped)
    assert not any(state.paused for _, state in states_of(model))


def test_steps_of_a_key():
    assert steps_without_fp8("first 100", 1000) == range(1, 101)
    assert steps_without_fp8("last 50", 1000) == range(951, 1001)
    assert steps_without_fp8("last 10%", 1000) == range(901, 1001)
    assert steps_without_fp8("first 0.5%", 1000) == range(1, 6)
    assert steps_without_fp8("first 50", 20) == range(1, 21)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([scheduled(frist_3="*")], "'frist 3' is not a range of steps: write \"first 100\""),
        ([scheduled(first_0="*")], "'first 0' is not a range of steps"),
        (['fp8.schedule={ "first 2.5" = "*" }'], "'first 2.5' is not a range of steps"),
        (['fp8.schedule={ "last 101%" = "*" }'], "'last 101%' is not a range of steps"),
        (['fp8.schedule={ "first 2" = "layers.0.atention" }'], "fp8.schedule pattern 'layers.0.atention' matches no FP8 layer"),
        ([scheduled(first_5="*"), PLAIN], "fp8.schedule"),
    ],
    ids=["end", "none", "part", "share", "pattern", "without FP8"],
)
def test_a_schedule_that_cannot_be_is_refused(tiny_run, capsys, more, said):
    tiny = tiny_run(steps=8)
    assert main(["train", str(tiny.file), *more]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not tiny.output.exists()


def test_a_schedule_without_a_step_in_fp8_is_said(tiny_run, capsys):
    file = tiny_run(steps=3).file
    for given, said in (
        (scheduled(first_9="*"), True),
        (scheduled(first_2="*", last_2="*"), True),
        (scheduled(first_2="*", last_2="layers.0.*"), False),
        (scheduled(first_2="*"), False),
    ):
        check(RunConfig.from_file(file, [given]))
        assert ("leaves every layer out of FP8 in all 3 steps" in capsys.readouterr().err) == said, given
