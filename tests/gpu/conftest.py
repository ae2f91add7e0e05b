"""Makes helper modules importable: `ranks`, `sharded`, and the Llamas of the models' tests."""

import sys
from pathlib import Path

for folder in ("", "parallel", "models"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
