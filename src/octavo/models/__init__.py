"""Known families as Octavo's decoder, and Hugging Face's weights in and out. May import nn and lower levels."""
