"""Another `[fp8]` section in a run that continues: what is kept to the bit, what begins anew, and what is refused."""

import json
import re

import pytest
import torch
from rich.console import Console

import ranks
from octavo.build import build_model
from octavo.checkpoint.reader import restore
from octavo.cli import main
from octavo.config.fp8 import Fp8Config
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.fp8.scaling import state_records, states_of
from octavo.parallel.coordination import writing_ranks
from octavo.plan import fp8_changes
from octavo.plan.run import check
from octavo.run.metrics import read_metrics
from octavo.run.records import newest_state
from octavo.run.resume import FP8_CHANGES
from octavo.train.trainer import Trainer

GIVEN = ["optimizer.schedule=constant", "optimizer.warmup_steps=0"]
MATRICES = 8
"""Of two blocks; the head beside them."""
CHANGES = {
    # key: (its override and what stays the same), layers that begin anew, layers that keep their state
    "fp8.recipe": (["fp8.recipe=current"], MATRICES + 1, 0),
    "fp8.format": (["fp8.format=E4M3"], MATRICES + 1, 0),
    "fp8.amax_history_len": (["fp8.amax_history_len=2"], MATRICES + 1, 0),
    "fp8.amax_compute_algo": (["fp8.amax_compute_algo=most_recent"], MATRICES + 1, 0),
    "fp8.margin": (["fp8.margin=1"], MATRICES + 1, 0),
    "fp8.fast_accumulation": (["fp8.fast_accumulation=false"], 0, MATRICES + 1),
    "fp8.skip": (['fp8.skip=["layers.0.*"]'], 0, MATRICES // 2 + 1),
    "fp8.layers": (['fp8.layers={ "layers.1.*" = "block", "*.proj" = "bf16" }'], 3, 4),
    "fp8.schedule": (['fp8.schedule={ "last 1" = "*" }'], 0, MATRICES + 1),
    "fp8.head": (["fp8.head=true"], 1, MATRICES),
    "fp8.enabled": (["fp8.enabled=false"], 0, 0),
    "fp8.emulate": (["fp8.emulate=true"], 0, MATRICES + 1),
}


def run(file, overrides):
    Trainer(RunConfig.from_file(file, [*GIVEN, *overrides]), console=Console(quiet=True)).train()


def numbers(output):
    return [(record["loss"], record["grad_norm"]) for record in read_metrics(output / "metrics.jsonl")]


@pytest.fixture(scope="module")
def begun(tiny_run_in, tmp_path_factory):
    """The folder of a run of two steps."""
    tiny = tiny_run_in(tmp_path_factory.mktemp("fp8") / "begun", steps=4)
    run(tiny.file, ["train.steps=2"])
    return tiny


def plan_of(tiny, *overrides):
    return check(RunConfig.from_file(tiny.file, [*GIVEN, *overrides]))


def found(tiny, *overrides):
    before = RunConfig.from_file(tiny.output / "run.toml", recorded=True)
    return fp8_changes.find(plan_of(tiny, *overrides), before, newest_state(tiny.output))


@pytest.mark.parametrize("key", CHANGES)
def test_each_key_says_what_it_drops_and_the_rest_is_kept_to_the_bit(key, begun):
    overrides, begin, kept = CHANGES[key]
    changes = found(begun, *overrides)
    assert list(changes.keys) == [key]
    assert (changes.begin, changes.unchanged) == (begin, kept)
    assert str(changes).startswith(f"{key} was ")
    plan = plan_of(begun, *overrides)
    checkpoint = begun.output / "checkpoints" / "step-2"
    models = []
    for options, fresh in ((plan_of(begun), ()), (plan, changes.fresh)):
        model = build_model(options.hf_config, options.build_options, device="cpu")
        restore(checkpoint, model, None, writing_ranks(), fresh=fresh)
        models.append(model)
    for (name, own), (_, wanted) in zip(models[1].named_parameters(), models[0].named_parameters(), strict=True):
        assert torch.equal(own, wanted), name
    records, before = map(state_records, reversed(models))
    assert {name.rsplit(".", 2)[0] for name in before} >= {name for name, _ in states_of(models[0])}
    left = {name for name in before if name.rsplit(".", 2)[0] not in changes.fresh}
    assert records.keys() == left
    for name in left:
        assert torch.equal(records[name], before[name]), name
    assert not any(
        slot.begun.any() for name, state in states_of(models[1]) if name in changes.fresh for slot in state.slots.values()
    )


@pytest.mark.parametrize("key", ["fp8.recipe", "fp8.margin", "fp8.schedule", "fp8.skip", "fp8.layers", "fp8.head"])
def test_another_model_is_built_only_where_other_layers_are_chosen(key, begun, monkeypatch):
    built = []
    monkeypatch.setattr(fp8_changes, "build_model", lambda *given, **options: built.append(1) or build_model(*given, **options))
    overrides, begin, kept = CHANGES[key]
    changes = found(begun, *overrides)
    assert (changes.begin, changes.unchanged) == (begin, kept)
    assert len(built) == (key in ("fp8.skip", "fp8.layers", "fp8.head"))


def test_every_key_of_the_section_has_a_case_or_needs_current_scaling(begun):
    assert CHANGES.keys() | {"fp8.use_power_2_scales"} == FP8_CHANGES.keys()
    assert {f"fp8.{name}" for name in Fp8Config.model_fields} == FP8_CHANGES.keys()
    assert found(begun, "fp8.use_power_2_scales=true", "fp8.recipe=current").begin == MATRICES + 1


def test_a_run_goes_on_by_another_recipe_as_one_that_reads_its_checkpoint_by_hand(tiny_run, capsys):
    changed, plain, crashed = (tiny_run(name, steps=4) for name in ("changed", "plain", "crashed"))
    current = "fp8.recipe=current"
    run(plain.file, [])
    run(changed.file, ["train.steps=2"])
    assert main(["train", str(changed.file), *GIVEN, current]) == 0
    err = capsys.readouterr().err
    assert "continues with other FP8: fp8.recipe was 'delayed' and is now 'current'." in err
    assert "9 matrices drop their scales and amax histories" in err
    mine, wanted = numbers(changed.output), numbers(plain.output)
    assert mine[:2] == wanted[:2]
    assert mine[2:] != wanted[2:]
    assert mine[2:] == [pytest.approx(each, rel=0.05) for each in wanted[2:]]
    state = newest_state(changed.output)
    assert state["fp8_changes"] == [{"after": 2, "keys": {"fp8.recipe": ["delayed", "current"]}}]
    # A start that ended before its first save has changed the run's file and no checkpoint.
    run(crashed.file, ["train.steps=2"])
    text = (crashed.output / "run.toml").read_text(encoding="utf-8")
    (crashed.output / "run.toml").write_text(re.sub('recipe = "delayed"', 'recipe = "current"', text), encoding="utf-8")
    run(crashed.file, [current])
    assert numbers(crashed.output) == mine


@pytest.mark.long
def test_the_same_change_over_ranks_and_back_to_the_start(tiny_run):
    tiny = tiny_run("several", steps=3)
    run(tiny.file, ["train.steps=1", "fp8.recipe=block"])
    ranks.run(2, run, tiny.file, ["train.steps=2", "fp8.recipe=delayed"])
    run(tiny.file, ["fp8.recipe=block"])
    assert [each["after"] for each in newest_state(tiny.output)["fp8_changes"]] == [1, 2]
    assert len(numbers(tiny.output)) == 3


def test_an_absent_key_keeps_the_value_of_the_run(tiny_run):
    tiny = tiny_run("absent", steps=2)
    run(tiny.file, ["train.steps=1", "fp8.recipe=block"])
    run(tiny.file, [])
    assert RunConfig.from_file(tiny.output / "run.toml", recorded=True).fp8.recipe == "block"
    assert "fp8_changes" not in newest_state(tiny.output)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["fp8.enabled=auto"], "fp8.enabled was True and is now 'auto'"),
        (['fp8.schedule={ "first 2" = "*" }'], "some of the 2 finished steps would have had another precision"),
        (["fp8.recipe=current", "train.compare_bf16=true"], "compares one setting of FP8 with bf16, but fp8.recipe changed"),
    ],
)
def test_changes_that_would_be_silently_wrong_are_refused(begun, overrides, message):
    with pytest.raises(InputError, match=re.escape(message)):
        run(begun.file, overrides)
    assert newest_state(begun.output)["step"] == 2


def test_a_schedule_may_change_behind_the_steps_that_are_done(begun):
    assert found(begun, 'fp8.schedule={ "last 25%" = "layers.0.*" }').fresh == frozenset()


def test_a_run_that_has_done_its_steps_is_refused(begun, capsys):
    assert main(["train", str(begun.file), *GIVEN, "train.steps=2", "fp8.recipe=current"]) == 2
    assert "started with other settings: fp8.recipe was 'delayed' and is now 'current'" in capsys.readouterr().err
    assert json.loads((begun.output / "checkpoints" / "step-2" / "state.json").read_text(encoding="utf-8"))["fp8"]
