"""Collectives of tensor, context and expert parallelism, the attention that overlaps them, and parameters held in parts.

May import kernels and lower levels, but not config.
"""
