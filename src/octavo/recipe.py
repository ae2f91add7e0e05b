"""Recipes of `octavo.fp8_autocast`, so that `from octavo.recipe import DelayedScaling` works as `octavo.recipe` does.

`octavo.fp8.recipe` defines them, with further names for the layers.
"""

from octavo.fp8.recipe import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    Operand,
    Recipe,
    RowwiseScaling,
    coerce,
)

__all__ = [
    "BlockScaling", "CurrentScaling", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format", "Operand",
    "Recipe", "RowwiseScaling", "coerce",
]  # fmt: skip
