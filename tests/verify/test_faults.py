"""`octavo verify` finds every fault that is planted, and names the right parameter or record first."""

import random

import pytest
from verified import comparisons, run_of

from faults import FAULTS

SHORT = set(random.Random(50).sample(sorted(FAULTS), 2))
"""Those that `make test` plants."""


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.long(lambda name: name not in SHORT)
def test_a_planted_fault_is_found_and_named(name):
    fault = FAULTS[name]
    found = comparisons(run_of(fault.source, **fault.sections), fault.world, fault.degrees, kinds=[fault.kind], fault=name)
    where, first = next((where, each.first) for where, each in found.items() if each.first is not None)
    assert first.name.startswith(fault.named), (where, first)
    assert fault.where in where, (where, first)
