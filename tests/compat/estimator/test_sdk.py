"""Names of SageMaker's SDK that are not here: refused with the way, or with the nearest name."""

import importlib

import pytest

from octavo.compat import finder
from octavo.compat.sdk import SHIM, WAYS


@pytest.fixture
def sdk():
    if SHIM.real() is not None:
        pytest.skip("SageMaker's SDK is installed")
    finder.install(SHIM)
    yield
    finder.uninstall(SHIM)


@pytest.mark.parametrize("module", [name for name in WAYS if "." in name])
def test_a_module_that_is_not_here_is_refused_with_the_way(sdk, module):
    with pytest.raises(ImportError) as refused:
        importlib.import_module(module)
    assert WAYS[module] in str(refused.value)


def test_a_mistyped_name_gets_its_nearest(sdk):
    with pytest.raises(AttributeError, match=r"ModelTrainr is not in .* Did you mean ModelTrainer\? Jobs run on this machine"):
        importlib.import_module("sagemaker.modules.train").ModelTrainr  # noqa: B018
    with pytest.raises(ImportError, match="Jobs run on this machine"):
        importlib.import_module("sagemaker.xgboost")
