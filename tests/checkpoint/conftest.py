"""Makes helper modules importable: those of this folder, `ranks`, and the Llamas of the models' tests."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent, Path(__file__).parent.parent / "models"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
