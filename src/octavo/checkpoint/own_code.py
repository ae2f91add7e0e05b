"""Checkpoints of a model's own code, read by the same model with Octavo's blocks, so that older checkpoints of it still load.

Names are translated by the model's table, and tensors of parts are joined: weights and moments as the parameters are, exactly.
FP8 state is joined exactly too where each part has it. Parts of a joined matrix have one input, and the largest amax of a whole
is the largest of its parts: the history is their maximum, the scale their minimum. FP8 state that has no place (of a head that
Octavo keeps in high precision, of a matrix whose parts were not all in FP8) starts anew, and stderr says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.checkpoint.shard_io import Layout, StoredTensors, subset
from octavo.checkpoint.writer import weights
from octavo.errors import InputError
from octavo.fp8.recipe import Operand
from octavo.fp8.scaling import states_of
from octavo.models.convert import Conversion, conversion_of
from octavo.parallel.shards import local_shard


def as_model_has_it(stored: StoredTensors, model: nn.Module, saved: str | None) -> StoredTensors | Converted:
    """A checkpoint under the names of a model, translated where the model has Octavo's blocks and the checkpoint has not.

    Args:
        stored: the checkpoint.
        model: that it is loaded into.
        saved: the layout that the checkpoint records; None for that of a model's own code, or if none is recorded.

    Raises:
        InputError: the checkpoint has Octavo's blocks and the model has not, or a part cannot be joined.
    """
    way, found = conversion_of(model), subset(stored.layout, "model.")
    if way is None and saved is not None:
        raise InputError(
            f"checkpoint {stored.folder} is of Octavo's blocks ({saved}), and this {type(model).__name__} keeps its own code:"
            ' build it with blocks = "auto" (model.blocks), or export the checkpoint and load that.'
        )
    own = [name for name in weights(model) if name not in found]
    if way is None or not any(theirs in found for name in own for theirs in way.names(name)):
        return stored
    return Converted(stored, model, way)


@dataclass(frozen=True)
class _Source:
    """What a tensor is made of: tensors of the checkpoint, and how."""

    names: tuple[str, ...]
    kind: str  # "rows": joined as `parameter` is; "same", "largest", "smallest" of all
    parameter: str = ""


class Converted:
    """A checkpoint of a model's own code as one of the model with Octavo's blocks; it is used as a `StoredTensors`."""

    def __init__(self, stored: StoredTensors, model: nn.Module, way: Conversion) -> None:
        self._stored, self._way = stored, way
        self._weights = {name: tuple(tensor.shape) for name, tensor in weights(model).items()}
        self._modules = [name for name, state in states_of(model) if not state.skipped]
        self._sources = dict(self._translated())

    @property
    def folder(self) -> Path:
        """Of the checkpoint."""
        return self._stored.folder

    @cached_property
    def layout(self) -> Layout:
        """Names, global shapes and dtypes, as the model has them."""
        found = self._stored.layout
        entries: Layout = {}
        for name, source in self._sources.items():
            (shape, dtype), *others = (found[theirs] for theirs in source.names)
            if source.kind == "rows":
                shape = (shape[0] + sum(other[0][0] for other in others), *shape[1:])
            entries[name] = shape, dtype
        return entries

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill the tensors of `into` in place, one after the other: whole parts are read, and this rank's rows are kept."""
        for name, tensor in into.items():
            source = self._sources[name]
            parts = {theirs: torch.empty(shape, dtype=dtype) for theirs, (shape, dtype) in self._entries(source)}
            self._stored.read(parts)
            local_shard(tensor).copy_from(self._joined(source, list(parts.values())))

    def scalars(self, saved: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """What an optimizer keeps besides tensors, by the model's names."""
        named = {}
        for name in self._weights:
            values = [saved.get(theirs) for theirs in self._way.names(name)]
            if any(value != values[0] for value in values):
                raise self._refused(f"numbers of the optimizer differ between the parts of {name}")
            if values[0] is not None:
                named[name] = values[0]
        return named

    def _entries(self, source: _Source) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
        return ((name, self._stored.layout[name]) for name in source.names)

    def _joined(self, source: _Source, parts: list[Tensor]) -> Tensor:
        if source.kind == "rows":
            return self._way.join(source.parameter, tuple(parts))
        if source.kind == "same":
            if any(not torch.equal(part, parts[0]) for part in parts):
                raise self._refused(f"{', '.join(source.names)} differ")
            return parts[0]
        stacked = torch.stack(parts)
        return stacked.amax(0) if source.kind == "largest" else stacked.amin(0)

    def _translated(self) -> Iterator[tuple[str, _Source]]:
        found, used = self._stored.layout, set[str]()
        keys = sorted({name.partition(".")[0] for name in subset(found, "optimizer.")})
        for name in self._weights:
            theirs = self._way.names(name)
            for prefix in ("model", *(f"optimizer.{key}" for key in keys)):
                source = self._tensors(prefix, name, tuple(f"{prefix}.{part}" for part in theirs))
                if source is not None:
                    used.update(source.names)
                    yield f"{prefix}.{name}", source
        for name, source in self._records():
            used.update(source.names)
            yield name, source
        left = [name for name in found if name not in used]
        anew = sorted({name.removeprefix("fp8.").rsplit(".", 2)[0] for name in left if name.startswith("fp8.")})
        if anew:
            named = ", ".join(anew[:4]) + (f" and {len(anew) - 4} more" if len(anew) > 4 else "")
            sys.stderr.write(
                f"octavo: {self.folder}: the FP8 state of {named} has no place in Octavo's blocks and starts anew.\n"
            )
        for name in left:
            if not name.startswith("fp8."):
                yield name, _Source((name,), "same")

    def _tensors(self, prefix: str, name: str, theirs: tuple[str, ...]) -> _Source | None:
        """A weight, or an optimizer state of it; None where the checkpoint has none."""
        found = self._stored.layout
        there = [part for part in theirs if part in found]
        if not there:
            return None
        if len(there) < len(theirs):
            raise self._refused(f"{', '.join(there)} is there and other parts of {name} are not")
        shapes = [found[part][0] for part in theirs]
        if len(theirs) == 1 and shapes[0] != self._weights[name]:
            return _Source(theirs, "same")
        if all(shape == () for shape in shapes) and self._weights[name] != ():
            return _Source(theirs, "same")  # such as the number of steps
        if any(shape[1:] != self._weights[name][1:] for shape in shapes):
            raise self._refused(f"{', '.join(theirs)} have no rows of {name}")
        return _Source(theirs, "rows", name)

    def _records(self) -> Iterator[tuple[str, _Source]]:
        found = self._stored.layout
        for module in self._modules:
            parameter = next((p for p in (f"{module}.weight", f"{module}_weight") if p in self._weights), "")
            theirs = [part.removesuffix(".weight") for part in self._way.names(parameter)] if parameter else []
            for operand in Operand:
                for what, kind in (("scale", "smallest"), ("amax_history", "largest")):
                    names = tuple(f"fp8.{part}.{operand.value}.{what}" for part in theirs)
                    if names and all(name in found for name in names) and len({found[name] for name in names}) == 1:
                        yield f"fp8.{module}.{operand.value}.{what}", _Source(names, kind)

    def _refused(self, why: str) -> InputError:
        return InputError(
            f"checkpoint {self.folder} is of the model's own code and cannot be joined for Octavo's blocks: {why}. Keep the own"
            ' code: blocks = "own" (model.blocks).'
        )
