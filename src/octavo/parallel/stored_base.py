"""Casts frozen weights to FP8 one by one while they are loaded: at most one is in high precision at a time.

Each rank reads and casts only its rows, with the scale of the whole: amaxes, or the scales of blocks of 128 × 128, are reduced
over ranks. FSDP2 then gathers bytes, 1 a parameter. Every rank has all scales.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo.collectives.blocks import BlockTensor, Part, as_held, indices, local_of, part_of
from octavo.errors import InputError, some, warn
from octavo.fp8.recipe import Operand, Recipe
from octavo.fp8.scaling import ModuleState, states_of
from octavo.fp8.stored import Stored, refuse
from octavo.nn.plain_names import stored_names
from octavo.parallel.deferred_init import CounterInit, Load, Loaded, Values, counter_normal_
from octavo.parallel.shards import LocalShard, groups_of, named_tensors


@dataclass(frozen=True)
class _Without:
    """A source of values without some names."""

    load: Load
    names: frozenset[str]

    def __call__(self, name: str, out: Tensor, start: int) -> None:
        self.load(name, out, start)


class Fp8Rows(Protocol):
    """Rows of a matrix in FP8, or the reason why a folder's bytes and scales do not fit; from `models.weight_loader`."""

    @property
    def reason(self) -> str:
        """The reason why bytes and scales do not fit; empty if they do."""

    @property
    def data(self) -> Tensor | None:
        """E4M3 [rows, K]."""

    @property
    def scale_inv(self) -> Tensor | None:
        """float32, of the whole matrix: [], or of blocks [⌈N/128⌉, ⌈K/128⌉]."""


@runtime_checkable
class LoadsFp8(Protocol):
    """A source of weights, some of which may be in FP8."""

    def stored(self, name: str, start: int, rows: int, *, block: bool, power_of_two: bool) -> Fp8Rows | None:
        """Rows of a matrix in FP8 as its source stores it; None if it is not FP8. See `WeightLoader.stored`."""

    def in_fp8(self, name: str) -> bool:
        """True if a parameter, or a part of it, is stored in FP8."""


Pieces = Iterable[tuple[Tensor, Callable[[int, int], Tensor]]]
"""Parts of a weight, each with its elements' indices in the flattened whole (`LocalShard.numbers`)."""
Note = Callable[[str, tuple[int, ...], Pieces, Callable[[Tensor], None]], None]
"""Called with a weight before its cast: stored name, shape of the whole, this rank's pieces, and an in-place sum over ranks."""


@dataclass(frozen=True)
class _NotTaken:
    """The reason why the FP8 bytes of a matrix in its folder are not used; by default, that ranks hold parts of it."""

    reason: str = "parts of a matrix on several ranks"
    data: Tensor | None = None
    scale_inv: Tensor | None = None


@dataclass(frozen=True)
class StoredInFp8:
    """The values of `base`, cast to FP8 for stored weights; `note` is called with each of those before the cast."""

    base: Loaded | CounterInit
    weights: Mapping[str, ModuleState]
    note: Note

    def check(self, model: nn.Module, names: Sequence[str]) -> None:
        """`base`'s check; it must have a value for each stored weight."""
        if isinstance(self.base, Loaded) and (absent := [name for name in self.weights if name not in self.base.load.names]):
            raise InputError(f"{absent[0]} of {type(model).__name__} is not among the weights that are loaded.")
        self._unstored.check(model, self._left(names))

    @torch.no_grad()
    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        """Fill all other tensors, then this rank's rows of one stored weight after the other. Collective."""
        self._unstored.fill(model, self._left(names))
        stored = stored_names(model)
        report: dict[str, list[str]] = defaultdict(list)
        for name, tensor in named_tensors(model):
            if name in self.weights and (reason := self._fill(name, stored.get(name, name), tensor)) is not None:
                report[reason].append(name)
        _say(report)

    def _fill(self, name: str, key: str, tensor: Tensor) -> str | None:
        """Fill one weight. Returns why a folder's FP8 bytes were cast anew, "" if they were copied, None without such bytes."""
        state, held, local = self.weights[name], as_held(tensor), local_of(tensor).detach()
        module, how = state.module, state.stored
        assert module is not None
        assert how is not None
        start = _first_row(held)
        first, last = how.rows_to_read(start, start + len(local), held.shape[0])
        of_matrix = tensor.block.local if isinstance(tensor, BlockTensor) else Part.of_all(tensor.shape)
        part = of_matrix.cut((first, *(0,) * (held.dim() - 1)), (last - first, *held.shape[1:]))
        rows = LocalShard(torch.empty(part.local_shape, dtype=how.dtype, device=local.device), part)
        if isinstance(self.base, Loaded):
            rows.load(functools.partial(self.base.load, name))
        else:
            counter_normal_(rows.local, rows.numbers, seed=self.base.seed, name=key, std=self.base.std)
        rows.clear_padding()
        of_matrix_ranks, of_all = groups_of(held), groups_of(tensor)

        def join(values: Tensor, one_scale: bool) -> None:
            for group in of_all if one_scale else of_matrix_ranks:
                dist.all_reduce(values, dist.ReduceOp.MAX, group=group)

        def add_up(values: Tensor) -> None:
            for group in of_all:
                dist.all_reduce(values, group=group)

        weight = rows.local[start - first :][: len(local)]
        self.note(key, part_of(tensor).shape, _pieces(weight, part_of(tensor)), add_up)
        bytes_of_rank, stored = local.view(torch.uint8), self._stored(name, tensor, how, start, len(local))
        if stored is not None and stored.data is not None and stored.scale_inv is not None:
            how.put(module, state.weight_name, bytes_of_rank, stored.data, stored.scale_inv)
            return stored.reason
        if stored is not None:  # rounded once, to FP8
            rows = LocalShard(torch.empty(part.local_shape, dtype=torch.float32, device=local.device), part)
            rows.load(functools.partial(self.base.load, name))  # type: ignore[union-attr]
            rows.clear_padding()
        skipped, height = start - first, held.shape[0]
        how.fill(module, state.weight_name, rows.local, bytes_of_rank, first, skipped, height=height, join=join)
        return None if stored is None else stored.reason

    def _stored(self, name: str, tensor: Tensor, how: Stored, start: int, rows: int) -> Fp8Rows | None:
        """This rank's rows of a matrix as stored in FP8 in a folder; None if it is not stored in FP8."""
        if not isinstance(self.base, Loaded) or not isinstance(self.base.load, LoadsFp8):
            return None
        if how.experts is not None:
            return _NotTaken("matrices of experts, which are one stack here") if self.base.load.in_fp8(name) else None
        rows_in_fp8 = self.base.load.stored(name, start, rows, block=not how.one_scale, power_of_two=how.cast.power_of_two)
        return _NotTaken() if rows_in_fp8 is not None and isinstance(tensor, BlockTensor) else rows_in_fp8

    @property
    def _unstored(self) -> Values:
        if not isinstance(self.base, Loaded):
            return self.base
        left = frozenset(self.base.load.names) - self.weights.keys()
        return replace(self.base, load=_Without(self.base.load, left))

    def _left(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self.weights and not name.endswith("weight_scale_bits")]


