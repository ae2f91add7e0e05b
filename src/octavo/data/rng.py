"""Random numbers that depend on a seed and a purpose, and on nothing else.

A counter-based generator keyed by (seed, stream) gives the same numbers in every process, at any time, whatever was drawn
before: no state to save, none to share between ranks.
"""

from __future__ import annotations

import numpy as np

DOCUMENTS = 2**63
"""The stream for which documents are taken."""

SPLIT = 2**63 + 1
"""The stream for which documents are held out."""

TOKENIZER = 2**63 + 2
"""The stream for which documents a tokenizer learns from."""


def generator(seed: int, stream: int) -> np.random.Generator:
    """The generator of a purpose; streams below 2**63 are the epochs of sample order."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)))
