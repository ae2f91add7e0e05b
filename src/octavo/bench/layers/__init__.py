"""The layers suite: errors of layers against float64, beside Transformer Engine."""
