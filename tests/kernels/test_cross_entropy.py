"""The fused cross entropy in Triton's interpreter, and the chunked head, against float64."""

import pytest
import torch
from torch.nn import functional

from octavo.fp8.formats import E5M2
from octavo.kernels import cross_entropy, reference
from octavo.kernels.cross_entropy import Objective, RowShape
from octavo.nn import head

INTERPRETER = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs the kernel"
)
of_each_shape = pytest.mark.parametrize("shape", [RowShape(128, 8), RowShape(64, 32), RowShape(512, 32)], ids=str)


def case(rows, columns):
    logits = torch.randn(rows, columns) * 5
    target = torch.randint(columns, (rows,))
    target[::3] = -100
    return logits, target


@INTERPRETER
@of_each_shape
@pytest.mark.parametrize(("rows", "columns"), [(5, 17), (4, 128), (3, 129), (3, 301), (1, 8192)])
def test_kernel_equals_float64(shape, rows, columns):
    logits, target = case(rows, columns)
    exact = logits.double().requires_grad_()
    want = functional.cross_entropy(exact, target, reduction="sum", ignore_index=-100)
    (want * 0.25).backward()
    loss, grad = cross_entropy.launch(logits.clone(), target, torch.tensor(0.25), Objective(), shape=shape)
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.high_precision.double(), exact.grad, rtol=1e-4, atol=1e-6)


@INTERPRETER
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter, for -∞ - -∞ that `where` replaces
@of_each_shape
@pytest.mark.parametrize("excluded", [64, 128, 200])
def test_excluded_words_may_fill_a_block(shape, excluded):
    logits, target = torch.randn(2, 300), torch.tensor([200, 299])
    logits[:, :excluded] = -torch.inf
    want_loss, want = reference.cross_entropy(logits, target, torch.tensor(1.0))
    loss, grad = cross_entropy.launch(logits, target, torch.tensor(1.0), Objective(), shape=shape)
    torch.testing.assert_close(loss, want_loss)
    torch.testing.assert_close(grad.high_precision, want)


@INTERPRETER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@of_each_shape
@pytest.mark.parametrize(("rows", "columns"), [(5, 17), (3, 300), (2, 1024)])
def test_gradient_in_fp8(exact_casts, shape, rows, columns, dtype):
    logits, target = case(rows, columns)
    logits = logits.to(dtype)
    want_loss, want = reference.cross_entropy(logits.float(), target, torch.tensor(1.0))
    into = torch.empty(rows, columns + 7, dtype=E5M2.dtype)[:, :columns]
    loss, grad = cross_entropy.launch(logits, target, torch.tensor(0.25), Objective(), into, shape=shape)
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=1e-5)
    assert grad.high_precision is None
    torch.testing.assert_close(grad.fp8.float() * grad.scale_inv, want * 0.25, rtol=0.13, atol=2.0**-17 / E5M2.max)


@INTERPRETER
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")  # of the interpreter
@of_each_shape
@pytest.mark.parametrize("kept", [-torch.inf, -1e3, -100.0, 0.0, 1e3])
@pytest.mark.parametrize("rest", [-torch.inf, -1e3, -300.0, -60.0, 87.0, 89.0, 300.0, 1e3])
def test_any_distance_between_the_first_columns_and_the_others(shape, kept, rest):
    logits = torch.randn(6, 301) * 3
    logits[:4, : shape.block] += kept
    logits[:4, shape.block :] += rest
    target = torch.tensor([300, 290, 0, 5, 299, 64])
    exact = logits.double().requires_grad_()
    want = functional.cross_entropy(exact, target, reduction="sum")
    want.backward()
    loss, grad = cross_entropy.launch(logits, target, torch.tensor(1.0), Objective(), shape=shape)
    # A logit of 1,000 is known to 6e-5.
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-6, atol=1e-3, equal_nan=True)
    torch.testing.assert_close(grad.high_precision.double(), exact.grad, rtol=1e-3, atol=1e-6, equal_nan=True)


