"""Bytes saved for backward, by block: sums of the `saved_by_…` functions beside each layer's autograd function in `octavo.nn`.

On a CPU the sums equal autograd's saved tensors, byte for byte (`tests/plan/test_memory.py`). Dropout masks and random states
are omitted.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from octavo.config.parallel import HORIZON
from octavo.config.recompute import Recompute, recomputes_block
from octavo.fp8 import quantizer
from octavo.fp8.linear import saved_input_bytes
from octavo.fp8.quantizer import WeightUse, cached_weight_bytes, has_one_scale, repeats_input
from octavo.fp8.recipe import RECIPES, Recipe
from octavo.hardware import is_affordable
from octavo.kernels.autograd import SavedBytes
from octavo.kernels.experts.routes import TILE, most_rows
from octavo.kernels.gemm import ALIGNMENT
from octavo.models.spec import ModelSpec
from octavo.models.tensor_parallel import part_of_rank, rows_of_words
from octavo.nn.attend import result_bytes
from octavo.nn.attention import saved_by_attention_layer
from octavo.nn.embedding import saved_by_embedding
from octavo.nn.mlp import MlpUse, saved_by_mlp
from octavo.nn.moe import saved_by_moe
from octavo.nn.norm import saved_by_norm
from octavo.nn.rotary import table_bytes
from octavo.parallel.gathered import any_in_fp8, element_bytes
from octavo.parallel.offload import SMALLEST_BYTES


class BlockRecipes(NamedTuple):
    """The recipe of each matrix of a block by name; None for no FP8."""

    qkv: str | None
    proj: str | None
    fc1: str | None
    fc2: str | None


NO_FP8 = BlockRecipes(None, None, None, None)


@dataclass(frozen=True)
class Setup:
    """Inputs of the memory estimate of one rank.

    Attributes:
        spec: spec of Octavo's decoder; None for a model with its original code.
        parameters: number of parameters of the whole model.
        micro_batch, sequence_length: sequences in a forward, tokens in a sequence.
        compute_bytes, params_bytes: bytes per element of activations, and of parameters, gradients and optimizer states.
        blocks: recipes of each block; empty without FP8.
        head: products of the head in FP8, as `fp8.head`.
        mlp_chunks: chunks of tokens that an MLP computes one after the other.
        horizon: blocks whose offloaded activations are loaded ahead in backward.
        accumulates: a step has several micro-batches.
        syncs: gradients are reduced over the shards in each micro-batch.
        documents: attention stays within documents.
        context: ranks that share each sequence.
        tensor: ranks that share each matrix, and the tokens between products. `of_tensor_rank` returns the setup of one rank's
            part.
        expert: ranks over which whole experts are distributed, including tensor ranks; each rank is assumed to get an equal
            share of the tokens' copies.
        frozen: number of parameters that are not trained.
        frozen_of_block: frozen parameters in the block with the fewest.
        row_tile: each expert's rows are padded to a multiple of this, as in `octavo.kernels.experts.routes`.
        world, shard: ranks of the run, and those over which each parameter is sharded.
        gather_bytes, reduce_bytes: bytes per element of a parameter gathered outside FP8, and of a reduced gradient.
        reshard: gathered blocks are freed after their forward.
        adapter_rank: rank of adapters on all matrices of attention and MLPs; 0 without.
        head_frozen: the head is not trained.
        expert_ranks: ranks of adapters on both matrices of experts; 0 without.
        stored: frozen matrices of blocks are stored only in FP8.
        late: float16: the head's gradient stays in float32 until backward, and summands over tensor ranks are float32.
        history: length of amax histories; 0 without delayed scaling.
        hidden: number of parameters that Muon trains, with one state instead of two.
        largest_hidden: elements of the largest of them.
        largest_matrix: the largest square of a matrix's shorter side (the iteration has two such matrices).
        memory: bytes of the GPU, for the rule of `octavo.fp8.columnwise`; None: no cached columnwise weights of 16-bit
            parameters.
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
    horizon: int = HORIZON
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
    tensor: int = 1
    expert: int = 1
    row_tile: int = TILE
    frozen: int = 0
    frozen_of_block: int = 0
    syncs: bool = False
    hidden: int = 0
    largest_hidden: int = 0
    largest_matrix: int = 0
    adapter_rank: int = 0
    expert_ranks: tuple[int, int] = (0, 0)
    head_frozen: bool = False
    stored: bool = False

    @property
    def trained_bytes(self) -> int:
        """Bytes per element of trained parameters and their states: adapters are float32 beside 16-bit weights."""
        return max(4, self.params_bytes) if self.adapter_rank else self.params_bytes

    @property
    def summand_bytes(self) -> int:
        """Bytes per element of an activation or its gradient that tensor ranks sum."""
        return 4 if self.late and self.tensor > 1 else self.compute_bytes

    @property
    def keeps_whole_gradients(self) -> bool:
        """True if earlier micro-batches' gradients are stored whole until the last one reduces them."""
        return self.accumulates and not (self.syncs and self.sharded)

    @property
    def tokens(self) -> int:
        """Tokens in one rank's products in a forward."""
        return self.micro_batch * self.own_length

    @property
    def own_tokens(self) -> int:
        """Tokens of one rank between products: in norms and the residual stream."""
        return self.tokens // self.tensor

    @property
    def tokens_of_experts(self) -> int:
        """Tokens whose copies reach a rank's experts; all tokens if experts are sliced."""
        return self.tokens if self.expert == 1 else self.own_tokens

    @property
    def own_length(self) -> int:
        """Tokens of a sequence on one rank, padding included."""
        multiple = self.tensor if self.context == 1 else self.context * math.lcm(2, self.tensor)
        return math.ceil(self.sequence_length / multiple) * multiple // self.context

    @property
    def replicated(self) -> bool:
        """True if several ranks hold the same shards."""
        return self.shard * self.tensor < self.world

    @property
    def sharded(self) -> bool:
        """True if FSDP2 wraps the model: parameters are sharded or replicated; False for tensor ranks alone."""
        return self.world > self.tensor or min(self.world, self.expert) > 1

    @property
    def recomputes_mlp(self) -> bool:
        """True if backward recomputes the first product of an MLP."""
        return self.recompute == "mlp" or self.mlp_chunks > 1

    @property
    def recipes(self) -> tuple[BlockRecipes, ...]:
        """Recipes of each block."""
        layers = 0 if self.spec is None else self.spec.layers
        return self.blocks or (NO_FP8,) * layers


