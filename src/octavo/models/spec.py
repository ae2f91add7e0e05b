"""`ModelSpec`: the sizes and functions of a decoder, in one frozen value for all families.

`octavo.models.families` makes it from a Hugging Face config. The decoder, the count of FLOPs and the conversion of weights read
only the spec. Experts are for the count: Octavo's blocks do not compute them yet. Imports neither torch nor
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        family: Hugging Face's `model_type`.
        hidden_size, ffn_size, layers, heads, kv_heads, head_dim, vocabulary: its shape; `ffn_size` is that of one expert.
        normalization, norm_eps: "RMSNorm" or "LayerNorm", and the addend of its mean square.
        activation, gated: the function of the MLP by Hugging Face's name; True if it is applied to a gate.
        attention_bias, mlp_bias: biases of both products of the attention, and of the MLP.
        attention_dropout: in training.
        tied: the output head is the embedding.
        padding: the token whose row of the embedding is not trained, as in Hugging Face (`pad_token_id`).
        initializer_range: standard deviation of the initial matrices.
        rotary: Hugging Face's `rope_parameters`; empty for a model without.
        max_positions: of rotary scalings.
        windows: one entry a layer: None for full attention, else the keys that a sliding window keeps.
        experts, visited: experts of each MLP (0 for none), and those of them that a token visits.
    """

    family: str
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    normalization: str
    norm_eps: float
    activation: str
    gated: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    tied: bool = False
    padding: int | None = None
    initializer_range: float = 0.02
    rotary: Mapping[str, Any] = field(default_factory=dict, hash=False)
    max_positions: int | None = None
    windows: tuple[int | None, ...] = ()
    experts: int = 0
    visited: int = 1
