"""Table of GPUs, and the lookup of a device in it.

No other file names a GPU. Peaks are the vendor's dense figures (no sparsity, float32 accumulation). A GPU outside the table is
unknown and gets no peak, no MFU and no estimate, rather than those of a similar one. Importing this file needs no torch.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

GIB = 2**30
FP8_CAPABILITY = (8, 9)
"""The first CUDA compute capability (Ada) whose tensor cores multiply FP8."""


@dataclass(frozen=True)
class Gpu:
    """One row of the table."""

    name: str
    pattern: str  # regular expression for the driver's whole name without "NVIDIA "
    capability: tuple[int, int]  # of CUDA
    bf16_tflops: float  # peak dense TFLOP/s of the tensor cores with float32 accumulation
    fp8_tflops: float | None  # None: no such units
    memory_gib: float  # as a program sees it (less than the nominal size), rounded down
    bandwidth_gbs: float  # 10^9 bytes a second

    def peak(self, precision: str) -> float | None:
        """Peak FLOP/s of products in "bf16" or "fp8"; None without such units."""
        tflops = {"bf16": self.bf16_tflops, "fp8": self.fp8_tflops}[precision]
        return None if tflops is None else tflops * 1e12


# Vendor's datasheets. Full matches only: a MIG slice, a laptop part or an export variant is another GPU.
GPUS: tuple[Gpu, ...] = (
    Gpu("H100 SXM", r"H100( SXM5)? 80GB HBM3|H100 SXM5", (9, 0), 989, 1979, 79, 3350),
    Gpu("H100 PCIe", r"H100 PCIe", (9, 0), 756, 1513, 79, 2000),
    Gpu("H100 NVL", r"H100 NVL", (9, 0), 835, 1671, 93, 3900),
    Gpu("H200", r"H200|H200 SXM( 141GB)?", (9, 0), 989, 1979, 139, 4800),
    Gpu("H200 NVL", r"H200 NVL", (9, 0), 835, 1671, 139, 4800),
    Gpu("A100 40GB", r"A100-(SXM4|PCIE)-40GB", (8, 0), 312, None, 39, 1555),
    Gpu("A100 80GB SXM", r"A100-SXM4-80GB", (8, 0), 312, None, 79, 2039),
    Gpu("A100 80GB PCIe", r"A100 80GB PCIe|A100-PCIE-80GB", (8, 0), 312, None, 79, 1935),
    Gpu("L40S", r"L40S", (8, 9), 362, 733, 44, 864),
    Gpu("RTX 4090", r"GeForce RTX 4090", (8, 9), 165.2, 330.3, 23, 1008),
    Gpu("B200", r"B200", (10, 0), 2250, 4500, 178, 8000),
)


@dataclass(frozen=True)
class Device:
    """A device and its row of the table."""

    name: str  # from the driver or the operating system
    gpu: Gpu | None  # None for a CPU and for an unknown GPU
    capability: tuple[int, int] | None  # of CUDA; None on a CPU
    memory_gib: float
    kind: Literal["cuda", "cpu"]


def lookup(name: str) -> Gpu | None:
    """The GPU of this name, in the driver's or the table's form; None if unknown: no near match."""
    bare = name.strip().removeprefix("NVIDIA ")
    found = (g for g in GPUS if bare.casefold() == g.name.casefold() or re.fullmatch(g.pattern, bare, re.IGNORECASE))
    return next(found, None)


def describe_device(device: torch.device | str | int | None = None) -> Device:
    """Name, memory and table row of `device`; by default the current GPU, else the CPU."""
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if chosen.type != "cuda":
        return Device(cpu_name(), None, None, system_memory_gib(), "cpu")
    properties = torch.cuda.get_device_properties(chosen)
    capability = (properties.major, properties.minor)
    return Device(properties.name, lookup(properties.name), capability, properties.total_memory / GIB, "cuda")


def supports_fp8(device: torch.device | str | int | None = None) -> bool:
    """True for a device with FP8 products: an NVIDIA GPU of capability 8.9 or more. A CPU emulates FP8."""
    import torch

    capability = describe_device(device).capability
    # ROCm uses the same field for other architectures.
    return capability is not None and capability >= FP8_CAPABILITY and torch.version.hip is None


def cpu_name() -> str:
    """The processor's model name, else its architecture."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine() or "CPU"


def driver_version() -> str | None:
    """The NVIDIA driver's version from nvidia-smi; None if nvidia-smi is missing or fails."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.partition("\n")[0].strip() or None


def system_memory_gib() -> float:
    """Memory of the machine, in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
