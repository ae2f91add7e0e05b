"""Kernels of a mixture of experts: rows sorted by expert, their casts, and the products of stacked matrices."""
