"""Argument checks for Transformer Engine's names: unsupported values, and arguments that contradict each other.

The compatibility layer and `octavo migrate` share them, so that both refuse the same calls. Loads no torch: a tensor is present
or None here; its shape and values are checked by the call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from octavo.errors import InputError, check_flags, unknown

FORMATS = ("sbhd", "bshd", "thd")
BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
LONGEST = ("max_seqlen_q", "max_seqlen_kv")
TAKEN = (
    *LENGTHS, *LONGEST, "pad_between_seqs", "core_attention_bias_type", "core_attention_bias",
    "alibi_slopes", "softcap", "checkpoint_core_attention",
)  # fmt: skip
"""Arguments of an attention call that `octavo.compat.te.core.Call` handles."""
ATTENTION_TYPES = ("self", "cross")
LAYER_TYPES = ("encoder", "decoder")
OF_BLACKWELL = ("MXFP8BlockScaling", "NVFP4BlockScaling")
NO_MXFP8 = "Octavo has no MXFP8: use Float8BlockScaling."
_MARGIN = 64
_USUAL = {
    "x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1, "use_f32_scales": False,
    "backward_override": None,
}  # fmt: skip
"""Field of a recipe → its only supported value."""


def cap_of(value: Any) -> float:
    """softcap as a number, 0 for none; an InputError unless it is finite and not negative."""
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InputError(f"softcap={value!r}: give a finite number above 0, or 0 for none.")
    return float(value)


def check_kind(argument: str, value: Any, known: tuple[str, ...]) -> str:
    """`value` if it is one of the choices; an InputError otherwise."""
    if value not in known:
        raise unknown(argument, str(value), known)
    return str(value)


def split_sizes(parameters_split: Any, rows: int) -> dict[str, int]:
    """Name → rows of each parameter; names alone share the rows evenly.

    Raises:
        InputError: no names, names that are not strings or not distinct, or sizes that do not add up to `rows`.
    """
    if isinstance(parameters_split, Mapping):
        requested = list(parameters_split.items())
    else:
        names = list(parameters_split)
        requested = [(name, rows // max(1, len(names))) for name in names]
    sizes = {name.rstrip("_"): size for name, size in requested if isinstance(name, str) and isinstance(size, int) and size > 0}
    if not requested or len(sizes) < len(requested) or sum(sizes.values()) != rows:
        raise InputError(
            f"parameters_split={parameters_split!r}: give distinct names, whose number divides the {rows} rows, or a "
            f"dictionary of names and whole numbers of rows that add up to {rows}."
        )
    return sizes


def check_layer(layer: str, values: Mapping[str, Any]) -> None:
    """Check a layer's constructor for arguments that contradict each other; absent ones have their defaults.

    Raises:
        InputError: num_gqa_groups is not a whole number from 1, parameters_split does not fit out_features, or a decoder layer
            has parallel_attention_mlp.
    """
    groups = values.get("num_gqa_groups")
    if groups is not None and (type(groups) is not int or groups < 1):
        raise InputError(f"{layer}(num_gqa_groups={groups!r}): give a whole number from 1, or None for as many as heads.")
    split, rows = values.get("parameters_split"), values.get("out_features")
    if split is not None and rows is not None:
        split_sizes(split, rows)
    if layer == "TransformerLayer" and values.get("layer_type") == "decoder" and values.get("parallel_attention_mlp"):
        raise InputError("TransformerLayer(layer_type='decoder', parallel_attention_mlp=True) is not defined. Leave one out.")


def check_terms(arguments: Mapping[str, Any]) -> str:
    """The bias type of an attention call, from its arguments.

    Raises:
        InputError: an unknown type, a bias without its type, or a type without its bias.
    """
    bias = arguments.get("core_attention_bias_type", "no_bias")
    check_kind("core_attention_bias_type", bias, BIASES)
    there = arguments.get("core_attention_bias") is not None
    if there != (bias in ("pre_scale_bias", "post_scale_bias")):
        raise InputError(
            f"core_attention_bias_type={bias!r} with{'' if there else 'out'} core_attention_bias: 'pre_scale_bias' and "
            "'post_scale_bias' take one, the others none."
        )
    if arguments.get("alibi_slopes") is not None and bias != "alibi":
        raise InputError(f"alibi_slopes with core_attention_bias_type={bias!r}: pass 'alibi'.")
    return str(bias)


def check_cap_alone(cap: float, bias: str) -> None:
    """Raise an InputError for a softcap together with a bias."""
    if cap and bias != "no_bias":
        raise InputError(f"softcap={cap} with core_attention_bias_type={bias!r} is not supported: leave one out.")


def check_lengths(arguments: Mapping[str, Any], *, self_attention: bool, packed: bool = False) -> None:
    """Check that the cumulative lengths of a call are complete.

    self_attention: queries and keys have the same lengths. packed: the tensors are packed sequences, which need lengths.

    Raises:
        InputError: some are missing.
    """
    q, kv, q_padded, kv_padded = (arguments.get(name) is not None for name in LENGTHS)
    if not (packed or q or kv or q_padded or kv_padded):
        return
    if q and not kv and self_attention:
        kv, kv_padded = True, kv_padded or q_padded
    if not (q and kv):
        there, missing = LENGTHS[:2] if q else LENGTHS[1::-1]
        told = f"{there} without {missing}" if q or kv else "no cu_seqlens_q and cu_seqlens_kv"
        raise InputError(f"{told}: queries and keys both have sequences, so give both.")
    if q_padded != kv_padded:
        raise InputError("cu_seqlens_q_padded and cu_seqlens_kv_padded go together: give both, or none.")


def check_rotation(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of `apply_rotary_pos_emb` other than tensors.

    Raises:
        InputError: another format, a flag that is not a bool, a rank outside `cp_size`, "thd" without cu_seqlens, another
            format with them, or start positions of sequences that ranks share.
    """
    order, size, rank = arguments.get("tensor_format", "sbhd"), arguments.get("cp_size", 1), arguments.get("cp_rank", 0)
    check_kind("tensor_format", order, FORMATS)
    check_flags("apply_rotary_pos_emb", interleaved=arguments.get("interleaved", False))
    for name, value, least in (("cp_size", size, 1), ("cp_rank", rank, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name}={value!r}: give a whole number of at least {least}.")
    if rank >= size:
        raise InputError(f"cp_rank={rank} with cp_size={size}: ranks are 0 to {size - 1}.")
    if size > 1 and arguments.get("start_positions") is not None:
        raise InputError(f"start_positions with cp_size={size}: ranks share sequences that begin at position 0. Leave one out.")
    if order == "thd" and arguments.get("cu_seqlens") is None:
        raise InputError("tensor_format 'thd' needs cu_seqlens: where sequences begin and end.")
    if order != "thd" and arguments.get("cu_seqlens") is not None:
        raise InputError(f"cu_seqlens with tensor_format {order!r}: they belong to packed sequences, 'thd'. Leave one out.")


def check_recipe(recipe: Any, owner: str) -> None:
    """Check the fields of a recipe object given to an autocast.

    owner: the call in the script, for messages.

    Raises:
        InputError: a recipe for Blackwell, or a field's value that Octavo does not support.
    """
    name = type(recipe).__name__
    if name in OF_BLACKWELL:
        raise InputError(
            f"{name} needs Blackwell, which Octavo does not support. Use Float8BlockScaling or Float8CurrentScaling."
        )
    for key in ("fp8_dpa", "fp8_mha"):
        if getattr(recipe, key, False):
            raise InputError(f"{owner}({key}=True): attention runs in the compute dtype. Leave it out.")
    length, margin = getattr(recipe, "amax_history_len", 1), getattr(recipe, "margin", 0)
    if type(length) is not int or length < 1:
        raise InputError(f"{owner}(amax_history_len={length!r}): a history has at least 1 step; use 1 or more.")
    if type(margin) is not int or abs(margin) > _MARGIN:
        raise InputError(
            f"{owner}(margin={margin!r}): scales are divided by 2^margin; use a whole number from -{_MARGIN} to {_MARGIN}."
        )
    for key in ("amax_compute_algo", "scaling_factor_compute_algo"):
        if callable(getattr(recipe, key, None)):
            raise InputError(f"{owner}({key}=…): functions are not supported. Use amax_compute_algo 'max' or 'most_recent'.")
    for field in dataclasses.fields(recipe) if dataclasses.is_dataclass(recipe) else ():
        usual, value = _USUAL.get(field.name, field.default), getattr(recipe, field.name)
        if (field.name in _USUAL or field.name.startswith("fp8_gemm_")) and value != usual:
            raise InputError(f"{owner}({field.name}={value!r}): Octavo's recipe has no such setting; leave it at {usual!r}.")
    allowed = ("Format.E4M3",) if name == "Float8BlockScaling" else ("Format.HYBRID", "Format.E4M3")
    if str(getattr(recipe, "fp8_format", allowed[0])) not in allowed:
        raise InputError(f"{owner}(fp8_format={recipe.fp8_format!s}): it takes {' or '.join(allowed)}.")
