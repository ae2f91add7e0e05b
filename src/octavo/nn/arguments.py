"""Arguments of layers: activations, masks, windows, rotary angles, initial draws; and no-op values of unsupported arguments.

Calls written for Transformer Engine's layers run, and nothing is ignored: a no-op value is accepted, any other value is an
error that names a substitute. Names are those of Transformer Engine 2.20.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from octavo.errors import InputError, unknown
from octavo.kernels import reference


class Only(NamedTuple):
    """The no-op values of an argument; `instead` names the substitute for other values."""

    values: tuple[Any, ...]
    instead: str = "Octavo's layers have no equivalent."


FREE = Only((), "")
"""Any value is a no-op: names for debugging, sizes for a warm-up."""

_TP = "Tensor and sequence parallelism are set for a whole model: octavo.init's tensor_parallel_degree."
_GRAD = "Backward computes gradients into .grad."
_OVERLAP = "There is no overlap of tensor-parallel communication to switch on."
_SPLIT = "A parameter is one matrix here: take slices of its rows."
_SOFTMAX = "octavo.nn has the plain softmax of scaled scores; octavo.compat.te has others."
_CONTEXT = "Call set_context_parallel_group, or octavo.init with a context_parallel_degree for a whole model."
_DECODER = "Cross-attention: octavo.compat.te, with layer_type='decoder' or attention_type='cross'."
_THD = "Pass [B, T, …] and a mask that separates documents, or use octavo.compat.te, which packs sequences."

_PARALLEL = {
    "name": FREE,
    "sequence_parallel": Only((False, None), _TP),
    "tp_group": Only((None,), _TP),
    "tp_size": Only((1,), _TP),
    "fuse_wgrad_accumulation": Only((False,), _GRAD),
    "delay_wgrad_compute": Only((False,), _GRAD),
    "symmetric_ar_type": Only((None,), _OVERLAP),
}
_ROLES = {"set_parallel_mode": Only((False,), _TP)}
_UB_FLAGS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")
_UB = {flag: Only((False,), _OVERLAP) for flag in _UB_FLAGS}
_GATHERED = {"return_layernorm_output_gathered": Only((False, True))}  # identical on one tensor-parallel rank
_PARTS = {"parameters_split": Only((None,), _SPLIT)}
_WARM_UP = {"seq_length": FREE, "micro_batch_size": FREE}
_WINDOW = {"window_size": Only((None, (-1, -1), (-1, 0)), "It is an argument of the constructor.")}
_SCORES = {
    "bottom_right_diagonal": Only((None, False), "Causal masks are aligned top left."),
    "softcap": Only((None, 0.0), _SOFTMAX),
}
_SINK = {"softmax_type": Only(("vanilla",), _SOFTMAX)}
_QKV_LAYOUT = {
    "fuse_qkv_params": FREE,
    "qkv_weight_interleaved": Only((True,), "Rows are grouped by key-value head: octavo.nn.attention.merge_qkv."),
    "rotary_pos_interleaved": Only((False,), "The two halves of a head are rotated: reorder the rows of query and key."),
}
_SELF = {"attention_type": Only(("self",), _DECODER)}
_CP = {"cp_group": Only((None,), _CONTEXT), "cp_global_ranks": FREE, "cp_stream": FREE, "cp_comm_type": FREE}
_SEQUENCES = {
    **{f"cu_seqlens_{part}": Only((None,), _THD) for part in ("q", "kv", "q_padded", "kv_padded")},
    "max_seqlen_q": FREE,
    "max_seqlen_kv": FREE,
    "pad_between_seqs": Only((None, False), _THD),
    "thd_attention_policies": Only((None,), _THD),
    "thd_attention_policy_dispatch": FREE,
}
_CALL = {
    "checkpoint_core_attention": Only((False,), "Recompute whole layers: torch.utils.checkpoint, or train.recompute."),
    "core_attention_bias_type": Only(("no_bias",), _SOFTMAX),
    "core_attention_bias": Only((None,), _SOFTMAX),
    "alibi_slopes": Only((None,), _SOFTMAX),
    "inference_params": Only((None,), "These layers train: there is no cache for generation."),
    "fast_zero_fill": FREE,
}
_FP8_ATTENTION = {name: Only((False, None), "Attention runs in the compute dtype.") for name in ("fp8_output", "bf16_backward")}
_CROSS = dict.fromkeys(("enc_dec_attn_mask_type", "enc_dec_window_size", "enc_dec_bottom_right_diagonal"), FREE)
_ENCODER = {name: Only((None,), _DECODER) for name in ("encoder_output", "enc_dec_attn_mask")} | _CROSS
_LINEAR = _PARALLEL | _UB | {"parallel_mode": Only((None,), _TP), "ub_name": FREE}
_NORM = {"sequence_parallel": Only((False, None), _TP), "sm_margin": FREE}

ARGUMENTS: dict[str, dict[str, Only]] = {
    "Linear": _LINEAR | _PARTS | {"save_original_input": Only((False,), "Backward saves FP8.")},
    "GroupedLinear": _LINEAR
    | {
        "save_original_input": Only((False,), "Backward saves FP8."),
        "single_grouped_weight": Only((False,), _SPLIT),
        "single_grouped_bias": Only((False,), _SPLIT),
        "use_grouped_tensor": FREE,
    },
    "GroupedLinear.forward": {name: Only((None,), "Results are new tensors.") for name in ("out", "dgrad_out")},
    "LayerNormLinear": _LINEAR | _PARTS | _GATHERED,
    "LayerNormMLP": _PARALLEL | _ROLES | _UB | _GATHERED | _WARM_UP,
    "LayerNorm": _NORM,
    "RMSNorm": _NORM,
    "DotProductAttention": _SCORES | _SINK | _SELF | _CP
    | {name: _PARALLEL[name] for name in ("name", "sequence_parallel", "tp_group", "tp_size")}
    | {"layer_number": FREE, "return_max_logit": Only((False,), _SOFTMAX)},
    "DotProductAttention.forward": _SCORES | _WINDOW | _SEQUENCES | _CALL | _FP8_ATTENTION | {"num_splits": FREE}
    | {f"score_mod{part}": Only((None,), _SOFTMAX) for part in ("", "_bprop", "_tensors", "_bprop_tensors")}
    | {
        "qkv_format": Only((None,), "It is an argument of the constructor."),
        "qkv_layer": Only((None,), _SPLIT),
        "kv_layer": Only((None,), _SPLIT),
        "qkv_interleave_dim": FREE,
    },
    "MultiheadAttention": _PARALLEL | _ROLES | _UB | _SCORES | _SINK | _SELF | _QKV_LAYOUT | _WARM_UP,
    "MultiheadAttention.forward": _SCORES | _WINDOW | _SEQUENCES | _CALL | {"encoder_output": Only((None,), _DECODER)},
    "TransformerLayer": _PARALLEL | _ROLES | _SCORES | _SINK | _QKV_LAYOUT | _WARM_UP
    | dict.fromkeys(_UB_FLAGS, FREE)  # as in Transformer Engine, without effect unless ub_tp_comm_overlap is set
    | _CROSS
    | {
        "ub_tp_comm_overlap": Only((False,), _OVERLAP),
        "layer_type": Only(("encoder",), _DECODER),
    },
    "TransformerLayer.forward": _SCORES | _WINDOW | _SEQUENCES | _CALL | _ENCODER,
}  # fmt: skip
"""The unimplemented arguments of each layer with their no-op values."""


def check(layer: str, passed: Mapping[str, Any], method: Callable[..., Any]) -> None:
    """Raise an InputError unless all arguments are known and have no-op values.

    method: takes the arguments; its parameters complete the suggestions for an unknown name.
    """
    arguments = ARGUMENTS[layer]
    for name, value in passed.items():
        only = arguments.get(name)
        if only is None:
            taken = set(inspect.signature(method).parameters) - {"self", "others"}
            raise unknown(f"argument of {layer}", name, taken | set(arguments))
        plain = tuple(value) if isinstance(value, list) else value
        no_op = not isinstance(value, Tensor) and any(plain is one or bool(plain == one) for one in only.values)
        if not (no_op or only is FREE):
            shown = type(value).__name__ if isinstance(value, Tensor) else repr(value)
            values = " or ".join(map(repr, only.values))
            raise InputError(f"{layer}({name}={shown}) is not supported: leave it out or pass {values}. {only.instead}")


ACTIVATIONS = {
    "gelu": "gelu_tanh",
    "geglu": "geglu_tanh",
    "gelu_exact": "gelu",
    "geglu_exact": "geglu",
    "srelu": "relu2",
} | {name: name for name in reference.ACTIVATIONS if name not in ("gelu", "geglu")}
"""The `activation` of a layer → its name in `octavo.kernels`.

