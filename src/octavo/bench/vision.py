"""Vision transformers: timm's own, compiled as a whole, and the same with layers of Transformer Engine as its blocks.

Weights are float32 under PyTorch's autocast to bfloat16, as timm trains them. A replaced block takes the weights of the block
that it stands for, so that all entries are one function to rounding (Transformer Engine's GELU is the tanh approximation). The
residual of Transformer Engine's blocks is bfloat16 by itself, as that of Octavo's is under autocast; Octavo's entries are
`octavo.transform` of timm's model. timm is imported when a model is built.

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
from octavo.models.convert import Conversion
from octavo.models.vision import VIT_NAMES

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


def replace_blocks(model: Any, make: Callable[[float], nn.Module]) -> None:
    """Put `make(eps of the norms)` in the place of each block, with its weights."""
    for index, block in enumerate(model.blocks):
        layer = make(block.norm1.eps)
        take_weights(layer, block, block.attn.num_heads)
        model.blocks[index] = layer
    model.norm_pre = ToAutocast()


@torch.no_grad()
def take_weights(layer: nn.Module, block: Any, heads: int) -> None:
    """Copy the weights of a timm block into a TransformerLayer, whose query, key and value stand together by head."""
    way = Conversion(VIT_NAMES, heads, heads, {}, "")
    for name in VIT_NAMES.block:
        (theirs,) = way.names(f"blocks.0.{name}")
        value = block.get_parameter(theirs.removeprefix("blocks.0."))
        layer.get_parameter(name).copy_(way.join(f"blocks.0.{name}", (value,)))


def under_autocast(device: torch.device, inner: Around = contextlib.nullcontext) -> Around:
    """PyTorch's autocast to bfloat16 around `inner`, made anew for each forward."""

    @contextlib.contextmanager
    def around() -> Any:
        with torch.autocast(device.type, torch.bfloat16), inner():
            yield

    return around
