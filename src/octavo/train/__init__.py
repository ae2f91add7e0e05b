"""Training: run plan, loop, step, optimizer, evaluation, and the choice of layers for FP8.

May import run and the levels above.
"""
