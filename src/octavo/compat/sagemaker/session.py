"""SageMaker's session and role, for scripts that pass them to an estimator; no AWS account is involved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from octavo.errors import InputError


class Session:
    """A session without a cloud; an estimator accepts and ignores it.

    Attributes:
        boto_region_name: the region of `boto_session`, for scripts that look up an image; "local" without a session.
        default_bucket_prefix: the constructor's argument, for scripts that put it into addresses.
    """

    def __init__(
        self,
        *others: Any,
        boto_session: Any = None,
        default_bucket: str | None = None,
        default_bucket_prefix: str | None = None,
        **options: Any,
    ) -> None:
        """boto_session: of boto3; may be the first positional argument. Other arguments have no effect."""
        session = boto_session if boto_session is not None or not others else others[0]
        self.boto_session = SimpleNamespace(region_name="local") if session is None else session
        self.boto_region_name: str = getattr(self.boto_session, "region_name", None) or "local"
        self._bucket = default_bucket
        self.default_bucket_prefix = default_bucket_prefix

    def default_bucket(self) -> str:
        """The SDK's name for an account's bucket, `sagemaker-REGION-ACCOUNT`; no bucket is created.

        Raises:
            InputError: there is no `boto_session` to ask for the account.
        """
        if self._bucket is not None:
            return self._bucket
        if not hasattr(self.boto_session, "client"):
            raise InputError(_refusal("default_bucket"))
        account = self.boto_session.client("sts").get_caller_identity()["Account"]
        return f"sagemaker-{self.boto_region_name}-{account}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(_refusal(name))


def _refusal(name: str) -> str:
    return (
        f"sagemaker.Session().{name} is of an account of AWS, and jobs run on this machine: give folders as inputs and "
        "output_path, and leave the session out."
    )


class LocalSession(Session):
    """The SDK's session of its local mode."""


def retrieve(*others: Any, **options: Any) -> str:
    """`sagemaker.image_uris.retrieve`: always "local". Jobs run in this Python; an estimator logs that the image is unused."""
    return "local"


def get_execution_role(sagemaker_session: Any = None, use_default: bool = False) -> str:
    """`sagemaker.get_execution_role`: always "local". Jobs run under this user."""
    return "local"
