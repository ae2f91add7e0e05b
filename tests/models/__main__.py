"""Rewrites the table of docs/models.md: python tests/models. Without timm the row of its model stays as it is."""

import importlib.util
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    """The command."""
    import capabilities
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)  # tensors this small only wait for each other's threads
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    import torchvision_shim  # noqa: F401 - before anything imports timm

    start, names = time.monotonic(), list(capabilities.MODELS)
    if importlib.util.find_spec("timm") is None:
        names.remove(capabilities.VISION)
        print(f"timm is not installed: the row of {capabilities.VISION} stays as it is (pip install -e '.[bench]').")
    capabilities.write(names)
    print(f"{capabilities.PAGE}: {len(names)} rows in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