def of_tensor_rank(setup: Setup) -> Setup:
    """The setup with a tensor-parallel rank's part of the model, padding of its vocabulary included.

    Each rank is assumed to have an equal share of the frozen parameters; of each adapter one of two matrices is whole. For
    experts the part is a slice of each, also if experts are whole: a rank's shards then have as many elements.
    """
    if setup.spec is None or setup.tensor == 1:
        return setup
    spec, whole = _part(setup.spec, setup.tensor), max(1, setup.parameters)
    count, block = parameters(spec), block_parameters(setup.spec)
    frozen = setup.frozen * count // whole
    if setup.adapter_rank:
        frozen, count = count, count + (setup.parameters - setup.frozen) * (setup.tensor + 1) // (2 * setup.tensor)
    return replace(
        setup,
        spec=spec,
        parameters=count,
        hidden=setup.hidden // setup.tensor,
        frozen=frozen,
        frozen_of_block=setup.frozen_of_block * block_parameters(spec) // block,
    )


def _part(spec: ModelSpec, ranks: int) -> ModelSpec:
    return replace(part_of_rank(spec, ranks), vocabulary=rows_of_words(spec.vocabulary, ranks))


class Saved(NamedTuple):
    """One tensor that a block saves for backward: its bytes and its part."""

    bytes: int
    part: Literal["activations", "weight copies"]


def block_parameters(spec: ModelSpec) -> int:
    """Parameters of one block; in a model with dense layers too, of a block with experts."""
    qkv, attended, ffn = widths(spec)
    mlp = (ffn + spec.ffn_size) * max(1, spec.experts) + spec.experts
    matrices = spec.hidden_size * (qkv + attended + mlp)
    norms = 2 * _norm_parameters(spec) + (2 * spec.head_dim if spec.qk_norm else 0)
    biases = qkv * spec.qkv_bias + spec.hidden_size * spec.proj_bias + (ffn + spec.hidden_size) * spec.mlp_bias
    return matrices + norms + biases


