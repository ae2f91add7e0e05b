"""Attention of short sequences in Triton: forward, backward, and what launches them."""
