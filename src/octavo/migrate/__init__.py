"""What a script uses of other libraries, and what it becomes here: read from its syntax tree, never run.

May import doctor, bench, compat, arguments and the levels above. Nothing imports torch, nor the libraries that a script is
written for.
"""
