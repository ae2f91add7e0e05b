"""Transformer Engine's rotary embedding outside of a layer, beside complex numbers in float64."""

import pytest
import te_attention_by_hand as by_hand
import torch

from octavo.errors import InputError

HEADS, DIM = 3, 16
LENGTHS = (4, 0, 8, 12)


def ends(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]).int()


def rotate(t, places, *, interleaved, columns):
    """t [T, H, D], and the position of each of its tokens."""
    return by_hand.turned(t, torch.as_tensor(places), interleaved=interleaved, columns=columns)


def shared(length, size, rank):
    """Positions of the two chunks of rank `rank` of a sequence of `length` tokens."""
    chunk = length // (2 * size)
    mirrored = 2 * size - 1 - rank
    return [*range(rank * chunk, (rank + 1) * chunk), *range(mirrored * chunk, (mirrored + 1) * chunk)]


def check(te, t, wanted, order, angles, **call):
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    for fused in (False, True):
        strided = t.transpose(0, 1).contiguous().transpose(0, 1)  # the result is contiguous all the same
        ours, exact = strided.requires_grad_(), t.double().requires_grad_()
        found, expected = apply_rotary_pos_emb(ours, angles, order, fused=fused, **call), wanted(exact)
        assert found.dtype == t.dtype
        assert found.is_contiguous()
        cotangent = torch.randn(t.shape).to(t.dtype)
        found.backward(cotangent)
        expected.backward(cotangent.double())
        tolerance = 1e-5 if t.dtype == torch.float32 else 2**-8
        for one, two in ((found, expected), (ours.grad, exact.grad)):
            torch.testing.assert_close(one.double(), two, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("order", ["sbhd", "bshd"])
@pytest.mark.parametrize("kind", ["whole", "starts", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples(te, interleaved, percent, order, kind, dtype):
    tokens, samples, size, rank = 8, 2, 3, 1
    t = torch.randn((tokens, samples, HEADS, DIM) if order == "sbhd" else (samples, tokens, HEADS, DIM)).to(dtype)
    angles = te.RotaryPositionEmbedding(DIM, percent, interleaved=interleaved)(tokens * size)
    places = {"whole": [range(tokens)] * 2, "starts": [range(3, 11), range(7, 15)], "shared": [shared(24, size, rank)] * 2}[
        kind
    ]
    call = {"starts": {"start_positions": torch.tensor([3, 7]).int()}, "shared": {"cp_size": size, "cp_rank": rank}}.get(
        kind, {}
    )

    def wanted(t):
        of_samples = t.unbind(1 if order == "sbhd" else 0)
        columns = int(DIM * percent)
        made = [rotate(x, list(at), interleaved=interleaved, columns=columns) for x, at in zip(of_samples, places, strict=True)]
        return torch.stack(made, 1 if order == "sbhd" else 0)

    check(te, t, wanted, order, angles, interleaved=interleaved, **call)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["whole", "starts", "shared"])
def test_packed_sequences(te, interleaved, kind):
    size, rank = 2, 1
    lengths = [length // size for length in LENGTHS] if kind == "shared" else LENGTHS
    angles = te.RotaryPositionEmbedding(DIM, interleaved=interleaved)(20)
    t = torch.randn(sum(lengths), HEADS, DIM)
    starts = {"starts": [3, 0, 5, 8]}.get(kind, [0] * 4)
    places = [shared(n, size, rank) if kind == "shared" else range(s, s + n) for s, n in zip(starts, LENGTHS, strict=True)]
    call = {"whole": {}, "starts": {"start_positions": torch.tensor(starts)}, "shared": {"cp_size": size, "cp_rank": rank}}[
        kind
    ]

    def wanted(t):
        parts = zip(t.split(list(lengths)), places, strict=True)
        return torch.cat([rotate(x, list(at), interleaved=interleaved, columns=DIM) for x, at in parts])

    check(te, t, wanted, "thd", angles, interleaved=interleaved, cu_seqlens=ends(LENGTHS), **call)


@pytest.mark.parametrize("tokens", [30, 50])
@pytest.mark.parametrize("interleaved", [False, True])
def test_interpolated_positions(te, tokens, interleaved):
    """Within 10 · 4 positions by the factor, beyond by the length."""
    angles = te.RotaryPositionEmbedding(DIM, 1.0, 4, 10, rotary_base=500.0, interleaved=interleaved)(tokens)
    at = torch.arange(tokens).double() / (4 if tokens <= 40 else tokens / 10)
    wanted = at[:, None] / 500.0 ** (torch.arange(0, DIM, 2).double() / DIM)
    columns = angles[:, 0, 0, 0::2] if interleaved else angles[:, 0, 0, : DIM // 2]
    torch.testing.assert_close(columns.double(), wanted, rtol=1e-5, atol=1e-5)
    twins = angles[:, 0, 0, 1::2] if interleaved else angles[:, 0, 0, DIM // 2 :]
    assert torch.equal(columns, twins)


def test_refused(te):
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    angles, t = te.RotaryPositionEmbedding(DIM)(8), torch.randn(8, 2, HEADS, DIM)
    for message, call in {
        "Did you mean 'bshd'": {"tensor_format": "bshdd"},
        "'thd' is of 3 dimensions": {"tensor_format": "thd"},
        "cp_size=2: ranks share": {"cp_size": 2, "start_positions": torch.zeros(2).int()},
        "8 positions: a token has position 9": {"start_positions": torch.tensor([0, 2])},
        r"start_positions are torch.int64 \[1\]: give torch.int32 \[2\], one for each": {"start_positions": torch.tensor([0])},
        r"start_positions are torch.int64 \[3\]": {"start_positions": torch.tensor([0, 0, 0])},
        r"start_positions are torch.float32 \[2\]": {"start_positions": torch.zeros(2)},
        r"start_positions are torch.bool \[2\]": {"start_positions": torch.zeros(2).bool()},
        "start_positions are list": {"start_positions": [0, 0]},
        r"start_positions=\[0, -1\]: positions begin at 0, and one is -1": {"start_positions": torch.tensor([0, -1])},
        "cp_rank=2 with cp_size=2: ranks are 0 to 1": {"cp_size": 2, "cp_rank": 2},
        "cp_rank=1 with cp_size=1": {"cp_rank": 1},
        "cp_rank=-1: give a whole number of at least 0": {"cp_size": 2, "cp_rank": -1},
        "cp_size=0: give a whole number of at least 1": {"cp_size": 0},
        "cp_size=1.0: give a whole number": {"cp_size": 1.0},
        "8 positions: a token has position 15": {"cp_size": 2},
        "7 tokens of a rank with cp_size=2: they are two chunks": {"cp_size": 2, "t": t[:7]},
        r"rotary angles are torch.float32 \[8, 16\]": {"freqs": angles[:, 0, 0]},
        r"rotary angles are torch.int64 \[8, 1, 1, 16\]": {"freqs": angles.long()},
        "rotary angles of 20 columns: give an even number of at most 16": {"freqs": torch.zeros(8, 1, 1, 20)},
        "rotary angles of 0 columns": {"freqs": torch.zeros(8, 1, 1, 0)},
        r"t is torch.int64 \[8, 2, 3, 16\]": {"t": t.long()},
        "cu_seqlens with tensor_format 'sbhd': they belong to packed": {"cu_seqlens": ends((4, 4))},
    }.items():
        with pytest.raises(InputError, match=message):
            apply_rotary_pos_emb(**{"t": t, "freqs": angles} | call)
    with pytest.raises(InputError, match="'thd' needs cu_seqlens"):
        apply_rotary_pos_emb(t[:, 0], angles, "thd")
    for message, call in {
        r"start_positions are torch.int64 \[1\]: give torch.int32 \[2\]": {"start_positions": torch.tensor([1])},
        "positions begin at 0, and one is -2": {"start_positions": torch.tensor([1, -2])},
        "8 positions: a token has position 10": {"start_positions": torch.tensor([0, 6])},
        "cu_seqlens: sequences end at token 9, and there are 8": {"cu_seqlens": ends((3, 6))},
        r"cu_seqlens: sequence 0 has 6 tokens, and 2 ranks share it in 4 chunks": {"cu_seqlens": ends((6, 10)), "cp_size": 2},
        "cp_rank=3 with cp_size=2": {"cp_size": 2, "cp_rank": 3},
    }.items():
        with pytest.raises(InputError, match=message):
            apply_rotary_pos_emb(t[:, 0], angles, "thd", **{"cu_seqlens": ends((3, 5))} | call)
