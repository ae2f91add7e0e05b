"""Checks the paths in a run file before torch and transformers are imported, so that a typo costs half a second.

Existence is checked; files are not read. The modules that use the paths repeat these checks.
"""

from __future__ import annotations

from octavo.config.run import RunConfig
from octavo.data import tokenizer
from octavo.data.corpus import Corpus
from octavo.models.shapes import check_source


def check_paths(config: RunConfig) -> None:
    """Check that the local files and folders of a run exist.

    Raises:
        InputError: a file of data.source, data.tokenizer or model.source does not exist.
    """
    check_source(config.model.source)
    Corpus(config.data)
    if config.data.tokenizer != "train":
        tokenizer.check(config.data.tokenizer)
