"""Sizes in a group of parameters that FSDP2 gathers and reduces together."""

from __future__ import annotations

from collections.abc import Sequence

LARGE_SHARE = 0.9
"""Least share of a group's elements in its largest parameter."""


def one_is_large(sizes: Sequence[int]) -> bool:
    """True if one parameter has nearly all of these elements, such as an embedding, or a head beside its norm."""
    return bool(sizes) and max(sizes) >= LARGE_SHARE * sum(sizes)
