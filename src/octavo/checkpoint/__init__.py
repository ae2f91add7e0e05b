"""Checkpoints: save, verify, resume, on any number of ranks. May import data and the levels above."""
