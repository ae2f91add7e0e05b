"""An embedding's kernels on a GPU at the sizes of models, against float64, and in a CUDA graph."""

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
from octavo.kernels.embedding.backward import embedding_backward
from octavo.kernels.embedding.forward import embedding
from octavo.nn.embedding import SharedWeight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
SIZES = [(1, 1, 1), (100, 7, 33), (4097, 5000, 100), (8192, 32_000, 2048), (16_384, 128_256, 4096)]


def zipf(tokens, words):
    """Words by frequency as in texts: the first is in one of twelve tokens."""
    weights = 1 / torch.arange(1, words + 1, device="cuda", dtype=torch.float64)
    order = torch.randperm(words, device="cuda")
    return order[torch.searchsorted(weights.cumsum(0) / weights.sum(), torch.rand(tokens, device="cuda").double())]


def uniform(tokens, words):
    return torch.randint(words, (tokens,), device="cuda")


def alone(tokens, words):
    return torch.full((tokens,), words // 2, device="cuda")


def exact(d_out, ids, words):
    """Rows of float64 sums, and of sums of magnitudes, of the words that occur; these words."""
    found, index = ids.unique(return_inverse=True)
    sums = torch.zeros(2, len(found), d_out.shape[1], dtype=torch.float64, device="cuda")
    for total, d in zip(sums, (d_out.double(), d_out.double().abs()), strict=True):
        total.index_add_(0, index, d)
    return found, sums[0], sums[1]


@pytest.mark.parametrize(("tokens", "words", "columns"), SIZES)
@pytest.mark.parametrize("draw", [uniform, zipf, alone])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("added", [False, True], ids=["alone", "added"])
def test_words_have_the_sum_of_their_rows(added, dtype, draw, tokens, words, columns):
    ids, d_out = draw(tokens, words), torch.randn(tokens, columns, device="cuda").to(dtype)
    total = torch.randn(words, columns, device="cuda").to(dtype) if added else None
    before = None if total is None else total.clone()
    found = embedding_backward(d_out, ids, words, None, dtype, total)
    again = embedding_backward(d_out, ids, words, None, dtype, None if before is None else before.clone())
    assert torch.equal(found, again)
    used, wanted, magnitudes = exact(d_out, ids, words)
    if before is not None:
        assert found.data_ptr() == total.data_ptr()
        wanted, magnitudes = wanted + before[used].double(), magnitudes + before[used].double().abs()
    error = torch.finfo(dtype).eps * 0.51 * wanted.abs() + 2e-6 * magnitudes + torch.finfo(dtype).smallest_normal
    assert ((found[used].double() - wanted).abs() <= error).all()
    rest = torch.ones(words, dtype=torch.bool, device="cuda")
    rest[used] = False
    assert torch.equal(found[rest], torch.zeros_like(found[rest]) if before is None else before[rest])


@pytest.mark.parametrize("params_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_of_other_dtypes_and_strides(dtype, params_dtype):
    ids, rows = zipf(3000, 500), torch.randn(3000, 300, device="cuda").to(dtype)
    wanted = embedding_backward(rows, ids, 500, None, params_dtype)
    assert wanted.dtype == params_dtype
    for strided in (rows.t().contiguous().t(), torch.cat((rows, rows), 1)[:, :300]):
        assert torch.equal(embedding_backward(strided, ids, 500, None, params_dtype), wanted)


def test_padding_and_unknown_ids_count_nothing():
    guarded = torch.full((502, 64), 7.0, device="cuda")
    total = guarded[1:501].zero_()
    ids, d_out = uniform(9000, 500), torch.randn(9000, 64, device="cuda")
    unknown = torch.tensor([-1, -7, 500, 501, 2**31 + 3, 2**32 + 3, -(2**33)], device="cuda")
    mixed = torch.where(torch.rand(9000, device="cuda") < 0.5, unknown[uniform(9000, len(unknown))], ids)
    found = embedding_backward(d_out, mixed, 500, 3, torch.float32, total)
    trained = (mixed == ids) & (ids != 3)
    wanted = torch.zeros(500, 64, device="cuda", dtype=torch.float64).index_add_(0, ids[trained], d_out[trained].double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)
    assert (guarded[[0, 501]] == 7).all()
    rows = embedding(mixed, torch.randn(500, 64, device="cuda"), torch.bfloat16)
    assert torch.equal(rows.isnan().all(1), mixed != ids)
    assert torch.equal(rows.isnan().any(1), mixed != ids)


@pytest.mark.parametrize("params_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_are_gathered_and_rounded(dtype, params_dtype):
    ids, weight = uniform(3000, 5000).view(3, 1000), torch.randn(5000, 2080, device="cuda").to(params_dtype)
    assert torch.equal(embedding(ids, weight, dtype), functional.embedding(ids, weight).to(dtype))


def test_a_matrix_of_more_than_two_to_the_31_elements():
    words, columns = 2**19 + 8, 4096
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 16 GiB")
    ids = torch.tensor([words - 1, 0, words - 1], device="cuda")
    d_out = torch.randn(3, columns, device="cuda").bfloat16()
    grad = embedding_backward(d_out, ids, words, None, torch.bfloat16)
    assert torch.equal(grad[-1], (d_out[0].float() + d_out[2].float()).bfloat16())
    assert torch.equal(grad[0], d_out[1])
    assert torch.equal(embedding(ids, grad, torch.bfloat16)[0], grad[-1])


def test_a_cuda_graph_records_it():
    ids, d_out = zipf(2000, 300), torch.randn(2000, 128, device="cuda")
    embedding_backward(d_out, ids, 300, None, torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grad = embedding_backward(d_out, ids, 300, None, torch.float32)
    for draw in (uniform, alone, zipf):
        ids.copy_(draw(2000, 300))
        graph.replay()
        assert torch.equal(grad, embedding_backward(d_out, ids, 300, None, torch.float32))


@pytest.mark.parametrize("params_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_tied_decoders_gradient_is_autograds_sum(params_dtype, monkeypatch):
    sizes = {"vocab_size": 3000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)
    model = octavo.transform(LlamaForCausalLM(config), params_dtype=params_dtype, device="cuda")
    ids = zipf(2048, 3000).view(2, 1024)
    grads = []
    for shares in (True, True, False):
        if not shares:
            monkeypatch.setattr(SharedWeight, "of", lambda self, weight: weight)
        model.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):  # cuDNN's backward does not repeat its bits
            model(input_ids=ids, labels=ids).loss.backward()
        grads.append(model.embedding.weight.grad)
    assert torch.equal(grads[0], grads[1])
    one, other = grads[0].double(), grads[2].double()
    assert (one - other).norm() <= (1e-6 if params_dtype == torch.float32 else 2**-8) * other.norm()
