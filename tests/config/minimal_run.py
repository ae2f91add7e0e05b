"""The smallest run file, with changes, and the message of a refused one."""

import tomllib

import pytest

from octavo.errors import EXIT_INPUT, InputError

MINIMAL = """\
[model]
source = "llama-tiny"
[data]
source = "text.txt"
sequence_length = 64
[train]
steps = 10
global_batch = 4
"""


def values(**changes):
    """The minimal run as a dict, with `section__key=value` changed."""
    tables = tomllib.loads(MINIMAL)
    for name, value in changes.items():
        section, key = name.split("__")
        tables.setdefault(section, {})[key] = value
    return tables


def message(call, *arguments):
    """The message of an InputError with exit code 2."""
    with pytest.raises(InputError) as raised:
        call(*arguments)
    assert raised.value.exit_code == EXIT_INPUT
    return str(raised.value)
