"""`octavo doctor`: this machine's hardware, packages and kernels for training in FP8, and obstacles with remedies.

Everything is tested rather than assumed: packages are imported, PyTorch is queried for its attention kernel, small FP8 products
are computed, libraries report their versions. Findings are independent, and a failure becomes the finding. A change of the
environment is suggested only if it helped in a test process; otherwise the obstacle has no remedy. Nothing is installed,
changed or sent anywhere.
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from octavo import libraries
from octavo._version import __version__
from octavo.errors import first_line, install_extra
from octavo.hardware import (
    FP8_CAPABILITY,
    LEAST_CAPABILITY,
    cpu_name,
    describe_device,
    driver_version,
    supports_fp8,
    system_memory_gib,
)
from octavo.versions import TESTED, requirement, untested


@dataclass(frozen=True)
class Package:
    """A package that Octavo uses; `module` is imported to test it; training needs it if `required`."""

    name: str
    module: str
    purpose: str
    install: str
    required: bool = False


PACKAGES = (
    Package("torch", "torch", "everything", f"pip install '{requirement('torch')}'", required=True),
    Package("triton", "triton", "kernels on GPUs", f"pip install '{requirement('triton')}'", required=True),
    Package("transformers", "transformers", "models in and out", f"pip install '{requirement('transformers')}'", required=True),
    Package("tokenizers", "tokenizers", "text to tokens", "pip install tokenizers", required=True),
    Package("datasets", "datasets", "corpora", "pip install 'datasets>=4'", required=True),
    Package("safetensors", "safetensors.torch", "checkpoints", "pip install 'safetensors>=0.6'", required=True),
    Package("pydantic", "pydantic", "run files", "pip install 'pydantic>=2.11'", required=True),
    Package("flash-attn-4", "flash_attn.cute", "faster attention on Hopper", install_extra("flash")),
    Package("torchao", "torchao.float8", "a peer in benchmarks/", install_extra("bench")),
    Package(
        "transformer-engine", "transformer_engine.pytorch", "a peer in benchmarks/",
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

CUDNN_WORKS = "import torch; print(torch.backends.cudnn.version())"
SEES_GPU = "import torch; print(torch.cuda.is_available())"


def examine() -> dict[str, Any]:
    """All findings as plain JSON; a failure is {"error": text}."""
    report: dict[str, Any] = {"octavo": __version__, "system": _attempt(_system)}
    report["packages"] = [_package(package) for package in PACKAGES]
    finders: dict[str, Callable[[], Any]] = {
        "torch": _torch, "cuda": _cuda, "cudnn": _cudnn, "gpus": _gpus, "fp8": _fp8, "attention": _attention,
        "products": _products,
    }  # fmt: skip
    for part, find in finders.items():
        report[part] = _attempt(find)
    report["missing"] = _missing(report)
    return report


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
    before = set(libraries.loaded_cudnn())
    module = _attempt(lambda: importlib.import_module(package.module))
    finding["version"] = version if isinstance(version, str) else None
    if brought := [path for path in libraries.loaded_cudnn() if path not in before]:
        finding["loads_cudnn"] = brought
    return finding | ({"status": "broken", **module} if isinstance(module, dict) else {"status": "ok"})


def _torch() -> dict[str, Any]:
    """Versions of CUDA, cuDNN and NCCL; `sees_gpu`: torch sees a GPU; otherwise `gpu_error` is torch's reason."""
    import torch

    sees = torch.cuda.is_available()
    nccl = _attempt(lambda: ".".join(map(str, torch.cuda.nccl.version()))) if sees else None
    # It raises, once per process, for a cuDNN older than its build's, which says nothing about CUDA or about results.
    cudnn = next((version for _ in range(2) if isinstance(version := _attempt(torch.backends.cudnn.version), int)), None)
    error = None if sees or torch.version.cuda is None else _attempt(torch.cuda.init)
    return {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": cudnn,
        "nccl": nccl if isinstance(nccl, str) else None,
        "sees_gpu": sees,
        "gpu_error": error["error"] if isinstance(error, dict) else None,
    }


def _cuda() -> dict[str, Any]:
    """CUDA of the driver and of torch's build; least_driver: the oldest driver for that build; enough: this driver suffices."""
    import torch

    driver, build = _attempt(libraries.driver_cuda), torch.version.cuda
    newest = driver if isinstance(driver, str) else None
    least = None if build is None else libraries.LEAST_DRIVER.get(int(build.partition(".")[0]))
    return {
        "driver": newest,
        "driver_error": driver["error"] if isinstance(driver, dict) else None,
        "torch": build,
        "least_driver": least,
        "enough": None if newest is None or build is None else libraries.runs(newest, build),
        "least_capability": ".".join(map(str, LEAST_CAPABILITY)),
        "fp8_capability": ".".join(map(str, FP8_CAPABILITY)),
    }


