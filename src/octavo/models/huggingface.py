"""Hugging Face's interface of Octavo's decoder: the methods that loops, Trainer, Accelerate and PEFT use.

Cheap and exact methods are here. Generation needs a KV cache, so `generate` copies the weights to a transformers model: exact
by construction, at the cost of one copy of the weights a call. Every other name raises an error with the alternative, and
`hasattr` is False for it, as for any module. Arguments of the forward with a no-op value are accepted, others are refused by
name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.collectives.blocks import parameters_of, shape_of
from octavo.errors import InputError, nearest
from octavo.models.convert import (
    check_decoder,
    check_names_and_shapes,
    check_tie,
    conversion,
    is_tied,
    to_huggingface,
    write_pretrained,
)
from octavo.models.spec import ModelSpec
from octavo.models.weight_files import InMemoryWeights
from octavo.nn.derived import derive, written_class

_OWN = 'octavo.transform(model, blocks="own") runs Hugging Face\'s code'
_BEFORE = "call it on Hugging Face's model, before octavo.transform"
_RECOMPUTE = "octavo.transform(model, recompute=True) recomputes activations in backward"
_CHECKPOINTING = f"{_RECOMPUTE}; leave gradient_checkpointing = False in TrainingArguments, SFTConfig and DPOConfig"
_PEFT = "add adapters before octavo.transform: octavo.transform(get_peft_model(model, config))"
_CACHE = "it has no cache of keys and values: model.generate(...) generates with a cache, by a transformers model"
_DOCUMENTS = "only position_ids tell where documents begin (DataCollatorWithFlattening(return_flash_attn_kwargs=False))"
_COPY = "octavo.to_huggingface(model) returns a transformers model with these weights"
_KERNELS = f"Octavo chooses the kernels of its attention, and {_OWN}"
_RANKS = "octavo.init shards a model over ranks"
_DEFAULT = f"{_OWN}, and {_COPY}"

OFFERED = (
    *("accepts_loss_kwargs", "add_model_tags", "base_model", "can_generate", "config", "config_class", "device", "dtype"),
    *("generate", "generation_config", "get_input_embeddings", "get_output_embeddings", "get_parameter_or_buffer"),
    *("is_activation_checkpointing", "is_gradient_checkpointing", "is_custom_code", "is_remote_code", "loss_type"),
    *("main_input_name", "model_tags", "name_or_path", "num_parameters", "push_to_hub", "save_pretrained", "tie_weights"),
)
"""Names of Hugging Face's models that Octavo's decoder supports."""
INSTEAD = {
    **dict.fromkeys(("resize_token_embeddings", "set_input_embeddings", "set_output_embeddings", "init_weights"), _BEFORE),
    "from_pretrained": "octavo.transform(AutoModelForCausalLM.from_pretrained(folder))",
    **dict.fromkeys(("gradient_checkpointing_enable", "activation_checkpointing_enable"), _CHECKPOINTING),
    **dict.fromkeys(
        ("gradient_checkpointing_disable", "activation_checkpointing_disable"), f"without {_RECOMPUTE} nothing is recomputed"
    ),
    "prepare_inputs_for_generation": f"{_CACHE}. For PEFT, {_PEFT}",
    **dict.fromkeys(
        ("add_adapter", "load_adapter", "set_adapter", "enable_adapters", "disable_adapters", "delete_adapter"), _PEFT
    ),
    **dict.fromkeys(("active_adapters", "get_adapter_state_dict", "enable_peft_hotswap", "enable_input_require_grads"), _PEFT),
    **dict.fromkeys(("set_attn_implementation", "set_experts_implementation", "set_use_kernels", "use_kernels"), _KERNELS),
    **dict.fromkeys(("tp_plan", "tp_size", "fsdp_plan", "fsdp_size", "ep_plan", "pp_plan"), _RANKS),
    **dict.fromkeys(("supports_tp_plan", "supports_pp_plan", "supports_context_parallel"), _RANKS),
    "get_decoder": f"model.base_model(...) returns the states after its last norm; {_COPY}",
    "loss_function": "its loss is the cross entropy of its forward with labels; for another, give it the logits",
    "model": f"its blocks are model.layers, with the names of octavo.describe(model); {_COPY}",
    "lm_head": f"its output head is model.head; {_COPY}",
    **dict.fromkeys(("past_key_values", "cache"), _CACHE),
}
"""Names of Hugging Face's models that the decoder lacks → what to do instead; `_DEFAULT` for the others."""
_ARGUMENTS = {
    **dict.fromkeys(("use_cache", "past_key_values", "cache"), _CACHE),
    "inputs_embeds": f"it takes input_ids; {_OWN}, which takes both",
    "output_router_logits": f"moe={{'moe_load_balancing': 'aux_loss'}} of octavo.transform balances the experts, {_OWN}",
    "output_attentions": f"its attention never stores the probabilities; {_OWN}, which can",
    "token_type_ids": "it has no embedding of token types",
    "cache_position": _CACHE,
    "is_causal": f"its attention is causal; {_OWN}",
    "ignore_index": "a label of -100 is not predicted; set the labels to it",
    "shift_labels": "it shifts labels itself; give labels, the tokens",
    "num_logits_to_keep": "its name is logits_to_keep",
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"), _DOCUMENTS),
    "logits_to_keep": "with labels it returns only the loss; leave labels or logits_to_keep out",
}
"""Unsupported `forward` arguments → what to do instead. None, False and 0 are accepted."""
_DEFAULTS = {"is_causal": True, "ignore_index": -100}
"""Arguments with another no-op value → that value."""


