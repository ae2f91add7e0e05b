"""Attention by pieces on a GPU, by cuDNN and by FlashAttention-4, windows included, against the reference in float32."""

import itertools

import pytest
import torch

from octavo.kernels.attention import flash, library, reference
from octavo.kernels.attention.join import add_, add_up, join_
from octavo.kernels.attention.pattern import Pattern, Span
from octavo.kernels.attention.pieces import SMALLEST_WINDOW, Attended, Gradients, differentiate
from octavo.kernels.attention.pieces import attend as attend_to
from octavo.nn.attend import attend, backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
FLASH = pytest.mark.skipif(flash.missing() is not None, reason=str(flash.missing()))


@pytest.fixture(params=["cuDNN", pytest.param("FlashAttention-4", marks=FLASH)])
def kernels(request):
    """The module of kernels under test, which `attend` and the pieces take."""
    before = flash.enabled()
    flash.enable(request.param != "cuDNN")
    yield library if request.param == "cuDNN" else flash
    flash.enable(before)


def by_flash(test):
    """A test of FlashAttention-4 alone."""
    return FLASH(pytest.mark.parametrize("kernels", ["FlashAttention-4"], indirect=True)(test))


def draw(batch, queries, keys, heads, groups, dim, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = ((batch, queries, heads), (batch, keys, groups), (batch, keys, groups), (batch, queries, heads))
    return [torch.randn(*size, dim, device="cuda", generator=generator).bfloat16() for size in sizes]


def close(found, wanted, tolerance=1e-2):
    assert (found.float() - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("dim", library._HEADS)
@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(512, 512, True), (384, 1024, False), (1000, 1000, True), (128, 77, False)]
)
def test_output_and_gradients_are_the_references(dim, heads, groups, queries, keys, causal, kernels):
    q, k, v, d_out = draw(2, queries, keys, heads, groups, dim)
    assert kernels.takes(q, k, causal=causal, window=None)
    how = {"causal": causal, "scale": dim**-0.5}
    out, lse = kernels.forward(q, k, v, **how)
    wanted, wanted_lse = reference.forward(q, k, v, **how)
    close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
    for found, exact in zip(
        kernels.backward(d_out, q, k, v, out, lse, **how),
        reference.backward(d_out, q, k, v, wanted, wanted_lse, **how),
        strict=True,
    ):
        close(found, exact, 2e-2)


@pytest.mark.parametrize("dim", library._HEADS)
def test_a_part_of_the_keys_has_its_part_of_the_gradients(dim, kernels):
    q, k, v, d_out = draw(1, 512, 1024, 8, 2, dim)
    spans = [Span(0, 1, 0, 512, 512, 1024, True), Span(0, 1, 0, 512, 0, 512, False)]
    attended = Attended(q, scale=dim**-0.5)
    attended.add(k, v, spans)
    out, lse = attended.result()
    how = {"causal": True, "scale": dim**-0.5}
    wanted, wanted_lse = reference.forward(q, k, v, **how)
    close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
    grads = Gradients(d_out, q, out, lse, scale=dim**-0.5)
    dk, dv = (torch.zeros(k.shape, device="cuda") for _ in range(2))
    grads.add(k, v, spans, dk, dv)
    for found, exact in zip((grads.dq, dk, dv), reference.backward(d_out, q, k, v, wanted, wanted_lse, **how), strict=True):
        close(found, exact, 2e-2)