Transformer Engine's gelu and geglu are ½x(1 + tanh(√(2/π)(x + 0.044715x³))), and so they are here: the same name gives the
same numbers. PyTorch's `nn.GELU()`, timm's and Hugging Face's "gelu" have the error function instead: "gelu_exact".
"""


_CLAMPED = "clamped_swiglu"
_CLAMP = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}
"""The `activation_params` of "clamped_swiglu" with their defaults."""


def activation_of(name: str, params: Mapping[str, float] | None = None) -> str:
    """The kernels' name of an activation with its `activation_params`.

    Raises:
        InputError: there is no such activation, or it has no such parameter.
    """
    if name != _CLAMPED:
        if name not in ACTIVATIONS:
            raise unknown("activation", name, [*ACTIVATIONS, _CLAMPED])
        if params:
            raise InputError(
                f"activation_params={dict(params)!r} with activation={name!r}: only {_CLAMPED!r} has parameters, which are "
                f"{', '.join(_CLAMP)}. Leave them out."
            )
        return ACTIVATIONS[name]
    for key in params or {}:
        if key not in _CLAMP:
            raise unknown(f"parameter of {_CLAMPED}", key, _CLAMP)
    numbers = _CLAMP | dict(params or {})
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in numbers.values()) or not (
        0 < numbers["limit"] < math.inf and all(map(math.isfinite, numbers.values()))
    ):
        raise InputError(f"activation_params={dict(params or {})!r}: give finite numbers, and a limit above 0, as in {_CLAMP}.")
    return reference.clamped_swiglu(numbers["limit"], numbers["alpha"], numbers["glu_linear_offset"])


MASKS = ("causal", "no_mask")
_MASKED = ("padding", "padding_causal", "arbitrary", "causal_bottom_right", "padding_causal_bottom_right")


def check_mask(argument: str, name: str) -> bool:
    """True if a mask type is causal; an InputError unless it is one of `MASKS`."""
    if name in _MASKED:
        raise InputError(
            f"{argument}={name!r} is not supported: use one of {', '.join(map(repr, MASKS))}, and pass attention_mask, True "
            "where a query attends to a key: the opposite of Transformer Engine's masks, which are True where it does not."
        )
    if name not in MASKS:
        raise unknown("attention mask type", name, MASKS)
    return name == "causal"


def window_of(size: Any, *, causal: bool) -> int | None:
    """Window length of Transformer Engine's `window_size`, counting the query's position; None without a window.

    Raises:
        InputError: `size` is not a pair of numbers, or is a window without a causal mask.
    """
    if size is None or tuple(size) in ((-1, -1), (-1, 0)):
        return None
    pair = tuple(size)
    if len(pair) != 2 or not all(isinstance(part, int) for part in pair) or pair[0] < 0 or pair[1] not in (0, -1):
        raise InputError(f"window_size={size!r} is not supported: give (w, 0), for w keys before a query's position, or None.")
    if not causal:
        raise InputError(f'window_size={size!r} without a causal mask is not supported: use a mask type "causal", or None.')
    return int(pair[0]) + 1


def cos_and_sin(rotary: Any, shape: Sequence[int], head_dim: int) -> Any:
    """(cos, sin) of the first T positions, from Transformer Engine's angles [≥ T, 1, 1, Dr]; a pair is returned unchanged.

    shape: [B, T]. Dr: rotated columns, the first of each head: `head_dim`, or a smaller even number.

    Raises:
        InputError: the angles do not fit samples, tokens or heads, or differ between queries and keys.
    """
    pair = isinstance(rotary, tuple) and len(rotary) in (2, 3) and all(isinstance(table, Tensor) for table in rotary[:2])
    if not (rotary is None or isinstance(rotary, Tensor) or pair):
        raise InputError(
            f"rotary_pos_emb is {type(rotary).__name__}: give (cos, sin), each [batch or 1, sequence, columns], or Transformer "
            "Engine's tensor of angles [sequence, 1, 1, columns]."
        )
    if isinstance(rotary, tuple) and rotary[0] is rotary[1]:
        rotary = rotary[0]  # the angles of queries and of keys
    if rotary is None:
        return None
    columns = (rotary if isinstance(rotary, Tensor) else rotary[0]).shape[-1]
    fits = columns == head_dim or (columns < head_dim and columns % 2 == 0)
    how = f"columns = {head_dim}, the head dimension, or a smaller even number to rotate only the first columns"
    if not isinstance(rotary, Tensor):
        if rotary[0].dim() != 3:
            raise InputError(
                "rotary_pos_emb with different angles for queries and keys is not supported: pass one tensor of angles."
            )
        if not fits:
            raise InputError(f"rotary_pos_emb has (cos, sin) of {columns} columns: give {how}.")
        batch, tokens = shape
        for table in rotary[:2]:  # the kernel would read a smaller one out of bounds
            if tuple(table.shape) not in ((1, tokens, columns), (batch, tokens, columns)):
                wanted = f"[{batch} or 1, {tokens}, {columns}]"
                raise InputError(f"rotary_pos_emb has a table of shape {list(table.shape)}: give (cos, sin), each {wanted}.")
        return rotary
    tokens = shape[1]
    if rotary.dim() != 4 or rotary.shape[0] < tokens or rotary.shape[1:3] != (1, 1) or not fits:
        raise InputError(
            f"rotary_pos_emb has the shape {list(rotary.shape)}: angles are [{tokens} or more, 1, 1, columns] with {how}. Or "
            "pass (cos, sin), each [batch or 1, sequence, columns]."
        )
    angles = rotary[:tokens, 0, 0].float()[None]
    return angles.cos(), angles.sin()


FORMATS = ("bshd", "sbhd")
"""Orders of the dimensions of activations: batch or sequence first."""


def check_format(argument: str, name: str) -> bool:
    """True if the sequence comes first; an InputError unless the order is one of `FORMATS`."""
    if name not in FORMATS:
        raise InputError(f"{argument}={name!r} is not supported: use one of {', '.join(map(repr, FORMATS))}. {_THD}")
    return name == "sbhd"


def check_dropout(argument: str, rate: float) -> None:
    """Raise an InputError unless `rate` is a probability below 1."""
    if not 0 <= rate < 1:
        raise InputError(f"{argument}={rate!r}: a dropout rate is at least 0 and below 1; 0 drops nothing.")


Init = Callable[[Tensor], Any]
"""Fills a weight in place, as `torch.nn.init.normal_` does."""
Tracker = Callable[[], Any]
"""Returns an object whose `fork(name)` is a context with separate random numbers: `octavo.state.get_rng_state_tracker`."""


class Creation(TypedDict, total=False):
    """Arguments that create the parameters of a layer with two products; absent keys have PyTorch's defaults."""

    init_method: Init | None
    output_layer_init_method: Init | None
    get_rng_state_tracker: Tracker | None
    params_dtype: torch.dtype | None
    device: torch.device | str | None


@dataclass(frozen=True)
class Draws:
    """Callable that returns the context of a layer's random numbers: its tracker's, if it has one."""

    tracker: Tracker | None = None
    name: str | None = None

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        """A separate context for each use."""
        if self.tracker is None:
            return contextlib.nullcontext()
        return self.tracker().fork(*(() if self.name is None else (self.name,)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Draws:
        return self  # a tracker belongs to the process, not to a layer


def results(y: Tensor, bias: Tensor | None, *inputs: Tensor, return_bias: bool) -> Any:
    """The results of a linear layer: y [..., N], or in Transformer Engine's order (y, bias [N] in y's dtype, norm's output).

    inputs: high-precision inputs of the layer's products, [..., K], if returned; a norm's output comes first.
    """
    more = [None if bias is None else bias.to(y.dtype)] if return_bias else []
    return (y, *more, *inputs) if more or inputs else y
