"""`octavo.process`: what belongs to the process is in one object, and a test may begin with a clean one."""

import torch

import octavo
from octavo.process import Process, fresh, process


def test_a_fresh_process_knows_nothing_and_ends_as_it_began():
    layer = octavo.nn.Linear(16, 16)
    with octavo.fp8_autocast():
        layer(torch.randn(2, 16)).sum().backward()
    known, numbers = list(process.fp8_modules.values()), process.numbers
    assert layer.fp8_state in known
    with fresh():
        assert vars(process).keys() == vars(Process()).keys()
        assert not process.fp8_modules
        assert not process.said
        assert process.numbers is numbers  # a number is never of two
        inside = octavo.nn.Linear(16, 16)
        with octavo.fp8_autocast():
            inside(torch.randn(2, 16))
        assert list(process.fp8_modules.values()) == [inside.fp8_state]
    assert list(process.fp8_modules.values()) == known
    with octavo.fp8_autocast():
        layer(torch.randn(2, 16)).sum().backward()
    assert octavo.fp8.inspect(layer)["input"]["amax_history"].count_nonzero() == 2
