"""Reads rows of a source's matrices into a rank's part of a parameter, one matrix at a time and no more than needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.models.convert import check_names_and_shapes, conversion_of
from octavo.models.decoder import Decoder
from octavo.models.published import PublishedWeights, causal_lm_on_meta
from octavo.models.weight_files import WeightFiles, Weights


def folder_weights(folder: str | Path, model: nn.Module | None, config: Any = None) -> Weights:
    """The weights of a Hugging Face folder as transformers would load them, held against a model; reads headers alone.

    Args:
        model: that is to be filled, before or after its blocks were replaced; None for the causal language model of `config`.
        config: the Hugging Face config, where there is no model, or the model is Octavo's decoder.

    Raises:
        InputError: the folder is not of this model, or transformers would load it by other means than its safetensors.
    """
    files = WeightFiles(folder)
    if model is None or isinstance(model, Decoder):
        model = causal_lm_on_meta(config)
    elif conversion_of(model) is not None:
        return files
    weights = PublishedWeights(files, model)
    check_names_and_shapes(model, weights)
    return weights


class WeightLoader:
    """Reads the weights of a model under its own names: `load(name, out, start)`.

    Attributes:
        names: the parameters and persistent buffers that it has, tied ones under each of their names.

    Raises:
        InputError: a weight is missing or has another shape than the model's.
    """

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        check_names_and_shapes(model, weights)
        self._weights = weights
        self._sources = dict(_sources(model, weights))
        self.names = self._sources.keys()

    @torch.no_grad()
    def __call__(self, name: str, out: Tensor, start: int) -> None:
        """Fill `out` with the rows from `start` on of the named tensor, converted to its dtype and device."""
        parts = self._sources[name]
        if len(parts) == 1:  # `out` may be the source itself
            stop = start + (out.shape[0] if out.dim() else 1)
            out.copy_(self._weights.read(parts[0][0], start, stop).to(out.device))
            return
        period = sum(length for _, _, length in parts)
        rows = torch.arange(start, start + out.shape[0])
        repetition = rows // period
        inside = rows % period  # row within the repetition
        for source, first, length in parts:
            at = ((inside >= 0) & (inside < length)).nonzero().flatten()  # this part's rows of `out`
            if at.numel():
                # In the source they follow each other: one read for all, and one way to the device.
                theirs = (first + repetition * length + inside)[at]
                values = self._weights.read(source, int(theirs[0]), int(theirs[-1]) + 1).to(out.device)
                out.index_copy_(0, at.to(out.device), values.to(out.dtype))
            inside = inside - length  # begins at 0 in the next part


def _sources(model: nn.Module, weights: Weights) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """Name → `Conversion.parts`; a model's own code has one part, of the same name."""
    way = conversion_of(model)
    state = model.state_dict(keep_vars=True)
    there = {id(tensor): name for name, tensor in reversed(state.items()) if name in weights.shapes}
    for name, tensor in state.items():
        if name in weights.optional:
            continue
        rows = tensor.shape[0] if tensor.dim() else 1
        if way is not None:
            yield name, way.parts(way.tied.get(name, name), rows)
        else:  # a tied tensor may be under either name
            yield name, [(name if name in weights.shapes else there[id(tensor)], 0, rows)]
