"""Training: loop, step, optimizer, evaluation. May import plan and lower levels."""
