"""Attention of short sequences in Triton: forward, backward, and their launches."""
