"""Quantisation in Triton: casts with one scale, with a scale a row or block, and both layouts of FP8 products."""
