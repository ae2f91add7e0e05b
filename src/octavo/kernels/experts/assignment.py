"""Assignments of tokens to experts other than by the largest logits: Sinkhorn's iteration, and round robin. No gradients.

The iteration stops by a flag on the device, and the host reads it once in `STRIDE` steps: the host waits for a GPU once per
call in most cases, and the result does not depend on the stride. In a CUDA graph all `LIMIT` steps run, with the same result.

Legend: T tokens, K experts per token (`top_k`), E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = 1e-4
"""The iteration ends when the mean change of the experts' factors is below this."""
LIMIT = 256
"""Largest number of steps; the algorithm itself has no limit.

The addend of its sums scales all factors alike in each step. The order of the experts stays the same, but with factors above
some 10⁴ it stays above the tolerance for more than 20,000 steps, in float64 too. At 4096 tokens of 8 experts with logits of
standard deviation 5, the experts of 0.05% of the tokens differ between steps 256 and 20,000; of deviation 10, 0.8%.
"""
STRIDE = 16
"""Steps between two reads of the flag: logits of a router take 3 to 15 steps."""
_EPS = 1e-8


# A compiler cannot trace a loop whose end depends on data.
@torch.compiler.disable
@torch.no_grad()
def sinkhorn_factors(logits: Tensor, counted: Tensor | None = None) -> Tensor:
    """Logarithms of the experts' factors, float32 [E], for logits float32 [T, E]; a token's experts have the largest sums.

    The factors of tokens and experts that give exp(logits) rows of sum 1 / T and columns of sum 1 / E, iterated alternately. A
    token's factor does not change the order of its experts. counted: bool [T], the tokens that take part; all if absent. NaN
    and infinite logits end the iteration and give factors of NaN; without a token all factors are 1.

    Source: `sinkhorn` of Megatron-LM's megatron/core/transformer/moe/moe_utils.py, with its tolerance and its addend to each
    sum. There, exp overflows above 88, and the iteration has no limit.
    """
    experts = logits.shape[1]
    largest = logits.amax(1, keepdim=True) if logits.shape[0] else logits[:, :1]
    cost, eps = (logits - largest).exp(), _EPS * (-largest).exp()  # both sides of a row's quotient times exp(-largest)
    if counted is None:
        count, ones = logits.new_tensor(max(1, logits.shape[0])), None
    else:
        count, ones = counted.sum().clamp(min=1).float(), counted[:, None]
    factors = logits.new_ones(experts)
    done = logits.new_zeros((), dtype=torch.bool) if ones is None else ~ones.any()
    if not logits.shape[0]:
        return factors.log()
    capturing = logits.is_cuda and torch.cuda.is_current_stream_capturing()
    for step in range(LIMIT):
        of_tokens = 1 / (count * ((cost * factors).sum(1, keepdim=True) + eps))
        if ones is not None:
            of_tokens = of_tokens.where(ones, 0.0)
        shares = cost * of_tokens if ones is None else (cost * of_tokens).where(ones, 0.0)
        new = 1 / (experts * (shares.sum(0) + _EPS))
        change = (new - factors).abs().mean()
        factors = torch.where(done, factors, new)
        done = done | ~(change > TOLERANCE)
        if not capturing and (not logits.is_cuda or step % STRIDE == STRIDE - 1) and done:
            break
    return factors.log()


def sinkhorn(logits: Tensor, top_k: int, counted: Tensor | None = None) -> Tensor:
    """Experts of each token by `sinkhorn_factors`: int64 [T, K]."""
    logits = logits.detach()
    return torch.topk(logits + sinkhorn_factors(logits, counted), top_k, dim=-1).indices


def round_robin(logits: Tensor, top_k: int) -> Tensor:
    """Experts K·t to K·t + K - 1 modulo E of token t, int64 [T, K]: loads that differ by at most one, whatever the logits."""
    tokens, experts = logits.shape
    return torch.arange(tokens * top_k, device=logits.device).remainder(experts).view(tokens, top_k)
