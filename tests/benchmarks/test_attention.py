"""The suite of attention: what it counts, what it calls, what is written and shown; its kernels need a GPU."""

import io
from contextlib import contextmanager

import pytest
import torch
from rich.console import Console

from benchmarks.kernels import attention
from benchmarks.kernels.attention import WORKLOADS, Workload, measure_attention
from benchmarks.records import render
from benchmarks.run import run_suite
from octavo.errors import InputError

SMALL = Workload("small", 2, 96, 4, 2, 16, window=20, document=30)


@pytest.mark.parametrize(
    "workload", [SMALL, SMALL._replace(window=None), SMALL._replace(document=0), SMALL._replace(window=500)]
)
def test_pairs_are_those_of_the_mask(workload):
    mask = workload.pattern().mask(workload.batch, torch.device("cpu")).expand(workload.batch, -1, -1, -1)
    assert workload.pairs() == int(mask.sum())


def test_documents_have_the_mean_that_is_named():
    lengths = [end - first for first, end in SMALL._replace(tokens=30_000).pattern().bounds(0)]
    assert sum(lengths) / len(lengths) == pytest.approx(30, rel=0.1)
    assert WORKLOADS["llama-8b-16k"].pairs() == 16_384 * 16_385 // 2


def test_rows_are_measured_and_shown(monkeypatch):
    def timer(device, rounds, warm_up):
        def time(*calls):
            for call in calls:
                call()
            return [2.0, 5.0]

        return time

    monkeypatch.setattr(attention, "cold_timer", timer)
    said = []
    (row,) = measure_attention([SMALL], torch.device("cpu"), iterations=1, warmup=1, say=said.append)
    work = SMALL.pairs() * 4 * 16
    assert row["entry"] == "PyTorch on the CPU"
    assert row["forward_tflops"] == pytest.approx(4 * work / 2e-6 / 1e12)
    assert row["backward_tflops"] == pytest.approx(10 * work / 5e-6 / 1e12)
    assert row["tflops"] == pytest.approx(14 * work / 7e-6 / 1e12)
    assert said[0].startswith("small PyTorch on the CPU: 2 us, backward 5 us")
    machine = {"gpu": "NVIDIA H200", "cpu": None, "count": 1, "torch": "2.11.0"}
    render({"suite": "attention", "machine": machine, "rows": [row]}, Console(file=(text := io.StringIO()), width=120))
    assert "PyTorch on the CPU" in text.getvalue()


def names(monkeypatch):
    """Two kernels of a CPU: that of FlashAttention-4 allowed, and the other; returns the names of those that ran."""
    allowed, ran = [True], []

    @contextmanager
    def flash(on):
        allowed.append(on)
        yield
        allowed.pop()

    def attend(q, k, v, pattern, *, scale):
        ran.append("flash" if allowed[-1] else "cudnn")
        return computed(q, k, v, pattern, scale=scale)

    computed = attention.attend
    monkeypatch.setattr(attention, "_flash", flash)
    monkeypatch.setattr(attention, "backend", lambda *call: "flash" if allowed[-1] else "cudnn")
    monkeypatch.setattr(attention, "attend", attend)
    return ran


def measured(workloads, said, **how):
    return measure_attention(workloads, torch.device("cpu"), iterations=1, warmup=1, say=said.append, **how)


def test_a_kernel_that_fails_is_a_row_and_the_others_are_timed(monkeypatch):
    ran = names(monkeypatch)
    monkeypatch.setattr(attention, "cold_timer", lambda *how: lambda *calls: [2.0, 5.0] * (len(calls) // 2))
    computed = attention.attend

    def broken(*tensors, **how):
        out = computed(*tensors, **how)
        if ran[-1] == "flash":
            raise RuntimeError("no such kernel\nand a trace")
        return out

    monkeypatch.setattr(attention, "attend", broken)
    flash, cudnn = measured([SMALL], said := [])
    assert flash == {
        "workload": "small", "entry": "flash", "shape": [2, 96, 4, 2, 16], "pairs": SMALL.pairs(),
        "error": "RuntimeError: no such kernel",
    }  # fmt: skip
    assert (cudnn["entry"], cudnn["forward_us"], cudnn["backward_us"]) == ("cudnn", 2.0, 5.0)
    assert said[0] == "small flash failed: RuntimeError: no such kernel"
    assert said[1].startswith("small cudnn: 2 us, backward 5 us")
    machine = {"gpu": "NVIDIA H200", "cpu": None, "count": 1, "torch": "2.11.0"}
    render({"suite": "attention", "machine": machine, "rows": [flash, cudnn]}, Console(file=(text := io.StringIO()), width=120))
    assert "small: RuntimeError: no such kernel" in text.getvalue()


def test_workloads_behind_one_that_fails_are_measured(monkeypatch):
    names(monkeypatch)
    other = SMALL._replace(name="other")

    def time(*calls):
        raise RuntimeError("out of memory")

    turns = iter([time, lambda *calls: [2.0, 5.0] * (len(calls) // 2)])
    monkeypatch.setattr(attention, "cold_timer", lambda *how: lambda *calls: next(turns)(*calls))
    rows = measured([SMALL, other], said := [])
    assert [(row["workload"], row["entry"], row.get("error")) for row in rows] == [
        ("small", "flash", "RuntimeError: out of memory"),
        ("small", "cudnn", "RuntimeError: out of memory"),
        ("other", "flash", None),
        ("other", "cudnn", None),
    ]
    assert said[0] == "small failed: RuntimeError: out of memory"
    turns = iter([lambda *calls: [2.0, 5.0] * (len(calls) // 2)])
    drawn = attention._draw
    monkeypatch.setattr(attention, "_draw", lambda workload, device: 1 / 0 if workload is SMALL else drawn(workload, device))
    rows = measured([SMALL, other], [])
    assert [(row["workload"], row["entry"], row.get("error")) for row in rows] == [
        ("small", "octavo", "ZeroDivisionError: division by zero"),
        ("other", "flash", None),
        ("other", "cudnn", None),
    ]


def test_a_cpu_is_refused(tmp_path):
    with pytest.raises(InputError, match="the suite attention times kernels of a GPU"):
        run_suite("attention", output=tmp_path / "none", device="cpu", command="python -m benchmarks attention")