@pytest.mark.parametrize("dim", library._HEADS)
@pytest.mark.parametrize(("queries", "keys", "causal"), [(256, 256, True), (256, 512, False), (256, 1024, True)])
def test_results_are_written_to_parts_of_larger_tensors(dim, queries, keys, causal, kernels):
    if causal and queries != keys and kernels is library:
        pytest.skip("cuDNN's causal attention has as many keys as queries")
    q, k, v, d_out = draw(2, 2 * queries, 2 * keys, 8, 2, dim)
    rows, some = slice(queries, None), slice(keys, None)
    how = {"causal": causal, "scale": dim**-0.5}
    wanted, wanted_lse = reference.forward(q[:, rows], k[:, some], v[:, some], **how)
    out, lse = torch.full_like(q, torch.nan), torch.full((2, 8, 2 * queries), torch.nan, device="cuda")
    given = q[:, rows], k[:, some], v[:, some]
    attend_to(*given, (out[:, rows], lse[..., rows]), **how)
    close(out[:, rows], wanted)
    torch.testing.assert_close(lse[..., rows], wanted_lse, rtol=1e-3, atol=1e-3)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    into = grads[0][:, rows], grads[1][:, some], grads[2][:, some]
    differentiate(d_out[:, rows], *given, out[:, rows], lse[..., rows], into, **how)
    exact = reference.backward(d_out[:, rows], *given, wanted, wanted_lse, **how)
    for found, gradient in zip(into, exact, strict=True):
        close(found, gradient, 2e-2)
    for whole, part in zip((out, *grads), (queries, queries, keys, keys), strict=True):
        assert whole[:, :part].isnan().all()


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_parts_are_joined_and_added_up(dim):
    """Octavo's own kernels, on rows of larger tensors."""
    q, k, v, _ = draw(2, 600, 500, 8, 8, dim)
    how = {"causal": False, "scale": dim**-0.5}
    wanted, wanted_lse = reference.forward(q, k, v, **how)
    out, lse = torch.zeros(2, 1200, 8, dim, device="cuda"), torch.zeros(2, 8, 1200, device="cuda")
    out[:, 600:], lse[..., 600:] = reference.forward(q, k[:, :99], v[:, :99], **how)
    join_(out[:, 600:], lse[..., 600:], *reference.forward(q, k[:, 99:], v[:, 99:], **how))
    torch.testing.assert_close(out[:, 600:], wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse[..., 600:], wanted_lse, rtol=1e-5, atol=1e-5)
    terms = torch.randn(9, 2, 3, 700, 2, dim, device="cuda").bfloat16()
    for count in (1, 2, 4, 9):
        summed = torch.full((2, 3, 900, 2, dim), torch.nan, device="cuda").bfloat16()
        add_up(summed[:, :, 200:], list(terms[:count]))
        exact = terms[:count].double().sum(0)
        assert ((summed[:, :, 200:] - exact).norm() / exact.norm()) < 3e-3
        assert summed[:, :, :200].isnan().all()
    many = torch.ones(2, 40_000, 2, 8, device="cuda")  # more rows than a grid's second dimension has programs
    add_(many, many.clone())
    assert bool((many == 2).all())
    other = torch.randn(2, 2, dim, 700, device="cuda").permute(0, 3, 1, 2)  # as cuDNN may lay gradients
    sums = torch.zeros(2, 900, 2, dim, device="cuda")
    add_(sums[:, 200:], other)
    assert torch.equal(sums[:, 200:], other)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("documents", [(0, 1, 2, 4, 7), (0, 5, 6, 23)])
def test_spans_of_few_tokens(documents, dim, kernels):
    ends = (*documents[1:], 90)
    spans = [Span(0, 1, first, end, first, end, True) for first, end in zip(documents, ends, strict=True)]
    spans += [Span(0, 1, later, later + 1, 0, first, False) for first, later in itertools.pairwise(documents[1:])]
    q, k, v, d_out = draw(1, 90, 90, 4, 2, dim)
    attended = Attended(q, scale=dim**-0.5)
    attended.add(k, v, spans)
    out, lse = attended.result()
    seen = torch.zeros(90, 90, dtype=torch.bool, device="cuda")
    for span in spans:
        block = torch.ones(span.q1 - span.q0, span.k1 - span.k0, dtype=torch.bool, device="cuda")
        seen[span.q0 : span.q1, span.k0 : span.k1] |= block.tril() if span.causal else block
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    wide_q, *wide = leaves[0], *(x.repeat_interleave(2, 2) for x in leaves[1:])
    logits = torch.einsum("bqhd,bkhd->bhqk", wide_q, wide[0]) * dim**-0.5
    logits = logits.masked_fill(~seen, -torch.inf)
    wanted = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), wide[1])
    wanted.backward(d_out.float())
    close(out, wanted.detach())
    torch.testing.assert_close(lse, logits.logsumexp(-1).detach(), rtol=1e-3, atol=1e-3)
    grads = Gradients(d_out, q, out, lse, scale=dim**-0.5)
    dk, dv = (torch.zeros(k.shape, device="cuda") for _ in range(2))
    grads.add(k, v, spans, dk, dv)
    for found, leaf in zip((grads.dq, dk, dv), leaves, strict=True):
        close(found, leaf.grad, 2e-2)


