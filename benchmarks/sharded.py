"""Entries of the sharded suite: models sharded over all ranks, with float32 master weights.

Every entry gathers weights block by block in bfloat16 (Octavo's FP8 layers in FP8), sums gradients in float32 and runs AdamW on
its shards. Each rank has different tokens. Builders need a process group (`octavo.init`). Peers are sharded like
torchtitan: FSDP2 around each compiled block, around the embedding, and around norm and head together; the loss is compiled, so
float32 logits (8.4 GB for 16,384 tokens) exist only inside a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from benchmarks import te_attention
from benchmarks.cases import Case
from benchmarks.peers import ADAMW, BLOCKS, SEED, Entry, Training, build_octavo, te_entry
from benchmarks.plain import STD, PlainDecoder, next_token_loss
from benchmarks.vision.models import Around
from octavo.errors import InputError
from octavo.fp8.scaling import states_of
from octavo.parallel.deferred_init import CounterInit, materialise
from octavo.parallel.world import state


def build_plain_sharded(case: Case, device: torch.device, compiled: bool, *, seed: int = SEED) -> Training:
    """The plain PyTorch model over all ranks, filled shard by shard."""
    with torch.device("meta"):
        model = PlainDecoder(case.spec)
    _compile_and_shard(model, case, compiled)
    return Training(materialise(model, device, CounterInit(seed, STD)), model)


def build_torchao_sharded(case: Case, device: torch.device, compiled: bool, *, seed: int = SEED) -> Training:
    """The plain model with torchao's tensorwise FP8 in its blocks, weights gathered in FP8, all their amaxes in one reduction.

    Every rank makes the whole model and keeps its shard: torchao's weights are tensor subclasses, which cannot be filled later.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    torch.manual_seed(seed)
    with device:
        model = PlainDecoder(case.spec)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=device.type == "cpu")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: BLOCKS.match(name) is not None)
    _compile_and_shard(model, case, compiled)
    return Training(model, model, settle=partial(precompute_float8_dynamic_scale_for_fsdp, model))


def build_unjoined(case: Case, device: torch.device, on_gpu: bool, *, seed: int = SEED, **how: Any) -> Training:
    """Octavo over tensor ranks that join no amax."""
    trainer = build_octavo(case, device, on_gpu, seed=seed, **how)
    for _, layer_state in states_of(trainer.model):
        layer_state.tensor_group = None
    return trainer


