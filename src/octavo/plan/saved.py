"""Tensors that a training keeps for backward, by layer: what each autograd function of `octavo.nn` saves, and in which dtype.

On a CPU the sums are those of autograd's saved tensors, byte for byte (`tests/plan/test_memory.py`). Dropout, its masks and its
random state are left out. Imports neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from octavo.config.recompute import Recompute, recomputes_block
from octavo.hardware import is_affordable
from octavo.models.spec import ModelSpec

GRANULARITIES: Mapping[str, str] = {"delayed": "tensor", "current": "tensor", "rowwise": "row", "block": "block"}
"""Recipe → elements that share a scale."""
OFFLOADED_BYTES = 1 << 20
"""Smaller tensors are not offloaded, as in `octavo.parallel.offload`."""


class BlockRecipes(NamedTuple):
    """The recipe of each matrix of a block by name; None for no FP8."""

    qkv: str | None
    proj: str | None
    fc1: str | None
    fc2: str | None


NO_FP8 = BlockRecipes(None, None, None, None)


@dataclass(frozen=True)
class Setup:
    """All that the memory of one rank depends on.

    Attributes:
        spec: of Octavo's decoder; None for a model that keeps its own code.
        parameters: of the whole model.
        micro_batch, sequence_length: sequences in a forward, tokens in a sequence.
        compute_bytes, params_bytes: of an activation, and of a parameter with its gradient and each of its states.
        blocks: recipes of each block; empty for none in FP8.
        head: products of the head in FP8, as `fp8.head`.
        mlp_chunks: parts of the tokens that an MLP computes one after the other.
        horizon: blocks whose offloaded activations are loaded ahead in backward.
        accumulates: several micro-batches make a step. syncs: gradients are summed over the shards in each.
        documents: attention stays within documents.
        context: ranks that share each sequence.
        expert: ranks over which experts are spread; each is assumed to get an equal share of the tokens' copies.
        frozen: parameters that are not trained; frozen_of_block: of the block with the fewest of them.
        row_tile: each expert's rows are filled up to a multiple of this, as in `octavo.kernels.experts.routes`.
        world, shard: ranks of the run, and those over which each parameter is sharded.
        gather_bytes, reduce_bytes: of a gathered parameter outside FP8, and of a gradient that is summed over ranks.
        reshard: gathered blocks are freed after their forward.
        late: float16, whose gradient of the head stays float32 until backward.
        history: steps of delayed scaling; 0 for none.
        memory: bytes of the GPU, for the rule of `octavo.fp8.columnwise`; None for no columnwise weights from 16 bits.
    """

    spec: ModelSpec | None
    parameters: int
    micro_batch: int
    sequence_length: int
    compute_bytes: int = 2
    params_bytes: int = 4
    blocks: tuple[BlockRecipes, ...] = ()
    head: bool | Literal["backward"] = False
    recompute: Recompute = False
    mlp_chunks: int = 1
    offload: bool = False
    horizon: int = 2
    accumulates: bool = False
    documents: bool = False
    world: int = 1
    shard: int = 1
    gather_bytes: int = 2
    reduce_bytes: int = 4
    reshard: bool = True
    late: bool = False
    history: int = 0
    memory: int | None = None
    context: int = 1
    expert: int = 1
    row_tile: int = 128
    frozen: int = 0
    frozen_of_block: int = 0
    syncs: bool = False

    @property
    def keeps_whole_gradients(self) -> bool:
        """Gradients of micro-batches before the last are there whole, until the last sums them over the ranks."""
        return self.accumulates and not (self.syncs and self.sharded)

    @property
    def tokens(self) -> int:
        """Tokens in a forward of one rank."""
        return self.micro_batch * self.own_length

    @property
    def own_length(self) -> int:
        """Tokens of a sequence on one rank, padding included."""
        chunks = 2 * self.context
        return self.sequence_length if self.context == 1 else 2 * math.ceil(self.sequence_length / chunks)

    @property
    def sharded(self) -> bool:
        """Parameters are gathered for their use."""
        return self.world > 1

    @property
    def recipes(self) -> tuple[BlockRecipes, ...]:
        """Recipes of each block."""
        layers = 0 if self.spec is None else self.spec.layers
        return self.blocks or (NO_FP8,) * layers


class Saved(NamedTuple):
    """One tensor that a block saves for backward: its bytes, its part, and True for the block's MLP."""

    bytes: int
    part: Literal["activations", "weight copies"]
    mlp: bool


