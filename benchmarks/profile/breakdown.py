"""Kernel times of a step by kind, from the names of the kernels.

A profile has only the names of the kernels of cuBLAS, cuDNN, Transformer Engine and torch.compile. A row also lists the largest
kernels with their kinds, to reveal a wrong pattern. Kernels of several streams overlap, so the sum can exceed the step.
Collectives that no computation hides are reported separately (`exposed_ms`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

LARGEST = 15
"""Number of kernels in the list."""
NAME_LENGTH = 160
"""Characters of a name; templates have thousands."""
OTHER = "other"

_FP8 = r"e4m3|e5m2|f8|fp8|float8"
_PRODUCT = r"gemm|cutlass|scaled_mm|matmul|cublas|triton_tem"
KINDS: tuple[tuple[str, str], ...] = (
    # Octavo's kernels, by their whole names.
    ("norms", r"^_?(norm|backward)_(rows|tiles)$"),
    ("activation", r"^activation_(backward_)?(tiles|packed)$"),
    ("attention", r"^(attention_forward|backward_(queries|keys)|_join_results)$"),
    ("scales", r"^_(scale_of|update_scales|inverses)$"),
    ("casts", r"^_?(cast_\w+|gather_(tiles|packed)|widen|row_column_amaxes|amax_of)$"),
    ("fp8 products", r"^_products_of_(rows|weights)$"),  # of experts
    ("copies and elementwise", r"^_((add|count|place)_copies|add_up_before|add_terms|add_product|(un)?pack)$"),
    ("communication", r"nccl|all_?gather|reduce_?scatter|all_?reduce|symm_mem|barrier_kernel|join_largest|memcpy ptop"),
    ("attention", r"sdpa|flash|fmha|attention|dot_do_o|convert_dq"),
    # cuBLAS writes a letter for each type: q and r are the two FP8 formats, t is bfloat16, h float16, s float32.
    ("fp8 products", rf"nvjet_(sm\d+_)?[a-z]*[qr][a-z]*_|({_PRODUCT}).*({_FP8})|({_FP8}).*({_PRODUCT})"),
    ("bf16 products", rf"nvjet|{_PRODUCT}|xmma|splitk|gemv|convolve|conv2d"),
    ("copies and elementwise", r"multi_tensor\w*<.*copy"),  # of FSDP2's shards
    ("optimizer", r"adam|sgd|multi_tensor|optimizer"),
    ("cross entropy", r"cross_?entropy|log_softmax|logsumexp|nll_loss|softmax"),
    ("scales", r"delayed_scaling|amax_and_scale|update_amax|(compute|update)_scale"),
    ("rope", r"rope|rotary|split_rotate|join_rotated|triton\w*_(cat|slice)\w*_neg|triton\w*_neg\w*_(cat|slice)"),
    ("norms", r"norm|rsqrt|ln_(fwd|bwd)"),
    ("activation", r"silu|swiglu|gelu|geglu|sigmoid|gated|_glu|dact|activation"),
    ("casts", rf"cast|quantize|transpose|amax|{_FP8}"),
    (
        "copies and elementwise",
        r"memcpy|memset|elementwise|copy|fill|cat|index|embedding|reduce|column_sums|triton|distribution|scatter|add|mul",
    ),
)
"""Kind and the pattern of its kernels' names in lower case; the first match counts, so sure patterns come before vague ones."""

_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in KINDS)
# Ranges of the host that a profile repeats on the GPU's timeline, around the kernels in them.
_SPAN = re.compile(r"^(Optimizer\.|ProfilerStep|Torch-Compiled|## |nccl:|autograd::|FSDP::)")


# Copies between host and device are no computation.
_TRANSFER = re.compile(r"memcpy (dtoh|htod)", re.IGNORECASE)

Interval = tuple[str, float, float]
"""A call of a kernel: its name, start and end in microseconds."""


class KernelTime(NamedTuple):
    """All calls of the kernels of one name in a profile: their time and number."""

    name: str
    ms: float
    calls: int


def kind_of(name: str) -> str:
    """The kind of a kernel by its name; `OTHER` without a match."""
    lower = name.lower()
    return next((kind for kind, pattern in _COMPILED if pattern.search(lower)), OTHER)


def summarise(kernels: Iterable[KernelTime], steps: int) -> dict[str, Any]:
    """Milliseconds a step by kind, largest first, and the largest kernels, for a row of the results."""
    by_size = sorted(kernels, key=lambda kernel: kernel.ms, reverse=True)
    kinds: dict[str, float] = {}
    for kernel in by_size:
        kind = kind_of(kernel.name)
        kinds[kind] = kinds.get(kind, 0.0) + kernel.ms / steps
    largest = [
        {"name": name[:NAME_LENGTH], "kind": kind_of(name), "ms": ms / steps, "calls": calls / steps}
        for name, ms, calls in by_size[:LARGEST]
    ]
    return {"kernel_ms": dict(sorted(kinds.items(), key=lambda item: item[1], reverse=True)), "largest_kernels": largest}


def exposed_ms(calls: Iterable[Interval]) -> float:
    """Milliseconds in which, over all streams, collectives run and no computation does."""
    collective: list[tuple[float, float]] = []
    computing: list[tuple[float, float]] = []
    for name, start, end in calls:
        if kind_of(name) == "communication":
            collective.append((start, end))
        elif not _TRANSFER.search(name):
            computing.append((start, end))
    return (_covered([*collective, *computing]) - _covered(computing)) / 1e3


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def record(step: Callable[[], object], steps: int, device: torch.device, trace: Path | None = None) -> dict[str, Any]:
    """Profile `steps` calls of `step` and summarise the kernels; on a CPU PyTorch's operators.

    trace: a file for the profile in Chrome's format, which `benchmarks.profile.timeline` reads.
    On a GPU with collectives also `exposed_communication_ms` of a step; waiting for other ranks is included.
    """
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiled:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    if trace is not None:
        profiled.export_chrome_trace(str(trace))

    def is_kernel(event: Any) -> bool:
        span = getattr(event, "is_user_annotation", False) or _SPAN.match(event.key)
        return event.device_type.name == activity.name and not span

    kernels = []
    for event in filter(is_kernel, profiled.key_averages()):
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kernels.append(KernelTime(event.key, microseconds / 1e3, event.count))
    found = summarise(kernels, steps)
    if on_gpu and "communication" in found["kernel_ms"]:
        events = filter(is_kernel, profiled.events())
        calls = ((event.name, event.time_range.start, event.time_range.end) for event in events)
        found["exposed_communication_ms"] = exposed_ms(calls) / steps
    return found
