"""Reads rows of weights by the names of their source, from memory or safetensors files, and writes such files.

The files of a folder are those of transformers' order: the file named in its config, else `model.safetensors`, else the shards
of the index. Other files are not read. Nothing is unpickled.
"""

from __future__ import annotations

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from octavo.errors import InputError, first_line, some
from octavo.models.fp8_folders import DEQUANTISE, Fp8Matrix, matrices_of, scheme_of
from octavo.storage import is_lfs_pointer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LISTED = 10
"""Most names of weights in a message, which otherwise has their number."""
_SHARD_BYTES = 5 << 30
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_QUANTIZED_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files next to the weights that describe quantisation (ModelOpt, AutoGPTQ, AutoAWQ)."""
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


class Weights(ABC):
    """Tensors by the names of their source, read by rows.

    Attributes:
        shapes: of every tensor.
        kinds: "float" (16 bits or more), "integer", "complex", or the name of a dtype of fewer bits.
        optional: names of a model's tensors that may be absent; they retain their values.
    """

    optional: frozenset[str] = frozenset()

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, str], owner: str, mistake: str) -> None:
        self.shapes, self.kinds = shapes, kinds
        self.owner, self._mistake = owner, mistake  # for the message of a missing tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; an InputError if there is none of that name."""
        self.check_present((name,))
        return self.shapes[name]

    def check_present(self, names: Sequence[str]) -> None:
        """Raise an InputError if tensors of these names are missing."""
        missing = [name for name in names if name not in self.shapes]
        if len(missing) == 1:
            raise InputError(f"{self.owner} has no weight {missing[0]!r}: it is not {self._mistake}.")
        if missing:
            raise InputError(f"{self.owner} lacks {len(missing)} weights, {some(missing, LISTED)}: it is not {self._mistake}.")

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor [N, …]; the whole of a scalar. Weights stored in FP8 are returned as float32."""

    def fp8(self, name: str) -> Fp8Source | None:
        """The bytes and scales of a tensor that its source stores in FP8; None for another."""
        return None

    def in_fp8(self, name: str) -> bool:
        """True if a tensor, or any that it is computed from, is stored in FP8."""
        return self.fp8(name) is not None


@dataclass(frozen=True)
class Fp8Source:
    """A matrix [N, K] as stored in its file.

    Attributes:
        matrix: which weights share a scale.
        scales: float32 [] or [⌈N/rows⌉, ⌈K/columns⌉], all finite and above 0.
        bytes: reads a range of rows, E4M3.
    """

    matrix: Fp8Matrix
    scales: Tensor
    bytes: Callable[[int, int], Tensor]


def kind_of(dtype: torch.dtype | str) -> str:
    """The kind of a dtype, of torch's or by its name in a safetensors file; as in `Weights.kinds`."""
    if isinstance(dtype, torch.dtype):
        if dtype.is_complex:
            return "complex"
        if not dtype.is_floating_point:
            return "integer"
        return "float" if dtype.itemsize > 1 else str(dtype).removeprefix("torch.")
    if dtype in ("F64", "F32", "F16", "BF16"):
        return "float"
    return "complex" if dtype.startswith("C") else "integer" if dtype.startswith(("BOOL", "I", "U")) else dtype


class InMemoryWeights(Weights):
    """Weights of a model in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        kinds = {name: kind_of(tensor.dtype) for name, tensor in tensors.items()}
        super().__init__(shapes, kinds, "the model", "of the family that its config names")
        self.tensors = tensors

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A view of rows of a tensor."""
        shape = self.shape(name)  # raises the error of a missing weight
        tensor = self.tensors[name].detach()
        return tensor[start:stop] if shape else tensor


