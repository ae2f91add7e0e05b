"""Token embedding; its gradient is added in place to that of a tied head.

Autograd would write a second gradient of the size of the vocabulary, read both and write their sum. Here one autograd node
returns the rows and the weight that the head reads. It receives both gradients at once, and adds the rows to the head's in
place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.collectives.tensor import TensorGroup
from octavo.errors import InputError
from octavo.kernels.autograd import refuse_second_derivative, refuse_transforms
from octavo.kernels.cross_entropy_slices import Slice
from octavo.kernels.embedding.backward import embedding_backward
from octavo.kernels.embedding.forward import embedding

ELSEWHERE, UNKNOWN = -1, -2
"""Local id of a word of another rank; of an id outside the vocabulary."""


@dataclass(frozen=True)
class Words(Slice):
    """The part of a vocabulary whose rows this rank of a tensor group holds; further rows are padding.

    Attributes:
        tensor: the ranks.
    """

    tensor: TensorGroup

    def local(self, ids: Tensor) -> Tensor:
        """ids [...] relative to this rank's first; `ELSEWHERE` for other ranks' words, `UNKNOWN` outside the vocabulary."""
        local = (ids >= self.first) & (ids < self.first + self.number)
        known = (ids >= 0) & (ids < self.vocabulary)
        return torch.where(local, ids - self.first, torch.where(known, ELSEWHERE, UNKNOWN))


@dataclass(eq=False)
class SharedWeight:
    """The weight of an embedding and a tied head in one forward: the parameter, and its values from the embedding's node.

    The consumer of `of(weight)` must return a gradient without other references: the embedding's backward writes into it.
    """

    parameter: Tensor | None = None
    value: Tensor | None = None

    def of(self, weight: Tensor) -> Tensor:
        """The values [V, K] for the head with this weight: itself unless it is the embedding's parameter."""
        return weight if self.value is None or weight is not self.parameter else self.value


class Embedding(nn.Embedding):
    """`torch.nn.Embedding` with a separate result dtype; gradients are summed in float32, in a fixed order.

    `padding_idx` is supported: that row is not trained and keeps its initial value; a negative index counts from the end. With
    any other option, such as `max_norm`, PyTorch computes the gradients.
    """

    def __init__(
        self,
        words: int,
        columns: int,
        *,
        padding: int | None = None,
        dtype: torch.dtype,
        params_dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(words, columns, dtype=params_dtype, device=device)
        self.padding_idx = padding + words if padding is not None and padding < 0 else padding
        self.dtype = dtype
        """Dtype of the result."""
        self.words: Words | None = None
        """This rank's rows of a vocabulary that a tensor group shares; the result then has this rank's tokens."""
        self.in_decoder = False
        """A forward of the decoder is running, which reads this rank's tokens."""

    def forward(self, input: Tensor, shared: SharedWeight | None = None) -> Tensor:
        """input: ids [...] → their rows [..., K]. shared: filled here, for a head with the same weight.

        Raises:
            IndexError: an id is outside of the vocabulary, on a CPU; a GPU gives a row of NaN.
        """
        if torch.compiler.is_compiling() or self.sparse or self.scale_grad_by_freq or self.max_norm is not None:
            if self.words is not None:
                raise InputError(
                    "an embedding split over tensor_parallel_degree ranks supports no torch.compile, sparse, "
                    "scale_grad_by_freq or max_norm: leave them out, or set tensor_parallel_degree = 1."
                )
            return super().forward(input).to(self.dtype)
        refuse_transforms("embeddings of Octavo's decoder")
        weight, words = self.weight, self.words
        input = input if words is None else words.local(input)
        how = words is not None, shared is not None
        embedded, value = _EmbeddingFunction.apply(input, weight, self.padding_idx, self.dtype, *how)
        if shared is not None and value.requires_grad:  # not in a forward without gradients inside one with gradients
            shared.parameter, shared.value = weight, value
        return embedded if words is None else words.tensor.scattered(embedded)


def saved_by_embedding(tokens: int) -> int:
    """Bytes that `Embedding` saves: ids, int64."""
    return tokens * torch.int64.itemsize


class _EmbeddingFunction(torch.autograd.Function):
    """Rows [..., K] of weight [V, K] for ids [...], and with `share` the weight as a second output, for a tied head.

    partly: weight has this rank's words; other ranks' rows are 0, and rows of unknown ids NaN.
    """

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding: int | None, dtype: torch.dtype, partly: bool, share: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.words, ctx.padding, ctx.dtype = weight.shape[0], padding, weight.dtype
        if not partly:
            return embedding(ids, weight, dtype), weight.detach() if share else None
        here = ids >= 0
        rows = embedding(ids.clamp(min=0), weight, dtype).masked_fill_(~here[..., None], 0.0)
        return rows.masked_fill_((ids == UNKNOWN)[..., None], torch.nan), weight.detach() if share else None

    @staticmethod
    def backward(ctx: Any, d_embedded: Tensor | None, d_weight: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("embeddings")
        (ids,) = ctx.saved_tensors
        if d_embedded is not None:
            rows = d_embedded.reshape(-1, d_embedded.shape[-1])
            d_weight = embedding_backward(rows, ids.flatten(), ctx.words, ctx.padding, ctx.dtype, d_weight)
        return None, d_weight, None, None, None, None
