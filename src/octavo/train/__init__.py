"""Training: loop, step, optimizer, evaluation. May import plan and the levels above."""
