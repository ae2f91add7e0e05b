"""Initial weights without a random state: each element is a function of (seed, parameter name, element number).

A generator's stream depends on the order and the number of draws, so ranks that hold different parts would start from different
models. A counter does not: any rank can compute any slice, and 1, 2 or 4 ranks start from the same weights. The hash is
splitmix64's finaliser over the element number, offset by a key from SHA-256; normal values come from Box and Muller.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_CHUNK = 1 << 22
_MIX_1, _MIX_2, _GOLDEN = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15, -0x61C8864680B583EB  # as signed 64-bit integers


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift: torch has no unsigned 64-bit arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big", signed=True)


@torch.no_grad()
def counter_normal_(tensor: Tensor, *, seed: int, name: str, std: float, first_element: int = 0) -> Tensor:
    """Fill `tensor` in place with normal values of mean 0, by its elements' numbers in the whole parameter.

    Args:
        tensor: contiguous, any float dtype; the elements `first_element`, `first_element + 1`, … of parameter `name`.
        seed: of the run.
        name: the parameter's name in the model.
        std: standard deviation.
        first_element: where in the flattened parameter this part begins.
    """
    flat = tensor.view(-1)
    key = _key(seed, name)
    for start in range(0, flat.numel(), _CHUNK):
        stop = min(start + _CHUNK, flat.numel())
        number = torch.arange(first_element + start, first_element + stop, device=tensor.device)
        bits = _mix(_mix(number * _GOLDEN + key) ^ key)
        # 24 bits each for radius and angle: uniform in (0, 1] and [0, 1), exact in float32.
        radius = (_shift_right(bits, 40).float() + 1) / (1 << 24)
        angle = (_shift_right(bits << 24, 40).float()) / (1 << 24)
        flat[start:stop] = (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos() * std
    return tensor
