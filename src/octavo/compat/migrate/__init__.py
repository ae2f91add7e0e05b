"""`octavo migrate`: finds names of SMP, Transformer Engine and others in a script, by its syntax tree, without running it.

Imports neither torch nor the libraries that a script is written for.
"""
