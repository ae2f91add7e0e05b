"""A Llama in plain PyTorch: the bf16 peer, and torchao's model.

It is written to be fast: the model is one `torch.compile` graph, attention is SDPA with grouped key-value heads (cuDNN's
kernel on Hopper), logits stay in the model's dtype and only the loss is float32. Outputs equal `transformers.LlamaForCausalLM`
up to rounding, with the same parameter names; cache, padding and generation are left out.
Shapes: B batch, T sequence, H heads (kv heads for keys and values), K head_dim, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.spec import ModelSpec

STD = 0.02
"""Standard deviation of initial weights."""


def rotary_angles(tokens: int, head_dim: int, base: float, device: torch.device) -> Tensor:
    """Angles [T, K] of the positions, float32; the second half of a row repeats the first."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(tokens, device=device, dtype=torch.float32)
    return torch.outer(positions, base**-exponents).repeat(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (k, k + K/2) of [..., K] by its position's angle."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention with grouped key-value heads."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.grouped = spec.kv_heads < spec.heads
        self.q_proj = nn.Linear(spec.hidden_size, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, spec.kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, spec.kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """Attend; returns B × T × D."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        q, k = rotate(q, cos_TK, sin_TK), rotate(k, cos_TK, sin_TK)
        out_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(out_BHTK.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.ffn_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.ffn_size, bias=False)
        self.down_proj = nn.Linear(spec.ffn_size, spec.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns B × T × D."""
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    """Norm, attention, norm, MLP, each pair added to the residual."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = Mlp(spec)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """Returns B × T × D."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TK, sin_TK)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Backbone(nn.Module):
    """Embedding, blocks and the last norm."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.rope_theta = spec.rotary["rope_theta"]
        self.embed_tokens = nn.Embedding(spec.vocabulary, spec.hidden_size)
        self.layers = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Returns B × T × D, normalised."""
        x_BTD = self.embed_tokens(ids_BT)
        angles_TK = rotary_angles(ids_BT.shape[1], self.head_dim, self.rope_theta, ids_BT.device)
        cos_TK, sin_TK = angles_TK.cos().to(x_BTD.dtype), angles_TK.sin().to(x_BTD.dtype)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TK, sin_TK)
        return self.norm(x_BTD)


class PlainLlama(nn.Module):
    """A Llama with its loss, matrices drawn from N(0, 0.02²); `loss` can be replaced by its compiled version."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.model = Backbone(spec)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocabulary, bias=False)
        if spec.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=STD)
        self.loss = next_token_loss

    def logits(self, ids_BT: Tensor) -> Tensor:
        """Scores of the next token, B × T × V in the model's dtype."""
        return self.lm_head(self.model(ids_BT))

    def forward(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Mean cross entropy of each next token, in float32; labels are shifted here, as Hugging Face's are."""
        return self.loss(self.logits(ids_BT), labels_BT)


def next_token_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Mean cross entropy of each next token, in float32 for logits of any dtype."""
    # The last position has no target (-100, the default of `ignore_index`): a slice without it would copy gigabytes of logits.
    targets_BT = F.pad(labels_BT[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
