"""Tensors in, tensors out: no state, no modules. `reference` is the definition of correct.

May import hardware, storage, libraries, job_ranks, supervision and lower levels.
"""
