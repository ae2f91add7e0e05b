"""The gap between runs, from files written by hand."""

import json
import math

import pytest

from octavo.cli import main
from octavo.errors import InputError
from octavo.report.compare import compare, draw, lines


def run(folder, losses, speed=10.0):
    folder.mkdir()
    records = [{"step": i + 1, "loss": loss, "tokens_per_second": speed} for i, loss in enumerate(losses)]
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


def test_too_few_steps_names_the_shortest(tmp_path):
    with pytest.raises(InputError, match=r"short has 2 steps; use 1 to 2"):
        compare([run(tmp_path / "long", [1.0] * 5), run(tmp_path / "short", [1.0] * 2)], last=3)


def test_no_run(tmp_path):
    with pytest.raises(InputError, match=r"no metrics\.jsonl"):
        compare([tmp_path], last=1)
