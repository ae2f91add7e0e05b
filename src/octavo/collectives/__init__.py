"""Collectives of context and expert parallelism, with the attention that overlaps them.

May import kernels and the levels above, but not config.
"""
