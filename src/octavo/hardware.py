"""Tables of GPUs and of AWS machines with GPUs, and the lookup of a device.

No other file names a GPU. Peaks are the vendor's dense figures (no sparsity, float32 accumulation). A GPU outside the table is
unknown and gets no peak, no MFU and no estimate, rather than those of a similar one. Importing this file needs no torch.
"""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import subprocess
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from octavo.errors import InputError, nearest

if TYPE_CHECKING:
    import torch

GIB = 2**30
PART = 25
"""Weights cached for speed (gathered blocks, columnwise layouts) take at most 1 / PART of a GPU's memory."""
LEAST_CAPABILITY = (8, 0)
"""The first CUDA compute capability (Ampere) with products in bf16, which Octavo's kernels are written for."""
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
    memory_gib: float  # usable memory (less than the nominal size), rounded down
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


def size(count: float) -> str:
    """Bytes as text: GiB, or MiB below one."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / 2**20:,.1f} MiB"


@dataclass(frozen=True)
class Instance:
    """An AWS instance type.

    Attributes:
        name: without the prefix "ml." of SageMaker.
        gpu: name of its GPUs, as in `GPUS` if they are in that table.
        gpus: number of GPUs.
        memory_gib: nominal memory of one GPU.
        fp8: True for GPUs with FP8 products.
    """

    name: str
    gpu: str
    gpus: int
    memory_gib: int
    fp8: bool

    def __str__(self) -> str:
        return f"ml.{self.name} ({self.gpus} x {self.gpu}, {self.memory_gib} GiB each)"


_OF_ONE = ("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge")
_ONE_TO_EIGHT = dict.fromkeys(_OF_ONE, 1) | {"12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
# GPU; nominal GiB; FP8; {size: GPUs}. A family without sizes has no GPU that Octavo supports.
_FAMILIES: dict[str, tuple[str, int, bool, dict[str, int]]] = {
    "p6-b200": ("B200", 180, True, {"48xlarge": 8}),
    "p5en": ("H200", 141, True, {"48xlarge": 8}),
    "p5e": ("H200", 141, True, {"48xlarge": 8}),
    "p5": ("H100 SXM", 80, True, {"48xlarge": 8, "4xlarge": 1}),
    "p4de": ("A100 80GB SXM", 80, False, {"24xlarge": 8}),
    "p4d": ("A100 40GB", 40, False, {"24xlarge": 8}),
    "p3dn": ("V100", 32, False, {"24xlarge": 8}),
    "p3": ("V100", 16, False, {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8}),
    "g6e": ("L40S", 48, True, _ONE_TO_EIGHT),
    "g6": ("L4", 24, True, _ONE_TO_EIGHT),
    "g5": ("A10G", 24, False, _ONE_TO_EIGHT),
    "g4dn": ("T4", 16, False, dict.fromkeys(_OF_ONE, 1) | {"12xlarge": 4, "metal": 8}),
}

INSTANCES = {
    f"{family}.{size}": Instance(f"{family}.{size}", gpu, gpus, memory, fp8)
    for family, (gpu, memory, fp8, sizes) in _FAMILIES.items()
    for size, gpus in sizes.items()
}
"""Machines with GPUs by their name without "ml."."""

_WITHOUT_GPU = re.compile(r"(m[4-8]|c[4-8]|r[5-8]|t[23])[a-z]*\.(nano|micro|small|medium|large|\d*xlarge|metal)")


def find_instance(name: str) -> Instance | None:
    """The machine of this name, with or without "ml."; None for a machine without GPUs.

    Raises:
        InputError: no machine of the table has the name.
    """
    bare = name.strip().lower().removeprefix("ml.")
    if bare not in INSTANCES and not _WITHOUT_GPU.fullmatch(bare):
        guess = nearest(bare, INSTANCES)
        hint = f" Did you mean ml.{guess}?" if guess else ""
        raise InputError(
            f"unknown instance_type = {name!r}.{hint} Known: the sizes of {', '.join(_FAMILIES)}; of m, c, r and t "
            'without GPUs. "local_gpu" takes the GPUs of this machine, "local" its CPU.'
        )
    return INSTANCES.get(bare)


def installed_gpus() -> list[str]:
    """The driver's names of this machine's GPUs, those of CUDA_VISIBLE_DEVICES; empty without nvidia-smi. Needs no torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = (_nvidia_smi("name") or "").splitlines()
    if visible is None:
        return names
    chosen = list(takewhile(lambda name: name not in ("", "-1"), (name.strip() for name in visible.split(","))))
    if not all(name.isdecimal() for name in chosen):  # UUIDs of GPUs or of MIG slices
        return names[: len(chosen)]
    # CUDA ignores the first number without a GPU, and all after it.
    return [names[number] for number in takewhile(lambda number: number < len(names), map(int, chosen))]


@dataclass(frozen=True)
class Device:
    """A device and its row of the table."""

    name: str  # from the driver or the operating system
    gpu: Gpu | None  # None for a CPU and for an unknown GPU
    capability: tuple[int, int] | None  # of CUDA; None on a CPU
    memory_gib: float
    kind: Literal["cuda", "cpu"]


def lookup(name: str) -> Gpu | None:
    """The GPU of this name, in the driver's or the table's form; None if unknown; names must match exactly."""
    bare = name.strip().removeprefix("NVIDIA ")
    matches = (g for g in GPUS if bare.casefold() == g.name.casefold() or re.fullmatch(g.pattern, bare, re.IGNORECASE))
    return next(matches, None)


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


def whole_gib(memory_gib: float) -> int:
    """A GPU's memory in bytes, rounded down to whole GiB as in the table, so that a plan and its run agree."""
    return math.floor(memory_gib) * GIB


def is_affordable(wanted: int, memory: int | None) -> bool:
    """True if `wanted` bytes are at most 1 / `PART` of a GPU's memory; False on a CPU (None)."""
    return memory is not None and PART * wanted <= memory


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
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine() or "CPU"


def driver_version() -> str | None:
    """The NVIDIA driver's version from nvidia-smi; None if nvidia-smi is missing or fails."""
    return (_nvidia_smi("driver_version") or "").partition("\n")[0].strip() or None


def _nvidia_smi(field: str) -> str | None:
    """A field of every GPU, one a line; None if nvidia-smi is missing or fails."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def system_memory_gib() -> float:
    """Memory of the machine, in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def process_memory_limit() -> int | None:
    """Memory limit of this process in bytes (`ulimit -d`, `ulimit -v`); None without a limit."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)
