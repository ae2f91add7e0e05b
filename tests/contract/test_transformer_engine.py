"""Transformer Engine and torchao, the peers of `benchmarks/`, where they are installed."""

from __future__ import annotations

import importlib.util

import pytest
from private_names import Name, check

NAMES = (
    Name(
        "transformer_engine.pytorch.attention.dot_product_attention._attention_backends",
        ("benchmarks/te_attention.py",),
        "the attention kernel that it chose, which nothing public tells",
    ),
    Name(
        "torchao.prototype.moe_training._to_fp8_rowwise_then_scaled_grouped_mm",
        ("benchmarks/peers.py",),
        "its experts in FP8, a prototype",
    ),
)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_name(name):
    package = name.path.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    check(name)
