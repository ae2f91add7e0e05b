"""Layers with Transformer Engine's names, in FP8 under `octavo.fp8_autocast`; on a CPU too.

May import fp8 and lower levels, but not config.
"""

from octavo.nn.attention import DotProductAttention, MultiheadAttention
from octavo.nn.block import TransformerLayer
from octavo.nn.grouped import GroupedLinear
from octavo.nn.linear import LayerNormLinear, Linear
from octavo.nn.mlp import LayerNormMLP
from octavo.nn.moe import Experts, LayerNormMoE
from octavo.nn.norm import LayerNorm, RMSNorm

__all__ = [
    "DotProductAttention", "Experts", "GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "LayerNormMoE", "Linear",
    "MultiheadAttention", "RMSNorm", "TransformerLayer",
]  # fmt: skip
