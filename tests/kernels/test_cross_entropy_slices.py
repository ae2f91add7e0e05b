"""The cross entropy of slices of a vocabulary against that of the whole, in float64: kernels, and what a CPU runs."""

import pytest
import torch
from torch.nn import functional

from octavo.fp8.formats import E5M2
from octavo.kernels import cross_entropy, reference
from octavo.kernels import cross_entropy_slices as slices
from octavo.kernels.cross_entropy import Objective, RowShape
from octavo.kernels.cross_entropy_slices import Slice

WIDTH = 160
"""Columns of each slice, with padding."""
VOCABULARY = 301
OBJECTIVES = [Objective(), Objective(label_smoothing=0.1), Objective(-100, 0.1, 1e-2), Objective(z_loss=1e-2)]
IN_VOCABULARY = 3
SHAPES = [RowShape(64, 8), RowShape(128, 32), RowShape(256, 32)]
ways = pytest.mark.parametrize("shape", [None, *SHAPES], ids=str)
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs the kernels"
    ),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"),  # of the interpreter
]


def words_of(vocabulary, count=3):
    """The last slice has fewer words, or none."""
    firsts = [min(number * WIDTH, vocabulary) for number in range(count)]
    return [Slice(first, min(WIDTH, vocabulary - first), vocabulary) for first in firsts]


def parts(logits, words, padding):
    """Each slice's columns, and padding."""
    found = []
    for one in words:
        part = torch.full((len(logits), WIDTH), padding, dtype=logits.dtype)
        part[:, : one.number] = logits[:, one.first : one.first + one.number]
        found.append(part)
    return found


def joined(logits, target, scale, objective, *, shape=None, fp8=None, count=3, padding=77.0):
    """(loss, gradient of all words) by slices; shape: of the kernels, None: what a CPU runs."""
    words = words_of(logits.shape[1], count)
    given = parts(logits, words, padding)
    if shape is None:
        found = [slices.statistics(part, target, one, objective) for part, one in zip(given, words, strict=True)]
    else:
        how = {"reread": scale is not None, "shape": shape}
        found = [slices.launch_statistics(part, target, one, objective, **how) for part, one in zip(given, words, strict=True)]
    of_slices, losses, gradients = torch.stack(found), [], []
    for part, one in zip(given, words, strict=True):
        room = None if fp8 is None else torch.full((len(part), WIDTH + 7), 7.0).to(fp8)[:, :WIDTH]
        what = part, target, of_slices, scale, objective, one, room
        loss, grad = slices.cross_entropy_of_statistics_(*what) if shape is None else slices.launch_gradient(*what, shape=shape)
        losses.append(loss)
        if grad is not None:
            high = grad.high_precision if fp8 is None else grad.fp8.float() * grad.scale_inv
            assert (high[:, one.number :] == 0).all()
            gradients.append(high[:, : one.number])
    for loss in losses:
        assert torch.equal(loss.nan_to_num(-1.0), losses[0].nan_to_num(-1.0))
    return losses[0], torch.cat(gradients, 1) if gradients else None


def exact(logits, target, scale, objective):
    """In float64; `reference.cross_entropy` computes in float32."""
    x = logits.double().requires_grad_()
    ignored, smoothing = objective.ignore_index, objective.label_smoothing
    loss = functional.cross_entropy(x, target, reduction="sum", ignore_index=ignored, label_smoothing=smoothing)
    real = target != objective.ignore_index
    loss = loss + objective.z_loss * (x.logsumexp(-1).square() * real).sum()
    (loss * scale).backward()
    return loss.detach(), x.grad


def drawn(rows=11, vocabulary=VOCABULARY, dtype=torch.float32):
    logits = (torch.randn(rows, vocabulary) * 5).to(dtype)
    target = torch.randint(vocabulary, (rows,))
    target[::3] = -100
    target[1], target[2], target[4] = 0, vocabulary - 1, min(WIDTH, vocabulary - 1)
    return logits, target


@ways
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 3 * WIDTH, WIDTH + 1])
def test_slices_equal_the_whole(exact_casts, shape, objective, dtype, vocabulary):
    logits, target = drawn(vocabulary=vocabulary, dtype=dtype)
    want_loss, want = exact(logits, target, 0.25, objective)
    loss, grad = joined(logits, target, torch.tensor(0.25), objective, shape=shape)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-5)
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 4e-3, "atol": 1e-6}
    torch.testing.assert_close(grad.double(), want, **tolerance)
    alone, nothing = joined(logits, target, None, objective, shape=shape)
    assert nothing is None
    assert torch.equal(alone, loss)


@ways
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_gradients_in_fp8(exact_casts, shape, objective):
    logits, target = drawn()
    want_loss, want = exact(logits, target, 0.25, objective)
    loss, grad = joined(logits, target, torch.tensor(0.25), objective, shape=shape, fp8=E5M2.dtype)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-5)
    want = want.clamp(-0.25, 0.25)  # with a z-loss a probability near 1 saturates
    torch.testing.assert_close(grad.double(), want, rtol=0.13, atol=2.0**-17 / E5M2.max)


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8", [None, E5M2.dtype], ids=str)
def test_a_word_of_the_vocabulary_may_be_no_target(exact_casts, shape, dtype, fp8):
    objective = Objective(IN_VOCABULARY, 0.1, 1e-2)
    logits, target = drawn(dtype=dtype)
    target[target == -100] = IN_VOCABULARY
    want_loss, want = exact(logits, target, 0.25, objective)
    loss, grad = joined(logits, target, torch.tensor(0.25), objective, shape=shape, fp8=fp8)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-5)
    assert (grad[target == IN_VOCABULARY] == 0).all()
    if fp8 is not None:
        torch.testing.assert_close(grad.double(), want.clamp(-0.25, 0.25), rtol=0.13, atol=2.0**-17 / E5M2.max)
    else:
        torch.testing.assert_close(grad.double(), want, rtol=1e-4 if dtype == torch.float32 else 4e-3, atol=1e-6)


