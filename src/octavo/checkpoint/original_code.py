"""Loads checkpoints of a model's original code into the same model with Octavo's blocks, for older checkpoints.

Names are translated by the model's table. Parts of a joined matrix are joined, and so are their moments. The parts share one
input, and the amax of the whole is the largest of its parts': the FP8 history is their maximum, the scale their minimum. FP8
state without a counterpart (a head in high precision, a matrix with parts not in FP8) is dropped: its scales start new.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.shard_io import Layout, empty_tensors, subset
from octavo.checkpoint.stored import StoredTensors
from octavo.checkpoint.writer import weights
from octavo.errors import InputError, some, warn
from octavo.fp8.recipe import Operand
from octavo.fp8.scaling import states_of
from octavo.models.convert import Conversion, conversion_of
from octavo.models.families import Join
from octavo.parallel.shards import local_shard


def as_model_has_it(stored: StoredTensors, model: nn.Module, saved: str | None) -> StoredTensors | Converted:
    """A checkpoint under the names of a model, translated if the model has Octavo's blocks and the checkpoint does not.

    saved: the layout recorded in the checkpoint; None for a model's original code, or if not recorded.

    Raises:
        InputError: the checkpoint has Octavo's blocks and the model does not, or a part cannot be joined.
    """
    way, of_model = conversion_of(model), subset(stored.layout, "model.")
    if way is None and saved is not None:
        raise InputError(
            f"checkpoint {stored.folder} has Octavo's blocks ({saved}), but this {type(model).__name__} runs its original "
            "code:"
            ' build it with blocks = "auto" (model.blocks), or export the checkpoint and load that.'
        )
    absent = [name for name in weights(model) if name not in of_model]
    if way is None or not any(theirs in of_model for name in absent for theirs in way.names(name)):
        return stored
    return Converted(stored, model, way)


@dataclass(frozen=True)
class _Source:
    """The checkpoint's tensors for one tensor of the model, and how they are combined.

    kind: "rows": joined like `parameter`; "same": all are equal; "largest" or "smallest" of all.
    """

    names: Sequence[str]
    kind: str
    parameter: str = ""


class Converted:
    """A checkpoint of a model's original code, converted to the model with Octavo's blocks; used as a `StoredTensors`."""

    def __init__(self, stored: StoredTensors, model: nn.Module, way: Conversion) -> None:
        self._stored, self._way = stored, way
        self._found = stored.layout
        self._weights = {name: tuple(tensor.shape) for name, tensor in weights(model).items()}
        self._sources = dict([*self._tensors(), *self._records(model)])
        used = {theirs for source in self._sources.values() for theirs in source.names}
        left = [name for name in self._found if name not in used]
        self._sources |= {name: _Source((name,), "same") for name in left if not name.startswith("fp8.")}
        if lost := sorted({name.removeprefix("fp8.").rsplit(".", 2)[0] for name in left if name.startswith("fp8.")}):
            warn(f"{stored.folder}: the FP8 state of {some(lost)} has no counterpart in Octavo's blocks and is dropped.")
        if subset(self._found, "fp8.") and any(way.table.join(name) is Join.EXPERTS for name in self._weights):
            warn(f"{stored.folder}: experts had no FP8 state in the model's original code; their scales start new.")
        self.layout: Layout = {}
        """Names, global shapes and dtypes of the model's tensors."""
        for name, source in self._sources.items():
            shape, dtype = self._found[source.names[0]]
            if source.kind == "rows":
                shapes = [self._rows(source.parameter, self._found[theirs][0]) for theirs in source.names]
                shape = (sum(each[0] for each in shapes), *shapes[0][1:])
            self.layout[name] = shape, dtype

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill the tensors of `into` in place, one at a time: parts are read whole, and this rank's rows stored."""
        for name, tensor in into.items():
            source = self._sources[name]
            parts = empty_tensors({theirs: self._found[theirs] for theirs in source.names})
            self._stored.read(parts)
            local_shard(tensor).copy_from(self._joined(source, list(parts.values())))

    def scalars(self, saved: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Numbers of the optimizer, by the model's names."""
        named = {}
        for name in self._weights:
            values = [saved.get(theirs) for theirs in self._way.names(name)]
            if any(value != values[0] for value in values):
                raise self._refused(f"numbers of the optimizer differ between the parts of {name}")
            if values[0] is not None:
                named[name] = values[0]
        return named

    def _joined(self, source: _Source, parts: list[Tensor]) -> Tensor:
        if source.kind == "rows":
            return self._way.join(source.parameter, tuple(parts))
        if source.kind == "same":
            if any(not torch.equal(part, parts[0]) for part in parts):
                raise self._refused(f"{', '.join(source.names)} differ")
            return parts[0]
        stacked = torch.stack(parts)
        return stacked.amax(0) if source.kind == "largest" else stacked.amin(0)

    def _tensors(self) -> Iterator[tuple[str, _Source]]:
        """Weights, and their optimizer states."""
        keys = sorted({name.partition(".")[0] for name in subset(self._found, "optimizer.")})
        for prefix in ("model", *(f"optimizer.{key}" for key in keys)):
            for name, own_shape in self._weights.items():
                theirs = [f"{prefix}.{part}" for part in self._way.names(name)]
                there = [part for part in theirs if part in self._found]
                if there and len(there) < len(theirs):
                    raise self._refused(f"{', '.join(there)} is there, but other parts of {name} are not")
                if there:
                    yield f"{prefix}.{name}", self._source(name, own_shape, theirs)

    def _source(self, name: str, own_shape: tuple[int, ...], theirs: list[str]) -> _Source:
        shapes = [self._rows(name, self._found[part][0]) for part in theirs]
        if len(theirs) == 1 and shapes[0] != own_shape:
            return _Source(theirs, "same")
        if all(shape == () for shape in shapes) and own_shape != ():
            return _Source(theirs, "same")  # such as the number of steps
        if any(shape[1:] != own_shape[1:] for shape in shapes):
            raise self._refused(f"{', '.join(theirs)} have no rows of {name}")
        return _Source(theirs, "rows", name)

    def _rows(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape [rows, K] of a part; the original code stacks experts' matrices, [E, N, K]."""
        stacked = self._way.table.join(name) is Join.EXPERTS and len(shape) == 3
        return (shape[0] * shape[1], shape[2]) if stacked else shape

    def _records(self, model: nn.Module) -> Iterator[tuple[str, _Source]]:
        """FP8 scales and histories of modules whose parts are all in FP8."""
        for module in (name for name, state in states_of(model) if not state.skipped):
            parameter = next((p for p in (f"{module}.weight", f"{module}_weight") if p in self._weights), "")
            theirs = [part.removesuffix(".weight") for part in self._way.names(parameter)] if parameter else []
            for operand in Operand:
                for record, kind in (("scale", "smallest"), ("amax_history", "largest"), ("begun", "smallest")):
                    names = [f"fp8.{part}.{operand.value}.{record}" for part in theirs]
                    entries = {self._found.get(name) for name in names}
                    if len(entries) == 1 and None not in entries:
                        yield f"fp8.{module}.{operand.value}.{record}", _Source(names, kind)

    def _refused(self, why: str) -> InputError:
        return InputError(
            f"checkpoint {self._stored.folder} is of the model's original code and cannot be joined for Octavo's blocks: "
            f"{why}. "
            'Use the original code: blocks = "own" (model.blocks).'
        )
