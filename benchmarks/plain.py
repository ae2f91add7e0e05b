"""A Llama or a Mixtral in plain PyTorch: the bf16 peer, and torchao's model.

It is written to be fast: the model is one `torch.compile` graph, attention is SDPA with grouped key-value heads (cuDNN's
kernel on Hopper), experts are PyTorch's grouped products, logits stay in the model's dtype and only the loss is float32.
Outputs equal those of transformers' models up to rounding, with the same parameter names; cache, padding, generation and the
loss that balances experts are left out.
Shapes: B batch, T sequence, H heads (kv heads for keys and values), K head_dim, D hidden size, V vocabulary; of experts N
tokens, S experts per token, E experts, F their ffn size, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.bench.exact import rotary_angles, rotate
from octavo.models.spec import ModelSpec

STD = 0.02
"""Standard deviation of initial weights."""
FAMILIES = ("llama", "mixtral")
ROW_TILE = 16
"""Multiple of an expert's rows in grouped products of FP8."""


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


class Experts(nn.Module):
    """SwiGLU experts, each on its rows, as two grouped products; `grouped_mm` can be replaced by one in FP8."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(spec.experts, 2 * spec.ffn_size, spec.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(spec.experts, spec.hidden_size, spec.ffn_size))
        self.grouped_mm: Callable[..., Tensor] = torch._grouped_mm

    def forward(self, x_RD: Tensor, ends_E: Tensor) -> Tensor:
        """Rows in the order of experts → R × D; ends: the row behind each expert's last, int32."""
        gate_RF, up_RF = self.grouped_mm(x_RD, self.gate_up_proj.transpose(-2, -1), offs=ends_E).chunk(2, -1)
        return self.grouped_mm(F.silu(gate_RF) * up_RF, self.down_proj.transpose(-2, -1), offs=ends_E)


class Mixture(nn.Module):
    """Tokens to the experts of their largest probabilities and back.

    An expert's rows are filled up to a multiple of `ROW_TILE`. Buffers have room for the worst case, so nothing waits.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.count, self.top_k = spec.experts, spec.top_k
        self.gate = nn.Linear(spec.hidden_size, spec.experts, bias=False)
        self.experts = Experts(spec)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns B × T × D."""
        x_ND = x_BTD.flatten(0, 1)
        scores_NS, chosen_NS = torch.topk(self.gate(x_ND).float().softmax(-1), self.top_k, dim=-1)
        scores_NS = (scores_NS / scores_NS.sum(-1, keepdim=True)).to(x_ND.dtype)
        copy_R, row_NS, ends_E = places(chosen_NS, self.count)
        y_RD = self.experts(_Dispatch.apply(x_ND, copy_R, row_NS), ends_E)
        y_NSD: Tensor = _Collect.apply(y_RD, copy_R, row_NS)
        return (y_NSD * scores_NS[..., None]).sum(1).view_as(x_BTD)


def places(chosen_NS: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The copy in each row (R; N · S where there is none), the row of each copy (N × S), the row behind each expert's last."""
    copies = chosen_NS.flatten()
    order = copies.argsort(stable=True)
    counts_E = (copies[:, None] == torch.arange(experts, device=copies.device)).sum(0)
    heights_E = (counts_E + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    ends_E = heights_E.cumsum(0)
    moved_E = (ends_E - heights_E) - (counts_E.cumsum(0) - counts_E)  # first row, less that without the filling
    rows = torch.arange(len(copies), device=copies.device) + moved_E[copies[order]]
    empty_R = torch.full((len(copies) + experts * ROW_TILE,), len(copies), device=copies.device)
    row_NS = torch.empty_like(copies).scatter(0, order, rows).view_as(chosen_NS)
    return empty_R.scatter(0, rows, order), row_NS, ends_E.int()


class _Dispatch(torch.autograd.Function):
    """Tokens N × D to rows R × D. Backward gathers and adds: a scatter would add in memory, by atomic operations."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, copy_R: Tensor, row_NS: Tensor) -> Tensor:
        ctx.save_for_backward(row_NS)
        return _rows(x_ND, copy_R, row_NS.shape[1])

    @staticmethod
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor, None, None]:
        (row_NS,) = ctx.saved_tensors
        return dy_RD[row_NS].sum(1), None, None


class _Collect(torch.autograd.Function):
    """Rows R × D to the copies of tokens N × S × D."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, copy_R: Tensor, row_NS: Tensor) -> Tensor:
        ctx.save_for_backward(copy_R)
        return y_RD[row_NS]

    @staticmethod
    def backward(ctx: Any, d_NSD: Tensor) -> tuple[Tensor, None, None]:
        (copy_R,) = ctx.saved_tensors
        return _rows(d_NSD.flatten(0, 1), copy_R, 1), None, None


def _rows(x: Tensor, copy_R: Tensor, top_k: int) -> Tensor:
    """The source of each row's copy, zeros in rows without."""
    source_R = copy_R // top_k
    return torch.where((source_R < len(x))[:, None], x[source_R.clamp(max=len(x) - 1)], 0)


class Block(nn.Module):
    """Norm, attention, norm, MLP or experts, each pair added to the residual."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = Mixture(spec) if spec.experts else Mlp(spec)

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


class PlainDecoder(nn.Module):
    """A Llama or a Mixtral with its loss, matrices drawn from N(0, 0.02²); `loss` can be replaced by its compiled version."""

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
