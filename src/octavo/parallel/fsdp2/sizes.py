"""Sizes in a group of parameters that FSDP2 gathers and reduces together."""

from __future__ import annotations

from collections.abc import Sequence

LARGE_SHARE = 0.9
"""Of a group's elements at least are in its largest parameter."""


def one_is_large(sizes: Sequence[int]) -> bool:
    """True if one of these numbers of elements is nearly all of them, as of an embedding, or of a head with its norm."""
    return bool(sizes) and max(sizes) >= LARGE_SHARE * sum(sizes)