_SHARD_BYTES = 50 * 10**9
"""Default size of a file of `save_pretrained`, as in transformers: Trainer resumes from one file."""
IGNORED = -100
"""The label of a position that is not predicted, as in Hugging Face."""


class NotInOctavo(InputError, AttributeError):
    """A name that Hugging Face's models have and Octavo's decoder lacks; the message says what to do instead."""


def refuse_arguments(arguments: Mapping[str, Any], behind: Sequence[Any] = ()) -> None:
    """Raise an InputError for an unsupported argument of a decoder's forward, unless it has a no-op value.

    behind: positional arguments after position_ids.
    """
    if any(value is not None for value in behind):
        raise InputError(
            f"Octavo's decoder got {3 + len(behind)} positional arguments, and takes only input_ids, attention_mask and "
            "position_ids: pass the others by keyword, labels=labels."
        )
    for name, value in arguments.items():
        if not _asks(name, value):
            continue
        guess = nearest(name, ("input_ids", "attention_mask", "position_ids", "labels", "num_items_in_batch"))
        way = _ARGUMENTS.get(name) or (f"did you mean {guess}?" if guess else _OWN)
        shown = f" = {value!r}" if isinstance(value, bool | int | str) else ""
        raise InputError(f"Octavo's decoder does not take {name}{shown}: {way.rstrip('.')}{'' if way.endswith('?') else '.'}")


def _asks(name: str, value: Any) -> bool:
    """True if an argument of this value changes what a forward computes or returns."""
    if value is None or not isinstance(value, int):
        return value is not None
    if name in _DEFAULTS:
        return value != _DEFAULTS[name]
    return value is not False and (value != 0 or name not in _ARGUMENTS)


