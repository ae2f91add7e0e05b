"""Vision transformers: timm's, and the same with layers of Transformer Engine as its blocks.

Weights are float32 under PyTorch's autocast to bfloat16, as timm trains them. A replaced block takes the weights of timm's, so
that all entries are one function to rounding (Transformer Engine's GELU is the tanh approximation). The residual stream of
replaced blocks is bfloat16, as in Octavo's. timm is imported when a model is built.
Shapes: B batch, C channels, H and W an image's sides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import VisionCase
from octavo.models.vision import VIT_NAMES

Around = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes the context manager around a forward."""


class Classifier(nn.Module):
    """A model of images with its loss: mean cross entropy in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images_BCHW: Tensor, labels_B: Tensor) -> Tensor:
        """The loss, a scalar."""
        return F.cross_entropy(self.model(images_BCHW).float(), labels_B)


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


@torch.no_grad()
def replace_blocks(model: Any, make: Callable[[float], nn.Module]) -> None:
    """Put `make(eps of the norms)`, a `TransformerLayer` by its parameters, in the place of each block, with its weights."""
    from octavo.models.convert import Conversion  # with transformers' model classes: see `benchmarks.peers`

    for index, block in enumerate(model.blocks):
        layer = make(block.norm1.eps)
        conversion = Conversion(VIT_NAMES, block.attn.num_heads, block.attn.num_heads, {}, "")
        for name in VIT_NAMES.block:
            (theirs,) = conversion.names(f"blocks.0.{name}")
            value = block.get_parameter(theirs.removeprefix("blocks.0."))
            layer.get_parameter(name).copy_(conversion.join(f"blocks.0.{name}", (value,)))
        model.blocks[index] = layer
    # The residual stream of the blocks, under autocast.
    model.blocks.register_forward_pre_hook(lambda blocks, inputs: inputs[0].bfloat16())


def under_autocast(device: torch.device, inner: Around = contextlib.nullcontext) -> Around:
    """PyTorch's autocast to bfloat16 around `inner`, entered for each forward."""

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with torch.autocast(device.type, torch.bfloat16), inner():
            yield

    return around
