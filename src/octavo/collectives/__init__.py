"""Collectives of tensor, context and expert parallelism, the attention that overlaps them, and parameters held in parts.

May import kernels and the levels above, but not config.
"""
