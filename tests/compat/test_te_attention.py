"""Transformer Engine's DotProductAttention beside float64 by hand: lengths, masks, windows, biases, kinds of softmax."""

import pytest
import te_attention_by_hand as by_hand
import torch

from octavo.errors import InputError
from octavo.nn import scores
from octavo.process import process

HEADS, GROUPS, DIM = 4, 2, 8
CAUSAL = ("causal", "causal_bottom_right")
Q_LENGTHS, KV_LENGTHS = (5, 0, 3, 1, 7), (4, 2, 0, 6, 7)
ORDERS = ("bshd", "sbhd", "thd")


def ends(lengths, gap=0):
    """Cumulative lengths, with a gap behind each."""
    return torch.tensor([0, *(torch.tensor(lengths).cumsum(0) + gap * torch.arange(1, len(lengths) + 1)).tolist()]).int()


def drawn(batch, queries, keys, *, groups=GROUPS, value=DIM, dtype=torch.float32):
    shapes = (queries, HEADS, DIM), (keys, groups, DIM), (keys, groups, value)
    return [torch.randn(batch, *shape).to(dtype).requires_grad_() for shape in shapes]


def ordered(x, order):
    return x[0] if order == "thd" else x.transpose(0, 1) if order == "sbhd" else x


def assert_matches(core, inputs, sequences, how, *, order="bshd", others=(), tolerance=2e-5, **call):
    """Output and every gradient of a call beside float64. others: further tensors with gradients, name in `how` → tensor."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    more = {name: x.detach().double().requires_grad_() for name, x in dict(others).items()}
    wanted, top = by_hand.attention(*exact, sequences, **how, **more)
    made = core(*(ordered(x, order) for x in inputs), qkv_format=order, **call)
    found, largest = made if isinstance(made, tuple) else (made, None)
    assert found.shape == ordered(wanted, order).shape
    cotangent = torch.randn(wanted.shape).to(found.dtype)
    found.backward(ordered(cotangent, order))
    wanted.backward(cotangent.double())
    pairs = [(found, ordered(wanted, order)), *((x.grad, e.grad) for x, e in zip(inputs, exact, strict=True))]
    pairs += [(x.grad, more[name].grad) for name, x in dict(others).items()]
    pairs += [] if largest is None else [(largest, top)]
    for one, two in pairs:
        torch.testing.assert_close(
            one.double(), two, rtol=tolerance, atol=tolerance * max(1.0, float(two.detach().abs().max()))
        )
    return found, inputs


def placed(q_begins, kv_begins):
    """The sequences of `Q_LENGTHS` and `KV_LENGTHS` at their first tokens."""
    at = zip(q_begins.tolist(), Q_LENGTHS, kv_begins.tolist(), KV_LENGTHS, strict=False)
    return [(0, q, q + n, k, k + m) for q, n, k, m in at]


@pytest.mark.parametrize("gap", [0, 2], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("window", [None, (2, 0), (1, 2), (0, -1)])
def test_packed_sequences(te, kind, window, gap):
    core = te.DotProductAttention(HEADS, DIM, num_gqa_groups=GROUPS, qkv_format="thd", attn_mask_type=kind)
    q_ends, kv_ends, q_padded, kv_padded = ends(Q_LENGTHS), ends(KV_LENGTHS), ends(Q_LENGTHS, gap), ends(KV_LENGTHS, gap)
    tail = 3  # tokens behind all sequences
    inputs = drawn(1, int(q_padded[-1]) + tail, int(kv_padded[-1]) + tail)
    call = {"cu_seqlens_q": q_ends, "cu_seqlens_kv": kv_ends, "max_seqlen_q": 8, "max_seqlen_kv": 8}
    if gap:
        call |= {"cu_seqlens_q_padded": q_padded, "cu_seqlens_kv_padded": kv_padded, "pad_between_seqs": True}
    sequences = placed(q_padded, kv_padded)
    found, (q, k, v) = assert_matches(
        core, inputs, sequences, {"kind": kind, "window": window}, order="thd", window_size=window, **call
    )
    there = torch.zeros(q.shape[1], dtype=torch.bool)
    for _, first, last, *_ in sequences:
        there[first:last] = True
    assert not found[~there].any()  # padding: results and gradients are 0
    assert not q.grad[0, ~there].any()
    assert not k.grad[0, -tail:].any()
    assert not v.grad[0, -tail:].any()


@pytest.mark.parametrize("order", ["bshd", "sbhd"])
@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("given", ["lengths", "masks", "both"])
def test_padded_samples_of_other_numbers_of_queries_than_keys(te, order, kind, given):
    core = te.DotProductAttention(HEADS, DIM, num_gqa_groups=GROUPS, attention_type="cross")
    inputs = drawn(len(Q_LENGTHS), 7, 9)
    masks = tuple(
        torch.arange(tokens)[None, None, None] >= torch.tensor(lengths)[:, None, None, None]
        for tokens, lengths in ((7, Q_LENGTHS), (9, KV_LENGTHS))
    )
    call = {"attn_mask_type": kind}
    if given != "masks":
        call |= {"cu_seqlens_q": ends(Q_LENGTHS), "cu_seqlens_kv": ends(KV_LENGTHS)}
    if given != "lengths":
        call |= {"attention_mask": masks}
    sequences = [(n, 0, q, 0, k) for n, (q, k) in enumerate(zip(Q_LENGTHS, KV_LENGTHS, strict=True))]
    found, _ = assert_matches(core, inputs, sequences, {"kind": kind}, order=order, **call)
    assert not ordered(found, order)[0, 5:].any()


@pytest.mark.parametrize(("queries", "keys"), [(3, 8), (8, 3), (6, 6)])
@pytest.mark.parametrize("kind", ["causal", "causal_bottom_right", "no_mask", "arbitrary"])
@pytest.mark.parametrize("window", [None, (2, 0), (1, 1)])
def test_whole_samples(te, queries, keys, kind, window):
    core = te.DotProductAttention(HEADS, DIM, num_gqa_groups=GROUPS, attn_mask_type=kind)
    inputs, call, how = drawn(2, queries, keys), {}, {"kind": kind, "window": window}
    if kind == "arbitrary":
        mask = torch.rand(1, HEADS, queries, keys) < 0.5
        mask[:, 1, 1] = True  # a query without a key
        call, how = {"attention_mask": mask}, how | {"allowed": ~mask[0]}
    sequences = [(n, 0, queries, 0, keys) for n in range(2)]
    assert_matches(core, inputs, sequences, how, window_size=window, **call)


@pytest.mark.parametrize("aligned", [True, False, None])
@pytest.mark.parametrize("where", ["layer", "call"])
def test_a_window_lies_at_the_corner_that_bottom_right_diagonal_names(te, aligned, where):
    told = {"bottom_right_diagonal": aligned}
    core = te.DotProductAttention(HEADS, DIM, attn_mask_type="no_mask", **(told if where == "layer" else {}))
    how = {"kind": "no_mask", "window": (1, 2), "right_aligned": aligned}
    call = told if where == "call" else {}
    assert_matches(core, drawn(2, 4, 9, groups=HEADS), [(n, 0, 4, 0, 9) for n in range(2)], how, window_size=(1, 2), **call)


SOFTMAX = ["off-by-one", "learnable"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("softmax", SOFTMAX)
@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_softmax_offsets(te, order, softmax, kind):
    core = te.DotProductAttention(HEADS, DIM, num_gqa_groups=GROUPS, softmax_type=softmax, softmax_scale=0.5)
    assert [name for name, _ in core.named_parameters()] == (["softmax_offset"] if softmax == "learnable" else [])
    assert not core.softmax_offset.any()
    core.softmax_offset.requires_grad = True  # as Transformer Engine's tests do with either
    if softmax == "learnable":
        torch.nn.init.normal_(core.softmax_offset)
    packed = order == "thd"
    inputs = drawn(1, sum(Q_LENGTHS), sum(KV_LENGTHS)) if packed else drawn(len(Q_LENGTHS), 7, 7)
    q_ends, kv_ends = ends(Q_LENGTHS), ends(KV_LENGTHS)
    sequences = [(n, 0, q, 0, k) for n, (q, k) in enumerate(zip(Q_LENGTHS, KV_LENGTHS, strict=True))]
    sequences = placed(q_ends, kv_ends) if packed else sequences
    call = {"cu_seqlens_q": q_ends, "cu_seqlens_kv": kv_ends, "attn_mask_type": kind}
    how = {"kind": kind, "scale": 0.5}
    assert_matches(core, inputs, sequences, how, order=order, others={"sink": core.softmax_offset}, **call)


@pytest.mark.parametrize("kind", [*CAUSAL, "no_mask"])
@pytest.mark.parametrize("bias", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("shape", [(2, HEADS), (1, HEADS), (2, 1), (1, 1)])
def test_biases(te, kind, bias, shape, monkeypatch):
    monkeypatch.setattr(scores, "PAIRS", 1)  # bands of 16 queries
    core = te.DotProductAttention(HEADS, DIM, attn_mask_type=kind)
    added = torch.randn(*shape, 20, 9, requires_grad=True)
    how = {"kind": kind, "before": bias == "pre_scale_bias"}
    call = {"core_attention_bias_type": bias, "core_attention_bias": added}
    sequences = [(n, 0, 20, 0, 9) for n in range(2)]
    assert_matches(core, drawn(2, 20, 9, groups=HEADS), sequences, how, others={"bias": added}, **call)


@pytest.mark.parametrize("kind", [*CAUSAL, "no_mask", "padding", "padding_causal"])
@pytest.mark.parametrize("given", [None, "heads", "samples"])
def test_alibi(te, kind, given):
    core = te.DotProductAttention(HEADS, DIM, attn_mask_type=kind)
    slopes = {None: None, "heads": torch.rand(HEADS), "samples": torch.rand(2, HEADS)}[given]
    used = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]) if slopes is None else slopes
    lengths = ((4, 6), (6, 3)) if "padding" in kind else ((6, 8), (6, 8))
    call = {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
    if "padding" in kind:
        call |= {"cu_seqlens_q": ends([q for q, _ in lengths]), "cu_seqlens_kv": ends([k for _, k in lengths])}
    sequences = [(n, 0, q, 0, k) for n, (q, k) in enumerate(lengths)]
    assert_matches(core, drawn(2, 6, 8, groups=HEADS), sequences, {"kind": kind, "slopes": used.double()}, **call)


def test_slopes_of_heads_that_are_no_power_of_two():
    torch.testing.assert_close(
        scores.alibi_slopes(6, torch.device("cpu")).double(),
        torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3], dtype=torch.float64),
    )


@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
@pytest.mark.parametrize("order", ["bshd", "thd"])
def test_caps_and_largest_logits(te, softmax, order):
    core = te.DotProductAttention(HEADS, DIM, softcap=0.7, return_max_logit=True, softmax_type=softmax)
    packed = order == "thd"
    inputs = drawn(1, sum(Q_LENGTHS), sum(KV_LENGTHS), groups=HEADS) if packed else drawn(2, 5, 7, groups=HEADS)
    call, sequences = {"attn_mask_type": "no_mask"}, [(n, 0, 5, 0, 7) for n in range(2)]
    if packed:
        q_ends, kv_ends = ends(Q_LENGTHS), ends(KV_LENGTHS)
        call = {"attn_mask_type": "padding", "cu_seqlens_q": q_ends, "cu_seqlens_kv": kv_ends}
        sequences = placed(q_ends, kv_ends)
    others = {} if softmax == "vanilla" else {"sink": core.softmax_offset}
    how = {"kind": call["attn_mask_type"], "cap": 0.7}
    assert_matches(core, inputs, sequences, how, order=order, others=others, **call)


def test_values_of_another_size(te):
    core = te.DotProductAttention(HEADS, (DIM, 12), qkv_format="bshd")
    for kind in ("causal", "no_mask"):
        inputs = drawn(2, 6, 6, groups=HEADS, value=12)
        assert_matches(core, inputs, [(n, 0, 6, 0, 6) for n in range(2)], {"kind": kind}, attn_mask_type=kind)


@pytest.mark.parametrize("dim", [-3, -2])
def test_stacked_tensors(te, dim):
    core = te.DotProductAttention(HEADS, DIM, qkv_format="bshd")
    q, k, v = (x.detach() for x in drawn(2, 6, 6, groups=HEADS))
    wanted = core(q, k, v)
    assert torch.equal(core(qkv_layer=torch.stack((q, k, v), dim), qkv_interleave_dim=dim), wanted)
    assert torch.equal(core(q, kv_layer=torch.stack((k, v), dim), qkv_interleave_dim=dim), wanted)
    with pytest.raises(InputError, match="without the tensors that it holds"):
        core(q, k, v, kv_layer=torch.stack((k, v), -3))
    with pytest.raises(InputError, match="takes query_layer, key_layer and value_layer"):
        core(q, k)


@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
@pytest.mark.parametrize("lengths", [True, False])
def test_checkpointed_attention_is_the_same_with_its_dropout(te, softmax, lengths):
    """Results and gradients to the last bit; less is saved for backward."""
    tracker = te.CudaRNGStatesTracker()
    core = te.DotProductAttention(
        HEADS, DIM, attention_dropout=0.3, qkv_format="bshd", softmax_type=softmax, get_rng_state_tracker=lambda: tracker
    )
    drawing = drawn(2, 6, 6, groups=HEADS)
    call = {"attn_mask_type": "padding_causal", "cu_seqlens_q": ends((4, 6)), "cu_seqlens_kv": ends((4, 6))} if lengths else {}
    found = {}
    for again in (False, True):
        tracker.reset()
        tracker.add("model-parallel-rng", 5)
        torch.manual_seed(3)
        inputs, saved = [x.detach().clone().requires_grad_() for x in drawing], []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=saved: (s.append(x), x)[1], lambda x: x):
            out = core(*inputs, checkpoint_core_attention=again, **call)
        out.square().sum().backward()
        offset = [] if softmax == "vanilla" else [core.softmax_offset.grad.clone()]
        core.zero_grad()
        found[again] = [out, *(x.grad for x in inputs), *offset]
        assert all(x.dim() < 4 or any(x.data_ptr() == y.data_ptr() for y in inputs) for x in saved) or not again
    assert all(torch.equal(one, two) for one, two in zip(found[False], found[True], strict=True))
    assert not torch.equal(core.eval()(*inputs, **call), found[True][0])


@pytest.mark.parametrize("order", ["bshd", "thd"])
@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one"])
def test_dropout_of_sequences_keeps_the_mean(te, order, softmax):
    core = te.DotProductAttention(2, 4, attention_dropout=0.5, softmax_type=softmax, qkv_format=order)
    q, k = torch.zeros(1, 600, 2, 4), torch.zeros(1, 600, 2, 4)
    call = {"attn_mask_type": "padding", "cu_seqlens_q": ends((600,)), "cu_seqlens_kv": ends((600,))}
    out = core(*(ordered(x, order) for x in (q, k, torch.ones_like(k))), **call)
    assert out.mean().item() == pytest.approx(1.0 if softmax == "vanilla" else 600 / 601, abs=0.01)
    assert out.std().item() > 0.02
    still = core.eval()(*(ordered(x, order) for x in (q, k, torch.ones_like(k))), **call)
    torch.testing.assert_close(still, torch.full_like(still, 1.0 if softmax == "vanilla" else 600 / 601))


def test_what_no_kernel_computes_is_named_once(te, capsys):
    process.said.clear()
    core = te.DotProductAttention(HEADS, DIM, qkv_format="bshd")
    for _ in range(2):
        core(*drawn(1, 3, 3, groups=HEADS), core_attention_bias_type="alibi")
    core(*drawn(1, 3, 3, groups=HEADS), softcap=2.0)
    said = capsys.readouterr().err
    assert said.count("core_attention_bias_type='alibi' runs in plain PyTorch, in float32") == 1
    assert said.count("softcap runs in plain PyTorch") == 1
    q, k, v = drawn(1, 5, 3, groups=HEADS)
    library, by_mask = "runs in PyTorch's scaled_dot_product_attention,", "attention with a mask"
    for _ in range(2):
        core(q, k, v, window_size=(1, 1), attn_mask_type="no_mask")
        core(q, k, v, torch.zeros(1, 1, 5, 3, dtype=torch.bool), attn_mask_type="arbitrary")
        core(k, k, v, torch.zeros(1, 1, 1, 3, dtype=torch.bool), attn_mask_type="padding")
        te.DotProductAttention(HEADS, (DIM, 4), qkv_format="bshd")(q, k, v[..., :4])
        te.DotProductAttention(HEADS, DIM, qkv_format="bshd", attention_dropout=0.5)(q, k, v)
    said = capsys.readouterr().err
    for what in ("window_size=(1, 1)", "attn_mask_type='arbitrary'", "kv_channels of two sizes", "attention_dropout"):
        assert said.count(f"{what} {library}") == 1
    assert said.count(f"attn_mask_type='padding' runs in PyTorch's scaled_dot_product_{by_mask}") == 1
    assert "window_size=None" not in said
    core(k, k, v, attn_mask_type="no_mask", window_size=(1, 2))
    assert f"window_size=(1, 2) runs in PyTorch's scaled_dot_product_{by_mask}" in capsys.readouterr().err
    kinds = {"attn_mask_type": "padding_causal", "cu_seqlens_q": ends((2,)), "cu_seqlens_kv": ends((2,))}
    te.DotProductAttention(HEADS, DIM, qkv_format="bshd", softmax_type="learnable")(*drawn(1, 3, 3, groups=HEADS), **kinds)
    assert not capsys.readouterr().err  # lengths and offsets have kernels


REFUSED = [
    ({"qkv_format": "thd"}, {}, r"has 3 dimensions"),
    ({}, {"attn_mask_type": "causal", "cu_seqlens_q": (2, 3), "cu_seqlens_kv": (2, 3)}, "'causal' with cu_seqlens of shorter"),
    ({}, {"attn_mask_type": "padding", "cu_seqlens_q": (2, 9), "cu_seqlens_kv": (2, 3)}, "of 9 tokens: a sample has 4"),
    ({}, {"attn_mask_type": "padding", "cu_seqlens_q": (2,), "cu_seqlens_kv": (2,)}, "of 1 sequences: there are 2 samples"),
    ({}, {"attn_mask_type": "padding", "cu_seqlens_q": (2, 2), "cu_seqlens_q_padded": (4, 4), "cu_seqlens_kv": (2, 2)},
     "go together"),
    ({}, {"attn_mask_type": "padding", "cu_seqlens_kv": (2, 2)}, "cu_seqlens_kv without cu_seqlens_q: .* give both"),
    ({}, {"attn_mask_type": "padding", "softcap": 1.0}, "attention_mask of NoneType for the queries"),
    ({}, {"core_attention_bias_type": "post_scale_bias"}, "without core_attention_bias"),
    ({}, {"core_attention_bias": torch.zeros(1, 1, 4, 4)}, "with core_attention_bias"),
    ({}, {"core_attention_bias_type": "alib"}, "Did you mean 'alibi'"),
    ({}, {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, 3, 4, 4)}, "1, 3, 4, 4"),
    ({}, {"alibi_slopes": torch.zeros(4)}, "pass 'alibi'"),
    ({}, {"core_attention_bias_type": "alibi", "alibi_slopes": torch.zeros(3)}, r"alibi_slopes is torch.float32 \[3\]"),
    ({}, {"core_attention_bias_type": "alibi", "softcap": 1.0}, "softcap=1.0 with"),
    ({}, {"score_mod": max}, "score_mod"),
    ({}, {"inference_params": 1}, "inference_params"),
    ({}, {"fp8_output": True}, "fp8_output"),
    ({"softmax_type": "learned"}, {}, "Did you mean 'learnable'"),
    ({"attention_type": "crossed"}, {}, "Did you mean 'cross'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "call", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_refused(te, make, call, message):
    call = {name: ends(value) if "cu_seqlens" in name else value for name, value in call.items()}
    with pytest.raises(InputError, match=message):
        te.DotProductAttention(HEADS, DIM, **{"qkv_format": "bshd"} | make)(*drawn(2, 4, 4, groups=HEADS), **call)


@pytest.mark.parametrize("order", ["bshd", "thd"])
@pytest.mark.parametrize("keys", [9, 5, 3])
def test_lengths_of_queries_alone_are_refused(te, order, keys):
    """Also with as many keys: they may be of other tokens."""
    q, k, v = drawn(1, 5, keys, groups=HEADS)
    core = te.DotProductAttention(HEADS, DIM, qkv_format=order, attn_mask_type="padding", attention_type="cross")
    with pytest.raises(InputError, match=r"cu_seqlens_q without cu_seqlens_kv: .*give both"):
        core(*(ordered(x, order) for x in (q, k, v)), cu_seqlens_q=ends((3,)))


PADDED = {"cu_seqlens_q_padded": (4, 4), "cu_seqlens_kv_padded": (4, 4)}
LENGTHS = {"cu_seqlens_q": (2, 3), "cu_seqlens_kv": (3, 1), "attn_mask_type": "padding"}
CONTRADICTIONS = [
    ({"max_seqlen_q": 3}, "max_seqlen_q=3, and the longest sequence has 4 tokens: give at least 4"),
    ({"max_seqlen_kv": 3, "attn_mask_type": "no_mask"}, "max_seqlen_kv=3, and the longest sequence has 4"),
    ({"max_seqlen_kv": 3, "softcap": 1.0}, "max_seqlen_kv=3, and the longest sequence has 4"),
    ({"max_seqlen_q": 2} | LENGTHS, "max_seqlen_q=2, and the longest sequence has 3"),
    ({"max_seqlen_kv": 2} | LENGTHS, "max_seqlen_kv=2, and the longest sequence has 3"),
    ({"max_seqlen_q": 4.0}, "max_seqlen_q is float: give a whole number"),
    ({"max_seqlen_q": True}, "max_seqlen_q is bool"),
    ({"pad_between_seqs": True}, "pad_between_seqs=True .*packed sequences"),
    ({"pad_between_seqs": True} | LENGTHS, "pad_between_seqs=True .*packed sequences"),
    ({"pad_between_seqs": "no"}, "pad_between_seqs='no': give True"),
    ({"cu_seqlens_q_padded": (4, 5), "cu_seqlens_kv_padded": (4, 4)} | LENGTHS,
     r"cu_seqlens_q_padded=\[0, 4, 9\]: samples of 4 tokens begin at \[0, 4, 8\]"),
    ({"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, 1, 5, 6)},
     r"core_attention_bias is torch.float32 \[1, 1, 5, 6\]: give a tensor \[2 or 1, 4 or 1, 4 or 1, 4\]"),
    ({"attention_mask": torch.zeros(3, 1, 4, 4, dtype=torch.bool), "attn_mask_type": "arbitrary"}, r"\[2 or 1, 4 or 1, 4, 4\]"),
    ({"attention_mask": torch.zeros(2, 3, 4, 4, dtype=torch.bool), "attn_mask_type": "arbitrary", "softcap": 1.0},
     r"\[2 or 1, 4 or 1, 4, 4\]"),
    ({"attention_mask": torch.zeros(1, 2, 1, 4, 4, dtype=torch.bool), "attn_mask_type": "arbitrary"}, r"2 or 1, 4 or 1, 4, 4"),
    ({"attention_mask": (torch.arange(4) >= torch.tensor([[2], [2]]))[:, None, None]} | LENGTHS,
     "attention_mask of torch.bool .*cu_seqlens_q: leave one of the two out"),
    ({"attention_mask": torch.zeros(4, 4, dtype=torch.bool)} | LENGTHS, "cu_seqlens_q: leave one of the two out"),
    ({"attention_mask": (None,), "attn_mask_type": "padding", "softcap": 1.0}, "attention_mask is 1 masks: give one, or two"),
    ({"attention_mask": (None, None, None)} | LENGTHS, "attention_mask is 3 masks: give one, or two"),
    ({"softcap": -1.0}, "softcap=-1.0: give a finite number"),
    ({"softcap": torch.nan}, "softcap=nan"),
    ({"checkpoint_core_attention": "yes"}, "checkpoint_core_attention = 'yes' is neither"),
    ({"bottom_right_diagonal": "yes"}, "bottom_right_diagonal = 'yes' is neither"),
    ({"core_attention_bias_type": "alibi", "alibi_slopes": [1.0] * 4}, r"alibi_slopes is list: give a tensor \[4\]"),
    ({"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": 0.5}, "core_attention_bias is float: give a tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CONTRADICTIONS, ids=[message for _, message in CONTRADICTIONS])
def test_arguments_that_contradict_the_tensors_or_each_other_are_refused(te, call, message):
    call = {name: ends(value) if name in (*PADDED, *LENGTHS) and "cu_" in name else value for name, value in call.items()}
    with pytest.raises(InputError, match=message):
        te.DotProductAttention(HEADS, DIM, qkv_format="bshd")(*drawn(2, 4, 4, groups=HEADS), **call)


def test_arguments_that_agree_change_nothing(te):
    core = te.DotProductAttention(HEADS, DIM, qkv_format="bshd", attn_mask_type="padding")
    inputs = drawn(2, 4, 4, groups=HEADS)
    call = {name: ends(value) for name, value in LENGTHS.items() if "cu_" in name}
    wanted = core(*inputs, **call)
    masks = tuple(
        (torch.arange(4) >= torch.tensor(LENGTHS[f"cu_seqlens_{side}"])[:, None])[:, None, None] for side in ("q", "kv")
    )
    for more in (
        {"max_seqlen_q": 3, "max_seqlen_kv": torch.tensor(3), "pad_between_seqs": False},
        {name: ends(value) for name, value in PADDED.items()},
        {f"{name}_padded": value for name, value in call.items()},  # no padding between sequences
        {"attention_mask": masks},
    ):
        assert torch.equal(core(*inputs, **call, **more), wanted)
    padded = core(*inputs, masks[0], max_seqlen_q=3)  # of keys too: the longest of its samples
    assert torch.equal(padded, core(*inputs, masks[0]))
    with pytest.raises(InputError, match="max_seqlen_q=2, and the longest sequence has 3"):
        core(*inputs, masks[0], max_seqlen_q=2)


@pytest.mark.parametrize("more", [{}, {"softcap": 1.0}, {n: ends(v) for n, v in LENGTHS.items() if "cu_" in n}], ids=str)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ((2, 4, 3, DIM), (2, 4, 3, DIM), "4 and 3 heads: the layer has num_attention_heads=4 and num_gqa_groups=4"),
        ((3, 4, 4, DIM), (3, 4, 4, DIM), r"are \[2, 4, 4, 8\], \[3, 4, 4, 8\] and \[3, 4, 4, 8\]: give query \[B, T, H, D\]"),
        ((1, 4, 4, DIM), (1, 4, 4, DIM), r"with the same B, the same T of key and value"),
        ((2, 4, 4, DIM), (2, 3, 4, DIM), r"and \[2, 3, 4, 8\]: give"),
        ((2, 4, 4, 6), (2, 4, 4, DIM), r"\[2, 4, 4, 6\] and"),
    ],
    ids=["heads", "samples", "one sample", "values", "sizes"],
)
def test_tensors_that_do_not_fit_are_refused(te, key, value, message, more):
    call = more | ({"attn_mask_type": "padding"} if "cu_seqlens_q" in more else {})
    core = te.DotProductAttention(HEADS, DIM, qkv_format="bshd")
    with pytest.raises(InputError, match=message):
        core(torch.randn(2, 4, HEADS, DIM), torch.randn(key), torch.randn(value), **call)
    with pytest.raises(InputError, match=r"float32, torch\.float64: give one dtype"):
        core(*(torch.randn(2, 4, HEADS, DIM) for _ in range(2)), torch.randn(2, 4, HEADS, DIM).double(), **call)


def test_padding_between_packed_sequences_is_said_truly(te):
    core = te.DotProductAttention(HEADS, DIM, qkv_format="thd", attn_mask_type="padding")
    inputs, lengths, gaps = [x[0] for x in drawn(1, 8, 8, groups=HEADS)], ends((2, 3)), ends((4, 4))
    call = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    places = {"cu_seqlens_q_padded": gaps, "cu_seqlens_kv_padded": gaps}
    with pytest.raises(InputError, match=r"pad_between_seqs=True .*give cu_seqlens_q_padded"):
        core(*inputs, **call, pad_between_seqs=True)
    with pytest.raises(InputError, match="pad_between_seqs=False, but cu_seqlens_q_padded"):
        core(*inputs, **call, **places, pad_between_seqs=False)
    assert torch.equal(core(*inputs, **call, **places), core(*inputs, **call, **places, pad_between_seqs=True))
    short = [x[:5] for x in inputs]  # no room for padding
    assert torch.equal(core(*short, **call, pad_between_seqs=True), core(*short, **call))
    tight = {"cu_seqlens_q_padded": lengths, "cu_seqlens_kv_padded": lengths}
    assert torch.equal(core(*inputs, **call, **tight, pad_between_seqs=False), core(*inputs, **call))


def test_lengths_that_are_none_are_refused(te):
    core = te.DotProductAttention(HEADS, DIM, qkv_format="thd", attn_mask_type="padding")
    inputs = [x[0] for x in drawn(1, 8, 8, groups=HEADS)]
    good = ends((3, 5))
    for lengths, message in (
        (torch.tensor([1, 8]).int(), r"cu_seqlens_q=\[1, 8\]: cumulative lengths begin with 0"),
        (torch.tensor([0, 5, 3]).int(), "do not fall"),
        (good.float(), r"cu_seqlens_q is torch.float32 \[3\]"),
        (ends((3, 6)), "end at token 9, and there are 8"),
        (ends((3, 2, 3)), "cu_seqlens_q is of 3 sequences, and cu_seqlens_kv of 2"),
    ):
        with pytest.raises(InputError, match=message):
            core(*inputs, cu_seqlens_q=lengths, cu_seqlens_kv=good)
    with pytest.raises(InputError, match=r"sequence 0 has 3 tokens, .*cu_seqlens_q_padded .*2"):
        core(*inputs, cu_seqlens_q=good, cu_seqlens_kv=good, cu_seqlens_q_padded=ends((2, 6)), cu_seqlens_kv_padded=good)
    with pytest.raises(InputError, match="'causal' with packed sequences"):
        core(*inputs, cu_seqlens_q=good, cu_seqlens_kv=good, attn_mask_type="causal")
    first = torch.tensor([[True, False, False], [False, False, True]])[:, None, None]
    biased = te.DotProductAttention(HEADS, DIM, qkv_format="bshd", softmax_type="off-by-one")
    with pytest.raises(InputError, match="padding in front of tokens"):
        biased(*drawn(2, 3, 3, groups=HEADS), first, attn_mask_type="padding")


def written(tensor, value):
    """By a way that autograd's version of the tensor does not show."""
    tensor.data.copy_(value)


@pytest.mark.parametrize("write", [torch.Tensor.copy_, written], ids=["copy_", ".data"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_lengths_written_between_calls_are_those_of_each_forward(te, write, again, cap):
    core = te.DotProductAttention(HEADS, DIM, qkv_format="bshd", attn_mask_type="padding", softcap=cap)
    lengths, mask = ends((2, 3)), (torch.arange(4) >= torch.tensor([[2], [3]]))[:, None, None]
    other, other_mask = ends((3, 4)), (torch.arange(4) >= torch.tensor([[3], [4]]))[:, None, None]
    for tensor, changed, call in (
        (lengths, other, {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}),
        (mask, other_mask, {"attention_mask": mask}),
    ):
        inputs = drawn(2, 4, 4, groups=HEADS)
        first = core(*inputs, **call, checkpoint_core_attention=again)
        write(tensor, changed)
        assert not first[0, 2:].any()
        first.sum().backward()  # of the lengths of its forward
        assert not inputs[2].grad[0, 2:].any()
        assert inputs[2].grad[0, :2].any()
        assert core(*inputs, **call, checkpoint_core_attention=again)[0, 2].any()
