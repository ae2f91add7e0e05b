"""Memory of a run: the estimate against the device's memory, settings that fit, and the message of an out-of-memory error.


Connects a checked run and `octavo.plan.memory`. Settings are tried in the order of their cost in speed (`COSTS`), on the given
ranks, on more, and with parameters in bfloat16: micro-batches, recomputation, offloading, chunks, gathering, and degrees. On a
CPU the estimate is for a GPU's kernels: reference kernels need more memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from octavo.config.degrees import composes, divisors
from octavo.config.effects import with_values
from octavo.config.recompute import levels_for
from octavo.dtypes import torch_dtype
from octavo.errors import InputError, OctavoError
from octavo.hardware import GIB, process_memory_limit, size, whole_gib
from octavo.kernels.experts.routes import TILE
from octavo.models.spec import ModelSpec
from octavo.parallel.context import check_context
from octavo.parallel.world import rank_variable
from octavo.plan.memory import PARTS, RANKS_OF_A_HOST, USABLE, Estimate, estimate
from octavo.plan.run import RunPlan
from octavo.plan.saved import BlockRecipes, Setup
from octavo.plan.sizes import MOST_RANKS
from octavo.plan.tensor import KEY as TENSOR
from octavo.plan.tensor import check_tensor
from octavo.run.resume import CHANGEABLE

CHUNKS = 8
"""Value tried for `train.mlp_chunks`: an eighth of an MLP's temporaries, and products of 16,384 tokens at full speed."""
_MATRICES = ("self_attention.qkv", "self_attention.proj")
_MLP, _EXPERTS = ("ffn.fc1", "ffn.fc2"), ("moe.experts.fc1", "moe.experts.fc2")
_CPU_FULL = re.compile(r"DefaultCPUAllocator: (can't allocate memory|not enough memory)")
_GPU_FULL = re.compile(r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure.*out of memory")  # not PyTorch's
_CONTEXT, _SYNC = "parallel.context_parallel_degree", "parallel.sync_each_micro_batch"
_SHARD = "parallel.hybrid_shard_degree"
COSTS: Mapping[Any, float] = {
    False: 0.0,
    "mlp": 0.05,
    "selective": 0.1,
    True: 0.2,  # `train.recompute`
    "chunks": 0.09,
    "reshard": 0.02,
    "micro-batch": 0.02,
    "micro-batches": 0.04,
    "sync": 0.02,  # per doubling of the micro-batches
    "shard": 0.03,
    "hosts": 0.05,
    "context": 0.04,
    "tensor": 0.05,
    "expert": 0.02,  # per doubling
}
"""Time that a setting adds to a step, as a share of it; for ranks and micro-batches per doubling.

They order settings, and are not printed. Measured with eight layers of Llama-3.1-8B at 32,768 tokens: recomputation, chunks
(`memory.json`, `memory-h100.json` in `benchmarks/results`) and gathering (`docs/results.md`). Degrees and micro-batches: their
additional traffic in proportion to gathering's; twice that if it leaves a host. Tensor ranks are a guess: above equally many
context ranks.
"""
_OFFLOADS: Mapping[Any, float] = {False: 0.3, "mlp": 0.2, "selective": 0.01, True: 0.01}
"""The cost of `train.offload`, by `train.recompute`: the fewer bytes are copied, the more of the copy is hidden."""
_ASKED = re.compile(r"[Tt]ried to allocate (?P<size>[\d.]+ \w+)")


@dataclass(frozen=True)
class Option:
    """Keys that make a run fit, possibly "ranks", and the estimate with them."""

    changes: Mapping[str, Any]
    estimate: Estimate

    def __str__(self) -> str:
        words = [f"{value} ranks" if key == "ranks" else f"{key} = {json.dumps(value)}" for key, value in self.changes.items()]
        host = f" and {size(self.estimate.host)} of host memory" if self.estimate.host else ""
        return f"{', '.join(words)}: {size(self.estimate.total)}{host}"


@dataclass(frozen=True)
class Memory:
    """Memory of a rank of a run.

    Attributes:
        estimate: estimate of the unchanged run.
        of_rank: bytes for one rank: the GPU's, or the CPU's memory divided by the ranks on this machine.
        fits: None if activations are unknown and the rest fits.
        options: the cheapest setting on these ranks, on the fewest ranks, and with bfloat16 parameters; or a shorter sequence
            if none of them suffices; empty for a run that fits.
    """

    estimate: Estimate
    of_rank: float
    fits: bool | None
    options: tuple[Option, ...]


def setup_of(plan: RunPlan) -> Setup:
    """The inputs of the memory estimate of a run."""
    config = plan.config
    spec = plan.spec
    blocks: tuple[BlockRecipes, ...] = ()
    if spec is not None and plan.recipe is not None:
        blocks = tuple(
            BlockRecipes(*(_recipe(plan, f"layers.{i}.{matrix}") for matrix in (*_MATRICES, *_mlp_of(spec, i))))
            for i in range(spec.layers)
        )
    muon = plan.muon
    history = 0 if plan.recipe is None or plan.recipe.history is None else plan.recipe.history.length
    return Setup(
        spec=spec,
        parameters=plan.parameters,
        frozen=plan.frozen,
        frozen_of_block=plan.frozen_of_block,
        adapter_rank=config.lora.rank or 0,
        expert_ranks=plan.expert_ranks,
        head_frozen=plan.head_frozen,
        stored=config.lora.rank is not None and config.lora.base == "fp8",
        micro_batch=plan.micro_batch,
        sequence_length=config.data.sequence_length,
        compute_bytes=plan.dtype.itemsize,
        params_bytes=plan.params_dtype.itemsize,
        blocks=blocks,
        head=False if plan.recipe is None else plan.fp8_head,
        recompute=config.train.recompute,
        mlp_chunks=config.train.mlp_chunks,
        offload=config.offloads and plan.hardware.kind == "cuda",
        horizon=config.parallel.activation_loading_horizon,
        accumulates=plan.accumulation > 1,
        documents=config.data.packing == "documents",
        world=plan.degrees.world,
        shard=plan.degrees.hybrid_shard,
        gather_bytes=torch_dtype(config.parallel.param_dtype or config.model.dtype).itemsize,
        reduce_bytes=torch_dtype(config.parallel.reduce_dtype).itemsize,
        reshard=plan.gathering.reshard,
        syncs=config.parallel.sync_each_micro_batch,
        late=plan.dtype == torch.float16,
        history=history,
        memory=whole_gib(plan.hardware.memory_gib) if plan.hardware.kind == "cuda" else None,
        context=plan.degrees.context,
        tensor=plan.degrees.tensor,
        expert=plan.degrees.expert,
        hidden=0 if muon is None else muon.elements,
        largest_hidden=0 if muon is None else muon.largest,
        largest_matrix=0 if muon is None else muon.square,
        row_tile=TILE if plan.hardware.kind == "cuda" else 1,
    )


def _mlp_of(spec: ModelSpec, layer: int) -> tuple[str, str]:
    """Names of the MLP's matrices in a block."""
    return _EXPERTS if spec.experts and layer not in spec.dense else _MLP


def _recipe(plan: RunPlan, name: str) -> str | None:
    """The name of a layer's recipe; None for no FP8."""
    layer = plan.layers[name]
    return None if layer.recipe is None or name in plan.excluded else layer.recipe.name


def memory_of(plan: RunPlan) -> Memory:
    """The estimate of a run compared with its device's memory, and settings that make it fit."""
    setup = setup_of(plan)
    needed, room = _estimate(plan, setup), _of_rank(plan)
    fits = _fits(needed, room)
    return Memory(needed, room, fits, tuple(_options(plan, setup, room)) if fits is False else ())


def _estimate(plan: RunPlan, setup: Setup) -> Estimate:
    """The estimate; with `train.compare_bf16` or `fp8.schedule` the larger of those with and without FP8."""
    estimates = [estimate(setup)]
    plain = dataclasses.replace(setup, blocks=(), head=False)
    if plan.config.fp8.schedule:  # in some steps weights are gathered in their dtype instead of FP8
        estimates.append(estimate(dataclasses.replace(plain, gather_bytes=max(setup.gather_bytes, setup.params_bytes))))
    if plan.config.train.compare_bf16:
        plain = dataclasses.replace(plain, history=0)
        if setup.reshard == plan.gathering.reshard:  # not set by an option: the other training resolves it separately
            plain = dataclasses.replace(plain, reshard=plan.gathering_without_fp8.reshard)
        estimates.append(estimate(plain))
    return max(estimates, key=lambda one: one.total)


def _of_rank(plan: RunPlan) -> float:
    """Bytes for a rank: its GPU's, or the CPU's memory divided by the ranks on this machine."""
    ranks = rank_variable("LOCAL_WORLD_SIZE", plan.degrees.world) if plan.hardware.kind == "cpu" else 1
    share = plan.hardware.memory_gib * GIB / max(1, ranks)
    limit = process_memory_limit() if plan.hardware.kind == "cpu" else None
    return share if limit is None else min(share, limit)


def _fits(needed: Estimate, room: float) -> bool | None:
    if not needed.complete:
        return None if needed.exact <= USABLE * room else False
    return needed.total <= USABLE * room


def _options(plan: RunPlan, setup: Setup, room: float) -> list[Option]:
    """The first setting that fits: on these ranks, on the fewest more, with bfloat16 parameters; else a shorter sequence."""

    def fits(needed: Estimate) -> bool:
        return _fits(needed, room) is not False

    options = [
        option
        for tried in (_on_these_ranks(plan, setup), _in_more_parts(plan, setup), _over_tensor_ranks(plan, setup))
        for option in _first(plan, tried, fits)
    ]
    if options and not any(_SYNC in option.changes for option in options):  # the smallest change of a run with accumulation
        options += _first(plan, _synced(setup), fits)
    if _on_gpu(plan):  # more ranks would share the memory of a CPU
        options += next((fitting for ranks in _on_more_ranks(plan, setup) if (fitting := _first(plan, ranks, fits))), [])
    if setup.params_bytes == 4 and plan.dtype != torch.float16:
        half = {"model.params_dtype": "bfloat16"}
        other = dataclasses.replace(plan, config=with_values(plan.config, half))
        smaller = dataclasses.replace(setup, params_bytes=2, reshard=other.gathering.reshard)
        options += _first(plan, [one.beside(half) for one in _on_these_ranks(other, smaller)], fits)
    return options or next((fitting for tried in _shorter(plan, setup) if (fitting := _first(plan, tried, fits))), [])


def _synced(setup: Setup) -> list[_Tried]:
    """The same run with gradients summed in each micro-batch, if it stores whole gradients and shards would be smaller."""
    if not setup.keeps_whole_gradients or setup.shard == 1:
        return []
    synced = dataclasses.replace(setup, syncs=True)
    return [_Tried(0.0, {_SYNC: True}, synced, (synced,))]


@dataclass(frozen=True)
class _Tried:
    """A setting that is tried.

    Attributes:
        cost: share of a step's time, from `COSTS`.
        changes: keys of the run that it changes.
        setup: the inputs with them.
        least: the same micro-batch on the same ranks with every saving of memory; if it does not fit, no other is tried.
    """

    cost: float
    changes: Mapping[str, Any]
    setup: Setup
    least: tuple[Setup, ...]

    def beside(self, changes: Mapping[str, Any], cost: float = 0.0) -> _Tried:
        """The same setting with other changes first."""
        return dataclasses.replace(self, changes={**changes, **self.changes}, cost=self.cost + cost)


def _first(plan: RunPlan, tried: Iterable[_Tried], fits: Callable[[Estimate], bool]) -> list[Option]:
    """The cheapest setting that fits; of two with equal cost the one with fewer changes."""
    possible: dict[int, bool] = {}
    tried = list(tried)  # holds each `least`
    for one in sorted(tried, key=lambda one: (round(one.cost, 6), len(one.changes))):
        if id(one.least) not in possible:
            possible[id(one.least)] = any(fits(_estimate(plan, least)) for least in one.least)
        if one.changes and possible[id(one.least)] and fits(needed := _estimate(plan, one.setup)):
            return [Option(one.changes, needed)]
    return []


def _on_gpu(plan: RunPlan) -> bool:
    return plan.hardware.kind == "cuda"


def _on_these_ranks(plan: RunPlan, setup: Setup) -> list[_Tried]:
    """All settings on the same ranks, with the same number of ranks per sequence."""
    samples = setup.world // (setup.context * setup.tensor)
    return [one for layout in _layouts(plan, setup) for one in _settings(plan, *layout, samples)]


def _in_more_parts(plan: RunPlan, setup: Setup) -> list[_Tried]:
    """All settings on the same ranks, with more ranks per sequence."""
    spec, parallel = setup.spec, plan.config.parallel
    tried: list[_Tried] = []
    world = setup.world // setup.tensor
    for degree in divisors(world) if spec is not None else ():
        samples = world // degree
        if degree <= setup.context or plan.config.train.global_batch % samples:
            continue
        assert spec is not None
        try:
            kind = parallel.cp_comm_type
            check_context(degree, kind, spec.heads, spec.kv_heads, windows=spec.windows, dropout=spec.attention_dropout)
        except InputError:
            continue
        cost = COSTS["context"] * math.log2(degree / setup.context)
        for layout, changes, more in _layouts(plan, dataclasses.replace(setup, context=degree)):
            settings = _settings(plan, layout, {_CONTEXT: degree, **changes}, more + cost, samples)
            tried += settings
    return tried


def _over_tensor_ranks(plan: RunPlan, setup: Setup) -> list[_Tried]:
    """All settings on the same ranks, with more ranks of a host per matrix; none if the matrices cannot be split."""
    tried: list[_Tried] = []
    for degree in divisors(math.gcd(setup.world, RANKS_OF_A_HOST)) if setup.spec is not None else ():
        rest = setup.world // degree
        samples = rest // setup.context
        if degree <= setup.tensor or rest % setup.context or plan.config.train.global_batch % samples:
            continue
        degrees = dataclasses.replace(plan.degrees, tensor=degree, hybrid_shard=rest)
        try:
            check_tensor(plan.config, degrees, plan.model_on_meta)
        except InputError:
            continue
        split = dataclasses.replace(plan, degrees=degrees)
        vars(split)["model_on_meta"] = plan.model_on_meta
        changes: dict[str, Any] = {TENSOR: degree} | ({_SHARD: 0} if plan.config.parallel.hybrid_shard_degree else {})
        cost = COSTS["tensor"] * math.log2(degree / setup.tensor)
        other = dataclasses.replace(setup, tensor=degree, shard=rest, reshard=split.gathering.reshard)
        tried += _settings(plan, other, changes, cost, samples)
    return tried


def _on_more_ranks(plan: RunPlan, setup: Setup) -> Iterator[list[_Tried]]:
    """All settings on 2, 4, … times as many ranks, sharded over all of them."""
    config, world = plan.config, 2 * plan.degrees.world
    while world <= MOST_RANKS:
        changes: dict[str, Any] = {"ranks": world}
        if config.parallel.hybrid_shard_degree:
            changes[_SHARD] = 0
        samples = world // (setup.context * setup.tensor)
        share = -(-config.train.global_batch // samples)
        if share * samples != config.train.global_batch:
            changes["train.global_batch"] = share * samples
        yield _settings(plan, dataclasses.replace(setup, world=world, shard=world // setup.tensor), changes, 0.0, samples)
        world *= 2


def _shorter(plan: RunPlan, setup: Setup) -> Iterator[list[_Tried]]:
    """Settings on the same ranks with a half, a quarter, … of the sequence length."""
    length = setup.sequence_length // 2
    while length >= 2:
        changes = {"data.sequence_length": length}
        yield [one.beside(changes) for one in _on_these_ranks(plan, dataclasses.replace(setup, sequence_length=length))]
        length //= 2


def _layouts(plan: RunPlan, setup: Setup) -> Iterator[tuple[Setup, dict[str, Any], float]]:
    """Layouts of shards and experts, unchanged and over more ranks, each with its changes and their cost."""
    experts = setup.spec.experts if setup.spec is not None and setup.spec.mixtures else 1
    most = setup.world // setup.tensor
    for shard in divisors(most):
        if shard < setup.shard or shard % setup.context:
            continue
        for expert in divisors(math.gcd(shard * setup.tensor, experts)):
            if expert < setup.expert or not composes(setup.tensor, expert):
                continue
            changes: dict[str, Any] = {}
            cost, other = 0.0, dataclasses.replace(setup, shard=shard, expert=expert)
            if shard != setup.shard:
                changes[_SHARD] = 0 if shard == most else shard
                cost += COSTS["hosts" if shard > RANKS_OF_A_HOST else "shard"] * math.log2(shard / setup.shard)
            if expert != setup.expert:
                changes["parallel.expert_parallel_degree"] = expert
                cost += COSTS["expert"] * math.log2(expert / setup.expert)
                spread = dataclasses.replace(plan, degrees=dataclasses.replace(plan.degrees, hybrid_shard=shard, expert=expert))
                other = dataclasses.replace(other, reshard=spread.gathering.reshard)
            yield other, changes, cost


def _settings(plan: RunPlan, setup: Setup, changes: Mapping[str, Any], cost: float, samples: int) -> list[_Tried]:
    """Settings for a layout of ranks with these changes; samples: number of data-parallel ranks."""
    share, train = -(-plan.config.train.global_batch // samples), plan.config.train
    original_code = setup.spec is None  # its code supports none of these
    experts = setup.spec is not None and setup.spec.experts > 0
    levels = levels_for(experts=experts, attention_dropout=0.0 if setup.spec is None else setup.spec.attention_dropout)
    levels = (setup.recompute,) if original_code or setup.recompute not in levels else levels[levels.index(setup.recompute) :]
    offloads = (setup.offload,) if original_code or setup.offload or not _on_gpu(plan) else (False, True)
    reshards = (False, True) if setup.sharded and not (setup.reshard or original_code) else (setup.reshard,)
    syncs = (False, True) if setup.sharded and setup.shard > 1 and not setup.syncs else (setup.syncs,)
    parts = (setup.mlp_chunks,) if original_code or experts or setup.mlp_chunks > 1 else (1, CHUNKS)
    before = plan.accumulation
    candidates: list[_Tried] = []
    for micro in _micro_batches(share, setup.micro_batch):
        of_micro = dataclasses.replace(setup, micro_batch=micro, accumulates=share > micro)
        least = tuple(
            dataclasses.replace(
                of_micro, recompute=levels[-1], reshard=reshards[-1], syncs=syncs[-1], offload=offload, mlp_chunks=chunks
            )
            for offload, chunks in itertools.product(offloads, parts)
        )
        usual = share if train.micro_batch is None else train.micro_batch
        of_step = {} if micro == usual else {"train.micro_batch": micro}
        more = max(0.0, math.log2(share / micro / before)) * COSTS["micro-batches" if setup.sharded else "micro-batch"]
        for sync, reshard, recompute, offload, chunks in itertools.product(syncs, reshards, levels, offloads, parts):
            if sync != setup.syncs and share == micro:
                continue  # nothing is accumulated
            if chunks != setup.mlp_chunks and not recompute:
                continue  # they recompute the first product themselves
            step_changes: dict[str, Any] = {}
            total = cost + more
            if reshard != setup.reshard:
                step_changes["parallel.reshard_after_forward"] = True
                total += COSTS["reshard"]
            if sync != setup.syncs:
                step_changes[_SYNC] = True
                total += COSTS["sync"] * math.log2(share / micro)
            step_changes |= of_step
            if recompute != setup.recompute:
                step_changes["train.recompute"] = recompute
                total += COSTS[recompute] - COSTS[setup.recompute]
            if chunks != setup.mlp_chunks:
                step_changes["train.mlp_chunks"] = chunks
                total += COSTS["chunks"]
            if offload != setup.offload:
                step_changes["train.offload"] = True
                total += _OFFLOADS[recompute]
            tried: dict[str, Any] = {"recompute": recompute, "mlp_chunks": chunks, "offload": offload}
            tried |= {"reshard": reshard, "syncs": sync}
            candidates.append(_Tried(total, {**changes, **step_changes}, dataclasses.replace(of_micro, **tried), least))
    return candidates


def _micro_batches(share: int, micro: int) -> list[int]:
    """Divisors of a rank's share to try: the whole share, without accumulated gradients, and all up to the run's micro-batch.

    Values in between need more activations and save nothing. For a share larger than any possible step only 1.
    """
    if share > 10**8:
        return sorted({1, micro} if share % micro == 0 else {1})
    return [size for size in divisors(share) if size <= micro or size == share]


def figures(plan: RunPlan, memory: Memory) -> dict[str, Any]:
    """A run's memory for `--json`, in GiB."""
    known = memory.estimate.complete
    return {
        "device": plan.hardware.name,
        "ranks": plan.degrees.world,
        "device_gib": memory.of_rank / GIB,
        "usable_gib": USABLE * memory.of_rank / GIB,
        "parts_gib": {part: memory.estimate.parts[part] / GIB if part in memory.estimate.parts else None for part in PARTS},
        "exact_gib": memory.estimate.exact / GIB,
        "total_gib": memory.estimate.total / GIB if known else None,
        "host_gib": memory.estimate.host / GIB,
        "reshard_after_forward": plan.gathering.reshard if plan.degrees.world > 1 else None,
        "peak": memory.estimate.moment if known else None,
        "fits": memory.fits,
        "options": [
            {"changes": dict(option.changes), "total_gib": option.estimate.total / GIB if known else None}
            for option in memory.options
        ],
    }


def lines(plan: RunPlan, memory: Memory) -> list[str]:
    """A run's memory as lines of text."""
    estimate, usable = memory.estimate, size(USABLE * memory.of_rank)
    each = "" if plan.degrees.world == 1 else f" on each of {plan.degrees.world} ranks"
    fits = "does not fit" if memory.fits is False else "fits"
    room = f"{plan.hardware.name} with {size(memory.of_rank)}"
    parts = ", ".join(f"{part} {size(count)}" for part, count in estimate.parts.items() if count)
    if estimate.complete:
        text = [
            f"memory      {size(estimate.total)}{each}: {fits} {room}; the peak is {estimate.moment}",
            f"            {parts}",
        ]
    else:
        unknown = "activations unknown for this model's original code"
        text = [f"memory      {size(estimate.total)}{each} and activations: without these it {fits} {room}"]
        text += [f"            {parts}, {unknown}"]
    if estimate.host:
        text.append(f"            and {size(estimate.host)} of host memory for each rank's offloaded activations")
    if plan.hardware.kind == "cpu":
        text.append("            for a GPU's kernels; a CPU's need more")
    if memory.fits is False:
        text.append(f"            at most {usable} fit, the rest is for libraries and fragments; the run fits with")
        text += [f"            - {option}" for option in memory.options] or [f"            - {_nothing(plan)}"]
    gathered = [f"gathered    {plan.gathering.why}"] if plan.degrees.world > 1 and plan.gathering.why else []
    return [*gathered, *text]


def _nothing(plan: RunPlan) -> str:
    """The advice if no setting makes a run fit."""
    if plan.hardware.kind == "cpu":
        return "GPUs: --world-size 8 --gpu h200 plans it on eight, and gives the number of ranks that it needs"
    return f"no setting up to {MOST_RANKS} ranks: choose a smaller model"


@contextlib.contextmanager
def explaining(plan: RunPlan) -> Iterator[None]:
    """Around the training of a run: replaces an out-of-memory error by that of `out_of_memory`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        explained = out_of_memory(error, plan)
        if explained is None:
            raise
        raise explained from error


def out_of_memory(error: BaseException, plan: RunPlan) -> OctavoError | None:
    """One message for an out-of-memory error: the device, the estimate, the key to lower; None for other errors.

    On a GPU (PyTorch's allocator, CUDA, cuBLAS and NCCL), and on a CPU (PyTorch's allocator and Python's MemoryError).
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    on_gpu = isinstance(error, torch.OutOfMemoryError) or _GPU_FULL.search(text) is not None
    if not (on_gpu or isinstance(error, MemoryError) or _CPU_FULL.search(text)):
        return None
    memory = memory_of(plan)
    estimate = memory.estimate
    total, free = torch.cuda.mem_get_info(plan.device)[::-1] if on_gpu and torch.cuda.is_available() else _host_memory()
    asked = _ASKED.search(text)
    wanted = f" for {asked['size']}" if asked else ""
    machine = "this machine" if process_memory_limit() is None else "the limit of this process (ulimit)"
    place = plan.hardware.name if on_gpu else machine
    largest = sorted(estimate.parts.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{part} {size(count)}" for part, count in largest)
    known = f"{size(estimate.total)} a rank" + ("" if estimate.complete else " and activations (unknown for its original code)")
    message = (
        f"out of memory{wanted}: {place} has {size(total)}, {size(total - free)} in use. The run's estimate is {known}: "
        f"{parts}. {_advice(plan, memory)}"
    )
    if plan.graph and on_gpu:
        message += " Recorded steps reserve memory in addition to validation's: train.graph = false frees it."
    return OctavoError(message)


def _advice(plan: RunPlan, memory: Memory) -> str:
    """The key to lower after memory ran out: the run's first option, else the first setting that saves a tenth."""
    options = list(memory.options)
    if not options and memory.fits is not False:
        setup = setup_of(plan)
        for tried in (_on_these_ranks(plan, setup), _in_more_parts(plan, setup)):
            options += _first(plan, tried, lambda less: less.total <= 0.9 * memory.estimate.total)
    option = next(iter(options), None)
    if option is None:
        if memory.fits is False:
            return "No setting on these ranks fits: use more ranks, or a smaller model."
        return f"Lower {'data.sequence_length' if memory.estimate.complete else 'train.micro_batch or data.sequence_length'}."
    new = [key for key in option.changes if key != "ranks" and not any(fnmatch(key, pattern) for pattern in CHANGEABLE)]
    after = f"It is then a new run: set train.output too ({new[0]} may not change)" if new else "The run then continues"
    verb = "Start" if "ranks" in option.changes else "Set"
    parts = next((one for one in options[1:] if _CONTEXT in one.changes and _CONTEXT not in option.changes), None)
    other = "" if parts is None else f" Or split each sequence over ranks: {parts}."
    return f"{verb} {option} by the estimate. {after}.{other}"


def _host_memory() -> tuple[float, float]:
    """(total, available) bytes of the machine, or of this process's limit if it has one."""
    if (limit := process_memory_limit()) is not None:
        status = Path("/proc/self/status")
        used = re.search(r"^VmData:\s+(\d+) kB", status.read_text(), re.MULTILINE) if status.is_file() else None
        return limit, max(0, limit - (int(used[1]) * 1024 if used else 0))
    page = os.sysconf("SC_PAGE_SIZE")
    info = Path("/proc/meminfo")
    available = re.search(r"^MemAvailable:\s+(\d+) kB", info.read_text(), re.MULTILINE) if info.is_file() else None
    free = int(available[1]) * 1024 if available else page * os.sysconf("SC_AVPHYS_PAGES")
    return page * os.sysconf("SC_PHYS_PAGES"), free
