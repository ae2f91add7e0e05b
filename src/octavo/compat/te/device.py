"""The default device of new layers: the GPU, as in Transformer Engine; the CPU on a machine without one."""

from __future__ import annotations

import torch


def default_device() -> torch.device | None:
    """This process's GPU; None, for PyTorch's default, without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
