"""The guard of autograd functions whose backward runs kernels, which autograd does not see."""

from __future__ import annotations

import torch


def refuse_second_derivative(of: str) -> None:
    """Call first in a backward: a RuntimeError under create_graph=True. of: subject of the message, in the plural."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{of} have no second derivative: call backward without create_graph=True.")
