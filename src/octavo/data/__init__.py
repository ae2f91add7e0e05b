"""Text to batches: sources, tokenizer, token files, packing, and the order of samples.

    data = prepare(config.data)
    loader = Loader(data, "train", sequence_length=1024, packing="join", seed=0, global_batch=16, micro_batch=4)
    for batch in loader.step(first_sample=0): ...

Only `Loader` needs torch; it is handed on when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.data.packing import IGNORED, Sequences
from octavo.data.prepared import PreparedData, check_vocabulary, folder_of, prepare, prepared_or_none

if TYPE_CHECKING:
    from octavo.data.loader import Batch, Loader

__all__ = [
    "IGNORED", "Batch", "Loader", "PreparedData", "Sequences", "check_vocabulary", "folder_of", "prepare", "prepared_or_none",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in {"Batch", "Loader"}:
        from octavo.data import loader

        return getattr(loader, name)
    raise AttributeError(f"module 'octavo.data' has no attribute {name!r}")
