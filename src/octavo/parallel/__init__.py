"""How a model is spread over ranks and memory; never imports models."""