def check_inputs(
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    labels: Tensor | None,
    vocabulary: int,
) -> Tensor:
    """Check the inputs, [samples, tokens], and return `input_ids`; an InputError if one is missing or shapes disagree.

    Ids are checked only on a CPU: on a GPU that would synchronise.
    """
    if not isinstance(input_ids, Tensor):
        raise InputError(f"input_ids is {_kind(input_ids)}: give the decoder token ids, int64 [samples, tokens].")
    shape = tuple(input_ids.shape)
    if len(shape) != 2 or not input_ids.numel():
        raise InputError(f"input_ids has shape {list(shape)}: it is [samples, tokens], with at least one token.")
    shapes = {"attention_mask": (shape,), "position_ids": (shape, (1, shape[1])), "labels": (shape,)}
    tensors = {"attention_mask": attention_mask, "position_ids": position_ids, "labels": labels}
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise InputError(f"{name} is {_kind(tensor)}: give a tensor [samples, tokens].")
        if tensor is not None and tuple(tensor.shape) not in shapes[name]:
            raise InputError(f"{name} has shape {list(tensor.shape)}, and input_ids {list(shape)}: give both the same.")
    _check_ids("input_ids", input_ids, vocabulary)
    if labels is not None:
        _check_ids("labels", labels, vocabulary, ignored=IGNORED)
    if position_ids is not None and position_ids.is_floating_point():
        raise InputError(f"position_ids is {position_ids.dtype}: positions are whole numbers, torch.int64.")
    return input_ids


def _kind(value: object) -> str:
    return "missing" if value is None else f"{type(value).__name__}, not a tensor"


def _check_ids(name: str, ids: Tensor, vocabulary: int, ignored: int | None = None) -> None:
    if ids.dtype != torch.int64:
        raise InputError(f"{name} is {ids.dtype}: token ids are torch.int64.")
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        return
    unknown = (ids < 0) | (ids >= vocabulary)
    nothing = ""
    if ignored is not None:
        unknown &= ids != ignored
        nothing = f", or {ignored} where nothing is predicted"
    if unknown.any():
        at = unknown.nonzero()[0].tolist()
        raise InputError(f"{name}{at} = {ids[tuple(at)].item()}: it is a token id from 0 to {vocabulary - 1}{nothing}.")


def refuse_other_balancing(config: Any, made_with: bool | None, argument: bool | None, balance: float) -> None:
    """Raise an InputError if the config or a forward requests a balancing loss other than the decoder's.

    made_with: the config's `output_router_logits` when it was built. argument: a forward's. balance: the loss's coefficient.
    """
    now = getattr(config, "output_router_logits", None)
    if now != made_with:
        asked = f"config.output_router_logits was {made_with} when Octavo's decoder was built and is now {now}"
    elif argument is False and balance:
        asked = f"output_router_logits = False, but Octavo's decoder was built with a balancing loss ({balance:g} x)"
    else:
        return
    value = "aux_loss" if now and argument is not False else "none"
    raise InputError(
        f"{asked}: its loss does not change. Set config.output_router_logits before octavo.transform, or give"
        f" moe={{'moe_load_balancing': '{value}'}} there."
    )


