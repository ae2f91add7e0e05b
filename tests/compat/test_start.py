"""An uncaught error of Octavo's as one message."""

import contextlib
import io

import pytest

from octavo.compat.start import _excepthook
from octavo.errors import InputError


def test_a_message_passes_a_hook_that_holds_stderr_back_as_that_of_torch_distributed_does(capfd):
    hook = _excepthook(lambda *_: None, None)
    with pytest.raises(SystemExit) as end, contextlib.redirect_stderr(io.StringIO()):
        hook(InputError, InputError("no such name."), None)
    assert end.value.code == 2
    assert capfd.readouterr().err == "octavo: no such name.\n"
