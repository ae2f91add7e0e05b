"""Host memory that holds a copy of the state while it is written and the weights already change.

One block for everything, kept for the next save. From a GPU it is page-locked, so that all copies run at the speed of the
link and the host waits for them once; locking costs a second for some gigabytes, hence the reuse. PyTorch's own pinned
allocator is not used because it rounds a block up to a power of two.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch

from octavo.errors import OctavoError

_ALIGNED = 64  # bytes: any dtype may begin there


class Staging:
    """A block of host memory for copies of tensors; what `copy` returned is valid until the next `copy`."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._locked = False

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous copies in host memory, complete when this returns.

        Raises:
            OctavoError: there is not enough host memory.
        """
        starts = [0]
        for tensor in tensors:
            starts.append(starts[-1] + math.ceil(tensor.nbytes / _ALIGNED) * _ALIGNED)
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._reserve(starts[-1], locked=bool(devices))
        copies = []
        for tensor, start in zip(tensors, starts[:-1], strict=True):
            place = self._block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(place.copy_(tensor.detach(), non_blocking=True))
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def _reserve(self, size: int, *, locked: bool) -> None:
        if size <= len(self._block) and (self._locked or not locked):
            return
        self._block = torch.empty(0, dtype=torch.uint8)  # the old one goes first: two would not fit
        try:
            self._block = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise OctavoError(_too_little(size)) from error
        self._locked = locked
        if locked and size:
            runtime = torch.cuda.cudart()
            if int(runtime.cudaHostRegister(self._block.data_ptr(), size, 0)) != 0:
                raise OctavoError(_too_little(size))
            weakref.finalize(self._block, runtime.cudaHostUnregister, self._block.data_ptr()).atexit = False


def _too_little(size: int) -> str:
    return (
        f"not enough host memory to write checkpoints in the background: {size:,} bytes are needed for the copy. "
        "Set checkpoint.async = false."
    )
