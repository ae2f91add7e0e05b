"""Prefetcher: threads read the batches of coming steps while the current step computes.

A batch is a copy from a memory map: milliseconds if the pages are in memory, much longer from a network disk. Threads hide
that, since waiting for pages and copying both release Python's lock. For a GPU they also pin the batch, so that its copy to
the device overlaps with computing. Batches depend on the step's first sample alone: the prefetcher is no part of a run's state.

Left out: processes, and queues for steps that are not consecutive (a jump drops the queue and starts over).
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from octavo.data.loader import Batch, BatchLoader


class Prefetcher:
    """A batch loader that reads coming steps in threads; a context manager.

    Args:
        loader: reads the batches; `step` must be a function of its argument.
        workers: threads, and the largest number of queued steps; 0: a step is read when it is requested.
        device: destination of the batches; for a GPU, threads put them in pinned memory.
        end: no step that begins at or after this sample is queued; None: no end.
    """

    def __init__(
        self, loader: BatchLoader, *, workers: int = 0, device: torch.device | None = None, end: int | None = None
    ) -> None:
        self.loader = loader
        self._workers, self._end = workers, end
        self._pin_device = device if device is not None and device.type == "cuda" else None
        self._queue: deque[tuple[int, Future[list[Batch]]]] = deque()
        self._threads = ThreadPoolExecutor(workers, "octavo-read", initializer=self._set_device) if workers else None

    def step(self, first_sample: int) -> list[Batch]:
        """The result of `BatchLoader.step`, or the error that it raised for this step."""
        if self._threads is None:
            return self.loader.step(first_sample)
        while self._queue and self._queue[0][0] != first_sample:
            self._queue.popleft()[1].cancel()
        if not self._queue:
            self._queue.append((first_sample, self._threads.submit(self._read, first_sample)))
        _, current = self._queue.popleft()
        self._fill(self._threads, first_sample)
        return current.result()

    def close(self) -> None:
        """Stop the threads and drop the queue; later steps are read when they are requested."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        self._queue.clear()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _fill(self, threads: ThreadPoolExecutor, current: int) -> None:
        """Queue the steps after `current`, up to `workers` of them and to the end."""
        last = self._queue[-1][0] if self._queue else current
        while len(self._queue) < self._workers:
            last += self.loader.global_batch
            if self._end is not None and last >= self._end:
                break
            self._queue.append((last, threads.submit(self._read, last)))

    def _set_device(self) -> None:
        if self._pin_device is not None:  # pinning needs a CUDA context: this device's, not one more on the first GPU
            torch.cuda.set_device(self._pin_device)

    def _read(self, first_sample: int) -> list[Batch]:
        batches = self.loader.step(first_sample)
        if self._pin_device is None:
            return batches
        return [Batch(*(tensor.pin_memory() for tensor in batch)) for batch in batches]
