"""Collectives of context and expert parallelism, with the attention that overlaps them, and parameters that ranks share out.

May import kernels and the levels above, but not config.
"""
