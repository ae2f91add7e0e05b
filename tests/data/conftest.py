"""A small corpus, and a shorthand for its configuration."""

import json

import numpy as np
import pytest

from octavo.config.data import DataConfig

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "rain",
    "falls",
    "on",
    "hills",
    "ü",
    "漢字",
]


def texts(count, seed=0):
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, size=generator.integers(3, 60))) + f" #{i}" for i in range(count)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def lines(tmp_path):
    """60 documents of 3 to 60 words."""
    return write_lines(tmp_path / "corpus.jsonl", [{"text": text} for text in texts(60)])


@pytest.fixture
def config(tmp_path):
    def make(source, **changes):
        values = {"vocab_size": 350, "sequence_length": 32, "folder": str(tmp_path / "prepared"), "validation_fraction": 0.2}
        return DataConfig(source=source if isinstance(source, list) else str(source), **{**values, **changes})

    return make
