"""Lets torchvision be imported on a torch for CPUs, before timm and transformers import it where it is installed.

Its wheel has operators for CUDA only, and a torch for CPUs must at least have heard of two of them.
"""

import contextlib

import torch

with contextlib.suppress(ImportError):
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        OPERATORS = torch.library.Library("torchvision", "DEF")  # they go when nobody holds them
        for operator in ("nms", "qnms"):
            OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
