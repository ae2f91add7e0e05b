"""The first casts of delayed scaling by a scale that any layout has: Octavo's own are by the amax of what a rank has."""

import contextlib
from unittest import mock

from octavo.fp8 import compiled, quantizer
from octavo.fp8.first_scale import first_scale


@contextlib.contextmanager
def by_one():
    """Inside, and in a function that this decorates, what has not begun is cast by 1: Transformer Engine's rule.

    One rank and several then have the same scales in every step, and their results differ by no more than sums in another
    order. The first casts by Octavo's own rule have tests of their own.
    """

    def one(scales, fp8_max, **options):
        return first_scale(scales, fp8_max, **options | {"native": False})

    with mock.patch.object(quantizer, "first_scale", one), mock.patch.object(compiled, "first_scale", one):
        yield
