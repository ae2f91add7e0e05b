"""Exactly known models: a Hugging Face model gets Octavo's decoder only if it is what its config builds, part by part.

A subclass, an adapter, a bias that was added, a tie made by hand or a hook computes something else, and the decoder would drop
it silently. Such a model keeps its own code, and `octavo.describe` gives the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from octavo.models.decoder import RotaryAngles
from octavo.models.spec import ModelSpec
from octavo.models.structure import is_of_transformers, kind_of, scalars_of, tensor_differences

HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Of a module's calls, and of its state dict, whose names would be others."""
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Kernels of one function; a registered one may be another, such as context parallelism or a mask of its own."""
_EXPERTS = (None, "eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe")
"""Likewise of experts."""


def tie_again(model: nn.Module) -> None:
    """Tie head and embedding on the meta device as the config says: accelerate's `init_empty_weights` parts them."""
    own: Any = model
    if not getattr(getattr(own, "config", None), "tie_word_embeddings", False) or not hasattr(own, "get_output_embeddings"):
        return
    head, embedding = (getattr(module, "weight", None) for module in (own.get_output_embeddings(), own.get_input_embeddings()))
    if not isinstance(head, nn.Parameter) or not isinstance(embedding, nn.Parameter) or head.shape != embedding.shape:
        return
    if head.is_meta and embedding.is_meta:
        own.get_output_embeddings()._parameters["weight"] = embedding  # an assignment would part them again in that context


def difference(model: nn.Module, reference: nn.Module, spec: ModelSpec) -> str:
    """The first thing in which a model differs from `reference`, built from its config; empty if there is none."""
    if type(model) is not type(reference):
        return f"its class {type(model).__name__} is not transformers' {type(reference).__name__}"
    return next(_differences(model, reference, spec), "")


def _differences(model: nn.Module, reference: nn.Module, spec: ModelSpec) -> Iterator[str]:
    attention = getattr(model.config, "_attn_implementation", None)
    if attention is not None and attention not in _ATTENTION:
        yield f"its attention {attention!r} is not one of transformers' own"
    experts = getattr(model.config, "_experts_implementation", None)
    if spec.experts and experts not in _EXPERTS:
        yield f"its experts run by {experts!r}, which is not one of transformers' own"
    if getattr(model.config, "output_attentions", False):
        yield "output_attentions = True in its config, and the decoder's attention never stores the probabilities"
    own, known = (dict(m.named_modules(remove_duplicate=False)) for m in (model, reference))
    for name in [*own, *known]:
        if type(own.get(name)) is not type(known.get(name)):
            yield f"{name} is {kind_of(own.get(name), known.get(name))}, not {kind_of(known.get(name), own.get(name))}"
    yield from tensor_differences(model, reference)
    for name, module in own.items():
        if any(not is_of_transformers(hook) for hooks in HOOKS for hook in getattr(module, hooks).values()):
            yield f"{name or 'the model'} has hooks"
        if getattr(module, "gradient_checkpointing", False):
            yield "gradient checkpointing is on: octavo.transform(recompute=True) does that for Octavo's blocks"
        has, says = scalars_of(module), scalars_of(known[name])
        if changed := sorted(key for key in has.keys() | says.keys() if has.get(key) != says.get(key)):
            key = changed[0]
            yield f"{name or 'the model'}.{key} is {has.get(key)}, where its config says {says.get(key)}"
        if overridden := sorted(key for key, value in vars(module).items() if callable(value) and key in dir(type(module))):
            yield f"{name or 'the model'}.{overridden[0]} is overridden"
        inv_freq = getattr(module, "inv_freq", None)
        if isinstance(inv_freq, torch.Tensor) and not inv_freq.is_meta:
            angles = RotaryAngles(spec)
            if (
                inv_freq.shape != angles.inv_freq.shape
                or not torch.allclose(inv_freq.float().cpu(), angles.inv_freq, rtol=1e-2)
                or module.attention_scaling != angles.factor
            ):
                yield f"{name} rotates by other frequencies than the config says"
    if "_loss_function" in vars(model):
        yield "its loss_function is overridden"
