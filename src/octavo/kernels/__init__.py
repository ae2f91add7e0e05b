"""Tensors in, tensors out: no state, no modules. `reference` defines what is correct."""
