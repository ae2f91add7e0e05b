"""The public names of the package can be imported as they are written."""

import importlib
from types import ModuleType

import pytest

import octavo

NAMESPACES = [name for name in octavo.__all__ if isinstance(getattr(octavo, name), ModuleType)]


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_namespace_of_the_package_is_a_module_of_that_name(name):
    module = importlib.import_module(f"octavo.{name}")
    assert module is getattr(octavo, name)
    assert module.__name__ == f"octavo.{name}"


def test_recipes_are_those_that_the_layers_carry_out():
    from octavo.fp8 import recipe as defined
    from octavo.recipe import DelayedScaling

    assert "recipe" in NAMESPACES
    assert DelayedScaling is octavo.recipe.DelayedScaling
    assert octavo.recipe.__all__ == defined.__all__
    assert all(getattr(octavo.recipe, name) is getattr(defined, name) for name in defined.__all__)
