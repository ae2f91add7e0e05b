"""`octavo doctor`: hardware, packages and kernels of this machine for training in FP8, and obstacles with their remedies.

Everything is tested rather than assumed: packages are imported, PyTorch is asked for its attention kernel, small FP8 products
are computed. Findings are independent, and a failure becomes the finding. Nothing is installed, changed or sent anywhere.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from octavo._version import __version__
from octavo.errors import first_line, install_extra
from octavo.hardware import cpu_name, describe_device, driver_version, supports_fp8, system_memory_gib


@dataclass(frozen=True)
class Package:
    """A package that Octavo uses; `module` is imported to test it, and training needs it if it is `required`."""

    name: str
    module: str
    purpose: str
    install: str
    required: bool = False


PACKAGES = (
    Package("torch", "torch", "everything", "pip install 'torch>=2.11,<2.15'", required=True),
    Package("triton", "triton", "kernels on GPUs", "pip install 'triton>=3.6,<3.9'", required=True),
    Package("transformers", "transformers", "models in and out", "pip install 'transformers>=5.14,<5.25'", required=True),
    Package("tokenizers", "tokenizers", "text to tokens", "pip install tokenizers", required=True),
    Package("datasets", "datasets", "corpora", "pip install 'datasets>=4'", required=True),
    Package("safetensors", "safetensors.torch", "checkpoints", "pip install 'safetensors>=0.6'", required=True),
    Package("pydantic", "pydantic", "run files", "pip install 'pydantic>=2.11'", required=True),
    Package("flash-attn-4", "flash_attn.cute", "faster attention on Hopper", install_extra("flash")),
    Package("torchao", "torchao.float8", "a peer in octavo bench", install_extra("bench")),
    Package(
        "transformer-engine", "transformer_engine.pytorch", "a peer in octavo bench",
        "pip install --no-build-isolation 'transformer-engine[pytorch]'",
    ),
    Package("timm", "timm", "vision models", "pip install timm"),
    Package("tensorboard", "tensorboard", "log.trackers", install_extra("tensorboard")),
    Package("trackio", "trackio", "log.trackers", install_extra("trackio")),
    Package("wandb", "wandb", "log.trackers", install_extra("wandb")),
)  # fmt: skip

FP8_MODES = {
    "native": 'FP8 products run in FP8 units; fp8.enabled = "auto" uses them where they are measured to be faster',
    "emulated": 'this CPU computes FP8\'s numbers exactly and slowly, by bf16 products; fp8.enabled = "auto" trains in bf16',
    "bf16": "no FP8 units: training is in bf16; fp8.emulate = true emulates FP8, slowly",
}

ATTENTION_KERNELS = {"MATH": "math", "FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "efficient", "CUDNN_ATTENTION": "cuDNN"}

CUDA_TORCH = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"


def examine() -> dict[str, Any]:
    """All findings as plain JSON; the finding of a failure is {"error": text}."""
    found: dict[str, Any] = {"octavo": __version__, "system": _attempt(_system)}
    found["packages"] = [_package(package) for package in PACKAGES]
    for part, find in (("torch", _torch), ("gpus", _gpus), ("fp8", _fp8), ("attention", _attention), ("products", _products)):
        found[part] = _attempt(find)
    found["missing"] = _missing(found)
    return found


def _attempt(find: Callable[[], Any]) -> Any:
    """The result of `find`, or its failure as a finding; SystemExit too, which some broken packages raise."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):  # stdout is for the result
            warnings.simplefilter("ignore")
            return find()
    except (Exception, SystemExit) as error:
        return {"error": first_line(error)}


def _system() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": system_memory_gib(),
        "driver": driver_version(),
        "compiler": next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None),
    }


def _package(package: Package) -> dict[str, Any]:
    """Version and status of a package: "ok", "missing" or "broken" (it does not import)."""
    finding: dict[str, Any] = {**asdict(package), "version": None, "status": "missing"}
    if _attempt(lambda: importlib.util.find_spec(package.module.partition(".")[0])) is None:
        return finding
    version = _attempt(lambda: importlib.metadata.version(package.name))
    module = _attempt(lambda: importlib.import_module(package.module))
    finding["version"] = version if isinstance(version, str) else None
    return finding | ({"status": "broken", **module} if isinstance(module, dict) else {"status": "ok"})


