"""The rows of an embedding, and their gradient summed word by word."""
