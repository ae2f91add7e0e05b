"""The hidden matrices of a model, which Muon orthogonalises: those of its blocks, each separately.

A parameter of several matrices (query, key and value; gate and up; all experts) is split into them, even if the source joins
them too. Embedding, output head, norms, biases and routers are not hidden matrices, nor is anything outside numbered blocks. In
a model's original code a parameter whose name indicates several matrices is refused: only that code knows the order of its
rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.collectives.blocks import Block, parameters_of, with_block
from octavo.errors import InputError, some
from octavo.models.convert import Conversion, conversion_of
from octavo.models.families import Join
from octavo.nn.lora import is_adapter

_ROUTERS = {"router", "gate", "shared_expert_gate"}
"""Names of routers."""
_JOINT = {
    *("qkv", "qkv_proj", "c_attn", "query_key_value", "Wqkv", "W_pack", "in_proj", "in_proj_weight", "att_proj", "attn_qkv"),
    *("gate_up_proj", "layernorm_qkv", "fc1_weight", "kv_a_proj_with_mqa", "kv_b_proj", "in_proj_qkvz", "wqkv", "kv_proj"),
    *("w12", "ff_proj", "query_key_value_proj", "gate_up_proj_weight", "dense_h_to_4h_gated", "layernorm_mlp"),
}
"""Names of modules and parameters that hold several matrices in the code of models."""
_IN_BLOCK = re.compile(r"(^|\.)\d+\.\w+\.")
"""A module in a numbered block; layers of an nn.Sequential do not count, as the last may be the head."""
_STACKED = re.compile(r"\.experts\.(?!\d+\.)")
"""Experts in one parameter, not as modules with a number."""


@dataclass(frozen=True)
class HiddenParameter:
    """A parameter of one or more hidden matrices.

    Attributes:
        name: in the model.
        parameter: this rank's parameter.
        block: its places in the whole, if a tensor group declares them.
        shape: [rows, columns] of the whole.
        lengths: rows of each matrix in one repetition of the parameter's rows.
        experts: number of experts in a stack, one after the other; 0 if not stacked.
    """

    name: str
    parameter: nn.Parameter
    block: Block | None
    shape: tuple[int, int]
    lengths: tuple[int, ...]
    experts: int = 0

    def tensor(self, values: Tensor) -> Tensor:
        """`values`, sharded like the parameter, in the form for `whole_tensor` and `part_of`."""
        return with_block(values, self.block)

    @property
    def matrices(self) -> list[tuple[int, int, int]]:
        """(number, rows, columns) for each matrix in a repetition or an expert, with the number of such matrices."""
        rows, columns = self.shape
        count = self.experts or 1
        return [(count, rows * length // (sum(self.lengths) * count), columns) for length in self.lengths]

    def split(self, rows: Tensor) -> list[Tensor]:
        """Stacks [number, rows, columns] of matrices, from the whole or from the rows of some experts."""
        if self.experts:
            return list(rows.unflatten(0, (-1, sum(self.lengths))).split(self.lengths, 1))
        return [part.flatten(0, 1)[None] for part in rows.unflatten(0, (-1, sum(self.lengths))).split(self.lengths, 1)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`, for any number of columns."""
        if not self.experts:
            parts = [part[0].unflatten(0, (-1, length)) for part, length in zip(parts, self.lengths, strict=True)]
        return torch.cat(list(parts), 1).flatten(0, 1)


def hidden_parameters(model: nn.Module, who: str = 'optimizer.name = "muon"') -> list[HiddenParameter]:
    """The trained parameters of hidden matrices, in the model's order; also on meta.

    Args:
        model: of `octavo.transform`, sharded or not, or a model's original code.
        who: for messages.

    Raises:
        InputError: no hidden matrix; adapters; a parameter of the original code whose name indicates several matrices.
    """
    if adapters := [name for name, _ in model.named_parameters() if is_adapter(name) or ".lora_" in name]:
        raise InputError(
            f"{who}: {some(adapters)} are low-rank factors. Orthogonalised one by one, their product does not get a matrix's "
            'update. Set optimizer.name = "adamw", or train without adapters.'
        )
    way, blocks = conversion_of(model), parameters_of(model)
    exempt = _exempt(model)
    hidden: list[HiddenParameter] = []
    joint: list[str] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter in exempt or not _IN_BLOCK.search(name):
            continue
        block = blocks[parameter]
        shape = tuple(with_block(parameter, block).shape)
        several = not _JOINT.isdisjoint(name.split(".")[-2:]) or _STACKED.search(name) is not None
        if way is None and len(shape) > 1 and several:
            joint.append(name)
        if len(shape) == 2:
            lengths, experts = _rows(way, name, shape[0])
            hidden.append(HiddenParameter(name, parameter, block, (shape[0], shape[1]), lengths, experts))
    if joint:
        raise InputError(
            f"{who}: by their names {some(joint)} of {type(model).__name__}'s original code hold several matrices each, and "
            "only that code knows the order of rows: Muon would orthogonalise them together. "
            'Set optimizer.name = "adamw", or use a model '
            "with Octavo's decoder (docs/models.md)."
        )
    if not hidden:
        raise InputError(
            f"{who}: {type(model).__name__} trains no matrix in numbered blocks, and the embedding, the output head, "
            'norms, biases and routers are AdamW\'s. Set optimizer.name = "adamw".'
        )
    return hidden


def _exempt(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of embeddings, norms and routers, and biases."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    exempt = set() if head is None else set(head.parameters())
    for path, module in model.named_modules():
        kind = type(module).__name__
        excluded = isinstance(module, nn.Embedding) or kind.endswith("Norm") or path.rpartition(".")[2] in _ROUTERS
        for leaf, parameter in module.named_parameters(recurse=False):
            if excluded or "bias" in leaf or leaf.startswith("layer_norm") or "router" in leaf:
                exempt.add(parameter)
    return exempt


def _rows(way: Conversion | None, name: str, rows: int) -> tuple[tuple[int, ...], int]:
    """Rows of each matrix in a repetition, and the number of stacked experts."""
    if way is None:
        return (rows,), 0
    if way.table.join(name) is None and "qkv" in name.split(".")[-2]:  # GPT-NeoX, whose source has the same order of rows
        head_dim = rows // (way.heads + 2 * way.kv_heads)
        return (way.heads // way.kv_heads * head_dim, head_dim, head_dim), 0
    if way.table.join(name) is not Join.EXPERTS:
        return way.repetition(name, rows), 0
    of_expert = rows // way.experts
    gated = way.names(name)[0].endswith("gate_up_proj")
    return ((of_expert // 2,) * 2 if gated else (of_expert,)), way.experts
