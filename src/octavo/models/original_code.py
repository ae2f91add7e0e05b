"""Models with their original code: dtypes, their gradient checkpointing, and refusals of settings of Octavo's blocks."""

from __future__ import annotations

import functools
import json
import re
from typing import Any, Literal

import torch
from torch import nn

from octavo.config.recompute import Recompute, check_own_code
from octavo.errors import InputError, some
from octavo.kernels.cross_entropy import Objective
from octavo.models.families import DECODER_FAMILIES
from octavo.nn.derived import derive
from octavo.nn.norm import FLOATS

_SWITCHES = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""Names of the switch of recomputation in Hugging Face's models: transformers 5.2x has the first and warns of the second."""


def refuse_other_models(config: Any) -> None:
    """Refuse the config of a model that is not a causal language model, before data or weights are read.

    Raises:
        InputError: the model's name and kind, and the way to train it.
    """
    kind = str(config.model_type)
    if what := _other_kind(config, kind):
        raise InputError(
            f"model.source: {kind} is no causal language model but {what}, and a run trains only causal language models, such "
            f"as llama or gpt2. Give one as model.source, or train {kind} in your training loop: octavo.transform(model) runs "
            "its linear layers in FP8."
        )


def _other_kind(config: Any, kind: str) -> str:
    """The kind of a model that is not a causal language model; empty if it is one, or of unknown kind."""
    from transformers.models.auto import modeling_auto as classes

    causal = kind in classes.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.is_encoder_decoder or kind in ("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"):
        return "an encoder-decoder"
    if kind in classes.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not (
        causal and (getattr(config, "is_decoder", False) or getattr(config, "causal", False))
    ):
        return "an encoder" + (
            " (model.config.is_decoder = true makes it causal)" if causal and hasattr(config, "is_decoder") else ""
        )
    if isinstance(getattr(config, "vocab_size", None), int) and causal:
        return ""
    for what, tables in _OTHER_KINDS.items():
        if any(kind in getattr(classes, table, ()) for table in tables):
            return what
    return "" if causal else "another kind of model"


