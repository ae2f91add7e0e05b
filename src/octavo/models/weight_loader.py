"""Which rows of Hugging Face's matrices make which rows of ours, so that a rank reads its own part of a model and no more.

`WeightLoader` reads slices of rows of the tensors in a folder (or of tensors in memory) straight into a rank's part of a
parameter, one source at a time. It speaks of rows only: which rank holds which rows is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo.models.decoder import Decoder
from octavo.models.weights import Weights, check_weights, hugging_face_names, join_rule
from octavo.nn.mlp import gate_up_block


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
        check_weights(model, weights)
        self._weights = weights
        self._sources = dict(_decoder_sources(model) if isinstance(model, Decoder) else _own_sources(model, weights))
        self.names = self._sources.keys()

    @torch.no_grad()
    def __call__(self, name: str, out: Tensor, start: int) -> None:
        """Fill `out` with the rows from `start` on of the named tensor, converted to its dtype and device."""
        theirs, lengths = self._sources[name]
        if out.dim() == 0:
            out.copy_(self._weights.read(theirs[0]))
            return
        pieces = list(joined_rows(lengths, start, start + out.shape[0]))
        for number, source in enumerate(theirs):
            mine = [piece for piece in pieces if piece.source == number]
            if mine:
                # Rows of a source follow each other: one read for all, and one way to the device.
                first = mine[0].start
                rows = self._weights.read(source, first, mine[-1].stop).to(out.device)
                for piece in mine:
                    count = piece.stop - piece.start
                    out[piece.at : piece.at + count].copy_(rows[piece.start - first :][:count])


def _decoder_sources(model: Decoder) -> Iterator[tuple[str, tuple[tuple[str, ...], tuple[int, ...]]]]:
    """Name → Hugging Face's names, and the rows of each in one repetition."""
    config = model.config
    for name, parameter in model.named_parameters(remove_duplicate=False):
        rows, rule = parameter.shape[0], join_rule(name, model.family)
        if rule == "qkv":
            heads, groups = config.num_attention_heads, config.num_key_value_heads
            head_dim = rows // (heads + 2 * groups)
            lengths: tuple[int, ...] = (heads // groups * head_dim, head_dim, head_dim)
        elif rule == "gate_up":
            lengths = (gate_up_block(rows // 2),) * 2
        else:
            lengths = (rows,)
        first = "embedding.weight" if name == "head.weight" and config.tie_word_embeddings else name
        yield name, (hugging_face_names(first, model.family), lengths)


def _own_sources(model: nn.Module, weights: Weights) -> Iterator[tuple[str, tuple[tuple[str, ...], tuple[int, ...]]]]:
    """The same for a model that keeps its own code, whose names are Hugging Face's. A tied tensor may be under either name."""
    state = model.state_dict(keep_vars=True)
    there = {id(tensor): name for name, tensor in reversed(state.items()) if name in weights.shapes}
    for name, tensor in state.items():
        source = name if name in weights.shapes else there[id(tensor)]
        yield name, ((source,), (tensor.shape[0] if tensor.dim() else 1,))
