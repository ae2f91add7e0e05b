"""`octavo.context_parallel` in a model of one's own: Hugging Face's GPT-NeoX over ranks equals the whole model."""

import contextlib
import io
import itertools
import runpy
from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import octavo
import ranks
from octavo.errors import InputError

EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt_neox_context.py"
DOCUMENTS = torch.cat([torch.arange(length) for length in (7, 12, 5)])[None]


def neox(attention, seed=0):
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    config._attn_implementation = attention
    return GPTNeoXForCausalLM(config)


def errors(strategy):
    """Errors of the logits and of gradients summed over the ranks, for documents."""
    octavo.init({"context_parallel_degree": 2})
    positions = DOCUMENTS.expand(2, -1)

    def attention(module, query, key, value, attention_mask, scaling=None, **others):
        out = octavo.context_parallel.attention(
            *(x.transpose(1, 2) for x in (query, key, value)), position_ids=positions, scale=scaling, cp_comm_type=strategy
        )
        return out, None

    ALL_ATTENTION_FUNCTIONS.register("over-ranks", attention)
    ids = torch.randint(31, (2, 24), generator=torch.Generator().manual_seed(1))
    whole, split = neox("sdpa"), neox("over-ranks")
    cut = octavo.context_parallel.split
    wanted = whole(input_ids=ids, position_ids=positions, use_cache=False).logits
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    (wanted * weights).sum().backward()
    logits = split(input_ids=cut(ids), position_ids=cut(positions), use_cache=False).logits
    (logits * cut(weights)).sum().backward()
    found = [((octavo.context_parallel.gather(logits) - wanted).norm() / wanted.norm()).item()]
    for ours, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        torch.distributed.all_reduce(ours.grad)
        found.append(((ours.grad - theirs.grad).norm() / (theirs.grad.norm() + 1e-3)).item())
    return found


@pytest.mark.parametrize("strategy", ["all_gather", "p2p", "a2a", "auto"])
def test_gpt_neox_over_ranks_is_the_whole_model(strategy):
    for found in ranks.run(2, errors, strategy):
        assert max(found) < 1e-5


def example():
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(EXAMPLE))
    return said.getvalue()


def test_the_example_trains():
    first, last = (float(line.split()[-1]) for line in ranks.run(2, example)[0].splitlines())
    assert first > 4
    assert last < 0.1


@pytest.fixture(params=[{"context_parallel_degree": 1}, {}, None], ids=["degree 1", "no key", "bare"])
def one_rank(request, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    octavo.init(request.param)
    yield
    octavo.shutdown()


def test_the_example_trains_on_one_rank(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    first, last = (float(line.split()[-1]) for line in example().splitlines())
    assert first > 4
    assert last < 0.1


MASKS = {
    "causal": {},
    "documents": {"position_ids": DOCUMENTS},
    "padding": {"attention_mask": (torch.arange(24) < 19).long().expand(2, -1)},
    "window": {"window": 5},
}


def plain_attention(q, k, v, position_ids=None, attention_mask=None, window=None):
    """Attention written out, of real queries."""
    at = torch.arange(q.shape[1])
    seen = at[:, None] >= at
    if window is not None:
        seen = seen & (at[:, None] - at < window)
    if position_ids is not None:
        number = (position_ids[0] == 0).cumsum(0)
        seen = seen & (number[:, None] == number)
    if attention_mask is not None:
        seen = seen & (attention_mask[0] == 1)
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), v)


