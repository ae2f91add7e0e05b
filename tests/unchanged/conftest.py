"""Makes `kept`, `bits` and `ranks` importable, and torchvision, which timm wants, on a CPU's torch."""

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# As in tests/bench: torchvision's wheel has operators for CUDA only, and a torch for CPUs must have heard of two of them.
try:
    import torchvision  # noqa: F401
except ImportError:
    pass
except RuntimeError:
    import torch

    _operators = torch.library.Library("torchvision", "DEF")  # they go when nobody holds them
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
