"""Model families as data: the keys of Hugging Face's configs for a `ModelSpec`, and the names of weights.

A family with a table of names becomes Octavo's decoder if the decoder computes its config. Any other runs its original code,
with FP8 linears in place; FLOPs are counted for it too. Neither torch nor transformers is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Literal

from octavo.config.moe import MoeConfig
from octavo.config.peft_settings import PEFT_PREFIX
from octavo.errors import InputError, unknown
from octavo.models.spec import ModelSpec
from octavo.stored_names import stored_name

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary scalings that do not depend on the sequence length."""
_GELU = dict.fromkeys(("gelu", "gelu_python"), "gelu_exact") | dict.fromkeys(
    # One function with five spellings of its constants and its cube, equal in float32.
    ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
    "gelu",
)
ACTIVATIONS = {("silu", True): "swiglu", ("relu2", False): "srelu"} | {(name, False): ours for name, ours in _GELU.items()}
"""The activations of the decoder: (`ModelSpec.activation`, `gated`) → the layers' name."""


class Join(Enum):
    """The order of rows in a parameter that is joined of several matrices."""

    QKV = auto()  # a key-value head's queries, its key, its value; then the next key-value head
    GATE_UP = auto()  # a block of rows of the gate, as many of the up projection; then the next block
    EXPERTS = auto()  # the rows of one expert's matrix, then the next expert's: the source's [E, N, K] as [E · N, K]
    EXPERT_B = auto()  # stacked Bs of experts: PEFT's [N, r · E], expert index fastest, as [E · N, r]


@dataclass(frozen=True)
class Joined:
    """The source's matrices of one parameter; one name if a single matrix has all parts, concatenated."""

    join: Join
    names: tuple[str, ...]


_ADAPTER = re.compile(r"(?P<layer>.+)\.lora(?P<product>|_fc1|_fc2|_router)\.(?P<part>\w+)\.(?P<kind>lora_[AB])")


def matrix_of(name: str) -> str:
    """The stored name of the parameter to which an adapter's parameter belongs."""
    match = _ADAPTER.fullmatch(name)
    assert match is not None, name
    layer = stored_name(match["layer"])
    product = match["product"].removeprefix("_")
    return f"{layer}.{product}_weight" if product else f"{layer}.weight"


def leaf_of(matrix: str) -> str:
    """The last component of a source matrix's name, which its adapters share."""
    return matrix.removesuffix(".weight").rpartition(".")[2]


def adapter_module(matrix: str) -> str:
    """PEFT's module of the adapters of a source's matrix.

    PEFT wraps a module once for each of its stacked parameters, in order: the second wraps the first.
    """
    module, _, leaf = matrix.rpartition(".")
    return f"{module}.base_layer" if leaf == "gate_up_proj" else module


@dataclass(frozen=True)
class NameTable:
    """Octavo's parameters → those of the source. Other names outside blocks are the same in both.

    Attributes:
        block: parameters of a block, by their stored names (`octavo.nn.plain_names`); methods accept both kinds of names.
        model: parameters outside of blocks.
        ours, theirs: prefix of the blocks' names, `<ours>.<number>.<parameter>`.
    """

    block: Mapping[str, str | Joined]
    model: Mapping[str, str]
    ours: str
    theirs: str

    def names(self, name: str) -> tuple[str, ...]:
        """The source's names of a parameter; PEFT's for an adapter's."""
        if (match := _ADAPTER.fullmatch(name)) is not None:
            matrix = next(one for one in self.names(matrix_of(name)) if leaf_of(one) == match["part"])
            return (f"{PEFT_PREFIX}{adapter_module(matrix)}.{match['kind']}.weight",)
        prefix, entry = self._entry(name)
        return tuple(prefix + part for part in ((entry,) if isinstance(entry, str) else entry.names))

    def join(self, name: str) -> Join | None:
        """The order of rows in a joined parameter; None for one matrix of the source."""
        if (match := _ADAPTER.fullmatch(name)) is not None:
            stacked = match["kind"] == "lora_B" and self.join(matrix_of(name)) is Join.EXPERTS
            return Join.EXPERT_B if stacked else None
        _, entry = self._entry(name)
        return None if isinstance(entry, str) else entry.join

    def _entry(self, name: str) -> tuple[str, str | Joined]:
        if not name.startswith(f"{self.ours}."):
            return "", self.model.get(name, name)
        _, number, parameter = name.split(".", 2)
        return f"{self.theirs}.{number}.", self.block[stored_name(parameter)]


