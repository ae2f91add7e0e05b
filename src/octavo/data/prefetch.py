"""Prefetcher: threads read the batches of coming steps while the current step computes.

A batch is a copy from a memory map: milliseconds if the pages are in memory, much longer from a network disk. Threads hide
that, since waiting for pages and copying both release Python's lock. For a GPU they also pin the batch, so that its copy to
the device overlaps with computing. Not supported: processes, and queues for non-consecutive steps.
"""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from octavo.data.loader import BatchLoader
from octavo.data.packing import Batch


class Prefetcher:
    """A batch loader that reads coming steps in threads.

    Args:
        loader: reads the batches; `step` must be a function of its argument.
        workers: number of threads, and of queued steps; 0: a step is read when requested.
        device: destination of the batches; for a GPU, threads put them in pinned memory.
        end: no step that begins at or after this sample is queued.
    """

    def __init__(
        self, loader: BatchLoader, *, workers: int = 0, device: torch.device | None = None, end: float = math.inf
    ) -> None:
        self.loader = loader
        self._workers = workers
        self._end = end
        self._pin = device is not None and device.type == "cuda"
        self._queue: deque[tuple[int, Future[list[Batch]]]] = deque()
        # Pinning needs a CUDA context: use this device's, not another one on the first GPU.
        prepare = partial(torch.cuda.set_device, device) if self._pin else None
        self._threads = ThreadPoolExecutor(workers, "octavo-read", initializer=prepare) if workers else None

    def step(self, first_sample: int) -> list[Batch]:
        """The result of `BatchLoader.step`, or the error that it raised for this step."""
        if self._threads is None:
            return self.loader.step(first_sample)
        while self._queue and self._queue[0][0] != first_sample:
            self._queue.popleft()[1].cancel()
        size = self.loader.global_batch
        sample = self._queue[-1][0] + size if self._queue else first_sample
        while sample == first_sample or (len(self._queue) <= self._workers and sample < self._end):
            self._queue.append((sample, self._threads.submit(self._read, sample)))
            sample += size
        return self._queue.popleft()[1].result()

    def close(self) -> None:
        """Stop the threads and drop the queue; later steps are read when requested."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        self._queue.clear()

    def _read(self, first_sample: int) -> list[Batch]:
        batches = self.loader.step(first_sample)
        return [Batch(*(tensor.pin_memory() for tensor in batch)) for batch in batches] if self._pin else batches
