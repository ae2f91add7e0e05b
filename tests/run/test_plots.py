"""Plots of losses: their texts and curves, and failures that cost a run nothing."""

import json
import math

import pytest
from matplotlib.image import imread

from octavo.cli import main
from octavo.run import plots
from octavo.run.compare import compare
from octavo.run.plots import comparison_figure, draw_comparison, run_figure

plot_run = plots.plot_run.__wrapped__  # which draws

RUN_TOML = """\
[model]
source = "llama-tiny"
[data]
source = "python:docstrings"
sequence_length = 32
[fp8]
enabled = {fp8}
[train]
steps = 100
global_batch = 4
"""


def run(folder, losses, *, fp8="true", validated=()):
    folder.mkdir(parents=True)
    records = [{"step": i, "loss": loss, "tokens_per_second": 10.0} for i, loss in enumerate(losses, 1)]
    for step in validated:
        records[step - 1]["validation_loss"] = records[step - 1]["loss"] + 0.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "run.toml").write_text(RUN_TOML.format(fp8=fp8))
    return folder


def lines_of(axes):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_plot_of_a_run_has_its_curves_and_says_what_they_are(tmp_path):
    losses, other = [float(n) for n in range(100, 0, -1)], [float(n) for n in range(101, 1, -1)]
    folder = run(tmp_path / "my run", losses, validated=(50, 100))
    run(folder / "bf16", other, fp8="false")
    (axes,) = run_figure(folder).axes
    assert axes.get_title() == "my run: llama-tiny, FP8, delayed scaling"
    assert axes.get_ylabel() == "loss (nats per token)"
    assert axes.get_xlabel() == "step (strong lines: means of 5 steps)"
    assert legend_of(axes) == ["fp8: training", "fp8: validation, 1.5000 at step 100", "bf16: training"]
    every, mean, checked, every_of_twin, mean_of_twin = lines_of(axes)
    steps = list(range(1, 101))
    assert every == (steps, losses)
    assert mean == (steps[2:-2], losses[2:-2])  # of a loss and two on each side, on a straight line
    assert checked == ([50, 100], [51.5, 1.5])
    assert every_of_twin == (steps, other)
    assert mean_of_twin == (steps[2:-2], other[2:-2])


@pytest.mark.parametrize("fp8", ["false", "true"])
def test_a_run_without_fp8_says_so_also_where_the_machine_had_none(tmp_path, fp8):
    folder = run(tmp_path / "run", [2.0, 1.0], fp8=fp8)
    (folder / "checkpoints" / "step-2").mkdir(parents=True)
    (folder / "checkpoints" / "step-2" / "state.json").write_text('{"recipe": null}')
    (axes,) = run_figure(folder).axes
    assert axes.get_title() == "run: llama-tiny, bf16, no FP8"
    assert legend_of(axes) == ["bf16: training"]


@pytest.mark.parametrize("losses", [[2.0], [2.0, math.nan, math.inf], [3.0, 2.0] * 60], ids=["one step", "diverged", "long"])
def test_the_picture_replaces_an_older_one(tmp_path, losses):
    folder = run(tmp_path / "a $name$ of 東京 \\alpha", losses, validated=(1,))
    (folder / "losses.png").write_text("older")
    assert plot_run(folder) == folder / "losses.png"
    assert imread(folder / "losses.png").shape[:2] == (600, 960)
    assert {path.name for path in folder.iterdir()} == {"losses.png", "metrics.jsonl", "run.toml"}


def test_a_picture_that_cannot_be_drawn_is_a_warning(tmp_path, capsys):
    folder = run(tmp_path / "run", [2.0, 1.0])
    (folder / "losses.png").mkdir()
    assert plot_run(folder) is None
    assert capsys.readouterr().err.startswith(f"octavo: {folder / 'losses.png'} was not drawn: IsADirectoryError")
    assert not (folder / ".losses.png.tmp").exists()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert plot_run(folder) is None
    assert "was not drawn: KeyError" in capsys.readouterr().err
    (folder / "metrics.jsonl").unlink()
    assert plot_run(folder) is None
    assert capsys.readouterr().err == ""


def test_a_comparison_is_titled_and_smoothed(tmp_path):
    one, two = [float(n) for n in range(140, 100, -1)], [2.0 * n for n in range(140, 100, -1)]
    found = compare([run(tmp_path / "bf16", one), run(tmp_path / "fp8", two)])
    above, below = comparison_figure(found).axes
    assert above.get_title() == "Loss of bf16 and 1 more, with the gap to it"
    assert (above.get_ylabel(), below.get_ylabel()) == ("loss (nats per token)", "gap (%)")
    assert below.get_xlabel() == "step (strong lines: means of 2 steps)"
    assert legend_of(above) == ["bf16 (+0.00%)", "fp8 (+100.00%)"]
    assert [values for _, values in lines_of(above)] == [
        one, [loss + 0.5 for loss in one[1:]], two, [loss + 1 for loss in two[1:]],
    ]  # fmt: skip
    assert [set(values) for _, values in lines_of(below)] == [{0.0}, {100.0}]


def test_the_command_draws(tmp_path, capsys):
    folders = [str(run(tmp_path / name, [3.0, 2.0])) for name in ("a", "b")]
    assert main(["compare", *folders, "--plot", str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_more_runs_than_colours_differ_by_the_style_of_their_lines(tmp_path):
    runs = [run(tmp_path / str(index), [3.0, 2.0 + index]) for index in range(12)]
    above, _ = comparison_figure(compare(runs)).axes
    drawn = [(line.get_color(), line.get_linestyle()) for line in above.get_lines()]
    assert len(set(drawn)) == 12
    assert {style for _, style in drawn[:10]} == {"-"}


@pytest.mark.parametrize("count", [2, 8, 9, 21])
def test_the_names_of_many_runs_leave_the_curves_their_room(tmp_path, count):
    runs = [run(tmp_path / f"current-input-gradients-{index}", [3.0, 2.0 + index]) for index in range(count)]
    draw_comparison(compare(runs, last=1), tmp_path / "curves.png")
    dark = imread(tmp_path / "curves.png")[..., :3].sum(-1) < 0.5
    upright = (dark.mean(0) > 0.3).nonzero()[0]  # the frame of both axes
    assert upright[0] < 0.15 * dark.shape[1]
    assert upright[-1] > 0.9 * dark.shape[1]


@pytest.mark.parametrize(
    ("name", "word"), [("x.foo", ".foo is not a known kind of picture"), ("no/x.png", "no folder"), ("x", "no suffix")]
)
def test_a_picture_that_cannot_be_written_is_refused_before_any_work(tmp_path, capsys, name, word):
    assert main(["compare", str(tmp_path / "not looked at"), "--plot", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert word in err
    assert err.count("\n") == 1
