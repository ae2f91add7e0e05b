"""Distribution of a model over ranks and memory; never imports models. May import nn and the levels above."""
