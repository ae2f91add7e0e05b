"""GPU time of single calls by CUDA events, for benchmarks and for choices by measurement.

A pause on the device before each call hides its launch, so the host's time is in no figure. Several calls are timed in turns,
since a GPU's clock drifts with its temperature.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def median_us(
    *calls: Callable[[], object],
    device: torch.device,
    rounds: int,
    warm_up: int,
    pause_cycles: int,
    prepare: Callable[[], object] | None = None,
) -> list[float]:
    """Median microseconds of each call on the GPU; `device` is the current one.

    rounds, warm_up: timed and earlier runs of each call. pause_cycles: clock cycles of the pause, longer than the host needs to
    launch a call. prepare: runs before the pause, outside the timing, such as one that fills the L2 cache.
    """
    for _ in range(warm_up):
        for call in calls:
            call()
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, pairs in zip(calls, events, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if prepare is not None:
                prepare()
            torch.cuda._sleep(pause_cycles)
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
    torch.cuda.current_stream(device).synchronize()
    return [statistics.median(begin.elapsed_time(end) for begin, end in pairs) * 1e3 for pairs in events]
