"""Joined results of attention and sums of gradients: against float64, by the kernels in Triton's interpreter too."""

import pytest
import torch

from octavo.kernels.attention import join, reference

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # of numpy, in the interpreter
    pytest.mark.usefixtures("exact_casts"),
]
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs the kernel"
)
WAYS = [join.join_, pytest.param(join.launch_join, marks=interpreted)]
SUMS = [join.add_up, pytest.param(join.launch_add_up, marks=interpreted)]
HOW = {"causal": False, "scale": 0.3}


def draw(batch, queries, keys, heads, dim):
    sizes = ((queries, heads), (keys, heads), (keys, heads))
    return [torch.randn(batch, tokens, count, dim) for tokens, count in sizes]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(2, 70, 9, 3, 8), (1, 1, 2, 1, 96), (3, 64, 5, 2, 40)])
def test_two_parts_of_the_keys_are_the_whole(way, shape):
    q, k, v = draw(*shape)
    wanted, wanted_lse = reference.forward(q.double(), k.double(), v.double(), **HOW)
    some = 1 + shape[2] // 3
    first, second = (reference.forward(q, k[:, part], v[:, part], **HOW) for part in (slice(some), slice(some, None)))
    # Rows and heads of larger tensors, as of a rank's chunks.
    out = torch.zeros(shape[0], 2 * shape[1], shape[3], shape[4])
    lse = torch.zeros(shape[0], shape[3], 2 * shape[1])
    rows = slice(shape[1], None)
    out[:, rows], lse[..., rows] = first
    way(out[:, rows], lse[..., rows], *second)
    torch.testing.assert_close(out[:, rows].double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse[..., rows].double(), wanted_lse, rtol=1e-5, atol=1e-5)
    assert not out[:, : shape[1]].any()
    assert not lse[..., : shape[1]].any()


@pytest.mark.parametrize("way", WAYS)
def test_queries_without_a_key(way):
    """In neither part: 0 and −∞ stay; in one of them: the other's result."""
    lse = torch.tensor([[[-torch.inf, 1.0, -torch.inf, 2.0]]])
    other_lse = torch.tensor([[[-torch.inf, -torch.inf, 3.0, 2.0]]])
    out, other = torch.zeros(1, 4, 1, 2), torch.zeros(1, 4, 1, 2)
    out[:, 1], out[:, 3], other[:, 2], other[:, 3] = 5, 1, 7, 3
    way(out, lse, other, other_lse)
    assert torch.equal(lse[0, 0, :3], torch.tensor([-torch.inf, 1.0, 3.0]))
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([0.0, 5.0, 7.0, 2.0]))
    assert lse[0, 0, 3] == pytest.approx(2 + 0.6931472)


@pytest.mark.parametrize("way", SUMS)
@pytest.mark.parametrize("terms", [1, 2, 4, 5, 9])
def test_terms_are_added_up_and_rounded_once(way, terms):
    whole = torch.randn(terms, 2, 3, 10, 2, 8).bfloat16()
    given = [term[:, :, 3:7] for term in whole]  # a chunk of each
    out = torch.full((2, 3, 8, 2, 8), torch.nan).bfloat16()
    way(out[:, :, 4:], given)
    wanted = whole[:, :, :, 3:7].float().sum(0)
    torch.testing.assert_close(out[:, :, 4:], wanted.bfloat16(), rtol=2**-8 if terms > 2 else 0, atol=1e-6)
    assert out[:, :, :4].isnan().all()


@pytest.mark.parametrize("way", SUMS)
def test_nothing_to_add_up(way):
    """An early chunk before which there is none: its neighbours stay."""
    whole = torch.ones(2, 3, 5, 4)
    way(whole[:, :, 2:2], [torch.empty(2, 3, 0, 4)] * 2)
    assert torch.equal(whole, torch.ones(2, 3, 5, 4))


def test_numbers_in_another_order_are_told():
    x = torch.randn(2, 3, 4, 5)
    assert join._in_order(x)
    assert join._in_order(x[:, 1:])
    assert not join._in_order(x.transpose(1, 2).contiguous().transpose(1, 2).transpose(2, 3))
    assert not join._in_order(x[..., ::2])