@pytest.mark.parametrize("window", [256, 300, 1000, 64])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_window(window, dim, kernels):
    q, k, v, d_out = draw(2, 1536, 1536, 8, 2, dim)
    pattern = Pattern(1536, window=window)
    names = {library: "plain" if window < SMALLEST_WINDOW else "cuDNN", flash: "FlashAttention-4"}
    assert backend(q, k, pattern).startswith(names[kernels])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, pattern, scale=None)
    out.backward(d_out)
    how = {"causal": True, "scale": dim**-0.5, "window": window}
    wanted, lse = reference.forward(q, k, v, **how)
    close(out.detach(), wanted)
    for leaf, exact in zip(leaves, reference.backward(d_out, q, k, v, wanted, lse, **how), strict=True):
        close(leaf.grad, exact, 2e-2)


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("dim", library._HEADS)
def test_documents_are_the_references_document_by_document(dim, window, kernels):
    q, k, v, d_out = draw(2, 1024, 1024, 8, 2, dim)
    pattern = Pattern(1024, documents=((0, 100, 700), (0, 1, 2, 513))).with_window(window)
    assert kernels is library or flash.packing(q, k, pattern.spans(2), window) is not None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, pattern, scale=None)
    out.backward(d_out)
    for span in pattern.spans(2):
        b, rows = slice(span.b0, span.b1), slice(span.q0, span.q1)
        own, how = [x[b, rows] for x in (q, k, v)], {"causal": True, "scale": dim**-0.5, "window": window}
        wanted, lse = reference.forward(*own, **how)
        close(out[b, rows].detach(), wanted)
        grads = reference.backward(d_out[b, rows], *own, wanted, lse, **how)
        for leaf, exact in zip(leaves, grads, strict=True):
            # A document of one token has gradients of queries and keys that are 0 but for rounding.
            assert (leaf.grad[b, rows].float() - exact).norm() <= 2e-2 * exact.norm() + 1e-2


@by_flash
@pytest.mark.parametrize("dim", flash._HEADS)
@pytest.mark.parametrize(("queries", "keys", "window"), [(384, 1024, None), (384, 1024, 500), (384, 1024, 1), (1, 700, None)])
def test_fewer_queries_than_keys(dim, queries, keys, window, kernels):
    q, k, v, d_out = draw(2, queries, keys, 8, 2, dim)
    how = {"causal": True, "scale": dim**-0.5, "window": window}
    assert flash.takes(q, k, causal=True, window=window)
    out, lse = flash.forward(q, k, v, **how)
    wanted, wanted_lse = reference.forward(q, k, v, **how)
    close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
    grads = reference.backward(d_out, q, k, v, wanted, wanted_lse, **how)
    for number, (found, exact) in enumerate(zip(flash.backward(d_out, q, k, v, out, lse, **how), grads, strict=True)):
        # Of one key the softmax is 1, and the gradients of queries and keys are 0 but for rounding.
        slack = 1.0 if window == 1 and number < 2 else 0.0
        assert (found.float() - exact).norm() <= 2e-2 * exact.norm() + slack


def repeats(function):
    """True if ten calls give the same bits."""
    first = function()
    return all(all(map(torch.equal, first, function())) for _ in range(9))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("pattern", [Pattern(2048), Pattern(2048, window=700), Pattern(2048, documents=((0, 500, 900), (0,)))])
def test_bits_repeat_where_they_have_to(dim, pattern, kernels, monkeypatch):
    """By FlashAttention-4, and without it by plain PyTorch."""
    q, k, v, d_out = draw(2, 2048, 2048, 16, 4, dim)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def both():
        out = attend(*leaves, pattern, scale=None)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS at a process's first product alone
    torch.use_deterministic_algorithms(True)
    try:
        assert repeats(both)
    finally:
        torch.use_deterministic_algorithms(False)


@by_flash
def test_a_recorded_graph_replays_it(kernels):
    q, k, v, d_out = draw(2, 512, 512, 8, 2, 128)
    pattern = Pattern(512)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def both():
        out = attend(*leaves, pattern, scale=None)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both()
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    for found, wanted in zip(results, both(), strict=True):
        close(found, wanted.float(), 1e-2)
