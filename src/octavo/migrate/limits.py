"""Values of arguments that the compatibility layer refuses, as far as a script has them as constants.

Of the layers the tables are those of `octavo.nn.te_arguments`, read from its source. Omitted: values that are tensors, modules
or functions; sizes that do not fit each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from octavo.errors import InputError
from octavo.launch.inputs import TrainingInput
from octavo.migrate.known import REST, UNKNOWN, is_known
from octavo.migrate.sources import fields_of, tables

_TE = "transformer_engine.pytorch."
_TP = ("sequence_parallel", "tp_group", "tp_size", "parallel_mode", "set_parallel_mode")
"""Arguments that one tensor-parallel rank makes no-ops."""
_OF_CALLS = (
    "bottom_right_diagonal", "window_size", "qkv_format", "qkv_layer", "kv_layer", "encoder_output", "enc_dec_attn_mask",
)  # fmt: skip
_LAYOUT = (
    "bottom_right_diagonal",
    "softcap",
    "attention_type",
    "softmax_type",
    "qkv_weight_interleaved",
    "rotary_pos_interleaved",
)
_TAKEN = {
    "Linear": ("parameters_split",),
    "LayerNormLinear": ("parameters_split",),
    "DotProductAttention": (*_LAYOUT, "cp_group", "return_max_logit"),
    "MultiheadAttention": _LAYOUT,
    "TransformerLayer": (*_LAYOUT, "layer_type"),
    "DotProductAttention.forward": _OF_CALLS,
    "MultiheadAttention.forward": _OF_CALLS,
    "TransformerLayer.forward": _OF_CALLS,
}
"""Arguments of `octavo.nn.te_arguments` that the compatibility layer takes itself."""
_ATTENTIONS = ("DotProductAttention", "MultiheadAttention", "TransformerLayer")
_RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")


class Limit(NamedTuple):
    """The values that an argument may have.

    Attributes:
        allows: True for such a value.
        text: them in words, with the way for others.
        open: the value of a variable may be another one: it is worth a note.
    """

    allows: Callable[[Any], bool]
    text: str
    open: bool = True


def one_of(*values: Any, way: str = "") -> Limit:
    """The limit to a few values."""
    return Limit(lambda value: any(value is one or value == one for one in values), _listed(values, way))


def _listed(values: tuple[Any, ...], way: str) -> str:
    return f"it takes {' or '.join(map(repr, values))}. {way}".strip()


def _window(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(type(n) is int and n >= -1 for n in value))


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value < high


def _whole(value: Any, low: float, high: float = float("inf")) -> bool:
    """True for a whole number between two, as text too."""
    return str(value).lstrip("-").isdigit() and low <= int(value) <= high


_DROPOUT = Limit(_number(0, 1), "a rate is at least 0 and below 1.", open=False)
_WINDOWS = Limit(_window, "a window is (left, right), -1 for all, or None.", open=False)
_NO_FP8 = one_of(False, None, way="Results and gradients are in the compute dtype.")
_OFF = one_of(False, way="Attention runs in the compute dtype.")
_DEFAULT = Limit(lambda value: False, "it takes the recipe's default alone.")
_OF_RECIPES = {
    "fp8_dpa": _OFF, "fp8_mha": _OFF, "backward_override": one_of(None),
    "x_block_scaling_dim": one_of(1), "w_block_scaling_dim": one_of(2), "grad_block_scaling_dim": one_of(1),
    "use_f32_scales": one_of(False), "scaling_factor_compute_algo": one_of(None),
    "amax_compute_algo": one_of("max", "most_recent"),
    "amax_history_len": Limit(lambda value: _whole(value, 1), "a history has at least 1 step.", open=False),
    "margin": Limit(lambda value: _whole(value, -64, 64), "it takes numbers from -64 to 64.", open=False),
    "fp8_gemm_fprop": _DEFAULT, "fp8_gemm_dgrad": _DEFAULT, "fp8_gemm_wgrad": _DEFAULT,
    "override_linear_precision": Limit(lambda value: not any(value or ()), "it takes False for each product."),
    "fp8_format": one_of("Format.HYBRID", "Format.E4M3"),
}  # fmt: skip
_BLOCKS = {"fp8_format": one_of("Format.E4M3")}
_OBJECT = Limit(lambda value: value is None, "it takes an object, such as DelayedScaling().", open=False)
_MOE = {
    "moe_load_balancing": one_of("aux_loss", "sinkhorn", "balanced", "none"),
    "global_token_shuffle": Limit(lambda value: True, "transform refuses True."),
    **dict.fromkeys(
        ("moe_aux_loss_coeff", "moe_z_loss_coeff"), Limit(_number(0, float("inf")), "it takes numbers from 0.", open=False)
    ),
}
_INIT = {"preserve_high_precision_init_val": one_of(False, way="Parameters are in high precision: read them.")}
_CALLS: dict[str, dict[str, Limit]] = {
    **{f"transformer_engine.common.recipe.{name}": _OF_RECIPES for name in _RECIPES},
    "transformer_engine.common.recipe.Float8BlockScaling": _OF_RECIPES | _BLOCKS,
    f"{_TE}fp8_autocast": {"fp8_recipe": _OBJECT},
    f"{_TE}autocast": {"recipe": _OBJECT},
    f"{_TE}fp8_model_init": _INIT,
    f"{_TE}quantized_model_init": _INIT,
    "torch.sagemaker.transform": {"cp_comm_type": one_of("p2p", "all_gather")},
    "torch.sagemaker.moe.moe_config.MoEConfig": _MOE,
}
"""Function → argument → its values."""


def refused(dotted: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(argument, its value, the reason) for the known values of a call that are refused.

    dotted: the name in the library's first module; `….forward` for a call of a layer.
    """
    for name, limit in _limits(dotted, given).items():
        value = given.get(name, UNKNOWN)
        if name in given and is_known(value) and not limit.allows(value):
            yield name, value, limit.text
    if dotted == "torch.sagemaker.init":
        yield from _refused_keys(given.get("config"))
    if dotted == "sagemaker.inputs.TrainingInput":
        yield from _refused_channel(given)
    yield from _unfit(dotted.removeprefix(_TE), given)


