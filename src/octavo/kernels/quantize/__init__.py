"""Quantisation in Triton: casts with one scale, with a scale per row or block, and both layouts of FP8 products."""
