"""Table and plot of the context suite, from rows written by hand."""

import json

import pytest
from matplotlib.image import imread

from octavo.bench.lengths import cells_of, figure, main

ROWS = [
    {"workload": "llama-8b-16k", "entry": "octavo-delayed", "tokens_per_second": 12_757.4, "peak_gib": 103.04},
    {"workload": "llama-8b-16k", "entry": "te-delayed", "tokens_per_second": 11_690.0, "peak_gib": 117.0},
    {"workload": "llama-8b-32k", "entry": "octavo-delayed", "error": "OutOfMemoryError: CUDA out of memory. Tried …"},
    {"workload": "llama-8b-32k-cp2", "entry": "octavo-delayed", "tokens_per_second": 11_000.0, "peak_gib": 105.5},
    {"workload": "llama-8b-256k-cp2", "entry": "octavo-delayed", "error": "rank 1: its process ended with exit code 7"},
]


@pytest.fixture
def results(tmp_path):
    """Two files, of which the second repeats a workload."""
    again = [{"workload": "llama-8b-32k-cp2", "entry": "octavo-delayed", "tokens_per_second": 12_000.0, "peak_gib": 104.0}]
    for name, rows in (("a", ROWS), ("b", again)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"suite": "context", "rows": rows}))
    return [str(tmp_path / "a.json"), str(tmp_path / "b.json")]


def test_a_cell_has_its_speed_or_says_why_not(results, tmp_path, capsys):
    picture = tmp_path / "lengths.png"
    assert main([*results, "--plot", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "| tokens | one GPU a sequence: tokens/s a GPU | GiB | settings | 2 GPUs a sequence: tokens/s a GPU |"
    )
    assert lines[2:5] == [
        "| 16,384 | 12,757 | 103.0 |  | - | - | - |",
        "| 32,768 | does not fit | - |  | 12,000 | 104.0 |  |",
        "| 262,144 | - | - | - | failed | - | recompute=selective offload |",
    ]
    assert lines[-1] == "llama-8b-256k-cp2: rank 1: its process ended with exit code 7"
    assert imread(picture).shape[:2] == (540, 960)
    (one, two) = figure(cells_of([{"suite": "context", "rows": ROWS}], "octavo-delayed"), "octavo-delayed").axes[0].lines
    assert (list(one.get_xdata()), list(two.get_ydata())) == ([16_384], [11_000.0])


def test_what_has_no_such_rows_is_refused(results, tmp_path, capsys):
    assert main([*results, "--entry", "octavo-delay"]) == 2
    assert "Did you mean 'octavo-delayed'? Known: octavo-delayed, te-delayed. Change --entry." in capsys.readouterr().err
    (tmp_path / "other.json").write_text("[1]")
    for name in ("other.json", "none.json"):
        assert main([str(tmp_path / name)]) == 2
        assert "is not a file of octavo bench" in capsys.readouterr().err
