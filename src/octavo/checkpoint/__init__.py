"""Checkpoints: save, verify, resume, on any number of ranks. May import data and lower levels."""
