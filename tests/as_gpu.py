"""The code for a GPU on a CPU: tensors say that they are on a Hopper GPU, and Triton's interpreter runs the kernels.

Products of libraries are their definitions in float32. Attention is PyTorch's of the CPU. Gradients come from `backward`, since
PyTorch's own leaves the mode.
"""

import contextlib
from types import SimpleNamespace

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from octavo.kernels import algorithms, gemm

GPU = torch.device("cuda", 0)


def _on_cpu(value):
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return type(value)(map(_on_cpu, value)) if type(value) in (tuple, list) else value


class _AsGpu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function == torch.Tensor.device.__get__:
            return GPU if function(*args).type == "cpu" else function(*args)
        if function == torch.Tensor.is_cuda.__get__:
            return True
        if function is torch.mm and "out_dtype" in kwargs:  # CUDA alone has it
            return (args[0].float() @ args[1].float()).to(kwargs["out_dtype"])
        return function(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})


def _mm(a, b, out_dtype, *, scales=None, fast=False, bias=None, recurring=True, out=None):
    made = a.float() @ b.float()
    made = made if scales is None else made * (scales[0] * scales[1])
    made = (made if bias is None else made + bias.float()).to(out_dtype)
    return made if out is None else out.copy_(made)


def _scaled_mm(a, b, *, scale_a, scale_b, bias=None, out_dtype=None, use_fast_accum=False):
    made = (a.float() @ b.float()) * scale_a * scale_b
    return (made if bias is None else made + bias.float()).to(out_dtype)


def scaled_mm_of_blocks(a, b, a_scale_inv, a_recipe, b_scale_inv, b_recipe, *, output_dtype):
    """`functional.scaled_mm` for blocks as PyTorch documents it: refuses other sizes and strides, multiplies in float32."""
    m, k, n = *a.shape, b.shape[1]
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert (m % 16, n % 16, k % 128) == (0, 0, 0)
    assert a_recipe == functional.ScalingType.BlockWise1x128
    assert (a_scale_inv.shape, a_scale_inv.stride()) == ((m, k // 128), (1, m))
    square = b_recipe == functional.ScalingType.BlockWise128x128
    if square:
        filled = -(-k // 512) * 4
        assert n % 128 == 0
        assert (b_scale_inv.shape, b_scale_inv.stride()) == ((filled, n // 128), (1, filled))
        b_scales = b_scale_inv.t()[:, : k // 128]
    else:
        assert b_recipe == functional.ScalingType.BlockWise1x128
        assert (b_scale_inv.shape, b_scale_inv.stride()) == ((n, k // 128), (1, n))
        b_scales = b_scale_inv
    wide_a = a.float() * a_scale_inv.repeat_interleave(128, 1)[:, :k]
    wide_b = b.t().float() * b_scales.repeat_interleave(128 if square else 1, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return (wide_a @ wide_b.t()).to(output_dtype)


def _grouped_mm(a, b, *, offs):
    ends = offs.tolist()
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    if b.dim() == 2:
        return torch.stack([(a[:, first:end].float() @ b[first:end].float()).to(a.dtype) for first, end in bounds])
    made = a.new_zeros(a.shape[0], b.shape[2])
    for matrix, (first, end) in zip(b, bounds, strict=True):
        made[first:end] = (a[first:end].float() @ matrix.float()).to(a.dtype)
    return made


def backward(loss):
    """`loss.backward()` within `as_gpu`."""
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@contextlib.contextmanager
def as_gpu(monkeypatch):
    """Tensors are on a GPU inside."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=2))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None, synchronize=lambda: None))
    monkeypatch.setattr(algorithms, "mm", _mm)
    monkeypatch.setattr(torch, "_scaled_mm", _scaled_mm)
    monkeypatch.setattr(torch, "_grouped_mm", _grouped_mm)
    monkeypatch.setattr(gemm, "_takes_blocks", lambda device: device.type == "cuda")  # with PyTorch's build for CPUs too
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm_of_blocks)
    gemm.capability.cache_clear()
    gemm.has_grouped_products.cache_clear()
    try:
        with _AsGpu():
            yield
    finally:
        gemm.capability.cache_clear()
        gemm.has_grouped_products.cache_clear()
