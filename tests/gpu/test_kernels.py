"""The Triton kernels and cuBLAS's FP8 products on a GPU, against the reference on the CPU."""

import pytest
import torch
from torch.nn import functional

from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels import cross_entropy, cross_entropy_slices, gemm, reference
from octavo.kernels.column_sum import add_up, column_sums
from octavo.kernels.quantize.cast import launch, row_tiles, transpose
from octavo.kernels.quantize.quantized import Quantizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def assert_same_codes(got, want):
    """Bit for bit, but that any NaN equals any other: which of the two codes a NaN takes is the converter's choice."""
    got, want = got.cpu(), want.contiguous()
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(got.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan])


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (1, 1), (65, 129), (4096, 2048), (1000, 333)])
def test_cast_is_exact(awkward, fmt, dtype, rows, columns):
    x = awkward(rows, columns, dtype)
    scale, amax = torch.rand(()) * 8, torch.tensor(0.25)
    on_gpu = amax.cuda()
    made = launch(x.cuda(), Quantizer(fmt.dtype, fmt.max, scale.cuda(), on_gpu, columnwise=True))
    (q, scale_inv), (q_t, _) = made.rowwise, made.columnwise
    want = reference.cast(x, scale, fmt.dtype, fmt.max)
    assert_same_codes(q, want)
    assert_same_codes(q_t, want.t())
    assert torch.equal(scale_inv.cpu(), scale.reciprocal())
    assert torch.equal(on_gpu.cpu(), torch.maximum(amax, reference.amax(x)))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_every_float_near_a_rounding_boundary(fmt):
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    codes = codes[codes.isfinite()].sort().values
    middle = (codes[1:] + codes[:-1]) / 2
    around = torch.cat([codes, middle, torch.nextafter(middle, torch.tensor(1e9)), torch.nextafter(middle, torch.tensor(-1e9))])
    x = around[None]
    one = torch.ones(())
    q, _ = launch(x.cuda(), Quantizer(fmt.dtype, fmt.max, one.cuda())).rowwise
    assert_same_codes(q, reference.cast(x, one, fmt.dtype, fmt.max))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_are_exact(power_of_two):
    amaxes = torch.cat([torch.rand(10_000) * torch.exp2(torch.randint(-120, 120, (10_000,)).float()), torch.tensor([0.0])])
    cpu = reference.scale_from_amax(amaxes, 448.0, power_of_two=power_of_two)
    gpu = reference.scale_from_amax(amaxes.cuda(), 448.0, power_of_two=power_of_two)
    compiled = torch.compile(reference.scale_from_amax)(amaxes.cuda(), 448.0, power_of_two=power_of_two)
    assert torch.equal(gpu.cpu(), cpu)
    assert torch.equal(compiled.cpu(), cpu)


