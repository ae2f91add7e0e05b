"""Sources that `datasets` loads: data sets of the Hugging Face Hub, and local folders with splits.

`datasets` executes no code from a data set. It takes a second to import, so it is imported on demand. A data set of the Hub is
identified by name and split, not by the SHA-256 of its files: `datasets` verifies those in its own cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from octavo.config.data import DataConfig
from octavo.data.readers import Document, read_data_set
from octavo.errors import InputError, first_line


def from_hub(name: str, config: DataConfig, hint: str) -> Iterator[Document]:
    """The documents of a named data set.

    Raises:
        InputError: it does not exist, cannot be reached, has no such split, or needs code; `hint` is added to the message.
    """
    import datasets

    try:
        data = datasets.load_dataset(name, config.subset, split=config.split)
    except Exception as error:
        raise InputError(
            f"data.source = {name!r} is no local file, and the Hugging Face data set {name!r}, split {config.split!r}, cannot "
            f"be loaded: {first_line(error)}.{hint} Check the name, data.subset, data.split and the network, or give a local "
            'file or "python:docstrings" as data.source.'
        ) from None
    yield from read_data_set(data, config.text_field, f"data set {name!r}")


def from_folder(path: Path, config: DataConfig) -> Iterator[Document]:
    """The documents of one split of a local folder, in any layout that `load_dataset` or `load_from_disk` understands."""
    import datasets

    split = config.split
    try:
        if any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
            data = datasets.load_from_disk(str(path))
        else:
            data = datasets.load_dataset(str(path), config.subset, split=split)
    except Exception as error:
        raise InputError(
            f"data.source = {str(path)!r}: the folder cannot be loaded as a data set, split {split!r}: {first_line(error)}. "
            "Check data.subset and data.split, or name the files themselves (a pattern such as 'folder/*.jsonl')."
        ) from None
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise InputError(f"data.source = {str(path)!r} has no split {split!r}, only {', '.join(data)}. Change data.split.")
        data = data[split]
    yield from read_data_set(data, config.text_field, str(path))
