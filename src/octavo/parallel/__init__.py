"""Distribution of a model over ranks and memory, and its CUDA graph; never imports models.

May import nn and the levels above.
"""
