"""Distribution of a model over ranks and memory; never imports models."""
