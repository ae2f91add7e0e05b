"""PyTorch's scaled dot-product attention: the operators that return their log-sum-exp, and the choice among kernels."""

from __future__ import annotations

import math

import pytest
import torch
from private_names import Name, check
from torch.nn.attention import SDPBackend

_PARTS = "returns the log-sum-exp that joins parts of a split sequence; `scaled_dot_product_attention` does not"
_VARIABLE = (
    "packed documents in one call, with a log-sum-exp for a backward of Octavo's; `varlen_attn` has a backward of its own"
)
NAMES = (
    Name("torch.ops.aten._scaled_dot_product_cudnn_attention", ("kernels/attention/library.py",), _PARTS),
    Name("torch.ops.aten._scaled_dot_product_cudnn_attention_backward", ("kernels/attention/library.py",), _PARTS),
    Name("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", ("kernels/attention/library.py",), _PARTS),
    Name("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", ("kernels/attention/library.py",), _PARTS),
    Name("torch.ops.aten._flash_attention_forward", ("kernels/attention/variable.py",), _VARIABLE),
    Name("torch.ops.aten._flash_attention_backward", ("kernels/attention/variable.py",), _VARIABLE),
    Name(
        "torch._fused_sdp_choice",
        ("nn/attend.py", "doctor.py", "benchmarks/chosen.py"),
        "the name of the kernel that PyTorch chooses; no public API",
    ),
    Name("torch._C._cudnn", ("kernels/attention/library.py",), "the loaded cuDNN version, which may be older than the build's"),
)


@pytest.mark.parametrize("name", NAMES[:-1], ids=lambda name: name.path)
def test_name(name):
    check(name)


@pytest.mark.skipif(not torch.backends.cudnn.is_available(), reason="needs cuDNN")
def test_name_of_cudnn():
    check(NAMES[-1])
    assert torch._C._cudnn.getVersionInt() == torch.backends.cudnn.version()


ARGUMENTS = {
    "_scaled_dot_product_cudnn_attention": (
        "query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask", "scale",
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        "grad_out", "query", "key", "value", "out", "logsumexp", "philox_seed", "philox_offset", "attn_bias", "cum_seq_q",
        "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "scale",
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (
        "query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale",
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal", "attn_mask", "scale",
    ),
    "_flash_attention_forward": (
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
        "scale", "window_size_left", "window_size_right",
    ),
    "_flash_attention_backward": (
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
        "is_causal", "rng_state", "unused", "scale", "window_size_left", "window_size_right",
    ),
}  # fmt: skip


@pytest.mark.parametrize("operator", ARGUMENTS)
def test_arguments_of_operators_are_in_this_order(operator):
    schema = getattr(torch.ops.aten, operator).default._schema
    names = tuple(argument.name for argument in schema.arguments)
    assert names[: len(ARGUMENTS[operator])] == ARGUMENTS[operator]
    # Versions add keyword arguments.
    assert all(argument.has_default_value() for argument in schema.arguments[len(ARGUMENTS[operator]) :])


def test_the_log_sum_exp_is_of_scaled_products_by_the_natural_logarithm():
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=0.3)
    scores = (q.double() @ k.double().mT * 0.3).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), rtol=1e-5, atol=1e-5)


def test_the_choice_is_a_number_of_sdpbackend():
    q = torch.randn(1, 2, 4, 8)
    assert SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True, enable_gqa=False)) in SDPBackend.__members__.values()
