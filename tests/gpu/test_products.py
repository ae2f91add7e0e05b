"""The suite of products on a GPU: contestants of experts multiply the same, in PyTorch's layouts."""

import pytest
import torch

from benchmarks.kernels.contest import Workload
from benchmarks.kernels.grouped import CONTESTS
from benchmarks.kernels.products import products_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("precision", CONTESTS)
@pytest.mark.parametrize(
    "product", products_of(Workload("small", 700, ((256, 384),), experts=4, top_k=2)), ids=lambda p: p.kind
)
def test_contestants_of_experts_multiply_the_same(product, precision):
    with torch.device("cuda"):
        theirs, ours = (call() for call in CONTESTS[precision](product))
    real = slice(None) if product.kind == "weight gradient" else slice(product.rows)  # behind the last row is anything
    torch.testing.assert_close(
        ours[real], theirs[real], rtol=2e-2, atol=2.0
    )  # sums of 1,400 products in FP8, scaled in another way
