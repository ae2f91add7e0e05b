"""The whole order of a transformation on one screen: what is replaced, skipped, placed, filled, recomputed and compiled.

1. replace      a known family becomes Octavo's decoder; in any other module eligible `nn.Linear`s are replaced in place
2. skip         layers that a pattern names stay out of FP8
3. place        parameters go to the device, in their dtype
4. fill         from the model itself, from a folder of weights, or from the counter-based initialisation
5. recompute    blocks keep their input only; offload: what they keep waits in host memory
6. compile      block by block
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from octavo.errors import InputError, unknown
from octavo.fp8.recipe import coerce
from octavo.models.decoder import Decoder
from octavo.models.description import describe
from octavo.models.families import FAMILIES
from octavo.models.replace import replace_linears, skip_modules
from octavo.models.weights import WeightFiles, family_of, load_decoder_weights, load_weights
from octavo.parallel.meta import counter_normal_
from octavo.parallel.offload import offloaded
from octavo.parallel.recompute import recomputed

_OLD_SWITCH = "gradient_checkpointing_enable"

__all__ = ["build_model", "describe", "transform"]


def transform(
    model: nn.Module,
    recipe: Any = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    config: Any = None,
    skip: Sequence[str] = (),
    load_from: str | Path | None = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "all_gather",
    params_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Make a model's linear layers run in FP8 under `octavo.fp8_autocast`.

    A Hugging Face model of a known family becomes Octavo's decoder with the same weights. Any other module keeps its code and
    has its eligible `nn.Linear`s replaced in place. Both are called as before.

    Args:
        model: with weights, or on the meta device together with `load_from`.
        recipe: checked here; it takes effect in `fp8_autocast`.
        dtype: of activations and of products outside FP8.
        device: where the result lives; where the model is when absent.
        config: the Hugging Face config, when `model.config` is not it.
        skip: patterns of module names (`fnmatch`, by Octavo's or Hugging Face's names) that stay out of FP8.
        load_from: a Hugging Face model folder whose weights are taken.
        load_state_dict_from_rank0: one rank alone has nothing to receive.
        cp_comm_type: how context parallelism communicates; one rank alone has nobody to talk to.
        params_dtype: of parameters; `dtype` when absent. float32 under a bf16 `dtype` is master weights.

    Raises:
        InputError: a pattern that matches nothing, an unknown recipe or strategy, a folder without the weights.
    """
    if recipe is not None:
        coerce(recipe)
    if cp_comm_type not in ("all_gather", "p2p", "a2a"):
        raise unknown("cp_comm_type", cp_comm_type, ("all_gather", "p2p", "a2a"))
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if on_meta and load_from is None:
        raise InputError("the model is on the meta device and has no weights: give load_from=FOLDER, or build it on a device.")
    config = config if config is not None else getattr(model, "config", None)
    device = torch.device(device) if device is not None else _device_of(model)
    params_dtype = params_dtype or dtype
    known = hasattr(config, "model_type") and type(model).__name__.endswith("ForCausalLM")
    family = family_of(config)[0] if known else None
    files = None if load_from is None else WeightFiles(load_from)
    if family is not None:
        decoder = Decoder(config, family, dtype=dtype, params_dtype=params_dtype, device=device)
        skip_modules(decoder, skip)
        load_decoder_weights(decoder, model.state_dict().__getitem__ if files is None else files.read)
        return decoder.train(model.training)
    model = replace_linears(model)
    skip_modules(model, skip)
    model = _materialise(model, device).to(device)
    with torch.no_grad():
        for parameter in model.parameters():  # not the buffers: a rotary table or a running mean keeps its precision
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(params_dtype)
    if files is not None:
        load_weights(model, files)
    return _compute_in(model, dtype, device)


