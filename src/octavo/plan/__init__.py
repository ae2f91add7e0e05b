"""Arithmetic before the money is spent: FLOPs of a model. May import parallel and the levels above."""
