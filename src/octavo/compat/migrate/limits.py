"""Checks a script's constant arguments against the limits of the compatibility layer.

The tables of layers are those of `octavo.nn.arguments`, read from its source, and checks are those that calls run. Omitted:
values that are tensors, modules or functions; sizes that do not fit each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from octavo.compat.migrate.known import OPTIONAL, REST, UNKNOWN, RecipeValue, is_known
from octavo.compat.migrate.sources import Signature, tables, takes
from octavo.compat.migrate.trainers import UNSEEN, is_trainer, refused_by_trainer
from octavo.compat.sagemaker.inputs import TrainingInput
from octavo.compat.smp.configs import MoEConfig, SmpConfig
from octavo.compat.te import limits as te
from octavo.compat.te import recipes
from octavo.config.degrees import DEGREES, check_composed, fit_degrees, least_world
from octavo.errors import InputError

_TE = "transformer_engine.pytorch."
_TP = ("sequence_parallel", "tp_group", "tp_size", "parallel_mode", "set_parallel_mode")
"""Arguments without effect for a single tensor-parallel rank."""
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
"""Arguments in `octavo.nn.arguments` that the compatibility layer handles itself."""
_ATTENTIONS = ("DotProductAttention", "MultiheadAttention", "TransformerLayer")
_RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")


class Limit(NamedTuple):
    """The allowed values of an argument.

    Attributes:
        allows: True for an allowed value.
        text: the allowed values in words, and what to do instead of others.
        open: a value known only at run time gets a note.
    """

    allows: Callable[[Any], bool]
    text: str
    open: bool = True


def one_of(*values: Any, way: str = "") -> Limit:
    """The limit to a few values. way: what to do instead of others."""
    return Limit(lambda value: any(value is one or value == one for one in values), _listed(values, way))


def _listed(values: tuple[Any, ...], way: str) -> str:
    return f"it takes {' or '.join(map(repr, values))}. {way}".strip()


def _window(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(type(n) is int and n >= -1 for n in value))


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and low <= value < high


def _whole(value: Any, low: float, high: float = float("inf")) -> bool:
    """True for a whole number from `low` to `high`, as text too."""
    return str(value).lstrip("-").isdigit() and low <= int(value) <= high


_DROPOUT = Limit(_number(0, 1), "a rate is at least 0 and below 1.", open=False)
_CAP = Limit(lambda value: _fault(lambda: te.cap_of(value)) is None, "a cap is a finite number from 0.", open=False)
_WINDOWS = Limit(_window, "a window is (left, right), -1 for all, or None.", open=False)
_FLAG = Limit(lambda value: isinstance(value, bool), "it takes True or False.", open=False)
_FLAG_OR_NONE = Limit(lambda value: value is None or isinstance(value, bool), "it takes True, False or None.", open=False)
_FLAG_OR_FALSE = Limit(lambda value: not value or value is True, "it takes True, False or None.", open=False)
_SHARED = ("bottom_right_diagonal", "fuse_qkv_params", "qkv_weight_interleaved", "rotary_pos_interleaved")
_FLAGS = {
    "DotProductAttention": ("bottom_right_diagonal", "return_max_logit"),
    "MultiheadAttention": _SHARED,
    "TransformerLayer": (
        *_SHARED, "enc_dec_attn_mask_type", "enc_dec_window_size", "enc_dec_bottom_right_diagonal",
    ),
}  # fmt: skip
_NO_FP8 = one_of(False, None, way="Results and gradients are in the compute dtype.")
_OFF = one_of(False, way="Attention runs in the compute dtype.")
_OBJECT = "it takes an object, such as DelayedScaling()."
_FIELDS = {
    "fp8_format": "HYBRID and E4M3 are taken.",
    "amax_compute_algo": "'max' and 'most_recent' are taken.",
    "scaling_factor_compute_algo": "functions are refused.",
    "override_linear_precision": "it takes False for each product.",
    "backward_override": "it takes None.",
    "use_f32_scales": "it takes False.",
    **dict.fromkeys(("fp8_dpa", "fp8_mha"), "True is refused."),
    **dict.fromkeys(("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"), "it takes the recipe's default alone."),
}
"""Field of a recipe → its supported values, in words."""
_INIT = {"preserve_high_precision_init_val": one_of(False, way="Parameters are in high precision: read them.")}
_RECIPE = "transformer_engine.common.recipe."
_ACCELERATES = ("accelerate.utils.TERecipeKwargs", "accelerate.utils.FP8RecipeKwargs")
_OPTIONS = ("use_autocast_during_eval", "use_mxfp8_block_scaling", "backend", "opt_level")
"""Arguments of these that are not fields of a recipe."""
_CALLS: dict[str, dict[str, Limit]] = {
    f"{_TE}fp8_model_init": _INIT,
    f"{_TE}quantized_model_init": _INIT,
    "torch.sagemaker.transform": {"cp_comm_type": one_of("p2p", "all_gather")},
    **{
        f"torch.sagemaker.nn.attn.{name}.forward": {"layout": one_of("b h s d", "b s h d"), "attn_mask": one_of(None)}
        for name in ("FlashSelfAttention", "FlashGroupedQueryAttention")
    },
    "torch.sagemaker.nn.attn.FlashSelfAttention": {"use_alibi": one_of(False, None)},
    "accelerate.Accelerator": {
        "mixed_precision": one_of(None, "no", "bf16", "fp8", "fp16"),
        "dynamo_backend": one_of(None, "no", "NO", "eager", "EAGER", "inductor", "INDUCTOR"),
    },
}
"""Function → argument → its limit."""
_CONTEXTS = {f"{_TE}fp8_autocast": "fp8_recipe", f"{_TE}autocast": "recipe"}
_ROTATION = f"{_TE}attention.apply_rotary_pos_emb"
_ROTATIONS = (_ROTATION, f"{_TE}attention.rope.apply_rotary_pos_emb")
_MOE = "torch.sagemaker.moe.moe_config.MoEConfig"


def recipe_class(dotted: str) -> str | None:
    """The recipe class that a call of this name constructs; None for others."""
    if dotted.rpartition(".")[2] in ("get_default_recipe", "get_default_fp8_recipe") and dotted.startswith(_TE):
        return "DelayedScaling"
    name = dotted.removeprefix(_RECIPE)
    return name if dotted.startswith(_RECIPE) and (name in _RECIPES or name in te.OF_BLACKWELL or name == "MMParams") else None


def _real(value: Any) -> Any:
    """A known value as the call would get it: formats and recipes as objects, lists as tuples."""
    if isinstance(value, RecipeValue):
        kind = getattr(recipes, value.dotted)
        return kind(*map(_real, value.args), **{name: _real(each) for name, each in value.words.items()})
    if isinstance(value, str) and value.startswith("Format.") and value[7:] in recipes.Format.__members__:
        return recipes.Format[value[7:]]
    return tuple(map(_real, value)) if isinstance(value, list) else value


def _fault(check: Callable[[], Any]) -> str | None:
    """The message of a failed check; None if it passes."""
    try:
        check()
    except (InputError, TypeError, ValueError, AssertionError) as error:
        return str(error)
    return None


def _of_recipe(name: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Refused fields of a recipe, by its constructor or an autocast."""
    for field, value in arguments.items():
        if is_known(value) and field != REST:
            fault = _fault(lambda: te.check_recipe(getattr(recipes, name)(**{field: _real(value)}), name))  # noqa: B023
            if fault is not None:
                yield field, value, fault


