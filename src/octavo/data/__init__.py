"""Text to batches: sources, tokenizer, token files, packing, and the order of samples.

May import build and lower levels.
"""
