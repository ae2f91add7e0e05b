"""Makes `ranks` importable, a way to break one rank of an entry, and torchvision on a CPU's torch."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

if str(Path(__file__).parent.parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent.parent))
import command_lines

# timm imports torchvision, whose wheel has operators for CUDA only: a torch for CPUs must at least have heard of two of them.
SHIM = """\
try:
    import torchvision
except ImportError:
    pass
except RuntimeError:
    import torch
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
_kept: dict = {}  # the operators go when nobody holds them
exec(SHIM, _kept)

FAULT = """\
import os, sys
if os.environ.get("RANK") == "1" and "benchmarks.worker" in sys.orig_argv:
    from benchmarks.peers import Training
    def step(self, *batch):
        {fault}
    Training.step = step
"""


@pytest.fixture
def forked_workers(monkeypatch):
    """Workers of entries are forked with everything imported, where their start is not what is tested."""
    monkeypatch.setattr("benchmarks.group.subprocess", SimpleNamespace(Popen=command_lines.Popen, PIPE=subprocess.PIPE))


@pytest.fixture
def break_rank_1(tmp_path, monkeypatch):
    """`break_rank_1("raise RuntimeError('text')")` is what rank 1 of several then does in its first step."""

    def breaks(fault):
        folder = tmp_path / "site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(FAULT.format(fault=fault))
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    return breaks


@pytest.fixture
def with_torchvision(tmp_path, monkeypatch):
    """The effect of `SHIM`, in the processes of entries too."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SHIM)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
