"""Transformer Engine's peers in their fastest arrangement: a decoder, on one GPU or several, and blocks of a ViT.

Norms, products, activation and rotary embedding are Transformer Engine's fused kernels, attention is cuDNN's or
flash-attn-4's, query/key/value are one parameter. The decoder's embedding is PyTorch's, its head PyTorch's or a `te.Linear`
inside the autocast, its loss one compiled kernel. Over several GPUs it is sharded as torchtitan shards, and Transformer
Engine's attention exchanges keys and values. Call `benchmarks.te_attention.choose` before the import. B batch, T sequence, D
hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format
from transformer_engine.pytorch.utils import SplitAlongDim

from benchmarks import te_attention
from benchmarks.cases import VisionCase
from benchmarks.plain import ROW_TILE, STD, next_token_loss
from octavo.collectives.context import ContextGroup
from octavo.errors import InputError
from octavo.models.spec import ModelSpec

RECIPES = {
    # The length of the history has no part in the speed.
    "delayed": lambda: DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max"),
    "current": Float8CurrentScaling,
}
FAMILIES = ("llama", "mistral", "gpt_neox", "mixtral")
CHECKED = 2
"""Sequences or images whose attention is compared with the reference."""
HEAD_ROWS = 16
"""Transformer Engine's multiple for dimensions of FP8 operands."""


