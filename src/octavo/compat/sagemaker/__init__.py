"""SageMaker's estimator and trainer for jobs on this machine: their arguments, and the folders that a job's script sees.

`octavo.launch` runs the jobs and exports these names too. Nothing imports torch: an estimator checks its arguments in
milliseconds, on machines without torch too.
"""
