"""Checks, part by part, that Octavo's blocks compute exactly the same as a model.

A subclass, an adapter, an added bias, a manual tie or a hook changes the computation, and Octavo's blocks would drop it
silently. Such a model runs its original code, and `octavo.describe` gives the reason. A Hugging Face model is compared with the
model built from its config, timm's vision transformer with a table of its parts (`octavo.models.vision`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from octavo.models.decoder import RotaryAngles
from octavo.models.spec import ModelSpec
from octavo.models.structure import Tensors, is_of_transformers, kind_of, scalars_of, tensor_differences, tensors_of

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Attributes of wrapped calls or state dicts, which would change results or names."""
_SWITCHES = {"gradient_checkpointing": "gradient checkpointing", "grad_checkpointing": "set_grad_checkpointing()"}
"""Attributes that switch activation checkpointing on: transformers' and timm's."""
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Attention implementations that compute the same function; a registered one may not (context parallelism, custom masks)."""
_EXPERTS = (None, "eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe")
"""Implementations of experts that compute the same function."""


def tie_again(model: nn.Module) -> None:
    """Tie head and embedding on the meta device as the config says: accelerate's `init_empty_weights` unties them."""
    lm: Any = model
    if not getattr(getattr(lm, "config", None), "tie_word_embeddings", False) or not hasattr(lm, "get_output_embeddings"):
        return
    head, embedding = (getattr(module, "weight", None) for module in (lm.get_output_embeddings(), lm.get_input_embeddings()))
    if not isinstance(head, nn.Parameter) or not isinstance(embedding, nn.Parameter) or head.shape != embedding.shape:
        return
    if head.is_meta and embedding.is_meta:
        lm.get_output_embeddings()._parameters["weight"] = embedding  # an assignment would untie them in that context


def differences(
    model: nn.Module,
    parts: Collection[str],
    other_class: Callable[[str, nn.Module | None], str],
    tensors: Callable[[], Tensors],
    other_values: Callable[[str, nn.Module], Iterable[str]],
    name: str = "",
) -> Iterator[str]:
    """Compares a model with the known one: messages about differing classes, then tensors, then values of each part.

    Args:
        model: the model.
        parts: names of the known model's modules.
        other_class: the message about a module by its name, None for a missing one; empty for a known class.
        tensors: the known tensors; called if every class is known.
        other_values: messages about values that change the computation of a module of the known class.
        name: of the model, a prefix of all names.
    """
    modules = dict(model.named_modules(prefix=name, remove_duplicate=False))
    yield from filter(None, (other_class(each, modules.get(each)) for each in [*modules, *parts]))
    yield from tensor_differences(tensors_of(model, f"{name}." if name else ""), tensors())
    for each, module in modules.items():
        if any(not is_of_transformers(hook) for hooks in _HOOKS for hook in getattr(module, hooks).values()):
            yield f"{each or 'the model'} has hooks"
        yield from switched_on(module)
        yield from other_values(each, module)
        if overridden := sorted(key for key, value in vars(module).items() if callable(value) and key in dir(type(module))):
            yield f"{each or 'the model'}.{overridden[0]} is overridden"


def switched_on(module: nn.Module) -> Iterator[str]:
    """The message about a model's activation checkpointing, which Octavo's blocks would ignore."""
    for switch, way in _SWITCHES.items():
        if getattr(module, switch, False):
            yield f"{way} is on: octavo.transform(recompute=True) does that for Octavo's blocks"


def difference(model: nn.Module, reference: nn.Module, spec: ModelSpec) -> str:
    """The first difference between a causal language model and `reference`, built from its config; empty for none."""
    if type(model) is not type(reference):
        return f"its class {type(model).__name__} is not transformers' {type(reference).__name__}"
    known = dict(reference.named_modules(remove_duplicate=False))

    def other_class(name: str, module: nn.Module | None) -> str:
        built = known.get(name)
        return "" if type(module) is type(built) else f"{name} is {kind_of(module, built)}, not {kind_of(built, module)}"

    def other_values(name: str, module: nn.Module) -> Iterator[str]:
        has, says = scalars_of(module), scalars_of(known[name])
        if changed := sorted(key for key in has.keys() | says.keys() if has.get(key) != says.get(key)):
            key = changed[0]
            yield f"{name or 'the model'}.{key} is {has.get(key)}, where its config says {says.get(key)}"
        inv_freq = getattr(module, "inv_freq", None)
        if isinstance(inv_freq, torch.Tensor) and not inv_freq.is_meta:
            angles = RotaryAngles(spec)
            if (
                inv_freq.shape != angles.inv_freq.shape
                or not torch.allclose(inv_freq.float().cpu(), angles.inv_freq, rtol=1e-2)
                or module.attention_scaling != angles.factor
            ):
                yield f"{name} has other rotary frequencies than the config's"

    differing = differences(model, known, other_class, lambda: tensors_of(reference), other_values)
    loss = ["its loss_function is overridden"] if "_loss_function" in vars(model) else []
    return next(itertools.chain(_beyond_modules(model.config, spec), differing, loss), "")


def _beyond_modules(config: Any, spec: ModelSpec) -> Iterator[str]:
    """Differences in kernels that a config chooses, outside of the modules."""
    attention = getattr(config, "_attn_implementation", None)
    if attention is not None and attention not in _ATTENTION:
        yield f"its attention {attention!r} is not one of transformers'"
    experts = getattr(config, "_experts_implementation", None)
    if spec.experts and experts not in _EXPERTS:
        yield f"its experts run by {experts!r}, which is not one of transformers'"
    if getattr(config, "output_attentions", False):
        yield "output_attentions = True in its config, and the decoder's attention never stores the probabilities"
