"""The estimator with the positional arguments of SageMaker's SDK, for scripts that import it from `sagemaker.pytorch`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.compat.sagemaker import estimator
from octavo.errors import InputError


class PyTorch(estimator.PyTorch):
    """`octavo.launch.PyTorch` with the SDK's order of positional arguments.

    Raises:
        InputError: as `octavo.launch.PyTorch`, or entry_point is missing.
    """

    def __init__(
        self,
        entry_point: str | Path | None = None,
        framework_version: str | None = None,
        py_version: str | None = None,
        source_dir: str | Path | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        image_uri: str | None = None,
        distribution: Mapping[str, Any] | None = None,
        compiler_config: Any = None,
        **others: Any,
    ) -> None:
        if entry_point is None:
            raise InputError("entry_point is missing: give the script, a .py file.")
        unset = {"framework_version": framework_version, "py_version": py_version, "image_uri": image_uri}
        extra = {name: value for name, value in (unset | {"compiler_config": compiler_config}).items() if value is not None}
        super().__init__(entry_point, source_dir, hyperparameters=hyperparameters, distribution=distribution, **extra, **others)
