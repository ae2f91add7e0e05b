"""Reads rows of weights by the names of their source, from memory or safetensors files, and writes such files.

Nothing is unpickled.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from octavo.errors import InputError

INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 5 << 30


class Weights(ABC):
    """Tensors by the names of their source, of which any rows can be read.

    Attributes:
        shapes: of every tensor.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], owner: str, mistake: str) -> None:
        self.shapes = shapes
        self._owner, self._mistake = owner, mistake  # for the message of a missing tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; an InputError if there is none of that name."""
        if name not in self.shapes:
            raise InputError(f"{self._owner} has no weight {name!r}: it is not {self._mistake}.")
        return self.shapes[name]

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor; all of one without dimensions."""


class InMemoryWeights(Weights):
    """Weights of a model in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        super().__init__(shapes, "the model", "of the family that its config names")
        self.tensors = tensors

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A view of rows of a tensor."""
        shape = self.shape(name)  # explains a weight that is not there
        tensor = self.tensors[name].detach()
        return tensor[start:stop] if shape else tensor


class WeightFiles(Weights):
    """The safetensors of a Hugging Face model folder.

    Raises:
        InputError: the folder has none (a pickled checkpoint is not read).
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(f"no folder {str(folder)!r} with weights: give a local Hugging Face model folder.")
        index = self.folder / INDEX
        files = _files_of(index) if index.is_file() else []
        files = files or sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            pickled = next(self.folder.glob("*.bin"), None)
            hint = f" {pickled.name} is a pickle, which Octavo never opens: convert it to safetensors." if pickled else ""
            raise InputError(f"{self.folder} has no .safetensors files.{hint}")
        self.where: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            if not (self.folder / file).is_file():
                raise InputError(f"{self.folder / file} is missing, though {INDEX} names it: copy the whole model folder.")
            try:
                with safe_open(self.folder / file, "pt") as opened:
                    self.where.update(dict.fromkeys(opened.keys(), file))
                    shapes.update((name, tuple(opened.get_slice(name).get_shape())) for name in opened.keys())  # noqa: SIM118
            except SafetensorError as error:
                raise InputError(f"{self.folder / file} is damaged ({error}): copy it again.") from None

        super().__init__(shapes, str(self.folder), "a checkpoint of this model")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor, on the CPU."""
        dimensions = len(self.shape(name))  # explains a weight that is not there
        # Open for this read only: mapped pages count as this process's memory.
        with safe_open(self.folder / self.where[name], "pt") as opened:
            return opened.get_slice(name)[start:stop] if dimensions else opened.get_tensor(name)


def _files_of(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is damaged ({type(error).__name__}: {error}): copy it again.") from None


def save_shards(pieces: Mapping[str, Mapping[str, Tensor]], read: Callable[[str], Mapping[str, Tensor]], folder: Path) -> None:
    """Write tensors in files of at most `_SHARD_BYTES` (or one tensor), with an index if there are several.

    `pieces` has the result of `read` for each name, on the meta device.
    """
    shards: list[dict[str, list[str]]] = [{}]  # for each file the arguments of `read`, and the tensors to take of each result
    size = total = 0
    for name, parts in pieces.items():
        for theirs, part in parts.items():
            if shards[-1] and size + part.nbytes > _SHARD_BYTES:
                shards.append({})
                size = 0
            shards[-1].setdefault(name, []).append(theirs)
            size += part.nbytes
            total += part.nbytes
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content: dict[str, Tensor] = {}
        for name, wanted in shard.items():
            values = read(name)
            content |= {theirs: values[theirs].detach().cpu().contiguous() for theirs in wanted}
        save_file(content, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(content, file))
        del content
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
