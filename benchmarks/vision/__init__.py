"""Vision transformers: models of the entries, over ranks too, with prices beside their speeds."""