def local_experts(setup: Setup, spec: ModelSpec) -> int:
    """Experts of an MoE layer on one rank; 1 for a dense model."""
    return max(1, spec.experts // setup.expert)


def widths_of_experts(setup: Setup, spec: ModelSpec) -> tuple[int, int]:
    """(rows of the first matrix, columns of the second) of an expert or an MLP on one rank.

    spec: from `of_tensor_rank`, with slices.
    """
    whole = setup.tensor if spec.experts and setup.expert > 1 else 1
    return widths(spec)[2] * whole, spec.ffn_size * whole


def parameters_of_experts(spec: ModelSpec) -> int:
    """Parameters of a block's experts; 0 without experts."""
    return spec.experts * spec.hidden_size * (widths(spec)[2] + spec.ffn_size)


def local_block_parameters(setup: Setup, spec: ModelSpec) -> int:
    """Parameters of one block on one rank."""
    if not spec.experts:
        return block_parameters(spec)
    local = local_experts(setup, spec) * spec.hidden_size * sum(widths_of_experts(setup, spec))
    return block_parameters(spec) - parameters_of_experts(spec) + local


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
    """Bytes of activations saved outside blocks and head: token ids, rotary tables, the last norm's input and statistics."""
    columns = 2 * math.ceil(int(spec.head_dim * spec.rotary_fraction) / 2)  # rotated columns
    tables = table_bytes(setup.micro_batch if setup.documents else 1, setup.own_length, columns)
    norm = saved_by_norm(setup.own_tokens, spec.hidden_size, setup.compute_bytes, spec.normalization)
    return saved_by_embedding(setup.tokens) + tables + sum(norm)


def saved_by_block(setup: Setup, spec: ModelSpec, recipes: BlockRecipes) -> list[Saved]:
    """Tensors that one block saves when it is not recomputed as a whole."""
    attention = saved_by_attention_layer(
        setup.tokens, spec.hidden_size, spec.heads, spec.kv_heads, spec.head_dim,
        (recipe_of(recipes.qkv), recipe_of(recipes.proj)), use_of(setup),
        normalization=spec.normalization, qk_norm=spec.qk_norm, joined=setup.documents and setup.context == 1,
        runs=setup.tensor,
    )  # fmt: skip
    _keep_own_tokens(setup, attention, spec, recipes.qkv)
    if setup.tensor > 1 and recipes.proj is None and use_of(setup).parameter_bytes != setup.compute_bytes:
        attention.weight_copies.pop()  # backward reconverts the weight
    of = mlp_of(setup, spec, recipes)
    if spec.experts:
        tokens = setup.tokens_of_experts
        how = spec.experts, spec.top_k, spec.normalization, setup.row_tile
        mlp = saved_by_moe(tokens, of, *how, routed=setup.own_tokens)
    else:
        mlp = saved_by_mlp(setup.tokens, of, spec.normalization, recompute=setup.recomputes_mlp, runs=setup.tensor)
        _keep_own_tokens(setup, mlp, spec, recipes.fc1, rowwise=setup.recomputes_mlp)
    if spec.parallel:
        mlp.activations.pop(0)  # the stream, which attention saves too
    if setup.adapter_rank:
        _replace_inputs(setup, spec, recipes, attention, mlp)
    return [*_tensors(attention), *_tensors(mlp)]


def _replace_inputs(setup: Setup, spec: ModelSpec, recipes: BlockRecipes, attention: SavedBytes, mlp: SavedBytes) -> None:
    """Replace the inputs of frozen products, which backward does not read, by the tensors that adapters on all matrices save.

    These are the products' inputs in high precision (attention's result is saved already), the results of A, and both adapter
    matrices in the products' dtype.
    """
    tokens, element, rank = setup.tokens, setup.compute_bytes, setup.adapter_rank
    (qkv, d), (_, attended), (fc1, _), (_, ffn) = weight_shapes(setup, spec)
    joined = setup.documents and setup.context == 1

    def replace_input(saved: SavedBytes, columns: int, recipe: str | None) -> None:
        for size in saved_input_bytes(tokens, columns, recipe_of(recipe), element):
            saved.activations.remove(size)

    def add(saved: SavedBytes, rows: int, columns: int, count: int, *, there: bool = False) -> None:
        ranks = count * rank
        saved.activations.extend([] if there else [tokens * columns * element])
        saved.activations.extend([tokens * ranks * element, ranks * (rows + columns) * element])

    replace_input(attention, d, recipes.qkv)
    add(attention, qkv, d, 3)
    if joined or recipes.proj is not None:
        replace_input(attention, attended, recipes.proj)
    add(attention, d, attended, 1, there=not joined)
    if spec.experts:
        _replace_inputs_of_experts(setup, spec, recipes, mlp)
    else:
        replace_input(mlp, d, recipes.fc1)
        add(mlp, fc1, d, 2 if spec.gated else 1)
        if not repeats_input(recipe_of(recipes.fc2)):
            replace_input(mlp, ffn, recipes.fc2)
        add(mlp, d, ffn, 1)


def _replace_inputs_of_experts(setup: Setup, spec: ModelSpec, recipes: BlockRecipes, mlp: SavedBytes) -> None:
    """As `_replace_inputs`, for frozen experts with or without adapters."""
    of, element, rows = mlp_of(setup, spec, recipes), setup.compute_bytes, rows_of_experts(setup, spec)
    for columns, recipe in ((of.hidden_size, of.first), (of.ffn, of.second)):
        if not repeats_input(recipe):
            for size in saved_input_bytes(rows, columns, recipe, element):
                mlp.activations.remove(size)
    tokens, spread = setup.tokens_of_experts, of.experts < spec.experts
    own_input = tokens * (spec.top_k if spread else 1) * of.hidden_size * element
    exchanged = spread or setup.own_tokens < tokens  # the experts' input is a separate tensor from the router's
    if exchanged and repeats_input(of.first):
        mlp.activations.remove(own_input)
    if not any(setup.expert_ranks):
        return
    mlp.activations.extend([own_input] if exchanged else [])
    first, second = (rank if setup.row_tile == 1 else math.ceil(rank / ALIGNMENT) * ALIGNMENT for rank in setup.expert_ranks)
    matrices = first * (of.hidden_size + of.fc1_rows) + second * (of.hidden_size + of.ffn)
    mlp.activations.extend([rows * (first + second) * element, of.experts * matrices * element])


def _keep_own_tokens(setup: Setup, saved: SavedBytes, spec: ModelSpec, recipe: str | None, *, rowwise: bool = False) -> None:
    """Replace, in place, the tensors saved before a layer's first product by those of this rank's tokens."""
    first = saved_by_norm(setup.tokens, spec.hidden_size, setup.compute_bytes, spec.normalization)
    of_rank = saved_by_norm(setup.own_tokens, spec.hidden_size, setup.compute_bytes, spec.normalization)
    how = spec.hidden_size, recipe_of(recipe), setup.compute_bytes
    first += saved_input_bytes(setup.tokens, *how, rowwise=rowwise)
    of_rank += saved_input_bytes(setup.own_tokens, *how, rowwise=rowwise)
    if setup.tensor > 1:
        assert saved.activations[: len(first)] == first
        saved.activations[: len(first)] = of_rank


def _tensors(saved: SavedBytes) -> list[Saved]:
    activations = [Saved(size, "activations") for size in saved.activations]
    return activations + [Saved(size, "weight copies") for size in saved.weight_copies]


def rows_of_experts(setup: Setup, spec: ModelSpec) -> int:
    """Rows of all experts of a rank."""
    return most_rows(setup.tokens_of_experts * spec.top_k, local_experts(setup, spec), setup.row_tile)


def saved_in_forward(setup: Setup, spec: ModelSpec, recipes: BlockRecipes) -> list[Saved]:
    """Tensors that one block saves in forward."""
    if recomputes_block(setup.recompute):
        sizes = [setup.own_tokens * spec.hidden_size * setup.compute_bytes]
        sizes += _result_of_attention(setup, spec) if setup.recompute == "selective" else []
        return [Saved(size, "activations") for size in sizes]
    return saved_by_block(setup, spec, recipes)


def recomputed_by_block(setup: Setup, spec: ModelSpec, recipes: BlockRecipes) -> list[Saved]:
    """Tensors that backward recomputes for one block."""
    if not recomputes_block(setup.recompute):
        return []
    recomputed = saved_by_block(setup, spec, recipes)
    if setup.recompute == "selective":
        for size in _result_of_attention(setup, spec):  # is saved already
            recomputed.remove(Saved(size, "activations"))
    return recomputed


def _result_of_attention(setup: Setup, spec: ModelSpec) -> list[int]:
    return result_bytes(setup.tokens, spec.heads, spec.head_dim, setup.compute_bytes)


def is_offloaded(setup: Setup, saved: Saved) -> bool:
    """True if this tensor is offloaded."""
    return setup.offload and saved.bytes >= SMALLEST_BYTES


def kept_weights(setup: Setup, spec: ModelSpec) -> int:
    """Bytes of FP8 weights shared by micro-batches: both layouts, from the first micro-batch until the next step."""
    if not setup.accumulates:
        return 0
    if setup.stored:
        return 2 * spec.vocabulary * spec.hidden_size if setup.head else 0
    total = 0
    for recipes, times in Counter(setup.recipes).items():
        for name, shape in zip(recipes, weight_shapes(setup, spec), strict=True):
            recipe = recipe_of(name)
            if recipe is not None and not (setup.sharded and has_one_scale(recipe)):  # otherwise gathered in FP8
                total += times * sum(cached_weight_bytes(*shape, recipe))
    return total + (2 * spec.vocabulary * spec.hidden_size if setup.head else 0)


def weight_shapes(setup: Setup, spec: ModelSpec, *, dense: bool = False) -> tuple[tuple[int, int], ...]:
    """Rows and columns of a block's matrices, in the order of `BlockRecipes`; a rank's experts count as one matrix.

    dense: for a dense layer in a model with experts.
    """
    qkv, attended, _ = widths(spec)
    d, experts = spec.hidden_size, local_experts(setup, spec)
    rows, columns = widths_of_experts(setup, spec)
    if dense:
        return (qkv, d), (d, attended), (spec.dense_ffn_size * (2 if spec.gated else 1), d), (d, spec.dense_ffn_size)
    return (qkv, d), (d, attended), (experts * rows, d), (experts * d, columns)


def widths(spec: ModelSpec) -> tuple[int, int, int]:
    """Rows of the joint query/key/value matrix, width of attention's result, rows of the first MLP matrix."""
    attended = spec.heads * spec.head_dim
    return attended + 2 * spec.kv_heads * spec.head_dim, attended, spec.ffn_size * (2 if spec.gated else 1)


def mlp_of(setup: Setup, spec: ModelSpec, recipes: BlockRecipes) -> MlpUse:
    """The MLP of a block, or a rank's experts."""
    rows, columns = widths_of_experts(setup, spec)
    sizes = spec.hidden_size, columns, rows
    return MlpUse(*sizes, recipe_of(recipes.fc1), recipe_of(recipes.fc2), use_of(setup), local_experts(setup, spec))


@functools.cache
def recipe_of(name: str | None) -> Recipe | None:
    """The recipe of this name, of which a plan reads only granularities; None without FP8."""
    return None if name is None else RECIPES[name]()


def gathers_fp8(setup: Setup) -> bool:
    """True if some weights of blocks are gathered in FP8."""
    if setup.stored:
        return setup.sharded
    return setup.sharded and any_in_fp8(recipe_of(name) for recipes in set(setup.recipes) for name in recipes)


def block_bytes(setup: Setup) -> int:
    """Bytes per element of a block's parameter outside FP8, and of its gradient before it is reduced."""
    if not setup.sharded:
        return setup.params_bytes
    return element_bytes(setup.params_bytes, setup.gather_bytes, fp8=gathers_fp8(setup))


def root_bytes(setup: Setup) -> int:
    """The same for parameters outside blocks."""
    return setup.gather_bytes if setup.sharded else setup.params_bytes


def use_of(setup: Setup) -> WeightUse:
    """The inputs that decide which copies of the blocks' weights exist."""
    return WeightUse(
        setup.compute_bytes, block_bytes(setup), setup.accumulates or setup.stored, setup.sharded, caches_columnwise(setup)
    )


def caches_columnwise(setup: Setup) -> bool:
    """True if forward casts weights with one scale in both layouts, for its backward."""
    if setup.spec is None or setup.stored:
        return False
    return quantizer.caches_columnwise(
        setup.params_bytes,
        affordable=is_affordable(fp8_elements(setup, setup.spec), setup.memory),
        shared=setup.sharded or setup.accumulates,
        hooks=recomputes_block(setup.recompute) or setup.offload,
    )


def fp8_elements(setup: Setup, spec: ModelSpec) -> int:
    """Elements of the FP8 weights of all blocks, dense layers included."""
    return sum(
        rows * columns
        for layer, recipes in enumerate(setup.recipes)
        for name, (rows, columns) in zip(recipes, weight_shapes(setup, spec, dense=layer in spec.dense), strict=True)
        if name is not None
    )
