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

_SCALARS = (bool, int, float, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Kernels of one function; a registered one may be another, such as context parallelism or a mask of its own."""
_EXPERTS = (None, "eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe")
"""Likewise of experts."""
_STATES = ("training", "gradient_checkpointing", "name_or_path", "vocab_size")
"""Attributes without effect on the forward; checkpointing is looked at by name, and the vocabulary is in the shapes."""


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
            yield f"{name} is {_kind(own.get(name))}, not {_kind(known.get(name))}"
    yield from _tensor_differences(model, reference)
    for name, module in own.items():
        if any(not _captures_outputs(hook) for hooks in _HOOKS for hook in getattr(module, hooks).values()):
            yield f"{name or 'the model'} has hooks"
        if getattr(module, "gradient_checkpointing", False):
            yield "gradient checkpointing is on: octavo.transform(recompute=True) does that for Octavo's blocks"
        has, says = _scalars(module), _scalars(known[name])
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


def _tensor_differences(model: nn.Module, reference: nn.Module) -> Iterator[str]:
    """Parameters and persistent buffers by name, shape and the names that share one."""
    own, known = (_tensors(m) for m in (model, reference))
    for name in [*own, *known]:
        if name not in known or name not in own:
            yield f"{name} is {'an extra' if name in own else 'a missing'} parameter"
        elif own[name] != known[name]:
            yield f"{name} has the shape {own[name][0]} or a tie that the config does not say"


def _tensors(model: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    first: dict[int, str] = {}
    return {
        name: (tuple(value.shape), first.setdefault(id(value), name))
        for name, value in model.state_dict(keep_vars=True).items()
    }


def _captures_outputs(hook: object) -> bool:
    """A hook of transformers' own, which a forward that returns hidden states or router logits leaves behind."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _scalars(module: nn.Module) -> dict[str, Any]:
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, _SCALARS) and not key.startswith("_") and key not in _STATES
    }


def _kind(module: nn.Module | None) -> str:
    return "missing" if module is None else f"a {type(module).__name__}"
