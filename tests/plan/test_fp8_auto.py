"""`fp8.enabled = "auto"`: who decides, what is kept of it, and that it never changes within a run."""

import json

import pytest

import ranks
from octavo.build import describe
from octavo.checkpoint.reader import read_state
from octavo.cli import main
from octavo.config.run import RunConfig
from octavo.data.prepared import prepare
from octavo.errors import InputError
from octavo.fp8.scaling import states_of
from octavo.parallel import world
from octavo.plan import fp8_auto
from octavo.plan.fp8_auto import Timing
from octavo.plan.run import check
from octavo.run.folder import RunFolder
from octavo.run.metrics import read_metrics
from octavo.train import setup

AUTO = 'fp8.enabled="auto"'
MEASURED = [AUTO, "fp8.emulate=true"]  # on a CPU: an emulated run whose timings are handed in
FC1 = (128, 32)
"""LinearShape of gate and up, the one that the machine of these tests computes faster in FP8."""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def timed(monkeypatch):
    """Shapes that were timed; FP8 is faster for `FC1` alone."""
    asked = []

    def time(shape, recipe):
        asked.append((tuple(shape), recipe.name))
        return Timing(12.0, 9.0 if shape[1:] == FC1 else 15.25)

    monkeypatch.setattr(fp8_auto, "timer_on", lambda plan: time)
    return asked


def losses(run):
    return [(r["step"], r["loss"].hex()) for r in read_metrics(run.output / "metrics.jsonl")]


def choose_layers(run, *overrides, resumed=False):
    return fp8_auto.choose_layers(check(RunConfig.from_file(run.file, overrides)), RunFolder(run.output), resumed=resumed)


def test_layers_that_lose_stay_out_with_both_timings_and_describe_says_so(tiny_run, timed):
    run = tiny_run()
    plan = choose_layers(run, *MEASURED)
    assert plan.recipe is not None
    assert sorted(timed) == [((64, rows, columns), "delayed") for rows, columns in ((32, 32), (32, 64), (64, 32), FC1)]
    model = setup.build(plan, prepare(plan.config.data))[0].model
    for report in describe(model).layers:
        if report.name.endswith("fc1"):
            assert (report.fp8, report.reason) == (True, "")
        elif report.name.startswith("layers."):
            rows, columns = report.shape
            assert not report.fp8
            assert report.reason == f"bf16 is faster here: 12.0 µs against 15.2 µs in FP8 at 64 × {rows} × {columns}"  # noqa: RUF001
    assert "in 2 of 8 layers" in plan.fp8_note


def test_each_layer_is_timed_under_its_own_recipe_and_what_is_out_already_is_not(tiny_run, timed):
    given = ['fp8.layers={"layers.0.*" = "rowwise", "*.fc2" = "bf16"}', 'fp8.skip=["*.proj"]']
    plan = choose_layers(tiny_run(), *MEASURED, *given)
    assert sorted(timed) == sorted(((64, *shape), name) for shape in ((64, 32), FC1) for name in ("delayed", "rowwise"))
    assert set(plan.excluded) == {f"layers.{n}.self_attention.qkv" for n in range(2)}


def test_true_and_false_measure_nothing(tiny_run, timed):
    for enabled in ("true", "false"):
        plan = choose_layers(tiny_run(enabled), f"fp8.enabled={enabled}")
        assert not plan.excluded
    assert not timed


def test_on_a_cpu_auto_is_off_says_why_and_saves_that(tiny_run, capsys):
    run, plain = tiny_run(steps=3), tiny_run("plain", steps=3)
    assert main(["train", str(run.file), AUTO, "fp8.head=true"]) == 0
    out = capsys.readouterr().out
    assert "a CPU emulates FP8, which is never faster" in out
    assert "run in FP8" not in out
    assert main(["train", str(plain.file), "fp8.enabled=false"]) == 0
    assert losses(run) == losses(plain)
    choice = json.loads((run.output / "choices.json").read_text())
    assert choice["fp8"] is False
    plan = choose_layers(run, AUTO, "fp8.head=true")
    reports = {r.name: r for r in describe(setup.build(plan, prepare(plan.config.data))[0].model).layers}
    for name in ("layers.0.ffn.fc1", "head"):
        assert "never faster" in reports[name].reason
    assert not (plain.output / "choices.json").exists()


