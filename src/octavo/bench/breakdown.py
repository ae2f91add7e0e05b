"""Where a step's time on the GPU goes: kernel milliseconds by kind, read from the names of the kernels that ran.

Names are all that a profile has of cuBLAS, cuDNN, Transformer Engine and what torch.compile has written, so kinds are a table
of patterns, of which the first that matches counts: what names a kernel surely stands before what merely hints. The largest
kernels are listed with the kind they were given, so that a wrong pattern is seen. Kernels of several streams overlap: the sum
can be more than the step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

LARGEST = 15
"""Kernels that are listed by name."""
NAME_LENGTH = 160
"""Characters of a name that are kept: templates write thousands."""
OTHER = "other"

_FP8 = r"e4m3|e5m2|f8|fp8|float8"
_PRODUCT = r"gemm|cutlass|scaled_mm|matmul|cublas|triton_tem"
KINDS: tuple[tuple[str, str], ...] = (
    # Octavo's own are whole names.
    ("norms", r"^_?(norm|backward)_(rows|tiles)$"),
    ("activation", r"^_(forward|backward)(_by_fours)?$"),
    ("attention", r"^(attention_forward|backward_(queries|keys))$"),
    ("scales", r"^_(scale_of|update_scales)$"),
    ("casts", r"^_(cast_\w+|row_column_amaxes|amax_of)$"),
    ("communication", r"nccl|all_?gather|reduce_?scatter|all_?reduce|symm_mem"),
    ("attention", r"sdpa|flash|fmha|attention|dot_do_o|convert_dq"),
    # cuBLAS writes a letter for each type: q and r are the two FP8 formats, t is bfloat16, h float16, s float32.
    ("fp8 products", rf"nvjet_(sm\d+_)?[a-z]*[qr][a-z]*_|({_PRODUCT}).*({_FP8})|({_FP8}).*({_PRODUCT})"),
    ("bf16 products", rf"nvjet|{_PRODUCT}|xmma|splitk|gemv|convolve|conv2d"),
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
"""Kind and the pattern of its kernels' names, in lower case; the first that is found counts."""

_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in KINDS)
# Spans of the host that a profile also draws on the GPU's line, over the kernels that they contain.
_SPAN = re.compile(r"^(Optimizer\.|ProfilerStep|Torch-Compiled|## |nccl:|autograd::|FSDP::)")


class Kernel(NamedTuple):
    """One kernel of a profile, or several of one name.

    Attributes:
        name: as the compiler wrote it. ms: all its time. calls: how often it ran.
    """

    name: str
    ms: float
    calls: int


def kind_of(name: str) -> str:
    """The kind of a kernel by its name; `OTHER` where no pattern is found."""
    lower = name.lower()
    return next((kind for kind, pattern in _COMPILED if pattern.search(lower)), OTHER)


def summarise(kernels: Iterable[Kernel], steps: int) -> dict[str, Any]:
    """Milliseconds a step by kind, largest first, and the largest kernels: what a row keeps."""
    by_size = sorted(kernels, key=lambda kernel: kernel.ms, reverse=True)
    kinds: dict[str, float] = {}
    for kernel in by_size:
        kind = kind_of(kernel.name)
        kinds[kind] = kinds.get(kind, 0.0) + kernel.ms / steps
    return {
        "kernel_ms": dict(sorted(kinds.items(), key=lambda item: item[1], reverse=True)),
        "largest_kernels": [
            {
                "name": kernel.name[:NAME_LENGTH],
                "kind": kind_of(kernel.name),
                "ms": kernel.ms / steps,
                "calls": kernel.calls / steps,
            }
            for kernel in by_size[:LARGEST]
        ],
    }


def record(step: Callable[[], object], steps: int, device: torch.device) -> dict[str, Any]:
    """Profile `steps` calls of `step` and summarise the kernels; on a CPU, which has none, PyTorch's operators."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as profiled:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    wanted = "CUDA" if on_gpu else "CPU"
    kernels = []
    for event in profiled.key_averages():
        if event.device_type.name != wanted or getattr(event, "is_user_annotation", False) or _SPAN.match(event.key):
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kernels.append(Kernel(event.key, microseconds / 1e3, event.count))
    return summarise(kernels, steps)