def _say(report: Mapping[str, Sequence[str]]) -> None:
    """Warn on the first rank about matrices of an FP8 folder that were cast a second time, with the reasons."""
    recast = {reason: names for reason, names in report.items() if reason}
    if not recast or os.environ.get("RANK", "0") != "0":
        return
    total, changed = (sum(map(len, one.values())) for one in (report, recast))
    reasons = "; ".join(f"{reason} ({len(names)}: {some(names, 2)})" for reason, names in recast.items())
    warn(
        f"{changed} of {total} matrices of the base, in FP8 in their folder, were cast to FP8 a second time for fp8.recipe, "
        f'with other scales, because of {reasons}. lora.base = "params_dtype" takes their values without a second cast.'
    )


def _first_row(held: Tensor) -> int:
    """Index of this rank's first row of a matrix, whole or sharded by rows."""
    if not isinstance(held, DTensor):
        return 0
    (chunk,) = held.__create_chunk_list__()
    return int(chunk.offsets[0])


def _pieces(local: Tensor, part: Part) -> Iterator[tuple[Tensor, Callable[[int, int], Tensor]]]:
    """The elements of a part that this rank counts, with their indices in the whole; one empty piece if it counts none."""
    if part.counts_all:
        yield local, LocalShard(local, part).numbers
        return
    if not part.counted:  # all of its rows are copies, as of a key-value head that tensor ranks share
        yield local[:0], LocalShard(local, part).numbers
    for box in part.counted:
        piece = local[box.in_local]
        runs = tuple(indices((first, first + size)) for first, size in zip(box.whole, box.sizes, strict=True))
        yield piece, LocalShard(piece, Part(part.shape, runs)).numbers


def store_in_fp8(model: nn.Module, recipe: Recipe) -> None:
    """Store the frozen weights of a model in FP8; it is on the meta device, and not sharded yet.

    Weights that are trained, or not in FP8, do not change. Experts have separate scales, one per matrix.

    Raises:
        InputError: a layer's recipe needs two layouts of its weight, or a different first scale.
    """
    for name, state in states_of(model):
        weight, module, of_layer = state.weight, state.module, state.under(recipe)
        if weight is None or module is None or of_layer is None or weight.requires_grad or name == "head":
            continue
        refuse(of_layer, name)
        state.stored = Stored(of_layer.casts[Operand.WEIGHT], weight.dtype, state.experts)
        state.stored.allocate(module, state.weight_name)


def values_in_fp8(model: nn.Module, base: Values, note: Note) -> StoredInFp8:
    """The source of the values of a model after `store_in_fp8`, sharded or not."""
    assert isinstance(base, Loaded | CounterInit)
    names = {parameter: name for name, parameter in model.named_parameters()}
    stored = [state for _, state in states_of(model) if state.stored is not None]
    return StoredInFp8(base, {names[state.weight]: state for state in stored}, note)  # type: ignore[index]
