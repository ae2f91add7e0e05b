"""What the tests of `octavo verify` run on every rank."""

import contextlib
from unittest import mock

import tensor_faults

from octavo.verify import worker


def results(task, name=None):
    """Results of a task, with a fault of `tensor_faults` by its name."""
    fault = None if name is None else tensor_faults.FAULTS[name]
    with contextlib.ExitStack() as stack:
        if fault is not None:
            planted = fault.fault(getattr(fault.owner, fault.name))
            stack.enter_context(mock.patch.object(fault.owner, fault.name, planted))
        return worker.results(worker.Task(**task))
