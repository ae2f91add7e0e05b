"""Tensors in, tensors out: no state, no modules. `reference` defines what is correct.

May import hardware, storage and the levels above.
"""
