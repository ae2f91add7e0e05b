"""Makes helper modules importable: those of this folder, `ranks`, the Llamas of the models' tests, and tensor ranks."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
for folder in (Path(__file__).parent, TESTS, TESTS / "models", TESTS / "parallel"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
