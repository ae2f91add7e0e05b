"""Compiles every Triton kernel for Hopper, which needs no GPU: what the interpreter takes, the compiler may refuse.

A process of its own, since `TRITON_INTERPRET` is read where a kernel is defined. Launches get tensors without memory, at the
sizes of models, and end when their kernel is compiled. Prints JSON: for each launch the kernel with its bytes of shared memory
or the compiler's message; for some of them registers of a thread and bytes that it spills, for others how many of their loads
are of 2 bytes; names of kernels without a launch. `hopper.py few` compiles every kernel, at fewer sizes and with fewer options.
"""

import json
import os
import re
import subprocess
import sys
import tempfile

os.environ.pop("TRITON_INTERPRET", None)

import importlib
import pkgutil

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import octavo.kernels
from octavo.kernels import (
    activation,
    adamw,
    column_sum,
    cross_entropy,
    cross_entropy_slices,
    low_rank,
    norm,
    peers,
    reference,
    rope,
    scales,
)
from octavo.kernels.attention import join, short
from octavo.kernels.embedding import backward as embedding_backward
from octavo.kernels.embedding import forward as embedding_forward
from octavo.kernels.experts import activation as expert_activation
from octavo.kernels.experts import cast as expert_cast
from octavo.kernels.experts import dispatch, gemm, permute
from octavo.kernels.experts import routes as routing
from octavo.kernels.experts.routes import TILE, Routes, most_rows
from octavo.kernels.quantize import cast, cast_scaled
from octavo.kernels.quantize.quantized import Quantizer

E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32


class Hopper:
    """Triton's driver where there is none."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


results, registers, narrow = [], [], []
_run = JITFunction.run


def compiled(self, *arguments, grid, warmup, **keywords):
    try:
        kernel = _run(self, *arguments, grid=grid, warmup=True, **keywords)
    except Exception as error:
        results.append((self.__name__, f"{type(error).__name__}: {error}"))
    else:
        results.append((self.__name__, kernel.metadata.shared))
        if self.__name__ in ("activation_tiles", "_cross_entropy"):
            registers.append((self.__name__, *registers_of(kernel.asm["cubin"])))
        if self.__name__ in ("_cross_entropy_statistics", "_cross_entropy_of_slice"):
            narrow.append((self.__name__, len(re.findall(r"ld\.global[\w.:]*\.b16", kernel.asm["ptx"]))))


def registers_of(code):
    """Registers of a thread and bytes on its stack, which are spilled registers, as compiled for a GPU."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(number) for number in re.search(r"REG:(\d+) STACK:(\d+)", shown).groups()]


