"""`octavo migrate`: finds uses of SMP, Transformer Engine and others in a script, by its syntax tree, without running it.

Imports neither torch nor the script's libraries.
"""
