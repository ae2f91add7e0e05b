"""A larger vocabulary for pretrained weights: more rows of the embedding, of an untied head, and of the head's bias.

A new row is the mean of the old ones, in float32. Its logit is then about the mean logit: a new token neither dominates the
softmax nor starts with a huge loss. Rows are computed when they are read: a rank without new rows computes no mean, and one
with some reads the matrix once, a part at a time.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import InputError
from octavo.models.weight_files import Fp8Source, Weights

_ROWS = 1 << 14
"""Rows summed at a time."""


def grown(config: Any, vocabulary: int) -> Any:
    """A Hugging Face config with at least `vocabulary` tokens; the same object if it has them."""
    if config.vocab_size >= vocabulary:
        return config
    config = copy.deepcopy(config)
    config.vocab_size = vocabulary
    return config


class ResizedWeights(Weights):
    """Weights with the rows of a larger vocabulary added.

    Args:
        weights: under the model's names.
        model: of the larger vocabulary; its parameters may be on the meta device.
        tokens: size of the smaller vocabulary.

    Attributes:
        resized: names of the tensors with new rows.

    Raises:
        InputError: the embedding of `weights` has another number of rows than `tokens`.
    """

    def __init__(self, weights: Weights, model: nn.Module, tokens: int) -> None:
        self._weights = weights
        self._means: dict[str, Tensor] = {}
        config: Any = model.config
        vocabulary = config.vocab_size
        shapes = dict(weights.shapes)
        self.resized: list[str] = []
        for name, tensor in model.state_dict(keep_vars=True).items():
            stored, asked = shapes.get(name), tuple(tensor.shape)
            if stored and weights.kinds[name] == "float" and stored[1:] == asked[1:]:
                if (stored[0], asked[0]) == (tokens, vocabulary):
                    self.resized.append(name)
                    shapes[name] = asked
                elif asked[0] == vocabulary != stored[0]:
                    raise InputError(
                        f"model.resize: {name} of {weights.owner} has {stored[0]} rows, and config.json vocab_size = {tokens}. "
                        f"Set vocab_size = {stored[0]} there."
                    )
        super().__init__(shapes, weights.kinds, weights.owner, "a checkpoint of this model")
        self.optional = weights.optional

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor [N, …]; float32 if new rows are among them, which represents 16-bit values exactly."""
        if name not in self.resized:
            return self._weights.read(name, start, stop)
        old, new = self._weights.shapes[name][0], self.shapes[name][0]
        stop = new if stop is None else min(stop, new)
        if stop <= old:
            return self._weights.read(name, start, stop)
        if name not in self._means:
            self._means[name] = self._mean(name, old)
        mean = self._means[name].expand(stop - max(start, old), *self.shapes[name][1:])
        return mean if start >= old else torch.cat([self._weights.read(name, start, old).to(mean.dtype), mean])

    def fp8(self, name: str) -> Fp8Source | None:
        """The bytes and scales of a tensor without new rows."""
        return None if name in self.resized else self._weights.fp8(name)

    def in_fp8(self, name: str) -> bool:
        """True if the tensor without new rows is in FP8."""
        return self._weights.in_fp8(name)

    def _mean(self, name: str, rows: int) -> Tensor:
        parts = range(0, rows, _ROWS)
        total = torch.stack([self._weights.read(name, at, min(at + _ROWS, rows)).double().sum(0) for at in parts]).sum(0)
        return (total / rows).float()