def autocast(
    recipe: str | None, group: dist.ProcessGroup | None = None
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """The context manager around a forward: FP8 by one recipe object for all steps; None: no FP8. group: joins amaxes."""
    if recipe is None:
        return contextlib.nullcontext
    return partial(te.autocast, enabled=True, recipe=RECIPES[recipe](), amax_reduction_group=group)


class VisionAttention(nn.Module):
    """Norm, joint query/key/value product, attention without a mask, output product; without the residual."""

    def __init__(self, case: VisionCase, eps: float, device: torch.device) -> None:
        super().__init__()
        make: dict[str, Any] = {"params_dtype": torch.float32, "device": device}
        self.heads, self.head_dim = case.heads, case.hidden_size // case.heads
        self.layernorm_qkv = te.LayerNormLinear(case.hidden_size, 3 * case.hidden_size, eps=eps, **make)
        self.core_attention = te.DotProductAttention(
            case.heads, self.head_dim, qkv_format="bshd", attn_mask_type="no_mask", attention_dropout=0.0
        )
        self.proj = te.Linear(case.hidden_size, case.hidden_size, **make)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Attend; returns B × T × D."""
        qkv = self.layernorm_qkv(x_BTD).unflatten(-1, (self.heads, 3, self.head_dim))
        # Attention recognises the layout of these views by their pointers. Its gradients are then views of one tensor, which
        # the split's backward returns without a copy.
        q, k, v = (part.squeeze(-2) for part in SplitAlongDim.apply(qkv, -2, (1, 1, 1)))
        return self.proj(self.core_attention(q, k, v))


class VisionLayer(nn.Module):
    """A block of a vision transformer: parts, names and function of `te.TransformerLayer`, with fewer passes over memory.

    `te.TransformerLayer` slices the joint product into query, key and value: backward fills a tensor of zeros for each, copies
    the gradient into it, and adds the three. It also adds the biases of the second products in separate operations, and
    their backward sums the gradient once more.
    """

    def __init__(self, case: VisionCase, eps: float, device: torch.device) -> None:
        super().__init__()
        self.self_attention = VisionAttention(case, eps, device)
        self.layernorm_mlp = te.LayerNormMLP(
            case.hidden_size, case.intermediate_size, eps=eps, activation="gelu", params_dtype=torch.float32, device=device
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns B × T × D."""
        h_BTD = x_BTD + self.self_attention(x_BTD)
        return h_BTD + self.layernorm_mlp(h_BTD)


def vision_block(case: VisionCase, eps: float, device: torch.device) -> nn.Module:
    """`te.TransformerLayer` as a block of timm's model, as in the published script."""
    layer: nn.Module = te.TransformerLayer(
        case.hidden_size,
        case.intermediate_size,
        case.heads,
        layernorm_epsilon=eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="no_mask",
        fuse_qkv_params=True,
        attn_input_format="bshd",
        params_dtype=torch.float32,
        device=device,
    )
    return layer


def check_vision_attention(block: nn.Module, case: VisionCase, device: torch.device) -> dict[str, float]:
    """Errors of the attention in a block of images, as `te_attention.check` gives them; it raises for wrong ones."""
    return check_attention(
        block, block, (min(case.batch, CHECKED), case.sequence_length, case.hidden_size), device, causal=False
    )


def check_attention(
    layer: nn.Module, call: Callable[[Tensor], Tensor], shape: tuple[int, int, int], device: torch.device, **how: Any
) -> dict[str, float]:
    """Errors of the attention in a layer when it is called with random input of this shape, B × T × D or T × B × D."""
    attention = next(module for module in layer.modules() if isinstance(module, te.DotProductAttention))
    x = te_attention.drawn(shape, device).bfloat16().requires_grad_()  # as behind an embedding
    mixed = next(layer.parameters()).dtype == torch.float32  # which trains in bfloat16 too

    def run() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            return call(x)

    try:
        return te_attention.check(attention, run, **how)
    finally:
        layer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


class Mixture(nn.Module):
    """Norm, router, experts in two `GroupedLinear`s, the sum of each token's; without the residual.

    Rows are put in order, filled up for FP8 products and added up by Transformer Engine's kernels. On Hopper its FP8 products
    take the numbers of rows from the host: one wait, and two more where rows are filled up.
    """

    def __init__(self, spec: ModelSpec, init: Callable[[Tensor], Tensor], *, fp8: bool, **make: Any) -> None:
        super().__init__()
        d, f, n = spec.hidden_size, spec.ffn_size, spec.experts
        self.experts, self.top_k, self.fp8 = n, spec.top_k, fp8
        self.norm = te.RMSNorm(d, eps=spec.norm_eps, dtype=make["params_dtype"], device=make["device"])
        self.router = nn.Linear(d, n, bias=False, dtype=make["params_dtype"], device=make["device"])
        init(self.router.weight)
        self.fc1 = te.GroupedLinear(n, d, 2 * f, bias=False, init_method=init, **make)
        self.activation = te.ops.SwiGLU()
        self.fc2 = te.GroupedLinear(n, f, d, bias=False, init_method=init, **make)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns B × T × D."""
        x = self.norm(x_BTD).flatten(0, 1)
        scores, chosen = torch.topk(self.router(x).float().softmax(-1), self.top_k, dim=-1)
        empty = scores.new_zeros(len(x), self.experts)
        weights = empty.scatter(1, chosen, scores / scores.sum(-1, keepdim=True))
        routes = empty.int().scatter(1, chosen, 1)
        counts, filled = routes.sum(0), None
        if self.fp8:
            padded = te.moe_permute_and_pad_with_probs(x, weights.detach(), routes, counts, ROW_TILE)
            rows, _, where, filled, counts = padded
        else:
            rows, where = te.moe_permute(x, routes, chosen.numel(), map_type="mask")
        splits = counts.tolist()
        y = self.fc2(self.activation(self.fc1(rows, splits)), splits)
        y = te.moe_unpermute(y, where, merging_probs=weights, restore_shape=x.shape, map_type="mask", pad_offsets=filled)
        return y.view_as(x_BTD)


class MixtureLayer(nn.Module):
    """A block with experts in place of the MLP, for which Transformer Engine has no layer."""

    def __init__(
        self, spec: ModelSpec, init: Callable[[Tensor], Tensor], window: int | None, *, fp8: bool, **make: Any
    ) -> None:
        super().__init__()
        self.self_attention = te.MultiheadAttention(
            spec.hidden_size,
            spec.heads,
            attn_mask_type="causal",
            input_layernorm=True,
            bias=False,
            normalization="RMSNorm",
            qkv_format="bshd",
            **_attention(spec, init, window),
            **make,
        )
        self.mixture = Mixture(spec, init, fp8=fp8, **make)

    def forward(self, x_BTD: Tensor, rotary_pos_emb: Tensor) -> Tensor:
        """Returns B × T × D."""
        h_BTD = x_BTD + self.self_attention(x_BTD, rotary_pos_emb=rotary_pos_emb)
        return h_BTD + self.mixture(h_BTD)


def _layer(spec: ModelSpec, init: Callable[[Tensor], Tensor], window: int | None, *, bias: bool, **make: Any) -> nn.Module:
    """A block without experts."""
    layer: nn.Module = te.TransformerLayer(
        spec.hidden_size,
        spec.ffn_size,
        spec.heads,
        hidden_dropout=0.0,
        self_attn_mask_type="causal",
        parallel_attention_mlp=spec.parallel,
        bias=bias,
        activation="swiglu" if spec.gated else "gelu",
        normalization=spec.normalization,
        **_attention(spec, init, window),
        **{"attn_input_format": "bshd", **make},
    )
    return layer


def _attention(spec: ModelSpec, init: Callable[[Tensor], Tensor], window: int | None) -> dict[str, Any]:
    """Arguments of Transformer Engine's attention for a model, alone or in a block."""
    return {
        "num_gqa_groups": spec.kv_heads,
        "kv_channels": spec.head_dim,
        "layernorm_epsilon": spec.norm_eps,
        "attention_dropout": 0.0,
        "init_method": init,
        "output_layer_init_method": init,
        "window_size": None if window is None else (window - 1, 0),
        "fuse_qkv_params": True,
    }


class TeDecoder(nn.Module):
    """A Llama, Mistral, Mixtral or GPT-NeoX with its loss; weights drawn from N(0, 0.02²).

    Args:
        sequence_length: tokens of a whole sequence.
        fp8: blocks will run in FP8.
        recompute: keep only each layer's input for backward.
        layer_options: further arguments of `te.TransformerLayer`.

    Raises:
        InputError: an FP8 head with rows that Transformer Engine cannot multiply in FP8, or a block that it does not have.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sequence_length: int,
        device: torch.device,
        *,
        compiled: bool,
        fp8: bool = False,
        fp8_head: bool = False,
        params_dtype: torch.dtype = torch.bfloat16,
        recompute: bool = False,
        layer_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if fp8_head and spec.vocabulary % HEAD_ROWS:
            raise InputError(
                f"Transformer Engine's head in FP8 needs a multiple of {HEAD_ROWS} rows, and the vocabulary has "
                f"{spec.vocabulary}: use te-delayed, whose head is in bf16."
            )
        biases, windows = {spec.qkv_bias, spec.proj_bias, spec.mlp_bias}, set(spec.windows) or {None}
        if len(biases) > 1 or len(windows) > 1 or spec.qk_norm or spec.family not in FAMILIES:
            raise InputError(f"Transformer Engine's peer is a {', '.join(FAMILIES)}, and this is a {spec.family}.")
        (window,), (bias,) = windows, biases
        make: dict[str, Any] = {"device": device, "dtype": params_dtype}
        init = partial(nn.init.normal_, std=STD)
        self.embed_tokens = nn.Embedding(spec.vocabulary, spec.hidden_size, **make)
        make_block: dict[str, Any] = {"params_dtype": params_dtype, "device": device, **(layer_options or {})}
        block = partial(MixtureLayer, fp8=fp8) if spec.experts else partial(_layer, bias=bias)
        self.layers = nn.ModuleList(block(spec, init, window, **make_block) for _ in range(spec.layers))
        norm = te.RMSNorm if spec.normalization == "RMSNorm" else te.LayerNorm
        self.norm = norm(spec.hidden_size, eps=spec.norm_eps, **make)
        if fp8_head:
            self.lm_head = te.Linear(spec.hidden_size, spec.vocabulary, bias=False, params_dtype=params_dtype, device=device)
        else:
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocabulary, bias=False, **make)
        if spec.tied:
            self.lm_head.weight = self.embed_tokens.weight
        for weight in {self.embed_tokens.weight, self.lm_head.weight}:
            init(weight)
        rotary = {"rotary_percent": spec.rotary_fraction, "rotary_base": spec.rotary["rope_theta"]}
        angles = te.RotaryPositionEmbedding(spec.head_dim, **rotary)(sequence_length)
        self.register_buffer("angles", angles.to(device), persistent=False)
        self.loss = torch.compile(next_token_loss, fullgraph=True) if compiled else next_token_loss
        self.loss_of_part = torch.compile(sum_of_losses, fullgraph=True) if compiled else sum_of_losses
        self.recompute = recompute
        self.context: ContextGroup | None = None
        self.window = window

    def split_sequences(self, group: dist.ProcessGroup, strategy: str) -> None:
        """Share each sequence over the ranks of `group`, by a `cp_comm_type` of Transformer Engine."""
        self.context = ContextGroup(group, strategy)  # of whose chunks each rank has those of Transformer Engine
        stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        layers: Any = self.layers
        for layer in layers:
            layer.set_context_parallel_group(group, dist.get_process_group_ranks(group), stream, strategy)

    def check_attention(self, batch: int) -> dict[str, float]:
        """Errors of the first block's attention, as `te_attention.check` gives them; it raises for wrong ones.

        Before the model is sharded. Collective where ranks share the sequences.
        """
        whole: Any = self.angles
        angles = whole[: te_attention.MOST_TOKENS]
        tokens = len(angles) // (1 if self.context is None else self.context.size)
        layer: Any = self.layers[0]
        layer = layer.self_attention if isinstance(layer, MixtureLayer) else layer  # without its experts
        width, device = self.embed_tokens.embedding_dim, angles.device
        call = partial(layer, rotary_pos_emb=angles)
        how: dict[str, Any] = {"causal": True, "window": self.window, "context": self.context}
        return check_attention(layer, call, (min(batch, CHECKED), tokens, width), device, **how)

    def forward(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Mean cross entropy of each next token, in float32; of a part of the sequences one whose mean over ranks is that."""
        if self.context is None:
            return self.loss(self._logits(ids_BT), labels_BT)
        targets_BT = F.pad(labels_BT[:, 1:], (0, 1), value=-100)
        whole = labels_BT.shape[0] * (labels_BT.shape[1] - 1)
        ids_BT, targets_BT = (self.context.split(x) for x in (ids_BT, targets_BT))
        return self.loss_of_part(self._logits(ids_BT), targets_BT) * (self.context.size / whole)

    def _logits(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embed_tokens(ids_BT)
        for layer in self.layers:
            if self.recompute:
                x_BTD = te.checkpoint(layer, x_BTD, rotary_pos_emb=self.angles, use_reentrant=False)
            else:
                x_BTD = layer(x_BTD, rotary_pos_emb=self.angles)
        return self.lm_head(self.norm(x_BTD))


def sum_of_losses(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross entropy summed over tokens, in float32; targets are -100 where nothing is predicted."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")
