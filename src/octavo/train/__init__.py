"""The training run: one step, the loop around it, and everything that a run leaves on disk."""
