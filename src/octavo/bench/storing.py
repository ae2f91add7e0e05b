"""What a rank does in the checkpoint suite: saves while it waits, saves while it trains, restores, and tells what it holds.

Everything goes through `octavo.train.checkpoint` as `octavo train` uses it. A step here ends when the host has read its loss,
as there too, so that steps during a write and without one can be compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from octavo.bench.cases import Case
from octavo.bench.peers import SEED, Entry, Training
from octavo.bench.worker import Stand, random_batches
from octavo.errors import OctavoError
from octavo.fp8.scaling import state_records
from octavo.parallel import world
from octavo.train.checkpoint import Checkpointer, restore
from octavo.train.tensors import raw

STATES = ("exp_avg", "exp_avg_sq")


class CheckpointStand(Stand):
    """A rank that trains, with one sequence a step: its checkpoint is as large, and fewer GPUs can restore it."""

    def __init__(self, entry: Entry, case: Case, device: torch.device, *, seed: int = SEED) -> None:
        case = dataclasses.replace(case, batch=1)
        super().__init__(entry, case, device, seed=seed)
        assert isinstance(self.trainer, Training)
        self.model, self.optimizer = self.trainer.model, self.trainer.optimizer
        self.common = random_batches(case, device)[0]
        self._checkpointer: Checkpointer | None = None

    def steps(self, steps: int) -> dict[str, Any]:
        """Train; returns the seconds of each step."""
        return {"seconds": [self._seconds(self._waited_step) for _ in range(steps)]}

    def save(self, folder: str, step: int) -> dict[str, Any]:
        """Write `step-N` below `folder` and wait until it is whole; returns seconds and, on rank 0, bytes."""
        checkpointer = self._checkpoints(folder)
        self._meet()
        seconds = self._seconds(lambda: checkpointer.save(step, self.model, self.optimizer, {}))
        return {"seconds": seconds, **self._size(Path(folder) / f"step-{step}")}

    def save_behind(self, folder: str, step: int) -> dict[str, Any]:
        """Write `step-N` below `folder` in the background and train until it is whole.

        Returns:
            stall_seconds, for which training stood still; whole_seconds from the start of the save to the end of the step in
            which it became whole; seconds of each step meanwhile; the loss of the first of them, which has the same tokens on
            every rank; on rank 0 bytes.
        """
        checkpointer, path = self._checkpoints(folder), Path(folder) / f"step-{step}"
        self._meet()
        begun = time.perf_counter()
        checkpointer.save(step, self.model, self.optimizer, {}, background=True)
        stall = time.perf_counter() - begun
        loss, seconds = 0.0, list[float]()
        while not seconds or not self._everywhere(path.is_dir()):
            checkpointer.poll()
            stepped = time.perf_counter()
            if seconds:
                self._waited_step()
            else:
                loss = self.next_loss()["loss"]
            seconds.append(time.perf_counter() - stepped)
        whole = time.perf_counter() - begun
        checkpointer.wait()
        return {"stall_seconds": stall, "whole_seconds": whole, "seconds": seconds, "loss": loss, **self._size(path)}

    def restore(self, folder: str) -> dict[str, Any]:
        """Verify the newest checkpoint below `folder`, every byte of it, and put it into the model; returns seconds of both.

        Raises:
            OctavoError: there is none.
        """
        checkpointer = self._checkpoints(folder)
        self._meet()
        begun = time.perf_counter()
        path = checkpointer.latest()
        verified = time.perf_counter()
        if path is None:
            raise OctavoError(f"there is no checkpoint in {folder}.")
        restore(path, self.model, self.optimizer)
        self._wait()
        return {"verify_seconds": verified - begun, "restore_seconds": time.perf_counter() - verified}

    def next_loss(self) -> dict[str, Any]:
        """Train on tokens that are the same on every rank, so that the loss does not depend on how many there are."""
        return {"loss": float(self.trainer.step(self.common, self.common))}

    def digests(self) -> dict[str, Any]:
        """On rank 0 the sha256 of some weights with their moments, gathered, and of the FP8 state; nothing on the others."""
        named = list(self.model.named_parameters())
        found = {}
        for name, parameter in (named[0], named[len(named) // 2], named[-1]):
            states = self.optimizer.state[parameter]
            for key, tensor in {"weight": parameter, **{key: states[key] for key in STATES}}.items():
                found[f"{key} of {name}"] = _sha256(_whole(tensor))
        records = hashlib.sha256()
        for _, tensor in sorted(state_records(self.model).items()):
            records.update(raw(tensor))
        found["FP8 state"] = records.hexdigest()
        return {"digests": found} if world.state.rank == 0 else {}

    def _checkpoints(self, folder: str) -> Checkpointer:
        """One for all saves: it keeps the memory that copies are made in."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(Path(folder), keep=1, report=lambda line: print(line))
        return self._checkpointer

    def _size(self, path: Path) -> dict[str, int]:
        return {"bytes": sum(file.stat().st_size for file in path.iterdir())} if world.state.rank == 0 else {}

    def _waited_step(self) -> None:
        float(self._step())

    def _seconds(self, do: Callable[[], object]) -> float:
        begun = time.perf_counter()
        do()
        return time.perf_counter() - begun

    def _meet(self) -> None:
        """Wait for the device and for the other ranks."""
        self._wait()
        self._everywhere(True)

    def _everywhere(self, flag: bool) -> bool:
        """Whether it is true on every rank."""
        value = torch.tensor(int(flag))
        if world.state.control is not None:
            dist.all_reduce(value, dist.ReduceOp.MIN, group=world.state.control)
        return bool(value)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(raw(tensor)).hexdigest()
