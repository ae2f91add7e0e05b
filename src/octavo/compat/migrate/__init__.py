"""Uses of other libraries in a script, and their names here: read from its syntax tree, never run.

Nothing imports torch, nor the libraries that a script is written for.
"""