def _cudnn() -> dict[str, Any]:
    """cuDNN of torch's build, of this process, and on disk.

    refused: the reason, if PyTorch's version check refuses this process's; loaded, on_disk: path, version, and origin;
    computes: "ok", or the error of cuDNN's attention on the GPU, None without one; alone: the version in a process that imports
    only torch, None if it is refused there.
    """
    import torch

    build = getattr(torch._C, "_cudnn", None)
    alone = None if build is None else libraries.trial(CUDNN_WORKS, {})
    versions: list[tuple[int, ...]] = [(), ()] if build is None else [build.getCompileVersion(), build.getRuntimeVersion()]
    compiled, runtime = versions
    # PyTorch's rule, which `torch.backends.cudnn.version` applies once per process.
    refused = build is not None and (runtime[0] != compiled[0] or runtime[1] < compiled[1])
    return {
        "compiled": _dotted(compiled) or None,
        "runtime": _dotted(runtime) or None,
        "refused": f"cuDNN {_dotted(runtime)} in place of {_dotted(compiled)} or newer" if refused else None,
        "alone": libraries.version_text(int(alone)) if alone is not None and alone.isdecimal() else None,
        "loaded": [_library(path, "this process") for path in libraries.loaded_cudnn()],
        "on_disk": [_library(path, by) for path, by in libraries.cudnn_on_disk().items()],
        "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH"),
        "computes": _attempt(_cudnn_computes) if torch.cuda.is_available() and build is not None else None,
    }


def _library(path: str, by: str) -> dict[str, str | None]:
    return {"path": path, "version": libraries.cudnn_version(path), "by": by}


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def _cudnn_computes() -> str:
    """ "ok" if cuDNN's attention equals plain attention; else an error."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(1, 2, 128, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    error = float((out.float() - expected).norm() / expected.norm())
    return "ok" if error < 0.02 else f"wrong by {error:.1%}"


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
    """PyTorch's choice of kernel for causal bf16 attention with grouped key-value heads of 64 and of 128, and Octavo's."""
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
    kernels = f"without rotation, mask and dropout, up to {LONGEST} tokens in 16 bits"
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is not None and flash.takes(
        *(torch.empty(1, 2, 8, 128, dtype=torch.bfloat16, device=device),) * 2, causal=True
    ):
        kernels += f"; FlashAttention-4 {flash.VERSION} for the rest"
    elif capability == (9, 0):
        kernels += f"; no FlashAttention-4: {flash.missing() or 'it is switched off'}"
    return {"device": device, "chosen": chosen, "allowed": [name for name, on in allowed.items() if on], "octavo": kernels}


def _products() -> dict[str, Any]:
    """Libraries of products; with FP8 units, each kind of scaled product is compared with a float32 product."""
    import torch

    if not torch.cuda.is_available():
        return {"bf16": "CPU", "fp8": "emulated: FP8 values are exact in bf16, and multiplied as bf16"}
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


def _missing(report: dict[str, Any]) -> list[dict[str, str | None]]:
    """Obstacles to training, or to training at full speed: each with its reason, and a remedy if one is known."""
    missing: list[dict[str, str | None]] = []
    for package in report["packages"]:
        if package["status"] == "missing" and package["required"]:
            why = f"missing; needed for {package['purpose']}"
            missing.append({"what": package["name"], "why": why, "command": package["install"]})
        elif package["status"] == "broken":
            why = f"it is installed but cannot be imported: {package['error']}; it is for {package['purpose']}"
            missing.append({"what": package["name"], "why": why, "command": _import_remedy(package["module"])})
        elif package["name"] in TESTED and (sentence := untested(package["name"])):
            missing.append({"what": package["name"], "why": sentence, "command": package["install"]})
    system, gpus = report["system"], report["gpus"]
    missing += filter(None, (_no_gpu(report), _old_cudnn(report)))
    if isinstance(gpus, list):
        missing += filter(None, map(_old_gpu, gpus))
    if isinstance(gpus, list) and gpus and "error" not in system and not system["compiler"]:
        command = "apt-get install gcc" if shutil.which("apt-get") else "install gcc or clang by the system's packages"
        missing.append({"what": "a C compiler", "why": "Triton and torch.compile build small C files", "command": command})
    slow = sorted(set(report["attention"].get("chosen", {}).values()) - {"cuDNN"})
    if isinstance(gpus, list) and slow and any(gpu["capability"] >= [9, 0] for gpu in gpus):
        why = f"attention falls to {' and '.join(slow)}; on this GPU cuDNN's kernel is faster"
        if "cuDNN" not in report["attention"]["allowed"]:
            why += ", and PyTorch is set not to use it (torch.backends.cuda.enable_cudnn_sdp)"
        elif isinstance(report["cudnn"].get("computes"), dict):
            why += f", and fails here: {report['cudnn']['computes']['error']}"
        missing.append({"what": "cuDNN attention", "why": why, "command": None})
    return missing


def _no_gpu(report: dict[str, Any]) -> dict[str, str | None] | None:
    """The obstacle if torch does not see the driver's GPUs; None without a driver, or if torch cannot be imported."""
    torch_found, cuda = report["torch"], report["cuda"]
    driver = report["system"].get("driver") or (cuda.get("driver") and f"of CUDA {cuda['driver']}")
    if not driver or torch_found.get("sees_gpu") is not False or "error" in cuda:
        return None
    there = f"there is an NVIDIA driver ({driver}), but torch sees no GPU"
    if torch_found["cuda"] is None:
        built = f"for ROCm {torch_found['rocm']}" if torch_found["rocm"] else "without CUDA"
        new = cuda["driver"] is None or libraries.runs(cuda["driver"], "13.0")
        command = (
            CUDA_TORCH if new else "install a torch that is built for CUDA 12, or a driver of 580 or newer and torch as usual"
        )
        return {"what": "torch with CUDA", "why": f"{there}: torch is built {built}", "command": command}
    if cuda["enough"] is False:
        needs = f"a driver of {cuda['least_driver']} or newer" if cuda["least_driver"] else "a newer driver"
        why = f"{there}: the driver supports CUDA up to {cuda['driver']}, but torch is built for CUDA {cuda['torch']}"
        return {"what": needs, "why": why, "command": f"install {needs}, or a torch that is built for CUDA {cuda['driver']}"}
    if libraries.trial(SEES_GPU, {}) == "True":
        why = f"{there} in this process, which has imported all packages above; one that imports only torch sees it"
        return {"what": "a package that leaves torch its GPU", "why": why, "command": None}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and libraries.trial(SEES_GPU, {"CUDA_VISIBLE_DEVICES": None}) == "True":
        why = f"{there}: CUDA_VISIBLE_DEVICES={visible} hides it; without that a process sees it"
        return {"what": "a visible GPU", "why": why, "command": "unset CUDA_VISIBLE_DEVICES"}
    reason = torch_found["gpu_error"] or cuda["driver_error"] or "it gives no reason"
    why = f"{there}, though it is built for CUDA {torch_found['cuda']}: {reason}"
    return {"what": "a GPU that torch sees", "why": why, "command": None}


