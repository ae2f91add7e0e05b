"""Makes helper modules importable: `ranks`, `sharded`, `replicas`, the Llamas of the models' tests, and fused layers by hand.

And loads Transformer Engine, where it is installed, before any test runs: its library refuses a process in which PyTorch has
used cuDNN. pytest imports this file when it collects the folder, in every worker of pytest-xdist too, and no other folder's
tests run on a GPU.
"""

import contextlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks import te_attention

for folder in ("", "collectives", "parallel", "models", "nn", "train"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))

MOST_KEPT = 2**30
"""Bytes of PyTorch's cache that a worker keeps from test to test."""
workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
if torch.cuda.is_available() and workers:
    # References run on the CPU; with threads for all cores each, workers would wait for one another.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))

if torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None:
    # It warns of a Jax without its own part. Where it cannot be imported, the tests that need it say so.
    with warnings.catch_warnings(), contextlib.suppress(ImportError, OSError):
        warnings.simplefilter("ignore")
        te_attention.choose(te_attention.CUDNN)  # as its entries in tests of one process
        import transformer_engine.pytorch  # noqa: F401


@pytest.fixture(autouse=True)
def any_algorithm():
    """A run with `train.deterministic` leaves its process deterministic, and the next test's attention would be another."""
    yield
    torch.use_deterministic_algorithms(False)
    for kernels in ("cudnn", "flash", "mem_efficient"):
        getattr(torch.backends.cuda, f"enable_{kernels}_sdp")(True)


@pytest.fixture(autouse=True)
def memory_for_others():
    """Workers of pytest-xdist share the GPU: what a test leaves in PyTorch's cache is the next one's, of another process."""
    yield
    if workers and torch.cuda.is_available() and torch.cuda.memory_reserved() > MOST_KEPT:
        torch.cuda.empty_cache()
