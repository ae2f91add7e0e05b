"""An embedding's rows and their gradient, in Triton's interpreter and by the reference, against PyTorch's in float64."""

import pytest
import torch
from torch.nn import functional

from octavo.kernels.embedding import backward, forward
from octavo.kernels.embedding.backward import embedding_backward
from octavo.kernels.embedding.forward import embedding

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs the kernel"
)
both = pytest.mark.parametrize(
    "run", [pytest.param(backward.launch, marks=interpreted), embedding_backward], ids=["kernel", "reference"]
)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def uniform(tokens, words):
    return torch.randint(words, (tokens,))


def frequent(tokens, words):
    """One word in nine of ten tokens: it fills chunks, and begins and ends inside of some."""
    return torch.where(torch.rand(tokens) < 0.9, words // 2, uniform(tokens, words))


def alone(tokens, words):
    return torch.full((tokens,), words - 1)


def exact(d_out, ids, words, padding=None):
    """The gradient of `torch.nn.functional.embedding` in float64, and for each word the sum of magnitudes."""
    found = []
    for d in (d_out.double(), d_out.double().abs()):
        weight = torch.zeros(words, d_out.shape[1], dtype=torch.float64, requires_grad=True)
        functional.embedding(ids, weight, padding_idx=padding).backward(d)
        found.append(weight.grad)
    return found


def assert_rounded_once(found, wanted, magnitudes):
    """Within half a unit of the dtype's last place, and of float32's of each addend."""
    error = torch.finfo(found.dtype).eps * 0.51 * wanted.abs() + 1e-6 * magnitudes + torch.finfo(found.dtype).smallest_normal
    assert ((found.double() - wanted).abs() <= error).all()


@both
@pytest.mark.parametrize(("tokens", "words", "columns"), [(1, 1, 1), (33, 5, 100), (64, 1000, 7), (200, 3, 64), (65, 9, 2060)])
@pytest.mark.parametrize("draw", [uniform, frequent, alone])
@pytest.mark.parametrize("padding", [None, 0])
def test_words_have_the_sum_of_their_rows(run, draw, tokens, words, columns, padding):
    ids, d_out = draw(tokens, words), torch.randn(tokens, columns)
    kept = ids.clone(), d_out.clone()
    found = run(d_out, ids, words, padding, torch.float32)
    assert_rounded_once(found, *exact(d_out, ids, words, padding))
    assert torch.equal(found, run(d_out, ids, words, padding, torch.float32))
    assert torch.equal(ids, kept[0])
    assert torch.equal(d_out, kept[1])


@both
def test_a_word_of_thousands_of_tokens(run):
    tokens, words = 3000, 50
    ids, d_out = frequent(tokens, words), torch.randn(tokens, 12)
    assert ids.bincount().max() > 2500
    assert_rounded_once(run(d_out, ids, words, None, torch.float32), *exact(d_out, ids, words))


@both
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("d_dtype", FLOATS, ids=str)
def test_a_sum_is_rounded_once(exact_casts, run, dtype, d_dtype):
    ids, d_out = frequent(150, 40), torch.randn(150, 20).to(d_dtype)
    found = run(d_out, ids, 40, None, dtype)
    assert found.dtype == dtype
    assert_rounded_once(found, *exact(d_out, ids, 40))


@both
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("padding", [None, 3])
def test_it_is_added_to_another_gradient_in_place(exact_casts, run, dtype, padding):
    ids, d_out = frequent(150, 200), torch.randn(150, 20)
    total = torch.randn(200, 20).to(dtype)
    before = total.clone()
    wanted, magnitudes = exact(d_out, ids, 200, padding)
    found = run(d_out, ids, 200, padding, dtype, total)
    assert found.data_ptr() == total.data_ptr()
    assert_rounded_once(found, wanted + before.double(), magnitudes + before.double().abs())
    untouched = (wanted == 0).all(1)
    assert untouched.any()
    assert torch.equal(found[untouched], before[untouched])


@both
def test_another_gradient_of_any_strides(run):
    ids, d_out, total = uniform(40, 30), torch.randn(40, 20), torch.randn(20, 30).t()
    wanted = run(d_out, ids, 30, None, torch.float32, total.contiguous())
    assert torch.equal(run(d_out, ids, 30, None, torch.float32, total), wanted)


@both
@pytest.mark.parametrize("unknown", [-1, -7, 40, 41, 2**31 + 3, 2**32 + 3, -(2**33)])
def test_an_id_outside_the_vocabulary_counts_nothing(run, unknown):
    guarded = torch.full((42, 16), 7.0)
    ids, d_out = uniform(70, 40), torch.randn(70, 16)
    unknown_at = torch.rand(70) < 0.6  # more than a chunk
    total = guarded[1:41].zero_()
    found = run(d_out, torch.where(unknown_at, unknown, ids), 40, None, torch.float32, total)
    assert_rounded_once(found, *exact(d_out[~unknown_at], ids[~unknown_at], 40))
    assert (guarded[[0, 41]] == 7).all()


@both
@pytest.mark.parametrize(
    "strided", [lambda x: x.t().contiguous().t(), lambda x: torch.cat((x, x), 1)[:, : x.shape[1]], lambda x: x[:1].expand_as(x)]
)
def test_rows_of_any_strides(run, strided):
    ids = frequent(100, 20)
    d_out = strided(torch.randn(100, 30))
    assert torch.equal(run(d_out, ids, 20, None, torch.float32), run(d_out.contiguous(), ids, 20, None, torch.float32))


@both
def test_without_tokens_it_is_zero(run):
    nothing, ids = torch.empty(0, 8), torch.empty(0, dtype=torch.int64)
    assert torch.equal(run(nothing, ids, 5, None, torch.bfloat16), torch.zeros(5, 8, dtype=torch.bfloat16))
    total = torch.randn(5, 8)
    assert torch.equal(run(nothing, ids, 5, None, torch.float32, total.clone()), total)


@both
def test_not_a_number_stays_in_its_word(run):
    ids, d_out = frequent(100, 20), torch.randn(100, 6)
    d_out[7] = torch.nan
    found = run(d_out, ids, 20, None, torch.float32)
    assert found.isnan().any(1).nonzero().flatten().tolist() == [ids[7].item()]


@interpreted
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("params_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [1, 100, 2060])
def test_rows_are_gathered_and_rounded(exact_casts, columns, params_dtype, dtype):
    ids, weight = torch.randint(9, (2, 5)), torch.randn(9, columns).to(params_dtype)
    wanted = functional.embedding(ids, weight).to(dtype)
    assert torch.equal(forward.launch(ids, weight, dtype), wanted)
    assert torch.equal(forward.launch(ids, torch.cat((weight, weight), 1)[:, :columns], dtype), wanted)
    assert torch.equal(embedding(ids, weight, dtype), wanted)


@interpreted
@pytest.mark.parametrize("unknown", [-1, 9, 2**32 + 1, -(2**33)])
def test_the_row_of_an_unknown_id_is_no_number(unknown):
    found = forward.launch(torch.tensor([3, unknown, 8]), torch.randn(9, 20), torch.float32)
    assert found.isnan().all(1).tolist() == [False, True, False]
    assert found[::2].isfinite().all()


def test_an_unknown_id_on_a_cpu_is_an_error():
    with pytest.raises(IndexError):
        embedding(torch.tensor([9]), torch.randn(9, 20), torch.float32)