_OTHER_KINDS = {
    "a model of text and other inputs": (
        *("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
        *("MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING_NAMES"),
    ),
    "a vision model": (
        *("MODEL_FOR_IMAGE_MAPPING_NAMES", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_BACKBONE_MAPPING_NAMES"),
        *("MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES"),
    ),
    "an audio model": ("MODEL_FOR_CTC_MAPPING_NAMES", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
    "an encoder": ("MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
}
"""Kinds of models other than causal language models → transformers' tables of their classes."""


def refuse_head_settings(model: nn.Module, fp8_head: bool | Literal["backward"] | None, objective: Objective | None) -> None:
    """Raise an InputError for settings of the head of Octavo's decoder."""
    objective = objective or Objective()
    settings: dict[str, tuple[Any, str]] = {
        f"fp8.head = {json.dumps(fp8_head)}": (fp8_head, "fp8.head = false"),
        f"train.label_smoothing = {objective.label_smoothing:g}": (objective.label_smoothing, "train.label_smoothing = 0.0"),
        f"train.z_loss = {objective.z_loss:g}": (objective.z_loss, "train.z_loss = 0.0"),
    }
    if asked := {setting: default for setting, (value, default) in settings.items() if value}:
        raise InputError(
            f"{', '.join(asked)}: {_kind(model)} runs its original code with its head and loss, and only Octavo's decoder"
            f" supports this ({', '.join(DECODER_FAMILIES)}). Set {', '.join(asked.values())}."
        )


def refuse_block_settings(model: nn.Module, recompute: Recompute, mlp_chunks: int, *, offload: bool) -> None:
    """Raise an InputError for settings of Octavo's blocks."""
    kind = _kind(model)
    families = ", ".join(DECODER_FAMILIES)
    if offload:
        raise InputError(
            f"train.offload = true (or parallel.sm_activation_offloading): {kind} runs its original code, and only the blocks "
            "of Octavo's decoder are offloaded"
            f" ({families}). Use train.recompute = true instead."
        )
    has_switch = any(hasattr(model, switch) for switch in _SWITCHES)
    check_own_code(recompute, mlp_chunks, model=kind, families=families, has_switch=has_switch)


def _kind(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__


def recompute_own_code(model: nn.Module) -> None:
    """Turn recomputation on in a Hugging Face model."""
    switch = next(switch for switch in _SWITCHES if hasattr(model, switch))
    getattr(model, switch)({"use_reentrant": False})


def float32_names(model: nn.Module, dtype: torch.dtype) -> frozenset[str]:
    """Names of the parameters and buffers that `from_pretrained` leaves in float32 in a model of `dtype`.

    They are weights and corrections of routers, depending on transformers' version; the model's code mixes them with the other
    dtype. Empty for modules of other libraries.
    """
    of_float32: set[str] = set()
    for prefix, module in model.named_modules():
        plan = getattr(module, "_get_dtype_plan", None)
        patterns = [re.compile(pattern.replace("*", ".*")) for pattern in (plan(dtype) if plan else ())]
        if patterns:
            named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
            names = (name for name, _ in named if any(pattern.search(name) for pattern in patterns))
            of_float32.update(f"{prefix}.{name}" if prefix else name for name in names)
    return frozenset(of_float32)


def cast(model: nn.Module, params_dtype: torch.dtype | None, buffer_dtype: torch.dtype) -> None:
    """Cast parameters, unless `params_dtype` is None; those of `float32_names` to float32.

    Buffers are cast only to a lower dtype than float32: rotary tables and running means keep their precision.
    """
    in_float32 = float32_names(model, params_dtype) if params_dtype is not None else frozenset()
    with torch.no_grad():
        for name, parameter in model.named_parameters() if params_dtype is not None else ():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.float32 if name in in_float32 else params_dtype)
        for buffer in model.buffers() if buffer_dtype != torch.float32 else ():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(buffer_dtype)


def refuse_float32_parameters(
    model: nn.Module,
    params_dtype: torch.dtype,
    way: str = 'Set model.params_dtype = "float32" (params_dtype=torch.float32 in Python).',
) -> None:
    """Raise an InputError if a model that is to be sharded has parameters in float32 and others of `params_dtype`."""
    in_float32 = float32_names(model, params_dtype)
    names = [name for name, parameter in model.named_parameters() if name in in_float32 and parameter.dtype != params_dtype]
    if names:
        raise InputError(
            f"params_dtype = {str(params_dtype).removeprefix('torch.')} over several ranks: {_kind(model)} leaves "
            f"{some(names)} in float32, and a sharded model has parameters of one dtype. {way}"
        )


def compute_in(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Let a model with its original code compute in `dtype` with parameters of another dtype, by PyTorch's autocast.

    Parameters of `float32_names` do not count: autocast would round the products that the model computes with them in float32.
    The class changes, not the instance, so that a deep copy computes with its weights.
    """
    in_float32 = float32_names(model, dtype)
    of = {
        parameter.dtype
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and name not in in_float32
    }
    others = of - {dtype}
    if not others or device.type == "meta":
        return
    if dtype == torch.float32:
        raise InputError(
            f"{type(model).__name__} runs its original code, which computes in the dtype of its parameters or below: with"
            f" params_dtype {others.pop()}, dtype float32 is not possible. Use params_dtype float32."
        )
    base = type(model)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            return base.forward(self, *args, **kwargs)

    derive(model, {"forward": forward})


def params_dtype_of(model: nn.Module) -> torch.dtype | None:
    """The dtype of a model's parameters, except those of `float32_names`; None if there are several."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if others := dtypes.difference(FLOATS):
        raise InputError(
            f"{type(model).__name__} has parameters of {', '.join(sorted(map(str, others)))}: Octavo trains "
            f"{', '.join(map(str, FLOATS))}. Set params_dtype=torch.float32; a quantised model has to be dequantised first."
        )
    for dtype in dtypes - {torch.float32}:
        in_float32 = float32_names(model, dtype)
        if all(p.dtype == dtype for name, p in model.named_parameters() if p.is_floating_point() and name not in in_float32):
            return dtype
    return dtypes.pop() if len(dtypes) == 1 else None
