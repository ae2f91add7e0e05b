"""`describe`: which matrices of a model run in FP8, why the others do not, and the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from octavo.collectives.blocks import parameters_of, shape_of
from octavo.collectives.tensor import TensorGroup
from octavo.fp8.recipe import Granularity, Operand
from octavo.fp8.scaling import ModuleState, states_of
from octavo.kernels import gemm
from octavo.kernels.attention import flash, short
from octavo.nn.attention import DotProductAttention
from octavo.nn.lora import Adapter
from octavo.nn.moe import LayerNormMoE
from octavo.nn.plain_names import Product


@dataclass(frozen=True)
class LayerReport:
    """One matrix of a model; `reason` says why it is not in FP8, or has notes on one that is.

    recipe: name of the layer's recipe; empty for the recipe of fp8_autocast.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    fp8: bool
    reason: str
    recipe: str = ""


@dataclass(frozen=True)
class Description:
    """Result of `describe`; `str()` is a table."""

    layers: tuple[LayerReport, ...]
    attention: str
    products: str
    own_code: str = ""
    """The reason why a model of a known kind runs its original code; else empty."""
    split: str = ""
    """The tensor-parallel ranks in words; shapes are of whole matrices. Empty without."""
    exchanges: str = ""
    """The measured exchange of rows of each size between tensor-parallel ranks; empty before the second step on GPUs."""
    gathered: str = ""
    """The choice of `reshard_after_forward = "auto"`, with its reason; else empty."""
    adapters: str = ""
    """The adapters of matrices; empty without."""

    @property
    def fp8_layers(self) -> int:
        """Matrices whose products run in FP8."""
        return sum(layer.fp8 for layer in self.layers)

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=4)
        rows = []
        for layer in self.layers:
            shape = "x".join(map(str, layer.shape))
            rows.append(
                f"{layer.name:<{width}}  {'FP8' if layer.fp8 else '-':<4} {shape:<13} {layer.kind:<16} {layer.reason}".rstrip()
            )
        head = f"{self.fp8_layers} of {len(self.layers)} matrices run in FP8 under fp8_autocast"
        original = [f"original code: {self.own_code}"] if self.own_code else []
        gathered = [f"gathered: {self.gathered}"] if self.gathered else []
        split = [f"split: {self.split}"] if self.split else []
        split += [f"exchanges: {self.exchanges}"] if self.exchanges else []
        gathered += [f"adapters: {self.adapters}"] if self.adapters else []
        kernels = [f"products: {self.products}", f"attention: {self.attention}"]
        return "\n".join([head, *original, *kernels, *split, *gathered, "", *rows])


def describe(model: nn.Module) -> Description:
    """Describes a transformed model: its matrices in FP8, the reasons for the others, and its kernels."""
    states = dict(states_of(model))
    find_head = getattr(model, "get_output_embeddings", None)  # Hugging Face's models name their heads differently
    head = find_head() if callable(find_head) else None
    layers: list[LayerReport] = []
    blocks = parameters_of(model)
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2 or isinstance(module, Adapter):
                continue
            label = ".".join(part for part in (name, key.removesuffix("weight").rstrip("_")) if part)
            joined = vars(module).get("fp8_state")  # of a weight joined from several parameters
            state = joined if isinstance(joined, ModuleState) and key in joined.parts else states.get(label)
            kind, shape = module.kind if isinstance(module, Product) else type(module).__name__, shape_of(parameter, blocks)
            frozen = "" if parameter.requires_grad else "not trained"
            if state is None or state.skipped:
                reason = _reason(module, _is_head(module, name) or module is head) if state is None else state.skipped
                reason = "; ".join(part for part in (reason, frozen) if part)
                layers.append(LayerReport(label, kind, shape, False, reason))
            else:
                recipe = "" if state.override is None else state.override.name
                note = _head_note(model, state) if _is_head(module, name) else ""
                reason = "; ".join(part for part in (state.override_by, note, frozen) if part)
                layers.append(LayerReport(label, kind, shape, True, reason, recipe))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    kernels = kernels_on(device.type, capability, model, native=gemm.is_native(device))
    tensor = getattr(model, "tensor", None)
    split = exchanges = ""
    if isinstance(tensor, TensorGroup):
        split = f"{tensor.size} ranks hold parts of each matrix, and between products parts of the tokens"
        split += "; whole experts are distributed over ranks" if getattr(model, "spread", False) else ""
        joins = {method: None for state in states.values() for method in state.buffers.joins.methods()}
        exchanges = "; ".join(filter(None, (tensor.exchanges, *joins)))
    return Description(
        tuple(layers),
        *kernels,
        split=split,
        exchanges=exchanges,
        gathered=getattr(model, "octavo_gathered", ""),
        adapters=_adapters(model),
    )


