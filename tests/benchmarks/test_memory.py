"""The suite of memory: what it trains and writes; peaks need a GPU."""

import io
from unittest import mock

import pytest
import torch
from rich.console import Console

from benchmarks import memory
from benchmarks.memory import USUAL, WORKLOADS, measure_memory
from benchmarks.records import render
from benchmarks.run import run_suite
from octavo import build
from octavo.errors import InputError
from octavo.hardware import GIB
from octavo.plan.memory import estimate


def test_each_setting_is_trained_and_stands_beside_its_estimate():
    built, real = [], build.build_model

    def noted(source, options, **how):
        built.append(options)
        return real(source, options, **how)

    names = ["tiny-none", "tiny-recompute-selective-mlp_chunks-8", "tiny-recompute-mlp-offload-true"]
    with mock.patch.object(build, "build_model", noted):
        rows = measure_memory(
            [WORKLOADS[name] for name in names], torch.device("cpu"), iterations=2, warmup=1, say=lambda line: None
        )
    assert [(one.recompute, one.mlp_chunks, one.offload) for one in built] == [
        (False, 1, False), ("selective", 8, False), ("mlp", 1, True),
    ]  # fmt: skip
    for row, name in zip(rows, names, strict=True):
        made = estimate(WORKLOADS[name].setup(None))
        assert (row["estimated_gib"], row["host_gib"]) == (made.total / GIB, made.host / GIB)
        assert row["tokens_per_second"] == pytest.approx(64e3 / row["step_ms"])
        assert (row["workload"], row["peak_gib"], row["steps"]) == ("tiny", 0.0, 2)
    assert [row["settings"] for row in rows] == ["none", "recompute=selective mlp_chunks=8", "recompute=mlp offload=true"]
    machine = {"gpu": "H200", "count": 1, "torch": "2.11"}
    render({"suite": "memory", "machine": machine, "rows": rows}, Console(file=(text := io.StringIO()), width=120))
    assert "vs peer" not in text.getvalue()
    assert "recompute=mlp offload=true" in text.getvalue()


def test_a_setting_that_does_not_fit_costs_the_others_nothing(monkeypatch):
    def train(workload, device, steps, warmup):
        if workload.recompute is False:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd more")
        return [0.5], GIB

    monkeypatch.setattr(memory, "_train", train)
    said = []
    chosen = [WORKLOADS["tiny-none"], WORKLOADS["tiny-recompute-mlp"]]
    full, other = measure_memory(chosen, torch.device("cpu"), iterations=1, warmup=1, say=said.append)
    assert full["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert "step_ms" not in full
    assert full["estimated_gib"] > 0
    assert (other["step_ms"], other["peak_gib"]) == (500.0, 1.0)
    assert said[0] == f"tiny-none failed: {full['error']}"
    machine = {"gpu": "H200", "count": 1, "torch": "2.11"}
    render({"suite": "memory", "machine": machine, "rows": [full, other]}, Console(file=(text := io.StringIO()), width=120))
    assert "failed" in text.getvalue()


@pytest.mark.parametrize("step", ["estimate", "collect"])
def test_a_fault_beside_the_training_is_a_row_too(monkeypatch, step):
    """Behind a fault of the GPU even the release of memory fails."""
    calls = []

    def once(call):
        def wrapped(*args):
            calls.append(step)
            if len(calls) == 1:
                raise RuntimeError("an illegal memory access")
            return call(*args)

        return wrapped

    module = memory if step == "estimate" else memory.gc
    monkeypatch.setattr(module, step, once(getattr(module, step)))
    monkeypatch.setattr(memory, "_train", lambda *call: ([0.5], GIB))
    chosen = [WORKLOADS["tiny-none"], WORKLOADS["tiny-recompute-mlp"]]
    failed, other = measure_memory(chosen, torch.device("cpu"), iterations=1, warmup=1, say=lambda line: None)
    assert failed["error"] == "RuntimeError: an illegal memory access"
    assert (other["step_ms"], "error" in other) == (500.0, False)
    machine = {"gpu": "H200", "count": 1, "torch": "2.11"}
    render({"suite": "memory", "machine": machine, "rows": [failed, other]}, Console(file=io.StringIO(), width=120))


def test_the_usual_ones_are_of_one_model():
    assert {WORKLOADS[name].case.name for name in USUAL} == {"llama-8b-8layers-32k"}
    assert {"none", "offload=true", "recompute=selective offload=true"} < {WORKLOADS[name].settings for name in USUAL}


def test_a_cpu_is_refused(tmp_path):
    with pytest.raises(InputError, match="the suite memory measures memory of a GPU, and the device is cpu"):
        run_suite("memory", output=tmp_path / "none", device="cpu", command="python -m benchmarks memory")
