"""Exchanges of tensors over process groups that compute with them: context parallelism.

May import kernels and the levels above, but not config.
"""
