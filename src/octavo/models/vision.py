"""timm's vision transformer with Octavo's blocks; patches, positions, classifier and the interface remain timm's.

Only a model that is exactly timm's gets them: timm's classes, without layer scale, stochastic depth, dropout or normalised
queries, which Octavo's layer does not compute. Others run their original code, and `octavo.describe` says why. The residual
stream is of autocast's dtype, if it is on. timm is not imported here.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import InputError
from octavo.models.convert import Conversion, attach
from octavo.models.exact import differences, switched_on
from octavo.models.families import Join, NameTable, block_with_biases
from octavo.models.structure import Tensors, class_name, difference_from, tensors_of
from octavo.nn.block import RunBlock, TransformerLayer
from octavo.nn.plain_names import use_plain_names

VIT_NAMES = NameTable(
    model={},
    block=block_with_biases(
        norms=("norm1", "norm2"), qkv="attn.qkv", proj="attn.proj", mlp=("mlp.fc1", "mlp.fc2"), join=Join.QKV
    ),
    ours="blocks",
    theirs="blocks",
)
_LINEAR, _NORMS = "torch.nn.modules.linear.Linear", ("timm.layers.norm.LayerNorm", "torch.nn.modules.normalization.LayerNorm")
_IDENTITY, _DROPOUT = "torch.nn.modules.linear.Identity", "torch.nn.modules.dropout.Dropout"
_CLASSES = {
    "": ("timm.models.vision_transformer.Block",),
    "attn": ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention"),
    "mlp": ("timm.layers.mlp.Mlp",),
    "mlp.act": ("torch.nn.modules.activation.GELU",),
    **dict.fromkeys(("norm1", "norm2"), _NORMS),
    **dict.fromkeys(("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"), (_LINEAR,)),
    **dict.fromkeys(("attn.attn_drop", "attn.proj_drop", "mlp.drop1", "mlp.drop2"), (_DROPOUT, _IDENTITY, None)),
}
"""Parts of a block → the classes that Octavo's layer computes, None for no such part; any other is an `Identity`."""
_AS_BUILT = "octavo_blocks_as_built"


class Blocks(nn.Sequential):
    """timm's `blocks` of Octavo's layers; the norm of each adds the delta of the layer before it to the residual."""

    def __init__(self, *layers: TransformerLayer) -> None:
        super().__init__(*layers)
        self.run_block: RunBlock = TransformerLayer.forward_residual

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, hidden] → the same shape, in the dtype of PyTorch's autocast if it is on."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        residual: Tensor = x
        delta: Tensor | None = None
        for layer in self:
            residual, delta = self.run_block(layer, residual, delta)
        return residual if delta is None else residual + delta


def is_vision_transformer(model: nn.Module) -> bool:
    """True for timm's `VisionTransformer`, not for a subclass."""
    return class_name(type(model)) == "timm.models.vision_transformer.VisionTransformer"


def original_code_reason(model: nn.Module) -> str:
    """The reason why a `VisionTransformer` retains timm's blocks; empty if Octavo's compute the same."""
    blocks = model.get_submodule("blocks")
    if type(blocks) is not nn.Sequential:
        return f"blocks is a {type(blocks).__name__}"
    parts = [f"blocks.{number}{part and f'.{part}'}" for number in range(len(blocks)) for part in _CLASSES]
    faults = differences(blocks, parts, _other_class, lambda: _tensors(blocks), _other_values, "blocks")
    if fault := next(itertools.chain(switched_on(model), faults), ""):
        return fault
    if any(name != first for name, (_, first) in tensors_of(model).items()):
        return "blocks or parameters are shared"
    if len({block.get_submodule("attn").num_heads for block in blocks}) > 1:
        return "blocks have different numbers of heads"
    return ""


def _other_class(name: str, module: nn.Module | None) -> str:
    """A message if the class of a block, or of a part of one, is unknown; else empty."""
    _, _, part = name.removeprefix("blocks.").partition(".")
    actual = None if module is None else class_name(type(module))
    is_known = name == "blocks" or actual in _CLASSES.get(part, (_IDENTITY,))
    return "" if is_known else f"{name} is a {type(module).__name__}"


def _tensors(blocks: Any) -> Tensors:
    """The tensors of `VIT_NAMES`, by the widths of each block."""
    tensors: Tensors = {}
    for number, block in enumerate(blocks):
        attn, mlp = block.attn, block.mlp
        dim, width, hidden = attn.qkv.in_features, attn.num_heads * attn.head_dim, mlp.fc1.out_features
        for part, rows, columns, bias in (
            *((norm, dim, (), True) for norm in ("norm1", "norm2")),
            ("attn.qkv", 3 * width, (dim,), attn.qkv.bias is not None),
            ("attn.proj", dim, (width,), attn.proj.bias is not None),
            ("mlp.fc1", hidden, (dim,), mlp.fc1.bias is not None),
            ("mlp.fc2", dim, (hidden,), mlp.fc1.bias is not None),
        ):
            weight, bias_name = (f"blocks.{number}.{part}.{kind}" for kind in ("weight", "bias"))
            tensors[weight] = (rows, *columns), weight
            if bias:
                tensors[bias_name] = (rows,), bias_name
    return tensors


def _other_values(name: str, module: Any) -> Iterator[str]:
    """Messages about values of a dropout or a block that Octavo's layer does not compute."""
    if isinstance(module, nn.Dropout) and module.p:
        yield f"{name} drops with probability {module.p}"
    if name.rpartition(".")[0] == "blocks":
        facts = {
            "mlp.act approximates": module.mlp.act.approximate != "none",
            "norm1 and norm2 differ in eps": module.norm1.eps != module.norm2.eps,
            "attn scales by another factor": module.attn.scale != module.attn.head_dim**-0.5,
        }
        yield from (f"{name}: {fact}" for fact, holds in facts.items() if holds)


def replace_blocks(model: nn.Module, params_dtype: torch.dtype) -> None:
    """Replace timm's blocks by Octavo's layers on the meta device."""
    heads = 0
    layers = []
    blocks: Any = model.get_submodule("blocks")
    for block in blocks:
        attn, mlp, norm = block.attn, block.mlp, block.norm1
        heads = attn.num_heads
        layers.append(
            TransformerLayer(
                attn.qkv.in_features,
                mlp.fc1.out_features,
                heads,
                layernorm_epsilon=norm.eps,
                kv_channels=attn.head_dim,
                self_attn_mask_type="no_mask",
                bias=attn.proj.bias is not None,
                qkv_bias=attn.qkv.bias is not None,
                mlp_bias=mlp.fc1.bias is not None,
                activation="gelu_exact",
                params_dtype=params_dtype,
                device="meta",
            )
        )
    model.blocks = Blocks(*map(use_plain_names, layers))
    vars(model)[_AS_BUILT] = copy.deepcopy(model.blocks)  # on the meta device
    attach(model, Conversion(VIT_NAMES, heads, heads, {}, "octavo/timm-vit"))


def check_blocks(model: nn.Module) -> None:
    """Raise an InputError for blocks that were changed since: a file under timm's names would load as another model.

    Models without Octavo's blocks in a vision transformer pass.
    """
    built = vars(model).get(_AS_BUILT)
    if built is not None and (different := difference_from(model.get_submodule("blocks"), built)):
        raise InputError(
            f"blocks: {different}. A file under timm's names would load as another model: restore the blocks, or save the "
            "model unchanged by octavo.save(path, model)."
        )