@dataclass(frozen=True)
class Family:
    """A model family of Hugging Face.

    Attributes:
        gated: the MLP is gated.
        keys: fields of `ModelSpec` → config keys that only some families have.
        fixed: fields of `ModelSpec` with one value in the whole family.
        normalization: of `ModelSpec`.
        grouped: the config may give the number of key-value heads and the head dimension; False: one per query head.
        partial_rotary: `partial_rotary_factor` is read.
        windows: layers with a sliding window, if the config has one: "none", "all", or those that it "lists".
        pads: the pad token's row of the embedding is not trained.
        experts: reads the fields of mixture of experts (MoE); None for a dense family.
        names: names of its weights; None for a family whose FLOPs alone are counted.
    """

    gated: bool
    keys: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    normalization: str = "RMSNorm"
    grouped: bool = True
    partial_rotary: bool = False
    windows: Literal["none", "all", "lists"] = "none"
    pads: bool = True
    experts: Callable[[Any], dict[str, Any]] | None = None
    names: NameTable | None = None

    def read(self, config: Any) -> ModelSpec:
        """The spec of a config of this family."""
        hidden = int(config.hidden_size)
        heads = _first(config, "num_attention_heads", "num_heads")
        rotary = dict(getattr(config, "rope_parameters", None) or {})
        return ModelSpec(
            **{**self._common(config, hidden, heads, rotary), **({} if self.experts is None else self.experts(config))}
        )

    def _common(self, config: Any, hidden: int, heads: int, rotary: dict[str, Any]) -> dict[str, Any]:
        """The fields that all families have."""
        return dict(
            family=config.model_type,
            hidden_size=hidden,
            ffn_size=_first(config, "intermediate_size", default=4 * hidden),
            layers=_first(config, "num_hidden_layers", "num_layers"),
            heads=heads,
            kv_heads=_first(config, "num_key_value_heads", default=heads) if self.grouped else heads,
            head_dim=_first(config, "head_dim", default=hidden // heads) if self.grouped else hidden // heads,
            vocabulary=config.vocab_size,
            normalization=self.normalization,
            activation=_first(config, "hidden_act", "activation_function"),
            gated=self.gated,
            tied=bool(config.tie_word_embeddings),
            padding=getattr(config, "pad_token_id", None) if self.pads else None,
            initializer_range=config.initializer_range,
            rotary=rotary,
            rotary_fraction=rotary.get("partial_rotary_factor", 1.0) if self.partial_rotary else 1.0,
            max_positions=config.max_position_embeddings,
            windows=_windows(config, self.windows),
            **{name: getattr(config, key) for name, key in self.keys.items()},
            **self.fixed,
        )


def _first(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these keys with a value: families name the same number differently."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _windows(config: Any, which: Literal["none", "all", "lists"]) -> tuple[int | None, ...]:
    """Layers are listed by `layer_types` in most families, by `attention_layers` in GPT-Neo."""
    # Not `_first`: a window of 0 is an error, not a missing one.
    window = getattr(config, "sliding_window", getattr(config, "window_size", None))
    kinds: Sequence[str] | None = _first(config, "layer_types", "attention_layers") if which == "lists" else None
    if kinds is None:
        return (window if which == "all" else None,) * _first(config, "num_hidden_layers", "num_layers")
    return tuple(window if kind in ("sliding_attention", "local") else None for kind in kinds)


def block_with_biases(
    *, norms: tuple[str, str], qkv: str, proj: str, mlp: tuple[str, str], join: Join | None = None
) -> dict[str, str | Joined]:
    """The rows of a block whose parts all have a weight and a bias, and whose MLP has no gate, by the names of its modules.

    join: order of the rows of `qkv` if it differs from Octavo's.
    """
    parts = {
        "self_attention.layernorm_qkv.layer_norm_": norms[0],
        "self_attention.layernorm_qkv.": qkv,
        "self_attention.proj.": proj,
        "layernorm_mlp.layer_norm_": norms[1],
        "layernorm_mlp.fc1_": mlp[0],
        "layernorm_mlp.fc2_": mlp[1],
    }
    rows: dict[str, str | Joined] = {}
    for ours, theirs in parts.items():
        for name in (f"{theirs}.weight", f"{theirs}.bias"):
            rows[ours + name.rpartition(".")[2]] = name if join is None or theirs != qkv else Joined(join, (name,))
    return rows


_LLAMA_NAMES = NameTable(
    model={
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    },
    block={
        "self_attention.layernorm_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.layernorm_qkv.weight": Joined(
            Join.QKV, ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
        ),
        "self_attention.layernorm_qkv.bias": Joined(
            Join.QKV, ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
        ),
        "self_attention.proj.weight": "self_attn.o_proj.weight",
        "self_attention.proj.bias": "self_attn.o_proj.bias",
        "layernorm_mlp.layer_norm_weight": "post_attention_layernorm.weight",
        "layernorm_mlp.fc1_weight": Joined(Join.GATE_UP, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
        "layernorm_mlp.fc1_bias": Joined(Join.GATE_UP, ("mlp.gate_proj.bias", "mlp.up_proj.bias")),
        "layernorm_mlp.fc2_weight": "mlp.down_proj.weight",
        "layernorm_mlp.fc2_bias": "mlp.down_proj.bias",
    },
    ours="layers",
    theirs="model.layers",
)

_EXPERT_BLOCK = {
    **{name: theirs for name, theirs in _LLAMA_NAMES.block.items() if "bias" not in name},
    "layernorm_moe.layer_norm_weight": "post_attention_layernorm.weight",
    "layernorm_moe.router_weight": "mlp.gate.weight",
    "layernorm_moe.experts.fc1_weight": Joined(Join.EXPERTS, ("mlp.experts.gate_up_proj",)),  # all gates, then all ups, as here
    "layernorm_moe.experts.fc2_weight": Joined(Join.EXPERTS, ("mlp.experts.down_proj",)),
}
_MIXTRAL_NAMES = replace(_LLAMA_NAMES, block=_EXPERT_BLOCK)
_QWEN3_NAMES = replace(
    _LLAMA_NAMES,
    block={
        **_LLAMA_NAMES.block,
        "self_attention.q_norm.weight": "self_attn.q_norm.weight",
        "self_attention.k_norm.weight": "self_attn.k_norm.weight",
    },
)
_QWEN3_MOE_NAMES = replace(_QWEN3_NAMES, block={**_EXPERT_BLOCK, **_QWEN3_NAMES.block})
_PHI3_NAMES = replace(
    _LLAMA_NAMES,
    block={
        **_LLAMA_NAMES.block,
        "self_attention.layernorm_qkv.weight": Joined(Join.QKV, ("self_attn.qkv_proj.weight",)),
        "layernorm_mlp.fc1_weight": Joined(Join.GATE_UP, ("mlp.gate_up_proj.weight",)),
    },
)
_NEOX_NAMES = NameTable(
    model={
        "embedding.weight": "gpt_neox.embed_in.weight",
        "norm.weight": "gpt_neox.final_layer_norm.weight",
        "norm.bias": "gpt_neox.final_layer_norm.bias",
        "head.weight": "lm_head.weight",  # "embed_out" in folders, which transformers renames
    },
    block=block_with_biases(
        norms=("input_layernorm", "post_attention_layernorm"),
        # Its rows already have the order of `Join.QKV`: query, key and value of one head, then of the next.
        qkv="attention.query_key_value",
        proj="attention.dense",
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    ),
    ours="layers",
    theirs="gpt_neox.layers",
)

_RMS = {"norm_eps": "rms_norm_eps"}
_DROPOUT = {"attention_dropout": "attention_dropout"}
_ATTENTION_BIAS = {"qkv_bias": "attention_bias", "proj_bias": "attention_bias"}
_EXPERTS = {"experts": "num_local_experts", "top_k": "num_experts_per_tok"}


def _mixtral_experts(config: Any) -> dict[str, Any]:
    return {"jitter": config.router_jitter_noise, "balance": _balance(config)}


def _qwen3_experts(config: Any) -> dict[str, Any]:
    layers, step = range(config.num_hidden_layers), config.decoder_sparse_step
    if step == 0:
        raise InputError(
            "decoder_sparse_step = 0: the interval between layers with experts. Use 1 for all layers, 2 for every second."
        )
    dense = tuple(i for i in layers if i in config.mlp_only_layers or (i + 1) % step)
    return {
        "ffn_size": config.moe_intermediate_size, "normalized": config.norm_topk_prob, "balance": _balance(config),
        "dense": dense, "dense_ffn_size": config.intermediate_size,
    }  # fmt: skip


def _balance(config: Any) -> float:
    """transformers adds the balancing loss where it also returns the router's logits."""
    return config.router_aux_loss_coef if config.output_router_logits else 0.0


def with_moe(spec: ModelSpec | None, config: Any, moe: MoeConfig | None) -> ModelSpec | None:
    """The spec of a model with the settings of [moe], which override its Hugging Face config.

    Raises:
        InputError: settings for a model without experts or with its original code, a coefficient without its loss, or a config
            that balances experts of a model without any.
    """
    if moe is None or not moe.given:
        if spec is not None and spec.balance and not spec.mixtures:
            raise InputError(
                "model.config.output_router_logits = true: no layer has experts (mlp_only_layers, decoder_sparse_step), so "
                "there is no router to balance. Set it to false."
            )
        return spec
    settings = ", ".join(f"moe.{key} = {json.dumps(value)}" for key, value in moe.given.items())
    if spec is None or not spec.mixtures:
        kind = getattr(config, "model_type", "not of Hugging Face")
        having = ", ".join(name for name, family in FAMILIES.items() if family.experts is not None)
        fault = "runs its original code" if spec is None else "has no experts"
        raise InputError(
            f"{settings}: the model ({kind}) {fault}. Leave [moe] out, or train a model with experts in "
            f"Octavo's blocks ({having})."
        )
    asked, coefficient = moe.moe_load_balancing, moe.moe_aux_loss_coeff
    balances = config.output_router_logits if asked is None else asked == "aux_loss"
    if coefficient is not None and not balances:
        off = "the model's config has output_router_logits = false" if asked is None else f'moe.moe_load_balancing = "{asked}"'
        raise InputError(
            f"moe.moe_aux_loss_coeff = {coefficient:g} has no effect: {off}. "
            'Set moe.moe_load_balancing = "aux_loss", or leave the coefficient out.'
        )
    balance = config.router_aux_loss_coef if coefficient is None else coefficient
    return replace(
        spec,
        balance=balance if balances else 0.0,
        router_z_loss=moe.moe_z_loss_coeff or 0.0,
        assignment=asked if asked in ("sinkhorn", "balanced") else "largest",
        jitter=spec.jitter if moe.router_jitter_noise is None else moe.router_jitter_noise,
    )


_NEOX = {
    **_DROPOUT,
    **_ATTENTION_BIAS,
    "norm_eps": "layer_norm_eps",
    "parallel": "use_parallel_residual",
    "hidden_dropout": "hidden_dropout",
    "embedding_dropout": "hidden_dropout",
}

FAMILIES: dict[str, Family] = {
    "llama": Family(gated=True, keys=_RMS | _DROPOUT | _ATTENTION_BIAS | {"mlp_bias": "mlp_bias"}, names=_LLAMA_NAMES),
    "mistral": Family(gated=True, keys=_RMS | _DROPOUT, windows="all", names=_LLAMA_NAMES),
    "mixtral": Family(
        gated=True, keys=_RMS | _DROPOUT | _EXPERTS, windows="all", experts=_mixtral_experts, names=_MIXTRAL_NAMES
    ),
    "qwen2": Family(gated=True, keys=_RMS | _DROPOUT, fixed={"qkv_bias": True}, windows="lists", names=_LLAMA_NAMES),
    "qwen3": Family(
        gated=True, keys=_RMS | _DROPOUT | _ATTENTION_BIAS, fixed={"qk_norm": True}, windows="lists", names=_QWEN3_NAMES
    ),
    "qwen3_moe": Family(
        gated=True, keys=_RMS | _DROPOUT | _ATTENTION_BIAS | _EXPERTS, fixed={"qk_norm": True}, windows="all",
        experts=_qwen3_experts, names=_QWEN3_MOE_NAMES,
    ),
    "phi3": Family(
        gated=True, keys=_RMS | _DROPOUT | {"hidden_dropout": "resid_pdrop"}, partial_rotary=True, windows="all",
        names=_PHI3_NAMES,
    ),
    "gpt_neox": Family(
        gated=False, keys=_NEOX, fixed={"mlp_bias": True}, normalization="LayerNorm", grouped=False, partial_rotary=True,
        pads=False, names=_NEOX_NAMES,
    ),
    "gpt_neo": Family(gated=False, keys={"norm_eps": "layer_norm_epsilon"}, normalization="LayerNorm", windows="lists"),
}  # fmt: skip
"""By Hugging Face's `model_type`."""

DECODER_FAMILIES = tuple(kind for kind, family in FAMILIES.items() if family.names is not None)
"""Families that Octavo's decoder computes."""


def spec_of(config: Any) -> ModelSpec:
    """The spec of a Hugging Face config, for Octavo's decoder or for counting; an InputError for an unknown `model_type`."""
    kind = str(getattr(config, "model_type", None))
    if kind not in FAMILIES:
        raise unknown("model family", kind, FAMILIES)
    return FAMILIES[kind].read(config)


def decoder_spec(config: Any) -> tuple[ModelSpec | None, str]:
    """The spec of a config that Octavo's decoder computes, or None and the reason why the model runs its original code.

    Raises:
        InputError: a value that transformers does not support either.
    """
    kind = config.model_type
    if kind not in DECODER_FAMILIES:
        return None, f"no decoder for the family {kind!r}"
    spec = spec_of(config)
    _refuse_impossible(config, spec)
    reason = next(_beyond_the_decoder(config, spec), "")
    return (None, reason) if reason else (spec, "")


def _beyond_the_decoder(config: Any, spec: ModelSpec) -> Iterator[str]:
    """Messages about config values that transformers' code supports and Octavo's decoder does not, with their keys."""
    if (spec.activation, spec.gated) not in ACTIVATIONS:
        known = ", ".join(name for name, gated in ACTIVATIONS if gated == spec.gated)
        yield f"hidden_act = {spec.activation!r} is not one of {known}"
    rope, fraction = spec.rotary.get("rope_type", "default"), spec.rotary.get("partial_rotary_factor", 1.0)
    if rope not in ROPE_TYPES:
        yield f"rope_type = {rope!r} is not one of {', '.join(ROPE_TYPES)}"
    if fraction != spec.rotary_fraction and rope != "default":  # the only type that does not read it
        yield f"partial_rotary_factor = {fraction}: this family rotates whole heads"
    if not 0 <= spec.rotary_fraction <= 1:
        yield f"partial_rotary_factor = {fraction} is not between 0 and 1"
    if (window := next((window for window in spec.windows if window is not None and window < 1), None)) is not None:
        yield f"sliding_window = {window} leaves a token nothing to attend to: use at least 1, or none"
    if not getattr(config, "is_causal", True):  # read by transformers' masks
        yield f"is_causal = {config.is_causal}: the decoder's attention is causal"
    if (head_dim := getattr(config, "head_dim", None)) not in (None, spec.head_dim):  # read only by the rotation
        yield f"head_dim = {head_dim}: heads of this family have hidden_size / num_attention_heads = {spec.head_dim}"
    if outside(spec):
        yield f"pad_token_id = {spec.padding} is not in the vocabulary of {spec.vocabulary}"


def outside(spec: ModelSpec) -> bool:
    """True if the pad token has no row in the embedding; a negative id counts from the end."""
    return spec.padding is not None and not -spec.vocabulary <= spec.padding < spec.vocabulary


def _refuse_impossible(config: Any, spec: ModelSpec) -> None:
    """Raise an InputError for values that the family's code in transformers does not support."""
    if spec.rotary and "rope_theta" not in spec.rotary:
        raise InputError(
            f"rope_parameters of {spec.family} has no rope_theta, only {', '.join(spec.rotary)}: this family rotates all layers"
            ' alike. Give one table, such as {"rope_type": "default", "rope_theta": 10000.0}.'
        )
    if spec.attention_dropout is None:
        raise InputError("attention_dropout = None: use 0.0, which drops nothing.")
    keys = FAMILIES[spec.family].keys
    for key in (keys[name] for name in ("attention_dropout", "hidden_dropout") if name in keys):
        if not 0 <= (rate := getattr(config, key)) < 1:
            raise InputError(f"{key} = {rate}: a dropout rate is at least 0 and below 1; 0 drops nothing.")
    if spec.kv_heads < 1 or spec.heads % spec.kv_heads:
        fitting = max(
            groups for groups in range(1, spec.heads + 1) if spec.heads % groups == 0 and groups <= max(1, spec.kv_heads)
        )
        raise InputError(
            f"num_key_value_heads = {spec.kv_heads}: {spec.heads} attention heads (num_attention_heads) cannot share"
            f" {spec.kv_heads} key-value heads. Use a divisor, such as {fitting}."
        )
    if FAMILIES[spec.family].experts is not None and spec.experts < 1:
        raise InputError(f"num_local_experts = {spec.experts}: a model of {spec.family} has at least one expert.")
    if FAMILIES[spec.family].windows != "lists":
        return
    for number, (kind, window) in enumerate(zip(getattr(config, "layer_types", None) or (), spec.windows, strict=True)):
        if kind not in ("full_attention", "sliding_attention"):
            raise InputError(
                f"layer_types[{number}] = {kind!r}: layers of {spec.family} are 'full_attention' or 'sliding_attention'."
            )
        if kind == "sliding_attention" and window is None:
            raise InputError(
                f"layer_types[{number}] = {kind!r} without a window: set sliding_window and use_sliding_window = true, or make"
                " it 'full_attention'."
            )
