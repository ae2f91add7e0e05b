"""Runs scripts written for Transformer Engine or SageMaker's model parallel library (SMP) on Octavo, unchanged.

`python -m octavo.compat SCRIPT …` runs a script; `octavo.compat.te.install()` and `octavo.compat.smp.install()` make the names
importable in your program. docs/migrating.md lists what each name does. May import train and lower levels.
"""
