"""What is made of a run after it ended."""
