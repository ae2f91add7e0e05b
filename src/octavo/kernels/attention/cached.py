"""A cache of attention's results from forward, so that recomputation reads them and computes only the rest.

For long sequences attention is most of a block's time, but its result and log-sum-exp are among the smallest tensors in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from octavo.process import process

Result = tuple[Tensor, Tensor]
"""out, lse."""
Move = Callable[[Tensor], Any]


class _Within(AbstractContextManager[None]):
    """Context in which `once` calls `take`; may be entered repeatedly."""

    def __init__(self, begin: Callable[[], Callable[[Callable[[], Result]], Result]]) -> None:
        self._begin = begin
        self._outer: list[object] = []

    def __enter__(self) -> None:
        self._outer.append(getattr(process.attention, "take", None))
        process.attention.take = self._begin()

    def __exit__(self, *exception: object) -> None:
        process.attention.take = self._outer.pop()


def caching() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for a forward, whose results are cached, and for its recomputations, which read them in the same order."""
    results: list[tuple[Any, Any]] = []
    moves: list[tuple[Move, Move]] = []

    def store() -> Callable[[Callable[[], Result]], Result]:
        moves.append(getattr(process.attention, "moves", None) or (_as_it_is, _as_it_is))

        def take(compute: Callable[[], Result]) -> Result:
            out, lse = compute()
            results.append((moves[0][0](out), moves[0][0](lse)))
            return out, lse

        return take

    def read() -> Callable[[Callable[[], Result]], Result]:
        following = iter(results)

        def take(compute: Callable[[], Result]) -> Result:
            out, lse = next(following)
            return moves[0][1](out), moves[0][1](lse)

        return take

    return _Within(store), _Within(read)


@contextmanager
def moved(away: Move, back: Move) -> Iterator[None]:
    """Context in which a cached result is stored as `away(result)`, and restored by `back`."""
    before = getattr(process.attention, "moves", None)
    process.attention.moves = away, back
    try:
        yield
    finally:
        process.attention.moves = before


def _as_it_is(x: Tensor) -> Tensor:
    return x


def is_caching() -> bool:
    """True in a context of `caching`."""
    return getattr(process.attention, "take", None) is not None


def once(compute: Callable[[], Result]) -> Result:
    """`compute()`; in a recomputation under `caching` the forward's result."""
    take = getattr(process.attention, "take", None)
    return compute() if take is None else take(compute)


def saved_once(ctx: Any, compute: Callable[[], Result], *inputs: Tensor | None) -> Tensor:
    """The output of `once(compute)`, such as [B, T, H, D]; saves `inputs`, it and its log-sum-exp for the backward of `ctx`."""
    out, lse = once(compute)
    ctx.save_for_backward(*inputs, out, lse)
    return out
