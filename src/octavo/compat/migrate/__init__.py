"""`octavo migrate`: finds names of SMP, Transformer Engine and others in a script, by its syntax tree; it is never run.

Nothing imports torch, nor the libraries that a script is written for.
"""