def _refused_channel(given: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Arguments of a channel that `octavo.launch` refuses."""
    if not {"s3_data", REST} & set(given):
        yield "s3_data", None, "give an address."
    for name, value in given.items():
        if is_known(value) and name not in ("s3_data", REST):
            try:
                TrainingInput("s3://bucket", **{name: value})
            except InputError as error:
                yield name, value, str(error)


def _unfit(layer: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Values that do not fit those of other arguments."""
    heads, groups = given.get("num_attention_heads"), given.get("num_gqa_groups")
    if layer in _ATTENTIONS and isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        yield "num_gqa_groups", groups, f"it divides num_attention_heads = {heads}."
    params, activation = given.get("activation_params"), given.get("activation", "gelu")
    plain = layer in ("LayerNormMLP", "TransformerLayer") and is_known(activation) and activation != "clamped_swiglu"
    if plain and params and is_known(params):
        yield "activation_params", params, f"{activation!r} has none: clamped_swiglu has."
    if layer in ("LayerNorm", "RMSNorm") and not {"normalized_shape", "hidden_size"} & set(given) and REST not in given:
        yield "normalized_shape", None, "give one size, that of the last dimension."


def unsure(dotted: str, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(argument, the limit) for the arguments of a call that only some values are taken of, and whose value is not known."""
    for name, limit in _limits(dotted, given).items():
        if name in given and limit.open and not is_known(given[name]):
            yield name, limit.text
    if dotted == "torch.sagemaker.init":
        config = given.get("config")
        open_ended = isinstance(config, dict) and (REST in config or not is_known(config.get("tensor_parallel_degree", 1)))
        if open_ended or config is UNKNOWN:
            yield "config", "tensor_parallel_degree is at most 1, and keys are SMP's."


def _refused_keys(config: Any) -> Iterator[tuple[str, Any, str]]:
    """Keys of SMP's configuration that `init` refuses."""
    if not isinstance(config, dict):
        return
    known = fields_of("octavo.compat.smp.init", "SmpConfig") or ()
    for key, value in config.items():
        if key == REST:
            continue
        if known and key not in known:
            yield "config", key, f"no key of it: {', '.join(known)}."
        elif key == "tensor_parallel_degree" and is_known(value) and value != 1:
            yield (
                f"config.{key}",
                value,
                "there is no tensor parallelism: set it to 1; hybrid_shard_degree shards the matrices.",
            )


def _limits(dotted: str, given: Mapping[str, Any]) -> dict[str, Limit]:
    if not dotted.startswith(_TE):
        return _CALLS.get(dotted, {})
    if dotted in _CALLS:
        off = given.get("enabled", True) is False
        return {} if off else _CALLS[dotted]
    layer = dotted.removeprefix(_TE)
    limits = dict(_of_layers().get(layer, {}))
    if not given.get("fuse_qkv_params"):
        limits.pop("qkv_weight_interleaved", None)  # of the one joint parameter
    if layer == "MultiheadAttention" and not given.get("input_layernorm"):
        limits.pop("normalization", None)
    if not layer.endswith(".forward"):
        size, group = given.get("tp_size", 1), given.get("tp_group")
        if group is None and size in (None, 1):
            return {name: limit for name, limit in limits.items() if name not in _TP}
        if not is_known(group) or not is_known(size):  # one note is enough
            return {name: limit for name, limit in limits.items() if name not in _TP or name in ("tp_group", "tp_size")}
    return limits


@cache
def _of_layers() -> dict[str, dict[str, Limit]]:
    """Layer, or layer.forward → argument → its values; those of any value are not in it."""
    names = tables("octavo.kernels.reference", ("ACTIVATIONS",))
    found = tables("octavo.nn.te_arguments", ("ARGUMENTS", "ACTIVATIONS", "FORMATS"), reference=SimpleNamespace(**names))
    masks = one_of(*tables("octavo.compat.te.masks", ("TYPES",)).get("TYPES", ()))
    formats = one_of(*tables("octavo.compat.te.attention", ("FORMATS",)).get("FORMATS", ()))
    calls = tables("octavo.compat.te.call", ("TAKEN", "BIASES"))
    more = {
        "normalization": one_of(*tables("octavo.nn.norm", ("NORMS",)).get("NORMS", ())),
        "activation": one_of(*found.get("ACTIVATIONS", ()), "clamped_swiglu"),
        "qkv_format": formats, "attn_input_format": formats, "attn_mask_type": masks, "self_attn_mask_type": masks,
        "window_size": _WINDOWS, "attention_dropout": _DROPOUT, "hidden_dropout": _DROPOUT, "drop_path_rate": _DROPOUT,
        "qk_norm_type": one_of(None, "L2Normalization", *tables("octavo.nn.norm", ("NORMS",)).get("NORMS", ())),
        "attention_type": one_of("self", "cross"), "layer_type": one_of("encoder", "decoder"),
        "softmax_type": one_of(*tables("octavo.compat.te.core", ("SOFTMAX",)).get("SOFTMAX", ())),
    }  # fmt: skip
    limits: dict[str, dict[str, Limit]] = {"Linear.forward": {}, "LayerNormLinear.forward": {}}
    for layer, arguments in found.get("ARGUMENTS", {}).items():
        limits[layer] = {
            name: one_of(*only.values, way=only.instead)
            for name, only in arguments.items()
            if only.values and name not in _TAKEN.get(layer, ()) and not (layer.endswith(".forward") and name in calls["TAKEN"])
        }
        limits[layer] |= {name: more[name] for name in _usual(layer) if name in more}
    for layer in ("Linear.forward", "LayerNormLinear.forward"):
        limits[layer] |= {"fp8_output": _NO_FP8, "fp8_grad": _NO_FP8}
    for layer in ("DotProductAttention.forward", "MultiheadAttention.forward", "TransformerLayer.forward"):
        name = "self_attn_mask_type" if layer.startswith("TransformerLayer") else "attn_mask_type"
        kinds = tables("octavo.compat.te.masks", ("TYPES",)).get("TYPES", ())
        limits[layer] |= {name: one_of(None, *kinds), "window_size": _WINDOWS}
        limits[layer] |= {"core_attention_bias_type": one_of(*calls["BIASES"])}
    return limits


def _usual(layer: str) -> tuple[str, ...]:
    """Arguments of a layer's constructor with one of the usual limits."""
    return {
        "LayerNormLinear": ("normalization",),
        "LayerNormMLP": ("normalization", "activation"),
        "DotProductAttention": (
            "qkv_format", "attn_mask_type", "window_size", "attention_dropout", "attention_type", "softmax_type",
        ),
        "MultiheadAttention": (
            "qkv_format", "attn_mask_type", "window_size", "attention_dropout", "normalization", "qk_norm_type",
            "attention_type", "softmax_type",
        ),
        "TransformerLayer": (
            "attn_input_format", "self_attn_mask_type", "window_size", "attention_dropout", "hidden_dropout", "drop_path_rate",
            "qk_norm_type", "normalization", "activation", "layer_type", "softmax_type",
        ),
    }.get(layer, ())  # fmt: skip
