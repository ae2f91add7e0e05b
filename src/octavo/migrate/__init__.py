"""Uses of other libraries in a script, and their names here: read from its syntax tree, never run.

May import doctor, bench, compat, arguments, verify, fp8_export and the levels above. Nothing imports torch, nor the libraries
that a script is written for.
"""
