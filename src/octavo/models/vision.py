"""timm's vision transformer with Octavo's blocks: patches, positions and classifier stay timm's, so that it is used as before.

Only a model that is known exactly gets them: timm's own classes, without layer scale, stochastic depth, dropout or normalised
queries, which Octavo's layer does not compute. Any other keeps its own code, and `octavo.describe` says why. The residual
stream is of autocast's dtype, if it is on. timm is not imported here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import InputError
from octavo.models.convert import Conversion, attach
from octavo.models.exact import HOOKS
from octavo.models.families import Join, Joined, NameTable
from octavo.models.structure import difference_from
from octavo.nn.block import RunBlock, TransformerLayer
from octavo.nn.plain_names import use_plain_names

VIT_NAMES = NameTable(
    model={},
    block={
        "self_attention.layernorm_qkv.layer_norm_weight": "norm1.weight",
        "self_attention.layernorm_qkv.layer_norm_bias": "norm1.bias",
        "self_attention.layernorm_qkv.weight": Joined(Join.QKV, ("attn.qkv.weight",)),
        "self_attention.layernorm_qkv.bias": Joined(Join.QKV, ("attn.qkv.bias",)),
        "self_attention.proj.weight": "attn.proj.weight",
        "self_attention.proj.bias": "attn.proj.bias",
        "layernorm_mlp.layer_norm_weight": "norm2.weight",
        "layernorm_mlp.layer_norm_bias": "norm2.bias",
        "layernorm_mlp.fc1_weight": "mlp.fc1.weight",
        "layernorm_mlp.fc1_bias": "mlp.fc1.bias",
        "layernorm_mlp.fc2_weight": "mlp.fc2.weight",
        "layernorm_mlp.fc2_bias": "mlp.fc2.bias",
    },
    ours="blocks",
    theirs="blocks",
)
_LINEAR, _NORMS = "torch.nn.modules.linear.Linear", ("timm.layers.norm.LayerNorm", "torch.nn.modules.normalization.LayerNorm")
_CLASSES = {
    "": ("timm.models.vision_transformer.Block",),
    "attn": ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention"),
    "mlp": ("timm.layers.mlp.Mlp",),
    "mlp.act": ("torch.nn.modules.activation.GELU",),
    **dict.fromkeys(("norm1", "norm2"), _NORMS),
    **dict.fromkeys(("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"), (_LINEAR,)),
}
"""Parts of a block → the classes that Octavo's layer computes."""
_AS_BUILT = "octavo_blocks_as_built"
_ABSENT = ("ls1", "ls2", "drop_path1", "drop_path2", "attn.q_norm", "attn.k_norm", "attn.norm", "attn.gate", "mlp.norm")
_DROPOUTS = ("attn.attn_drop", "attn.proj_drop", "mlp.drop1", "mlp.drop2")


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
    """True for timm's `VisionTransformer`, and no subclass."""
    return _class(model) == "timm.models.vision_transformer.VisionTransformer"


def own_code_reason(model: nn.Module) -> str:
    """The reason why a `VisionTransformer` keeps its own blocks; empty if Octavo's compute the same."""
    blocks = model.get_submodule("blocks")
    if getattr(model, "grad_checkpointing", False):
        return "set_grad_checkpointing() is on: octavo.transform(recompute=True) does that for Octavo's blocks"
    if type(blocks) is not nn.Sequential:
        return f"blocks is a {type(blocks).__name__}"
    if fault := next((f"blocks.{number}{fault}" for number, block in enumerate(blocks) for fault in _faults(block)), ""):
        return fault
    parameters = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    if len(set(blocks)) < len(blocks) or len(set(parameters)) < len(parameters):
        return "blocks or parameters are shared"
    if len({_part(block, "attn").num_heads for block in blocks}) > 1:
        return "blocks have different numbers of heads"
    return ""


def _faults(block: nn.Module) -> Iterator[str]:
    for path, classes in _CLASSES.items():
        part = _part(block, path)
        if part is None or _class(part) not in classes:
            yield f"{'.' if path else ''}{path} is a {type(part).__name__}"
            return
    for path in (*_ABSENT, *_DROPOUTS):
        part = _part(block, path)
        if part is None or type(part) is nn.Identity:
            continue
        if path in _ABSENT:
            yield f".{path} is a {type(part).__name__}"
        elif getattr(part, "p", None) != 0.0:
            yield f".{path} drops with probability {getattr(part, 'p', '?')}"
    for name, module in block.named_modules():
        if any(getattr(module, hooks) for hooks in HOOKS):
            yield f"{'.' if name else ''}{name} has hooks"
        if "forward" in vars(module):
            yield f"{'.' if name else ''}{name} has a forward of its own"
    known = {theirs for entry in VIT_NAMES.block.values() for theirs in ([entry] if isinstance(entry, str) else entry.names)}
    if extra := sorted({name for name, _ in block.named_parameters()} - known):
        yield f" has the parameter {extra[0]}"
    attn, mlp, norms = _part(block, "attn"), _part(block, "mlp"), (_part(block, "norm1"), _part(block, "norm2"))
    facts = {
        "mlp.act approximates": mlp.act.approximate != "none",
        "norm1 and norm2 differ in eps": norms[0].eps != norms[1].eps,
        "a norm has no weight or no bias": any(norm.weight is None or norm.bias is None for norm in norms),
        "mlp.fc1 and mlp.fc2 differ in bias": (mlp.fc1.bias is None) != (mlp.fc2.bias is None),
        "attn scales by another factor": attn.scale != attn.head_dim**-0.5,
        "attn has another width": attn.proj.out_features != attn.qkv.in_features,
    }
    yield from (f": {fact}" for fact, holds in facts.items() if holds)


def replace_blocks(model: nn.Module, params_dtype: torch.dtype) -> None:
    """Put Octavo's layers, on the meta device, in the place of timm's blocks."""
    heads = 0
    layers = []
    for block in model.get_submodule("blocks").children():
        attn, mlp, norm = (_part(block, path) for path in ("attn", "mlp", "norm1"))
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
    """Raise an InputError for blocks that were changed since: under timm's names their weights would be of another model.

    Models without Octavo's blocks in a vision transformer pass.
    """
    built = vars(model).get(_AS_BUILT)
    if built is not None and (different := difference_from(model.get_submodule("blocks"), built)):
        raise InputError(
            f"blocks: {different}. A file under timm's names would load as another model: give the model the blocks that it "
            "had, or keep it as it is by octavo.save(path, model)."
        )


def _part(block: nn.Module, path: str) -> Any:
    """A part of a block; None for one that this version of timm does not have."""
    part: Any = block
    for name in path.split(".") if path else ():
        part = getattr(part, name, None)
    return part


def _class(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