def block_parameters(spec: ModelSpec) -> int:
    """Parameters of one block; of a model with dense layers among experts, of a block with experts."""
    qkv, attended, ffn = widths(spec)
    mlp = (ffn + spec.ffn_size) * max(1, spec.experts) + spec.experts
    matrices = spec.hidden_size * (qkv + attended + mlp)
    norms = 2 * _norm_parameters(spec) + (2 * spec.head_dim if spec.qk_norm else 0)
    biases = qkv * spec.qkv_bias + spec.hidden_size * spec.proj_bias + (ffn + spec.hidden_size) * spec.mlp_bias
    return matrices + norms + biases


def own_experts(setup: Setup, spec: ModelSpec) -> int:
    """Experts of a mixture that one rank computes with; 1 for a model without."""
    return max(1, spec.experts // setup.expert)


def own_block_parameters(setup: Setup, spec: ModelSpec) -> int:
    """Parameters of one block that one rank computes with."""
    _, _, ffn = widths(spec)
    others = max(0, spec.experts - own_experts(setup, spec))
    return block_parameters(spec) - others * spec.hidden_size * (ffn + spec.ffn_size)


def _norm_parameters(spec: ModelSpec) -> int:
    return spec.hidden_size * (2 if spec.normalization == "LayerNorm" else 1)


def root_parameters(spec: ModelSpec) -> int:
    """Parameters outside of blocks: embedding, last norm, and the head unless it is the embedding."""
    return spec.vocabulary * spec.hidden_size * (1 if spec.tied else 2) + _norm_parameters(spec)


def parameters(spec: ModelSpec) -> int:
    """Parameters of Octavo's decoder."""
    column = (3 if spec.gated else 2) * spec.hidden_size
    experts = column * spec.ffn_size * spec.experts + spec.hidden_size * spec.experts
    less = len(spec.dense) * (experts - column * spec.dense_ffn_size)
    return spec.layers * block_parameters(spec) - less + root_parameters(spec)


def saved_by_ends(setup: Setup, spec: ModelSpec) -> int:
    """Activations saved outside of blocks and head: token ids, rotary tables, the last norm's input and statistics."""
    columns = 2 * math.ceil(int(spec.head_dim * spec.rotary_fraction) / 2)  # that rotate
    tables = 2 * (setup.micro_batch if setup.documents else 1) * setup.own_length * columns * 4
    return 8 * setup.tokens + tables + setup.tokens * (spec.hidden_size * setup.compute_bytes + _statistics(spec))


def saved_by_block(setup: Setup, spec: ModelSpec, recipes: BlockRecipes) -> list[Saved]:
    """Tensors that one block saves when it is not recomputed as a whole."""
    n, d, c = setup.tokens, spec.hidden_size, setup.compute_bytes
    qkv, attended, ffn = widths(spec)
    stats = n * _statistics(spec)
    first_again = setup.recompute == "mlp" or setup.mlp_chunks > 1
    q1, q2, q3, q4 = (granularity_of(name) for name in recipes)
    attention = [n * d * c, stats, *_input(n, d, q1, c), n * qkv * c, n * attended * c, 4 * n * spec.heads]
    if spec.qk_norm:  # queries and keys before their norms, and the norms' statistics
        heads = spec.heads + spec.kv_heads
        attention += [n * heads * spec.head_dim * c, 4 * n * heads]
    if setup.documents and setup.context == 1 and not q2:  # the documents' results as one tensor
        attention.append(n * attended * c)
    if q2:  # without FP8 the projection reads the result of attention, which is counted
        attention += _input(n, attended, q2, c)
    mlp = [stats] if spec.parallel else [n * d * c, stats]  # the stream that attention reads, too
    if spec.experts:
        return _with_experts(setup, spec, recipes, attention, mlp)
    if first_again:
        mlp += _input(n, d, q3, c, rowwise=q3 in ("row", "block"))
    else:
        mlp += [*_input(n, d, q3, c), n * ffn * c]
    if q4 in ("row", "block"):  # the cast is not repeated
        mlp += _input(n, spec.ffn_size, q4, c)
    weights = _saved_weight(setup, qkv, d, q1), _saved_weight(setup, d, attended, q2, copied=True)
    first = _saved_weight(setup, ffn, d, q3, rowwise=first_again, again=first_again)
    mlp_weights = first, _saved_weight(setup, d, spec.ffn_size, q4, again=first_again)
    out = [Saved(size, "activations", False) for size in attention] + [Saved(size, "activations", True) for size in mlp]
    out += [Saved(size, "weight copies", False) for sizes in weights for size in sizes]
    return out + [Saved(size, "weight copies", True) for sizes in mlp_weights for size in sizes]


def rows_of_experts(setup: Setup, spec: ModelSpec) -> int:
    """Rows of all experts, as in `octavo.kernels.experts.routes.most_rows`."""
    copies, tile = setup.tokens * spec.visited, setup.row_tile
    return copies if tile == 1 else -(-(copies + min(own_experts(setup, spec), copies) * (tile - 1)) // tile) * tile


def _with_experts(setup: Setup, spec: ModelSpec, recipes: BlockRecipes, attention: list[int], mlp: list[int]) -> list[Saved]:
    """Tensors of a block with experts: those of its attention, and those of its mixture behind the norm."""
    n, d, c, f, experts = setup.tokens, spec.hidden_size, setup.compute_bytes, spec.ffn_size, own_experts(setup, spec)
    qkv, attended, ffn = widths(spec)
    rows = rows_of_experts(setup, spec)
    q1, q2, q3, q4 = (granularity_of(name) for name in recipes)
    received = n * (spec.visited if setup.expert > 1 else 1)  # tokens, or copies of tokens
    mlp += [received * d * c, 6 * 4 * n * spec.experts, n * spec.visited * 20, rows * 8, rows * ffn * c]
    if q3 in ("row", "block"):  # the casts are not repeated
        mlp += _input(rows, d, q3, c)
    if q4 in ("row", "block"):
        mlp += _input(rows, f, q4, c)
    weights = _saved_weight(setup, qkv, d, q1), _saved_weight(setup, d, attended, q2, copied=True)
    stacked = _saved_weight(setup, experts * ffn, d, q3), _saved_weight(setup, experts * d, f, q4)
    out = [Saved(size, "activations", False) for size in attention] + [Saved(size, "activations", True) for size in mlp]
    out += [Saved(size, "weight copies", False) for sizes in weights for size in sizes]
    return out + [Saved(size, "weight copies", True) for sizes in stacked for size in sizes]


def _statistics(spec: ModelSpec) -> int:
    """Bytes of a norm's statistics of a token."""
    return 8 if spec.normalization == "LayerNorm" else 4


def saved_in_forward(setup: Setup, spec: ModelSpec, recipes: BlockRecipes) -> list[Saved]:
    """Tensors that one block saves in forward."""
    if recomputes_block(setup.recompute):
        kept = [setup.tokens * spec.hidden_size * setup.compute_bytes]
        kept += _result_of_attention(setup, spec) if setup.recompute == "selective" else []
        return [Saved(size, "activations", False) for size in kept]
    return saved_by_block(setup, spec, recipes)


def recomputed_by_block(setup: Setup, spec: ModelSpec, recipes: BlockRecipes) -> list[Saved]:
    """Tensors that backward makes again for one block."""
    made = saved_by_block(setup, spec, recipes)
    if setup.recompute == "selective":
        for size in _result_of_attention(setup, spec):  # is there already
            made.remove(Saved(size, "activations", False))
    return made if recomputes_block(setup.recompute) else []


def _result_of_attention(setup: Setup, spec: ModelSpec) -> list[int]:
    """Bytes of attention's result and of its log-sum-exp."""
    return [setup.tokens * widths(spec)[1] * setup.compute_bytes, 4 * setup.tokens * spec.heads]


def is_offloaded(setup: Setup, saved: Saved) -> bool:
    """True if this tensor waits in host memory."""
    return setup.offload and saved.bytes >= OFFLOADED_BYTES


def kept_weights(setup: Setup, spec: ModelSpec) -> int:
    """FP8 weights that several micro-batches share: both layouts, from the first on and until the next step."""
    if not setup.accumulates:
        return 0
    total = 0
    for recipes, times in Counter(setup.recipes).items():
        for name, shape in zip(recipes, weight_shapes(setup, spec), strict=True):
            granularity = granularity_of(name)
            if granularity is not None and not (setup.sharded and granularity == "tensor"):  # else gathered as FP8
                total += times * sum(map(sum, _weight_copy(*shape, granularity)))
    return total + (2 * spec.vocabulary * spec.hidden_size if setup.head else 0)


def weight_shapes(setup: Setup, spec: ModelSpec, *, dense: bool = False) -> tuple[tuple[int, int], ...]:
    """Rows and columns of a block's matrices, in the order of `BlockRecipes`; those of a rank's experts as one.

    dense: of a dense layer among experts.
    """
    qkv, attended, ffn = widths(spec)
    d, experts = spec.hidden_size, own_experts(setup, spec)
    if dense:
        return (qkv, d), (d, attended), (spec.dense_ffn_size * (2 if spec.gated else 1), d), (d, spec.dense_ffn_size)
    return (qkv, d), (d, attended), (experts * ffn, d), (experts * d, spec.ffn_size)


def widths(spec: ModelSpec) -> tuple[int, int, int]:
    """Rows of the joint query/key/value matrix, width of attention's result, rows of the first MLP matrix."""
    attended = spec.heads * spec.head_dim
    return attended + 2 * spec.kv_heads * spec.head_dim, attended, spec.ffn_size * (2 if spec.gated else 1)


def granularity_of(recipe: str | None) -> str | None:
    """Elements of a recipe that share a scale, as in `GRANULARITIES`; None for no FP8."""
    return None if recipe is None else GRANULARITIES[recipe]


def travels(setup: Setup) -> bool:
    """Some weights of a block are gathered in FP8, and the others in their own dtype with them."""
    return setup.sharded and any(granularity_of(name) == "tensor" for recipes in set(setup.recipes) for name in recipes)


def block_bytes(setup: Setup) -> int:
    """Bytes of a block's parameter as its layer sees it outside of FP8, and of its gradient before it is summed."""
    return setup.params_bytes if not setup.sharded or travels(setup) else setup.gather_bytes


def root_bytes(setup: Setup) -> int:
    """The same of parameters outside of blocks."""
    return setup.gather_bytes if setup.sharded else setup.params_bytes


def keeps_columnwise(setup: Setup) -> bool:
    """Forward casts weights with a scale in both layouts, for this forward's backward: `LinearQuantizer.weight`."""
    shared, small = setup.sharded or setup.accumulates, recomputes_block(setup.recompute) or setup.offload
    if shared or small or setup.spec is None:
        return False
    return setup.params_bytes == 4 or is_affordable(_fp8_elements(setup, setup.spec), setup.memory)


def _fp8_elements(setup: Setup, spec: ModelSpec) -> int:
    """Elements of the FP8 weights of all blocks, of dense layers among experts too."""
    return sum(
        rows * columns
        for layer, recipes in enumerate(setup.recipes)
        for name, (rows, columns) in zip(recipes, weight_shapes(setup, spec, dense=layer in spec.dense), strict=True)
        if name is not None
    )


def _input(rows: int, columns: int, granularity: str | None, compute: int, *, rowwise: bool = False) -> list[int]:
    """A saved operand [rows, columns]: in high precision, or columnwise FP8 with its scales; rowwise: that layout too."""
    if granularity is None:
        return [rows * columns * compute]
    if granularity == "tensor":
        return [rows * columns, 4]
    down, along = (1, 1) if granularity == "row" else (math.ceil(rows / 128), math.ceil(columns / 128))  # scales of a row
    columnwise = [rows * columns, 4 * columns * down]
    return [*columnwise, rows * columns, 4 * rows * along] if rowwise else columnwise


def _weight_copy(rows: int, columns: int, granularity: str) -> tuple[list[int], list[int]]:
    """An FP8 weight columnwise and rowwise, each with its scales."""
    if granularity == "tensor":
        return [rows * columns], [rows * columns, 4]
    if granularity == "row":
        return [rows * columns, 4 * columns], [rows * columns, 4 * rows]
    blocks = 4 * math.ceil(rows / 128) * math.ceil(columns / 128)
    return [rows * columns, blocks], [rows * columns, blocks]


def _saved_weight(
    setup: Setup,
    rows: int,
    columns: int,
    granularity: str | None,
    *,
    rowwise: bool = False,
    copied: bool = False,
    again: bool = False,
) -> list[int]:
    """Copies of a weight that backward keeps; the FP8 weights of micro-batches count in `kept_weights`.

    copied: a projection outside FP8 saves its weight in the compute dtype. again: backward casts with one scale again.
    """
    if granularity is None:
        seen = block_bytes(setup)
        return [rows * columns * setup.compute_bytes] if copied and seen != setup.compute_bytes else []
    if setup.accumulates or (granularity == "tensor" and (again or not keeps_columnwise(setup))):
        return []
    along, across = _weight_copy(rows, columns, granularity)
    return along + (across if rowwise else [])
