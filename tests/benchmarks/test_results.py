"""What `python -m benchmarks` makes of entries that fail: the exit code, the table, the way to install what is missing."""

import io
import json
import sys

import pytest
from rich.console import Console

from benchmarks import run
from benchmarks.__main__ import main
from benchmarks.peers import reason_of
from benchmarks.records import check_figures, render
from octavo.errors import OctavoError

MACHINE = {"gpu": "H200", "cpu": None, "count": 1, "torch": "2.11"}
DONE = {"tokens_per_second": 1.0}
FULL = {"error": "rank 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"}
BROKEN = {"error": "its process ended with exit code 7"}


def document(suite, **workloads):
    rows = [
        {"workload": name, "entry": f"octavo-{i}", "head": "bf16", **row}
        for name in workloads
        for i, row in enumerate(workloads[name])
    ]
    return {"suite": suite, "machine": MACHINE, "rows": rows}


@pytest.mark.parametrize(
    ("suite", "workloads", "without"),
    [
        ("one-gpu", {"a": [DONE, BROKEN], "b": [BROKEN, DONE]}, None),
        ("one-gpu", {"a": [DONE], "b": [BROKEN, BROKEN]}, "b"),
        ("one-gpu", {"a": [BROKEN], "b": [FULL]}, "a, b"),
        ("context", {"a": [BROKEN], "b": [FULL]}, "a"),
        ("context", {"a": [FULL], "b": [FULL, BROKEN]}, None),
        ("kernels", {name: [BROKEN] for name in "abcdef"}, "a, b, c, d and 2 more"),
    ],
)
def test_a_workload_without_a_figure_is_a_failure(suite, workloads, without):
    results = document(suite, **workloads)
    if without is None:
        check_figures(results)
        return
    with pytest.raises(OctavoError) as caught:
        check_figures(results)
    assert str(caught.value) == (f"no entry gave a figure of {without}. The results are written, with the reason in each row.")
    assert caught.value.exit_code == 1


def test_a_layer_without_an_error_of_either_library_is_a_failure():
    row = {"layer": "linear", "recipe": "bf16", "tensor": "output", "octavo_error": None, "te_error": None}
    other = {**row, "recipe": "delayed"}
    for figure in ({"octavo_error": 0.01}, {"te_error": 0.01}):
        check_figures({"suite": "layers", "rows": [row, {**other, **figure}]})
    with pytest.raises(OctavoError, match="no entry gave a figure of linear"):
        check_figures({"suite": "layers", "rows": [row, other]})


@pytest.mark.parametrize("entries", ["ao-tensorwise", "ao-tensorwise,torch-bf16"])
def test_the_command_ends_with_1_if_every_entry_failed(tmp_path, monkeypatch, capsys, forked_workers, entries):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    output = tmp_path / "results.json"
    command = ["one-gpu", "--device", "cpu", "--cases", "tiny", "--entries", entries, "--steps", "1", "--warmup", "0"]
    alone = entries == "ao-tensorwise"
    assert main([*command, "--output", str(output)]) == (1 if alone else 0)
    said = capsys.readouterr()
    assert "failed" in said.out
    assert said.err == (
        "octavo: no entry gave a figure of tiny. The results are written, with the reason in each row.\n" if alone else ""
    )
    rows = json.loads(output.read_text())["rows"]
    assert [row["entry"] for row in rows] == entries.split(",")
    assert "error" in rows[0]
    assert main([*command, "--json", "--output", str(output)]) == (1 if alone else 0)
    assert json.loads(capsys.readouterr().out)["rows"][0] == rows[0]


@pytest.mark.parametrize(
    ("suite", "case", "fails", "rows"),
    [
        ("products", "llama-1b", "benchmarks.kernels.products._operands", 36),
        ("attention", "llama-1b-4k", "benchmarks.kernels.attention._draw", 1),
        ("kernels", "cast", "octavo.bench.kernels._random", 3),
        ("memory", "tiny-none", "benchmarks.memory._train", 1),
        ("layers", "linear", "octavo.bench.layers.draw", 3),
    ],
)
def test_a_suite_of_one_process_ends_with_1_if_a_workload_failed(tmp_path, monkeypatch, capsys, suite, case, fails, rows):
    def broken(*args, **how):
        raise RuntimeError("no such kernel\nand a trace")

    monkeypatch.setattr(run, "_check_gpu", lambda *_: None)
    monkeypatch.setattr("octavo.bench.kernels.FLUSHED_BYTES", 4)
    monkeypatch.setattr("octavo.bench.kernels.median_us", lambda *calls, **how: [1.0] * len(calls))
    monkeypatch.setattr("octavo.bench.kernels.COPIED", ((64, 128), (64, 512)))
    monkeypatch.setattr(fails, broken)
    output = tmp_path / "results.json"
    command = [suite, "--device", "cpu", "--cases", case, "--steps", "1", "--warmup", "0", "--output", str(output)]
    assert main(command) == 1
    said = capsys.readouterr()
    without = f"no entry gave a figure of {case.removesuffix('-none')}"
    assert said.err == f"octavo: {without}. The results are written, with the reason in each row.\n"
    assert "RuntimeError: no such kernel" in said.out
    assert len(json.loads(output.read_text())["rows"]) == rows


def test_a_missing_package_comes_with_the_command_that_installs_it():
    for module, command in (
        ("torchao.float8", "pip install 'octavo[bench]' (in a clone of Octavo: pip install -e '.[bench]')"),
        ("timm", "pip install 'octavo[bench]' (in a clone of Octavo: pip install -e '.[bench]')"),
        ("transformer_engine.pytorch", "pip install --no-build-isolation 'transformer-engine[pytorch]'"),
    ):
        error = ModuleNotFoundError(f"No module named {module!r}", name=module)
        assert reason_of(error) == f"ModuleNotFoundError: No module named {module!r}. Install it by {command}"
    assert reason_of(ModuleNotFoundError("No module named 'other'", name="other")).endswith("named 'other'")
    assert reason_of(ImportError("torchao is broken", name="torchao")) == "ImportError: torchao is broken"


@pytest.mark.parametrize(("suite", "workload"), [("vision", "vit-huge"), ("one-gpu", "tiny-vit")])
def test_a_table_of_images_is_one_if_every_entry_failed(suite, workload):
    text = io.StringIO()
    results = {**document(suite, **{workload: [BROKEN]}), "prices": []}
    render(results, Console(file=text, width=160))
    assert "img/s" in text.getvalue()
    assert "tok/s" not in text.getvalue()
    assert "failed" in text.getvalue()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["one-gpu", "--traces", "{}"], "--traces"),
        (["checkpoint", "--folder", "{}"], "--folder"),
        (["vision", "--prices", "{}"], "--prices"),
        (["layers", "--output", "{}"], "--output"),
    ],
)
@pytest.mark.parametrize("address", ["s3://b/run", "gs:/b", ""])
def test_no_option_takes_an_address_for_a_folder(tmp_path, monkeypatch, capsys, command, name, address):
    monkeypatch.chdir(tmp_path)
    assert main([part.replace("{}", address) for part in command]) == 2
    said = capsys.readouterr().err
    assert name in said
    assert "empty" in said or "no value" in said if not address else "address" in said
    assert list(tmp_path.iterdir()) == []