def _of_accelerate(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Refused arguments of TERecipeKwargs; Accelerate has text for formats and algorithms."""
    for name, value in arguments.items():
        if name == "use_mxfp8_block_scaling" and is_known(value) and value:
            yield name, value, "Octavo has no MXFP8."
        if value is None or name in (*_OPTIONS, REST) or not is_known(value):
            continue
        given_format = name == "fp8_format"
        if name in ("fp8_format", "amax_compute_algo") and (not isinstance(value, str) or value.startswith("Format.")):
            yield name, value, "it takes a text, such as 'HYBRID' or 'max'."
            continue
        if given_format and value.upper() not in ("HYBRID", "E4M3", "E5M2"):
            yield name, value, "it takes 'HYBRID' or 'E4M3'."
            continue
        real = f"Format.{value.upper()}" if given_format else value.lower() if name == "amax_compute_algo" else value
        for _, _, fault in _of_recipe("DelayedScaling", {name: real}):
            yield name, value, fault


def _of_context(dotted: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """A refused recipe of an autocast."""
    name = _CONTEXTS[dotted]
    value = arguments.get(name)
    if (
        arguments.get("enabled", True) is UNKNOWN
        or value is None
        or not (arguments.get("enabled", True) or arguments.get("calibrating"))
    ):
        return
    if is_known(value) and (not isinstance(value, RecipeValue) or value.dotted == "MMParams"):
        yield name, value, _OBJECT
    elif isinstance(value, RecipeValue):
        known = RecipeValue(value.dotted, [], {key: each for key, each in value.words.items() if is_known(each)})
        fault = _fault(lambda: te.check_recipe(_real(known), value.dotted))
        if fault is not None:
            yield name, value, fault


def refused(dotted: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(argument, value, reason) for each refused value of a call, of those that are known without a run.

    dotted: the canonical name; `….forward` for a call of a layer.
    """
    for name, limit in _limits(dotted, arguments).items():
        value = arguments.get(name, UNKNOWN)
        if name in arguments and is_known(value) and not limit.allows(value):
            yield name, value, limit.text
    recipe = recipe_class(dotted)
    if recipe is not None and recipe in _RECIPES:
        yield from _of_recipe(recipe, arguments)
    if dotted in _ACCELERATES:
        yield from _of_accelerate(arguments)
    if dotted in _CONTEXTS:
        yield from _of_context(dotted, arguments)
    if dotted in _ROTATIONS:
        yield from _alone_and_together(te.check_rotation, arguments)
    if dotted == _MOE:
        yield from _of_experts(arguments)
    if dotted == "torch.sagemaker.init":
        yield from _refused_keys(arguments.get("config"))
    if dotted == "sagemaker.inputs.TrainingInput":
        yield from _refused_channel(arguments)
    if dotted.startswith("sagemaker."):
        yield from refused_by_trainer(dotted, arguments)
    yield from _unfit(dotted.removeprefix(_TE), arguments)


def _alone_and_together(check: Callable[[dict[str, Any]], Any], arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Faults that a check finds in each known argument by itself, or else in all of them together.

    UNKNOWN stands for a tensor. With `OPTIONAL` or further unknown arguments, combinations are not checked.
    """
    known = {name: value for name, value in arguments.items() if is_known(value) and name != REST}
    there = {name: value for name, value in arguments.items() if name != REST and value is not OPTIONAL}
    if REST in arguments or OPTIONAL in arguments.values():
        there = {}
    any_refused = False
    for name, value in known.items():
        if name not in te.LENGTHS and (fault := _fault(lambda: check({name: value}))) is not None:  # noqa: B023
            lone = _fault(lambda: check(there)) is not None  # together with the others it may be valid
            if lone or not there:
                any_refused = True
                yield name, value, fault
    if not any_refused and there and (fault := _fault(lambda: check(there))) is not None:
        yield next(iter(there)), next(iter(there.values())), fault


def _of_experts(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Refused values of a MoEConfig, each by itself."""
    for name, value in arguments.items():
        if name == REST or not is_known(value):
            continue
        fault = _fault(lambda: MoEConfig(**{name: _real(value)}))  # noqa: B023
        if fault is not None:
            yield name, value, fault


def _refused_channel(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Refused arguments of a channel (`TrainingInput`)."""
    if not {"s3_data", REST} & set(arguments):
        yield "s3_data", None, "give an address."
    for name, value in arguments.items():
        if is_known(value) and name not in ("s3_data", REST):
            try:
                TrainingInput("s3://bucket", **{name: value})
            except InputError as error:
                yield name, value, str(error)


def _unfit(layer: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Values that contradict other arguments."""
    known = {
        name: value
        for name, value in arguments.items()
        if is_known(value) and name != REST and not isinstance(value, RecipeValue)
    }
    real = {name: _real(value) for name, value in known.items()}
    fault = _fault(lambda: te.check_layer(layer, real)) if "." not in layer else None
    if fault is not None:
        name = next((each for each in ("num_gqa_groups", "layer_type") if each in fault), "parameters_split")
        yield name, arguments.get(name), fault
    attention = layer.removesuffix(".forward") in _ATTENTIONS and layer.endswith(".forward")
    if attention:
        names = ("core_attention_bias_type", "core_attention_bias", "alibi_slopes", "softcap")
        terms = {name: arguments[name] for name in (*names, REST) if name in arguments}
        if is_known(terms.get("core_attention_bias_type", "no_bias")):
            yield from _alone_and_together(_check_terms, terms)
        lengths = {name: arguments[name] for name in (*te.LENGTHS, REST) if arguments.get(name) is not None}
        self_attention = not layer.startswith("DotProduct")
        yield from _alone_and_together(lambda each: te.check_lengths(each, self_attention=self_attention), lengths)
    heads, groups = arguments.get("num_attention_heads"), arguments.get("num_gqa_groups")
    if layer in _ATTENTIONS and isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups:
        yield "num_gqa_groups", groups, f"it divides num_attention_heads = {heads}."
    params, activation = arguments.get("activation_params"), arguments.get("activation", "gelu")
    plain = layer in ("LayerNormMLP", "TransformerLayer") and is_known(activation) and activation != "clamped_swiglu"
    if plain and params and is_known(params):
        yield "activation_params", params, f"{activation!r} has none: clamped_swiglu has."
    taken = tables("octavo.nn.arguments", ("_CLAMP",)).get("_CLAMP", {})
    if activation == "clamped_swiglu" and isinstance(params, dict) and is_known(params) and set(params) - set(taken):
        yield "activation_params", params, f"its keys are {', '.join(taken)}."
    sizes = [arguments.get(name) for name in ("normalized_shape", "hidden_size")]
    if layer in ("LayerNorm", "RMSNorm") and sizes == [None, None] and REST not in arguments:
        yield "normalized_shape", None, "give one size, that of the last dimension."


def _check_terms(arguments: Mapping[str, Any]) -> None:
    cap = arguments.get("softcap")
    te.check_cap_alone(te.cap_of(cap) if is_known(cap) else 0.0, te.check_terms(arguments))


def unsure(dotted: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(argument, limit in words) for each argument of a call that has a limit and whose value is known only at run time."""
    for name, limit in _limits(dotted, arguments).items():
        if name in arguments and limit.open and not is_known(arguments[name]):
            yield name, limit.text
    recipe = recipe_class(dotted)
    for name, value in arguments.items() if recipe is not None or dotted in _ACCELERATES else ():
        if name in _FIELDS and not is_known(value):
            yield name, _FIELDS[name]
    for name in ("moe_load_balancing", "global_token_shuffle") if dotted == _MOE else ():
        if name in arguments and not is_known(arguments[name]):
            yield name, "transform refuses global_token_shuffle=True, and a router that SMP has not."
    if dotted in _CONTEXTS:
        chosen, enabled = arguments.get(_CONTEXTS[dotted]), arguments.get("enabled", True)
        if isinstance(chosen, RecipeValue):
            if enabled is UNKNOWN and chosen.dotted in te.OF_BLACKWELL:
                yield "enabled", f"{chosen.dotted} is refused"
        elif chosen is not None and not is_known(chosen) and (enabled or arguments.get("calibrating")):
            yield _CONTEXTS[dotted], "MXFP8BlockScaling and NVFP4BlockScaling are refused."
    if dotted in _ROTATIONS:
        for name in ("tensor_format", "cp_size", "cp_rank", "interleaved"):
            if name in arguments and not is_known(arguments[name]):
                yield name, "formats are 'sbhd', 'bshd' and 'thd', and ranks whole numbers."
    layer = dotted.removeprefix(_TE)
    if layer.removesuffix(".forward") in _ATTENTIONS and layer.endswith(".forward"):
        there = [name for name in te.LENGTHS if arguments.get(name) is not None]
        if there and layer.startswith(("Multihead", "Transformer")) and "cu_seqlens_kv" not in arguments:
            yield there[0], "cross-attention and decoders take cu_seqlens_kv too."
        if there:
            yield there[0], "it has to fit the mask type, the format and the tokens."
    if dotted == "torch.sagemaker.init":
        config = arguments.get("config")
        if config is UNKNOWN or (isinstance(config, dict) and REST in config):
            yield "config", "keys are SMP's, and degrees fit the ranks."


_OF_STATE = {
    "transformer_engine.pytorch.FP8GlobalStateManager.reset": "within fp8_autocast it is refused",
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager.reset": "within fp8_autocast it is refused",
    "transformer_engine.pytorch.quantization.FP8GlobalStateManager.reset": "within fp8_autocast it is refused",
    **dict.fromkeys(
        [
            f"transformer_engine.pytorch.{module}CudaRNGStatesTracker.{method}"
            for module in ("", "distributed.")
            for method in ("add", "fork", "set_states")
        ],
        "each generator is added once, before its use",
    ),
    **dict.fromkeys(
        ("sagemaker.pytorch.PyTorch.logs", "sagemaker.pytorch.PyTorch.stop", "octavo.launch.PyTorch.logs"),
        "it needs a job that fit has started",
    ),
    **dict.fromkeys(
        ("sagemaker.pytorch.PyTorch.attach", "octavo.launch.PyTorch.attach", "octavo.launch.ModelTrainer.attach"),
        "the job has to be there",
    ),
}


def of_state(dotted: str) -> str | None:
    """A requirement on the state of the run, which reading cannot check; None for a call without one."""
    return UNSEEN if is_trainer(dotted) else _OF_STATE.get(dotted)


def of_call(layer: str, arguments: Mapping[str, Any], makings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Requirements of a call of attention, from `makings`: the constructor arguments of such layers in the script."""
    name = layer.removeprefix(_TE).removesuffix(".forward")
    if name not in _ATTENTIONS or REST in arguments:
        return
    kind = "self_attn_mask_type" if name == "TransformerLayer" else "attn_mask_type"
    order = "attn_input_format" if name == "TransformerLayer" else "qkv_format"
    kinds = (
        [arguments[kind]] if arguments.get(kind) is not None else [layer.get(kind, "causal") for layer in makings] or ["causal"]
    )
    lengths = any(arguments.get(each) is not None for each in te.LENGTHS)
    masked = any(not isinstance(each, str) or "padding" in each or each == "arbitrary" for each in kinds)
    if masked and arguments.get("attention_mask") is None and not lengths:
        yield f"{kind} may be one that takes attention_mask or lengths, and the call has neither"
    if any(layer.get(order, "sbhd") not in ("sbhd", "bshd") for layer in (*makings, arguments)):
        yield "packed sequences take lengths, and a mask type with padding"
    of_cross = [layer.get("layer_type", layer.get("attention_type")) in ("cross", "decoder") for layer in makings]
    unsure_kind = any(UNKNOWN in (layer.get("layer_type"), layer.get("attention_type")) or REST in layer for layer in makings)
    encoded = arguments.get("encoder_output") is not None
    if name != "DotProductAttention" and (any(of_cross) or unsure_kind) and not encoded:
        yield "cross-attention takes encoder_output"
    if name != "DotProductAttention" and encoded and not (of_cross and all(of_cross)):
        yield "encoder_output is of cross-attention alone"
    if name == "TransformerLayer" and arguments.get("enc_dec_attn_mask") is not None and not all(of_cross):
        yield "enc_dec_attn_mask is of decoders alone"


def _refused_keys(config: Any) -> Iterator[tuple[str, Any, str]]:
    """Refused keys of SMP's configuration, by the class that `init` reads it with."""
    if not isinstance(config, dict):
        return
    known = {key: value for key, value in config.items() if key != REST and is_known(value)}
    fields = SmpConfig.model_fields
    for key, value in known.items():
        if key not in fields:
            yield "config", key, f"no key of it: {', '.join(fields)}."
        elif (fault := _fault(lambda: SmpConfig.from_dict({key: value}, where="config"))) is not None:  # noqa: B023
            yield f"config.{key}", value, fault
    degrees = {key: known.get(key, fields[key].default) for key in DEGREES}
    numbers = all(type(value) is int and value >= 0 for value in degrees.values())
    if REST not in config and numbers and not any(key in config and key not in known for key in DEGREES):
        hybrid, tensor, context, expert = degrees.values()
        if (fault := _fault(lambda: check_composed(tensor, expert))) is not None:
            yield "config.expert_parallel_degree", expert, fault
            return
        if _fault(lambda: fit_degrees(**degrees, world_size=least_world(**degrees))) is not None and tensor * context * expert:
            yield "config.hybrid_shard_degree", hybrid, _DIVIDE if tensor == 1 else _DIVIDE_BESIDE_TENSOR


_DIVIDE = "context_parallel_degree and expert_parallel_degree divide it."
_DIVIDE_BESIDE_TENSOR = (
    "context_parallel_degree divides it, and expert_parallel_degree divides it times tensor_parallel_degree."
)
_SIZES = (
    "in_features", "out_features", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_gqa_groups", "kv_channels",
    "num_gemms", "normalized_shape", "layer_number", "dim",
)  # fmt: skip
_ANY_TEXT = (
    "name",
    "ub_name",
    "rng_tracker_name",
    "checkpoint_id",
    "path",
    "output_path",
    "job_name",
    "project_dir",
    "logging_dir",
)


def odd(dotted: str, signature: Signature | None, name: str, value: Any) -> str | None:
    """The reason why a run may refuse a constant that no limit of this module refuses; None for a usual value."""
    kind = None if signature is None else signature.kinds.get(name)
    if value is None:
        there = signature is None or name not in signature.required
        of_layer = dotted.removeprefix(_TE) in _of_layers()  # its kinds follow from defaults
        return None if there and (kind is None or of_layer or takes(kind, None)) else "it has to be there."
    if name == "mixed_precision" and value == "fp16":
        return "it needs a GPU."
    if (
        (name in _limits(dotted, {}) and name != "pad_between_seqs")
        or name in _FIELDS
        or (isinstance(value, RecipeValue) and name in _RECIPES_OF)
    ):
        return None
    if name in _TP or (name == "parameters_split" and isinstance(value, list | dict)):
        return None
    if name == "device" and isinstance(value, str) and re.fullmatch(r"cpu|meta|cuda(:\d)?", value):
        return None
    if name.startswith("enc_dec_") and (limit := _of_layers()["TransformerLayer"].get(name)) is not None:
        return None if limit.allows(value) else limit.text
    if name == "pad_between_seqs" and value is True:
        return "it is of packed sequences with places."
    if name in te.LONGEST:
        return "it is a whole number of at least the longest sequence."
    if dotted in _ROTATIONS:
        if name in ("cp_size", "cp_rank") and value not in (0, 1):
            return "there have to be angles for the tokens of all ranks."
        return "it is a tensor." if name in ("t", "freqs", "start_positions", "cu_seqlens") else None
    if dotted in _CONTEXTS:
        return None if name in ("enabled", "calibrating", "_graph", _CONTEXTS[dotted]) else "it is a process group."
    if dotted in _CHECKPOINTS:
        return None if name in _USUAL or (value is False and name == "debug") else "it is not a usual value."
    if dotted in (*_ACCELERATES, _MOE) or recipe_class(dotted) or dotted.startswith("sagemaker."):
        return None  # checked as in the run
    layer = dotted.removeprefix(_TE).removesuffix(".forward")
    free = tables("octavo.nn.arguments", ("ARGUMENTS",), reference=_NO_REFERENCE).get("ARGUMENTS", {})
    if dotted.startswith(_TE) and name in free.get(dotted.removeprefix(_TE), {}):
        only = free[dotted.removeprefix(_TE)][name]
        if not only.values or value in only.values:
            return None
    if name in _SIZES:
        return None if type(value) is int and 1 <= value <= _LARGEST else "it is a whole number from 1."
    if isinstance(value, float | int) and not isinstance(value, bool) and not 0 <= value <= _LARGEST:
        return "it is a usual number."
    if name in _ANY_TEXT and isinstance(value, str):
        return None
    if kind is None:
        plain = isinstance(value, bool | int | float) and not dotted.startswith(_TE)
        return None if plain or dotted.startswith("torch.") else "its kind is not known here."
    if kind == "Any" and layer in _of_layers():
        return "it is a tensor."
    if not takes(kind, value):
        return f"it is {kind}."
    if isinstance(value, str) and (dotted.startswith((_TE, "accelerate.")) or "|" in kind or "Literal" in kind):
        return None if kind == "str" and not dotted.startswith(_TE) and "accelerate" not in dotted else "texts of it are few."
    return None


_LARGEST = 10**7
_RECIPES_OF = (*_CONTEXTS.values(), "kwargs_handlers")
_CHECKPOINTS = (f"{_TE}checkpoint", f"{_TE}distributed.checkpoint")
_USUAL = ("use_reentrant", "distribute_saved_activations", "preserve_rng_state", "early_stop")
_NO_REFERENCE = SimpleNamespace(ACTIVATIONS=())


def _limits(dotted: str, arguments: Mapping[str, Any]) -> dict[str, Limit]:
    if not dotted.startswith(_TE):
        return _CALLS.get(dotted, {})
    if dotted in _CALLS:
        off = not arguments.get("enabled", True)
        return {} if off else _CALLS[dotted]
    layer = dotted.removeprefix(_TE)
    limits = dict(_of_layers().get(layer, {}))
    if layer == "MultiheadAttention" and not arguments.get("input_layernorm"):
        limits.pop("normalization", None)
    if not layer.endswith(".forward"):
        size, group = arguments.get("tp_size", 1), arguments.get("tp_group")
        if group is None and size in (None, 1):
            return {name: limit for name, limit in limits.items() if name not in _TP}
        if not is_known(group) or not is_known(size):  # one note is enough
            return {name: limit for name, limit in limits.items() if name not in _TP or name in ("tp_group", "tp_size")}
    return limits


@cache
def _of_layers() -> dict[str, dict[str, Limit]]:
    """Layer, or layer.forward → argument → its limit; arguments without a limit are left out."""
    names = tables("octavo.kernels.reference", ("ACTIVATIONS",))
    of_nn = tables("octavo.nn.arguments", ("ARGUMENTS", "ACTIVATIONS", "FORMATS"), reference=SimpleNamespace(**names))
    masks = one_of(*tables("octavo.compat.te.masks", ("TYPES",)).get("TYPES", ()))
    formats = one_of(*te.FORMATS)
    more = {
        "normalization": one_of(*tables("octavo.nn.norm", ("NORMS",)).get("NORMS", ())),
        "activation": one_of(*of_nn.get("ACTIVATIONS", ()), "clamped_swiglu"),
        "qkv_format": formats, "attn_input_format": formats, "attn_mask_type": masks, "self_attn_mask_type": masks,
        "window_size": _WINDOWS, "attention_dropout": _DROPOUT, "hidden_dropout": _DROPOUT, "drop_path_rate": _DROPOUT,
        "qk_norm_type": one_of(None, "L2Normalization", *tables("octavo.nn.norm", ("NORMS",)).get("NORMS", ())),
        "attention_type": one_of(*te.ATTENTION_TYPES), "layer_type": one_of(*te.LAYER_TYPES),
        "softmax_type": one_of(*tables("octavo.compat.te.core", ("SOFTMAX",)).get("SOFTMAX", ())),
        "enc_dec_attn_mask_type": masks, "enc_dec_window_size": _WINDOWS, "enc_dec_bottom_right_diagonal": _FLAG_OR_FALSE,
        "bottom_right_diagonal": _FLAG_OR_FALSE,
        **dict.fromkeys(("fuse_qkv_params", "qkv_weight_interleaved", "rotary_pos_interleaved", "return_max_logit"), _FLAG),
    }  # fmt: skip
    limits: dict[str, dict[str, Limit]] = {"Linear.forward": {}, "LayerNormLinear.forward": {}}
    for layer, arguments in of_nn.get("ARGUMENTS", {}).items():
        limits[layer] = {
            name: one_of(*only.values, way=only.instead)
            for name, only in arguments.items()
            if only.values and name not in _TAKEN.get(layer, ()) and not (layer.endswith(".forward") and name in te.TAKEN)
        }
        limits[layer] |= {name: more[name] for name in (*_usual(layer), *_FLAGS.get(layer, ())) if name in more}
        if layer in _ATTENTIONS:
            limits[layer]["softcap"] = _CAP
    for layer in ("Linear.forward", "LayerNormLinear.forward"):
        limits[layer] |= {"fp8_output": _NO_FP8, "fp8_grad": _NO_FP8}
    for layer in ("DotProductAttention.forward", "MultiheadAttention.forward", "TransformerLayer.forward"):
        name = "self_attn_mask_type" if layer.startswith("TransformerLayer") else "attn_mask_type"
        kinds = tables("octavo.compat.te.masks", ("TYPES",)).get("TYPES", ())
        limits[layer] |= {name: one_of(None, *kinds), "window_size": _WINDOWS}
        limits[layer] |= {"core_attention_bias_type": one_of(*te.BIASES), "softcap": _CAP}
        limits[layer] |= {"checkpoint_core_attention": _FLAG, "pad_between_seqs": _FLAG_OR_NONE}
        limits[layer] |= {"bottom_right_diagonal": _FLAG_OR_FALSE}
    return limits


def _usual(layer: str) -> tuple[str, ...]:
    """Arguments of a layer's constructor with a limit that several layers share."""
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
