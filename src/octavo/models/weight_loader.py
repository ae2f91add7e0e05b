"""Which rows of Hugging Face's matrices make which rows of ours, so that a rank reads its own part of a model and no more.

`WeightLoader` reads slices of rows of the tensors in a folder (or of tensors in memory) straight into a rank's part of a
parameter, one source at a time. It speaks of rows only: which rank holds which rows is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo.models.convert import check_names_and_shapes, conversion_of
from octavo.models.weight_files import Weights


class Rows(NamedTuple):
    """Rows `start` to `stop` of a source, which stand at row `at` of what is filled."""

    source: int
    start: int
    stop: int
    at: int


def joined_rows(lengths: Sequence[int], start: int, stop: int) -> Iterator[Rows]:
    """Where rows `start` to `stop` of a joined matrix come from, in order.

    The joined matrix repeats: `lengths[0]` rows of source 0, `lengths[1]` rows of source 1, …, then the next rows of source 0.

    Args:
        lengths: rows of each source in one repetition.
        start: the first row wanted, which is row 0 of what is filled.
        stop: the row behind the last one.
    """
    row, period = start, sum(lengths)
    while row < stop:
        repetition, inside = divmod(row, period)
        source = 0
        while inside >= lengths[source]:
            inside -= lengths[source]
            source += 1
        length = lengths[source]
        first = repetition * length + inside
        count = min(length - inside, stop - row)
        yield Rows(source, first, first + count, row - start)
        row += count


class WeightLoader:
    """Reads the weights of a model under its own names: `load(name, out, start)`.

    Attributes:
        names: the parameters and persistent buffers that it has, tied ones under each of their names.
    """

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        """Hold the weights against the model, which may be on the meta device and sharded; nothing is read or changed.

        Raises:
            InputError: a weight is missing or has another shape.
        """
        check_names_and_shapes(model, weights)
        self._weights = weights
        self._sources = dict(_sources(model, weights))
        self.names = self._sources.keys()

    @torch.no_grad()
    def __call__(self, name: str, out: Tensor, start: int) -> None:
        """Fill `out` with the rows from `start` on of the named tensor, converted to its dtype and device."""
        parts, lengths = self._sources[name]
        if out.dim() == 0:
            out.copy_(self._weights.read(parts[0][0]))
            return
        pieces = list(joined_rows(lengths, start, start + out.shape[0]))
        for number, (source, offset) in enumerate(parts):
            mine = [piece for piece in pieces if piece.source == number]
            if mine:
                # Rows of a source follow each other: one read for all, and one way to the device.
                first = mine[0].start
                rows = self._weights.read(source, offset + first, offset + mine[-1].stop).to(out.device)
                for piece in mine:
                    count = piece.stop - piece.start
                    out[piece.at : piece.at + count].copy_(rows[piece.start - first :][:count])


def _sources(model: nn.Module, weights: Weights) -> Iterator[tuple[str, tuple[list[tuple[str, int]], tuple[int, ...]]]]:
    """Name → the source and its first row of each part, and the rows of each part in one repetition."""
    way, state = conversion_of(model), model.state_dict(keep_vars=True)
    there = {id(tensor): name for name, tensor in reversed(state.items()) if name in weights.shapes}
    for name, tensor in state.items():
        rows = tensor.shape[0] if tensor.dim() else 1
        if way is not None:
            first = way.tied.get(name, name)
            yield name, (way.part_rows(first, rows), way.repetition(first, rows))
        else:  # a tied tensor may be under either name
            yield name, ([(name if name in weights.shapes else there[id(tensor)], 0)], (rows,))
