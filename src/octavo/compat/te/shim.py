"""Table of Transformer Engine 2.20's modules and names → where Octavo implements them. Loads no torch."""

from __future__ import annotations

from octavo.compat import finder
from octavo.compat.finder import Names, Shim

_LAYERS = "octavo.compat.te.layers"
_ATTENTION = "octavo.compat.te.attention"
_AUTOCAST = "octavo.compat.te.autocast"
_CHECKPOINT = "octavo.compat.te.recompute"
_ROTARY = "octavo.compat.te.rotary"
_GLOBAL_STATE = "octavo.compat.te.global_state"

_MODULES = {_LAYERS: "Linear LayerNormLinear LayerNormMLP LayerNorm RMSNorm GroupedLinear"}
_ATTENTIONS = {_ATTENTION: "DotProductAttention MultiheadAttention", _ROTARY: "RotaryPositionEmbedding"}
_LAYER = {_ATTENTION: "TransformerLayer"}
_RECOMPUTE = "checkpoint CudaRNGStatesTracker"
_AVAILABLE = (
    "autocast fp8_autocast fp8_model_init quantized_model_init get_default_recipe is_fp8_available "
    "is_fp8_block_scaling_available is_mxfp8_available is_nvfp4_available"
)
_QUANTIZATION = {
    _AUTOCAST: f"{_AVAILABLE} check_fp8_support check_fp8_block_scaling_support check_mxfp8_support check_nvfp4_support "
    "check_recipe_support get_default_fp8_recipe",
    _GLOBAL_STATE: "FP8GlobalStateManager",
}
_PYTORCH: Names = {
    **_MODULES,
    _ATTENTION: "DotProductAttention MultiheadAttention TransformerLayer",
    _ROTARY: "RotaryPositionEmbedding",
    _CHECKPOINT: _RECOMPUTE,
    _AUTOCAST: f"{_AVAILABLE} is_bf16_available onnx_export",
}

MODULES: dict[str, Names] = {
    "transformer_engine": {"octavo.compat.te.version": "__version__"},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": {
        "octavo.compat.te.recipes": "Recipe Format DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling "
        "NVFP4BlockScaling MMParams QParams"
    },
    "transformer_engine.pytorch": _PYTORCH,
    "transformer_engine.pytorch.module": _MODULES,
    "transformer_engine.pytorch.module.linear": {_LAYERS: "Linear"},
    "transformer_engine.pytorch.module.layernorm_linear": {_LAYERS: "LayerNormLinear"},
    "transformer_engine.pytorch.module.layernorm_mlp": {_LAYERS: "LayerNormMLP"},
    "transformer_engine.pytorch.module.layernorm": {_LAYERS: "LayerNorm"},
    "transformer_engine.pytorch.module.rmsnorm": {_LAYERS: "RMSNorm"},
    "transformer_engine.pytorch.module.grouped_linear": {_LAYERS: "GroupedLinear"},
    "transformer_engine.pytorch.transformer": _LAYER,
    "transformer_engine.pytorch.attention": {**_ATTENTIONS, _ROTARY: "RotaryPositionEmbedding apply_rotary_pos_emb"},
    "transformer_engine.pytorch.attention.dot_product_attention": {_ATTENTION: "DotProductAttention"},
    "transformer_engine.pytorch.attention.multi_head_attention": {_ATTENTION: "MultiheadAttention"},
    "transformer_engine.pytorch.attention.rope": {_ROTARY: "RotaryPositionEmbedding apply_rotary_pos_emb"},
    "transformer_engine.pytorch.distributed": {
        _CHECKPOINT: f"{_RECOMPUTE} get_activation_recompute_contexts prepare_te_modules_for_fsdp"
    },
    "transformer_engine.pytorch.fp8": _QUANTIZATION,
    "transformer_engine.pytorch.quantization": _QUANTIZATION,
}

_FP4 = "Octavo computes in FP8: use DelayedScaling, Float8CurrentScaling or Float8BlockScaling."
_TENSORS = "Octavo's parameters stay torch.nn.Parameter, and FP8 copies of them live in a forward alone."
_PADDING = "Leave it out: Octavo's layers take any number of tokens."
_DELTA = "Octavo has attention by softmax alone."
WAYS = {
    "jax": "Octavo supports only PyTorch.",
    "make_graphed_callables": "octavo.graphed(model) records a training step as a CUDA graph.",
    "get_cpu_offload_context": "octavo.transform(model, offload=True) offloads saved activations to host memory.",
    "InferenceParams": "Octavo's layers are for training and have no key-value cache.",
    "initialize_ub": "Tensor-parallel communication is set for a whole model, by octavo.init's tensor_parallel_degree.",
    "CustomRecipe": _FP4,
    "Float8Tensor": _TENSORS,
    "QuantizedTensor": _TENSORS,
    "Float8Quantizer": _TENSORS,
    "transformer_engine.pytorch.tensor": _TENSORS,
    "transformer_engine.pytorch.float8_tensor": _TENSORS,
    "transformer_engine.pytorch.ops": "Use the layers of transformer_engine.pytorch, which are fused.",
    "transformer_engine.pytorch.optimizers": "Use torch.optim.AdamW(fused=True).",
    "parallel_cross_entropy": "Octavo's decoder computes its loss in chunks; for logits use torch.nn.functional.cross_entropy.",
    "moe_permute": "Sort tokens with torch.argsort, and use GroupedLinear.",
    "moe_unpermute": "Use torch.index_add.",
    "Fp8Padding": _PADDING,
    "Fp8Unpadding": _PADDING,
    "get_cudnn_version": "Octavo asks PyTorch: torch.backends.cudnn.version().",
    "get_device_compute_capability": "Use torch.cuda.get_device_capability().",
    "Quantizer": _TENSORS,
    "QuantizationCalibrationConfig": "It is from a version after 2.20: calibrating=True by itself records amaxes.",
    "GatedDeltaNetAttention": _DELTA,
    "GatedDeltaNet2Attention": _DELTA,
    "GatedDeltaProductAttention": _DELTA,
    "transformer_engine_torch": "It is Transformer Engine's compiled extension: use its layers.",
}

SHIM = Shim(
    "transformer_engine", "Transformer Engine", MODULES, WAYS, absent=("transformer_engine_torch",),
    before=("transformer_engine.pytorch",), version="octavo.compat.te.version",
)  # fmt: skip


def install(*, replace_installed: bool = False) -> None:
    """Give this process Transformer Engine's names.

    Args:
        replace_installed: also where Transformer Engine is installed.

    Raises:
        InputError: it is installed and may not be replaced, or is already imported.
    """
    finder.install(SHIM, replace=replace_installed)


def uninstall() -> None:
    """Remove Transformer Engine's names from this process; existing objects stay valid."""
    finder.uninstall(SHIM)
