"""`octavo.context_parallel` in a model of one's own: Hugging Face's GPT-NeoX over ranks equals the whole model."""

import contextlib
import io
import runpy
from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import octavo
import ranks
from octavo.errors import InputError

pytestmark = ranks.alone

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


def test_it_needs_ranks_and_whole_positions():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(InputError, match="context_parallel_degree"):
        octavo.context_parallel.attention(q, q, q)
    assert "give that of whole sequences, [1, 8]" in ranks.run(2, wrong_positions)[1]


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