def _adapters(model: nn.Module) -> str:
    adapters = [module for module in model.modules() if isinstance(module, Adapter)]
    if not adapters:
        return ""
    ranks = " and ".join(map(str, sorted({module.lora_B.shape[1] for module in adapters})))
    return f"of rank {ranks} on {len(adapters)} of the source's matrices, in the dtype of activations"


def kernels_on(
    kind: str,
    capability: tuple[int, int] | None,
    model: nn.Module,
    *,
    native: bool,
    shared: str = "",
    repeats: bool | None = None,
    recorded: str = "",
) -> tuple[str, str, str]:
    """(attention, products in FP8, reason for the model's original code) in words.

    kind: device type, such as "cuda", with its `capability`. native: it has FP8 units. shared, repeats: how ranks share each
    sequence, and `train.deterministic`, for a plan. recorded: the kernel of packed documents in recorded steps, where
    FlashAttention-4 does not serve.
    """
    repeats = torch.are_deterministic_algorithms_enabled() if repeats is None else repeats
    products = "FP8 units, cuBLAS" if native else f"emulated exactly on {kind}, without FP8 units"
    own_code: str = getattr(model, "octavo_own_code", "")
    cores = [layer for layer in model.modules() if isinstance(layer, DotProductAttention)]
    parts = [_library_kernel(kind, capability, repeats=repeats)]
    if cores:  # by the rule of `octavo.nn.attend`
        by_flash = all(flash.serves(capability, core.head_dim) for core in cores)
        causal = any(core.causal for core in cores)
        in_turn = f"{parts[0]}{', document by document' if causal else ''}"
        parts = [f"FlashAttention-4 {flash.VERSION}" if by_flash else recorded or in_turn]
        if not causal:
            parts.insert(0, f"Octavo's kernel up to {short.LONGEST} tokens")
        windows = sorted({core.window for core in cores if core.window is not None})
        in_pieces = "" if by_flash or recorded else " in pieces"
        parts += [f"a window of {', '.join(map(str, windows))} keys{in_pieces}"] if windows else []
        context = next((core.context for core in cores if core.context is not None), None)
        shared = shared if context is None else f"{context.size} ranks share each sequence ({context.strategy})"
        parts += [shared] if shared else []
    return "; ".join(parts), products, own_code


def _library_kernel(kind: str, capability: tuple[int, int] | None, *, repeats: bool) -> str:
    """PyTorch's attention on a device, in words."""
    if capability is None:
        kernel = f"PyTorch's kernel on {kind}"
    elif repeats:
        return "plain PyTorch, whose bits repeat"
    elif torch.backends.cuda.cudnn_sdp_enabled() and capability >= (9, 0):
        kernel = "cuDNN's kernel"
    else:
        kernel = "PyTorch's kernel, flash or memory-efficient"
    return f"{kernel} through scaled_dot_product_attention"


def _head_note(model: nn.Module, state: ModuleState) -> str:
    tensorwise = state.override is None or state.override.casts[Operand.INPUT].granularity is Granularity.TENSOR
    whole = getattr(model, "fp8_head", True) is True
    products = (
        "gradients accumulate precisely" if whole else "logits in high precision; gradients in FP8, accumulated precisely"
    )
    scales = [] if tensorwise else ["one scale a tensor (current scaling)"]
    theirs = [] if getattr(model, "fp8_head_asked", True) else ["under Transformer Engine's recipes all in high precision"]
    return "; ".join([products, *scales, *theirs])


def _is_head(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and (name == "head" or name.endswith("lm_head"))


def _reason(module: nn.Module, is_head: bool) -> str:
    if isinstance(module, nn.Embedding):
        return "an embedding looks up rows and multiplies nothing"
    if is_head:
        return "the output head stays in high precision: its logits feed the loss"
    if isinstance(module, LayerNormMoE) or (isinstance(module, Product) and module.kind == LayerNormMoE.__name__):
        return "a router: it selects experts in float32"
    if isinstance(module, nn.Linear):
        return f"{type(module).__name__} is a subclass with custom code"
    return f"{type(module).__name__} is not a linear layer that Octavo replaces"
