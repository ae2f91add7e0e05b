"""The training step, the loop around it, and the plan that both follow."""
