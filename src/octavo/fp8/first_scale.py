"""The scale of a tensor that delayed scaling has not begun: no finite amax above 0 has given it one.

Octavo's own rule casts it as current scaling does, by its own amax, joined over the ranks that hold parts of the tensor;
Transformer Engine's casts it by 1. Neither writes a scale or a history. Whether an entry has begun is read on the device, so
that the host may learn of it later without a change of a bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.quantize.cast_scaled import scale_from_amax


def first_scale(scales: Tensor, fp8_max: float, *, native: bool, partly: bool, largest: Callable[[], Tensor]) -> Tensor:
    """The scales of a cast: those of the buffer, and for entries that have not begun (NaN) the first.

    An expert that has not begun takes the scale of the largest amax of its stack: of the histories if one of it has begun,
    otherwise of its own tensors.

    Args:
        scales: float32 [] or [E].
        native: by Octavo's own rule.
        partly: the host knows that an expert has begun.
        largest: gives the amaxes, float32 [] or [E], or of a stack the largest of all; called where they are needed.
    """
    if not native:
        return torch.where(scales.isnan(), 1.0, scales)
    if not scales.dim():
        return torch.where(scales.isnan(), scale_from_amax(largest(), fp8_max), scales)
    smallest = scales.nan_to_num(nan=torch.inf).amin()
    if not partly:
        smallest = torch.where(smallest.isinf(), scale_from_amax(largest().amax(), fp8_max), smallest)
    return torch.where(scales.isnan(), smallest, scales)
