"""Matrix products in FP8 and in high precision, with each device's rules for layouts, padding and scales.

Both operands sum over their last dimension (`a · bᵀ`), the only layout of Hopper's FP8 units. GPUs with FP8 units run cuBLAS's
products (`octavo.kernels.algorithms`). Elsewhere bf16 or float32 products give the same numbers: FP8 values are exact in bf16,
so only the order of the float32 sums differs.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from octavo.hardware import FP8_CAPABILITY
from octavo.kernels import algorithms, low_rank, reference

ALIGNMENT = 16
"""cuBLAS requires multiples of this for the summed dimension and the result's columns: 16 bytes."""


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU, cached: PyTorch's query takes microseconds, and every launch needs it."""
    return torch.cuda.get_device_capability(device)


@torch.compiler.assume_constant_result
def is_native(device: torch.device) -> bool:
    """True if products of FP8 matrices run in FP8 units on this device."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return capability(device) >= FP8_CAPABILITY


def is_opaque(x: Tensor) -> bool:
    """True in compiled code for a CPU, where FP8 casts and products are custom operators.

    They run the eager layer's code and give the same bits: Inductor's code for block scaling on CPUs is wrong.
    """
    return torch.compiler.is_compiling() and x.device.type == "cpu"


@functools.cache
def cpu_has_bf16() -> bool:
    """True if oneDNN multiplies bf16 on this CPU (AVX-512, or Arm with bf16).

    Elsewhere PyTorch multiplies in loops: 1016 x 4096 by 4096 x 256 takes 2.7 seconds on two AVX2 cores, and 39 ms in float32.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def widens(x: Tensor) -> bool:
    """True if a product of `x` runs in float32, rounded once to bf16: the same numbers but for the order of sums."""
    if torch.compiler.is_compiling() or x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return False
    return not cpu_has_bf16()


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    # An alias of x as the result of an autograd function loses its gradient when torch 2.11 compiles it.
    return x if x.dtype == dtype else x.to(dtype)


