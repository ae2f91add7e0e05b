"""A run before it starts: checked against the machine, its memory and FLOPs, and the layers that run in FP8.

May import run and lower levels.
"""
