"""Makes helper modules importable: `ranks`, `sharded`, the Llamas of the models' tests, and fused layers by hand."""

import sys
from pathlib import Path

for folder in ("", "parallel", "models", "nn"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
