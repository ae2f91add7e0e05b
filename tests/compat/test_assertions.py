"""Refusals of recipes and of models without values are no assert statements, which `python -O` leaves out."""

import importlib
import types
from pathlib import Path

import pytest
import torch

from octavo.errors import InputError


def without_asserts(name):
    """A module of this name as `python -O` compiles it, beside the one that is imported."""
    spec = importlib.import_module(name).__spec__
    module = types.ModuleType(name)
    module.__file__, module.__package__ = spec.origin, spec.parent
    source = Path(spec.origin).read_text(encoding="utf-8")
    exec(compile(source, spec.origin, "exec", dont_inherit=True, optimize=1), module.__dict__)
    return module


def test_what_is_compiled_like_this_asserts_nothing():
    exec(compile("assert False", "", "exec", dont_inherit=True, optimize=1))


@pytest.mark.parametrize("given", ["fp8_format", "override_linear_precision", "backward_override"])
def test_a_recipe_is_refused(given):
    recipes = without_asserts("octavo.compat.te.recipes")
    values = {
        "fp8_format": recipes.Format.E5M2,
        "override_linear_precision": (True, False, False),
        "backward_override": "x",
    }
    with pytest.raises((AssertionError, InputError)):
        recipes.DelayedScaling(**{given: values[given]})


def test_a_model_without_values_is_refused():
    initer = without_asserts("octavo.compat.smp.delayed").DelayedParamIniter
    one = initer.__new__(initer)
    one.model = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises((AssertionError, InputError)), one.validate_params_and_buffers_inited():
        pass
