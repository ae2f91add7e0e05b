"""Attention: its patterns, libraries' kernels joined piece by piece, and Triton kernels of short sequences."""