def build_model(
    config: Any,
    *,
    dtype: torch.dtype,
    params_dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    skip: Sequence[str] = (),
    load_from: str | Path | None = None,
    recompute: bool = False,
    offload: bool = False,
    compile: bool = False,
) -> nn.Module:
    """A causal language model for training from its Hugging Face config, with random weights by `seed` or those of `load_from`.

    recompute: keep only each block's input for backward. offload: keep what is saved for backward in host memory. compile:
    `torch.compile` each block. With `device="meta"` nothing is filled, for counting parameters. The other arguments are as in
    `transform`.
    """
    device = torch.device(device)
    on_meta = device.type == "meta"
    files = None if load_from is None or on_meta else WeightFiles(load_from)
    family, _ = family_of(config)
    if family is None:
        # A cache serves generation. In training it costs memory, and with one Hugging Face does not see where documents begin.
        config = copy.deepcopy(config)
        config.use_cache = False
        with torch.random.fork_rng(devices=[]), torch.device("meta" if on_meta else "cpu"):
            torch.manual_seed(seed)
            model = replace_linears(AutoModelForCausalLM.from_config(config, dtype=params_dtype, trust_remote_code=False))
        skip_modules(model, skip)
        if files is not None:
            load_weights(model, files)
        if offload:
            raise InputError(
                f"train.offload = true: {config.model_type} keeps its own code, and only the blocks of Octavo's decoder are"
                f" offloaded ({', '.join(FAMILIES)}). Use train.recompute = true instead."
            )
        if recompute:
            # transformers 5.2x gave the same switch a new name and warns of the old one
            name = "activation_checkpointing_enable" if hasattr(model, "activation_checkpointing_enable") else _OLD_SWITCH
            getattr(model, name)({"use_reentrant": False})
        return _compute_in(model if on_meta else model.to(device), dtype, device).train()
    decoder = Decoder(config, family, dtype=dtype, params_dtype=params_dtype, device=device)
    skip_modules(decoder, skip)
    if files is not None:
        load_decoder_weights(decoder, files.read)
    elif not on_meta:
        _initialise(decoder, seed)
    if recompute:
        decoder.run_block = recomputed
    if offload:
        decoder.run_block = offloaded(decoder.run_block)
    if compile:
        for part in (*decoder.layers, decoder.norm):
            part.compile()
    return decoder.train()


@torch.no_grad()
def _initialise(model: Decoder, seed: int) -> None:
    """Matrices from a normal distribution by counter, norms 1, biases 0, as Hugging Face's Llama has them."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            counter_normal_(parameter, seed=seed, name=name, std=model.config.initializer_range)
        else:
            parameter.fill_(0 if name.endswith("bias") else 1)


def _materialise(model: nn.Module, device: torch.device) -> nn.Module:
    """Storage for a model on the meta device, if nothing but its saved weights needs a value."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model
    saved = model.state_dict().keys()
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in saved]
    if lost:
        raise InputError(
            f"buffers {', '.join(lost[:3])} are computed when {type(model).__name__} is built and have no value on the meta"
            " device: build the model on a real device."
        )
    places = [(module, name, p) for module in model.modules() for name, p in module._parameters.items() if p is not None]
    model.to_empty(device=device)
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for module, name, before in places:  # parameters that were one must be one again
        setattr(module, name, filled.setdefault(before, getattr(module, name)))
    return model


def _compute_in(model: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Let a model that keeps its own code compute in `dtype` with parameters of another, by PyTorch's autocast.

    The class changes and not the instance, so that a deep copy computes with its own weights.
    """
    params_dtype = next((p.dtype for p in model.parameters()), dtype)
    if params_dtype == dtype or device.type == "meta":
        return model
    if dtype == torch.float32:
        raise InputError(
            f"{type(model).__name__} keeps its own code, which computes in the dtype of its parameters or below: with"
            f" params_dtype {params_dtype}, dtype float32 is not possible. Use params_dtype float32."
        )
    base = type(model)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype):
            return base.forward(self, *args, **kwargs)

    model.__class__ = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})
    return model


def _device_of(model: nn.Module) -> torch.device:
    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    return device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
