"""Vision transformers: timm's own, compiled as a whole, and the same with layers of Octavo or Transformer Engine as its blocks.

Weights are float32 under PyTorch's autocast to bfloat16, as timm trains them. A replaced block takes the weights of the block
that it stands for, so that all entries are one function to rounding (Transformer Engine's GELU is the tanh approximation). The
residual of replaced blocks is bfloat16: Transformer Engine makes it so by itself, Octavo's keeps what it is given, so that both
get it cast behind the position embedding. timm is imported when a model is built.

Shapes: B batch, C channels, H and W an image's sides, T patches and class token, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.bench.cases import VisionCase
from octavo.nn.attention import merge_qkv
from octavo.nn.block import sum_of
from octavo.nn.fused import Stream

Around = Callable[[], contextlib.AbstractContextManager[Any]]


class Classifier(nn.Module):
    """A model of images with its loss: mean cross entropy in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
        """The loss, a scalar."""
        return F.cross_entropy(self.model(images_BCHW).float(), labels_B)


class ToAutocast(nn.Module):
    """Casts to the dtype of PyTorch's autocast, where that is on."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        kind = x.device.type
        return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class OpenStream(ToAutocast):
    """Begins the stream in which Octavo's layers leave their last addition to the norm of the layer behind."""

    def forward(self, x: Tensor) -> Stream:  # type: ignore[override]
        """x with nothing to be added to it."""
        return super().forward(x), None


class CloseStream(nn.Module):
    """A norm behind Octavo's layers."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, stream: Stream) -> Tensor:
        """The norm of what the stream adds up to."""
        return self.norm(sum_of(stream))


def timm_model(case: VisionCase, device: torch.device, seed: int) -> Any:
    """timm's vision transformer in float32, ready for training."""
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(seed)
    model = VisionTransformer(
        img_size=case.image_size,
        patch_size=case.patch,
        in_chans=case.channels,
        num_classes=case.classes,
        embed_dim=case.hidden_size,
        depth=case.layers,
        num_heads=case.heads,
        mlp_ratio=case.intermediate_size / case.hidden_size,
    )
    return model.to(device).train()


def in_blocks(module: nn.Module, name: str) -> bool:
    """Whether torchao converts this linear layer: those of the blocks, as everybody's."""
    return isinstance(module, nn.Linear) and name.startswith("blocks.")


def replace_blocks(model: Any, make: Callable[[float], nn.Module], *, streams: bool = False) -> None:
    """Put `make(eps of the norms)` in the place of each block, with its weights; `streams`: they take and return those."""
    for index, block in enumerate(model.blocks):
        layer = make(block.norm1.eps)
        take_weights(layer, block, block.attn.num_heads)
        model.blocks[index] = layer
    model.norm_pre = OpenStream() if streams else ToAutocast()
    if streams:
        model.norm = CloseStream(model.norm)


@torch.no_grad()
def take_weights(layer: nn.Module, block: Any, heads: int) -> None:
    """Copy the weights of a timm block into a TransformerLayer, whose query, key and value stand together by head."""
    qkv_weight, qkv_bias = (_by_head(tensor, heads) for tensor in (block.attn.qkv.weight, block.attn.qkv.bias))
    values = {
        "self_attention.layernorm_qkv.layer_norm_weight": block.norm1.weight,
        "self_attention.layernorm_qkv.layer_norm_bias": block.norm1.bias,
        "self_attention.layernorm_qkv.weight": qkv_weight,
        "self_attention.layernorm_qkv.bias": qkv_bias,
        "self_attention.proj.weight": block.attn.proj.weight,
        "self_attention.proj.bias": block.attn.proj.bias,
        "layernorm_mlp.layer_norm_weight": block.norm2.weight,
        "layernorm_mlp.layer_norm_bias": block.norm2.bias,
        "layernorm_mlp.fc1_weight": block.mlp.fc1.weight,
        "layernorm_mlp.fc1_bias": block.mlp.fc1.bias,
        "layernorm_mlp.fc2_weight": block.mlp.fc2.weight,
        "layernorm_mlp.fc2_bias": block.mlp.fc2.bias,
    }
    for name, value in values.items():
        layer.get_parameter(name).copy_(value)


def _by_head(joined: Tensor, heads: int) -> Tensor:
    """Rows of all queries, all keys, all values as query, key and value of one head after the other."""
    q, k, v = joined.chunk(3)
    return merge_qkv(q, k, v, heads)


def under_autocast(device: torch.device, inner: Around = contextlib.nullcontext) -> Around:
    """PyTorch's autocast to bfloat16 around `inner`, made anew for each forward."""

    @contextlib.contextmanager
    def around() -> Any:
        with torch.autocast(device.type, torch.bfloat16), inner():
            yield

    return around
