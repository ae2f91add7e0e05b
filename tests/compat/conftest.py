"""The shims in the tests' own process: installed for one test, and everything as before afterwards."""

import sys
from pathlib import Path

import pytest

import octavo
import octavo.compat.smp
import octavo.compat.te

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "nn"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(autouse=True)
def state_of_one_rank():
    """The seed of initial weights is that of `octavo.state`, whatever tests before have left there."""
    octavo.shutdown()


@pytest.fixture
def te():
    """`transformer_engine.pytorch`."""
    octavo.compat.te.install()
    try:
        import transformer_engine.pytorch as te

        yield te
    finally:
        octavo.compat.te.uninstall()


@pytest.fixture
def tsm():
    """`torch.sagemaker`."""
    octavo.compat.smp.install()
    try:
        import torch.sagemaker as tsm

        yield tsm
    finally:
        octavo.compat.smp.uninstall()
