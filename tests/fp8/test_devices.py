"""Where FP8 units are missing: said once, in high precision, or emulated on request."""

import copy
import gc
import warnings

import pytest
import torch

import octavo
from octavo.fp8 import autocast
from octavo.fp8.scaling import load_state_records, state_records
from octavo.kernels import gemm
from octavo.process import process

AMPERE = torch.device("cuda", 7)


@pytest.fixture
def ampere(monkeypatch):
    """A GPU of compute capability 8.0, as far as the choice of products can see."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(process, "said", set())
    gemm.capability.cache_clear()
    yield
    gemm.capability.cache_clear()


def test_a_gpu_without_fp8_units_runs_without_and_says_so_once(ampere):
    assert not gemm.is_native(AMPERE)
    with octavo.fp8_autocast():
        with pytest.warns(UserWarning, match=r"cuda:7 has no FP8 units .*emulate=True"):
            assert autocast.current_recipe(AMPERE) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert autocast.current_recipe(AMPERE) is None


def test_it_emulates_on_request(ampere):
    recipe = octavo.recipe.CurrentScaling()
    with octavo.fp8_autocast(fp8_recipe=recipe, emulate=True):
        assert autocast.current_recipe(AMPERE) is recipe


def test_a_cpu_always_emulates(ampere):
    recipe = octavo.recipe.CurrentScaling()
    with octavo.fp8_autocast(fp8_recipe=recipe):
        assert autocast.current_recipe(torch.device("cpu")) is recipe


def test_a_copy_outlives_its_original():
    layer = octavo.nn.Linear(16, 16)
    with octavo.fp8_autocast():
        layer(torch.randn(4, 16)).sum().backward()
    twin = copy.deepcopy(layer)
    records = state_records(layer)
    del layer
    gc.collect()
    assert twin.fp8_state.device == torch.device("cpu")
    load_state_records(twin, records, octavo.recipe.DelayedScaling())
    assert all(torch.equal(value, records[name]) for name, value in state_records(twin).items())