@INTERPRETER
@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
@of_each_shape
@pytest.mark.parametrize("column", [3, 300])
@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_what_is_not_finite_makes_its_row_nan_alone(shape, column, broken):
    logits, target = torch.randn(4, 301), torch.tensor([3, 17, 300, 8])
    clean = cross_entropy.launch(logits.clone(), target, torch.tensor(1.0), Objective(), shape=shape)[1].high_precision
    logits[1, column] = broken
    loss, grad = cross_entropy.launch(logits, target, torch.tensor(1.0), Objective(), shape=shape)
    assert loss.isnan()
    assert grad.high_precision[1].isnan().all()
    assert torch.equal(grad.high_precision[[0, 2, 3]], clean[[0, 2, 3]])


@INTERPRETER
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")  # of the interpreter
@of_each_shape
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("largest", [30.0, 500.0, 721.3, 20_000.0])
def test_a_certain_target_has_no_gradient(fused_fma, shape, dtype, largest):
    """Its exponential is the sum of all: both have the same rounding of a large logit."""
    logits = (torch.randn(5, 700) * 5).to(dtype)
    target = torch.tensor([699, 0, 699, 600, 3])
    logits[0, 699] = logits[1, 0] = logits[2, 699] = logits[3, 1] = largest
    logits[2, :699] = -torch.inf
    logits[4, :] -= largest
    logits[4, 3] = 0.0
    exact = logits.double().requires_grad_()
    functional.cross_entropy(exact, target, reduction="sum").backward()
    for row in range(len(logits)):
        part, at = logits[row : row + 1].clone(), target[row : row + 1]
        loss, grad = cross_entropy.launch(part, at, torch.tensor(1.0), Objective(), shape=shape)
        want = functional.cross_entropy(logits[row : row + 1].double(), at)
        torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=4e-6)
        tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(grad.high_precision.double(), exact.grad[row : row + 1].double(), rtol=tolerance, atol=1e-6)
        if row != 3 and largest >= 500:
            assert grad.high_precision[0, at] == 0
            assert loss.item() == pytest.approx(0, abs=1e-6)


PLACES = [0, 1, 63, 126, 127, -100, 128, 129, 192, 299, 300, -100]
"""First and last columns that are kept, of blocks and of a row of 301; and ignored targets."""


@INTERPRETER
@of_each_shape
@pytest.mark.parametrize("objective", [Objective(), Objective(label_smoothing=0.1), Objective(-100, 0.1, 1e-2)], ids=str)
@pytest.mark.parametrize("fp8", [False, True])
def test_targets_in_the_kept_part_and_behind_it(exact_casts, shape, objective, fp8):
    target = torch.tensor(PLACES)
    logits = (torch.randn(len(target), 301) * 3).bfloat16()
    logits[::2, 40] = logits[1::3, 250] = 9.0  # either part may have the largest
    want_loss, want = reference.cross_entropy(logits.float(), target, torch.tensor(0.5), *objective)
    into = torch.full((len(target), 320), 7.0).to(E5M2.dtype if fp8 else torch.bfloat16)
    inside = into[:, :301]
    if not fp8:
        inside.copy_(logits)
        logits = inside
    alone, _ = cross_entropy.launch(logits, target, None, objective, shape=shape)
    loss, grad = cross_entropy.launch(logits, target, torch.tensor(0.5), objective, inside if fp8 else None, shape=shape)
    assert torch.equal(loss, alone)
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=1e-4)
    if fp8:
        want = want.clamp(-0.5, 0.5)  # with a z-loss a probability near 1 saturates
        torch.testing.assert_close(grad.fp8.float() * grad.scale_inv, want, rtol=0.13, atol=2.0**-17 / E5M2.max)
    else:
        assert grad.high_precision is logits
        torch.testing.assert_close(logits.float(), want, rtol=1e-2, atol=1e-6)
    assert (into[:, 301:].float() == 7).all()  # no write beside a row


