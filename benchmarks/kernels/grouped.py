"""The products of stacked experts alone: Octavo's grouped products beside PyTorch's.

Each expert of a layer has the rows of the tokens routed to it; routing is random. Contestants:

* fp8: one scale an expert, gradients in E5M2, which accumulate precisely. PyTorch has no such grouped product: it multiplies
  expert by expert, of sizes that the host knows.
* fp8 rows: E4M3 with a scale a row, by PyTorch's grouped product.
* bf16: PyTorch's grouped product, which Octavo takes, beside a product an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels.contest import Contest, Product
from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels.experts.gemm import Operand, grouped_mm, grouped_weight_mm
from octavo.kernels.experts.routes import make_routes


class _Case:
    """Random operands of a product: of experts' rows a [R, K] and matrices b [E, N, K], or of the sums over rows."""

    def __init__(self, product: Product) -> None:
        chosen = torch.rand(product.tokens, product.experts).argsort(1)[:, : product.top_k]
        self.routes = make_routes(chosen, product.experts)
        ends = self.routes.ends.tolist()
        self.bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        self.product, self.over_rows = product, product.kind == "weight gradient"
        rows = len(self.routes.tokens)
        real = (self.routes.tokens >= 0)[:, None]
        if self.over_rows:
            self.a, self.b = (_random(rows, size) * real for size in (product.rows, product.columns))
        else:
            self.a, self.b = _random(rows, product.summed) * real, _random(product.experts, product.columns, product.summed)

    def room(self) -> tuple[Tensor, list[Tensor]]:
        """A result of all experts, and the part of each: of its rows, or its matrix."""
        product = self.product
        rows, columns = product.rows if self.over_rows else len(self.a), product.columns
        shape = (product.experts, rows, columns) if self.over_rows else (rows, columns)
        out = torch.empty(shape, dtype=torch.bfloat16, device=self.a.device)
        return out, list(out) if self.over_rows else [out[i:j] for i, j in self.bounds]

    def by_octavo(self, a: Operand, b: Operand, *, precise: bool = False) -> Tensor:
        """The product of such operands."""
        multiply = grouped_weight_mm if self.over_rows else grouped_mm
        return multiply(a, b, self.routes, torch.bfloat16, precise=precise)

    def fp8(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """a in this format and b in E4M3; of sums over rows columnwise."""
        a, b = self.a.to(dtype), self.b.to(E4M3.dtype)
        return (a.t().contiguous(), b.t().contiguous()) if self.over_rows else (a, b)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16) * 8


def _fp8(product: Product) -> Contest:
    case, fast = _Case(product), not product.gradient
    a, b = case.fp8((E5M2 if product.gradient else E4M3).dtype)
    scales, one = torch.ones(product.experts), torch.ones(())
    if case.over_rows:
        pairs = [(a[:, i:j].contiguous(), b[:, i:j].contiguous()) for i, j in case.bounds]
    else:
        pairs = [(a[i:j], matrix) for (i, j), matrix in zip(case.bounds, b, strict=True)]

    def theirs() -> Tensor:
        out, parts = case.room()
        for (x, y), part in zip(pairs, parts, strict=True):
            torch._scaled_mm(
                x, y.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast, out=part
            )  # fmt: skip
        return out

    return theirs, lambda: case.by_octavo((a, scales), (b, scales), precise=not fast)


def _fp8_rows(product: Product) -> Contest:
    case, fast, experts = _Case(product), not product.gradient, product.experts
    a, b = case.fp8(E4M3.dtype)
    if case.over_rows:
        a_scale, b_scale = torch.ones(experts, len(a), 1), torch.ones(experts, len(b), 1)
        second = b.t()
    else:
        a_scale, b_scale = torch.ones(len(a), 1), torch.ones(experts, b.shape[1], 1)
        second = b.transpose(1, 2)
    flat = a_scale.flatten(), b_scale.flatten() if case.over_rows else b_scale.flatten(1)

    def theirs() -> Tensor:
        ends = case.routes.ends
        return torch._scaled_grouped_mm(a, second, *flat, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return theirs, lambda: case.by_octavo((a, a_scale), (b, b_scale), precise=not fast)


def _bf16(product: Product) -> Contest:
    case = _Case(product)
    if case.over_rows:
        pairs = [(case.a[i:j].t(), case.b[i:j]) for i, j in case.bounds]
    else:
        pairs = [(case.a[i:j], matrix.t()) for (i, j), matrix in zip(case.bounds, case.b, strict=True)]

    def theirs() -> Tensor:
        out, parts = case.room()
        for (x, y), part in zip(pairs, parts, strict=True):
            torch.mm(x, y, out=part)
        return out

    return theirs, lambda: case.by_octavo((case.a, None), (case.b, None))


CONTESTS: dict[str, Callable[[Product], Contest]] = {"fp8": _fp8, "fp8 rows": _fp8_rows, "bf16": _bf16}