def _torch() -> dict[str, Any]:
    """Versions of CUDA, cuDNN and NCCL; `sees_gpu`: a GPU is available to torch."""
    import torch

    nccl = _attempt(lambda: ".".join(map(str, torch.cuda.nccl.version()))) if torch.cuda.is_available() else None
    return {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": nccl if isinstance(nccl, str) else None,
        "sees_gpu": torch.cuda.is_available(),
    }


def _gpus() -> list[dict[str, Any]]:
    """The GPUs that torch sees; `known` is the row of Octavo's table, which MFU and estimates need."""
    import torch

    devices = map(describe_device, range(torch.cuda.device_count()))
    return [
        {
            "name": device.name,
            "known": device.gpu.name if device.gpu else None,
            "capability": list(device.capability or ()),
            "memory_gib": device.memory_gib,
            "fp8": supports_fp8(index),
            "bf16_tflops": device.gpu.bf16_tflops if device.gpu else None,
            "fp8_tflops": device.gpu.fp8_tflops if device.gpu else None,
        }
        for index, device in enumerate(devices)
    ]


def _fp8() -> dict[str, str]:
    """The mode of FP8 that all devices here support."""
    import torch

    gpus = range(torch.cuda.device_count())
    mode = "native" if all(map(supports_fp8, gpus)) else "bf16"
    if not gpus:
        mode = "emulated"
    return {"mode": mode, "means": FP8_MODES[mode]}


