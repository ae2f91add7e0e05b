"""Dtypes by name: names in run files, usual abbreviations, and PyTorch's dtypes.

Sections of a run file hold names, since they import no torch; `torch_dtype` maps a name where a model is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

DtypeName = Literal["bfloat16", "float16", "float32"]
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def torch_dtype(name: DtypeName) -> torch.dtype:
    """The dtype of this name."""
    import torch

    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def short_name(dtype: DtypeName | torch.dtype) -> str:
    """ "bf16", "fp16" or "fp32"."""
    return _SHORT[str(dtype).removeprefix("torch.")]
