"""Kernels of an entry's attention and experts, and the freeing of its blocks, for its row of results.

Attention depends on the environment of the entry's process. Octavo's is that of `octavo.describe`, PyTorch's its choice for the
case's heads, Transformer Engine's the choice that it recorded in its last step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend

from benchmarks import te_attention
from benchmarks.cases import AnyCase, VisionCase
from benchmarks.peers import FLASH_ATTENTION, Entry
from benchmarks.plain import Experts
from octavo.kernels import gemm
from octavo.models.description import kernels_on
from octavo.parallel.fsdp2.adapter import groups_of


def attention_of(entry: Entry, case: AnyCase, model: nn.Module, device: torch.device) -> str:
    """The kernel that computes attention in the model of an entry, after a step of it."""
    if entry.package == "transformer-engine":
        return te_attention.chosen()
    if entry.group is None:
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        return kernels_on(device.type, capability, model, native=False)[0]
    if FLASH_ATTENTION in entry.needs:
        return "FlashAttention-4, through transformers"
    return f"scaled_dot_product_attention, {_of_pytorch(case, device)}"


def experts_of(entry: Entry, case: AnyCase, model: nn.Module, device: torch.device) -> str | None:
    """The grouped GEMM of an entry's experts, in words; None for a model without experts."""
    if isinstance(case, VisionCase) or not case.spec.experts:
        return None
    if entry.package == "transformer-engine":
        layer = next(module for module in model.modules() if type(module).__name__ == "GroupedLinear")
        return f"Transformer Engine's GroupedLinear, use_grouped_tensor={getattr(layer, 'use_grouped_tensor', False)}"
    if entry.group is None:
        if not gemm.has_grouped_products(device):
            return "a product an expert"
        return "torch._grouped_mm" if entry.layers == "bf16" else "Octavo's grouped products"
    experts = next((module for module in model.modules() if isinstance(module, Experts)), None)
    if experts is not None:
        return str(getattr(experts.grouped_mm, "func", experts.grouped_mm).__name__)
    return f"transformers, experts_implementation={getattr(model.config, '_experts_implementation', None)}"


def frees_blocks(model: nn.Module) -> bool | None:
    """True if FSDP2 frees some parts of a model behind their forward, False if it keeps all; None for one that is not sharded.

    Every entry keeps embedding and head gathered; entries differ only in the blocks.
    """
    groups = groups_of(module for module in model.modules() if isinstance(module, FSDPModule))
    return any(group.frees_after_forward for group in groups) if groups else None


def _of_pytorch(case: AnyCase, device: torch.device) -> str:
    """PyTorch's kernel for heads of this case in bfloat16."""
    heads, groups, width, causal = (
        (case.heads, case.heads, case.hidden_size // case.heads, False)
        if isinstance(case, VisionCase)
        else (case.spec.heads, case.spec.kv_heads, case.spec.head_dim, True)
    )
    make: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    q, k = (torch.empty(1, case.sequence_length, count, width, **make).transpose(1, 2) for count in (heads, groups))
    choice = torch._fused_sdp_choice(q, k, k, is_causal=causal, enable_gqa=groups != heads)
    return SDPBackend(choice).name.lower().replace("_", " ")
