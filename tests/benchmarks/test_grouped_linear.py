"""The benchmark of `GroupedLinear`: its rows, and that wrong values have no time."""

import json

import pytest
import torch

from benchmarks import grouped_linear
from octavo.fp8.recipe import RECIPES


def test_each_recipe_has_a_time_with_its_error_on_file(tmp_path):
    grouped_linear.main(["--tiny", "--no-peer", "--steps", "2", "--output", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["suite"] == "grouped-linear"
    assert found["command"].startswith("python -m benchmarks.grouped_linear --tiny")
    each = {(row["recipe"], row["entry"]) for row in found["rows"]}
    assert each == {("bf16", "octavo"), *((recipe, name) for recipe in RECIPES for name in ("octavo", "octavo-single"))}
    for row in found["rows"]:
        assert 0 < row["fastest_ms"] <= row["ms"]
        assert row["error_of_values"] < (0.005 if row["recipe"] == "bf16" else grouped_linear.TOLERANCE)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_wrong_values_have_no_time(monkeypatch):
    monkeypatch.setattr(grouped_linear, "TOLERANCE", 1e-6)
    rows = grouped_linear.measure([grouped_linear.TINY], torch.device("cpu"), steps=1, peer=False, say=lambda line: None)
    assert rows
    assert all("relative error" in row["error"] and "ms" not in row for row in rows)