def _compile_and_shard(model: PlainDecoder, case: Case, compiled: bool) -> None:
    if case.recompute:  # each layer whole, compiled together with its recomputation
        for layer in model.model.layers:
            layer.forward = _recomputed(layer.forward)
    if compiled:  # inside FSDP2's hooks; `fullgraph`, so that no unnoticed graph break slows the peer
        for part in (*model.model.layers, model.model.norm):
            part.forward = torch.compile(part.forward, fullgraph=True)
        model.loss = torch.compile(next_token_loss, fullgraph=True)
    # A tied matrix stays gathered with the root, since it is used first and last.
    ends = None if case.spec.tied else (model.model.embed_tokens, model.model.norm, model.lm_head)
    _shard(model, list(model.model.layers), ends)


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, with its inputs alone saved for backward."""

    def run(*inputs: Tensor) -> Tensor:
        found: Tensor = checkpoint(forward, *inputs, use_reentrant=False)
        return found

    return run


def build_te_sharded(
    case: Case,
    device: torch.device,
    compiled: bool,
    *,
    recipe: str | None = None,
    fp8_head: bool = False,
    flash_attention: bool = False,
    strategy: str = "p2p",
    params_dtype: torch.dtype = torch.float32,
    overlap: bool = False,
    seed: int = SEED,
) -> Training:
    """Transformer Engine's decoder over all ranks: FP8 by a recipe of `benchmarks.te.RECIPES`, weights gathered in bfloat16.

    fp8_head, flash_attention: as `benchmarks.peers.build_te` takes them. strategy: its exchange of keys and values. overlap:
    its userbuffers, of a case whose ranks hold parts of matrices (`benchmarks.te_tensor`). Under recomputation each layer is
    recomputed, attention included. Every rank creates the whole model and keeps its shard.

    Raises:
        InputError: its attention differs from the reference.
    """
    te_attention.choose(te_attention.FLASH if flash_attention else te_attention.CUDNN)
    from benchmarks import te

    torch.manual_seed(seed)
    how: dict[str, Any] = {"params_dtype": params_dtype, "recompute": bool(case.recompute), "compiled": compiled}
    how |= {"fp8": recipe is not None, "fp8_head": fp8_head}
    around = te.autocast(recipe, state.world_process_group)
    if case.tensor > 1:
        return _te_tensor(case, device, around, how | {"overlap": overlap})
    model = te.TeDecoder(case.spec, case.sequence_length, device, **how)
    if case.context > 1:
        assert state.cp_process_group is not None
        model.split_sequences(state.cp_process_group, strategy)
    errors = model.check_attention(case.batch)
    _shard(model, list(model.layers), None if case.spec.tied else (model.embed_tokens, model.norm, model.lm_head))
    return Training(model, model, around, attention_errors=errors)


def _te_tensor(case: Case, device: torch.device, around: Around, how: Mapping[str, Any]) -> Training:
    """Transformer Engine's decoder whose blocks' matrices are split over the tensor ranks, and sharded over the others."""
    from benchmarks.te_tensor import TeTensorDecoder

    assert state.tp_process_group is not None
    model = TeTensorDecoder(
        case.spec, case.sequence_length, device, state.tp_process_group, batch=case.batch * case.micro_batches, **how
    )
    errors = model.check_attention(case.batch)
    model.shard(state.shard_mesh if state.world_size > case.tensor else None)
    # PyTorch's fused AdamW takes the parameters of one mesh at once.
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": each} for each in by_mesh.values()], **ADAMW)
    optimizer.register_step_pre_hook(model.sum_norms)
    return Training(model, model, around, optimizer, attention_errors=errors)


def _shard(model: nn.Module, blocks: Sequence[nn.Module], ends: tuple[nn.Module, nn.Module, nn.Module] | None) -> None:
    """Groups of parameters: each is gathered while the one before computes. ends: embedding, norm and head."""
    if state.mesh is None:
        raise InputError(
            "peers of the suite sharded need 2 GPUs at least, and Octavo's entries alone run on one: use --gpus 2."
        )
    how: dict[str, Any] = {
        "mesh": state.mesh["hybrid_shard"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if ends is not None:
        fully_shard(ends[0], **how)
    for block in blocks:
        fully_shard(block, **how)
    if ends is not None:  # backward begins with these: freed, they would be gathered a second time at once
        fully_shard(list(ends[1:]), reshard_after_forward=False, **how)
    fully_shard(model, **how)
    # FSDP2 prefetches in backward. In forward a group is gathered early only if the host runs ahead, so prefetch is explicit.
    order = [module for module in (*blocks, *(() if ends is None else ends[1:2])) if isinstance(module, FSDPModule)]
    for first, second in pairwise(order):
        first.set_modules_to_forward_prefetch([second])


_float32 = partial(build_octavo, params_dtype=torch.float32)
_te_bf16_states = partial(build_te_sharded, params_dtype=torch.bfloat16)
_defaults = partial(_float32, recipe="delayed", head="backward", fast="input_gradient")

SHARDED: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("octavo-bf16", "bf16", "bf16", _float32),
        Entry("octavo-delayed", "fp8", "bf16", partial(_float32, recipe="delayed")),
        Entry("octavo-delayed-fast-input-fp8-head-backward", "fp8", "fp8", _defaults, head_forward="bf16"),
        Entry("octavo-delayed-fast-fp8-head", "fp8", "fp8", partial(_float32, recipe="delayed", head=True, fast=True)),
        # With the gathered weights of blocks cached from forward to backward, and freed, whatever the rule would choose. In FP8
        # they take two bytes a parameter of the blocks.
        *(
            Entry(
                f"octavo-delayed-fast-input-fp8-head-backward-{how}", "fp8", "fp8", partial(_defaults, reshard=reshard),
                head_forward="bf16",
            )
            for how, reshard in (("kept", False), ("freed", True))
        ),
        # Gradients are reduced in each micro-batch, and none stays unsharded between them.
        Entry(
            "octavo-delayed-fast-input-fp8-head-backward-sync-each", "fp8", "fp8", partial(_defaults, sync_each=True),
            head_forward="bf16",
        ),
        Entry("octavo-current", "fp8", "bf16", partial(_float32, recipe="current")),
        # Parameters and states of 16 bits: the shortest step.
        Entry(
            "octavo-delayed-fast-fp8-head-bf16-states", "fp8", "fp8",
            partial(build_octavo, recipe="delayed", head=True, fast=True),
        ),
        Entry(
            "octavo-delayed-fast-input-fp8-head-backward-bf16-states", "fp8", "fp8",
            partial(build_octavo, recipe="delayed", head="backward", fast="input_gradient"), head_forward="bf16",
        ),
        Entry("octavo-delayed-fast-bf16-states", "fp8", "bf16", partial(build_octavo, recipe="delayed", fast=True)),
        Entry("octavo-current-fast-bf16-states", "fp8", "bf16", partial(build_octavo, recipe="current", fast=True)),
        # The time without reductions of amaxes: each rank casts with local amaxes, and the numbers are wrong.
        Entry("octavo-current-unjoined-fast-bf16-states", "fp8", "bf16", partial(build_unjoined, recipe="current", fast=True)),
        Entry("octavo-bf16-states", "bf16", "bf16", build_octavo),
        Entry("torch-bf16", "bf16", "bf16", build_plain_sharded),
        Entry("ao-tensorwise", "fp8", "bf16", build_torchao_sharded, "torchao", families=("llama",)),
        te_entry("te-bf16", build_te_sharded),
        te_entry("te-delayed", build_te_sharded, "delayed"),
        te_entry("te-delayed-flash-attention", build_te_sharded, "delayed", flash=True),
        te_entry("te-delayed-fp8-head", build_te_sharded, "delayed", head=True),
        te_entry("te-delayed-flash-attention-fp8-head", build_te_sharded, "delayed", head=True, flash=True),
        te_entry("te-bf16-states", _te_bf16_states, tensor=True),
        *(
            te_entry(
                f"te-delayed{kernel}{head}{overlap}-bf16-states", partial(_te_bf16_states, overlap=bool(overlap)),
                "delayed", head=bool(head), flash=bool(kernel), tensor=True, overlap=bool(overlap),
            )
            for kernel in ("", "-flash-attention")
            for head in ("", "-fp8-head")
            for overlap in ("", "-overlap")
        ),
    )
}  # fmt: skip

_EXCHANGES = (("", "all_gather"), ("-p2p", "p2p"), ("-a2a", "a2a"))
"""(suffix of an entry's name, exchange of keys and values)"""

CONTEXT: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("octavo-bf16", "bf16", "bf16", _float32),
        *(
            Entry(
                f"octavo-delayed{suffix}",
                "fp8",
                "fp8",
                partial(_defaults, strategy=strategy),
                head_forward="bf16",
                exchanges=bool(suffix),
            )
            for suffix, strategy in _EXCHANGES
        ),
        *(
            te_entry(
                f"te-delayed{kernel}{head}{suffix}",
                partial(build_te_sharded, strategy=strategy),
                "delayed",
                head=bool(head),
                flash=bool(kernel),
                exchanges=bool(suffix),
            )
            for kernel in ("", "-flash-attention")
            for head in ("", "-fp8-head")
            for suffix, strategy in _EXCHANGES
        ),
    )
}
"""Entries of the context suite: Octavo's defaults and Transformer Engine, with each exchange of keys and values."""
