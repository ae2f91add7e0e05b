"""cuBLASLt's products by ctypes, for the choice of the algorithm that PyTorch does not offer.

The library is the one that PyTorch has loaded into the process. Products of two matrices; FP8 operands have a scale each. Names
and numbers are those of `cublasLt.h`, the same in CUDA 12 and 13.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

_COMPUTE_32F = 68
_EPILOGUE_BIAS = 4
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
OPERANDS = frozenset(_TYPES) - {torch.float32}
RESULTS = frozenset((torch.float32, torch.float16, torch.bfloat16))
"""Dtypes. PyTorch multiplies float32, since it decides about TF32."""
_TRANS_A, _TRANS_B, _EPILOGUE, _BIAS, _A_SCALE, _B_SCALE, _FAST_ACCUM, _BIAS_TYPE = 3, 4, 7, 8, 17, 18, 25, 26
"""Attributes of a product (`CUBLASLT_MATMUL_DESC_…`)."""
_PREFERENCE_WORKSPACE = 1
"""Attribute of a preference: bytes of workspace."""
_SPLITS = 2
_NAMED = {
    "algorithm": (0, ctypes.c_int32),
    "tile": (1, ctypes.c_uint32),
    "stages": (6, ctypes.c_uint32),
    "cluster": (8, ctypes.c_uint16),
    "swizzle": (4, ctypes.c_uint32),
    "option": (5, ctypes.c_uint32),
}
"""Attributes of an algorithm (`CUBLASLT_ALGO_CONFIG_…`): parts of the sum; those that identify it, with their types."""

MOST_ALGORITHMS = 16
MOST_WORKSPACE = 2**20
"""Bytes that an algorithm may need during a product. With a workspace tiles are assigned by a counter there, which is cleared
before each product; without one the same algorithm gives each multiprocessor a fixed share of tiles."""
ALIGNMENT = 256
"""Alignment in bytes that cuBLAS assumes by default."""


class ProductShape(NamedTuple):
    """A product a [rows, summed] · b [summed, columns], the result row-major.

    Attributes:
        device: its index.
        a, b, out: dtypes. FP8 operands have a scale each.
        a_by_rows, b_by_rows: operands are stored row after row; otherwise column after column.
        bias: [columns] of the result's dtype is added.
        fast: Hopper's fast accumulation of FP8.
        dynamic: multiprocessors get tiles as they become free. A share fixed beforehand needs no counter, but where another
            kernel holds its multiprocessor it begins when all others have ended.
    """

    device: int
    rows: int
    columns: int
    summed: int
    a: torch.dtype
    a_by_rows: bool
    b: torch.dtype
    b_by_rows: bool
    out: torch.dtype
    bias: bool
    fast: bool
    dynamic: bool


class _Algorithm(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`: an algorithm (the first field) and its workspace."""

    _fields_ = (
        ("data", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """cuBLASLt, if PyTorch has loaded it into this process."""
    if torch.version.cuda is None or not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


class RefusedError(RuntimeError):
    """A call of the library returned an error status."""


def _call(name: str, *arguments: object) -> None:
    if status := getattr(library(), name)(*arguments):
        raise RefusedError(f"{name} failed with status {status}")


def _sized(value: Any) -> tuple[Any, ctypes.c_size_t]:
    """Pointer to an attribute's value, and its size."""
    return ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _layout(dtype: torch.dtype, rows: int, columns: int, by_rows: bool) -> ctypes.c_void_p:
    """Layout of a matrix. To cuBLAS, which counts by columns, a matrix stored by rows is its transpose."""
    layout = ctypes.c_void_p()
    high, wide = (columns, rows) if by_rows else (rows, columns)
    sizes = ctypes.c_uint64(high), ctypes.c_uint64(wide), ctypes.c_int64(high)
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), _TYPES[dtype], *sizes)
    return layout


def _attribute(algorithm: _Algorithm, attribute: int, value: Any) -> int:
    """An attribute of an algorithm, as a number of its C type."""
    written = ctypes.c_size_t()
    pointer = ctypes.byref(algorithm)
    _call("cublasLtMatmulAlgoConfigGetAttribute", pointer, attribute, *_sized(value), ctypes.byref(written))
    number: int = value.value
    return number


def _splits(algorithm: _Algorithm) -> int:
    return _attribute(algorithm, _SPLITS, ctypes.c_int32())


