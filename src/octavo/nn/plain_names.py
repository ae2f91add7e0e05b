"""Parameters of a transformer layer under the names that they have without fusion: `ffn.fc1.weight`, `ffn.layernorm.weight`.

Transformer Engine's layers hold a norm and a product in one module, as `layernorm_mlp.fc1_weight`. Common rules decide by names
and classes which parameters decay: none with "norm" or "bias" in the name, none called "bias", none of an `nn.LayerNorm`. With
the fused names such a rule excludes every matrix after a norm. `use_plain_names` moves the parameters of a layer, in their
order, into modules named as Hugging Face's; the layer computes the same, and its fused names remain attributes, to read and to
set.

The fused names are the stored ones too (`stored_names`): checkpoints, state dicts with SMP's names and the counters of initial
weights use them, so that files load in both directions and a seed gives the same weights. `octavo.nn` alone, and the layers of
a script for Transformer Engine, have only the fused names.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from octavo.fp8.scaling import ModuleState, states_of
from octavo.nn.attention import MultiheadAttention
from octavo.nn.block import TransformerLayer
from octavo.nn.linear import LayerNormLinear
from octavo.nn.mlp import LayerNormMLP
from octavo.nn.moe import LayerNormMoE
from octavo.nn.norm import LayerNorm, RMSNorm
from octavo.stored_names import stored_name


def _warning(register: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `nn.Module` that registers a hook, with a warning."""

    @functools.wraps(register)
    def warned(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"a hook of a {type(self).__name__} inside of a fused layer never runs: norm and products are one computation. "
            "Hook the enclosing layer (ffn, self_attention), or run the model's original code: octavo.transform(blocks='own').",
            stacklevel=2,
        )
        return register(self, *args, **kwargs)

    return warned


class Uncalled(nn.Module):
    """Base of a module that only holds parameters of the enclosing layer's computation: its hooks would never run."""

    register_forward_hook = _warning(nn.Module.register_forward_hook)
    register_forward_pre_hook = _warning(nn.Module.register_forward_pre_hook)
    register_full_backward_hook = _warning(nn.Module.register_full_backward_hook)
    register_full_backward_pre_hook = _warning(nn.Module.register_full_backward_pre_hook)


class PlainRMSNorm(Uncalled, RMSNorm):
    """The weight of a norm that the enclosing layer computes."""


class PlainLayerNorm(Uncalled, LayerNorm):  # type: ignore[misc]
    """Weight and bias of a norm that the enclosing layer computes."""


_NORMS: Mapping[str, Any] = {"RMSNorm": PlainRMSNorm, "LayerNorm": PlainLayerNorm}


class Product(Uncalled):
    """Weight and bias of a product that the enclosing module computes; never called.

    Attributes:
        kind: class name of the enclosing module.
    """

    def __init__(self, kind: str, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.kind = kind
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, *_: Any) -> Tensor:
        """Raises a TypeError: the enclosing module computes the product, fused with the kernels before and after it."""
        raise TypeError(f"a product of {self.kind} cannot be called: call the {self.kind}.")

    def extra_repr(self) -> str:
        """The shape, for `print(model)`."""
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}, bias={self.bias is not None}"


