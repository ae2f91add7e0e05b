"""Memory of a training, by part: the allocator's peak on one rank, derived from what each layer saves for backward.

A step has four moments that can be its peak: the output head (all activations, one chunk of logits), the last and the first
block in backward (activations are freed, gradients allocated), and the end of backward. With offloading there is a fifth: the
backward of block `horizon` + 1, the last with that many blocks loaded ahead. Each is summed by part; the largest is the peak.
On one GPU the sums are within 1% of most measured peaks, and 2.5% of all; over two within 3%, with experts too
(`tests/plan/test_memory.py`). Frozen parameters have neither gradients nor states, but their layers count as if they saved for
a weight gradient. Not counted: memory outside the allocator and fragmentation (`USABLE` leaves room for them), and the larger
temporaries of a CPU's reference kernels. Activations of a model's original code are unknown, and not guessed.

"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from octavo.collectives.attention import backward_bytes
from octavo.collectives.copies import LEAST_BYTES
from octavo.config.recompute import recomputes_block
from octavo.fp8.buffers import ScaleBuffer
from octavo.fp8.quantizer import has_one_scale
from octavo.models.spec import ModelSpec
from octavo.nn.embedding import saved_by_embedding
from octavo.nn.experts import backward_bytes_of_experts
from octavo.nn.head import peak_bytes
from octavo.nn.mlp import backward_bytes_of_mlp, backward_bytes_with_adapters
from octavo.parallel.gathered import LAYOUTS
from octavo.plan.saved import (
    BlockRecipes,
    Saved,
    Setup,
    block_bytes,
    block_parameters,
    fp8_elements,
    gathers_fp8,
    is_offloaded,
    kept_weights,
    local_block_parameters,
    mlp_of,
    of_tensor_rank,
    parameters_of_experts,
    recipe_of,
    recomputed_by_block,
    root_bytes,
    root_parameters,
    rows_of_experts,
    saved_by_ends,
    saved_in_forward,
    weight_shapes,
)

USABLE = 0.94
"""Share of a GPU's memory for the estimate: a run with a peak of 130.3 of 139.8 GiB still trained."""
WORKSPACES_OF_PYTORCH = 1 << 26
"""Two workspaces of 32 MiB, PyTorch's default for cuBLAS on Hopper, allocated from the first product on. Those of algorithms
that Octavo chooses exist only during a product (`octavo.kernels.cublaslt`)."""
STATES = 2
"""Moments of AdamW, each in the dtype of its parameter."""
RANKS_OF_A_HOST = 8
"""Most ranks of a host: a plan does not know the hosts."""
PARTS = (
    *("parameters", "optimizer states", "gradients", "gathered weights", "weight copies"),
    *("activations", "temporaries", "buffers"),
)
"""Parts of the peak. weight copies: in FP8 or in the compute dtype, in addition to the parameters."""


@dataclass(frozen=True)
class Estimate:
    """Memory of one rank in bytes.

    Attributes:
        parts: bytes at the peak, in the order of `PARTS`; without "activations" and "temporaries" for original code.
        moment: when the peak occurs, in words.
        exact: parameters, gradients and optimizer states, which exist together at the end of a step.
        host: offloaded activations in host memory.
        complete: activations are known.
    """

    parts: Mapping[str, int]
    moment: str
    exact: int
    host: int = 0
    complete: bool = True

    @property
    def total(self) -> int:
        """The peak; for a model's original code without activations."""
        return sum(self.parts.values())


