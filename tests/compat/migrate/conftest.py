"""The old names in this process, for tests that run what they read."""

import pytest
import torch

import octavo
from octavo.compat import finder
from octavo.compat.smp.shim import SHIM as SMP
from octavo.compat.te.shim import SHIM as TE


@pytest.fixture(scope="module")
def names():
    """Transformer Engine's and SMP's names, which tests of a module import."""
    if torch.cuda.is_available():
        pytest.skip("of a machine without a GPU, where layers and inputs are on one device")
    there = [shim for shim in (TE, SMP) if finder.installed(shim) is None]
    for shim in there:
        finder.install(shim)
    yield
    octavo.shutdown()
    for shim in there:
        finder.uninstall(shim)
