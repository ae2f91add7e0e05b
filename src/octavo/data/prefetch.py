"""The coming steps' batches, read while the present step computes.

A batch is a copy out of a memory map: milliseconds where the pages are in memory, much longer where a network disk has to bring
them. Threads are enough to hide that: they wait for pages and copy, both without Python's lock. For a GPU they also pin what
they read, so that its copy to the device overlaps with computing. What is read does not depend on who reads it: batches are a
function of the step's first sample, and nothing here is part of a run's state.

Left out: processes, and a queue between steps that are not consecutive; a jump drops what was read and starts over.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from octavo.data.loader import Batch, Loader


class ReadAhead:
    """A loader whose next steps are read by threads; a context manager.

    At most `workers` steps are held beside the one that was handed out.

    Args:
        loader: whose batches; its `step` must be a function of its argument.
        workers: threads, and steps that they are ahead; 0: a step is read when it is asked for.
        device: where batches will go; for a GPU, threads put them in pinned memory.
        end: a sample that no step begins at or after, so that the last steps read nothing beyond it; None: there is none.
    """

    def __init__(self, loader: Loader, *, workers: int = 0, device: torch.device | None = None, end: int | None = None) -> None:
        self.loader = loader
        self._workers, self._end = workers, end
        self._pinned_for = device if device is not None and device.type == "cuda" else None
        self._ahead: deque[tuple[int, Future[list[Batch]]]] = deque()
        self._threads: ThreadPoolExecutor | None = None
        if workers:
            self._threads = ThreadPoolExecutor(workers, "octavo-read", initializer=self._begin)

    def step(self, first_sample: int) -> list[Batch]:
        """What `Loader.step` returns, or the error that it raised for this step."""
        if self._threads is None:
            return self.loader.step(first_sample)
        while self._ahead and self._ahead[0][0] != first_sample:
            self._drop()
        if not self._ahead:
            self._ahead.append((first_sample, self._threads.submit(self._read, first_sample)))
        _, reading = self._ahead.popleft()
        self._fill(self._threads, first_sample)
        return reading.result()

    def close(self) -> None:
        """End the threads and forget what they read; a step that is asked for later is read at once."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _fill(self, threads: ThreadPoolExecutor, present: int) -> None:
        """Ask for the steps after `present`, as far as they may be read ahead."""
        last = self._ahead[-1][0] if self._ahead else present
        while len(self._ahead) < self._workers:
            last += self.loader.global_batch
            if self._end is not None and last >= self._end:
                break
            self._ahead.append((last, threads.submit(self._read, last)))

    def _drop(self) -> None:
        self._ahead.popleft()[1].cancel()

    def _begin(self) -> None:
        if self._pinned_for is not None:  # pinning needs a CUDA context: this device's, not one more on the first GPU
            torch.cuda.set_device(self._pinned_for)

    def _read(self, first_sample: int) -> list[Batch]:
        batches = self.loader.step(first_sample)
        if self._pinned_for is None:
            return batches
        return [Batch(*(tensor.pin_memory() for tensor in batch)) for batch in batches]
