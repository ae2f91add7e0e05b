"""Pinned buffer: a copy of the state in host memory, written to disk while training changes the weights.

One block for everything, reused by the next save. For tensors on a GPU it is page-locked, so that copies run at the speed of
the link; locking takes about a second for some gigabytes, hence the reuse. PyTorch's pinned allocator would round the size up
to a power of two.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch

from octavo.errors import OctavoError

_ALIGNMENT = 64  # bytes, enough for any dtype


class PinnedBuffer:
    """A block of host memory for copies of tensors. The result of `copy` is valid until the next `copy`."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._pinned = False

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous copies in host memory, complete on return.

        Raises:
            OctavoError: there is not enough host memory.
        """
        starts = [0]
        for tensor in tensors:
            starts.append(starts[-1] + math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT)
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._reserve(starts[-1], pinned=bool(devices))
        copies = []
        for tensor, start in zip(tensors, starts[:-1], strict=True):
            slot = self._block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(slot.copy_(tensor.detach(), non_blocking=True))
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def _reserve(self, size: int, *, pinned: bool) -> None:
        if size <= len(self._block) and (self._pinned or not pinned):
            return
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")  # free the old block first: two would not fit
        try:
            self._block = torch.empty(size, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise _out_of_memory(size) from error
        self._pinned = pinned
        if pinned and size:
            runtime = torch.cuda.cudart()
            if int(runtime.cudaHostRegister(self._block.data_ptr(), size, 0)) != 0:
                raise _out_of_memory(size)
            weakref.finalize(self._block, runtime.cudaHostUnregister, self._block.data_ptr()).atexit = False


def _out_of_memory(size: int) -> OctavoError:
    return OctavoError(
        f"not enough host memory to write checkpoints in the background: {size:,} bytes are needed for the copy. "
        "Set checkpoint.async = false."
    )
