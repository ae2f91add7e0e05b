"""Asynchronous saves of checkpoints: SMP's queue, and the error that a failed save raises. Loads no torch."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from octavo.errors import OctavoError


class CheckpointingException(OctavoError):
    """A failed background save; scripts import the name from `megatron.core.dist_checkpointing.mapping`."""


class AsyncCallsQueue:
    """Background saves, in order. `maybe_finalize_async_calls` raises their errors."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, Future[None]]] = []
        self._count = 0
        self._executor: ThreadPoolExecutor | None = None

    def schedule(self, function: Any) -> int:
        """Queue a function; returns the save's number."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # Python waits for this thread at exit
        self._calls.append((self._count, self._executor.submit(function)))
        self._count += 1
        return self._count - 1

    def maybe_finalize_async_calls(
        self, blocking: bool = False, process_group: Any = None, skip_sync: bool = False, no_dist: bool = True
    ) -> list[int]:
        """Numbers of the saves that have ended; with `blocking` it waits for all.

        The last three arguments are SMP's and Megatron's, without effect: metadata are written last, so a save ends on all
        ranks of its group at once.

        Raises:
            CheckpointingException: a save failed.
        """
        ended = []
        while self._calls and (blocking or self._calls[0][1].done()):
            number, future = self._calls.pop(0)
            error = future.exception()  # PyTorch's is a BaseException with the errors of all ranks
            if error is not None:
                cause = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
                raise CheckpointingException(f"asynchronous save {number} failed: {type(cause).__name__}: {cause}") from error
            ended.append(number)
        return ended

    def get_num_unfinalized_calls(self) -> int:
        """Number of saves that are not finalised yet."""
        return len(self._calls)

    def close(self) -> None:
        """Wait for all saves."""
        self.maybe_finalize_async_calls(blocking=True)


DEFAULT_ASYNC_REQUEST_QUEUE = AsyncCallsQueue()


def maybe_finalize_async_calls(blocking: bool = True, process_group: Any = None, skip_sync: bool = False) -> list[int]:
    """Numbers of the asynchronous saves that have ended; with `blocking` it waits for all.

    Raises:
        CheckpointingException: a save failed.
    """
    return DEFAULT_ASYNC_REQUEST_QUEUE.maybe_finalize_async_calls(blocking)