class WeightFiles(Weights):
    """The safetensors of a Hugging Face model folder, under their names on disk.

    FP8 weights are read as float32; their scales are not among the tensors.

    Attributes:
        matrices: weights in FP8, by their names.
        spare: scales of activations and of the KV cache in the files.
        cache: the folder's config has attention's cache in FP8.

    Raises:
        InputError: the folder has no weights for transformers, or they are damaged, an adapter's, pickles, or quantised in a
            format other than FP8 with scales.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(
                f"no folder {str(folder)!r} with weights: give a local Hugging Face model folder. For a model of the Hub run hf"
                " download first, which prints its folder."
            )
        config = _json_object(self.folder / "config.json") if (self.folder / "config.json").is_file() else {}
        _refuse_other_formats(self.folder)
        scheme = scheme_of(config, str(self.folder))
        name = _entry(self.folder, config.get("transformers_weights"))
        listed = _weight_map(self.folder / name) if name.endswith(".json") else {}
        self.where: dict[str, str] = {}  # tensor → file
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, str] = {}
        for file in sorted(set(listed.values())) or [name]:
            if not (self.folder / file).is_file():
                raise InputError(f"{self.folder / file} is missing, though {name} names it: copy the whole model folder.")
            for tensor, shape, dtype in _header(self.folder / file):
                if tensor in self.where:
                    raise InputError(
                        f"{self.folder}: {tensor} is in {self.where[tensor]} and in {file}, both named by {name}: the"
                        " shards are of two saves. Copy the whole model folder again."
                    )
                self.where[tensor] = file
                shapes[tensor] = tuple(shape)
                dtypes[tensor] = dtype
        for tensor, file in listed.items():
            if self.where.get(tensor) != file:
                raise InputError(
                    f"{self.folder / name} says that {tensor} is in {file}, where it is not: index and shards are of two saves."
                    " Copy the whole model folder again."
                )
        self.matrices, self.spare = matrices_of(scheme, shapes, dtypes, str(self.folder))
        self.cache = scheme is not None and scheme.cache
        scales = {*self.spare, *(matrix.scale for matrix in self.matrices.values())}
        shapes = {tensor: shape for tensor, shape in shapes.items() if tensor not in scales}
        kinds = {tensor: "float" if tensor in self.matrices else kind_of(dtypes[tensor]) for tensor in shapes}
        self._scales: tuple[str, Tensor] | None = None  # of the last matrix read
        super().__init__(shapes, kinds, str(self.folder), "a checkpoint of this model")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows of a tensor, on the CPU."""
        self.shape(name)  # raises the error of a missing weight
        values = self._read(name, start, stop)
        if (matrix := self.matrices.get(name)) is None:
            return values
        return matrix.rows(values, self._scales_of(matrix), start, self.owner)

    def fp8(self, name: str) -> Fp8Source | None:
        """The bytes and scales of a weight in FP8, on the CPU."""
        if (matrix := self.matrices.get(name)) is None:
            return None
        return Fp8Source(matrix, self._scales_of(matrix), functools.partial(self._read, name))

    def _scales_of(self, matrix: Fp8Matrix) -> Tensor:
        if self._scales is None or self._scales[0] != matrix.scale:
            self._scales = matrix.scale, matrix.check_scales(self._read(matrix.scale, 0, None), self.owner)
        return self._scales[1]

    def _read(self, name: str, start: int, stop: int | None) -> Tensor:
        """Rows of a tensor in its stored dtype."""
        # Open for this read only: mapped pages count as this process's memory.
        with safe_open(self.folder / self.where[name], "pt") as opened:
            part = opened.get_slice(name)
            return part[start:stop] if part.get_shape() else opened.get_tensor(name)


def _header(path: Path) -> list[tuple[str, list[int], str]]:
    """Name, shape and dtype of each tensor of a safetensors file."""
    try:
        with safe_open(path, "pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return [(name, part.get_shape(), part.get_dtype()) for name, part in parts.items()]
    except SafetensorError as error:
        raise InputError(f"{path} is damaged ({error}): {_copy_again(path)}.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None


def _json_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{path} is damaged ({first_line(error)}): copy it again.") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} is damaged (no JSON object): copy it again.")
    return values


def _copy_again(path: Path) -> str:
    return "it is a pointer of git LFS, run git lfs pull" if is_lfs_pointer(path) else "copy it again"


def _refuse_other_formats(folder: Path) -> None:
    """Raise an InputError for a folder with a scheme in a separate file, an adapter, or a distributed checkpoint's shards."""
    for name in _QUANTIZED_FILES:
        if (folder / name).is_file():
            raise InputError(f"{folder}: {name} says that its weights are quantised{_scheme_in(folder / name)}. {DEQUANTISE}")
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{folder} has an adapter (adapter_config.json), which transformers would add to the weights and Octavo does not:"
            " merge it first (peft's merge_and_unload(), then save_pretrained), or give the folder of the base model."
        )
    if any(_DISTRIBUTED.fullmatch(path.name) for path in folder.iterdir()):
        raise InputError(
            f"{folder} is a distributed checkpoint (shard-…-model-…): export a run with octavo export RUN --to FOLDER, or save"
            " a model of transformers by save_pretrained, and give that folder."
        )


