"""Hashes of what must not change: tensors, checkpoints, exported folders; and what the last bits of a CPU depend on."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def machine() -> dict[str, Any]:
    """What losses depend on beside the code: the device, its vectors, the libraries, the number of threads."""
    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines() if Path(path).is_file() else []


def tensor_bits(tensor: Tensor) -> str:
    """A hash of dtype, shape and bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + data).hexdigest()[:32]


def tensors_bits(tensors: Mapping[str, Tensor]) -> str:
    """One hash of named tensors, in any order."""
    return _joined(f"{name} {tensor_bits(tensor)}" for name, tensor in tensors.items())


def elements_bits(tensors: Iterable[Tensor]) -> str:
    """A hash of all elements, sorted: the same for matrices that are joined, parted or named in another way."""
    everything = torch.cat([tensor.detach().float().reshape(-1) for tensor in tensors])
    return tensor_bits(everything.sort().values)


def _joined(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:32]


def stored_tensors(checkpoint: Path) -> dict[str, str]:
    """Hashes of the tensors of a checkpoint that one rank wrote, by their names on disk."""
    (shard,) = checkpoint.glob("*.safetensors")
    return {name: tensor_bits(tensor) for name, tensor in sorted(load_file(shard).items())}


def checkpoint_bits(checkpoint: Path) -> dict[str, str]:
    """A hash for each kind of tensor in a checkpoint (model, optimizer, fp8, random): names and bytes, in any file."""
    kinds: dict[str, list[str]] = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            kinds.setdefault(name.partition(".")[0], []).append(f"{name} {tensor_bits(tensor)}")
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    kept = {key: state.get(key) for key in ("groups", "optimizer", "recipe", "random", "loss_scale", "data")}
    kinds["state"] = [json.dumps(kept, sort_keys=True)]
    return {kind: _joined(lines) for kind, lines in sorted(kinds.items())}


def export_bits(folder: Path) -> dict[str, str]:
    """A hash of each file of an exported folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:32] for path in files}
