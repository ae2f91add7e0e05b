"""Products by measured algorithms: PyTorch's result to the last bit, whichever is taken."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.kernels import algorithms, cublaslt, gemm
from octavo.process import process

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, COLUMNS, SUMMED = 2048, 1536, 1024


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch):
    monkeypatch.setattr(process, "product_uses", {})
    monkeypatch.setattr(process, "product_algorithms", {})


def operands(rows=ROWS, columns=COLUMNS, summed=SUMMED, dtypes=(E4M3, E4M3), device="cuda"):
    """a by rows and b by columns, with scales."""
    a, b = ((torch.randn(n, summed, device=device) * 16).to(dtype) for n, dtype in zip((rows, columns), dtypes, strict=True))
    return a, b.t(), (torch.rand((), device=device), torch.rand((), device=device))


def matrix(rows, columns, dtype, by_rows):
    made = torch.randn(rows, columns, device="cuda", dtype=dtype)
    return made if by_rows else made.t().contiguous().t()


def by_algorithm(ab, **how):
    a, b, scales = ab
    return algorithms.mm(a, b, scales=scales, **({"out_dtype": torch.bfloat16, "fast": True} | how))


def by_pytorch(ab, out_dtype=torch.bfloat16, fast=True, bias=None):
    a, b, (scale_a, scale_b) = ab
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=fast)


def same(x, y):
    assert x.dtype == y.dtype
    assert torch.equal(x, y)


def chosen():
    return list(process.product_algorithms.values())


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("out_dtype", "bias"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_fp8_products_have_pytorchs_bits_by_whichever_algorithm_is_taken(dtypes, out_dtype, bias, fast):
    how = {"out_dtype": out_dtype, "fast": fast}
    if bias:
        how["bias"] = torch.randn(COLUMNS, device="cuda", dtype=out_dtype)
    for _ in range(4):
        ab = operands(dtypes=dtypes)
        same(by_algorithm(ab, **how), by_pytorch(ab, **how))
    (shape,) = process.product_algorithms
    assert shape == (0, ROWS, COLUMNS, SUMMED, dtypes[0], True, dtypes[1], False, out_dtype, bias, fast, False)
    for dynamic in (False, True):
        product = cublaslt.Product(shape._replace(dynamic=dynamic))
        assert product.algorithms
        for number in range(len(product.algorithms)):  # none splits the sum, so none adds in another order
            out = torch.empty(ROWS, COLUMNS, device="cuda", dtype=out_dtype)
            same(product(number, *ab, how.get("bias"), out), by_pytorch(ab, **how))


@pytest.mark.parametrize("gain", [0.0, algorithms._GAIN])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("a_by_rows", "b_by_rows"), [(True, False), (True, True), (False, True), (False, False)])
@pytest.mark.parametrize("kind", ["plain", "bias", "float32"])
def test_wide_products_have_pytorchs_bits(monkeypatch, a_by_rows, b_by_rows, dtype, kind, gain):
    monkeypatch.setattr(algorithms, "_GAIN", gain)  # 0 takes one, however fast PyTorch's own is
    out_dtype = torch.float32 if kind == "float32" else dtype
    for _ in range(4):
        a, b = matrix(ROWS, SUMMED, dtype, a_by_rows), matrix(SUMMED, COLUMNS, dtype, b_by_rows)
        bias = torch.randn(COLUMNS, device="cuda", dtype=dtype) if kind == "bias" else None
        found = gemm.high_precision_mm(a, b, out_dtype, bias)
        if kind == "float32":
            same(found, torch.mm(a, b, out_dtype=torch.float32))
        else:
            same(found, a @ b if bias is None else torch.addmm(bias, a, b))
    ((shape, taken),) = process.product_algorithms.items()
    assert (shape.a_by_rows, shape.b_by_rows) == (a_by_rows, b_by_rows)
    assert taken is not None or gain > 0


def test_a_product_is_measured_the_second_time_and_a_small_one_never():
    small, large = operands(512, 512, 512), operands()
    for expected in (0, 1, 1):
        for ab in (small, large):
            by_algorithm(ab)
        assert len(chosen()) == expected


def test_a_measurement_begins_on_an_idle_gpu(monkeypatch):
    """As beside a collective in the first step: a kernel of another stream takes half a second."""
    idle, other = [], torch.cuda.Stream()
    measure = algorithms._fastest
    monkeypatch.setattr(algorithms, "_fastest", lambda *args: (idle.append(other.query()), measure(*args))[1])
    by_algorithm(operands())
    with torch.cuda.stream(other):
        torch.cuda._sleep(10**9)
    assert not other.query()
    by_algorithm(operands())
    assert idle == [True]


def test_choices_have_cublas_numbers(monkeypatch):
    monkeypatch.setattr(algorithms, "_GAIN", 0.0)
    for _ in range(2):
        by_algorithm(operands())
    ((product, name),) = algorithms.choices().items()
    assert product == f"cuda:0, {ROWS} x {COLUMNS} x {SUMMED}, e4m3 rows · e4m3 columns → bfloat16, fast"
    assert re.fullmatch(r"algorithm \d+, tile \d+, stages \d+, cluster \d+, swizzle \d+, option \d+, (static|dynamic)", name)


def test_what_is_stored_with_gaps_or_begins_anywhere():
    (a, b, scales), wide = operands(), torch.randn(ROWS, SUMMED + 8, device="cuda", dtype=torch.bfloat16)[:, :SUMMED]
    for _ in range(3):
        by_algorithm((a, b, scales))
        gemm.high_precision_mm(wide, wide.t(), torch.bfloat16)
    assert len(chosen()) == 1
    moved = torch.empty(a.numel() + 16, dtype=torch.uint8, device="cuda")[16:].view(E4M3).view_as(a)
    moved.copy_(a)
    same(by_algorithm((moved, b, scales)), by_pytorch((a, b, scales)))


@pytest.mark.parametrize("first", [0.0, float("inf"), float("nan")])
def test_results_that_tell_nothing_choose_nothing(first):
    ab = operands()
    numbers = [x.float().clone() for x in ab[:2]]
    nothing = (torch.full_like(numbers[0], first).to(E5M2), ab[1], ab[2])
    for _ in range(4):
        found = by_algorithm(nothing)
        assert torch.equal(found, by_pytorch(nothing)) or first != 0.0
    assert chosen() == []
    ab = (numbers[0].to(E5M2), *ab[1:])
    for _ in range(2):
        same(by_algorithm(ab), by_pytorch(ab))
    assert len(chosen()) == 1


def test_what_a_router_draws_or_somebody_watches_is_pytorchs():
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen, ab = [], operands()
    for _ in range(3):
        same(by_algorithm(ab, recurring=False), by_pytorch(ab))
        with Watching():
            by_algorithm(ab)
    assert chosen() == []
    assert seen == [torch.ops.aten._scaled_mm.default] * 3


def test_a_measurement_needs_little_memory():
    ab = operands(8192, 8192, 1024)
    by_algorithm(ab)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    by_algorithm(ab)
    assert len(chosen()) == 1
    result = 2 * 8192 * 8192
    assert torch.cuda.max_memory_allocated() - before < result + 100e6


@pytest.mark.parametrize("measured", [False, True])
def test_in_a_cuda_graph(measured, monkeypatch):
    monkeypatch.setattr(algorithms, "_GAIN", 0.0)
    ab, stream, graph = operands(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3 if measured else 1):
            by_algorithm(ab)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        out = by_algorithm(ab)
    assert [taken is not None for taken in chosen()] == [True] * measured
    for _ in range(2):
        fresh = operands()
        for mine, other in zip((*ab[:2], *ab[2]), (*fresh[:2], *fresh[2]), strict=True):
            mine.copy_(other)
        graph.replay()
        same(out, by_pytorch(ab))


def test_several_streams_at_once(monkeypatch):
    monkeypatch.setattr(algorithms, "_GAIN", 0.0)
    operand_sets = [operands() for _ in range(8)]
    for _ in range(2):
        by_algorithm(operand_sets[0])
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in range(4)], []
    for _ in range(3):
        for i, ab in enumerate(operand_sets):
            with torch.cuda.stream(streams[i % 4]):
                found.append((i, by_algorithm(ab)))
    torch.cuda.synchronize()
    for i, out in found:
        same(out, by_pytorch(operand_sets[i]))


def test_into_a_matrix_that_is_there(monkeypatch):
    monkeypatch.setattr(algorithms, "_GAIN", 0.0)
    for _ in range(3):
        a, b, (a_scale_inv, b_scale_inv) = ab = operands(dtypes=(E5M2, E4M3))
        out = torch.empty(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
        assert gemm.scaled_mm_into(out, a, a_scale_inv, b.t(), b_scale_inv) is out
        same(out, by_pytorch(ab, fast=False))
    assert len(chosen()) == 1
    assert None not in chosen()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one(monkeypatch):
    monkeypatch.setattr(algorithms, "_GAIN", 0.0)
    for _ in range(3):
        ab = operands(device="cuda:1")
        same(by_algorithm(ab), by_pytorch(ab))
    ((shape, taken),) = process.product_algorithms.items()
    assert shape.device == 1
    assert taken is not None