def _attention() -> dict[str, Any]:
    """PyTorch's choice of kernel for causal bf16 attention with grouped key-value heads of 64 and of 128, and Octavo's own."""
    import torch
    from torch.nn.attention import SDPBackend

    from octavo.kernels.attention import flash
    from octavo.kernels.attention.short import LONGEST

    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = {}
    for width in (64, 128):
        query = torch.empty(1, 8, 256, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        keys = torch.empty(1, 2, 256, width, dtype=torch.bfloat16, device=device, requires_grad=True)
        choice = torch._fused_sdp_choice(query, keys, keys, is_causal=True, enable_gqa=True)
        name = SDPBackend(choice).name
        chosen[f"head_dim {width}"] = ATTENTION_KERNELS.get(name, name)
    allowed = {
        "cuDNN": torch.backends.cuda.cudnn_sdp_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }
    own = f"without rotation, mask and dropout, up to {LONGEST} tokens in 16 bits"
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is not None and flash.takes(
        *(torch.empty(1, 2, 8, 128, dtype=torch.bfloat16, device=device),) * 2, causal=True
    ):
        own += f"; FlashAttention-4 {flash.VERSION} for the rest"
    elif capability == (9, 0):
        own += f"; no FlashAttention-4: {flash.missing() or 'it is switched off'}"
    return {"device": device, "chosen": chosen, "allowed": [name for name, on in allowed.items() if on], "octavo": own}


def _products() -> dict[str, Any]:
    """Libraries of products; with FP8 units, each kind of scaled product is compared with a float32 product."""
    import torch

    if not torch.cuda.is_available():
        return {"bf16": "CPU", "fp8": "emulated: FP8 values are exact in bf16, and bf16 products take them"}
    if not supports_fp8():
        return {"bf16": "cuBLAS", "fp8": "emulated with fp8.emulate = true"}
    a, b = (torch.randn(128, 128, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    expected = a.float() @ b.float().t()

    def compared(*shapes: tuple[int, ...]) -> str:
        scale_a, scale_b = (torch.ones(shape, device="cuda") for shape in shapes)
        out = torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
        error = float((out.float() - expected).norm() / expected.norm())
        return "cuBLAS, torch._scaled_mm" if error < 0.01 else f"torch._scaled_mm is wrong by {error:.1%}"

    scales: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {"tensor": ((), ()), "row": ((128, 1), (1, 128))}
    return {"bf16": "cuBLAS", **{f"fp8 per {kind}": _attempt(partial(compared, *sides)) for kind, sides in scales.items()}}


def _missing(found: dict[str, Any]) -> list[dict[str, str]]:
    """Obstacles to training, or to training at full speed: each with reason and remedy."""
    missing = [
        {"what": package["name"], "why": f"{package['status']}; needed for {package['purpose']}", "command": package["install"]}
        for package in found["packages"]
        if package["status"] == "broken" or (package["required"] and package["status"] == "missing")
    ]
    system, torch_found, gpus = found["system"], found["torch"], found["gpus"]
    if system.get("driver") and not torch_found.get("sees_gpu"):
        cuda = torch_found.get("cuda")
        built = f"for CUDA {cuda}" if cuda else "without CUDA"
        why = f"there is an NVIDIA driver ({system['driver']}), but torch sees no GPU: torch is built {built}"
        missing.append({"what": "torch with CUDA", "why": why, "command": CUDA_TORCH})
    if isinstance(gpus, list) and gpus and "error" not in system and not system["compiler"]:
        why = "Triton and torch.compile build small C files"
        missing.append({"what": "a C compiler", "why": why, "command": "apt-get install gcc"})
    slow = sorted(set(found["attention"].get("chosen", {}).values()) - {"cuDNN"})
    if isinstance(gpus, list) and slow and any(gpu["capability"] >= [9, 0] for gpu in gpus):
        why = f"attention falls to {' and '.join(slow)}; on this GPU cuDNN's kernel is faster"
        missing.append({"what": "cuDNN attention", "why": why, "command": CUDA_TORCH})
    return missing


def render(found: dict[str, Any], console: Console) -> None:
    """Print the findings of `examine`."""
    facts = Table.grid(padding=(0, 2))
    for title, text in _facts(found):
        facts.add_row(title, escape(text))
    console.print(f"[bold]octavo {found['octavo']}[/bold]", facts, sep="\n")
    packages = Table("package", "version", "for", Column("status, or what installs it", overflow="fold"))
    for package in found["packages"]:
        status = package.get("error") or (package["install"] if package["status"] == "missing" else package["status"])
        wanted = "" if package["required"] else " (optional)"
        packages.add_row(package["name"], package["version"] or "-", package["purpose"] + wanted, escape(status))
    console.print(packages)
    if not found["missing"]:
        console.print("Nothing is missing.")
    for item in found["missing"]:
        console.print(f"[bold]{escape(item['what'])}[/bold]: {escape(item['why'])}\n    {escape(item['command'])}")


def _facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and text of each finding about the machine."""
    text: dict[str, Callable[[Any], str]] = {
        "system": lambda s: f"{s['cpu']}, {s['cores']} cores, {s['memory_gib']:.0f} GiB; Python {s['python']}; {s['platform']}",
        "torch": lambda t: f"CUDA {t['cuda'] or 'none'}, cuDNN {t['cudnn'] or 'none'}, NCCL {t['nccl'] or 'none'}",
        "fp8": lambda f: f["means"],
        "attention": lambda a: ", ".join(
            [*(f"{kernel} ({shape})" for shape, kernel in a["chosen"].items()), f"Octavo's own ({a['octavo']})"]
        ),
        "products": lambda p: "; ".join(f"{kind}: {_words(kernel)}" for kind, kernel in p.items()),
    }
    for part, write in text.items():
        yield part, found[part]["error"] if "error" in found[part] else write(found[part])
    gpus = found["gpus"]
    if isinstance(gpus, dict):
        yield "GPU", gpus["error"]
    elif not gpus:
        yield "GPU", "none"
    else:
        driver = found["system"].get("driver") or "unknown"
        for gpu in gpus:
            row = "" if gpu["known"] else "; not in Octavo's table, so no MFU and no estimates"
            capability = ".".join(map(str, gpu["capability"]))
            yield "GPU", f"{gpu['name']}, capability {capability}, {gpu['memory_gib']:.0f} GiB, driver {driver}{row}"


def _words(finding: Any) -> str:
    return str(finding["error"]) if isinstance(finding, dict) else str(finding)
