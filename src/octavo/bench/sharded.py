"""Entries of the sharded suite: models sharded over all ranks, with float32 master weights.

Every entry gathers weights block by block in bfloat16 (Octavo's FP8 layers in FP8), sums gradients in float32 and runs AdamW on
its own shards. Each rank has its own tokens. Builders need a process group (`octavo.init`). The peer is sharded like
torchtitan: FSDP2 around each compiled block, around the embedding, and around norm and head together; the loss is compiled, so
float32 logits (8.4 GB for 16,384 tokens) exist only inside a kernel.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from octavo.bench.cases import Case
from octavo.bench.peers import SEED, Entry, Training, build_octavo
from octavo.bench.plain import STD, PlainLlama, next_token_loss
from octavo.parallel.deferred_init import CounterInit, materialise
from octavo.parallel.world import state


def build_plain_sharded(case: Case, device: torch.device, compiled: bool, *, seed: int = SEED) -> Training:
    """The plain PyTorch model over all ranks, filled shard by shard."""
    with torch.device("meta"):
        model = PlainLlama(case.spec)
    if compiled:  # inside FSDP2's hooks; `fullgraph`, so that no unnoticed graph break slows the peer
        for part in (*model.model.layers, model.model.norm):
            part.forward = torch.compile(part.forward, fullgraph=True)
        model.loss = torch.compile(next_token_loss, fullgraph=True)
    assert state.mesh is not None
    # Groups of parameters: each is gathered while the one before computes.
    how: dict[str, Any] = {
        "mesh": state.mesh["hybrid_shard"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    head: list[nn.Module] = []
    if not case.spec.tied:  # a tied matrix stays gathered with the root, since it is used first and last
        fully_shard(model.model.embed_tokens, **how)
        head = [model.model.norm, model.lm_head]
    for block in model.model.layers:
        fully_shard(block, **how)
    if head:  # backward begins with these: freed, they would be gathered again at once
        fully_shard(head, reshard_after_forward=False, **how)
    fully_shard(model, **how)
    # FSDP2 prefetches in backward. In forward a group is gathered early only if the host runs ahead, so prefetch is explicit.
    order = [module for module in (*model.model.layers, *head[:1]) if isinstance(module, FSDPModule)]
    for first, second in pairwise(order):
        first.set_modules_to_forward_prefetch([second])
    return Training(materialise(model, device, CounterInit(seed, STD)), model)


_float32 = partial(build_octavo, params_dtype=torch.float32)
_defaults = partial(_float32, recipe="delayed", head="backward", fast="input_gradient")

SHARDED: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("octavo-bf16", "bf16", "bf16", _float32),
        Entry("octavo-delayed", "fp8", "bf16", partial(_float32, recipe="delayed")),
        Entry("octavo-delayed-fast-input-fp8-head-backward", "fp8", "fp8", _defaults, head_forward="bf16"),
        Entry("octavo-current", "fp8", "bf16", partial(_float32, recipe="current")),
        Entry("torch-bf16", "bf16", "bf16", build_plain_sharded),
    )
}

CONTEXT: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("octavo-bf16", "bf16", "bf16", _float32),
        *(
            Entry(f"octavo-delayed{suffix}", "fp8", "fp8", partial(_defaults, strategy=strategy), head_forward="bf16")
            for suffix, strategy in (("", "all_gather"), ("-p2p", "p2p"), ("-a2a", "a2a"))
        ),
    )
}
"""Entries of the context suite: Octavo's defaults, with each exchange of keys and values."""
