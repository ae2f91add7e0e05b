"""Vocab-parallel cross entropy: each rank of a tensor group has a slice of the words, so that no rank holds all logits.

One collective for each chunk of tokens joins the maxima, sums and target logits.
"""

from __future__ import annotations

from torch import Tensor

from octavo.collectives.work import start_gather
from octavo.kernels.cross_entropy import Gradient, Objective
from octavo.kernels.cross_entropy_slices import cross_entropy_of_statistics_, statistics
from octavo.nn.embedding import Words


def cross_entropy_of_slices_(
    logits: Tensor,
    target: Tensor,
    grad_scale: Tensor | None,
    objective: Objective,
    fp8: Tensor | None,
    words: Words,
) -> tuple[Tensor, Gradient | None]:
    """`octavo.kernels.cross_entropy.cross_entropy_` for logits [N, V / n]: the loss over all words, the gradient of this
    rank's.

    Columns behind `words.number` are padding, whose gradient is 0. Collective.
    """
    local = statistics(logits, target, words, objective, reread=grad_scale is not None)
    of_ranks = start_gather(local, words.tensor.group).wait()  # [n, 3 or 4, N]
    return cross_entropy_of_statistics_(logits, target, of_ranks, grad_scale, objective, words, fp8)
