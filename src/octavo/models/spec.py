"""`ModelSpec`: the sizes and functions of a decoder, in one frozen value for all families.

`octavo.models.families` makes it from a Hugging Face config. The decoder, the count of FLOPs and the conversion of weights read
only the spec. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        family: Hugging Face's `model_type`.
        hidden_size, ffn_size, layers, heads, kv_heads, head_dim, vocabulary: its shape; `ffn_size` is that of one expert.
        normalization, norm_eps: "RMSNorm" or "LayerNorm", and the epsilon added to its mean square.
        activation, gated: the function of the MLP by Hugging Face's name; True for a gated MLP.
        qkv_bias, proj_bias, mlp_bias: biases of the attention's joint product, of its output product, and of the MLP.
        qk_norm: queries and keys are normalised head by head before their rotation, by an RMSNorm each.
        parallel: attention and MLP read the same residual stream, each through a separate norm.
        attention_dropout, hidden_dropout, embedding_dropout: in training: of the probabilities, of a block's additions to the
            residual stream, and of the embeddings.
        tied: the output head is the embedding.
        padding: the token whose row of the embedding is not trained, as in Hugging Face (`pad_token_id`).
        initializer_range: standard deviation of the initial matrices.
        rotary: Hugging Face's `rope_parameters`; empty without rotary positions.
        rotary_fraction: share of each head's columns, the first ones, that rotate.
        max_positions: positions for rotary scalings.
        windows: one entry a layer: None for full attention, else the number of keys in a sliding window.
        experts, top_k: experts of each MLP (0 for none), and experts per token.
        normalized: a token's weights are the probabilities of its experts divided by their sum.
        jitter: in training the input of router and experts is multiplied by numbers from 1 − jitter to 1 + jitter.
        assignment: of tokens to experts, as in `octavo.nn.Experts`.
        balance, router_z_loss: coefficients of the balancing loss and of the router's z loss.
        dense: layers with a dense MLP, of `dense_ffn_size`, instead of experts.
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
    qkv_bias: bool = False
    proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    parallel: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    embedding_dropout: float = 0.0
    tied: bool = False
    padding: int | None = None
    initializer_range: float = 0.02
    rotary: Mapping[str, Any] = field(default_factory=dict, hash=False)
    rotary_fraction: float = 1.0
    max_positions: int | None = None
    windows: tuple[int | None, ...] = ()
    experts: int = 0
    top_k: int = 1
    normalized: bool = True
    jitter: float = 0.0
    assignment: Literal["largest", "sinkhorn", "balanced"] = "largest"
    balance: float = 0.0
    router_z_loss: float = 0.0
    dense: tuple[int, ...] = ()
    dense_ffn_size: int = 0

    @property
    def mixtures(self) -> int:
        """Layers with experts."""
        return self.layers - len(self.dense) if self.experts else 0
