"""PyTorch's defaults of the process, set for a test and restored."""

import contextlib

import torch


@contextlib.contextmanager
def default_dtype(dtype):
    """`torch.set_default_dtype(dtype)` inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
