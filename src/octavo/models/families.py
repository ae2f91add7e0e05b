"""Model families as data: the keys of Hugging Face's configs that make a `ModelSpec`, and the names of weights.

A family with a table of names becomes Octavo's decoder where the decoder computes its config. Any other keeps its own code,
gets FP8 linears in place and is counted all the same. Neither torch nor transformers is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from octavo.errors import unknown
from octavo.models.spec import ModelSpec

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary scalings that do not depend on the sequence at hand."""
ACTIVATIONS = {("silu", True): "swiglu"}
"""The activations of the decoder: (`ModelSpec.activation`, `gated`) → the layers' name."""


class Join(Enum):
    """The order of rows in a parameter that is joined of several matrices."""

    QKV = auto()  # the queries that share a key-value head, its key, its value; then the next key-value head
    GATE_UP = auto()  # a block of rows of the gate, as many of the up projection; then the next block


@dataclass(frozen=True)
class Joined:
    """A source's matrices that make one parameter; one name for a matrix that has all parts, one after the other."""

    join: Join
    names: tuple[str, ...]


@dataclass(frozen=True)
class NameTable:
    """Octavo's parameters → those of the source. Outside of blocks a name that is not here is the same in both.

    Attributes:
        block: parameters of a block.
        model: parameters outside of blocks.
        ours, theirs: prefix of the blocks' names, `<ours>.<number>.<parameter>`.
    """

    block: Mapping[str, str | Joined]
    model: Mapping[str, str]
    ours: str
    theirs: str

    def names(self, name: str) -> tuple[str, ...]:
        """The source's names of a parameter."""
        prefix, entry = self._entry(name)
        return tuple(prefix + part for part in ((entry,) if isinstance(entry, str) else entry.names))

    def join(self, name: str) -> Join | None:
        """The order of rows in a joined parameter; None for one matrix of the source."""
        _, entry = self._entry(name)
        return None if isinstance(entry, str) else entry.join

    def _entry(self, name: str) -> tuple[str, str | Joined]:
        if not name.startswith(f"{self.ours}."):
            return "", self.model.get(name, name)
        _, number, parameter = name.split(".", 2)
        return f"{self.theirs}.{number}.", self.block[parameter]


@dataclass(frozen=True)
class Family:
    """A family of Hugging Face's.

    Attributes:
        gated: the MLP's activation is applied to a gate.
        keys: fields of `ModelSpec` → config keys that only some families have.
        normalization: of `ModelSpec`.
        names: of its weights; None for a family that is only counted.
    """

    gated: bool
    keys: Mapping[str, str]
    normalization: str = "RMSNorm"
    names: NameTable | None = None

    def read(self, config: Any) -> ModelSpec:
        """The spec of a config of this family."""
        hidden = int(config.hidden_size)
        heads = _first(config, "num_attention_heads", "num_heads")
        return ModelSpec(
            family=config.model_type,
            hidden_size=hidden,
            ffn_size=_first(config, "intermediate_size", default=4 * hidden),
            layers=_first(config, "num_hidden_layers", "num_layers"),
            heads=heads,
            kv_heads=_first(config, "num_key_value_heads", default=heads),
            head_dim=_first(config, "head_dim", default=hidden // heads),
            vocabulary=config.vocab_size,
            normalization=self.normalization,
            activation=_first(config, "hidden_act", "activation_function"),
            gated=self.gated,
            tied=bool(config.tie_word_embeddings),
            padding=getattr(config, "pad_token_id", None),
            initializer_range=config.initializer_range,
            rotary=dict(getattr(config, "rope_parameters", None) or {}),
            max_positions=config.max_position_embeddings,
            windows=_windows(config),
            **{field: getattr(config, key) for field, key in self.keys.items()},
        )


def _first(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these keys that is there and not None: families name the same number differently."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def _windows(config: Any) -> tuple[int | None, ...]:
    """Models that mix windows and full attention list their layers: `layer_types` in most, `attention_layers` in GPT-Neo."""
    window = _first(config, "sliding_window", "window_size")
    kinds: Sequence[str] | None = _first(config, "layer_types", "attention_layers")
    if kinds is None:
        return (window,) * _first(config, "num_hidden_layers", "num_layers")
    return tuple(window if kind in ("sliding_attention", "local") else None for kind in kinds)


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

_RMS = {"norm_eps": "rms_norm_eps"}
_DROPOUT = {"attention_dropout": "attention_dropout"}
_BIASES = {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_EXPERTS = {"experts": "num_local_experts", "visited": "num_experts_per_tok"}

FAMILIES: dict[str, Family] = {
    "llama": Family(gated=True, keys=_RMS | _DROPOUT | _BIASES, names=_LLAMA_NAMES),
    "mistral": Family(gated=True, keys=_RMS | _DROPOUT, names=_LLAMA_NAMES),
    "mixtral": Family(gated=True, keys=_RMS | _EXPERTS),
    "qwen2": Family(gated=True, keys=_RMS),
    "qwen3": Family(gated=True, keys=_RMS),
    "gpt_neox": Family(gated=False, keys={"norm_eps": "layer_norm_eps"}, normalization="LayerNorm"),
    "gpt_neo": Family(gated=False, keys={"norm_eps": "layer_norm_epsilon"}, normalization="LayerNorm"),
}
"""By Hugging Face's `model_type`."""

DECODER_FAMILIES = tuple(kind for kind, family in FAMILIES.items() if family.names is not None)
"""Those that Octavo's decoder computes."""


def spec_of(config: Any) -> ModelSpec:
    """The spec of a Hugging Face config, for Octavo's decoder or for counting; an InputError for an unknown `model_type`."""
    kind = str(getattr(config, "model_type", None))
    if kind not in FAMILIES:
        raise unknown("model family", kind, FAMILIES)
    return FAMILIES[kind].read(config)


def decoder_spec(config: Any) -> tuple[ModelSpec | None, str]:
    """The spec of a config that Octavo's decoder computes, or None and the reason why the model keeps its own code."""
    kind = config.model_type
    if kind not in DECODER_FAMILIES:
        return None, f"no decoder for the family {kind!r}"
    spec = spec_of(config)
    if (spec.activation, spec.gated) not in ACTIVATIONS:
        return None, f"hidden_act = {spec.activation!r} is not one of {', '.join(name for name, _ in ACTIVATIONS)}"
    rope = spec.rotary.get("rope_type", "default")
    if rope not in ROPE_TYPES:
        return None, f"rope_type = {rope!r} is not one of {', '.join(ROPE_TYPES)}"
    return spec, ""
