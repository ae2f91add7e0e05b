"""Arithmetic before the money is spent: FLOPs of a model."""
