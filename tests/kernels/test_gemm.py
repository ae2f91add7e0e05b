"""Products where there is no choice of an algorithm."""

import pytest
import torch

from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels import algorithms, cublaslt, gemm, reference
from octavo.process import process


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recurring", [True, False])
def test_a_wide_product_takes_a_bias(dtype, recurring):
    a, b, bias = (torch.randn(*size).to(dtype) for size in ((5, 8), (8, 3), (3,)))
    want = (a.double() @ b.double() + bias.double()).to(dtype)
    torch.testing.assert_close(gemm.high_precision_mm(a, b, dtype, bias, recurring=recurring), want)
    torch.testing.assert_close(gemm.high_precision_mm(a, b, dtype), (a.double() @ b.double()).to(dtype))


def test_without_cublaslt_pytorch_multiplies(monkeypatch):
    monkeypatch.setattr(algorithms, "LEAST_OPERATIONS", 0)
    monkeypatch.setattr(process, "product_uses", {})
    monkeypatch.setattr(cublaslt, "library", lambda: None)
    a, b = torch.randn(8, 64).bfloat16(), torch.randn(64, 32).bfloat16()
    for _ in range(3):
        assert torch.equal(algorithms.mm(a, b, torch.bfloat16), a @ b)
    assert not process.product_uses


def test_what_is_differentiated_is_pytorchs(monkeypatch):
    monkeypatch.setattr(algorithms, "LEAST_OPERATIONS", 0)
    monkeypatch.setattr(process, "product_uses", {})
    monkeypatch.setattr(cublaslt, "library", lambda: object())
    a, b = torch.randn(8, 64).bfloat16().requires_grad_(), torch.randn(64, 32).bfloat16()
    for _ in range(3):
        algorithms.mm(a, b, torch.bfloat16).float().sum().backward()
    torch.testing.assert_close(a.grad.float(), 3 * b.float().sum(1).expand(8, 64), rtol=2e-2, atol=1e-1)
    assert not process.product_uses


def test_digests_tell_places_and_bits_apart():
    """Swapped elements have the same sums of rows and columns, and -0 equals 0: neither is the same result."""
    x = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        one = algorithms._digest(x.to(dtype))
        assert torch.equal(one, algorithms._digest(x.clone().to(dtype)))
        assert not torch.equal(one, algorithms._digest(x.flip(0).to(dtype)))
        assert not torch.equal(
            algorithms._digest(torch.zeros(2, 2, dtype=dtype)), algorithms._digest(-torch.zeros(2, 2, dtype=dtype))
        )
    patterned = torch.arange(8, dtype=torch.int16).repeat(4, 1)
    moved = patterned.clone()
    moved[:, 0] += 3  # what factors in steps of 2 would not see
    moved[:, 1] -= 1
    first, second = (algorithms._digest(bits.view(torch.bfloat16)) for bits in (patterned, moved))
    assert (first != second).all()
    several = torch.randn(9, 1000)
    pieces = torch.cat([algorithms._digest(several[:4]), algorithms._digest(several[4:])])
    assert torch.equal(algorithms._digest(several), pieces)


def test_an_algorithm_is_the_size_that_cublaslt_says():
    """A struct of 64 bytes, a size, two words of 4 bytes and four reserved ones."""
    assert cublaslt.ctypes.sizeof(cublaslt._Algorithm) == 64 + 8 + 4 + 4 + 16


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["row", "pieces", "squares", "squares left"])
def test_a_cpu_multiplies_without_pytorchs_scaled_products(monkeypatch, kind, out_dtype, bias):
    """Versions of PyTorch differ in what their scaled products take on a CPU."""

    def absent(*arguments, **named):
        raise AssertionError("a scaled product of PyTorch")

    for module, name in ((torch, "_scaled_mm"), (torch.nn.functional, "scaled_mm")):
        monkeypatch.setattr(module, name, absent)
    heights = {"row": None, "pieces": (1, 1), "squares": (1, 128), "squares left": (128, 1)}[kind]
    operands = []
    for number, (rows, fmt) in enumerate(((200, E4M3), (150, E5M2))):
        x = torch.randn(rows, 336)
        how = reference.cast_rows if heights is None else reference.cast_blocks
        q, scale = how(x, fmt.dtype, fmt.max, *(() if heights is None else (heights[number],)))
        operands.append((q, reference.divide(1.0, scale)))
    (a, a_scale_inv), (b, b_scale_inv) = operands
    offset = torch.randn(150) if bias else None
    got = gemm.scaled_mm(a, a_scale_inv, b, b_scale_inv, out_dtype=out_dtype, bias=offset)
    if heights is None:
        want = (a.float() @ b.float().t()) * a_scale_inv * b_scale_inv.t()
    else:
        want = reference.dequantize(a, a_scale_inv) @ reference.dequantize(b, b_scale_inv).t()
    assert torch.equal(got, (want if offset is None else want + offset).to(out_dtype))
    exact = reference.dequantize(a, a_scale_inv).double() @ reference.dequantize(b, b_scale_inv).double().t()
    exact = exact if offset is None else exact + offset
    near = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[out_dtype]
    torch.testing.assert_close(got.double(), exact, rtol=near, atol=1e-3)
