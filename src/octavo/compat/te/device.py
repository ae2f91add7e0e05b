"""Transformer Engine's default device is the GPU; a machine without one runs the same script on its CPU."""

from __future__ import annotations

import torch


def default_device() -> torch.device | None:
    """This process's GPU; None, for PyTorch's default, without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
