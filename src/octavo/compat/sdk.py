"""SageMaker's SDK as far as its estimator goes, for scripts that start jobs: `octavo.launch` under its names. Loads no torch.

Only where the SDK is not installed: with it, such a script means the cloud. `--replace-installed` takes the names there too.
"""

from __future__ import annotations

import os

from octavo.compat import finder
from octavo.compat.finder import REPLACE, Names, Shim

_SESSION = "octavo.launch.session"

MODULES: dict[str, Names] = {
    "sagemaker": {_SESSION: "Session get_execution_role"},
    "sagemaker.session": {_SESSION: "Session get_execution_role"},
    "sagemaker.inputs": {"octavo.launch.inputs": "TrainingInput"},
    "sagemaker.pytorch": {"octavo.launch.sdk": "PyTorch"},
    "sagemaker.pytorch.estimator": {"octavo.launch.sdk": "PyTorch"},
}
_CLOUD = "Jobs run on this machine: octavo.launch.PyTorch starts them."
WAYS = {"sagemaker": _CLOUD, "FileSystemInput": "Mount the file system, and give its folder as an input."}

SHIM = Shim("sagemaker", "SageMaker's SDK", MODULES, WAYS)


def install_if_absent() -> None:
    """Give this process the SDK's names, unless the SDK is installed."""
    if SHIM.real() is None or os.environ.get(REPLACE) == "1":
        finder.install(SHIM)
