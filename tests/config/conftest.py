"""Makes this folder's helper module, `minimal_run`, importable by its tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from minimal_run import MINIMAL


@pytest.fixture
def run_file(tmp_path):
    file = tmp_path / "my-run.toml"
    file.write_text(MINIMAL)
    return file