class _Plain:
    """Mixin in front of a layer's class, for plain names: maps the fused names to their places."""

    places: ClassVar[dict[str, tuple[str, str]]] = {}
    """Fused name → attribute of this module, and attribute of that; empty for the attribute itself."""

    def __init_subclass__(cls, places: dict[str, tuple[str, str]] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if places is not None:  # not in a subclass of these classes
            cls.places, cls.__name__ = places, cls.__bases__[1].__name__  # the layer's, which users and libraries read
            for name, (owner, attribute) in places.items():
                setattr(cls, name, _at(owner, attribute))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.places:
            owner, attribute = self.places[name]
            target, name = (getattr(self, owner), attribute) if attribute else (self, owner)
            setattr(target, name, value)
        else:
            super().__setattr__(name, value)


def _at(owner: str, attribute: str) -> property:
    if attribute:
        return property(
            lambda self: getattr(getattr(self, owner), attribute), None, lambda self: delattr(getattr(self, owner), attribute)
        )
    return property(lambda self: getattr(self, owner), None, lambda self: delattr(self, owner))


def _inside(names: str, *, fp8: bool = False) -> dict[str, tuple[str, str]]:
    """Fused names of children's weights and biases, `layernorm` among them."""
    kinds = ("weight", "bias")
    places = {f"layer_norm_{kind}": ("layernorm", kind) for kind in kinds}
    for name in names.split():
        places |= {f"{name}_{kind}": (name, kind) for kind in kinds}
        places |= {f"{name}_fp8_state": (name, "fp8_state")} if fp8 else {}
    return places


class PlainTransformerLayer(
    _Plain, TransformerLayer, places={"layernorm_mlp": ("ffn", ""), "layernorm_moe": ("moe", "")}
):  # fmt: skip
    """`TransformerLayer` with plain names."""


class PlainMultiheadAttention(_Plain, MultiheadAttention, places={"layernorm_qkv": ("qkv", "")}):
    """`MultiheadAttention` with plain names."""


class PlainLayerNormLinear(_Plain, LayerNormLinear, places=_inside("")):
    """`LayerNormLinear` with plain names."""


class PlainLayerNormMLP(_Plain, LayerNormMLP, places=_inside("fc1 fc2", fp8=True)):
    """`LayerNormMLP` with plain names."""


class PlainLayerNormMoE(_Plain, LayerNormMoE, places=_inside("router")):
    """`LayerNormMoE` with plain names."""


def use_plain_names(layer: TransformerLayer) -> TransformerLayer:
    """Give the parameters of a new layer with a norm in front of its attention their plain names; returns the layer."""
    attention = layer.self_attention
    qkv = attention.layernorm_qkv
    # The norm is a child of the attention, so that its parameters stay in front of the product's: optimizers that were saved
    # by position, and sums over all gradients, see the same order. The layer that computes with it has a reference.
    vars(qkv)["layernorm"] = norm = _norm(qkv, qkv.normalization, qkv.eps, qkv.zero_centered_gamma)
    _become(qkv, PlainLayerNormLinear)
    _replace(attention, "layernorm_qkv", {"layernorm": norm, "qkv": qkv})
    _become(attention, PlainMultiheadAttention)
    if layer.experts is not None:
        moe = layer.layernorm_moe
        parts: dict[str, nn.Module] = {"layernorm": _norm(moe, *moe.norm), "router": _product(moe, "router")}
        _put_first(moe, parts)
        _become(moe, PlainLayerNormMoE)
        _replace(layer, "layernorm_moe", {"moe": moe})
    else:
        mlp = layer.layernorm_mlp
        parts = {"layernorm": _norm(mlp, mlp.normalization, mlp.eps, mlp.zero_centered_gamma)}
        for name in ("fc1", "fc2"):
            parts[name] = _product(mlp, name)
            delattr(mlp, f"{name}_fp8_state")
            vars(parts[name])["fp8_state"] = ModuleState(parts[name])
        _put_first(mlp, parts)
        _become(mlp, PlainLayerNormMLP)
        _replace(layer, "layernorm_mlp", {"ffn": mlp})
    _become(layer, PlainTransformerLayer)
    layer.register_load_state_dict_pre_hook(_take_stored_names)
    return layer


def _take_stored_names(layer: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook: `load_state_dict` also accepts a state dict of an older version, with the stored names."""
    for name in _names_in(layer):  # if a state dict has both, the stored name stays, as an unexpected key
        if (stored := prefix + stored_name(name)) in state_dict and prefix + name not in state_dict:
            state_dict[prefix + name] = state_dict.pop(stored)


def _become(module: nn.Module, cls: type[nn.Module]) -> None:
    module.__class__ = cls


def _taken(module: nn.Module, name: str) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Remove and return the weight and bias of this name."""
    parameters = getattr(module, f"{name}_weight"), getattr(module, f"{name}_bias", None)
    for kind in ("weight", "bias"):
        if hasattr(module, f"{name}_{kind}"):
            delattr(module, f"{name}_{kind}")
    return parameters


def _product(module: nn.Module, name: str) -> Product:
    return Product(type(module).__name__, *_taken(module, name))


def _norm(module: nn.Module, normalization: str, eps: float, zero_centered: bool) -> nn.Module:
    """A norm with the parameters of the one in `module`."""
    weight, bias = _taken(module, "layer_norm")
    norm = _NORMS[normalization](weight.shape[0], eps, zero_centered_gamma=zero_centered, device="meta")
    norm.weight, norm.bias = weight, bias
    return norm


def _replace(module: nn.Module, name: str, by: dict[str, nn.Module]) -> None:
    """Replace one child by others, at its position."""
    children = dict(module.named_children())
    for each in children:
        delattr(module, each)
    for each, child in children.items():
        for key, new in (by if each == name else {each: child}).items():
            module.add_module(key, new)


def _put_first(module: nn.Module, parts: dict[str, nn.Module]) -> None:
    """Add children in front of the others."""
    children = dict(module.named_children())
    for each in children:
        delattr(module, each)
    for key, child in (parts | children).items():
        module.add_module(key, child)


def stored_names(model: nn.Module) -> dict[str, str]:
    """Parameters, buffers, modules and FP8 products in layers with plain names → their stored names.

    All others are stored under their present names. Wrappers around the model or inside it, such as `torch.compile`'s, may
    lengthen the names.
    """
    names: dict[str, str] = {}
    for prefix, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, PlainTransformerLayer):
            continue
        start = f"{prefix}." if prefix else ""
        for name in _names_in(layer):
            if (stored := stored_name(name)) != name:
                names[start + name] = start + stored
    return names


def _names_in(layer: nn.Module) -> Iterator[str]:
    for members in (layer.named_modules, layer.named_parameters, layer.named_buffers):
        yield from (name for name, _ in members(remove_duplicate=False) if name)
    yield from (name for name, _ in states_of(layer))  # of stacked experts' products, which are no modules


def has_plain_names(module: nn.Module) -> bool:
    """True for a layer of `use_plain_names`, or a part of it that has fused names."""
    return isinstance(module, _Plain)