def scaled_mm(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    *,
    out_dtype: torch.dtype,
    precise: bool = False,
    bias: Tensor | None = None,
    recurring: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """(a · a_scale_inv) (b · b_scale_inv)ᵀ + bias, accumulated in float32.

    a: FP8 [M, C]. b: FP8 [N, C]. Scales as in `reference.dequantize`. bias: [N]. Returns [M, N] in `out_dtype`.
    precise: float32 accumulation of every partial sum; otherwise Hopper's fast mode, which keeps 14 bits inside a tile
    (0.27% of the result's norm over 16,384 summands, and 5 to 11% faster over a block's backward).
    recurring: as in `octavo.kernels.algorithms.mm`. out: contiguous, of `out_dtype`, receives the result and is returned.
    """
    if out is not None and not _writes_into(out, a, a_scale_inv, b, b_scale_inv, bias):
        operands = a, a_scale_inv, b, b_scale_inv
        return out.copy_(scaled_mm(*operands, out_dtype=out_dtype, precise=precise, bias=bias, recurring=recurring))
    if 0 in (*a.shape, *b.shape):
        empty = a.new_zeros(a.shape[0], b.shape[0], dtype=out_dtype)
        return empty if bias is None else empty + bias.to(out_dtype)
    if not is_native(a.device):
        product = _emulated_operator if is_opaque(a) else _emulated
        return product(a, a_scale_inv, b, b_scale_inv, out_dtype, bias)
    rowwise = is_by_row(a, a_scale_inv) and is_by_row(b, b_scale_inv)
    if not rowwise and a_scale_inv.dim() > 0:
        return _blockwise(a, a_scale_inv, b, b_scale_inv, out_dtype, bias)
    columns = b.shape[0]
    a, b = _pad(a, 1, ALIGNMENT), _pad(b, ALIGNMENT, ALIGNMENT)
    if rowwise:
        b_scale_inv = functional.pad(b_scale_inv, (0, 0, 0, b.shape[0] - columns), value=1.0).t()
    # cuBLAS has row scales, and a bias in the epilogue, only for bf16 results.
    product_dtype = torch.bfloat16 if rowwise else out_dtype
    fuses = product_dtype == torch.bfloat16 and b.shape[0] == columns
    fused_bias = bias.to(product_dtype) if bias is not None and fuses else None
    if rowwise:
        out = torch._scaled_mm(
            a,
            b.t(),
            scale_a=a_scale_inv,
            scale_b=b_scale_inv,
            bias=fused_bias,
            out_dtype=product_dtype,
            use_fast_accum=not precise,
        )
    else:
        scales = a_scale_inv, b_scale_inv
        fast = not precise
        out = algorithms.mm(a, b.t(), product_dtype, scales=scales, fast=fast, bias=fused_bias, recurring=recurring, out=out)
    if out.shape[1] != columns:
        out = out[:, :columns].contiguous()
    if bias is not None and fused_bias is None:
        out = out + bias.to(out.dtype)
    return _to(out, out_dtype)


def _writes_into(out: Tensor, a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, bias: Tensor | None) -> bool:
    """True if a product of operands with one scale each needs no copy into `out`: cuBLAS's, of sizes that are not padded."""
    aligned = 0 not in (*a.shape, *b.shape) and a.shape[1] % ALIGNMENT == b.shape[0] % ALIGNMENT == 0
    adds = bias is None or out.dtype == torch.bfloat16
    return aligned and adds and a_scale_inv.dim() == b_scale_inv.dim() == 0 and is_native(a.device)


def scaled_mm_into(out: Tensor, a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor) -> Tensor:
    """Precise `scaled_mm` of operands with one scale each into an existing matrix [M, N]."""
    aligned = a.shape[0] > 0 and a.shape[1] > 0 and a.shape[1] % ALIGNMENT == b.shape[0] % ALIGNMENT == 0
    if not (aligned and is_native(a.device) and all(x.is_contiguous() for x in (out, a, b))):
        return out.copy_(scaled_mm(a, a_scale_inv, b, b_scale_inv, out_dtype=out.dtype, precise=True))
    return algorithms.mm(a, b.t(), out.dtype, scales=(a_scale_inv, b_scale_inv), out=out)


def high_precision_mm(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    recurring: bool = True,
    out: Tensor | None = None,
    unrounded: bool = False,
) -> Tensor:
    """a [M, C] · b [C, N] of one float dtype + bias [N], in `out_dtype`; a GPU does not round a float32 result to their dtype.

    bias: of the operands' dtype, which is then `out_dtype`. recurring: as in `octavo.kernels.algorithms.mm`. out: as in
    `scaled_mm`. unrounded: a CPU does not round a float32 result either.
    """
    if a.device.type == "cuda" and out_dtype in (a.dtype, torch.float32):
        return algorithms.mm(a, b, out_dtype, bias=bias, recurring=recurring, out=out)
    if out is not None:
        return out.copy_(high_precision_mm(a, b, out_dtype, bias, recurring=recurring, unrounded=unrounded))
    with torch.autocast(a.device.type, enabled=False):
        if unrounded and out_dtype == torch.float32 != a.dtype:
            return a.float() @ b.float()
        if widens(a):
            out = a.float() @ b.float()
            out = (out if bias is None else out + bias.float()).to(a.dtype)
        else:
            out = a @ b if bias is None else torch.addmm(bias, a, b)
    return _to(out, out_dtype)


def add_mm_(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """out [M, N] += a [M, C] · b [C, N] of one float dtype, in place: sums in float32, by cuBLAS not always rounded once."""
    if widens(a):
        with torch.autocast("cpu", enabled=False):
            return out.copy_(torch.addmm(out.float(), a.float(), b.float()))
    if low_rank.takes(out, a):
        return low_rank.launch_add(out, a, b)
    return out.addmm_(a, b)


@functools.cache
def has_grouped_products(device: torch.device) -> bool:
    """True if the products of several groups of rows run as one launch here (`octavo.kernels.experts.gemm`): Hopper."""
    return device.type == "cuda" and not torch.version.hip and capability(device) == (9, 0)


def _blockwise(
    a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """Blocks on a GPU: in FP8 where cuBLAS has a product of these blocks, otherwise in bf16."""
    product_dtype = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    if _takes_blocks(a.device) and _are_blocks(a, a_scale_inv, b, b_scale_inv):
        product = block_mm if torch.compiler.is_compiling() else _block_mm
        out = product(a, a_scale_inv, b, b_scale_inv, product_dtype)
    else:
        # Scales of a cast are powers of two, so the values of the blocks are exact in bf16, which multiplies fast. Those of a
        # folder in FP8 need not be: its weights are rounded as in a bf16 model.
        a, b = (reference.dequantize(*operand).bfloat16() for operand in ((a, a_scale_inv), (b, b_scale_inv)))
        with torch.autocast(a.device.type, enabled=False):
            out = a @ b.t() if product_dtype == torch.bfloat16 else torch.mm(a, b.t(), out_dtype=torch.float32)
    return _to(out if bias is None else out + bias.float(), out_dtype)


@torch.compiler.assume_constant_result
def _takes_blocks(device: torch.device) -> bool:
    """True if PyTorch reaches cuBLAS's products of 1 × 128 and 128 × 128 blocks here: Hopper only, from CUDA 12.9 on."""
    if device.type != "cuda" or torch.version.hip or torch.version.cuda is None:
        return False
    cuda = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    return cuda >= (12, 9) and capability(device) == (9, 0)


def _are_blocks(a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor) -> bool:
    """True for cuBLAS's operands: E4M3, `a` in pieces of 1 × 128, `b` in such pieces or blocks of 128 × 128."""
    pieces = -(-a.shape[1] // reference.BLOCK)
    return (
        a.dtype == b.dtype == torch.float8_e4m3fn
        and a_scale_inv.shape == (a.shape[0], pieces)
        and b_scale_inv.shape in ((b.shape[0], pieces), (-(-b.shape[0] // reference.BLOCK), pieces))
    )


def _block_mm(a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype) -> Tensor:
    """a [M, C] · b [N, C]ᵀ of blocks in float32 or bfloat16, padded for cuBLAS; see `_are_blocks`.

    cuBLAS reads the scales of 1 × 128 pieces column after column, those of 128 × 128 blocks row after row, each row filled up
    to a multiple of 4 scales. It adds every 128 products to float32 sums; a faster, less precise mode does not exist.
    """
    scaling = functional.ScalingType
    rows, columns = a.shape[0], b.shape[0]
    square = b_scale_inv.shape[0] != columns
    a, b = _pad(a, ALIGNMENT, reference.BLOCK), _pad(b, reference.BLOCK if square else ALIGNMENT, reference.BLOCK)
    pieces = a.shape[1] // reference.BLOCK
    if square:
        b_scale_inv = _filled(b_scale_inv, b.shape[0] // reference.BLOCK, -(-pieces // 4) * 4).t()
    else:
        b_scale_inv = _filled(b_scale_inv.t(), pieces, b.shape[0]).t()
    out = functional.scaled_mm(
        a,
        b.t(),
        _filled(a_scale_inv.t(), pieces, a.shape[0]).t(),
        scaling.BlockWise1x128,
        b_scale_inv,
        scaling.BlockWise128x128 if square else scaling.BlockWise1x128,
        output_dtype=out_dtype,
    )
    return out if out.shape == (rows, columns) else out[:rows, :columns].contiguous()


@torch.library.custom_op("octavo::block_mm", mutates_args=())
def block_mm(a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`_block_mm`, a [M, C] · b [N, C]ᵀ → [M, N], as one operator: Inductor's template misreads some layouts of the scales."""
    return _block_mm(a, a_scale_inv, b, b_scale_inv, out_dtype)


@block_mm.register_fake
def _(a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _filled(scale_inv: Tensor, rows: int, columns: int) -> Tensor:
    """Scales filled up with 1 to [rows, columns] without gaps; the tensor itself if it has this form."""
    if scale_inv.shape == (rows, columns) and scale_inv.stride() == (columns, 1):
        return scale_inv
    whole = scale_inv.new_ones(rows, columns)
    whole[: scale_inv.shape[0], : scale_inv.shape[1]] = scale_inv
    return whole


def is_by_row(x: Tensor, scale_inv: Tensor) -> bool:
    """True for FP8 [N, C] with a scale per row."""
    return scale_inv.shape == (x.shape[0], 1)


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    """Row-major, zero-padded to multiples of `rows` and `columns`."""
    more_rows, more_columns = -x.shape[0] % rows, -x.shape[1] % columns
    if more_rows or more_columns:
        return functional.pad(x.view(torch.uint8), (0, more_columns, 0, more_rows)).view(x.dtype)
    return x if x.is_contiguous() else x.contiguous()


def _emulated(
    a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    tensorwise = a_scale_inv.dim() == 0 and b_scale_inv.dim() == 0
    eager = tensorwise and not torch.compiler.is_compiling()
    if eager and a.device.type == "cpu" and out_dtype == torch.bfloat16 and cpu_has_bf16():
        # oneDNN applies alpha to its float32 sums, so there is one rounding, as on a GPU; 2.5 × as fast as float32.
        alpha = float(a_scale_inv * b_scale_inv)
        start = a.new_zeros((), dtype=torch.bfloat16) if bias is None else bias.to(torch.bfloat16)
        beta = 0 if bias is None else 1
        return torch.addmm(start.expand(b.shape[0]), _to_bf16(a), _to_bf16(b).t(), beta=beta, alpha=alpha)
    # PyTorch's autocast would round these sums before they are scaled, and in float16 they would overflow.
    with torch.autocast(a.device.type, enabled=False):
        wide = torch.promote_types(out_dtype, torch.float32)
        if tensorwise:
            out = (a.to(wide) @ b.to(wide).t()) * (a_scale_inv * b_scale_inv)
        elif is_by_row(a, a_scale_inv) and is_by_row(b, b_scale_inv):
            out = (a.to(wide) @ b.to(wide).t()) * a_scale_inv * b_scale_inv.t()
        else:
            out = reference.dequantize(a, a_scale_inv).to(wide) @ reference.dequantize(b, b_scale_inv).to(wide).t()
    return _to(out if bias is None else out + bias.to(wide), out_dtype)


@torch.library.custom_op("octavo::emulated_mm", mutates_args=())
def _emulated_operator(
    a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, bias: Tensor | None
) -> Tensor:
    """`_emulated` as one operator to a compiler."""
    return _emulated(a, a_scale_inv, b, b_scale_inv, out_dtype, bias)


@_emulated_operator.register_fake
def _(a: Tensor, a_scale_inv: Tensor, b: Tensor, b_scale_inv: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


@functools.cache
def _bf16_values(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).bfloat16()


def _to_bf16(x: Tensor) -> Tensor:
    """FP8 to bf16 on a CPU, exactly, through a table: a third of the time of PyTorch's conversion."""
    if not x.is_contiguous():
        return _to_bf16(x.t().contiguous()).t()
    return _bf16_values(x.dtype).index_select(0, x.view(torch.uint8).flatten().int()).view(x.shape)
