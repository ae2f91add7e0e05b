"""Table and plot of the context suite, from rows written by hand."""

import errno
import json
import math
import os

import pytest
from matplotlib.image import imread

from benchmarks.lengths import cells_of, figure, main

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
    (one, two) = figure(cells_of([("a.json", {"rows": ROWS})], "octavo-delayed"), "octavo-delayed").axes[0].lines
    assert (list(one.get_xdata()), list(two.get_xdata())) == ([16_384, 32_768], [32_768, 262_144])
    assert (one.get_ydata()[0], two.get_ydata()[0]) == (12_757.4, 11_000.0)
    assert math.isnan(one.get_ydata()[1])  # a gap
    assert math.isnan(two.get_ydata()[1])


def test_a_cell_of_several_rows_names_its_files(results, tmp_path, capsys):
    first, second = results
    third = tmp_path / "c.json"
    full = {"workload": "llama-8b-32k-cp2", "entry": "octavo-delayed", "error": "OutOfMemoryError: CUDA out of memory"}
    third.write_text(json.dumps({"suite": "context", "rows": [full]}))
    shown = {
        (first,): ("11,000", None),
        (first, second): ("12,000", f"12,000 of {second}, given last; left out: 11,000 of {first}"),
        (second, first): ("11,000", f"11,000 of {first}, given last; left out: 12,000 of {second}"),
        (str(third), second, first): (
            "11,000", f"11,000 of {first}, given last; left out: does not fit of {third}, 12,000 of {second}",
        ),
    }  # fmt: skip
    for files, (figure_shown, source) in shown.items():
        assert main([*files]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert f"| 32,768 | does not fit | - |  | {figure_shown} |" in lines[3]
        said = [line for line in lines if line.startswith("llama-8b-32k-cp2: ")]
        assert said == ([] if source is None else [f"llama-8b-32k-cp2: {source}"])
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "that of the file given last counts" in " ".join(capsys.readouterr().out.split())


def row(**changes):
    return {"workload": "llama-8b-16k", "entry": "octavo-delayed", "tokens_per_second": 1.0, **changes}


REFUSED = {
    "[1]": "is not a file of python -m benchmarks: it is no JSON object. Give the JSON files of python -m benchmarks context.",
    "text": "is not a file of python -m benchmarks: it is not JSON. Give",
    "\x1f\x8b": "is not a file of python -m benchmarks: it is not JSON. Give",
    "{}": "is not a file of python -m benchmarks: it has no suite. Give",
    json.dumps({"suite": "context"}): "it has no rows",
    json.dumps({"suite": "context", "rows": []}): "it has no rows",
    json.dumps(
        {"suite": "one-gpu", "rows": [row()]}
    ): "is of the suite one-gpu. Give the JSON files of python -m benchmarks context.",
    json.dumps({"suite": "context", "rows": [row(), 1]}): "row 2 is no JSON object",
    json.dumps({"suite": "context", "rows": [{"workload": "tiny"}]}): "row 1 has no entry",
    json.dumps({"suite": "context", "rows": [row(tokens_per_second=None)]}): "row 1 has neither tokens_per_second nor error",
    json.dumps({"suite": "context", "rows": [row(workload="llama-8b-16")]}): "'llama-8b-16'. Did you mean 'llama-8b-16k'?",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_such_file_is_refused_in_words(results, tmp_path, capsys, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    assert main([*results, str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("octavo: ")
    assert said.err.count("\n") == 1
    assert str(file) in said.err
    assert REFUSED[text] in said.err


def test_what_has_no_such_rows_is_refused(results, tmp_path, capsys):
    assert main([*results, "--entry", "octavo-delay"]) == 2
    assert "Did you mean 'octavo-delayed'? Known: octavo-delayed, te-delayed. Change --entry." in capsys.readouterr().err
    assert main([str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read: No such file or directory. Give the JSON files" in capsys.readouterr().err


def test_a_plot_that_could_not_be_written_is_refused_before_the_table(results, tmp_path, capsys):
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.iterdir())
    for plot, words in (
        (tmp_path / "x.txt", f"the name does not end in .png. Use {tmp_path / 'x.png'}."),
        (tmp_path / "x", "the name does not end in .png"),
        (tmp_path / "none" / "x.png", "there is no folder"),
        (tmp_path / "folder.png", "is a folder"),
        ("/proc/x.png", "--plot: x.png cannot be written in '/proc': "),
    ):
        assert main([*results, "--plot", str(plot)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("octavo: --plot")
        assert said.err.count("\n") == 1
        assert words in said.err
    assert sorted(tmp_path.iterdir()) == before


def test_a_plot_on_a_full_disk_is_one_message(results, tmp_path, capsys, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "x.png"))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    assert main([*results, "--plot", str(tmp_path / "x.png")]) == 1
    assert capsys.readouterr().err.startswith("octavo: no space for ")
