"""Prices of machines by GPU: the two that were published, and those of the user's file.

A file is TOML, a table for each GPU by its name in `octavo.hardware` or as the driver gives it:

    ["H100 SXM"]
    dollars_per_hour = 98.32    # of a machine
    gpus = 8                    # in that machine
    source = "where it stands"  # optional: the file's name if absent

It stands before the built-in prices. No other price is assumed: a GPU without one has no cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config.reading import read_file
from octavo.errors import InputError, unknown
from octavo.hardware import GPUS, lookup

EXAMPLE = 'a table for each GPU, such as ["H100 SXM"] with dollars_per_hour = 98.32 and gpus = 8'
_KEYS = ("dollars_per_hour", "gpus", "source")


@dataclass(frozen=True)
class Price:
    """The price of a machine.

    Attributes:
        gpu: its kind of GPU, by name in `octavo.hardware`; of an unknown GPU the driver's name.
        dollars_per_hour: of the machine.
        gpus: in the machine.
        source: where the price stands.
    """

    gpu: str
    dollars_per_hour: float
    gpus: int
    source: str

    def per_million(self, images_per_second: float) -> float:
        """Dollars for a million images at so many images a second on one GPU."""
        return self.dollars_per_hour / self.gpus / 3600 / images_per_second * 1e6


# At this price a machine has eight A100s of 40 GB.
PUBLISHED_PRICES = (
    Price("A100 40GB", 32.77, 8, "the published figures"),
    Price("H100 SXM", 98.32, 8, "the published figures"),
)


def price_of(gpu: str | None, prices: Sequence[Price]) -> Price | None:
    """The first price of a GPU by any of its names; None without one, and for a CPU."""
    return next((price for price in prices if gpu is not None and price.gpu == _name(gpu)), None)


def prices_with(path: Path | None, gpu: str | None = None) -> tuple[Price, ...]:
    """The prices of a file before the built-in ones of other GPUs.

    Args:
        path: None: the built-in ones alone.
        gpu: the driver's name of this machine's GPU, which a file may price even if `octavo.hardware` does not know it.

    Raises:
        InputError: the file is missing, is not TOML, or has another content than prices.
    """
    if path is None:
        return PUBLISHED_PRICES
    tables = read_file(path, "price file")
    if not tables:
        raise InputError(f"price file {str(path)!r} has no price: write {EXAMPLE}.")
    prices = [_price(path, name, table, gpu) for name, table in tables.items()]
    for price in prices:
        if [other.gpu for other in prices].count(price.gpu) > 1:
            raise InputError(f"price file {str(path)!r} has two prices of {price.gpu}, under two of its names: remove one.")
    return (*prices, *(price for price in PUBLISHED_PRICES if price.gpu not in {other.gpu for other in prices}))


def as_records(prices: Sequence[Price]) -> list[dict[str, Any]]:
    """For JSON."""
    return [dataclasses.asdict(price) for price in prices]


def _name(gpu: str) -> str:
    """The name in `octavo.hardware`; the given one without it."""
    known = lookup(gpu)
    return gpu if known is None else known.name


def _price(path: Path, name: str, table: Any, gpu: str | None) -> Price:
    """One table of a file."""
    where = f"price file {str(path)!r}"
    if not isinstance(table, Mapping):
        raise InputError(f"{where}: {name} = {table!r} is no table: write {EXAMPLE}.")
    if lookup(name) is None and name != gpu:
        raise unknown("GPU", name, [row.name for row in GPUS], key=f"the name in {path}")
    for key in table:
        if key not in _KEYS:
            raise unknown(f"key of {name}", key, _KEYS, key=f"it in {path}")
    if missing := [key for key in _KEYS[:2] if key not in table]:
        raise InputError(f"{where}: {name} has no {' and no '.join(missing)}: write {EXAMPLE}.")
    dollars, gpus, source = table["dollars_per_hour"], table["gpus"], table.get("source", path.name)
    if isinstance(dollars, bool) or not isinstance(dollars, int | float) or not 0 < dollars < math.inf:
        raise InputError(
            f"{where}: {name}.dollars_per_hour = {dollars!r} is not a number of dollars above 0. Give the price of a machine "
            "for an hour, such as 98.32."
        )
    if type(gpus) is not int or gpus < 1:
        raise InputError(
            f"{where}: {name}.gpus = {gpus!r} is not a whole number of GPUs, at least 1. Give the GPUs of the machine that "
            "the price is of, such as 8."
        )
    if not isinstance(source, str):
        raise InputError(f"{where}: {name}.source = {source!r} is not a text. Put it in quotes, or remove it.")
    return Price(_name(name), float(dollars), gpus, source)