def _scheme_in(path: Path) -> str:
    """The quantisation scheme in a file next to the weights, for a message."""
    values = _json_object(path)
    inner, maker = values.get("quantization"), values.get("producer")
    tables = [inner if isinstance(inner, dict) else values, maker if isinstance(maker, dict) else {}]
    names = [tables[1].get("name"), *(tables[0].get(key) for key in ("quant_algo", "quant_method", "bits", "w_bit"))]
    return f" ({' '.join(str(one) for one in names if one)})" if any(names) else ""


def _entry(folder: Path, named: Any) -> str:
    """The file with the weights or the index; named: by the config, or None."""
    if named is not None:
        if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")) or not _inside(named):
            raise InputError(
                f"{folder}: config.json has transformers_weights = {named!r}, which is no safetensors file of the folder."
            )
        if not (folder / named).is_file():
            raise InputError(f"{folder / named} is missing, though config.json names it (transformers_weights).")
        return named
    entry = next((name for name in (SINGLE, INDEX) if (folder / name).is_file()), None)
    if entry is not None:
        return entry
    others = sorted(
        p for pattern in ("*", "*/*") for p in folder.glob(pattern) if p.suffix in (".safetensors", ".gguf", *_PICKLES)
    )
    names = [path.relative_to(folder).as_posix() for path in others]
    there = f" There {'are' if len(names) > 1 else 'is'} {some(names)}." if names else ""
    pickled = next((name for name in names if name.endswith(_PICKLES)), None)
    if pickled:
        there += (
            f" {pickled} is a pickle, which Octavo never opens: convert it to safetensors (transformers' from_pretrained, then"
            " save_pretrained)."
        )
    elif names:
        there += " Give the folder of the weights, or rename the file if it has the whole model."
    raise InputError(f"{folder} has no {SINGLE} and no {INDEX}, the files that transformers loads.{there}")


def _inside(name: str) -> bool:
    """A relative path without "..": links inside a folder may lead out of it, as in the Hub's cache."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor → shard."""
    listed = _json_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
        raise InputError(f"{index} is damaged (no weight_map of tensors and files): copy it again.")
    for tensor, file in listed.items():
        if not _inside(file) or not file.endswith(".safetensors"):
            raise InputError(f"{index} says that {tensor} is in {file!r}, which is no safetensors file inside the folder.")
    return listed


def save_shards(
    pieces: Mapping[tuple[str, ...], Mapping[str, Tensor]],
    read: Callable[[tuple[str, ...]], Mapping[str, Tensor]],
    folder: Path,
    shard_bytes: int | None = None,
) -> None:
    """Write tensors in files of at most `shard_bytes` (by default 5 GiB) or one tensor, with an index for several files.

    `pieces` has the result of `read` for each group of names, on the meta device.
    """
    shards: list[dict[tuple[str, ...], list[str]]] = [{}]  # per file: argument of `read` → names of the resulting tensors
    size = total = 0
    for group, parts in pieces.items():
        for theirs, part in parts.items():
            if shards[-1] and size + part.nbytes > (shard_bytes or _SHARD_BYTES):
                shards.append({})
                size = 0
            shards[-1].setdefault(group, []).append(theirs)
            size += part.nbytes
            total += part.nbytes
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        content: dict[str, Tensor] = {}
        for group, wanted in shard.items():
            values = read(group)
            content |= {theirs: values[theirs].detach().cpu().contiguous() for theirs in wanted}
        save_file(content, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(content, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
