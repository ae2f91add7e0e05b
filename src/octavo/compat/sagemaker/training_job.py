"""`TrainingJob` of SageMaker's SDK, version 3: a running or finished job, under the SDK's names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from octavo.compat.sagemaker.request import jobs_of
from octavo.launch import job
from octavo.launch.job import FINAL, Job


class TrainingJob(Job):
    """A job with the attributes and methods of the SDK's version 3."""

    @classmethod
    def get(
        cls, training_job_name: str, session: Any = None, region: str | None = None, *, output_path: str | None = None
    ) -> TrainingJob:
        """The job of this name, from any process.

        Args:
            training_job_name: its name.
            session: has no effect.
            region: has no effect.
            output_path: the folder of jobs, if it is not ./jobs.

        Raises:
            InputError: there is no such job.
        """
        return cls(job.find(jobs_of(output_path)[0], training_job_name).folder)

    @property
    def reached_by(self) -> str:
        """A call that reaches the job from another process."""
        return self._call("TrainingJob.get")

    @property
    def training_job_name(self) -> str:
        """The job's name."""
        return self.name

    @property
    def training_job_status(self) -> str:
        """The current status: InProgress, Stopping, Completed, Failed or Stopped."""
        return self.status

    @property
    def failure_reason(self) -> str | None:
        """The reason of a failure; None without one."""
        return self.describe()["FailureReason"] or None

    @property
    def model_artifacts(self) -> SimpleNamespace:
        """`s3_model_artifacts`: the folder of the model."""
        return SimpleNamespace(s3_model_artifacts=self.model_data)

    def get_name(self) -> str:
        """The job's name."""
        return self.name

    def refresh(self) -> TrainingJob:
        """The job; its attributes are always current."""
        return self

    def wait(  # type: ignore[override]
        self, poll: float = 5, timeout: float | None = None, logs: Any = False
    ) -> None:
        """Wait for the end of the job.

        Args:
            poll: no effect: the end is noticed at once.
            timeout: seconds to wait at most; the job itself continues.
            logs: print the log.

        Raises:
            TimeoutError: the timeout expired.
            JobFailed: it failed, or was killed.
            RunStopped: it was stopped.
        """
        if timeout is None:
            super().wait(logs)
            return
        if not self.until(lambda: self.status in FINAL, timeout):
            raise TimeoutError(f"job {self.name} is {self.status} after timeout = {timeout} seconds.")
        super().wait(logs)
