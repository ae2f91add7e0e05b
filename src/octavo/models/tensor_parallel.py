"""The split of a decoder's parameters over a tensor group, and checks that a decoder can be split.

A rank has H / n query heads with their key-value heads, F / n rows of gate and of up, and an equal part of the vocabulary,
which is padded with rows of zeros. Checkpoints have the whole parameters (`octavo.collectives.blocks`).

    qkv, fc1 and their biases     rows: whole groups of heads, or some query heads and their group's key and value
    proj, fc2                     columns
    fc1, fc2 of experts           the same of each expert; whole experts where these are spread over ranks
    embedding, head               rows
    norms, routers, biases        replicated; of the biases, those of proj and fc2
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from octavo.collectives.blocks import Block, Indices, declare, indices, share_out
from octavo.collectives.tensor import TensorGroup
from octavo.errors import InputError
from octavo.kernels import gemm
from octavo.models.spec import ModelSpec
from octavo.nn.embedding import Words
from octavo.nn.mlp import gate_up_block

KEY = "tensor_parallel_degree"


def check_tensor(spec: ModelSpec, degree: int, *, spread: bool = False) -> None:
    """Raise an InputError for a decoder that `degree` tensor-parallel ranks cannot share.

    spread: whole experts are distributed over ranks.
    """
    if degree == 1:
        return
    check_router(spec, degree)
    if faults := _faults(spec, degree, spread):
        legal = [n for n in range(1, spec.heads + 1) if not _faults(spec, n, spread)]
        below, above = [n for n in legal if n < degree][-1:], [n for n in legal if n > degree][:1]
        near = " or ".join(str(n) for n in (*below, *above))
        raise InputError(f"{KEY} = {degree}: {'; '.join(faults)}. Set {KEY} to {near}, which fits {spec.family}.")


def check_router(spec: ModelSpec, degree: int, *, section: str = "", key: str = KEY) -> None:
    """Raise an InputError for a router whose result depends on how tokens are split over ranks.

    section, key: "moe." and the degree's key in a run file.
    """
    if spec.mixtures and spec.assignment != "largest":
        raise InputError(
            f'{section}moe_load_balancing = "{spec.assignment}" with {key} = {degree}: each rank would assign only its '
            f'tokens. Set {section}moe_load_balancing = "aux_loss", or {key} = 1.'
        )


def _faults(spec: ModelSpec, degree: int, spread: bool) -> list[str]:
    """The sizes of a decoder that `degree` does not divide."""
    faults = []
    if spec.heads % degree:
        faults.append(f"{spec.heads} query heads (num_attention_heads) are not divisible")
    elif spec.kv_heads % degree and degree % spec.kv_heads:
        faults.append(
            f"{spec.kv_heads} key-value heads (num_key_value_heads) neither divide the ranks nor are divisible by them"
        )
    for size in (*([] if spread and spec.mixtures else [spec.ffn_size]), *([spec.dense_ffn_size] if spec.dense else [])):
        if size % degree:
            faults.append(f"an intermediate size (intermediate_size) of {size} is not divisible")
    return faults


def original_code_message(name: str, degree: int) -> str:
    """The message for a model whose code Octavo cannot split."""
    return (
        f"{KEY} = {degree} splits the matrices of Octavo's decoder, and {name} runs its original code. Set {KEY} = 1: the "
        "ranks then shard it."
    )


def part_of_rank(spec: ModelSpec, ranks: int, *, spread: bool = False) -> ModelSpec:
    """The spec of one rank's blocks. spread: as in `check_tensor`."""
    groups = max(1, spec.kv_heads // ranks)
    ffn, dense = spec.ffn_size // (1 if spread and spec.mixtures else ranks), spec.dense_ffn_size // ranks
    return dataclasses.replace(spec, heads=spec.heads // ranks, kv_heads=groups, ffn_size=ffn, dense_ffn_size=dense)


def rows_of_words(vocabulary: int, ranks: int) -> int:
    """Rows of a rank's part of a vocabulary, rounded up to the multiple that FP8 products need."""
    return -(-vocabulary // (ranks * gemm.ALIGNMENT)) * gemm.ALIGNMENT


def words_of(vocabulary: int, tensor: TensorGroup, rank: int | None = None) -> Words:
    """The vocabulary slice of this rank, or of another one."""
    rows = rows_of_words(vocabulary, tensor.size)
    first = min((tensor.rank if rank is None else rank) * rows, vocabulary)
    return Words(first, min(rows, vocabulary - first), vocabulary, tensor)


def group_of(spec: ModelSpec, group: dist.ProcessGroup) -> TensorGroup:
    """The tensor group of a decoder: with the ranks that share its key-value heads. Collective over all ranks of the world."""
    ranks = dist.get_world_size(group)
    sharing: Any = None  # annotated otherwise from version to version
    if spec.kv_heads < ranks:
        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, dist.get_process_group_ranks(group))
        each = ranks // spec.kv_heads
        lists = sorted({tuple(members[first : first + each]) for members in others for first in range(0, ranks, each)})
        sharing, _ = dist.new_subgroups_by_enumeration([list(members) for members in lists])
    return TensorGroup(group, sharing)


def share_parameters(model: Any, tensor: TensorGroup, *, spread: bool = False) -> None:
    """Declare the part of each parameter in this rank's decoder, which was built with a rank's sizes; set its layers' group.

    spread: as of `check_tensor`. Whole experts are not declared: sharding leaves each rank some of them.
    """
    spec: ModelSpec = model.spec
    n = tensor.size
    qkv = [_qkv_rows(spec, rank, n) for rank in range(n)]
    attended = [indices(_run(spec.heads * spec.head_dim, rank, n)) for rank in range(n)]
    size = spec.dense_ffn_size if spec.dense else spec.ffn_size  # of an MLP
    fc1 = [_fc1_rows(size, spec.gated, rank, n) for rank in range(n)]
    activated = [indices(_run(size, rank, n)) for rank in range(n)]
    words = [words_of(spec.vocabulary, tensor, rank) for rank in range(n)]
    rows = rows_of_words(spec.vocabulary, n)
    vocabulary = [indices((each.first, each.first + each.number), padding=rows - each.number) for each in words]
    whole_rows = {
        "qkv": (spec.heads + 2 * spec.kv_heads) * spec.head_dim, "fc1": (1 + spec.gated) * size,
        "embedding": spec.vocabulary, "head": spec.vocabulary,
    }  # fmt: skip
    by_rows = {"qkv": qkv, "fc1": fc1, "embedding": vocabulary, "head": vocabulary}
    by_columns = {"proj": attended, "fc2": activated}
    whole_columns = {"proj": spec.heads * spec.head_dim, "fc2": size}
    blocks: dict[nn.Parameter, Block] = {}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if name == "experts" and spread:
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            shape = list(parameter.shape)
            held: list[list[Indices]] = [[indices((0, size)) for size in shape] for _ in range(n)]
            if name in by_rows:
                shape[0] = whole_rows[name]
                held = [[part, *each[1:]] for part, each in zip(by_rows[name], held, strict=True)]
            elif name in by_columns and kind == "weight":
                shape[1] = whole_columns[name]
                held = [[each[0], part] for part, each in zip(by_columns[name], held, strict=True)]
            elif name == "experts" and kind == "fc1_weight":
                shape[0] *= n
                held = [[_stacked_rows(spec, rank, n), each[1]] for rank, each in enumerate(held)]
            elif name == "experts":
                shape[1] *= n
                held = [[each[0], indices(_run(spec.ffn_size, rank, n))] for rank, each in enumerate(held)]
            if parameter not in blocks:  # a tied one has the same block in both modules
                blocks[parameter] = share_out(shape, held, tensor._group, tensor.rank)
            declare(module, kind, blocks[parameter])
    for layer in model.layers:
        attention = layer.self_attention
        attention.tensor = attention.qkv.tensor = attention.proj.tensor = tensor
        (layer.ffn if layer.experts is None else layer.moe).tensor = tensor
        attention.core_attention.tensor = tensor
        for norm in (attention.q_norm, attention.k_norm):
            if norm is not None:
                norm.tensor = tensor
        if spec.kv_heads < n:
            attention.qkv.shared_rows = 2 * spec.head_dim
    model.norm.tensor = tensor
    model.embedding.words = words[tensor.rank]
    padding = spec.padding
    if padding is not None:
        padding = (padding + spec.vocabulary if padding < 0 else padding) - words[tensor.rank].first
        padding = padding if 0 <= padding < words[tensor.rank].number else None
    model.embedding.padding_idx = padding


def _run(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """The indices of a rank's equal part."""
    return rank * size // ranks, (rank + 1) * size // ranks


def _qkv_rows(spec: ModelSpec, rank: int, ranks: int) -> Indices:
    """Rows of the joint matrix, which are grouped by key-value head."""
    per_group, size = spec.heads // spec.kv_heads, spec.head_dim
    rows = (per_group + 2) * size  # of a group
    if spec.kv_heads % ranks == 0:
        return indices(_run(spec.kv_heads * rows, rank, ranks))
    each = ranks // spec.kv_heads
    group, part = divmod(rank, each)
    start, keys = group * rows, group * rows + per_group * size
    first, last = _run(per_group * size, part, each)
    return indices((start + first, start + last), (keys, keys + 2 * size))


def _fc1_rows(size: int, gated: bool, rank: int, ranks: int) -> Indices:
    """Rows of the MLP's first matrix: of gate and up, in blocks of the rank's size, selected from those of the whole."""
    first, last = _run(size, rank, ranks)
    if not gated:
        return indices((first, last))
    whole, of_rank = gate_up_block(size), gate_up_block(size // ranks)
    ranges: list[tuple[int, int]] = []
    for start in range(first, last, of_rank):
        gate = 2 * whole * (start // whole) + start % whole
        ranges += [(gate, gate + of_rank), (gate + whole, gate + whole + of_rank)]
    return indices(*ranges)


def _stacked_rows(spec: ModelSpec, rank: int, ranks: int) -> Indices:
    """Rows of the experts' first matrices, one after the other: of each all gates, then all ups."""
    first, last = _run(spec.ffn_size, rank, ranks)
    parts = spec.experts * (1 + spec.gated)
    return indices(*((start + first, start + last) for start in range(0, parts * spec.ffn_size, spec.ffn_size)))


def refuse_own_calls(model: Any) -> None:
    """Make embedding and head raise an InputError unless the decoder calls them: alone they return only this rank's part.

    The hooks run before FSDP2's, which would gather the weights.
    """
    model.embedding.register_forward_pre_hook(_refuse_embedding, prepend=True)
    model.head.register_forward_pre_hook(_refuse_head, prepend=True, with_kwargs=True)


def _refuse_embedding(embedding: Any, _: Any) -> None:
    if not embedding.in_decoder:
        raise InputError(
            f"the embedding called directly gives only this rank's tokens with a {KEY} above 1: model(input_ids, "
            "output_hidden_states=True).hidden_states[0] are those of all."
        )


def _refuse_head(head: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    if len(inputs) + len(named) < 2:
        raise InputError(
            f"the head called directly gives logits of only this rank's words with a {KEY} above 1: model(input_ids).logits "
            "are of all words, and with logits_to_keep of some positions."
        )


def refuse_other_parameters(model: nn.Module, parameters: Sequence[tuple[str, object]], degree: int) -> None:
    """Raise an InputError for parameters without a declared part, such as an adapter's."""
    for name, block in parameters:
        if block is None:
            raise InputError(
                f"{name} was added to {type(model).__name__} after octavo.transform, and with {KEY} = {degree} a rank's part "
                f"of it is not known. Leave it out, or set {KEY} = 1."
            )


def refuse_other_settings(group: dist.ProcessGroup, settings: Mapping[str, str], sharing: str) -> None:
    """Raise an InputError for the first setting in which a rank of the group differs from its first. Collective.

    Args:
        settings: call → its settings; the same keys on every rank.
        sharing: "the 2 ranks that …".
    """
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, dict(settings), group=group)
    for name, first in of_ranks[0].items():
        for rank, other in enumerate(of_ranks):
            if other[name] != first:
                raise InputError(
                    f"{sharing} differ in {name}: {first} on the first, {other[name]} on rank {rank} of the group. "
                    "Set it to the same value on all of them."
                )