@pytest.mark.parametrize(("m", "n", "k"), [(64, 128, 256), (7, 19, 33), (1, 16, 16), (130, 150, 200), (2048, 1024, 512)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
@pytest.mark.parametrize("a_format", [E4M3, E5M2], ids=lambda f: f.name)
def test_products(m, n, k, out_dtype, precise, bias, kind, a_format):
    a, b, offset = torch.randn(m, k), torch.randn(n, k), torch.randn(n) if bias else None
    if kind == "tensor":
        one = torch.tensor(0.37)
        qa, sa = reference.cast(a, one, a_format.dtype, a_format.max), one.reciprocal()
        qb, sb = reference.cast(b, one, E4M3.dtype, E4M3.max), one.reciprocal()
    elif kind == "row":
        (qa, sa), (qb, sb) = (reference.cast_rows(x, f.dtype, f.max) for x, f in ((a, a_format), (b, E4M3)))
        sa, sb = reference.divide(1.0, sa), reference.divide(1.0, sb)
    else:
        qa, sa = reference.cast_blocks(a, a_format.dtype, a_format.max, 1)
        qb, sb = reference.cast_blocks(b, E4M3.dtype, E4M3.max, 128)
        sa, sb = reference.divide(1.0, sa), reference.divide(1.0, sb)
    want = reference.dequantize(qa, sa).double() @ reference.dequantize(qb, sb).double().t()
    want = want if offset is None else want + offset.double()
    moved = None if offset is None else offset.cuda()
    got = gemm.scaled_mm(qa.cuda(), sa.cuda(), qb.cuda(), sb.cuda(), out_dtype=out_dtype, precise=precise, bias=moved)
    assert got.dtype == out_dtype
    error = (got.cpu().double() - want).norm() / want.norm()
    twice = 2 if kind == "block" and bias else 1  # the product is rounded to bf16, then its sum with the bias
    assert error < (4e-3 * twice if out_dtype == torch.bfloat16 or kind == "row" else 3e-4 if precise else 3e-3)


@pytest.mark.parametrize("columns", [17, 8192, 50257, 128256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cross_entropy(columns, dtype):
    logits, target = (torch.randn(33, columns) * 5).to(dtype), torch.randint(columns, (33,))
    target[::4] = -100
    for smoothing, z_loss in ((0.0, 0.0), (0.1, 1e-3)):
        objective = cross_entropy.Objective(label_smoothing=smoothing, z_loss=z_loss)
        want_loss, want_grad = reference.cross_entropy(logits, target, torch.tensor(0.5), -100, smoothing, z_loss)
        for fp8 in (torch.empty(33, columns + 15, dtype=E5M2.dtype, device="cuda")[:, :columns], None):
            loss, grad = cross_entropy.cross_entropy_(logits.cuda(), target.cuda(), torch.tensor(0.5).cuda(), objective, fp8)
            torch.testing.assert_close(loss.cpu(), want_loss, rtol=1e-5, atol=1e-3)
            if fp8 is None:
                torch.testing.assert_close(grad.high_precision.cpu().float(), want_grad.float(), rtol=1e-2, atol=1e-5)
            else:
                assert grad.high_precision is None
                found = reference.dequantize(grad.fp8, grad.scale_inv).cpu()
                torch.testing.assert_close(found, want_grad.float(), rtol=0.13, atol=1e-5)


@pytest.mark.parametrize("columns", [8192, 50257, 128256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cross_entropy_of_logits_far_apart(columns, dtype):
    """Beside the first columns, which the sums begin with."""
    logits, target = (torch.randn(4, columns) * 5).to(dtype), torch.full((4,), columns - 1)
    logits[0, : columns // 2] = logits[1, :-1] = -torch.inf
    logits[2, -1] = 500.0
    logits[3, 0] = 500.0
    want_loss, want_grad = reference.cross_entropy(logits, target, torch.tensor(1.0))
    loss, grad = cross_entropy.cross_entropy_(logits.cuda(), target.cuda(), torch.tensor(1.0).cuda(), cross_entropy.Objective())
    torch.testing.assert_close(loss.cpu(), want_loss, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(grad.high_precision.cpu().float(), want_grad.float(), rtol=1e-2, atol=1e-5)


def of_slices(logits, target, scale, objective, *, fp8=False, padding=77.0):
    """(loss, gradient of all words), as three ranks compute them; the second has padding, the third nothing else."""
    vocabulary = logits.shape[1]
    width = -(-vocabulary // 32) * 16
    firsts = [min(number * width, vocabulary) for number in range(3)]
    words = [cross_entropy_slices.Slice(first, min(width, vocabulary - first), vocabulary) for first in firsts]
    whole = functional.pad(logits.cuda(), (0, 3 * width - vocabulary), value=padding)
    parts, target = [part.contiguous() for part in whole.split(width, 1)], target.cuda()
    keep, given = scale is not None, zip(parts, words, strict=True)
    found = torch.stack([cross_entropy_slices.statistics(part, target, one, objective, reread=keep) for part, one in given])
    scale = None if scale is None else torch.tensor(scale).cuda()
    losses, grads = [], []
    for part, one in zip(parts, words, strict=True):
        room = torch.empty(len(part), width + 16, dtype=E5M2.dtype, device="cuda")[:, :width] if fp8 else None
        loss, grad = cross_entropy_slices.cross_entropy_of_statistics_(part, target, found, scale, objective, one, room)
        losses.append(loss.cpu())
        if grad is not None:
            grads.append(reference.dequantize(grad.fp8, grad.scale_inv) if fp8 else grad.high_precision.float())
    for loss in losses:
        assert torch.equal(loss.nan_to_num(-1.0), losses[0].nan_to_num(-1.0))
    if not grads:
        return losses[0], None
    grad = torch.cat(grads, 1).cpu()
    assert (grad[:, vocabulary:] == 0).all()
    return losses[0], grad[:, :vocabulary]


@pytest.mark.parametrize("vocabulary", [4000, 50257, 128256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("largest", [None, 500.0, 721.3, -torch.inf])
def test_cross_entropy_of_slices(vocabulary, dtype, largest):
    """largest: of two rows' targets, or all else."""
    width = -(-vocabulary // 32) * 16
    logits, target = (torch.randn(33, vocabulary) * 5).to(dtype), torch.randint(vocabulary, (33,))
    target[::4] = -100
    target[1], target[2] = vocabulary - 1, 0
    if largest is not None and largest > 0:
        logits[1, target[1]] = logits[2, target[2]] = largest
    elif largest is not None:
        logits[1, :width] = logits[2, 1:] = largest
    for smoothing, z_loss in ((0.0, 0.0), (0.1, 1e-3)):
        if smoothing and largest == -torch.inf:
            continue
        objective = cross_entropy.Objective(label_smoothing=smoothing, z_loss=z_loss)
        want_loss, want_grad = reference.cross_entropy(logits, target, torch.tensor(0.5), -100, smoothing, z_loss)
        for fp8 in (False, True):
            loss, grad = of_slices(logits, target, 0.5, objective, fp8=fp8)
            torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=1e-3)
            tolerance = {"rtol": 0.13, "atol": 1e-5} if fp8 else {"rtol": 1e-2, "atol": 1e-5}
            want = want_grad.float().clamp(-0.5, 0.5) if fp8 else want_grad.float()
            torch.testing.assert_close(grad, want, **tolerance)
            if largest is not None and largest > 0 and not smoothing:
                assert grad[1, target[1]] == grad[2, target[2]] == 0
        alone, nothing = of_slices(logits, target, None, objective)
        assert nothing is None
        assert torch.equal(alone, loss)


@pytest.mark.parametrize("first", [-torch.inf, -1e3, -100.0, 0.0, 1e3])
@pytest.mark.parametrize("second", [-torch.inf, -1e3, -300.0, -60.0, 87.0, 89.0, 300.0, 1e3])
@pytest.mark.parametrize("border", [5000, 9008])
def test_any_distance_of_logits_in_slices(first, second, border):
    """border: within the first slice, behind the columns that its program keeps, or between the slices."""
    vocabulary = 18_001
    logits = torch.randn(6, vocabulary) * 3
    logits[:4, :border] += first
    logits[:4, border:] += second
    target = torch.tensor([vocabulary - 1, vocabulary - 9, 0, 5, vocabulary - 2, 64])
    exact = logits.double().requires_grad_()
    want = functional.cross_entropy(exact, target, reduction="sum")
    want.backward()
    loss, grad = of_slices(logits, target, 1.0, cross_entropy.Objective())
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-6, atol=1e-3, equal_nan=True)
    torch.testing.assert_close(grad.double(), exact.grad, rtol=1e-3, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("padding", [torch.nan, torch.inf, 1e4])
def test_slices_know_their_words(fp8, dtype, padding):
    """Padding counts nothing; ids of no word, and logits that are not finite, make their rows NaN; word 3 is no target."""
    vocabulary, objective = 18_001, cross_entropy.Objective(3, 0.1, 1e-3)
    logits, target = (torch.randn(16, vocabulary) * 3).to(dtype), torch.randint(4, vocabulary, (16,))
    target[::5] = 3
    want_loss, want_grad = reference.cross_entropy(logits.float(), target, torch.tensor(0.5), *objective)
    loss, grad = of_slices(logits, target, 0.5, objective, fp8=fp8, padding=padding)
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=1e-3)
    tolerance = {"rtol": 0.13, "atol": 1e-5} if fp8 else {"rtol": 1e-2, "atol": 1e-5}
    torch.testing.assert_close(grad, want_grad.clamp(-0.5, 0.5) if fp8 else want_grad, **tolerance)
    assert (grad[::5] == 0).all()

    target[1], target[2], target[3], target[4] = -1, vocabulary, vocabulary + 9_000, 2**40
    logits[6, 3], logits[7, 17_000], logits[8, 6000] = torch.nan, torch.inf, torch.nan
    loss, broken = of_slices(logits, target, 0.5, objective, fp8=fp8, padding=padding)
    assert loss.isnan()
    bad = [1, 2, 3, 4, 6, 7, 8]
    others = [row for row in range(16) if row not in bad]
    assert broken[bad].isnan().all()
    assert torch.equal(broken[others], grad[others])


@pytest.mark.parametrize("shape", [(1, 1), (257, 333), (32_896, 1280), (4096, 3840)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_column_sums(shape, dtype):
    x = torch.randn(*shape, device="cuda").to(dtype)
    bound = x.double().abs().sum(0).max().item() * 1e-6
    found = column_sums(x)
    torch.testing.assert_close(found.double(), x.double().sum(0), rtol=0, atol=bound)
    assert torch.equal(found, column_sums(x))


@pytest.mark.parametrize("shape", [(1, 1), (2, 1056, 1280), (257, 5120), (3, 700, 33), (2, 0, 3)])
def test_partial_sums_are_added_up(shape):
    parts = torch.randn(*shape, device="cuda")
    found = add_up(parts)
    torch.testing.assert_close(found.double(), parts.double().sum(-2), rtol=1e-6, atol=1e-4)
    assert torch.equal(found, add_up(parts))


@pytest.mark.parametrize(("rows", "columns"), [(4, 1), (260, 70), (4096, 3840)])
@pytest.mark.parametrize("row", [True, False])
def test_a_cast_leaves_partial_sums(rows, columns, row):
    x, scale = torch.randn(rows, columns, device="cuda").bfloat16(), torch.tensor(2.0, device="cuda")
    partial = torch.full((row_tiles(x, True), columns), torch.nan, device="cuda")
    quantizer = Quantizer(E5M2.dtype, E5M2.max, scale, rowwise=row, columnwise=True)
    for one, other in zip(launch(x, quantizer, partial), launch(x, quantizer), strict=True):
        assert one is other is None or torch.equal(one.float(), other.float())
    bound = x.double().abs().sum(0).max().item() * 1e-6
    torch.testing.assert_close(partial.sum(0).double(), x.double().sum(0), rtol=0, atol=bound)


@pytest.mark.parametrize(("rows", "columns"), [(4096, 2048), (260, 70), (33, 70)])
def test_transposes_every_byte(rows, columns):
    q = torch.randint(256, (rows, columns), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    assert torch.equal(transpose(q).view(torch.uint8), q.view(torch.uint8).t())


def test_transposes_a_part_of_a_matrix():
    for first, columns in ((128, 260), (4, 132), (3, 132), (0, 70)):  # in words, in words, and neither
        whole = torch.randint(256, (260, 1024), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        part = whole[:, first : first + columns]
        beside = part.new_empty(columns, 520)[:, 260:]
        for found in (transpose(part), transpose(part, part.new_empty(columns, 260)), transpose(part, beside)):
            assert torch.equal(found.view(torch.uint8), part.view(torch.uint8).t())


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_scales_in_place(factor):
    x = torch.randn(3000, 3333, device="cuda").bfloat16()
    want = (x.float() * factor).bfloat16()
    assert torch.equal(cross_entropy.scale_(x, torch.tensor(factor, device="cuda")), want)
