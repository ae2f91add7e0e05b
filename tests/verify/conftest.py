import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "parallel", HERE.parent / "models"):  # for `tensor_faults` and `llamas` too
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
