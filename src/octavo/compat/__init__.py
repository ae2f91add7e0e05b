"""Old names: scripts for Transformer Engine and SageMaker's model parallel library (SMP) run on Octavo without a changed line.

`python -m octavo.compat SCRIPT …` runs a script; `octavo.compat.te.install()` and `octavo.compat.smp.install()` give the names
to a program of one's own. What each name does here is in docs/migrating.md. May import train and the levels above.
"""
