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

from octavo.bench.cases import Case

IGNORED = -100
STD = 0.02
"""Standard deviation of initial weights."""


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turn each pair (k, k + K/2) by its position's angle."""
    low, high = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-high, low), dim=-1) * sin_TK


class Attention(nn.Module):
    """Causal attention with grouped key-value heads."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.head_dim = case.head_dim
        self.grouped = case.kv_heads < case.heads
        self.q_proj = nn.Linear(case.hidden_size, case.heads * case.head_dim, bias=False)
        self.k_proj = nn.Linear(case.hidden_size, case.kv_heads * case.head_dim, bias=False)
        self.v_proj = nn.Linear(case.hidden_size, case.kv_heads * case.head_dim, bias=False)
        self.o_proj = nn.Linear(case.heads * case.head_dim, case.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """Attend; returns B × T × D."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        q, k = rotate(q, cos_TK, sin_TK), rotate(k, cos_TK, sin_TK)
        out_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(out_BHTK.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(case.hidden_size, case.intermediate_size, bias=False)
        self.up_proj = nn.Linear(case.hidden_size, case.intermediate_size, bias=False)
        self.down_proj = nn.Linear(case.intermediate_size, case.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns B × T × D."""
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    """Norm, attention, norm, MLP, each pair added to the residual."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(case.hidden_size, case.rms_norm_eps)
        self.self_attn = Attention(case)
        self.post_attention_layernorm = nn.RMSNorm(case.hidden_size, case.rms_norm_eps)
        self.mlp = Mlp(case)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """Returns B × T × D."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TK, sin_TK)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Backbone(nn.Module):
    """Embedding, blocks and the last norm."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.head_dim, self.rope_theta = case.head_dim, case.rope_theta
        self.embed_tokens = nn.Embedding(case.vocab_size, case.hidden_size)
        self.layers = nn.ModuleList(Block(case) for _ in range(case.layers))
        self.norm = nn.RMSNorm(case.hidden_size, case.rms_norm_eps)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Returns B × T × D, normalised."""
        x_BTD = self.embed_tokens(ids_BT)
        exponents = torch.arange(0, self.head_dim, 2, device=ids_BT.device, dtype=torch.float32) / self.head_dim
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device, dtype=torch.float32)
        angles_TK = torch.outer(positions, self.rope_theta**-exponents).repeat(1, 2)
        cos_TK, sin_TK = angles_TK.cos().to(x_BTD.dtype), angles_TK.sin().to(x_BTD.dtype)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TK, sin_TK)
        return self.norm(x_BTD)


class PlainLlama(nn.Module):
    """A Llama with its loss.

    Weights are drawn from N(0, 0.02²) by PyTorch's generator of their device. Where the model is not compiled as a whole,
    `loss` can be replaced by its compiled version.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model = Backbone(case)
        self.lm_head = nn.Linear(case.hidden_size, case.vocab_size, bias=False)
        if case.tied:
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
    # The last position has no target: a slice without it would copy gigabytes of logits.
    targets_BT = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORED)
