"""A hash of frozen weights, the same however they are sharded: how a checkpoint of adapters names its base."""

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
"""Tensors, each with the numbers of its flattened elements, from a start to a stop, in the flattened whole."""


def fingerprint(model: nn.Module) -> str:
    """A hash of the frozen parameters of a model, the same however they are sharded: names, shapes, dtypes and values.

    Collective. One parameter at a time is whole on each rank. Of a weight that is stored in FP8 it is of the values before.
    """
    stored, noted, blocks = stored_names(model), vars(model).get(_NOTED, {}), parameters_of(model)
    lines = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            own = stored.get(name, name)
            lines[own] = noted[own] if own in noted else _line(own, whole_tensor(with_block(parameter, blocks[parameter])))
    return _hash(lines)


def fingerprint_of(names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """`fingerprint` of frozen parameters by their stored names, whose values `read` gives one by one."""
    return _hash({name: _line(name, read(name)) for name in names})


def noting(model: nn.Module) -> Callable[[str, tuple[int, ...], Pieces, Callable[[Tensor], None]], None]:
    """A function that takes note of a frozen parameter before its cast to FP8, for the model's fingerprint.

    It takes the stored name, the shape of the whole, this rank's pieces, and a function that adds up a tensor of all ranks.
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
    """A sum of the mixed bits of each element and its number, int64 of which 64 bits count."""
    flat = tensor.reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        bits = part.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()])
        mixed = (bits.to(torch.int64) + numbers(start, start + part.numel()) * _GOLDEN) * _MIX
        mixed = (mixed ^ (mixed >> 31)) * _GOLDEN
        total += (mixed ^ (mixed >> 29)).sum()
    return total
