"""Compares a model's structure with a model built from its config: an export holds only weights and config.

A replaced module, a shared parameter, another eps or activation, a custom `forward`: a folder with such weights would load as a
different model. Settings that matter only in training (dropout, recomputation, losses) are ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D as PlainConv1D

from octavo.collectives.blocks import parameters_of, shape_of
from octavo.models.conv1d import Conv1D
from octavo.nn.derived import written_class
from octavo.nn.linear import Linear

LINEARS = ("torch.nn.modules.linear.Linear", "transformers.models.falcon.modeling_falcon.FalconLinear")
"""Classes that compute `nn.Linear`'s product; Falcon's rounds it before it adds the bias."""
_SCALARS = (bool, int, float, str, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_LIBRARIES = ("torch", "transformers", "octavo", "accelerate", "peft", "trl", "deepspeed")
"""Packages whose hooks and wrapped forwards are for training; a user's may change the computation."""
_STATES = (
    *("training", "gradient_checkpointing", "name_or_path", "vocab_size", "checkpoint", "chunks", "inplace"),
    *("padding_idx", "pad_token_id"),
    *(
        "sharded",
        "objective",
        "output_hidden_states",
        "router_losses_apart",
        "fp8_head",
        "fp8_head_asked",
    ),  # attributes of Octavo's decoder
)
"""Attributes without effect on a result; the vocabulary is in the shapes."""
_TRAINING = ("drop", "jitter", "loss", "cache", "parallel_", "_parallel", "parallelizable", "checkpointing")
"""Substrings of names of attributes without effect on inference."""


Tensors = dict[str, tuple[tuple[int, ...], str]]
"""Parameters and persistent buffers: name → shape, and the first name of the same tensor."""


def tensors_of(model: nn.Module, prefix: str = "") -> Tensors:
    """The tensors of a model, whole; prefix: of all names."""
    first: dict[int, str] = {}
    blocks = parameters_of(model)
    return {
        name: (shape_of(value, blocks), first.setdefault(id(value), name))
        for name, value in model.state_dict(prefix=prefix, keep_vars=True).items()
        if isinstance(value, Tensor)
    }


def tensor_differences(tensors: Tensors, known: Tensors) -> Iterator[str]:
    """Tensors that differ in name, shape or ties."""
    for name in [*tensors, *known]:
        if name not in known or name not in tensors:
            yield f"{name} is {'an extra' if name in tensors else 'a missing'} parameter"
        elif tensors[name][0] != known[name][0]:
            yield f"{name} has the shape {tensors[name][0]}, where its config says {known[name][0]}"
        elif tensors[name] != known[name]:
            if tensors[name][1] != name:
                yield f"{name} shares the tensor of {tensors[name][1]}, a tie that is not in the config"
            else:
                way = "unless its tie_word_embeddings is False"
                yield f"{name} is a separate tensor, where the config ties it to {known[name][1]} ({way})"


def scalars_of(module: nn.Module) -> dict[str, Any]:
    """Public attributes that are plain values."""
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, _SCALARS) and not key.startswith("_") and key not in _STATES
    }


def class_name(cls: type) -> str:
    """A class's whole name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def kind_of(module: nn.Module | None, other_module: nn.Module | None = None) -> str:
    """A module's class, with an article; its full name if the compared module's class has the same name."""
    if module is None:
        return "missing"
    cls, other = written_class(module), None if other_module is None else written_class(other_module)
    if other is None or cls.__name__ != other.__name__:
        return f"a {cls.__name__}"
    return class_name(cls) + (" of other code" if cls.__module__ == other.__module__ else "")


def is_of_transformers(hook: object) -> bool:
    """True for a hook that transformers leaves after a forward that returned hidden states or router logits."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def difference_from(model: nn.Module, reference: nn.Module, *, root: bool = True) -> str:
    """The first difference between `model` and a model with its weights and the code of `reference`; empty for none.

    Args:
        model: trained, in FP8 or sharded.
        reference: built from its config, with parameters on the meta device and buffers with values.
        root: False if `model` has the parts of the reference but another class.
    """
    return next(_differences(model, reference, root), "")


def _differences(model: nn.Module, reference: nn.Module, root: bool) -> Iterator[str]:
    modules, known = (dict(m.named_modules(remove_duplicate=False)) for m in (model, reference))
    for name in [*modules, *known]:
        mine, theirs = modules.get(name), known.get(name)
        if (name or root) and (mine is None or theirs is None or not _same_code(mine, theirs)):
            yield f"{name or 'the model'} is {kind_of(mine, theirs)}, not {kind_of(theirs, mine)}"
    shared: dict[nn.Module, str] = {}
    for name, module in modules.items():
        if shared.setdefault(module, name) != name and known[name] is not known[shared[module]]:
            yield f"{name} and {shared[module]} are one module"
    yield from tensor_differences(tensors_of(model), tensors_of(reference))
    for name, module in modules.items():
        if name or root:
            yield from (f"{name or 'model'}{fact}" for fact in _module_differences(module, known[name]))


