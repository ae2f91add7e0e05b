"""SageMaker's estimator and trainer for jobs on this machine: their arguments, and the folders that a job's script sees.

`octavo.launch` runs the jobs and exports these names too. No module imports torch, so that arguments are checked in
milliseconds, also on machines without torch.
"""