def _old_cudnn(report: dict[str, Any]) -> dict[str, str | None] | None:
    """The obstacle if PyTorch refuses cuDNN, with a change of LD_LIBRARY_PATH if that helps; else None."""
    cudnn = report["cudnn"]
    if not cudnn.get("refused"):
        return None
    places = "; ".join(f"{one['version'] or 'unknown'} at {one['path']}" for one in cudnn["loaded"]) or "none"
    others = "; ".join(f"{one['version'] or 'unknown'} at {one['path']} ({one['by']})" for one in cudnn["on_disk"]) or "none"
    computes = {None: "it is not tested without a GPU", "ok": "attention by it works nevertheless"}
    works = computes.get(cudnn["computes"]) if not isinstance(cudnn["computes"], dict) else None
    why = (
        f"torch is built for cuDNN {cudnn['compiled']} but finds {cudnn['runtime']}, which is older; loaded: {places}; "
        f"on disk: {others}; {works or 'attention by it fails: ' + _words(cudnn['computes'])}"
    )
    if cudnn["alone"]:
        old = {one["path"] for one in cudnn["loaded"] if one["version"] == cudnn["runtime"]}
        bringing = [package["name"] for package in report["packages"] if old & set(package.get("loads_cudnn", ()))]
        why += f". A process that imports only torch uses {cudnn['alone']}"
        if bringing:
            why += f"; here {' and '.join(bringing)} loaded it"
        return {"what": "one cuDNN", "why": why, "command": None}
    return {"what": "cuDNN of torch's build", "why": why, "command": _cudnn_remedy(cudnn)}


def _cudnn_remedy(cudnn: dict[str, Any]) -> str | None:
    """A change of LD_LIBRARY_PATH that gives a process a cuDNN accepted by PyTorch; None if none does."""
    path = cudnn["LD_LIBRARY_PATH"]
    folders = [one["path"].rpartition("/")[0] for one in cudnn["on_disk"] if one["by"] != "LD_LIBRARY_PATH"]
    changes: list[tuple[str | None, str]] = [(None, "unset LD_LIBRARY_PATH")] if path else []
    for folder in folders:
        first = f"{folder}:{path}" if path else folder
        changes.append((first, f"export LD_LIBRARY_PATH={first}"))
    for value, command in changes:
        if (libraries.trial(CUDNN_WORKS, {"LD_LIBRARY_PATH": value}) or "").isdecimal():
            return command
    return None


