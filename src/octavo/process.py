"""All state that Octavo stores per process, in one object, with the reason why no model, run or world owns it.

State that can belong to a model, a layer, an autocast, a training thread, an optimizer, a run or `octavo.state` belongs there.
Here is the rest, for four reasons:

* A registry by number or by weak reference: an operator in compiled code takes no object, and a list of live objects must not
  extend their lifetime. Entries are removed with their objects.
* A choice about this machine, which every model would make equally.
* A hook of PyTorch's, or a context called by another library's code, which takes no argument.
* "Said once", and this process's role for others: a rank, a process with a launcher.

No model reads another's entries: `tests/fp8/test_two_models.py` trains two in one process.
`tests/test_architecture.py` refuses a variable that changes in the modules of kernels, fp8, nn, parallel and
collectives; besides this object they have `octavo.state`, which describes the ranks, the buffers of layers outside
`octavo.transform` (`octavo.fp8.buffers.default`), and a thread's state (`octavo.fp8.threads.OfThread`).
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any


def _switch(variable: str) -> bool:
    """An environment variable that is on unless it is set to 0, false, off or no."""
    return os.environ.get(variable, "1").lower() not in ("0", "false", "off", "no")


class Process:
    """The state of one process; each attribute says when its entries end."""

    def __init__(self) -> None:
        # Registries.
        self.numbers = itertools.count()
        """Numbers of scale buffers, their sets and FP8 layers, in order of creation; never reused."""
        self.scale_buffers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """Number → `ScaleBuffer`, for `octavo::cast_delayed`. Ends with the buffer."""
        self.buffer_sets: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """Number → `BufferSet`: a replay of a CUDA graph runs no Python that could identify its model. Ends with the model."""
        self.fp8_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """Number → `ModuleState`: a slot is allocated before code is traced. Ends with the layer."""
        self.slots = threading.RLock()
        """Lock while layers get slots: an autocast allocates them also for models that other threads are about to train."""
        self.offered: set[Any] = set()
        """The recipe for which all `fp8_modules` have slots. Ends with the next layer or recipe."""
        self.checkpoint_forwards: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """An activation checkpoint's object → its forward, on any thread that recomputes it. Ends with the autograd graph."""
        self.checkpoint_autocasts: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """The same object → the autocasts that its function enters."""
        self.sharded: weakref.WeakSet[Any] = weakref.WeakSet()
        """The modules inside those in PyTorch's process-wide list of sharded modules."""
        self.sharded_as_of: object = None
        """The state of PyTorch's list when `sharded` was computed."""
        self.optimizers_of_matrices: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers that were checked at their first step, by a hook of PyTorch's for all optimizers."""
        self.models_of_matrices: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models with joined matrices, for that check."""
        self.models_of_one_rank: weakref.WeakSet[Any] = weakref.WeakSet()
        """Models of `octavo.transform` before `octavo.init`, which several ranks may not train."""

        # Choices about this machine.
        self.product_uses: dict[Any, int] = {}
        """Shape of a product → number of uses. Ends when it is measured."""
        self.product_algorithms: dict[Any, Any] = {}
        """Shape → the algorithm of cuBLASLt that was the fastest here; `octavo.kernels.algorithms.choices` names them."""
        self.without_collectives = 0
        """Contexts of `without_collectives` that have not ended."""
        self.peer_copies = _switch("OCTAVO_PEER_COPIES")
        """Tensor ranks of one host may exchange by copies between their GPUs."""
        self.exchange_uses: dict[Any, int] = {}
        """(kind, ranks, bits of the bytes) of an exchange → number of uses. Ends when it is measured."""
        self.exchanges: dict[Any, Any] = {}
        """The same → microseconds by NCCL and by copies; `octavo.collectives.copies.choices` names them."""
        self.peer_memories: weakref.WeakSet[Any] = weakref.WeakSet()
        """Memory of this process that other ranks write."""
        self.flash_attention = _switch("OCTAVO_FLASH_ATTENTION")
        """FlashAttention-4 may run; `octavo.kernels.attention.flash.enable` changes it."""
        self.placeholders: dict[Any, Any] = {}
        """(device, dtype) → NaN buffer of the largest size so far; placeholders of weights gathered in FP8 are views of it."""
        self.digests: dict[Any, str] = {}
        """The kernel's stamp of a checkpoint's file → its SHA-256: a file is hashed only once in a process."""

        # Contexts between which other libraries' code runs.
        self.attention = threading.local()
        """Per thread: `take` and `moves`, for results that outlive their forward; `sums`, for FlashAttention-4's backward."""
        self.at_attention: list[Callable[[], None]] = []
        """Called when an attention's backward begins, inside `octavo.kernels.autograd.at_attention`."""
        self.traced: Any = None
        """The thread state that compiled code reads: that of the last thread that entered a context."""
        self.open_autocasts = 0
        """Outermost autocasts with FP8 that are open, on any thread, for a notice."""

        # The role of this process for others.
        self.rendezvous = itertools.count()
        """Number of its process groups: each has separate keys in the store."""
        self.meetings = itertools.count()
        """Number of worlds with monitored collective calls."""
        self.calls: Any = None
        """The monitored calls of the present world; ends with `octavo.shutdown`, or with the next world."""
        self.patience = 600.0
        """Longest wait for other ranks in such a call, in seconds; each `octavo.init` sets it."""
        self.rank_groups: dict[str, Any] = {}
        """Purpose → (world, gloo group of all ranks), of the present world."""
        self.background_groups: dict[tuple[int, ...], Any] = {}
        """Ranks → (world, gloo group of saves in the background), for SMP's scripts."""
        self.shard_meshes: dict[tuple[str, int], Any] = {}
        """(kind, ranks) → (mesh of the world, one of that kind, None for all ranks), the newest last, for SMP's scripts."""
        self.layers_of_caches: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """Cache of a generation → its attention layers without `layer_idx`, for SMP's scripts. Ends with the cache."""
        self.safe_configs: list[Any] = []
        """Classes of configs that `torch.load` takes, which PyTorch lists for the process; SMP's uninstall ends them."""
        self.started_jobs: list[Any] = []
        """(job, its supervisor, whether it is waited for), each told of when Python ends."""
        self.writes_whole = False
        """True while rank 0 runs another library's `save_pretrained`, which may call itself."""
        self.launcher: int | None = None
        """The process that started this one; set once."""
        self.said: set[Any] = set()
        """Messages that were printed and are not repeated."""


process = Process()
