"""Checkpoints: save, verify, resume, on any number of ranks."""
