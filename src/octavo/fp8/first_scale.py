"""The first scale of a tensor under delayed scaling, until a finite amax above 0 has been recorded for it.

Octavo's rule is that of current scaling: the scale of the tensor's amax, reduced over the ranks that hold parts of it.
Transformer Engine's rule is scale 1. Neither writes a scale or a history. Whether an entry has a scale is decided on the
device: the host may learn of it later, without a change of a bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.quantize.cast_scaled import scale_from_amax


def first_scale(scales: Tensor, fp8_max: float, *, native: bool, partly: bool, largest: Callable[[], Tensor]) -> Tensor:
    """The scales of a cast: the buffer's, and the first scale for entries that have not begun (NaN).

    An expert without a scale takes the scale of the largest amax of its stack: in the histories if an expert has a scale, else
    in the tensors.

    Args:
        scales: float32 [] or [E].
        native: use Octavo's rule.
        partly: the host knows that at least one expert has a scale.
        largest: returns the amaxes, float32 [] or [E], or of a stack the largest of all; called only if needed.
    """
    if not native:
        return torch.where(scales.isnan(), 1.0, scales)
    if not scales.dim():
        return torch.where(scales.isnan(), scale_from_amax(largest(), fp8_max), scales)
    smallest = scales.nan_to_num(nan=torch.inf).amin()
    if not partly:
        smallest = torch.where(smallest.isinf(), scale_from_amax(largest().amax(), fp8_max), smallest)
    return torch.where(scales.isnan(), smallest, scales)