def _same_code(module: nn.Module, reference: nn.Module) -> bool:
    cls, known = written_class(module), written_class(reference)
    if cls is Linear and class_name(known) in LINEARS:
        return True
    return cls is known or (cls is Conv1D and known is PlainConv1D)


def _module_differences(module: nn.Module, reference: nn.Module) -> Iterator[str]:
    has, says = vars(module), vars(reference)
    drops, scaled = isinstance(module, nn.modules.dropout._DropoutNd), _scales_rotation(module)
    for key, value in has.items():
        if key == "original_max_seq_len" and not scaled:
            continue
        if type(module) is nn.Linear and key in ("in_features", "out_features"):  # forward uses only the weight
            continue
        if key.startswith("_") or key in _STATES or drops or any(part in key for part in _TRAINING):
            continue
        plain = _is_plain(value)
        if key in says:
            if not plain and says[key] is None:  # set by a run, such as a sharded model's process group
                continue
            if plain != _is_plain(says[key]) or (plain and value != says[key]):
                yield f".{key} is {value!r}, where its config says {says[key]!r}"
            elif _is_function(value) and _origin(value) != _origin(says[key]) and not _origin(value).startswith("octavo."):
                yield f".{key} is {_origin(value)}, not {_origin(says[key])}"
        elif key in dir(written_class(module)):
            if callable(value) and not _of_library(value):
                yield f".{key} is overridden, by {_origin(value)}"
            elif (
                isinstance(value, _SCALARS)
                and _is_plain(default := getattr(written_class(module), key, None))
                and value != default
            ):
                yield f".{key} is {value!r}, where its class says {default!r}"
    yield from _buffer_differences(module, reference)


def _scales_rotation(module: nn.Module) -> bool:
    """True for a rotary scaling that recomputes its frequencies for longer inputs."""
    kinds = getattr(module, "rope_type", None)
    return any(kind in ("dynamic", "longrope") for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,)))


def _is_plain(value: Any) -> bool:
    """A value that `==` compares: scalars, sequences of them, and frozen records."""
    if isinstance(value, tuple | list):
        return all(isinstance(each, _SCALARS) for each in value)
    return isinstance(value, _SCALARS) or (dataclasses.is_dataclass(value) and value.__hash__ is not None)


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module | type) and hasattr(value, "__code__")


def _origin(function: Any) -> str:
    """The module and name of a function or callable; for a wrapper that copied the wrapped function's names, the wrapper's."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    home = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
    code = getattr(function, "__code__", None)
    return f"{home}.{getattr(code, 'co_qualname', None) or getattr(code, 'co_name', None) or type(function).__qualname__}"


def _of_library(function: Any) -> bool:
    return _origin(function).partition(".")[0] in _LIBRARIES


def _buffer_differences(module: nn.Module, reference: nn.Module) -> Iterator[str]:
    """Differences in buffers that no file holds, such as rotary frequencies, which are computed from the config."""
    for name in sorted(reference._non_persistent_buffers_set & module._buffers.keys()):
        buffer, known = module._buffers[name], reference._buffers.get(name)
        computed = name.endswith("inv_freq") and "original" not in name and _scales_rotation(module)
        if buffer is None or known is None or buffer.is_meta or known.is_meta or "cache" in name or computed:
            continue
        buffer, known = buffer.detach().cpu(), known.detach().cpu()
        if buffer.shape != known.shape or not _close(buffer, known):
            yield f".{name} has other values than the config says"


def _close(buffer: Tensor, known: Tensor) -> bool:
    """Equal up to the rounding of `model.to(dtype)`."""
    if buffer.is_floating_point() and known.is_floating_point():
        return torch.allclose(buffer.float(), known.float(), rtol=1e-2, equal_nan=True)
    return torch.equal(buffer, known.to(buffer.dtype))


def warn_of_hooks(model: nn.Module) -> None:
    """Warn about a user's hooks, which no folder holds: some only observe, some change the computation."""
    hooked = [
        f"{name or 'the model'} ({_origin(hook)})"
        for name, module in model.named_modules()
        for hooks in _HOOKS
        for hook in getattr(module, hooks).values()
        if not _of_library(hook)
    ]
    if hooked:
        more = f", and {len(hooked) - 1} more" if len(hooked) > 1 else ""
        warnings.warn(
            f"the forward hook of {hooked[0]}{more} is not written: only the weights are, and the loaded model computes "
            "without it.",
            stacklevel=4,
        )
