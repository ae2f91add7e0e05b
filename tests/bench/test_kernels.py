"""The table of kernels on a CPU: every row runs at a small size, and moves the bytes that it says."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.suites import SUITES
from octavo import arguments
from octavo.bench import run
from octavo.bench.kernels import KERNELS, measure_kernels
from octavo.bench.results import write
from octavo.bench.run import render, run_suite
from octavo.cli import main
from octavo.errors import InputError

CPU = torch.device("cpu")
TINY = (64, 768)  # one group of four query heads of 128 with their key and value; blocks of 32 columns of gate and up


def tensors(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result or () for tensor in tensors(part)]


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_runs_and_moves_what_its_row_says(name):
    kernel = KERNELS[name]
    assert kernel.name == name
    torch.manual_seed(0)
    work = kernel.make(*TINY)
    written = tensors(work.run())
    assert written
    passes = 2 if name == "cast-rows-columns" else 1
    moved = sum(x.nbytes for x in work.reads) * passes + sum(x.nbytes for x in written)
    # Beyond it: statistics, scales and gradients of norms, which at this size are up to 8%.
    assert kernel.bytes(*TINY) <= moved <= 1.08 * kernel.bytes(*TINY)
    assert all(torch.isfinite(x.float()).all() for x in written)


def test_shapes_suit_their_kernels():
    for kernel in KERNELS.values():
        for rows, columns in kernel.shapes:
            # Beyond several times the L2 cache, or a figure would be the cache's.
            assert kernel.bytes(rows, columns) > 100e6, kernel.name
            assert rows % 128 == columns % 128 == 0 or kernel.name.startswith("gelu")


def test_rows_are_shares_of_the_fastest_copy(tmp_path, monkeypatch):
    times = iter([100.0, 300.0, 50.0, 40.0])
    monkeypatch.setattr("octavo.bench.kernels.median_us", lambda run, **how: [next(times)])
    monkeypatch.setattr("octavo.bench.kernels.COPIED", ((64, 128), (64, 512)))
    monkeypatch.setattr("octavo.bench.kernels.FLUSHED_BYTES", 4)
    small = [type(kernel)(kernel.name, kernel.make, kernel.reads, kernel.writes, (TINY,)) for kernel in KERNELS.values()][:2]
    broken = type(small[0])("broken", lambda *shape: 1 / 0, 1, 1, (TINY,))
    said = []
    rows = measure_kernels([small[0], broken, small[1]], CPU, iterations=1, warmup=0, say=said.append)
    copies, cast, fault, transposed = rows[:2], *rows[2:]
    assert [row["bytes"] for row in copies] == [64 * 128 * 4, 64 * 512 * 4]
    ceiling = 64 * 512 * 4 / 300e-6 / 1e9
    assert copies[1]["gb_per_s"] == pytest.approx(ceiling)
    assert cast == {
        "workload": "cast", "entry": "octavo", "shape": [64, 768], "bytes": 64 * 768 * 3, "us": 50.0,
        "gb_per_s": pytest.approx(64 * 768 * 3 / 50e-6 / 1e9),
        "share_of_copy": pytest.approx(64 * 768 * 3 / 50e-6 / 1e9 / ceiling),
    }  # fmt: skip
    assert fault == {
        "workload": "broken", "entry": "octavo", "shape": [64, 768], "error": "ZeroDivisionError: division by zero"
    }  # fmt: skip
    assert transposed["bytes"] == 64 * 768 * 4
    assert [line.split()[0] for line in said] == ["cast", "broken", "cast-transpose"]
    assert said[1] == "broken 64 x 768 failed: ZeroDivisionError: division by zero"
    machine = {"gpu": "NVIDIA H200", "cpu": None, "count": 1, "torch": "2.11.0"}
    results = {"suite": "kernels", "machine": machine, "rows": rows}
    write({tmp_path / "kernels.json": results})
    assert json.loads((tmp_path / "kernels.json").read_text())["rows"][2]["us"] == 50.0
    text = io.StringIO()
    render(results, Console(file=text, width=80))
    assert "64 x 768" in text.getvalue()
    assert "failed" in text.getvalue()
    assert "ZeroDivisionError: division by zero" in text.getvalue()


@pytest.mark.parametrize("failing", [1, 2])
def test_a_copy_that_fails_costs_kernels_no_figures(monkeypatch, failing):
    times = iter([None] * failing + [[100.0]] * 3)

    def median(run, **how):
        found = next(times)
        if found is None:
            raise RuntimeError("out of memory")
        return found

    monkeypatch.setattr("octavo.bench.kernels.median_us", median)
    monkeypatch.setattr("octavo.bench.kernels.COPIED", ((64, 128), (64, 512)))
    monkeypatch.setattr("octavo.bench.kernels.FLUSHED_BYTES", 4)
    cast = replace(KERNELS["cast"], shapes=(TINY,))
    said = []
    rows = measure_kernels([cast], CPU, iterations=1, warmup=0, say=said.append)
    assert [row.get("error") for row in rows[:2]] == ["RuntimeError: out of memory"] * failing + [None] * (2 - failing)
    assert rows[2]["us"] == 100.0
    assert ("share_of_copy" in rows[2]) == (failing == 1)
    assert said[0] == "copy 64 x 128 failed: RuntimeError: out of memory"
    assert ("of a copy" in said[-1]) == (failing == 1)
    machine = {"gpu": "NVIDIA H200", "cpu": None, "count": 1, "torch": "2.11.0"}
    render({"suite": "kernels", "machine": machine, "rows": rows}, Console(file=io.StringIO(), width=80))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "the suite kernels times kernels of a GPU, and the device is cpu"),
        ({"cases": ["cast-transposed"]}, "unknown case 'cast-transposed'. Did you mean 'cast-transpose'?"),
        ({"device": "cuda:99"}, "device 'cuda:99' does not exist: torch sees"),
        ({"device": "meta"}, "device 'meta' has no benchmarks: use cpu or cuda."),
    ],
)
def test_what_has_no_kernels_to_time_is_refused(tmp_path, change, message):
    with pytest.raises(InputError) as caught:
        run_suite("kernels", output=tmp_path / "none", command="octavo bench kernels", **{"device": "cpu", **change})
    assert message in str(caught.value)
    assert not (tmp_path / "none").exists()


def test_a_run_of_kernels_is_written(tmp_path, monkeypatch):
    def measured(works, device, *, iterations, warmup, say):
        return [{"workload": work.name, "entry": "octavo", "calls": [iterations, warmup]} for work in works]

    monkeypatch.setattr(run, "check_gpu", lambda *_: None)
    monkeypatch.setattr(run, "measure_kernels", measured)
    results = run_suite(
        "kernels", cases=["cast", "amax"], steps=7, output=tmp_path, device="cpu", command="octavo bench kernels"
    )
    assert json.loads((tmp_path / "kernels.json").read_text()) == results
    assert [row["workload"] for row in results["rows"]] == ["cast", "amax"]
    assert [row["calls"] for row in results["rows"]] == [[7, 10]] * 2
    assert results["machine"]["peers"] == {}
    with pytest.raises(InputError, match=r"kernels\.json: results are there already and are not replaced"):
        run_suite("kernels", cases=["amax"], output=tmp_path, device="cpu", command="octavo bench kernels")


@pytest.mark.parametrize(
    ("suite", "case", "fails", "rows"), [("kernels", "cast", "kernels._random", 3), ("layers", "linear", "layers.draw", 3)]
)
def test_a_suite_ends_with_1_if_a_case_failed(tmp_path, monkeypatch, capsys, suite, case, fails, rows):
    def broken(*args, **how):
        raise RuntimeError("no such kernel\nand a trace")

    monkeypatch.setattr(run, "check_gpu", lambda *_: None)
    monkeypatch.setattr("octavo.bench.kernels.FLUSHED_BYTES", 4)
    monkeypatch.setattr("octavo.bench.kernels.median_us", lambda *calls, **how: [1.0] * len(calls))
    monkeypatch.setattr("octavo.bench.kernels.COPIED", ((64, 128), (64, 512)))
    monkeypatch.setattr(f"octavo.bench.{fails}", broken)
    output = tmp_path / "results.json"
    command = ["bench", suite, "--device", "cpu", "--cases", case, "--steps", "1", "--warmup", "0", "--output", str(output)]
    assert main(command) == 1
    said = capsys.readouterr()
    assert said.err == f"octavo: no entry gave a figure of {case}. The results are written, with the reason in each row.\n"
    assert "RuntimeError: no such kernel" in said.out
    assert len(json.loads(output.read_text())["rows"]) == rows


def test_suites_of_a_clone_are_answered_with_its_command(tmp_path, monkeypatch, capsys):
    """With options that this command lacks; without `benchmarks/` beside the package, as of a wheel, it names no folder."""
    assert main(["bench", "one-gpu", "--cases", "llama-1b", "--peers", "te"]) == 2
    said = capsys.readouterr().err
    clone = Path(__file__).parents[2]
    assert said == (
        "octavo: the suite one-gpu is not in the package, which has layers and kernels. "
        f"Run it in {clone}: python -m benchmarks one-gpu --cases llama-1b --peers te\n"
    )
    monkeypatch.setattr(arguments, "__file__", str(tmp_path / "lib" / "octavo" / "arguments.py"))
    assert main(["bench", "vision"]) == 2
    assert "Run it in a clone of Octavo: python -m benchmarks vision\n" in capsys.readouterr().err
    assert main(["bench", "kernel"]) == 2
    assert "unknown benchmark suite 'kernel'. Did you mean 'kernels'?" in capsys.readouterr().err
    assert main(["bench", "kernels", "--cases", "cast,swiglu-fp8", "--device", "cpu"]) == 2
    assert "kernels of a GPU" in capsys.readouterr().err
    assert set(arguments.OF_A_CLONE) == set(SUITES) - set(run.KNOWN)
