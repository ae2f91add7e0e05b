"""The matrix products of a training step alone: the algorithm of cuBLAS that PyTorch takes beside the one that Octavo takes.

Each layer of a workload has three products: in FP8 (E4M3 with E5M2 gradients, which accumulate precisely), the same with fast
accumulation in the gradients too, and in bf16. Both contestants run in turns on random operands; medians count. The results are
the same to the last bit, or Octavo would not take the algorithm (`octavo.kernels.algorithms`). The products of experts have
separate contestants (`benchmarks.kernels.grouped`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import grouped
from benchmarks.kernels.contest import Contest, Product, Workload
from octavo.bench.kernels import cold_timer
from octavo.errors import recorded
from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels import gemm

CHOOSING = 3
"""Calls until the algorithm of a product is settled."""

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("llama-1b", 16_384, ((2048, 3072), (2048, 2048), (2048, 16_384), (8192, 2048))),
        Workload("llama-8b", 16_384, ((4096, 6144), (4096, 4096), (4096, 28_672), (14_336, 4096))),
        Workload("llama2-7b", 16_384, ((4096, 12_288), (4096, 4096), (4096, 22_016), (11_008, 4096))),
        Workload("vit-huge", 32_896, ((1280, 3840), (1280, 1280), (1280, 5120), (5120, 1280))),
        Workload("mixtral-8x7b", 16_384, ((4096, 28_672), (14_336, 4096)), experts=8, top_k=2),
    )
}


def products_of(workload: Workload) -> list[Product]:
    """All products of a block, forward and backward; of an MoE block, those of its experts."""
    of = workload.experts, workload.top_k
    rows = workload.tokens * max(1, workload.top_k)
    return [
        product
        for columns_in, columns_out in workload.layers
        for product in (
            Product("output", rows, columns_out, columns_in, False, *of),
            Product("input gradient", rows, columns_in, columns_out, True, *of),
            Product("weight gradient", columns_out, columns_in, rows, True, *of),
        )
    ]


def measure_products(
    workloads: Iterable[Workload], device: torch.device, *, iterations: int, warmup: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for each product of each workload in each precision, with both contestants' times, or its error."""
    time = cold_timer(device, iterations, max(warmup, CHOOSING))
    rows: list[dict[str, Any]] = []
    for workload in workloads:
        for precision, calls in (grouped.CONTESTS if workload.experts else CONTESTS).items():
            found: list[dict[str, Any]] = []
            for product in products_of(workload):
                shape = [product.rows, product.columns, product.summed]
                row: dict[str, Any] = {
                    "workload": workload.name, "entry": "octavo", "precision": precision, "product": product.kind,
                    "shape": shape,
                }  # fmt: skip
                found.append(row)
                with recorded(row, f"{workload.name} {precision}: {product.kind} {' x '.join(map(str, shape))}", say):
                    with device:
                        contest = calls(product)
                    theirs, ours = time(*contest)
                    row |= {"us": ours, "torch_us": theirs, "tflops": product.flops / ours / 1e6, "gain": theirs / ours}
            rows += found
            if all("us" in row for row in found):  # the times of a whole block
                theirs, ours = (sum(row[key] for row in found) for key in ("torch_us", "us"))
                say(f"{workload.name} {precision}: {ours:.0f} us, PyTorch {theirs:.0f} us, {theirs / ours:.3f} x")
    return rows


def _operands(product: Product) -> tuple[Tensor, Tensor]:
    a, b = (torch.randn(rows, product.summed, dtype=torch.bfloat16) * 8 for rows in (product.rows, product.columns))
    return a, b


def _fp8(product: Product, *, fast: bool) -> Contest:
    fast = fast or not product.gradient
    one = torch.ones(())
    a, b = _operands(product)
    a, b = a.to((E5M2 if product.gradient else E4M3).dtype), b.to(E4M3.dtype)
    return (
        lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast),
        lambda: gemm.scaled_mm(a, one, b, one, out_dtype=torch.bfloat16, precise=not fast),
    )


def _bf16(product: Product) -> Contest:
    """Operands in the layouts of a training step: gradients have no transposed copy."""
    a, b = _operands(product)
    if product.gradient:
        b = b.t().contiguous().t()
    if product.kind == "weight gradient":
        a = a.t().contiguous().t()
    return lambda: a @ b.t(), lambda: gemm.high_precision_mm(a, b.t(), torch.bfloat16)


CONTESTS: dict[str, Callable[[Product], Contest]] = {
    "fp8": partial(_fp8, fast=False),
    "fp8 fast": partial(_fp8, fast=True),
    "bf16": _bf16,
}
