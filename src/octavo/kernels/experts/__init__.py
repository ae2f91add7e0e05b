"""Kernels of mixtures of experts (MoE): rows sorted by expert, their casts, and the products of stacked matrices."""
