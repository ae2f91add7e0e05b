"""SageMaker's SDK for jobs of this machine: its estimator and trainer, their arguments, and how a job is laid out for a script.

The jobs themselves are of `octavo.launch`, which has these names too. Nothing imports torch: an estimator answers in
milliseconds, and runs on a machine without it.
"""
