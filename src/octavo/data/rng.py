"""Random generators of data: counter-based, keyed by (seed, stream), so that there is no state to save or to share."""

from __future__ import annotations

import numpy as np

DOCUMENTS = 2**63  # stream of the choice of documents
SPLIT = 2**63 + 1  # of the validation split
TOKENIZER = 2**63 + 2  # of the documents that train a tokenizer


def generator(seed: int, stream: int) -> np.random.Generator:
    """The generator of a stream; streams below 2**63 are the epochs of sample order."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, stream], dtype=np.uint64)))