@INTERPRETER
@pytest.mark.parametrize(
    ("columns", "shape"),
    [(1, (4096, 8)), (16384, (4096, 8)), (16385, (8192, 16)), (98303, (8192, 16)), (98304, (16384, 32)), (100001, (16384, 32))],
)
def test_a_row_of_any_length_has_a_shape(columns, shape):
    assert cross_entropy.row_shape(columns) == shape
    logits, target = torch.randn(2, columns) * 3, torch.tensor([min(16383, columns - 1), columns - 1])
    want_loss, want = reference.cross_entropy(logits, target, torch.tensor(1.0))
    loss, grad = cross_entropy.launch(logits, target, torch.tensor(1.0), Objective())
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.high_precision, want, rtol=1e-4, atol=1e-6)


UNKNOWN = [-1, -2, -99, -101, 40, 41, 2**40, -(2**40)]


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(None, id="reference"),
        pytest.param(RowShape(16, 8), id="kernel", marks=INTERPRETER),
    ],
)
@pytest.mark.parametrize("unknown", UNKNOWN)
def test_a_target_outside_the_vocabulary_gives_nan_in_its_row_alone(shape, unknown):
    logits, target = case(7, 40)
    target[4] = unknown
    guarded = torch.full((9, 48), 7.0)  # a write beside a row would show
    inside = guarded[1:8, :40]
    inside.copy_(logits)
    if shape is not None:
        loss, gradient = cross_entropy.launch(inside, target, torch.tensor(1.0), Objective(), shape=shape)
        grad = gradient.high_precision
        assert (torch.cat([guarded[0], guarded[8], guarded[:, 40:].flatten()]) == 7).all()
    else:
        loss, grad = reference.cross_entropy(logits, target, torch.tensor(1.0))
    assert loss.isnan()
    assert grad[4].isnan().all()
    target[4] = -100
    _, want = reference.cross_entropy(logits, target, torch.tensor(1.0))
    others = [0, 1, 2, 3, 5, 6]
    torch.testing.assert_close(grad[others], want[others], rtol=1e-4, atol=1e-6)


def test_reference_equals_float64():
    logits, target = case(7, 33)
    exact = logits.double().requires_grad_()
    want = functional.cross_entropy(exact, target, reduction="sum", ignore_index=-100)
    want.backward()
    loss, grad = reference.cross_entropy(logits, target, torch.tensor(1.0))
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_rows", [1, 4, 1000])
def test_head_in_chunks(monkeypatch, chunk_rows):
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk_rows * 19 * 4)
    hidden, weight = torch.randn(10, 6, requires_grad=True), torch.randn(19, 6, requires_grad=True)
    target = torch.randint(19, (10,))
    target[2] = -100
    loss = head.linear_cross_entropy(hidden, weight, target, torch.tensor(9.0))
    (loss * 3).backward()
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    want = functional.cross_entropy(h @ w.t(), target, reduction="sum", ignore_index=-100) / 9
    (want * 3).backward()
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6, check_dtype=False)
    torch.testing.assert_close(hidden.grad.double(), h.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad.double(), w.grad, rtol=1e-5, atol=1e-6)


def test_head_without_targets_or_gradients():
    hidden, weight = torch.randn(4, 6), torch.randn(19, 6)
    with torch.no_grad():
        loss = head.linear_cross_entropy(hidden, weight, torch.full((4,), -100), torch.tensor(1.0))
    assert loss.item() == 0.0


@INTERPRETER
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_scales_in_place(factor):
    x = torch.randn(3, 333)
    want = x * factor
    for scale in (cross_entropy.launch_scale, cross_entropy.scale_):
        own = x.clone()
        assert scale(own, torch.tensor(factor)) is own
        torch.testing.assert_close(own, want)


def test_a_head_that_is_walked_twice_gives_the_same_twice():
    hidden, weight = torch.randn(4, 6, requires_grad=True), torch.randn(19, 6, requires_grad=True)
    loss = head.linear_cross_entropy(hidden, weight, torch.randint(19, (4,)), torch.tensor(4.0)) * 3
    first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=again) for again in (True, False))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