def errors_of_degree_one(tokens=24):
    """{(mask, exchange): the largest error of the result and of gradients}, of whole sequences of up to 24 tokens."""
    found = {}
    for (name, mask), strategy in itertools.product(MASKS.items(), ("all_gather", "p2p", "a2a", "auto")):
        mask = {key: value if key == "window" else value[:, :tokens] for key, value in mask.items()}
        leaves = [torch.randn(2, tokens, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
        real = slice(None, 19 if name == "padding" else None)
        weights = torch.randn(2, tokens, 4, 8, dtype=torch.float64)[:, real]
        q, k, v = (octavo.context_parallel.split(x) for x in leaves)
        out = octavo.context_parallel.gather(octavo.context_parallel.attention(q, k, v, cp_comm_type=strategy, **mask))
        wanted = plain_attention(*leaves, **mask)
        gradients, theirs = (torch.autograd.grad((x[:, real] * weights).sum(), leaves) for x in (out, wanted))
        pairs = [(out[:, real], wanted[:, real]), *zip(gradients, theirs, strict=True)]
        found[name, strategy] = max((ours - other).abs().max().item() for ours, other in pairs)
    return found


def degree_one_of_two(degrees):
    octavo.init(degrees)
    return errors_of_degree_one() | {(*cell, 23): error for cell, error in errors_of_degree_one(23).items()}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("tokens", [24, 23, 1])
def test_a_rank_alone_has_plain_attention(tokens):
    for cell, error in errors_of_degree_one(tokens).items():
        assert error < 1e-12, cell
    x = torch.randn(2, tokens)
    assert octavo.context_parallel.split(x) is x
    assert octavo.context_parallel.gather(x) is x
    for call in (octavo.context_parallel.split, octavo.context_parallel.gather):
        with pytest.raises(InputError, match="no dimension 4"):
            call(x, dim=4)
    q = torch.zeros(1, tokens, 2, 8)
    with pytest.raises(InputError, match=rf"give the shape of whole sequences, \[1, {tokens}\]"):
        octavo.context_parallel.attention(q, q, q, position_ids=torch.arange(tokens + 1)[None])
    with pytest.raises(InputError, match="unknown cp_comm_type"):
        octavo.context_parallel.attention(q, q, q, cp_comm_type="own")


@pytest.mark.parametrize("degrees", [{"context_parallel_degree": 1}, None])
def test_each_of_two_ranks_alone_has_plain_attention(degrees):
    for found in ranks.run(2, degree_one_of_two, degrees):
        for cell, error in found.items():
            assert error < 1e-12, cell


def test_it_needs_ranks_and_whole_positions():
    q = torch.zeros(1, 4, 2, 8)
    octavo.init()
    octavo.shutdown()  # as before the call
    for call in (lambda: octavo.context_parallel.attention(q, q, q), lambda: octavo.context_parallel.split(q)):
        with pytest.raises(
            InputError, match=r"octavo\.init, which was not called\. .* octavo\.init\(\) for a single rank, or pass a"
        ):
            call()
    assert "give the shape of whole sequences, [1, 8]" in ranks.run(2, wrong_positions)[1]


def wrong_positions():
    octavo.init({"context_parallel_degree": 2})
    q = torch.zeros(1, 4, 2, 8)
    for wrong in ("own", "ring"):
        with pytest.raises(InputError, match="unknown cp_comm_type"):
            octavo.context_parallel.attention(q, q, q, cp_comm_type=wrong)
    none = q[:, :, :0]
    for k, v in ((q[:, :2], q[:, :2]), (q, q[..., :4]), (q, q[:, :, :1]), (q.double(), q), (q[0], q[0]), (none, none)):
        with pytest.raises(InputError, match=r"q \[1, 4, 2, 8\]"):
            octavo.context_parallel.attention(q, k, v)
    for part in (q[0, 0], q.long()):
        with pytest.raises(InputError, match=r"q \["):
            octavo.context_parallel.attention(part, part, part)
    for group, said in (("cp", "a str"), (torch.distributed.new_group([0]), "one without this rank")):
        if said == "a str" or octavo.state.rank == 1:
            with pytest.raises(InputError, match=said):
                octavo.context_parallel.attention(q, q, q, group)
    with pytest.raises(InputError, match=r"position_ids is torch\.float32: positions are whole numbers"):
        octavo.context_parallel.attention(q, q, q, position_ids=torch.arange(8.0)[None] / 2)
    with pytest.raises(InputError, match=r"a window of 2\.5 keys: give a whole number"):
        octavo.context_parallel.attention(q, q, q, window=2.5)
    with pytest.raises(InputError, match="attention_mask has the value -inf"):
        octavo.context_parallel.attention(
            q, q, q, attention_mask=torch.zeros(1, 8).masked_fill(torch.arange(8) > 5, -torch.inf)
        )
    for x, dim, said in ((q[:, :3], 1, "has 3 tokens of a rank"), (q[:, :1], 1, "two equal chunks"), (q, 4, "no dimension 4")):
        with pytest.raises(InputError, match=said):
            octavo.context_parallel.gather(x, dim=dim)
    with pytest.raises(InputError) as refused:
        octavo.context_parallel.attention(q, q, q, position_ids=torch.arange(4)[None])
    return str(refused.value)


def layers_apart():
    """Errors of layers that share sequences: output, and gradient of the input, of [B, T, hidden] and of [T, B, hidden]."""
    octavo.init({"context_parallel_degree": 2})
    cut, found = octavo.context_parallel.split, []
    for kind, dim, order in (
        (octavo.nn.MultiheadAttention, 0, {"qkv_format": "sbhd"}),
        (octavo.nn.TransformerLayer, 1, {"ffn_hidden_size": 48}),
    ):
        torch.manual_seed(4)  # the same weights on both ranks
        layer = kind(hidden_size=32, num_attention_heads=4, num_gqa_groups=2, **order)
        x = torch.randn(*((12, 2, 32) if dim == 0 else (2, 12, 32)), requires_grad=True)
        weights = torch.randn(x.shape)
        wanted = layer(x)
        (wanted * weights).sum().backward()
        theirs, x.grad = x.grad, None
        layer.set_context_parallel_group(octavo.state.cp_process_group, cp_comm_type="p2p")
        out = layer(cut(x, dim=dim))
        (out * cut(weights, dim=dim)).sum().backward()
        torch.distributed.all_reduce(x.grad)
        found += [(out - cut(wanted, dim=dim)).abs().max().item(), (x.grad - theirs).abs().max().item()]
        layer.set_context_parallel_group(None)
        found.append((layer(x) - wanted).abs().max().item())
    return found


def test_layers_share_sequences_as_transformer_engines_do():
    for found in ranks.run(2, layers_apart):
        assert max(found) < 1e-5
