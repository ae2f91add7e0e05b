"""Random generators of data: each depends on a seed and a purpose alone.

A counter-based generator keyed by (seed, stream) gives the same numbers in every process, whatever was drawn before: there is
no state to save or to share between ranks.
"""

from __future__ import annotations

import numpy as np

DOCUMENTS = 2**63
"""Stream of the choice of documents."""
SPLIT = 2**63 + 1
"""Stream of the validation split."""
TOKENIZER = 2**63 + 2
"""Stream of the documents that train a tokenizer."""


def generator(seed: int, stream: int) -> np.random.Generator:
    """The generator of a stream; streams below 2**63 are the epochs of sample order."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)))
