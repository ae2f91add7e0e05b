"""Arithmetic before the money is spent: FLOPs and memory of a model. May import parallel and the levels above."""
