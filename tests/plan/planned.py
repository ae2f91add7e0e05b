"""Setups of the plan of memory, and the bytes that autograd saves of a model."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import GPTNeoXConfig, LlamaConfig, Phi3Config, Qwen2Config, Qwen3Config

from octavo.collectives.blocks import local_of
from octavo.fp8 import checkpoints
from octavo.fp8.autocast import fp8_autocast, microbatch
from octavo.fp8.recipe import RECIPES
from octavo.fp8.scaling import states_of
from octavo.kernels.attention import cached as attention_cached
from octavo.kernels.attention import pieces
from octavo.plan import saved
from octavo.plan.saved import BlockRecipes, Setup

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96, "max_position_embeddings": 64}
STACK = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
CONFIG = LlamaConfig(**STACK, **SIZES)
_HEADS = {"num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 64}
FAMILIES = {
    "neox": GPTNeoXConfig(**STACK, **_HEADS),
    "neox serial": GPTNeoXConfig(**STACK, **_HEADS, use_parallel_residual=False, attention_bias=False),
    "qwen2": Qwen2Config(**STACK, **SIZES),
    "qwen3": Qwen3Config(**STACK, **SIZES),
    "phi3": Phi3Config(**STACK, **_HEADS, pad_token_id=None),
}


def setup_of(spec, batch, length, recipe=None, **others):
    blocks = (BlockRecipes(*(recipe,) * 4),) * spec.layers if recipe else ()
    return Setup(spec, saved.parameters(spec), batch, length, blocks=blocks, **others)


def in_checkpoint():
    return checkpoints.innermost() is not None


def saved_bytes(model, recipe, documents, first):
    """Bytes that autograd saves in a forward without those of parameters, and bytes of cached FP8 weights.

    A storage counts once; the two layouts of an FP8 matrix count apart, which on a CPU alone may share a storage.
    """
    ids = torch.randint(0, 96, (2, 48))
    positions = torch.arange(24).repeat(2)[None].expand(2, -1) if documents else None
    own = {local_of(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}
    kept, results = {}, []

    def once(compute):
        results.append(attention_cached.once(compute))
        return results[-1]

    def pack(tensor):
        layout = tuple(tensor.shape) if tensor.itemsize == 1 else ()
        kept.setdefault((tensor.untyped_storage().data_ptr(), layout), tensor)
        return tensor

    context = contextlib.nullcontext() if first is None else microbatch(first=first)
    precision = fp8_autocast(enabled=recipe is not None, fp8_recipe=RECIPES[recipe]() if recipe else None)
    # Results that selective recomputation keeps are not autograd's. Under hooks float32 weights are cast twice.
    unseen = mock.patch.object(checkpoints, "has_hooks", in_checkpoint)
    with mock.patch.object(pieces, "once", once), context, precision, unseen, saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, position_ids=positions)
    caches = [state.weight_cache for _, state in states_of(model) if state.weight_cache is not None]
    cached = [tensor for cache in caches for tensor in cache if tensor is not None]
    own |= {tensor.untyped_storage().data_ptr() for tensor in cached}
    whole = (t.nbytes if layout else t.untyped_storage().nbytes() for (p, layout), t in kept.items() if p not in own)
    return sum(whole) + sum(t.nbytes for result in results for t in result), sum(t.nbytes for t in cached)
