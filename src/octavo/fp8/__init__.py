"""FP8 for training: formats, recipes, scaling state, and the context in which products run in 8 bits.

May import collectives and lower levels, but not config.
"""

from octavo.fp8.autocast import fp8_autocast
from octavo.fp8.formats import Format
from octavo.fp8.scaling import inspect

__all__ = ["Format", "fp8_autocast", "inspect"]