def exact_bytes(parameters: int, params_bytes: int, shard: int = 1, *, frozen: int = 0, hidden: int = 0) -> int:
    """Parameters, gradients and AdamW's states of one rank; for `frozen` ones only the parameters.

    hidden: number of parameters trained by Muon, with one state.
    """
    trained = math.ceil((parameters - frozen) / shard)
    return (math.ceil(parameters / shard) + trained * (1 + STATES) - hidden // shard) * params_bytes


def estimate(setup: Setup) -> Estimate:
    """The peak of one rank in a step, by part."""
    setup = of_tensor_rank(setup)
    exact = exact_bytes(setup.parameters, setup.params_bytes, setup.shard, frozen=setup.frozen, hidden=setup.hidden)
    if setup.adapter_rank:
        share, trained = _shares(setup)
        exact = share + trained * (1 + STATES)
    if setup.spec is None:
        share, trained = _shares(setup)
        parts = {"parameters": share, "optimizer states": _states(setup), "gradients": trained}
        return Estimate(parts, "activations are unknown for a model's original code", exact, complete=False)
    moments = dict(_moments(setup, setup.spec))
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {part: moments[moment].get(part, 0) for part in PARTS}
    return Estimate(parts, moment, exact, host=_offloaded(setup))


def _shares(setup: Setup) -> tuple[int, int]:
    """(bytes of a rank's parameters, bytes of its trained parameters)."""
    trained = math.ceil((setup.parameters - setup.frozen) / setup.shard) * setup.trained_bytes
    if not setup.adapter_rank:
        return math.ceil(setup.parameters / setup.shard) * setup.params_bytes, trained
    frozen = math.ceil(setup.frozen / setup.shard) * setup.params_bytes
    if setup.stored and setup.spec is not None:
        frozen -= fp8_elements(replace(setup, expert=1), setup.spec) // setup.shard * (setup.params_bytes - 1)
    return frozen + trained, trained


def _states(setup: Setup) -> int:
    """Bytes of a rank's optimizer states: two moments, and for Muon's matrices only the momentum."""
    return STATES * _shares(setup)[1] - setup.hidden // setup.shard * setup.trained_bytes


def _of_muon(setup: Setup) -> int:
    """Temporaries of Muon's step: gathered updates of this rank's matrices, and the iteration's, in 16 bits.

    For the largest parameter: its update, the input of the iteration, two results of products and the joined result; for a
    matrix: two Gram matrices.
    """
    of_rank = 2 * setup.hidden * setup.tensor // setup.world if setup.world > 1 else 0
    return of_rank + setup.largest_hidden * (setup.params_bytes // setup.shard + 4 * 2) + 2 * 2 * setup.largest_matrix


def _offloaded(setup: Setup) -> int:
    if setup.spec is None or not setup.offload:
        return 0
    return sum(times * _away(setup, setup.spec, recipes) for recipes, times in Counter(setup.recipes).items())


def _moments(setup: Setup, spec: ModelSpec) -> Iterator[tuple[str, dict[str, int]]]:
    """Each moment that can be the peak, with its bytes by part."""
    share, trained = _shares(setup)
    stream = setup.own_tokens * spec.hidden_size * setup.compute_bytes
    # The residual stream of all tokens before the head, and the gradient of the embedding's result.
    gathered = setup.tokens * spec.hidden_size * setup.compute_bytes if setup.tensor > 1 else 0
    # Of float16 the stream is gathered in float32 too, for an unrounded gradient.
    before_head = gathered * 3 if setup.late else gathered
    buffers = WORKSPACES_OF_PYTORCH + _buffers(setup, spec) + _peer_memory(setup, spec)
    always = {"parameters": share, "optimizer states": _states(setup), "buffers": buffers}
    before, cached = _whole_gradients(setup, spec), kept_weights(setup, spec)
    held, passing = _gathered(setup, spec)
    matrix = 0 if setup.head_frozen else spec.vocabulary * spec.hidden_size
    of_head = matrix * (4 if setup.late else root_bytes(setup))
    ends = saved_by_ends(setup, spec)
    stays = {
        recipes: [saved for saved in saved_in_forward(setup, spec, recipes) if not is_offloaded(setup, saved)]
        for recipes in set(setup.recipes)
    }
    counts = Counter(setup.recipes)
    activations = ends + sum(times * _sum(stays[recipes], "activations") for recipes, times in counts.items())
    copies = cached + sum(times * _sum(stays[recipes], "weight copies") for recipes, times in counts.items())
    shards = _cast_shards(setup, spec)
    away = {recipes: _away(setup, spec, recipes) for recipes in set(setup.recipes)}
    # The last norm's result, and the last block's, if that norm adds it to the residual stream.
    results = stream * (1 if recomputes_block(setup.recompute) or spec.parallel else 2)
    yield (
        "at the output head",
        {"gradients": before, "gathered weights": held, "weight copies": copies + shards}
        # Tensors being copied to the host, up to a block's: the next block would wait for them.
        | {"activations": activations + away[setup.recipes[-1]]}
        | {"temporaries": _head(setup, spec) + results + before_head}
        | always,
    )
    trained_of_block = block_parameters(spec) - setup.frozen_of_block
    block = math.ceil(trained_of_block / setup.shard) * setup.params_bytes
    # Gradients being reduced: those of the previous block, or of an untied head.
    early = setup.sharded and not spec.tied
    share_of_head = math.ceil(matrix / setup.shard) * setup.params_bytes
    of_block = (trained_of_block - _not_summed(setup, spec)) * setup.reduce_bytes if setup.sharded else 0
    end = spec.layers - 1
    # The last offloaded activations loaded ahead coincide with the gradients of most blocks. Not if blocks are recomputed:
    # they save little, and the estimate of the last moment exceeds the measured peaks.
    whole = setup.offload and not recomputes_block(setup.recompute)
    ahead_of = [(min(setup.horizon, end), f"block {min(setup.horizon, end) + 1}")] if whole else []
    for index, place in (*ahead_of, (end, "the last block"), (0, "the first block")):
        recipes, last = setup.recipes[index], place == "the last block"
        recomputed, before_it = recomputed_by_block(setup, spec, recipes), setup.recipes[: index + 1]
        there = ends + sum(_sum(stays[one], "activations") for one in before_it)
        copied = (
            cached
            + sum(_sum(stays[one], "weight copies") for one in before_it)
            + (shards if last else shards * index // max(1, end))
        )
        ahead = sum(away[one] for one in setup.recipes[max(0, index - setup.horizon) : index])
        done = 0 if setup.accumulates else (end - index) * block
        # Of a block being reduced `done` has the sum, except in accumulation.
        sum_of_block = block if setup.sharded and not done else 0
        summed = matrix * _travelling(setup) + share_of_head if last and early else of_block + sum_of_block
        head = (0 if last else share_of_head) if early else of_head
        yield (
            f"in the backward of {place}",
            {"gradients": before + head + done, "gathered weights": held + passing}
            | {"weight copies": copied + _sum(recomputed, "weight copies")}
            # The stream's gradient takes the place of the last norm's input. Of offloaded activations the block's are loaded.
            | {"activations": there + _sum(recomputed, "activations") + away[recipes] + ahead}
            | {"temporaries": max(_backward_of_mlp(setup, spec, recipes), _exchanged(setup, spec)) + summed}
            | always,
        )
    of_root = matrix * (setup.reduce_bytes + root_bytes(setup)) if setup.sharded else 0
    yield (
        "at the end of backward",
        {
            "gradients": max(trained, before),
            "gathered weights": held,
            "weight copies": cached,
            "activations": saved_by_embedding(setup.tokens),
        }
        | {"temporaries": of_root + stream + gathered}
        | always,
    )
    if setup.hidden:
        yield (
            "in Muon's step",
            {"gradients": trained, "gathered weights": held, "weight copies": cached, "temporaries": _of_muon(setup)} | always,
        )


def _travelling(setup: Setup) -> int:
    """Bytes per element of the head's gradient while it is reduced over ranks.

    On one host it is autograd's tensor (`octavo.parallel.fsdp2.direct_reduce`); else FSDP2 has a copy in the reduce dtype.
    """
    as_written = not setup.replicated and setup.world <= RANKS_OF_A_HOST and not setup.keeps_whole_gradients
    return root_bytes(setup) if as_written else setup.reduce_bytes


def _head(setup: Setup, spec: ModelSpec) -> int:
    """Temporaries of the output head at their peak, its result included."""
    sizes = setup.tokens, spec.hidden_size, spec.vocabulary, setup.compute_bytes, root_bytes(setup)
    return peak_bytes(*sizes, fp8=setup.head, cached=setup.accumulates, late=setup.late, trained=not setup.head_frozen)


def _backward_of_mlp(setup: Setup, spec: ModelSpec, recipes: BlockRecipes) -> int:
    """Temporaries of a block's MLP or experts in backward, with gradients of matrices: the largest in a block."""
    of = mlp_of(setup, spec, recipes)
    if spec.experts:
        tokens = setup.tokens_of_experts
        dispatched = tokens * spec.top_k if setup.expert > 1 else 0
        trained: Literal["weights", "adapters"] | None
        trained = "weights" if not setup.adapter_rank else "adapters" if any(setup.expert_ranks) else None
        summand = setup.summand_bytes if setup.expert == 1 else setup.compute_bytes
        return backward_bytes_of_experts(rows_of_experts(setup, spec), tokens, dispatched, of, trained=trained, summand=summand)
    if setup.adapter_rank:
        return backward_bytes_with_adapters(setup.tokens, of, summand=setup.summand_bytes)
    how = {"chunks": setup.mlp_chunks, "tensor": setup.tensor, "summand": setup.summand_bytes}
    return backward_bytes_of_mlp(setup.own_tokens, of, recompute=setup.recomputes_mlp, **how)


def _exchanged(setup: Setup, spec: ModelSpec) -> int:
    """Temporaries of attention's backward over ranks."""
    if setup.context == 1:
        return 0
    plain = not (setup.documents or any(window is not None for window in spec.windows))
    keys = setup.tokens * setup.context * spec.kv_heads * spec.head_dim
    return backward_bytes(keys, setup.compute_bytes, plain=plain)


def _sum(saved: Sequence[Saved], part: str) -> int:
    return sum(one.bytes for one in saved if one.part == part)


def _away(setup: Setup, spec: ModelSpec, recipes: BlockRecipes) -> int:
    """Bytes of a block's offloaded tensors."""
    return sum(saved.bytes for saved in saved_in_forward(setup, spec, recipes) if is_offloaded(setup, saved))


def _buffers(setup: Setup, spec: ModelSpec) -> int:
    """Scales and amax histories of delayed scaling: of forward, and of backward."""
    layers = sum(name is not None for recipes in setup.recipes for name in recipes)
    if not setup.history or not layers:
        return 0
    slots = (2 * layers + (2 if setup.head else 0), layers)
    return sum(ScaleBuffer.bytes_of(count, setup.history) for count in slots)


def _whole_gradients(setup: Setup, spec: ModelSpec) -> int:
    """Bytes of gradients of earlier micro-batches, which every rank stores whole, or as the shard of their sum."""
    if setup.accumulates and not setup.keeps_whole_gradients:
        width = max(setup.params_bytes, setup.reduce_bytes) if setup.replicated else setup.params_bytes
        return math.ceil((setup.parameters - setup.frozen) / setup.shard) * width
    width = setup.reduce_bytes if setup.sharded else setup.params_bytes
    here = setup.parameters - setup.frozen - spec.mixtures * _elsewhere(setup, spec)
    return here * width if setup.accumulates else 0


def _peer_memory(setup: Setup, spec: ModelSpec) -> int:
    """Bytes of memory that other tensor-parallel ranks write (`octavo.collectives.copies`): two blocks per rank."""
    block = setup.own_tokens * spec.hidden_size * setup.summand_bytes
    return 2 * (setup.tensor - 1) * block if block >= LEAST_BYTES else 0


def _not_summed(setup: Setup, spec: ModelSpec) -> int:
    """Trained parameters of a block whose gradients need no reduction buffer: of experts elsewhere, or on a single rank."""
    experts = parameters_of_experts(spec)
    alone = _whole_experts(setup) and not setup.replicated
    return experts if alone and setup.frozen_of_block < experts else _elsewhere(setup, spec)


def _whole_experts(setup: Setup) -> bool:
    """True if each expert is whole on a rank: FSDP2's group of its shards is that rank."""
    return 1 < setup.expert == setup.shard * setup.tensor


def _elsewhere(setup: Setup, spec: ModelSpec) -> int:
    """Trained parameters of a block's experts, in slices of tensor ranks, that this rank does not compute with.

    Negative for a rank whose whole experts have more parameters than a slice of each.
    """
    others = block_parameters(spec) - local_block_parameters(setup, spec)
    return 0 if setup.frozen_of_block and setup.frozen_of_block >= others else others


def _fp8_sizes(setup: Setup, spec: ModelSpec, recipes: BlockRecipes) -> list[int]:
    """Elements of each weight of a block that is gathered in FP8."""
    if setup.stored:
        return []
    shapes = zip(recipes, weight_shapes(setup, spec), strict=True)
    return [rows * columns for name, (rows, columns) in shapes if has_one_scale(recipe_of(name))]


def _cast_shards(setup: Setup, spec: ModelSpec) -> int:
    """Bytes of a rank's FP8 shards, which stay from forward until backward gathers them."""
    if not (setup.sharded and setup.reshard):
        return 0
    every_expert = replace(setup, expert=1)
    return math.ceil(sum(sum(_fp8_sizes(every_expert, spec, recipes)) for recipes in setup.recipes) / setup.shard)


def _gathered_block(setup: Setup, spec: ModelSpec, *, ahead: bool = False) -> int:
    """Bytes of a gathered block: FP8 weights with one scale in both layouts, stored ones in one.

    ahead: of the next block, as it is received: FP8 in one layout, and nothing of whole experts, which FSDP2 copies when they
    run.
    """
    sizes, others = [rows * columns for rows, columns in weight_shapes(setup, spec)], block_bytes(setup)
    in_fp8 = 1 if ahead or setup.stored else LAYOUTS
    matrices = [
        size * (in_fp8 if _is_gathered_in_fp8(setup, name) else others)
        for size, name in zip(sizes, setup.recipes[-1], strict=True)
    ]
    rest = (local_block_parameters(setup, spec) - sum(sizes)) * others
    return rest + sum(matrices[:2] if ahead and spec.experts and _whole_experts(setup) else matrices)


def _is_gathered_in_fp8(setup: Setup, name: str | None) -> bool:
    """True if a block's matrix with this recipe is gathered in FP8: stored in it, or cast with one scale."""
    return name is not None if setup.stored else has_one_scale(recipe_of(name))


def _gathered(setup: Setup, spec: ModelSpec) -> tuple[int, int]:
    """Bytes of gathered weights throughout a step, and of two blocks at a time: the current and the next."""
    if not setup.sharded:
        return 0, 0
    root, block = root_parameters(spec) * setup.gather_bytes, _gathered_block(setup, spec)
    if gathers_fp8(setup) and not setup.stored:  # autograd's placeholder of FP8 weights, shared by all
        root += max(_fp8_sizes(setup, spec, setup.recipes[-1]), default=0) * setup.params_bytes
    return (root, block + _gathered_block(setup, spec, ahead=True)) if setup.reshard else (root + spec.layers * block, 0)