def test_with_emulate_a_cpu_computes_fp8_and_measures_nothing(tiny_run):
    run, plain = tiny_run(steps=3), tiny_run("plain", steps=3)
    assert main(["train", str(run.file), *MEASURED]) == 0
    assert main(["train", str(plain.file), "fp8.enabled=true"]) == 0
    assert losses(run) == losses(plain)


def test_the_choice_is_kept_with_the_run_whatever_the_machine_says_later(tiny_run, timed, monkeypatch, capsys):
    whole, cut = tiny_run("whole", steps=6, every=3), tiny_run("cut", steps=6, every=3)
    given = [*MEASURED, "optimizer.schedule=constant"]
    assert main(["train", str(whole.file), *given]) == 0
    assert main(["train", str(cut.file), *given, "train.steps=3"]) == 0
    excluded = json.loads((cut.output / "choices.json").read_text())["kept_out"]
    assert {name.rpartition(".")[2] for name in excluded} == {"qkv", "proj", "fc2"}
    timed.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    monkeypatch.setattr(fp8_auto, "timer_on", lambda plan: lambda shape, recipe: Timing(2.0, 1.0))
    capsys.readouterr()
    assert main(["train", str(cut.file), *given]) == 0
    assert "when the run began" in capsys.readouterr().out
    assert not timed
    assert losses(cut) == losses(whole)
    assert json.loads((cut.output / "choices.json").read_text())["kept_out"] == excluded
    assert read_state(cut.output / "checkpoints" / "step-6")["step"] == 6


def test_a_run_that_began_without_goes_on_without_and_the_other_way_round(tiny_run, timed):
    off, on = tiny_run("off"), tiny_run("on")
    for run, given in ((off, [AUTO]), (on, MEASURED)):
        run.output.mkdir()
        fp8_auto.record(choose_layers(run, *given), RunFolder(run.output))
    timed.clear()
    assert choose_layers(off, *MEASURED, resumed=True).recipe is None
    plan = choose_layers(on, AUTO, resumed=True)  # on a CPU that would not choose it
    assert plan.recipe is not None
    assert len(plan.excluded) == 6
    assert not timed


@pytest.mark.parametrize("content", [None, "", '{"fp8": true}'])
def test_a_choice_that_is_lost_is_not_guessed_at(tiny_run, timed, content):
    run = tiny_run()
    run.output.mkdir()
    if content is not None:
        (run.output / "choices.json").write_text(content)
    with pytest.raises(InputError, match=r"choices\.json"):
        choose_layers(run, *MEASURED, resumed=True)


def settled_of_rank(file, output):
    """What this rank trains with, when its own clock differs from the others'."""
    world.init({})
    rank = world.state.rank
    fp8_auto.timer_on = lambda plan: lambda shape, recipe: Timing(float(rank + 2), 3.0 if rank == 0 else 1.0)
    config = RunConfig.from_file(file, [*MEASURED, "train.micro_batch=1"])
    plan = fp8_auto.choose_layers(check(config), RunFolder(output), resumed=False)
    model = setup.build(plan, prepare(config.data))[0].model
    return plan.excluded, [name for name, state in states_of(model) if not state.skipped]


def test_the_first_rank_measures_for_all(tiny_run):
    run = tiny_run()
    prepare(RunConfig.from_file(run.file).data)
    (first, left), *others = ranks.run(2, settled_of_rank, run.file, run.output)
    assert len(first) == 8
    assert left == ["head"]  # which is no layer of the choice
    assert others == [(first, left)]


def test_mfu_counts_each_layer_in_the_precision_that_it_runs_in(tiny_run, timed):
    run = tiny_run()
    settings = ["model.config.hidden_size=32"]
    plan = choose_layers(run, *MEASURED, *settings)
    config = plan.hf_config
    one = {"qkv": 64 * 32, "proj": 32 * 32, "fc1": 128 * 32, "fc2": 32 * 64}
    share = one["fc1"] / sum(one.values())
    assert plan._fp8_share == pytest.approx(share)
    assert plan.flops.layers == 6 * config.num_hidden_layers * sum(one.values())
