"""Jobs from the scripts and calls that were written for SageMaker: the estimator, and the supervisor of a job.

May import config and the levels above, but not _version, dtypes, hub. Nothing imports torch: an estimator answers in
milliseconds, and runs on a machine without it.
"""

from octavo.launch.estimator import PyTorch
from octavo.launch.inputs import TrainingInput
from octavo.launch.job import Job, JobFailed

__all__ = ["Job", "JobFailed", "PyTorch", "TrainingInput"]
