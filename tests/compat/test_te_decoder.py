"""Transformer Engine's attention layers beside float64: cross-attention, decoders, packed sequences, rotations."""

import itertools

import plain
import pytest
import te_attention_by_hand as by_hand
import te_by_hand
import torch

from octavo.errors import InputError
from octavo.fp8.scaling import states_of

HIDDEN, HEADS, GROUPS, DIM = 32, 4, 2, 8
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
Q_LENGTHS, KV_LENGTHS = (5, 0, 2), (3, 2, 4)


def ends(lengths, gap=0):
    return torch.tensor([0, *(torch.tensor(lengths).cumsum(0) + gap * torch.arange(1, len(lengths) + 1)).tolist()]).int()


class Called(torch.nn.Module):
    """A layer with the arguments of its call."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = plain.randomise(layer), call

    def forward(self, *inputs):
        return self.call(self.layer, *inputs)


def check(layer, call, wanted, *inputs, zero=2e-6):
    """Output and every gradient of call(layer, *inputs) beside wanted(parameters, *inputs) in float64.

    zero: the rounding of a key bias's gradient, which a softmax does not see.
    """

    def exact(parameters, *inputs):
        return wanted({name.removeprefix("layer."): value for name, value in parameters.items()}, *inputs)

    plain.assert_equals_float64(Called(layer, call), exact, *inputs, zero=zero)


def batched(x, order):
    """Hidden states as [B, T, hidden]."""
    return x[None] if order == "thd" else x.transpose(0, 1) if order == "sbhd" else x


def inputs_of(order, gap=0):
    """Hidden states of a decoder and of an encoder, sequences as (sample, queries, keys), and the arguments of a call."""
    q_ends, kv_ends = ends(Q_LENGTHS), ends(KV_LENGTHS)
    lengths = {"cu_seqlens_q": q_ends, "cu_seqlens_kv": kv_ends}
    if order != "thd":
        shapes = [(6, 3, HIDDEN) if order == "sbhd" else (3, 6, HIDDEN)] * 2
        sequences = [(n, 0, q, 0, k) for n, (q, k) in enumerate(zip(Q_LENGTHS, KV_LENGTHS, strict=True))]
        return [plain.fresh(*shape, seed=n) for n, shape in enumerate(shapes)], sequences, lengths
    q_padded, kv_padded = ends(Q_LENGTHS, gap), ends(KV_LENGTHS, gap)
    if gap:
        lengths |= {"cu_seqlens_q_padded": q_padded, "cu_seqlens_kv_padded": kv_padded}
    at = zip(q_padded.tolist(), Q_LENGTHS, kv_padded.tolist(), KV_LENGTHS, strict=False)
    sequences = [(0, q, q + n, k, k + m) for q, n, k, m in at]
    return [plain.fresh(int(x[-1]) + 1, HIDDEN, seed=n) for n, x in enumerate((q_padded, kv_padded))], sequences, lengths


ROWS = {"parts": {}, "grouped": {"fuse_qkv_params": True}, "blocks": {"fuse_qkv_params": True, "qkv_weight_interleaved": False}}
"""Three parameters, one by key-value head, one of queries, keys and values in turn."""


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("order", ["sbhd", "bshd", "thd"])
def test_cross_attention(te, rows, norm, order):
    layer = te.MultiheadAttention(
        HIDDEN, HEADS, num_gqa_groups=GROUPS, attention_dropout=0.0, attention_type="cross", input_layernorm=norm,
        qkv_format=order, attn_mask_type="padding", softmax_type="learnable", **ROWS[rows],
    )  # fmt: skip
    assert isinstance(layer, te.MultiheadAttention)
    inputs, sequences, lengths = inputs_of(order, gap=2)

    def wanted(p, x, encoded):
        x, encoded = batched(x, order), batched(encoded, order)
        made = by_hand.mha(
            p, x, "", sequences, heads=HEADS, groups=GROUPS, norm=norm, grouped=rows == "grouped", encoded=encoded,
            kind="padding",
        )  # fmt: skip
        return made[0] if order == "thd" else made.transpose(0, 1) if order == "sbhd" else made

    check(layer, lambda m, x, e: m(x, encoder_output=e, **lengths), wanted, *inputs)


def test_parameters_of_cross_attention_have_transformer_engines_names_and_order(te):
    proj = ["proj.weight", "proj.bias"]
    keys = ["key_value.key_weight", "key_value.value_weight", "key_value.key_bias", "key_value.value_bias"]
    norm = ["layernorm_query.layer_norm_weight", "layernorm_query.layer_norm_bias"]
    for arguments, expected in (
        ({}, ["query_layer.weight", "query_layer.bias", *keys]),
        ({"input_layernorm": True}, [*norm, "layernorm_query.query_weight", "layernorm_query.query_bias", *keys]),
        ({"fuse_qkv_params": True}, ["query_layer.weight", "query_layer.bias", "key_value.weight", "key_value.bias"]),
    ):
        layer = te.MultiheadAttention(HIDDEN, HEADS, attention_type="cross", **arguments)
        assert [name for name, _ in layer.named_parameters()] == [*expected, *proj]
    decoder = te.TransformerLayer(HIDDEN, 64, HEADS, layer_type="decoder", qk_norm_type="RMSNorm", softmax_type="learnable")
    parts = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in decoder.named_parameters()))
    own = ["q_norm", "k_norm", "layernorm_qkv", "core_attention", "proj"]
    inter = ["q_norm", "k_norm", "layernorm_query", "key_value", "core_attention", "proj"]
    assert parts == [*(f"self_attention.{x}" for x in own), *(f"inter_attention.{x}" for x in inter), "layernorm_mlp"]
    assert decoder.inter_attention.key_value.key_weight.std().item() == pytest.approx(0.023, rel=0.15)


@pytest.mark.parametrize("order", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("post", [False, True], ids=["before the norm", "behind it"])
def test_decoders(te, order, post):
    layer = te.TransformerLayer(
        HIDDEN, 48, HEADS, GROUPS, layer_type="decoder", self_attn_mask_type="padding_causal", enc_dec_attn_mask_type="padding",
        attn_input_format=order, apply_residual_connection_post_layernorm=post, **QUIET,
    )  # fmt: skip
    inputs, sequences, lengths = inputs_of(order)
    own = [(n, a, b, a, b) for n, a, b, *_ in sequences]

    def wanted(p, x, encoded):
        x, encoded = batched(x, order), batched(encoded, order)
        how = {"heads": HEADS, "groups": GROUPS, "norm": True}

        def normed(x, at):
            return plain.norm("LayerNorm", x, p[f"{at}layer_norm_weight"], p[f"{at}layer_norm_bias"], 1e-5)

        stream = normed(x, "self_attention.layernorm_qkv.") if post else x
        x = stream + by_hand.mha(p, x, "self_attention.", own, kind="padding_causal", **how)
        stream = normed(x, "inter_attention.layernorm_query.") if post else x
        x = stream + by_hand.mha(p, x, "inter_attention.", sequences, kind="padding", grouped=False, encoded=encoded, **how)
        y = normed(x, "layernorm_mlp.")
        hidden = te_by_hand.activated(te_by_hand.linear(p, y, "layernorm_mlp.fc1_"), "gelu")
        x = (y if post else x) + te_by_hand.linear(p, hidden, "layernorm_mlp.fc2_")
        return x[0] if order == "thd" else x.transpose(0, 1) if order == "sbhd" else x

    check(layer, lambda m, x, e: m(x, encoder_output=e, **lengths), wanted, *inputs, zero=1e-4)


def test_masks_and_windows_of_a_decoders_two_attentions_are_apart(te):
    layer = te.TransformerLayer(
        HIDDEN, 48, HEADS, layer_type="decoder", attn_input_format="bshd", enc_dec_attn_mask_type="causal_bottom_right", **QUIET
    )
    x, encoded = plain.fresh(2, 4, HIDDEN), plain.fresh(2, 7, HIDDEN, seed=1)
    other = encoded.clone()
    other[:, 6] += 1  # the last key: of the last query alone
    changed = (layer(x, encoder_output=encoded) != layer(x, encoder_output=other)).any(-1)
    assert changed.tolist() == [[False, False, False, True]] * 2
    changed = [
        (layer(x, encoder_output=encoded, **call) != layer(x, encoder_output=other, **call)).any(-1)[0].tolist()
        for call in (
            {"enc_dec_attn_mask_type": "no_mask"},
            {"enc_dec_window_size": (0, 0)},
            {"enc_dec_attn_mask_type": "causal"},
        )
    ]
    assert changed == [[True] * 4, [False] * 3 + [True], [False] * 4]
    mask = torch.zeros(1, 1, 4, 7, dtype=torch.bool)
    mask[..., 6] = True
    call = {"enc_dec_attn_mask": mask, "enc_dec_attn_mask_type": "arbitrary"}
    assert torch.equal(layer(x, encoder_output=encoded, **call), layer(x, encoder_output=other, **call))
    later = x.clone()
    later[:, 3] += 1
    assert torch.equal(layer(x, encoder_output=encoded)[:, :3], layer(later, encoder_output=encoded)[:, :3])  # causal


@pytest.mark.parametrize("again", [False, True])
def test_a_decoder_in_fp8_and_its_state(te, again):
    def build():
        torch.manual_seed(0)
        return te.TransformerLayer(HIDDEN, 64, HEADS, layer_type="decoder", **QUIET)

    def step(layer):
        x, encoded = plain.fresh(5, 2, HIDDEN).requires_grad_(), plain.fresh(7, 2, HIDDEN, seed=1).requires_grad_()
        with te.fp8_autocast():
            y = layer(x, encoder_output=encoded, checkpoint_core_attention=again)
        y.square().sum().backward()
        return y, x.grad, encoded.grad

    layer, other = build(), build()
    step(layer), step(layer)
    names = [name for name, _ in states_of(layer)]
    assert {"inter_attention.layernorm_query", "inter_attention.key_value", "inter_attention.proj"} <= set(names)
    other.load_state_dict(layer.state_dict())
    for one, two in zip(step(layer), step(other), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("attention_type", ["self", "cross"])
@pytest.mark.parametrize("rows", ["grouped", "blocks"])
def test_state_dicts_of_one_and_of_several_parameters_load(te, attention_type, rows):
    make = {"attention_type": attention_type, "num_gqa_groups": GROUPS, "input_layernorm": True, "attention_dropout": 0.0}
    order = {"qkv_weight_interleaved": rows == "grouped"}
    layers = [te.MultiheadAttention(HIDDEN, HEADS, fuse_qkv_params=one, **make, **order) for one in (True, False, True)]
    plain.randomise(layers[0])
    x, encoded = plain.fresh(4, 2, HIDDEN), plain.fresh(6, 2, HIDDEN, seed=1)
    call = {"encoder_output": encoded} if attention_type == "cross" else {}
    for before, after in itertools.pairwise(layers):
        after.load_state_dict(before.state_dict())
        torch.testing.assert_close(after(x, **call), layers[0](x, **call))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("order", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_rotations_in_layers(te, interleaved, rows, order, percent):
    layer = te.MultiheadAttention(
        HIDDEN, HEADS, num_gqa_groups=GROUPS, attention_dropout=0.0, qkv_format=order, rotary_pos_interleaved=interleaved,
        **ROWS[rows],
    )  # fmt: skip
    angles = te.RotaryPositionEmbedding(DIM, percent, interleaved=interleaved)(9)
    inputs, sequences, lengths = inputs_of(order, gap=1)
    packed = order == "thd"
    own = [(n, a, b, a, b) for n, a, b, *_ in sequences] if packed else [(n, 0, 6, 0, 6) for n in range(3)]
    call = {"attn_mask_type": "padding_causal"} if packed else {}
    call |= {name: value for name, value in lengths.items() if packed and "_q" in name}

    def rotate(x, at):
        columns, out = int(DIM * percent), x.clone()
        for sample, first, end in at:
            turned = by_hand.turned(x[sample, first:end], torch.arange(end - first), interleaved=interleaved, columns=columns)
            out = out.index_put((torch.tensor(sample), torch.arange(first, end)), turned)
        return out

    def wanted(p, x):
        how = {"heads": HEADS, "groups": GROUPS, "norm": False, "grouped": rows == "grouped", "rotate": rotate}
        made = by_hand.mha(p, batched(x, order), "", own, **how)
        return made[0] if packed else made.transpose(0, 1) if order == "sbhd" else made

    check(layer, lambda m, x: m(x, rotary_pos_emb=angles, **call), wanted, inputs[0])


def test_angles_of_queries_and_of_keys(te):
    layer = te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, attention_type="cross", attn_mask_type="no_mask")
    embedding = te.RotaryPositionEmbedding(DIM)
    angles = embedding(5, offset=3), embedding(7)
    inputs = plain.fresh(5, 2, HIDDEN), plain.fresh(7, 2, HIDDEN, seed=1)
    sequences = [(n, 0, 5, 0, 7) for n in range(2)]

    def rotate(x, at):
        first = 3 if x.shape[1] == 5 else 0
        parts = [by_hand.turned(one, torch.arange(first, first + x.shape[1]), interleaved=False, columns=DIM) for one in x]
        return torch.stack(parts)

    def wanted(p, x, encoded):
        how = {"heads": HEADS, "groups": HEADS, "norm": False, "grouped": False, "kind": "no_mask", "rotate": rotate}
        return by_hand.mha(p, x.transpose(0, 1), "", sequences, encoded=encoded.transpose(0, 1), **how).transpose(0, 1)

    check(layer, lambda m, x, e: m(x, encoder_output=e, rotary_pos_emb=angles), wanted, *inputs)
    alike = te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0)
    x = inputs[0]
    one, two = embedding(5), embedding(5)
    assert torch.equal(alike(x, rotary_pos_emb=(one, one)), alike(x, rotary_pos_emb=one))
    torch.testing.assert_close(alike(x, rotary_pos_emb=(one, two)), alike(x, rotary_pos_emb=one))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_a_packed_layer_is_its_sequences_one_by_one(te, parallel, rotated):
    make = {"parallel_attention_mlp": parallel, **QUIET}
    layers = [te.TransformerLayer(HIDDEN, 48, HEADS, attn_input_format=order, **make) for order in ("thd", "sbhd")]
    layers[1].load_state_dict(layers[0].state_dict())
    angles = te.RotaryPositionEmbedding(DIM)(9) if rotated else None
    lengths, (x, _) = ends(Q_LENGTHS), inputs_of("thd")[0]
    call = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "max_seqlen_q": 5, "max_seqlen_kv": 5}
    found = layers[0](x, self_attn_mask_type="padding_causal", rotary_pos_emb=angles, **call)
    assert found.shape == x.shape
    for first, end in itertools.pairwise(lengths.tolist()):
        if end > first:
            alone = layers[1](x[first:end, None], rotary_pos_emb=angles)
            torch.testing.assert_close(found[first:end], alone[:, 0])


def test_alibi_and_biases_reach_the_attention_of_a_layer(te):
    layer = te.TransformerLayer(HIDDEN, 48, HEADS, attn_input_format="bshd", **QUIET)
    x = plain.fresh(2, 5, HIDDEN)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    bias = -slopes[None, :, None, None] * distance
    alibi = layer(x, core_attention_bias_type="alibi")
    given = layer(x, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    torch.testing.assert_close(alibi, given)
    assert not torch.allclose(alibi, layer(x))


def test_refused_by_name(te):
    x = plain.fresh(3, 2, HIDDEN)
    decoder = te.TransformerLayer(HIDDEN, 48, HEADS, layer_type="decoder")
    with pytest.raises(InputError, match="cross-attention needs encoder_output"):
        decoder(x)
    for name in ("encoder_output", "enc_dec_attn_mask"):
        with pytest.raises(InputError, match=rf"{name} .*layer_type='encoder'.* Pass layer_type='decoder'"):
            te.TransformerLayer(HIDDEN, 48, HEADS)(x, **{name: x})
    with pytest.raises(InputError, match=r"encoder_output .*attention_type='self'.* Pass attention_type='cross'"):
        te.MultiheadAttention(HIDDEN, HEADS)(x, encoder_output=x)
    with pytest.raises(InputError, match=r"give a bool tensor, .* or cu_seqlens_q and cu_seqlens_kv"):
        te.MultiheadAttention(HIDDEN, HEADS)(x, attn_mask_type="padding")
    with pytest.raises(InputError, match="layer_type='decoder', parallel_attention_mlp=True"):
        te.TransformerLayer(HIDDEN, 48, HEADS, layer_type="decoder", parallel_attention_mlp=True)
    for name, layer in (("MultiheadAttention", te.MultiheadAttention(HIDDEN, HEADS)), ("TransformerLayer", decoder)):
        with pytest.raises(InputError, match=rf"{name}.forward\(inference_params=1\)"):
            layer(x, inference_params=1, encoder_output=x if layer is decoder else None)
    packed = te.MultiheadAttention(HIDDEN, HEADS, qkv_format="thd", attn_mask_type="padding")
    with pytest.raises(InputError, match="no cu_seqlens_q and cu_seqlens_kv"):
        packed(x[:, 0])
    with pytest.raises(InputError, match="angles cover 4 positions: a token has position 4"):
        packed(plain.fresh(5, HIDDEN), cu_seqlens_q=ends((5,)), rotary_pos_emb=te.RotaryPositionEmbedding(DIM)(4))
    packed_rows = plain.fresh(7, HIDDEN)
    with pytest.raises(InputError, match=r"table of shape \[1, 5, 8\]: give \(cos, sin\), each \[1 or 1, 7, 8\]"):
        packed(packed_rows, cu_seqlens_q=ends((5,)), rotary_pos_emb=(torch.rand(1, 5, DIM), torch.rand(1, 5, DIM)))
    with pytest.raises(InputError, match="max_seqlen_q=4, and the longest sequence has 5"):
        packed(packed_rows, cu_seqlens_q=ends((5,)), max_seqlen_q=4)
    encoded = plain.fresh(5, 2, HIDDEN)
    with pytest.raises(InputError, match="max_seqlen_kv=4, and the longest sequence has 5"):
        decoder(x, encoder_output=encoded, max_seqlen_q=3, max_seqlen_kv=4)
    with pytest.raises(InputError, match=r"are \[2, 3, 4, 8\], \[1, 5, 4, 8\]"):
        decoder(x, encoder_output=encoded[:, :1])
    for rotary in ("x", (torch.rand(9, 1, 1, DIM),), 3):
        for interleaved in (False, True):
            layer = te.MultiheadAttention(HIDDEN, HEADS, rotary_pos_interleaved=interleaved)
            with pytest.raises(InputError, match=r"rotary_pos_emb is|rotary angles are"):
                layer(x, rotary_pos_emb=rotary)


def test_angles_of_padded_places_that_end_behind_the_tokens(te):
    """The last place has no padding, and its end says otherwise: a sequence fits all the same."""
    layer = te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal")
    x, angles = plain.fresh(7, HIDDEN), te.RotaryPositionEmbedding(DIM)(9)
    call = {"cu_seqlens_q": ends((3, 3)), "rotary_pos_emb": angles}
    wide = layer(torch.cat((x, x[:1])), cu_seqlens_q_padded=ends((4, 4)), **call)
    torch.testing.assert_close(layer(x, cu_seqlens_q_padded=ends((4, 4)), **call), wide[:7])
