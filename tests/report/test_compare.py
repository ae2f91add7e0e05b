"""The gap between runs, from files written by hand."""

import json
import math

import pytest

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
