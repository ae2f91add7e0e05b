"""The gap between runs, from files written by hand."""

import json
import math

import pytest
from matplotlib.image import imread

from octavo.cli import main
from octavo.errors import InputError
from octavo.run.compare import compare, draw, lines


def run(folder, losses, speed=10.0, first=1):
    folder.mkdir()
    records = [{"step": i + first, "loss": loss, "tokens_per_second": speed} for i, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_gap_of_the_last_steps(tmp_path):
    reference = run(tmp_path / "bf16", [9.0, 4.0, 2.0, 2.0])
    other = run(tmp_path / "fp8", [9.0, 5.0, 2.1, 1.98, 50.0], speed=20.0)
    found = compare([reference, other], last=2)
    assert found["steps"] == 4
    assert [row["run"] for row in found["rows"]] == ["bf16", "fp8"]
    assert found["rows"][0]["gap_percent"] == 0.0
    assert math.isclose(found["rows"][1]["gap_percent"], 2.0)
    assert found["rows"][1]["losses"] == [9.0, 5.0, 2.1, 1.98]
    assert "+2.000%" in lines(found)[2]
    assert "steps 3 to 4" in lines(found)[0]


def test_command(tmp_path, capsys):
    runs = [str(run(tmp_path / name, losses)) for name, losses in (("bf16", [2.0, 2.0]), ("fp8", [2.0, 2.2]))]
    assert main(["compare", *runs, "--last", "1", "--plot", str(tmp_path / "curves.png"), "--json"]) == 0
    assert math.isclose(json.loads(capsys.readouterr().out)["rows"][1]["gap_percent"], 10.0)
    assert main(["compare", *runs, "--last", "1"]) == 0
    assert "+10.000%" in capsys.readouterr().out
    assert main(["compare", *runs]) == 2
    assert "use 1 to 2" in capsys.readouterr().err


def test_picture_is_drawn(tmp_path):
    found = compare([run(tmp_path / "a", [3.0, 2.0]), run(tmp_path / "b", [3.0, 2.2])], last=1)
    draw(found, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_more_runs_than_colours_differ_by_the_style_of_their_lines(tmp_path):
    runs = [run(tmp_path / str(index), [3.0, 2.0 + index]) for index in range(12)]
    for count, dashed in ((10, False), (12, True)):
        draw(compare(runs[:count], last=1), tmp_path / "curves.svg")
        assert ("stroke-dasharray: 3" in (tmp_path / "curves.svg").read_text(encoding="utf-8")) == dashed


@pytest.mark.parametrize("count", [2, 8, 9, 21])
def test_the_names_of_many_runs_leave_the_curves_their_room(tmp_path, count):
    runs = [run(tmp_path / f"current-input-gradients-{index}", [3.0, 2.0 + index]) for index in range(count)]
    draw(compare(runs, last=1), tmp_path / "curves.png")
    dark = imread(tmp_path / "curves.png")[..., :3].sum(-1) < 0.5
    upright = (dark.mean(0) > 0.3).nonzero()[0]  # the frame of both axes
    assert upright[0] < 0.15 * dark.shape[1]
    assert upright[-1] > 0.9 * dark.shape[1]


def test_too_few_steps_names_the_shortest(tmp_path):
    with pytest.raises(InputError, match=r"short has 2 steps; use 1 to 2"):
        compare([run(tmp_path / "long", [1.0] * 5), run(tmp_path / "short", [1.0] * 2)], last=3)


def test_no_run(tmp_path):
    with pytest.raises(InputError, match=r"no metrics\.jsonl"):
        compare([tmp_path], last=1)


def test_a_run_beside_itself_is_two_rows(tmp_path):
    folder = run(tmp_path / "a", [3.0, 2.0])
    found = compare([folder, folder], last=1)
    assert [(row["run"], row["gap_percent"]) for row in found["rows"]] == [("a", 0.0), ("a", 0.0)]


def test_losses_are_compared_at_the_same_steps(tmp_path):
    whole = run(tmp_path / "whole", [9.0, 4.0, 2.0, 1.0])
    late = run(tmp_path / "late", [4.4, 2.2, 1.1, 0.5], first=2)
    found = compare([whole, late], last=2)
    assert (found["steps"], found["numbers"]) == (3, [2, 3, 4])
    assert [row["losses"] for row in found["rows"]] == [[4.0, 2.0, 1.0], [4.4, 2.2, 1.1]]
    assert math.isclose(found["rows"][1]["gap_percent"], 10.0)
    assert "steps 3 to 4" in lines(found)[0]
    draw(found, tmp_path / "curves.svg")
    with pytest.raises(InputError, match=r"no step in common: .*whole has steps 1 to 4, .*later has steps 7 to 7"):
        compare([whole, run(tmp_path / "later", [1.0], first=7)], last=1)


@pytest.mark.parametrize(
    ("name", "word"), [("x.foo", ".foo is not a known kind of picture"), ("no/x.png", "no folder"), ("x", "no suffix")]
)
def test_a_picture_that_cannot_be_written_is_refused_before_any_work(tmp_path, capsys, name, word):
    assert main(["compare", str(tmp_path / "not looked at"), "--plot", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert word in err
    assert err.count("\n") == 1


def test_json_of_a_run_that_diverged_is_valid(tmp_path, capsys):
    folder = run(tmp_path / "a", [3.0, math.nan])
    assert main(["compare", str(folder), "--last", "1", "--json"]) == 0

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    row = json.loads(capsys.readouterr().out, parse_constant=refuse)["rows"][0]
    assert row["losses"] == [3.0, "NaN"]
    assert row["gap_percent"] == "NaN"
