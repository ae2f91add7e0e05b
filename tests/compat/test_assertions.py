"""Refusals of recipes and of models without values hold under `python -O` too."""

import subprocess
import sys

SCRIPT = """
import torch
from octavo.compat.smp.delayed import DelayedParamIniter
from octavo.compat.te.recipes import DelayedScaling, Format
from octavo.errors import InputError


def without_values():
    initer = DelayedParamIniter.__new__(DelayedParamIniter)
    initer.model = torch.nn.Linear(2, 2, device="meta")
    with initer.validate_params_and_buffers_inited():
        pass


tried = {
    "E5M2": lambda: DelayedScaling(fp8_format=Format.E5M2),
    "override_linear_precision": lambda: DelayedScaling(override_linear_precision=(True, False, False)),
    "backward_override": lambda: DelayedScaling(backward_override="x"),
    "a model on meta": without_values,
}
for name, call in tried.items():
    try:
        call()
    except (AssertionError, InputError):
        continue
    raise SystemExit(f"{name} was accepted")
"""


def test_they_are_raised_without_assert_statements():
    done = subprocess.run([sys.executable, "-O", "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
