"""SageMaker's session and role, for scripts that hand them to an estimator: names without an account behind them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from octavo.errors import InputError


class Session:
    """A session of no cloud: an estimator takes it, and asks it nothing."""

    boto_region_name = "local"
    """No region, for scripts that look an image up by it."""

    def __init__(self, *others: Any, **options: Any) -> None:
        """Arguments mean nothing here."""
        self.boto_session = SimpleNamespace(region_name=self.boto_region_name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(
            f"sagemaker.Session().{name} is of an account of AWS, and jobs run on this machine: give folders as inputs and "
            "output_path, and leave the session out."
        )


class LocalSession(Session):
    """The SDK's session of its local mode."""


def retrieve(*others: Any, **options: Any) -> str:
    """An image of `sagemaker.image_uris`: a job runs in this Python, and what an estimator is given of it is said."""
    return "local"


def get_execution_role(sagemaker_session: Any = None, use_default: bool = False) -> str:
    """A role of nobody: jobs run under this user."""
    return "local"
