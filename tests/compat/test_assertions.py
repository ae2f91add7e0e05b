"""Refusals of recipes and of models without values are no assert statements, which `python -O` leaves out."""

import importlib
import sys
import types
from pathlib import Path

import pytest
import torch

from octavo.errors import InputError


@pytest.fixture
def without_asserts(monkeypatch):
    """`without_asserts(name)`: a module as `python -O` compiles it, in the place of the one that is imported."""

    def compiled(name):
        spec = importlib.import_module(name).__spec__
        module = types.ModuleType(name)
        module.__file__, module.__package__ = spec.origin, spec.parent
        monkeypatch.setitem(sys.modules, name, module)  # where annotations look for their names
        source = Path(spec.origin).read_text(encoding="utf-8")
        exec(compile(source, spec.origin, "exec", dont_inherit=True, optimize=1), module.__dict__)
        return module

    return compiled


def test_what_is_compiled_like_this_asserts_nothing():
    names = {}
    exec(compile("assert False\nreached = True", "", "exec", dont_inherit=True, optimize=1), names)
    assert names["reached"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fp8_format": "E5M2"}, "fp8_format E5M2 is not supported"),
        ({"override_linear_precision": (True, False, False)}, "belongs to Transformer Engine 1"),
        ({"backward_override": "x"}, "supports only None"),
    ],
)
def test_a_recipe_is_refused(without_asserts, given, said):
    recipes = without_asserts("octavo.compat.te.recipes")
    formats = {name: recipes.Format[value] for name, value in given.items() if name == "fp8_format"}
    with pytest.raises((AssertionError, InputError), match=said):
        recipes.DelayedScaling(**given | formats)


def test_a_model_without_values_is_refused(without_asserts):
    initer = without_asserts("octavo.compat.smp.delayed").DelayedParamIniter
    one = initer.__new__(initer)
    one.model = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises((AssertionError, InputError), match="have no values"), one.validate_params_and_buffers_inited():
        pass
