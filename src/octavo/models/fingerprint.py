"""A hash of frozen weights that does not depend on sharding: it identifies the base of an adapter checkpoint."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from octavo.collectives.blocks import parameters_of, with_block
from octavo.collectives.whole import whole_tensor
from octavo.nn.plain_names import stored_names

_NOTED = "octavo_lora_base"
_CHUNK = 1 << 22
_MIX, _GOLDEN = -0x40A7B892E31B1A47, -0x61C8864680B583EB  # odd, as signed 64-bit integers

Pieces = Iterable[tuple[Tensor, Callable[[int, int], Tensor]]]
"""Tensors, each with a function (start, stop) → indices of its flattened elements in the flattened whole."""


def fingerprint(model: nn.Module) -> str:
    """A hash of a model's frozen parameters that does not depend on sharding: names, shapes, dtypes and values.

    Collective. Each rank holds one whole parameter at a time. A weight stored in FP8 counts with its values before the cast.
    """
    stored, noted, blocks = stored_names(model), vars(model).get(_NOTED, {}), parameters_of(model)
    lines = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            own = stored.get(name, name)
            lines[own] = noted[own] if own in noted else _line(own, whole_tensor(with_block(parameter, blocks[parameter])))
    return _hash(lines)


def fingerprint_of(names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """`fingerprint` of frozen parameters by stored names, with values read one by one by `read`."""
    return _hash({name: _line(name, read(name)) for name in names})


def noting(model: nn.Module) -> Callable[[str, tuple[int, ...], Pieces, Callable[[Tensor], None]], None]:
    """A function that records a frozen parameter before its cast to FP8, for the model's fingerprint.

    Its arguments: stored name, shape of the whole, this rank's pieces, and a function that sums a tensor over all ranks.
    """
    noted = vars(model).setdefault(_NOTED, {})

    def note(name: str, shape: tuple[int, ...], pieces: Pieces, add_up: Callable[[Tensor], None]) -> None:
        total = dtype = None
        for piece, numbers in pieces:
            total, dtype = _sum(piece, numbers) + (0 if total is None else total), piece.dtype
        assert total is not None
        add_up(total)
        noted[name] = _text(name, shape, dtype, total)

    return note


def _hash(lines: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(f"{lines[name]}\n" for name in sorted(lines)).encode()).hexdigest()


def _line(name: str, whole: Tensor) -> str:
    whole = whole.detach()
    return _text(name, tuple(whole.shape), whole.dtype, _sum(whole, functools.partial(torch.arange, device=whole.device)))


def _text(name: str, shape: tuple[int, ...], dtype: torch.dtype | None, total: Tensor) -> str:
    return f"{name} {shape} {dtype} {int(total) % (1 << 64)}"


def _sum(tensor: Tensor, numbers: Callable[[int, int], Tensor]) -> Tensor:
    """Sum of a hash of each element's bits and index, modulo 2⁶⁴, as int64."""
    flat = tensor.reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        bits = part.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()])
        mixed = (bits.to(torch.int64) + numbers(start, start + part.numel()) * _GOLDEN) * _MIX
        mixed = (mixed ^ (mixed >> 31)) * _GOLDEN
        total += (mixed ^ (mixed >> 29)).sum()
    return total