class PretrainedInterface(nn.Module):
    """Octavo's decoder as a `transformers.PreTrainedModel`: supported methods, and errors for the others."""

    accepts_loss_kwargs = True
    """Trainer passes `num_items_in_batch`, so that micro-batches with different numbers of targets count by their targets."""
    loss_type = "ForCausalLM"
    """Trainer then excludes each sequence's first token from the number of targets."""
    main_input_name = "input_ids"
    config: Any
    spec: ModelSpec
    embedding: nn.Embedding
    head: nn.Linear
    data_group: dist.ProcessGroup | None
    model_tags: list[str] | None = None
    """Tags of the model card."""
    generation_config: Any = None
    """The generation config of the transformed Hugging Face model, exported with the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_drop_tied)
        self.register_load_state_dict_pre_hook(_add_tied)
        self.register_load_state_dict_post_hook(_tie_again)

    def __getattr__(self, name: str) -> Any:
        if name in INSTEAD or isinstance(getattr(type(self), name, None), _Absent):
            raise NotInOctavo(f"Octavo's decoder has no {name}: {INSTEAD.get(name, _DEFAULT)}.")
        return super().__getattr__(name)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """PyTorch's method, which also accepts an exported folder's tensors; it cannot assign to sharded parameters."""
        if assign and any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            raise InputError(
                "load_state_dict(assign=True): this model is sharded, and its shards cannot be replaced. Leave assign out."
            )
        if conversion(self.spec).names("embedding.weight")[0] in state_dict:
            state_dict = self.load_hugging_face(state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def _get_name(self) -> str:
        """The name of transformers' class: Trainer shifts labels for its label smoothing by it."""
        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.spec.family]

    def __repr__(self) -> str:
        return super().__repr__().replace(self._get_name(), type(self).__name__, 1)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.embedding.weight.device

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Linear:
        """The output head."""
        return self.head

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """The number of parameters, a tied one counted once; for a sharded or split model, over all ranks."""
        blocks = parameters_of(self)
        return sum(
            math.prod(shape_of(parameter, blocks))
            for parameter in blocks
            if (parameter.requires_grad or not only_trainable)
            and not (exclude_embeddings and parameter is self.embedding.weight)
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, arguments included, by a transformers model with these weights, in their dtype.

        FP8 is not used. A copy of the weights lives while it runs; of a sharded model each rank has a whole copy, and all
        ranks call it. For samples during training see `octavo.run.sample.sample_text`.
        """
        return to_huggingface(self).generate(*args, **kwargs)

    def can_generate(self) -> bool:
        """True."""
        return True

    @property
    def name_or_path(self) -> str:
        """The source of the config, a folder or a name on the Hub."""
        return str(getattr(self.config, "_name_or_path", ""))

    @property
    def is_activation_checkpointing(self) -> bool:
        """False: Hugging Face's setting does not control recomputation of Octavo's blocks."""
        return False

    is_gradient_checkpointing = is_activation_checkpointing

    def add_model_tags(self, tags: list[str] | str) -> None:
        """Tags of the model card that `push_to_hub` writes, in addition to existing ones."""
        new = [tags] if isinstance(tags, str) else tags
        self.model_tags = list(dict.fromkeys([*(self.model_tags or ()), *new]))

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: head and embedding are tied from the start if the config says so.

        Raises:
            InputError: head or embedding has been replaced.
        """
        check_tie(self)

    @property
    def base_model(self) -> Callable[..., BaseModelOutput]:
        """The decoder without its head: takes the forward's arguments and returns `.last_hidden_state`."""
        return self.last_hidden_state

    def last_hidden_state(self, *args: Any, **kwargs: Any) -> BaseModelOutput:
        """States after the last norm, in the dtype of the head's weight, [B, T, hidden]; arguments as of the forward."""
        raise NotImplementedError

    def load_hugging_face(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tensors of an exported folder to Octavo's.

        Raises:
            InputError: they are not the complete weights of the config's model.
        """
        from octavo.models.published import PublishedWeights, causal_lm_on_meta

        weights, way = PublishedWeights(InMemoryWeights(tensors), causal_lm_on_meta(self.config)), conversion(self.spec)
        check_names_and_shapes(self, weights)
        names = [name for name in self.state_dict() if name not in way.tied]
        return {name: way.join(name, tuple(weights.read(theirs) for theirs in way.names(name))) for name in names}

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **others: Any,
    ) -> None:
        """Write the model for `from_pretrained`; a model in the folder is replaced, other files stay. All ranks call it.

        Raises:
            InputError: the folder cannot be written, an argument is unknown, or the folder would load as another model.
        """
        nothing = {"safe_serialization": True, "save_original_format": True, "save_peft_format": True}
        if asked := [name for name, value in others.items() if value not in (None, False) and nothing.get(name) != value]:
            way = "push_to_hub(repository)" if "push_to_hub" in asked else "save_pretrained(folder) without it"
            raise InputError(f"save_pretrained of Octavo's decoder does not take {asked[0]}: call model.{way}.")
        check_decoder(self)
        if not is_main_process:
            return
        entries = self.state_dict()
        if state_dict is not None and state_dict.keys() - {"head.weight"} != entries.keys() - {"head.weight"}:
            raise InputError(
                "save_pretrained(state_dict=…): the tensors are not those of model.state_dict(), and a folder with a part of a "
                "model cannot be loaded. Leave state_dict out."
            )
        tensors = {name: tensor.detach() for name, tensor in (state_dict or entries).items() if name in entries}
        write_pretrained(
            tensors, self.config, folder, generation=self.generation_config, replace=True, shard_bytes=_SHARD_BYTES
        )

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `push_to_hub`, arguments and tags included, of a copy of the weights."""
        theirs: Any = to_huggingface(self)
        theirs.model_tags = self.model_tags
        return theirs.push_to_hub(*args, **kwargs)


class _Absent:
    """Hides a name of `PreTrainedModel` on a decoder: `__getattr__` raises the error."""

    def __get__(self, model: object, owner: type) -> Any:
        if model is None:
            return self
        raise AttributeError


def pose_as_pretrained(model: PretrainedInterface) -> None:
    """Make a decoder an instance of `transformers.PreTrainedModel` too: Trainer calls `save_pretrained` only on one.

    Names of `PreTrainedModel` that are not `OFFERED` stay absent.
    """
    from transformers import PreTrainedModel

    base, theirs = type(model), vars(nn.Module).keys()
    members: dict[str, Any] = {"__reduce_ex__": _reduce}
    for name in dir(PreTrainedModel):
        if name.startswith("_") or name in OFFERED:
            continue
        if name in theirs:  # `to`, `train` and others, which transformers changes
            members[name] = getattr(base, name)
        elif callable(getattr(PreTrainedModel, name)) or isinstance(getattr(PreTrainedModel, name), property):
            members[name] = _Absent()
    members |= {"dtype": None, "config_class": type(model.config)}  # an attribute of the decoder has its dtype
    derive(model, members, (PreTrainedModel,))


def _reduce(self: Any, protocol: Any) -> Any:
    """For `pickle` and `copy`, which find a class by name: rebuilds the original class, then extends it."""
    return _posing, (written_class(self), self.config, vars(self).copy())


def _posing(cls: type[PretrainedInterface], config: Any, state: dict[str, Any]) -> PretrainedInterface:
    model = cls.__new__(cls)
    model.__setstate__(state)
    pose_as_pretrained(model)
    return model


def _drop_tied(model: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    """Leave a tied weight once in a state dict: safetensors, and hence Trainer, refuses two names for the same memory.

    Both names stay with `keep_vars=True`, since the caller sees the tie, and if the caller has untied them.
    """
    assert isinstance(model, PretrainedInterface)
    if is_tied(model) and state.get(f"{prefix}head.weight") is not model.head.weight:
        state.pop(f"{prefix}head.weight", None)


def _add_tied(model: nn.Module, state: dict[str, Tensor], prefix: str, *others: Any) -> None:
    """Accept a state dict with a tied weight only under the embedding's name."""
    assert isinstance(model, PretrainedInterface)
    if is_tied(model) and f"{prefix}embedding.weight" in state:
        state.setdefault(f"{prefix}head.weight", state[f"{prefix}embedding.weight"])


def _tie_again(model: nn.Module, keys: Any) -> None:
    """Restore the tie after a load with `assign=True`, which creates two parameters from one tensor."""
    assert isinstance(model, PretrainedInterface)
    head, embedding = model.head.weight, model.embedding.weight
    if not model.spec.tied or head is embedding or head.is_meta or head.shape != embedding.shape:
        return
    if isinstance(head, DTensor) or isinstance(embedding, DTensor):  # nothing was assigned
        return
    if head.untyped_storage().data_ptr() == embedding.untyped_storage().data_ptr():
        model.head.weight = embedding
