"""Finds NVIDIA's libraries on this machine: loaded by the process, found by the loader, and the driver's CUDA version.

Each function reads one fact from the system and returns nothing for an absent library. Importing this file needs no torch.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

LEAST_DRIVER = {12: "525.60.13", 13: "580"}
"""Major version of CUDA → the first driver that runs programs built for any minor version of it."""
SECONDS = 120
"""Longest time of a trial in a separate process."""
_CUDNN = re.compile(r"libcudnn\.so(\.\d+)*")
_VERSION_OF = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).cudnnGetVersion())"


def driver_cuda() -> str:
    """The newest CUDA version that the driver supports, such as "13.0", from libcuda itself.

    Raises:
        OSError: there is no libcuda, or it gives no version.
    """
    driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    if code := driver.cuDriverGetVersion(ctypes.byref(version)):
        raise OSError(f"cuDriverGetVersion failed with error {code}")
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def runs(driver: str, cuda: str) -> bool:
    """True if a driver for one CUDA version runs programs built for another: the same major version, or an older one."""
    return int(driver.partition(".")[0]) >= int(cuda.partition(".")[0])


def loaded_cudnn() -> list[str]:
    """Paths of the cuDNN libraries in this process, in the order of its map."""
    maps = Path("/proc/self/maps")
    text = maps.read_text(encoding="utf-8", errors="replace") if maps.is_file() else ""
    return cudnn_of_map(text)


def cudnn_of_map(text: str) -> list[str]:
    """Paths of cuDNN's main library, without its parts, in the text of /proc/self/maps."""
    paths = (line.split(maxsplit=5)[-1] for line in text.splitlines() if "libcudnn" in line)
    return list(dict.fromkeys(path for path in paths if _CUDNN.fullmatch(path.rpartition("/")[2])))


def cudnn_on_disk() -> dict[str, str]:
    """Paths of cuDNN that a loader may find → their origin: LD_LIBRARY_PATH, ldconfig, or a pip wheel."""
    loaded_by: dict[str, str] = {}
    for path, by in (*_by_variable(), *cudnn_of_ldconfig(_ldconfig()), *_by_wheel()):
        if path not in loaded_by and not any(Path(path).samefile(other) for other in loaded_by):
            loaded_by[path] = by
    return loaded_by


def cudnn_of_ldconfig(text: str) -> Iterator[tuple[str, str]]:
    """(path, "ldconfig") of each cuDNN in the output of `ldconfig -p`."""
    for line in text.splitlines():
        name, arrow, path = line.strip().partition(" => ")
        if arrow and _CUDNN.fullmatch(name.split(" ")[0]) and Path(path).is_file():
            yield path, "ldconfig"


def cudnn_version(path: str) -> str | None:
    """The version that a library itself reports, in a separate process; None if it cannot be loaded there."""
    answer = _run([sys.executable, "-c", _VERSION_OF, path], os.environ)
    return version_text(int(answer)) if answer is not None and answer.isdecimal() else None


def version_text(number: int) -> str:
    """cuDNN's version number, 91900 or 8907, as "9.19.0" or "8.9.7"."""
    major = number // 10_000 or number // 1000
    rest = number % 10_000 if number >= 10_000 else number % 1000
    return f"{major}.{rest // 100}.{rest % 100}"


def trial(code: str, change: Mapping[str, str | None]) -> str | None:
    """Output of a Python program in this environment with changes (None removes a variable); None if it fails."""
    environment = {key: value for key, value in os.environ.items() if key not in change}
    return _run([sys.executable, "-c", code], environment | {key: value for key, value in change.items() if value is not None})


def _by_variable() -> Iterator[tuple[str, str]]:
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        yield from ((str(path), "LD_LIBRARY_PATH") for path in _in_folder(Path(folder)))


def _by_wheel() -> Iterator[tuple[str, str]]:
    for folder in filter(None, sys.path):
        for part in (*sorted(Path(folder).glob("nvidia/*/lib")), Path(folder, "torch", "lib")):
            yield from ((str(path), "a wheel beside torch") for path in _in_folder(part))


def _in_folder(folder: Path) -> list[Path]:
    """cuDNN in a folder, by the shortest name per major version, which is the one that loaders request."""
    named = sorted(
        (path for path in folder.glob("libcudnn.so*") if _CUDNN.fullmatch(path.name)), key=lambda path: len(path.name)
    )
    return [path for path in named if path.name != "libcudnn.so"][:1] or named[:1]


def _ldconfig() -> str:
    program = shutil.which("ldconfig") or "/sbin/ldconfig"
    return _run([program, "-p"], os.environ) or ""


def _run(command: list[str], environment: Mapping[str, str]) -> str | None:
    """The stripped output of a command; None if it fails."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=True, env=dict(environment)
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
