"""generation_config.json, copied unchanged: transformers refuses some of the Hub's as a whole, and drops keys of others.

A run stores the file of its source. An export changes it only where it must: ids of special tokens are the run's tokenizer's,
and a key for which transformers would refuse the whole file, and with it the model's folder, is left out. A notice says both.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import GenerationConfig

from octavo.errors import InputError, first_line
from octavo.models.shapes import SHAPES

FILE = "generation_config.json"
_IDS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids", "forced_decoder_ids", "sequence_bias")
"""Keys with token ids whose names do not end in _token_id."""


@dataclass(frozen=True)
class GenerationFile:
    """The text of a generation_config.json and its values; those of `text`."""

    text: str
    values: Mapping[str, Any]

    def to_json_string(self) -> str:
        """The text, as `GenerationConfig` has it."""
        return self.text

    def changed(self, values: Mapping[str, Any]) -> GenerationFile:
        """The file with these values changed, None to remove a key; itself if nothing changes."""
        table = dict(self.values)
        for key, value in values.items():
            if value is None and table.get(key) is not None:
                del table[key]
            elif value is not None:
                table[key] = value
        return self if table == self.values else GenerationFile(json.dumps(table, indent=2) + "\n", table)

    def ids(self) -> list[str]:
        """The file's keys with token ids, in order."""
        return [key for key, value in self.values.items() if (key in _IDS or key.endswith("_token_id")) and value is not None]

    def accepted(self) -> tuple[GenerationFile, dict[str, str]]:
        """The file without the keys for which transformers refuses it, and the reason for each."""
        remaining, refused = self, {}
        while fault := _fault(remaining.values):
            named = [key for key in remaining.values if re.search(rf"\b{re.escape(key)}\b", fault)]
            helps = [key for key in remaining.values if not _fault(remaining.changed({key: None}).values)]
            key = next(iter([key for key in named if key in helps] or named or helps or list(remaining.values)))
            refused[key] = fault
            remaining = remaining.changed({key: None})
        return remaining, refused


def from_model_config(config: Any) -> GenerationFile:
    """The generation config that transformers derives from a model's config without such a file."""
    text = GenerationConfig.from_model_config(config).to_json_string()
    return GenerationFile(text, json.loads(text))


def with_ends(generation: GenerationFile | None, config: Any, ends: Sequence[int]) -> GenerationFile | None:
    """The file with these ids added to eos_token_id; without a file, the one derived from a model's config."""
    if not ends:
        return generation
    file = from_model_config(config) if generation is None else generation
    stated = file.values.get("eos_token_id", config.eos_token_id)
    listed = stated if isinstance(stated, list) else [] if stated is None else [stated]
    return file.changed({"eos_token_id": [*listed, *(end for end in ends if end not in listed)]})


def load_generation_config(source: str) -> GenerationFile | None:
    """The generation config of a folder, or of a Hub id with downloaded weights; None for other sources.

    Raises:
        InputError: the file is damaged.
    """
    if source in SHAPES:
        return None
    folder = Path(source).expanduser()
    path = folder / FILE
    if not folder.is_dir():
        try:
            cached = try_to_load_from_cache(source, FILE)
        except ValueError:  # not a Hub id
            cached = None
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged ({first_line(error)}): copy it again, or remove it.") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} is damaged (no JSON object): copy it again, or remove it.")
    return GenerationFile(text, values)


def _fault(values: Mapping[str, Any]) -> str:
    """The reason why transformers refuses these values; empty if it does not."""
    try:
        GenerationConfig.from_dict(copy.deepcopy(dict(values)))
    except Exception as error:  # several exception types of transformers
        return first_line(error)
    return ""