@ways
@pytest.mark.parametrize("fp8", [None, E5M2.dtype], ids=str)
@pytest.mark.parametrize("padding", [torch.nan, torch.inf, 1e4])
def test_padding_may_hold_anything(exact_casts, shape, fp8, padding):
    logits, target = drawn()
    how = {"shape": shape, "fp8": fp8}
    want_loss, want = joined(logits, target, torch.tensor(0.25), Objective(label_smoothing=0.1), **how)
    loss, grad = joined(logits, target, torch.tensor(0.25), Objective(label_smoothing=0.1), **how, padding=padding)
    assert torch.equal(loss, want_loss)
    assert torch.equal(grad, want)


@ways
@pytest.mark.parametrize("first", [-torch.inf, -1e3, -100.0, 0.0, 1e3])
@pytest.mark.parametrize("second", [-torch.inf, -1e3, -300.0, -60.0, 87.0, 89.0, 300.0, 1e3])
def test_any_distance_between_slices(shape, first, second):
    logits = torch.randn(6, VOCABULARY) * 3
    logits[:4, :WIDTH] += first
    logits[:4, WIDTH:] += second
    target = torch.tensor([300, 290, 0, 5, 299, 64])
    want_loss, want = exact(logits, target, 1.0, Objective())
    loss, grad = joined(logits, target, torch.tensor(1.0), Objective(), shape=shape)
    torch.testing.assert_close(loss.double(), want_loss, rtol=1e-6, atol=1e-3, equal_nan=True)
    torch.testing.assert_close(grad.double(), want, rtol=1e-3, atol=1e-6, equal_nan=True)


@ways
@pytest.mark.parametrize("largest", [500.0, 721.3, 20_000.0])
@pytest.mark.parametrize("at", [3, WIDTH + 9])
def test_a_certain_target_has_no_gradient(fused_fma, shape, largest, at):
    logits, target = torch.randn(1, VOCABULARY) * 5, torch.tensor([at])
    logits[0, at] = largest
    loss, grad = joined(logits, target, torch.tensor(1.0), Objective(), shape=shape)
    # On a CPU the sum that slices exchange is rounded to float32.
    assert abs(grad[0, at]) <= (0 if shape else 2.0**-24)
    assert loss.item() == pytest.approx(0, abs=1e-6)


@ways
@pytest.mark.parametrize("unknown", [-1, VOCABULARY, VOCABULARY + WIDTH, 2**40])
@pytest.mark.parametrize("fp8", [None, E5M2.dtype], ids=str)
def test_a_target_outside_the_vocabulary_makes_its_row_nan_alone(shape, unknown, fp8):
    logits, target = drawn()
    target[5] = unknown
    loss, grad = joined(logits, target, torch.tensor(1.0), Objective(), shape=shape, fp8=fp8)
    assert loss.isnan()
    rows = grad.isnan().all(1)
    assert rows.tolist() == [row == 5 for row in range(len(rows))]
    assert not grad[[row for row in range(len(rows)) if row != 5]].isnan().any()


@ways
@pytest.mark.parametrize("column", [3, WIDTH + 80])
@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_what_is_not_finite_makes_its_row_nan_in_every_slice(shape, column, broken):
    logits, target = drawn()
    clean = joined(logits, target, torch.tensor(1.0), Objective(), shape=shape)[1]
    logits[1, column] = broken
    loss, grad = joined(logits, target, torch.tensor(1.0), Objective(), shape=shape)
    assert loss.isnan()
    assert grad[1].isnan().all()
    others = [row for row in range(len(grad)) if row != 1]
    assert torch.equal(grad[others], clean[others])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_slice_has_the_bits_of_the_whole_vocabularys_kernel(shape):
    logits, target = (torch.randn(7, WIDTH) * 5).bfloat16(), torch.randint(WIDTH, (7,))
    loss, grad = joined(logits, target, torch.tensor(0.25), Objective(), shape=shape, count=1)
    want_loss, want = cross_entropy.launch(logits.clone(), target, torch.tensor(0.25), Objective(), shape=shape)
    assert torch.equal(loss, want_loss)
    assert torch.equal(grad, want.high_precision)


@ways
def test_no_rows(shape):
    empty = torch.empty(0, VOCABULARY), torch.empty(0, dtype=torch.int64)
    loss, grad = joined(*empty, torch.tensor(1.0), Objective(), shape=shape)
    assert loss == 0
    assert grad.shape == (0, VOCABULARY)


def test_the_reference_is_the_same_function():
    logits, target = drawn()
    for objective in OBJECTIVES:
        loss, grad = reference.cross_entropy(logits, target, torch.tensor(0.25), *objective)
        want_loss, want = exact(logits, target, 0.25, objective)
        torch.testing.assert_close(loss.double(), want_loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad.double(), want, rtol=1e-4, atol=1e-6)
