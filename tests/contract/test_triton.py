"""Triton: what kernels take of its language and tools, and the interpreter in which a CPU runs them."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
import triton
import triton.language as tl
from private_names import SOURCE

from octavo.versions import untested


def used():
    """The names of `triton.language` in Octavo's kernels."""
    found = set()
    for file in (SOURCE / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tl":
                found.add(node.attr)
    return found


@pytest.mark.parametrize("name", sorted(used()))
def test_name_of_the_language(name):
    assert hasattr(tl, name)


def test_a_descriptor_of_a_tensor():
    from triton.tools.tensor_descriptor import TensorDescriptor

    arguments = list(inspect.signature(TensorDescriptor).parameters)
    assert arguments[:4] == ["base", "shape", "strides", "block_shape"]
    made = TensorDescriptor.from_tensor(torch.zeros(16, 32), [8, 16])
    assert (list(made.shape), list(made.strides), list(made.block_shape)) == ([16, 32], [32, 1], [8, 16])


@triton.jit
def _sum_of_products(x, y, out, n: tl.constexpr):
    at = tl.arange(0, n)
    product = tl.load(x + at) * tl.load(y + at)
    tl.store(out, tl.sum(product, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="TRITON_INTERPRET is for machines without a GPU")
def test_a_kernel_runs_in_the_interpreter():
    x, y, out = torch.randn(16), torch.randn(16), torch.zeros(1)
    _sum_of_products[(1,)](x, y, out, 16)
    torch.testing.assert_close(out[0], x @ y)


def test_the_version_is_one_that_was_tested():
    assert untested("triton") is None, triton.__version__
