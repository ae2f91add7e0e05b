"""The suite of products: what it multiplies are the products of the models it names; what is written and shown."""

import io
import json

import pytest
import torch
from rich.console import Console

from benchmarks import run
from benchmarks.cases import ALL_CASES
from benchmarks.kernels import grouped, products
from benchmarks.kernels.contest import Workload
from benchmarks.kernels.products import WORKLOADS, measure_products, products_of
from benchmarks.records import render, write
from benchmarks.run import run_suite
from octavo.errors import InputError
from octavo.plan.flops import matmul_parameters


@pytest.mark.parametrize(
    ("name", "case", "layers"),
    [("llama-1b", "llama-1b", 16), ("llama-8b", "llama-8b-8layers", 8), ("llama2-7b", "llama2-7b-8layers", 8)],
)
def test_the_products_are_those_of_the_model(name, case, layers):
    workload = WORKLOADS[name]
    wanted = matmul_parameters(ALL_CASES[case].spec).layers * workload.tokens
    assert sum(product.flops for product in products_of(workload)) * layers == 6 * wanted


def test_both_contestants_multiply_the_same(monkeypatch):
    """On a CPU, where neither has a choice; shapes, layouts and formats are those of a GPU."""

    def by_pytorch(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum):
        return (a.float() @ b.float()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", by_pytorch)
    small = Workload("small", 64, ((32, 48),))
    for product in products_of(small):
        for calls in products.CONTESTS.values():
            theirs, ours = (call() for call in calls(product))
            assert ours.shape == (product.rows, product.columns)
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-2)


def test_contestants_of_experts_multiply_the_same(monkeypatch):
    """On a CPU, where rows are not filled up; `tests/gpu` runs PyTorch's own products."""

    def by_pytorch(a, b, *, scale_a, scale_b, out_dtype, use_fast_accum, out):
        return out.copy_(a.float() @ b.float())

    def grouped_by_pytorch(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum):
        ends = offs.tolist()
        bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        if b.dim() == 2:
            assert scale_a.shape == (len(ends) * len(a),)
            assert scale_b.shape == (len(ends) * b.shape[1],)
            return torch.stack([a[:, i:j].float() @ b[i:j].float() for i, j in bounds]).to(out_dtype)
        assert scale_a.shape == (len(a),)
        assert scale_b.shape == (len(b), b.shape[2])
        return torch.cat([a[i:j].float() @ b[n].float() for n, (i, j) in enumerate(bounds)]).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", by_pytorch)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", grouped_by_pytorch)
    small = Workload("small", 24, ((32, 48),), experts=4, top_k=2)
    for product in products_of(small):
        assert product.flops == 2 * 48 * 32 * 48  # 48 copies of tokens
        for calls in grouped.CONTESTS.values():
            theirs, ours = (call() for call in calls(product))
            assert ours.shape == ((4, 48, 32) if product.kind == "weight gradient" else (product.rows, product.columns))
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-2)


def test_rows_are_written_and_shown(tmp_path, monkeypatch):
    times = iter([[30.0, 20.0]] * 9)
    monkeypatch.setattr("octavo.bench.kernels.median_us", lambda *runs, **how: next(times))
    monkeypatch.setattr("octavo.bench.kernels.FLUSHED_BYTES", 4)
    said = []
    small = Workload("small", 64, ((32, 48),))
    rows = measure_products([small], torch.device("cpu"), iterations=1, warmup=1, say=said.append)
    assert said == [f"small {name}: 60 us, PyTorch 90 us, 1.500 x" for name in ("fp8", "fp8 fast", "bf16")]
    assert rows[0] == {
        "workload": "small", "entry": "octavo", "precision": "fp8", "product": "output", "shape": [64, 48, 32],
        "us": 20.0, "torch_us": 30.0, "tflops": pytest.approx(2 * 64 * 48 * 32 / 20e-6 / 1e12), "gain": 1.5,
    }  # fmt: skip
    machine = {"gpu": "NVIDIA H200", "cpu": None, "count": 1, "torch": "2.11.0"}
    results = {"suite": "products", "machine": machine, "rows": rows}
    assert write(results, tmp_path) == [tmp_path / "products.json"]
    assert json.loads((tmp_path / "products.json").read_text()) == results
    text = io.StringIO()
    render(results, Console(file=text, width=120))
    assert "small bf16 weight gradient" in text.getvalue()
    assert "48 x 32 x 64" in text.getvalue()
    assert "1.500" in text.getvalue()


def test_a_product_that_fails_is_a_row(monkeypatch):
    def broken(product):
        if product.kind == "input gradient":
            raise RuntimeError("no such product\nand a trace")
        return (lambda: None, lambda: None)

    monkeypatch.setattr(products, "CONTESTS", {"fp8": broken, "bf16": lambda product: (lambda: None, lambda: None)})
    monkeypatch.setattr(products, "cold_timer", lambda *how: lambda *calls: [30.0, 20.0])
    small, said = Workload("small", 64, ((32, 48),)), []
    rows = measure_products([small], torch.device("cpu"), iterations=1, warmup=1, say=said.append)
    assert ["error" in row for row in rows] == [False, True, False, False, False, False]
    assert rows[1] == {
        "workload": "small", "entry": "octavo", "precision": "fp8", "product": "input gradient", "shape": [64, 32, 48],
        "error": "RuntimeError: no such product",
    }  # fmt: skip
    assert said == [
        "small fp8: input gradient 64 x 32 x 48 failed: RuntimeError: no such product",
        "small bf16: 60 us, PyTorch 90 us, 1.500 x",  # of a whole block alone
    ]
    machine = {"gpu": "NVIDIA H200", "cpu": None, "count": 1, "torch": "2.11.0"}
    render({"suite": "products", "machine": machine, "rows": rows}, Console(file=(text := io.StringIO()), width=120))
    assert "small fp8 input gradient: RuntimeError: no such product" in text.getvalue()


def test_a_cpu_has_no_products_to_time(tmp_path):
    with pytest.raises(InputError, match="the suite products times kernels of a GPU, and the device is cpu"):
        run_suite("products", output=tmp_path / "none", device="cpu", command="python -m benchmarks products")


@pytest.mark.parametrize(("suite", "cases", "warmup"), [("kernels", ["cast", "amax"], 10), ("products", ["llama-8b"], 3)])
def test_a_run_of_calls_is_written(tmp_path, monkeypatch, suite, cases, warmup):
    def measured(works, device, *, iterations, warmup, say):
        return [{"workload": work.name, "entry": "octavo", "calls": [iterations, warmup]} for work in works]

    monkeypatch.setattr(run, "_check_gpu", lambda *_: None)
    monkeypatch.setattr(run, f"measure_{suite}", measured)
    results = run_suite(suite, cases=cases, steps=7, output=tmp_path, device="cpu", command=f"python -m benchmarks {suite}")
    assert json.loads((tmp_path / f"{suite}.json").read_text()) == results
    assert [row["workload"] for row in results["rows"]] == cases
    assert [row["calls"] for row in results["rows"]] == [[7, warmup]] * len(cases)
    assert results["machine"]["peers"] == {}
