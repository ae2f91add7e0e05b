"""Gathers whole weights of a sharded model for other libraries that write it, which never write a shard.

`save_pretrained` and `push_to_hub`, of transformers' models, of PEFT's and of others, assume one process. On a sharded model
all ranks call them, each weight is gathered to rank 0's host memory, and rank 0 runs the library's method with whole weights in
place of its shards. A tensor of `state_dict()` is a shard: it may be written to a checkpoint of PyTorch's, but not to a file
that looks like a whole model.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from octavo.collectives.blocks import parameters_of, shape_of, undeclared, with_block
from octavo.collectives.whole import whole_tensor
from octavo.errors import InputError
from octavo.nn.derived import derive
from octavo.parallel.coordination import writing_ranks
from octavo.process import process

WHOLE_STATE = (
    "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), called on every rank, gives rank 0 whole tensors"
)
"""A call that returns the weights of any sharded model under its names."""
_METHODS = ("save_pretrained", "push_to_hub")


def save_whole(model: nn.Module) -> None:
    """Make the methods that write a sharded model, or a module of it, gather whole weights first; all ranks call them.

    Also refuse to write one rank's shards by `torch.save` or safetensors.
    """
    root = weakref.ref(model)
    for module in model.modules():
        if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            module.register_state_dict_post_hook(_mark_shards)
        base = type(module)
        methods = {name: _gathered(getattr(base, name), root) for name in _METHODS if callable(getattr(base, name, None))}
        if methods:
            derive(module, methods)


def _gathered(method: Callable[..., Any], root: weakref.ref[nn.Module]) -> Callable[..., Any]:
    """A collective method: rank 0 runs `method` with whole weights and gets its result; other ranks get None."""

    @functools.wraps(method)
    def gathered(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        model = root()
        if model is not None:
            model.state_dict()  # FSDP2 puts its shards back in place
        blocks = parameters_of(self)
        sharded = {id(p): p for p in self.parameters() if blocks[p] is not None or isinstance(p, DTensor)}
        if process.writes_whole or not sharded:  # a nested call has whole weights already
            return method(self, *args, **kwargs)
        ranks = writing_ranks()
        arguments = inspect.signature(method).bind(self, *args, **kwargs).arguments
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        wanted = ranks.on_rank_0(lambda: [names[key] for key in _needed(self, sharded, arguments)])
        whole: dict[int, nn.Parameter] = {}
        for key, parameter in sharded.items():
            if names[key] in wanted:
                gathered = whole_tensor(with_block(parameter.detach(), blocks[parameter]))
                if ranks.rank == 0:
                    whole[key] = nn.Parameter(gathered.cpu(), parameter.requires_grad)
                del gathered
        results: list[Any] = []

        def write() -> None:
            with _in_place(self, whole), _marked():
                results.append(method(self, *args, **kwargs))

        ranks.on_rank_0(write)
        return results[0] if results else None

    return gathered


def _needed(model: Any, sharded: Mapping[int, nn.Parameter], arguments: Mapping[str, Any]) -> Collection[int]:
    """The sharded parameters, by `id`, that a method reads; for a model with PEFT's adapters only those and embeddings."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return sharded
    adapters = arguments.get("selected_adapters") or list(model.peft_config)
    if any(name not in model.peft_config or model.peft_config[name].is_prompt_learning for name in adapters):
        return sharded  # prompts are computed by modules of the model
    blocks = parameters_of(model)
    empty = {key: _empty(parameter, shape_of(parameter, blocks)) for key, parameter in sharded.items()}
    keys = {id(parameter): key for key, parameter in empty.items()}
    needed: set[int] = set()
    with _in_place(model, empty):
        for name in adapters:
            state = model.state_dict(keep_vars=True)
            adapter_state = peft.get_peft_model_state_dict(model, dict(state), adapter_name=name, save_embedding_layers=False)
            if any(tensor.is_meta and id(tensor) not in keys for tensor in adapter_state.values()):
                return sharded  # computed of others
            needed |= {keys[id(tensor)] for tensor in adapter_state.values() if id(tensor) in keys}
        finders = (getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
        ends = [find() for find in finders if callable(find)]  # it may write them too
        parameters = {id(parameter) for layer in ends if layer is not None for parameter in layer.parameters()}
        needed |= {keys[key] for key in parameters & keys.keys()}
    return needed


def _empty(parameter: nn.Parameter, shape: tuple[int, ...]) -> nn.Parameter:
    """A parameter of this shape without storage."""
    return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)


@contextlib.contextmanager
def _in_place(model: nn.Module, others: Mapping[int, nn.Parameter]) -> Iterator[None]:
    """Replace a model's parameters by others, by `id`; a tied one in each place."""
    slots = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in others
    ]
    with undeclared([(module, name) for module, name, _ in slots]):
        try:
            for module, name, parameter in slots:
                module._parameters[name] = others[id(parameter)]
            yield
        finally:
            for module, name, parameter in slots:
                module._parameters[name] = parameter


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    process.writes_whole = True
    try:
        yield
    finally:
        process.writes_whole = False


def _mark_shards(module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Any) -> None:
    """Make the shards of a state dict raise an error in a pickle or a safetensors file."""
    for name in module._parameters:
        tensor = state.get(f"{prefix}{name}")
        if isinstance(tensor, DTensor) and not isinstance(tensor, nn.Parameter):  # not those of `keep_vars`
            refuse = functools.partial(_refuse_shard, f"{prefix}{name}", tensor.device_mesh.size())
            # `pickle` asks for the first, safetensors for the second.
            vars(tensor).update(__reduce_ex__=refuse, storage=refuse)


def _refuse_shard(name: str, size: int, *_: Any) -> NoReturn:
    raise InputError(
        f"{name} of state_dict() is a shard of {size} ranks, and a file of it would not be the whole model: octavo.save(path, "
        "model) writes a checkpoint, octavo.export(model, folder) and model.save_pretrained(folder) write whole weights, each "
        f"called on every rank. {WHOLE_STATE}."
    )