class Product:
    """A product of one shape and cuBLAS's algorithms for it; none splits the sum.

    Its descriptors in cuBLAS (some hundred bytes) are never freed.
    """

    def __init__(self, shape: ProductShape) -> None:
        # A result by rows is computed as its transpose: outᵀ [columns, rows] = bᵀ · aᵀ.
        self.shape = shape
        self._handle = _handle(shape.device)
        self._a = _layout(shape.a, shape.rows, shape.summed, shape.a_by_rows)
        self._b = _layout(shape.b, shape.summed, shape.columns, shape.b_by_rows)
        self._out = _layout(shape.out, shape.rows, shape.columns, True)
        self._description = ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self._description), _COMPUTE_32F, _TYPES[torch.float32])
        self._set(_TRANS_A, ctypes.c_int32(not shape.b_by_rows))
        self._set(_TRANS_B, ctypes.c_int32(not shape.a_by_rows))
        self._a_scale, self._b_scale, self._bias = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        if shape.a.itemsize == 1:
            self._set(_FAST_ACCUM, ctypes.c_int8(shape.fast))
        if shape.bias:
            self._set(_EPILOGUE, ctypes.c_uint32(_EPILOGUE_BIAS))
            self._set(_BIAS_TYPE, ctypes.c_int32(_TYPES[shape.out]))
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._lock = threading.Lock()
        self.algorithms = self._offered()

    def name(self, number: int) -> str:
        """An algorithm in cuBLAS's numbers, such as "algorithm 66, tile 23, stages 36, cluster 5, swizzle 0, option 0"."""
        algorithm = self.algorithms[number]
        parts = [f"{what} {_attribute(algorithm, key, kind())}" for what, (key, kind) in _NAMED.items()]
        return ", ".join([*parts, "dynamic" if algorithm.workspace else "static"])

    def _set(self, attribute: int, value: Any) -> None:
        _call("cublasLtMatmulDescSetAttribute", self._description, attribute, *_sized(value))

    def _offered(self) -> list[_Algorithm]:
        offered = self._heuristic(MOST_WORKSPACE)
        if self.shape.dynamic:  # before Hopper no product has a workspace, nor a fixed share
            offered = [algorithm for algorithm in offered if algorithm.workspace] or offered
        else:
            offered += self._heuristic(0)
        distinct = {(*algorithm.data, algorithm.workspace): algorithm for algorithm in offered}
        return [algorithm for algorithm in distinct.values() if _splits(algorithm) <= 1]

    def _heuristic(self, workspace: int) -> list[_Algorithm]:
        """cuBLAS's algorithms that need no more bytes of workspace, in the order of its heuristic."""
        preference, most = ctypes.c_void_p(), ctypes.c_uint64(workspace)
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        _call("cublasLtMatmulPreferenceSetAttribute", preference, _PREFERENCE_WORKSPACE, *_sized(most))
        algorithms, count = (_Algorithm * MOST_ALGORITHMS)(), ctypes.c_int()
        with torch.cuda.device(self.shape.device), contextlib.suppress(RefusedError):  # no algorithm for the product
            _call(
                "cublasLtMatmulAlgoGetHeuristic", self._handle, self._description, self._b, self._a, self._out, self._out,
                preference, MOST_ALGORITHMS, algorithms, ctypes.byref(count),
            )  # fmt: skip
        _call("cublasLtMatmulPreferenceDestroy", preference)
        return [algorithm for algorithm in algorithms[: count.value] if algorithm.state == 0]

    def __call__(
        self, number: int, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor] | None, bias: Tensor | None, out: Tensor
    ) -> Tensor:
        """Launch algorithm `number` into `out` [rows, columns], on the current stream of the shape's device, the current one.

        a: [rows, summed]. b: [summed, columns]. scales: inverse scales of FP8 operands, float32 []. bias: [columns].
        """
        algorithm = self.algorithms[number]
        # From PyTorch's allocator: no other stream shares it, and a CUDA graph holds a separate one.
        workspace = out.new_empty(algorithm.workspace, dtype=torch.uint8) if algorithm.workspace else None
        stream = torch._C._cuda_getCurrentRawStream(self.shape.device)  # without an object around it
        with self._lock:
            if scales is not None:
                self._a_scale.value, self._b_scale.value = (scale.data_ptr() for scale in scales)
                self._set(_A_SCALE, self._b_scale)
                self._set(_B_SCALE, self._a_scale)
            if bias is not None:
                self._bias.value = bias.data_ptr()
                self._set(_BIAS, self._bias)
            pointers = [ctypes.c_void_p(x.data_ptr()) for x in (a, b, out)]
            _call(
                "cublasLtMatmul", self._handle, self._description, ctypes.byref(self._one),
                pointers[1], self._b, pointers[0], self._a, ctypes.byref(self._zero), pointers[2], self._out,
                pointers[2], self._out, ctypes.byref(algorithm),
                ctypes.c_void_p(None if workspace is None else workspace.data_ptr()),
                ctypes.c_size_t(algorithm.workspace), ctypes.c_void_p(stream),
            )  # fmt: skip
        return out
