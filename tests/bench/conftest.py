"""Makes `ranks` importable, and a way to break one rank of an entry."""

import os
import sys
from pathlib import Path

import pytest

if str(Path(__file__).parent.parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent.parent))

FAULT = """\
import os, sys
if os.environ.get("RANK") == "1" and "octavo.bench.worker" in sys.orig_argv:
    from octavo.bench.peers import Training
    def step(self, *batch):
        {fault}
    Training.step = step
"""


@pytest.fixture
def break_rank_1(tmp_path, monkeypatch):
    """`break_rank_1("raise RuntimeError('text')")` is what rank 1 of several then does in its first step."""

    def breaks(fault):
        folder = tmp_path / "site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(FAULT.format(fault=fault))
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    return breaks