def _import_remedy(module: str) -> str | None:
    """The command to unset LD_LIBRARY_PATH, if a process without it imports the module; else None."""
    if not os.environ.get("LD_LIBRARY_PATH"):
        return None
    works = libraries.trial(f"import {module}; print('imported')", {"LD_LIBRARY_PATH": None})
    return "unset LD_LIBRARY_PATH" if works is not None and works.endswith("imported") else None


def _old_gpu(gpu: dict[str, Any]) -> dict[str, str | None] | None:
    """The obstacle if a GPU is too old for Octavo's kernels; else None."""
    if gpu["capability"] >= list(LEAST_CAPABILITY):
        return None
    capability, least = (".".join(map(str, one)) for one in (gpu["capability"], LEAST_CAPABILITY))
    why = f"its capability is {capability}; products in bf16 and Octavo's kernels need {least}"
    return {"what": f"a newer GPU than {gpu['name']}", "why": why, "command": None}


def render(report: dict[str, Any], console: Console) -> None:
    """Print the findings of `examine`."""
    facts = Table.grid(padding=(0, 2))
    for title, text in _facts(report):
        facts.add_row(title, escape(text))
    console.print(f"[bold]octavo {report['octavo']}[/bold]", facts, sep="\n")
    packages = Table("package", "version", "for", Column("status, or what installs it", overflow="fold"))
    for package in report["packages"]:
        status = package.get("error") or (package["install"] if package["status"] == "missing" else package["status"])
        wanted = "" if package["required"] else " (optional)"
        packages.add_row(package["name"], package["version"] or "-", package["purpose"] + wanted, escape(status))
    console.print(packages)
    if not report["missing"]:
        console.print("Nothing is missing.")
    for item in report["missing"]:
        remedy = item["command"] or "no remedy is known to help here"
        console.print(f"[bold]{escape(item['what'])}[/bold]: {escape(item['why'])}\n    {escape(remedy)}")


def _facts(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and text of each finding about the machine."""
    text: dict[str, Callable[[Any], str]] = {
        "system": lambda s: f"{s['cpu']}, {s['cores']} cores, {s['memory_gib']:.0f} GiB; Python {s['python']}; {s['platform']}",
        "torch": lambda t: f"CUDA {t['cuda'] or 'none'}, NCCL {t['nccl'] or 'none'}",
        "CUDA": _cuda_text,
        "cuDNN": _cudnn_text,
        "fp8": lambda f: f["means"],
        "attention": lambda a: ", ".join(
            [*(f"{kernel} ({shape})" for shape, kernel in a["chosen"].items()), f"Octavo's ({a['octavo']})"]
        ),
        "products": lambda p: "; ".join(f"{kind}: {_words(kernel)}" for kind, kernel in p.items()),
    }
    for part, write in text.items():
        finding = report[part.lower()]
        yield part, finding["error"] if set(finding) == {"error"} else write(finding)
    gpus = report["gpus"]
    if isinstance(gpus, dict):
        yield "GPU", gpus["error"]
    elif not gpus:
        yield "GPU", "none"
    else:
        driver = report["system"].get("driver") or "unknown"
        for gpu in gpus:
            row = "" if gpu["known"] else "; not in Octavo's table, so no MFU and no estimates"
            capability = ".".join(map(str, gpu["capability"]))
            yield "GPU", f"{gpu['name']}, capability {capability}, {gpu['memory_gib']:.0f} GiB, driver {driver}{row}"


def _cuda_text(cuda: dict[str, Any]) -> str:
    driver = f"the driver runs CUDA {cuda['driver']}" if cuda["driver"] else "no driver"
    needs = f" or older; torch's build needs a driver of {cuda['least_driver']} or newer" if cuda["least_driver"] else ""
    least = f"GPUs need capability {cuda['least_capability']}, FP8 products {cuda['fp8_capability']}"
    return f"{driver}{needs}; {least}"


def _cudnn_text(cudnn: dict[str, Any]) -> str:
    if cudnn["compiled"] is None:
        return "none in torch"
    loaded = ", ".join(one["path"] for one in cudnn["loaded"]) or "not loaded yet"
    return f"{cudnn['runtime']} ({loaded}); torch is built for {cudnn['compiled']}"


def _words(finding: Any) -> str:
    return str(finding["error"]) if isinstance(finding, dict) else str(finding)
