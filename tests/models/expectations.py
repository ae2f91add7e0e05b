"""Refusals and equal bits, as the tests of models state them."""

import pytest
import torch

from octavo.errors import EXIT_INPUT, InputError


def refused(words, call, *arguments, **options):
    """`call` raises an InputError with exit code 2, whose message has each of the words; returns the message."""
    with pytest.raises(InputError) as raised:
        call(*arguments, **options)
    assert raised.value.exit_code == EXIT_INPUT
    for word in (words,) if isinstance(words, str) else words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"
    return str(raised.value)


def same_bits(one, other):
    """Two tables of tensors have the same names, dtypes and bits."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name
