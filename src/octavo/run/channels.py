"""Prepared data as the files of a job's channels: chunks of tokens, one JSON object a line.

An object has `input_ids`, an `attention_mask` of ones, and `labels`: the ids, or -100 for tokens that are not targets.

    FOLDER/train/training.json      FOLDER/test/validation.json

Scripts of other trainers read these files, and so does `data.source`. A chunk is `data.sequence_length` tokens of joined
documents; the remainder of a split that fills no chunk is dropped.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from octavo.config.data import DataConfig
from octavo.data.loader import sequences_of
from octavo.data.manifest import Split
from octavo.data.prepared import PreparedData
from octavo.errors import InputError
from octavo.storage import fsync_tree, new_folder, path_of

FILES: dict[Split, str] = {"train": "train/training.json", "validation": "test/validation.json"}


def write_channels(prepared: PreparedData, config: DataConfig, folder: Path) -> dict[str, int]:
    """Write both splits; returns the chunks in each file.

    Args:
        prepared: the tokens.
        config: the data section, for the length of a chunk.
        folder: new or empty.

    Raises:
        InputError: the folder holds files, documents are not joined, or a split has no chunk.
    """
    if (packing := prepared.packing(config)) != "join":
        raise InputError(f'--channels: data.packing = {packing!r}, but chunks are joined documents: set it to "join".')
    target = new_folder(folder, "--channels")
    with path_of("--channels", str(folder)):
        target.parent.mkdir(parents=True, exist_ok=True)
        work = target.with_name(f".{target.name}.partial")
        shutil.rmtree(work, ignore_errors=True)
        counts: dict[str, int] = {}
        try:
            for split, name in FILES.items():
                if split == "validation" and prepared.manifest.splits[split].tokens == 0:
                    continue
                path = work / name
                path.parent.mkdir(parents=True)
                counts[name] = _write(prepared, config, split, path)
            fsync_tree(work)
            if target.exists():
                target.rmdir()
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return counts


def _write(prepared: PreparedData, config: DataConfig, split: Split, path: Path) -> int:
    sequences = sequences_of(prepared, split, sequence_length=config.sequence_length, packing="join")
    packing, written = sequences.packing, 0
    with path.open("w", encoding="utf-8") as file:
        for start, length in zip(packing.start_P.tolist(), packing.length_P.tolist(), strict=True):
            if length == config.sequence_length:
                ids = sequences.tokens[start : start + length].tolist()
                labels = ids if sequences.labels is None else sequences.labels[start : start + length].tolist()
                row = {"input_ids": ids, "attention_mask": [1] * length, "labels": labels}
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
                written += 1
    if not written:
        tokens = prepared.manifest.splits[split].tokens
        raise InputError(
            f"--channels: the {split} split has {tokens:,} tokens, too few for a chunk of data.sequence_length = "
            f"{config.sequence_length}. Give more text, or set data.sequence_length to {max(2, tokens)} or less."
        )
    return written
