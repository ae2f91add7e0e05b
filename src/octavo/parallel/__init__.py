"""Distribution of a model over ranks and memory, and its CUDA graph; never imports models.

May import nn and lower levels.
"""
