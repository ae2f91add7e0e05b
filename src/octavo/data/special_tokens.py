"""Special tokens: encoded as plain text inside texts, and their ids in a Hugging Face config.

A text may contain the name of a special token (a page about chat templates, a dump of HTML). Encoded as that token it would end
the document, or begin a chat turn. `tokenizers` can leave such names to the model, but a Unigram, or a BPE that looks up whole
words, finds them in its vocabulary. So they are renamed in a copy of the tokenizer that only encodes texts.

"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from octavo.errors import InputError, first_line

ROLES = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a Hugging Face config that name tokens of the tokenizer."""


def for_texts(tokenizer: Tokenizer, named: Collection[str]) -> Tokenizer:
    """A copy with the same ids that encodes the names of special tokens as plain characters.

    named: special tokens of the tokenizer's configuration, in addition to those marked in the tokenizer.

    Raises:
        InputError: the tokenizer has parts in Python, and cannot be copied.
    """
    try:
        values = json.loads(tokenizer.to_str())
    except Exception as error:  # tokenizers raises plain Exception
        raise InputError(f"data.tokenizer cannot be copied: {first_line(error)}. Give another tokenizer.") from None
    model = values["model"]
    mark = secrets.token_hex(16)  # occurs in no text, so the result does not depend on it
    marked = {token["content"] for token in values["added_tokens"] if token["special"]}
    # A special token of one character, such as a pad "!", may be an ordinary character of a text.
    special = sorted(name for name in marked.union(named) if len(name) > 1)
    names = {name: f"{mark} {number}" for number, name in enumerate(special)}
    for token in values["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _touches(merge, names)]
    for part in ("post_processor", "truncation", "padding"):  # would add tokens around a text, truncate it or pad it
        values[part] = None
    copy = Tokenizer.from_str(json.dumps(values))
    copy.encode_special_tokens = True
    return copy


def _touches(merge: list[str] | str, names: dict[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return not names.keys().isdisjoint((left, right, left + right))


@dataclass(frozen=True)
class SpecialTokens:
    """Special token ids of a tokenizer as transformers loads it: by role, None if absent; and all by id."""

    bos: int | None
    eos: int | None
    pad: int | None
    unknown: int | None
    names: Mapping[int, str]

    @property
    def all(self) -> frozenset[int]:
        """The ids of all special tokens."""
        return frozenset(self.names)

    @classmethod
    def of(cls, folder: Path) -> SpecialTokens:
        """Read the folder of a tokenizer."""
        from transformers import AutoTokenizer  # slow to import

        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        names = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        names |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        return cls(tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id, names)

    def fit(self, config: Any) -> dict[str, int | list[int] | None]:
        """Set the bos, eos and pad ids of a Hugging Face config, or generation config, to this tokenizer's; returns them.

        The tokenizer's bos replaces the config's, and its eos is always among the eos ids. Other ids of the config remain if
        they are special tokens of this tokenizer: a fine-tuned model may have several eos ids, or a pad or bos without a role
        in its tokenizer. Ids of another vocabulary are removed. A bos or eos remains the pad only if the tokenizer says so,
        since the pad's row of the embedding is not trained.
        """
        bos, ends, pad = (getattr(config, role, None) for role in ROLES)
        usable = self.all - ({self.unknown} - {self.bos, self.eos})
        if self.bos is not None or bos not in usable:
            bos = self.bos
        remaining = [end for end in _listed(ends) if end in usable and (end == self.eos or end != self.bos)]
        if self.eos is not None and self.eos not in remaining:
            remaining.append(self.eos)
        if remaining != _listed(ends):
            ends = remaining if len(remaining) > 1 else remaining[0] if remaining else None
        if pad is not None and pad != self.pad:
            pad = next((one for one in (pad, self.pad) if one in usable - {self.bos, self.eos}), None)
        fitted = dict(zip(ROLES, (bos, ends, pad), strict=True))
        for role, value in fitted.items():
            if getattr(config, role, None) != value:
                setattr(config, role, value)
        return fitted

    def disagreements(self, named: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
        """(role, sentence) for each role whose id in another file differs from this tokenizer's.

        named: ids by role, for each file name. Several eos ids agree with the tokenizer if they include its eos.
        """
        for role, token in zip(ROLES, (self.bos, self.eos, self.pad), strict=True):
            said = []
            for file, ids in named.items():
                if role not in ids:
                    continue
                stated = _listed(ids.get(role))
                foreign = [one for one in stated if one not in self.all]
                other = token is not None and token not in stated and (stated or role == "eos_token_id")
                if foreign or other or (token is None and stated and role == "eos_token_id"):
                    said.append(f"{file} has {', '.join(map(self._shown, stated)) or 'none'}")
            if said:
                yield role, f"{'; '.join(said)}; the tokenizer has {'none' if token is None else self._shown(token)}"

    def _shown(self, one: int) -> str:
        return f"{one} ({self.names[one]!r})" if one in self.names else f"{one} (not one of its special tokens)"

    def owns(self, config: Any) -> bool:
        """True if every eos id of a config is a special token of this tokenizer."""
        return self.all.issuperset(_listed(config.eos_token_id))


def _listed(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def check_overrides(overrides: dict[str, Any], fitted: dict[str, Any]) -> None:
    """Refuse an id of `model.config` that is not the tokenizer's.

    Raises:
        InputError: names the key, its value and the tokenizer's.
    """
    for role, value in fitted.items():
        if role in overrides and overrides[role] != value:
            right = "has no such token" if value is None else f"has {value}"
            raise InputError(
                f"model.config.{role} = {overrides[role]}, but the run's tokenizer {right}: remove model.config.{role}, or "
                "change data.tokenizer."
            )