def matrix(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def quantizer(dtype=E4M3, experts=None, *, amax=True, **layouts):
    size = () if experts is None else (experts,)
    scale, largest = (matrix(*size, dtype=FP32) for _ in range(2))
    return Quantizer(dtype, torch.finfo(dtype).max, scale, largest if amax else None, **layouts)


FEW = "few" in sys.argv


def further(*cases):
    """Cases whose kernels are compiled for others too: all of them, or none where few are asked for."""
    return () if FEW else cases


ROWS, BOTH, TRANSPOSED = {}, {"columnwise": True}, {"rowwise": False, "columnwise": True}
HIGH = Quantizer(BF16)


def dense():
    """Kernels of Llama-3.1-8B's layers, and of a float32 model's with another number of rows."""
    x, up = matrix(16384, 4096), matrix(16384, 28672)
    for layouts in (ROWS, BOTH, TRANSPOSED):
        cast.launch(x, quantizer(**layouts))
    cast.launch(matrix(1023, 4096, dtype=FP32), quantizer(E5M2, **BOTH))
    cast.launch(x, quantizer(E5M2, **BOTH), matrix(128, 4096, dtype=FP32))
    cast.launch_transpose(matrix(4096, 14336, dtype=E4M3), matrix(14336, 4096, dtype=E4M3))
    column_sum.launch(x)
    column_sum.launch_add_up(matrix(2, 128, 4096, dtype=FP32))
    for made in (HIGH, quantizer(**ROWS), quantizer(**BOTH)):
        activation.launch("swiglu", up, 128, made)
        activation.launch("gelu", matrix(16384, 14336), 0, made)
        activation.launch("swiglu", up, 128, made, high_precision_out=matrix(16384, 14336))
    adapters = [matrix(16, 4096, dtype=FP32), matrix(14336, 16, dtype=FP32)] * 2
    runs = [low_rank.Run(0, 0, 0, 32), low_rank.Run(1, 0, 32, 32)]
    low_rank.launch_pack(adapters, runs, 28672, 64, 2.0, BF16)
    low_rank.launch_add(matrix(4096, 14336), matrix(4096, 16), matrix(16, 14336))
    low_rank.launch_unpack(matrix(28672, 32, dtype=FP32), 2, runs, 64, 2.0)
    recompute = quantizer(amax=False, **TRANSPOSED)
    activation.launch_backward("swiglu", matrix(16384, 14336), up, 128, HIGH)
    activation.launch_backward("swiglu", matrix(16384, 14336), up, 128, quantizer(E5M2, **BOTH), recompute=recompute)
    activation.launch_backward("gelu", x, x, 0, quantizer(E5M2, **BOTH), recompute=recompute, bias=True)
    activation.launch_backward("gelu", matrix(1023, 512), matrix(1023, 512), 0, quantizer(E5M2, **BOTH), bias=True)
    for name in (*further("relu", "glu", "qgelu"), reference.clamped_swiglu(limit=7.0, alpha=1.702, offset=1.0)):
        wide = up if activation.is_gated(name) else x
        activation.launch(name, wide, 128, quantizer(**ROWS))
        activation.launch_backward(name, x, wide, 128, quantizer(E5M2, **BOTH), recompute=recompute)
    for kind in ("RMSNorm", "LayerNorm"):
        for columns in (4096, *further(6144), 65536):
            weight = matrix(columns)
            bias = weight if kind == "LayerNorm" else None
            stats = matrix(2, 8192, dtype=FP32) if kind == "LayerNorm" else matrix(8192, dtype=FP32)
            h, made = matrix(8192, columns), quantizer()
            norm.launch(kind, h, h, weight, bias, 1e-5, made)
            norm.launch_backward(kind, h, h, weight, stats, h)
            norm.launch(kind, h, h, weight, bias, 1e-5, made, zero_centered=True)
            norm.launch_backward(kind, h, h, weight, stats, h, zero_centered=True)
            norm.launch(kind, h, h, weight, bias, 1e-5, made, high_precision_out=h)
    angles = matrix(1, 8192, 128, dtype=FP32)
    heads = matrix(2, 8192, 32, 128), matrix(2, 8192, 8, 128), matrix(2, 8192, 8, 128)
    for cos, mirrored in ((angles, True), *further((matrix(1, 8192, 24, dtype=FP32), False)), (None, False)):
        rope.launch_split(matrix(2, 8192, 6144), 32, 8, cos, cos, mirrored=mirrored)
        rope.launch_join(*heads, cos, cos, quantizer(E5M2, **BOTH), mirrored=mirrored)
    rope.launch_join(*heads, angles, angles, HIGH)
    for dtype in (BF16, FP32):  # one rounding, or one of several results
        out, sums = matrix(2, 4096, 32, 128, dtype=dtype), matrix(2, 32, 4096, dtype=FP32)
        join.launch_join(out, sums, heads[0][:, :4096], sums)
    join.launch_add_up(matrix(2, 16384, 4, 16, dtype=FP32), [matrix(2, 16384, 4, 16)] * 2)
    for terms in (1, *further(2, 3, 4), 5):
        join.launch_add_up(matrix(2, 2, 4096, 8, 128), [matrix(2, 2, 4096, 8, 128)] * terms)
    for dtype in (BF16, FP32):
        weights = (matrix(4096, 4096, dtype=dtype) for _ in range(4))
        adamw.launch(
            *weights,
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            step=matrix(dtype=FP32),
            grad_scale=matrix(dtype=FP32),
        )
    history = matrix(32, 512, dtype=FP32)
    for algo in ("max", "most_recent"):
        scales.launch(history, history[0], history[0], matrix(512, dtype=torch.bool), algo=algo, margin=0, rounding=1.0)
    target = matrix(2048, dtype=torch.int64)
    for columns, dtype in (*further((8192, BF16), (32000, FP32), (128256, FP32)), (50257, BF16), (128256, BF16)):
        logits = matrix(2048, columns, dtype=dtype)
        for smoothing in (*further(0.0), 0.1):
            objective = cross_entropy.Objective(label_smoothing=smoothing)
            for fp8 in (None, matrix(2048, columns, dtype=E5M2)):
                cross_entropy.launch(logits, target, matrix(dtype=FP32), objective, fp8)
            cross_entropy.launch(logits, target, None, objective)
    for columns, dtype, padding in (*further((16000, FP32, 5), (64128, BF16, 0), (16000, BF16, 16000)), (64128, BF16, 5)):
        logits = matrix(2048, columns, dtype=dtype)
        words = cross_entropy_slices.Slice(columns, columns - padding, 2 * columns - padding)
        for smoothing in (*further(0.0), 0.1):
            objective = cross_entropy.Objective(label_smoothing=smoothing)
            found = cross_entropy_slices.launch_statistics(logits, target, words, objective, reread=True)
            for slices in (*further(2), 8):
                of_slices = matrix(slices, *found.shape, dtype=FP32)
                for scale, fp8 in (
                    (None, None),
                    (matrix(dtype=FP32), None),
                    (matrix(dtype=FP32), matrix(2048, columns, dtype=E5M2)),
                ):
                    cross_entropy_slices.launch_gradient(logits, target, of_slices, scale, objective, words, fp8)
    cross_entropy.launch_scale(logits, matrix(dtype=FP32))
    ids = matrix(2, 8192, dtype=torch.int64)
    for dtype in (BF16, FP32):
        weight = matrix(128256, 4096, dtype=dtype)
        rows = embedding_forward.launch(ids, weight, BF16).flatten(0, 1)
        for total in (None, weight):
            embedding_backward.launch(rows, ids.flatten(), 128256, None, dtype, total)


def scaled():
    """Casts that choose their scales: current, rowwise and block scaling."""
    x, odd = matrix(16384, 4096), matrix(1023, 4096, dtype=FP32)
    cast_scaled.launch_amax(x)
    cast_scaled.launch_scale(matrix(dtype=FP32), 448.0)
    for source in (x, odd):
        for rowwise, columnwise in ((True, False), (True, True), (False, True)):
            layouts = {"rowwise": rowwise, "columnwise": columnwise}
            cast_scaled.launch_rows(source, E4M3, 448.0, **layouts)
            for rows in (1, 128):
                cast_scaled.launch_blocks(source, E4M3, 448.0, rows, **layouts)
    whole = {"dtype": torch.int64}
    for fp8_max in (None, 448.0):
        of_ranks = matrix(2, 2, 64, **whole), matrix(2, **whole), matrix(**whole)
        peers.join_largest_(matrix(3, dtype=FP32), *of_ranks, rank=0, fp8_max=fp8_max)
    cast_scaled.launch_rows(matrix(128, 131072), E4M3, 448.0, rowwise=True, columnwise=False)


def vision():
    """Attention over the sequences of ViT-Huge, and of heads of 64 columns."""
    for tokens, head_dim in ((257, 80), *further((197, 64))):
        qkv, out = matrix(8, tokens, 48 * head_dim), matrix(8, tokens, 16 * head_dim)
        short.launch(qkv, 16, 16, 0.1)
        short.launch_backward(out, qkv, out, matrix(8, 16, tokens, dtype=FP32), 16, 16, 0.1)


def experts():
    """Kernels of Mixtral 8x7B's mixtures, for parameters in bf16 and in float32."""
    count, hidden, ffn = 8, 4096, 14336
    rows = most_rows(32768, count, TILE)
    whole = {"dtype": torch.int32}
    routes = Routes(
        matrix(rows, **whole), matrix(16384, 2, **whole), matrix(rows // TILE, **whole), matrix(count, **whole), TILE, None
    )
    for top_k, of in ((2, count), (8, 128)):
        routing.launch(matrix(16384, top_k, dtype=torch.int64), of)
    x, up, weights = matrix(rows, hidden), matrix(rows, 2 * ffn), matrix(rows, dtype=FP32)
    for made in (
        HIGH,
        quantizer(experts=count, **ROWS),
        quantizer(experts=count, **BOTH),
        quantizer(experts=count, **TRANSPOSED),
    ):
        permute.launch(matrix(16384, hidden), routes, made)
        expert_activation.launch("swiglu", up, weights, routes, made)
    recompute = quantizer(experts=count, amax=False, **TRANSPOSED)
    for made, again in ((HIGH, None), (HIGH, HIGH), (quantizer(E5M2, count, **BOTH), recompute)):
        expert_activation.launch_backward("swiglu", matrix(rows, ffn), up, weights, routes, made, again)
    permute.add_copies(x, routes.rows, TILE)
    scales.launch_inverse(matrix(count, dtype=FP32), matrix(count, dtype=FP32))
    dispatch.launch(matrix(rows, hidden, dtype=E4M3), matrix(rows, hidden // 128, dtype=FP32), BF16)
    for dtype in (BF16, FP32):
        expert_cast.launch(matrix(count, ffn, hidden, dtype=dtype), quantizer(experts=count, **BOTH))
        expert_cast.launch(matrix(count, ffn, hidden, dtype=dtype), quantizer(experts=count, **ROWS))
    for layouts in (BOTH, ROWS):
        expert_cast.launch([matrix(ffn, hidden)] * count, quantizer(experts=count, **layouts))
    cast_scaled.launch_rows(x, E4M3, 448.0, rowwise=True, columnwise=True, experts=routes.experts, count=count)
    of_row = {
        "tensor": matrix(count, dtype=FP32),
        "row": matrix(rows, 1, dtype=FP32),
        "block": matrix(32, rows, dtype=FP32).t(),
    }
    of_matrix = {
        "tensor": of_row["tensor"],
        "row": matrix(count, ffn, 1, dtype=FP32),
        "block": matrix(count, ffn // 128, 32, dtype=FP32),
    }
    of_columns = {
        "tensor": (of_row["tensor"],) * 2,
        "row": (matrix(count, ffn, 1, dtype=FP32), matrix(count, hidden, 1, dtype=FP32)),
        "block": (matrix(rows // 128, ffn, dtype=FP32).t(), matrix(rows // 128, hidden, dtype=FP32).t()),
    }
    a, b = (matrix(rows, hidden, dtype=E4M3), of_row["row"]), (matrix(count, ffn, hidden, dtype=E4M3), of_matrix["row"])
    gemm.launch_rows(a, b, routes, BF16, "row", precise=True, bias=matrix(count, ffn))
    for kind, (dy_scale, x_scale) in of_columns.items():
        for dtype in (BF16, FP32):
            for precise in (*further(False), True) if kind != "block" else (True,):
                a, b = (
                    (matrix(rows, hidden, dtype=E4M3), of_row[kind]),
                    (matrix(count, ffn, hidden, dtype=E4M3), of_matrix[kind]),
                )
                gemm.launch_rows(a, b, routes, dtype, kind, precise=precise)
                a, b = (matrix(ffn, rows, dtype=E5M2), dy_scale), (matrix(hidden, rows, dtype=E4M3), x_scale)
                gemm.launch_weights(a, b, routes, dtype, kind, precise=precise)


def kernels():
    """Kernels that are launched: jitted functions that no other one calls."""
    names, calls = set(), ""
    for module in pkgutil.walk_packages(octavo.kernels.__path__, "octavo.kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, JITFunction) and value.__module__ == module.name:
                names.add(name)
                calls += value.src
    return {name for name in names if not re.search(rf"(?<!def )\b{name}\b", calls)}


if __name__ == "__main__":
    triton.runtime.driver.set_active(Hopper())
    JITFunction.run = compiled
    for launches in (dense, scaled, vision, experts):
        launches()
    absent = sorted(kernels() - {name for name, _ in results})
    print(json.dumps({"compiled": results, "registers": registers, "narrow": narrow, "missing": absent}))
