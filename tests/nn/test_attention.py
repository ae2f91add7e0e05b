"""Attention and whole transformer layers outside FP8 beside float64 by hand, and the layout of the joint qkv matrix."""

import plain
import pytest
import torch

import octavo
from octavo.errors import InputError
from octavo.kernels.attention.cached import caching
from octavo.nn import attention
from octavo.nn.attention import merge_qkv, split_qkv
from octavo.nn.mlp import deinterleave
from octavo.nn.norm import L2Normalization

HEADS = [(4, 4), (4, 2), (4, 1), (6, 3)]


@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize("tail", [(), (5,)])
def test_merge_and_split_are_inverse(heads, groups, tail):
    q, k, v = (plain.fresh(n * 6, *tail, seed=n) for n in (heads, groups, groups))
    joint = merge_qkv(q, k, v, groups)
    assert joint.shape == ((heads + 2 * groups) * 6, *tail)
    for part, wanted in zip(split_qkv(joint, heads, groups), (q, k, v), strict=True):
        assert torch.equal(part, wanted)
    assert torch.equal(merge_qkv(*split_qkv(joint, heads, groups), groups), joint)


def test_rows_are_grouped_by_key_value_head():
    q, k, v = torch.arange(8), 100 + torch.arange(4), 200 + torch.arange(4)  # 4 heads, 2 groups, head dimension 2
    assert merge_qkv(q, k, v, 2).tolist() == [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]


@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("masked", [False, True])
def test_dot_product_attention(heads, groups, scale, masked):
    allowed = plain.causal(7)
    if masked:
        random = torch.rand(2, 7, 7, generator=torch.Generator().manual_seed(4)) < 0.5
        allowed = random | torch.eye(7, dtype=torch.bool)
    module = octavo.nn.DotProductAttention(heads, 6, groups, softmax_scale=scale)

    class WithMask(torch.nn.Module):
        def forward(self, q, k, v):
            return module(q, k, v, allowed[:, None] if masked else None)

    by_hand = lambda p, q, k, v: plain.attention(q, k, v, allowed, scale)  # noqa: E731
    inputs = [plain.fresh(2, 7, n, 6, seed=i) for i, n in enumerate((heads, groups, groups))]
    plain.assert_equals_float64(WithMask(), by_hand, *inputs)


def test_attention_dropout_applies_in_training_only():
    module = octavo.nn.DotProductAttention(2, 8, attention_dropout=0.5)
    q, k, v = (plain.fresh(1, 64, 2, 8, seed=i) for i in range(3))
    wanted = octavo.nn.DotProductAttention(2, 8)(q, k, v)
    torch.manual_seed(0)
    dropped = torch.stack([module(q, k, v) for _ in range(400)])
    assert not torch.equal(dropped[0], wanted)
    torch.testing.assert_close(dropped.mean(0), wanted, rtol=0, atol=0.4)
    assert torch.equal(module.eval()(q, k, v), wanted)


def test_other_numbers_of_queries_and_keys_are_for_full_attention_alone():
    q, k, v = torch.randn(2, 6, 2, 8), torch.randn(2, 4, 2, 8), torch.randn(2, 4, 2, 8)
    for window in (None, (1, 0)):
        with pytest.raises(InputError, match="causal attention of 6 queries over 4 keys"):
            octavo.nn.DotProductAttention(2, 8, window_size=window)(q, k, v)
    layer = octavo.nn.DotProductAttention(2, 8, attn_mask_type="no_mask")
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
    wanted = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v).flatten(2)
    torch.testing.assert_close(layer(q, k, v), wanted)
    with caching()[0]:  # of a block that is recomputed in part
        torch.testing.assert_close(layer(q, k, v), wanted)


def test_heads_that_cannot_share_are_refused():
    with pytest.raises(InputError, match="4 attention heads cannot share 3"):
        octavo.nn.DotProductAttention(4, 8, 3)


def attention_by_hand(p, x, layer, kind, cos, sin, allowed, prefix=""):
    normed = plain.norm(
        kind, x, p[f"{prefix}layernorm_qkv.layer_norm_weight"], p.get(f"{prefix}layernorm_qkv.layer_norm_bias"), 1e-5
    )
    heads, groups, dim = layer.heads, layer.groups, layer.head_dim
    weights = split_qkv(p[f"{prefix}layernorm_qkv.weight"], heads, groups)
    bias = p.get(f"{prefix}layernorm_qkv.bias")
    biases = (None, None, None) if bias is None else split_qkv(bias, heads, groups)
    q, k, v = (plain.linear(normed, w, b).unflatten(-1, (-1, dim)) for w, b in zip(weights, biases, strict=True))

    def normed_heads(name, x):
        if layer.q_norm is None:
            return x
        if isinstance(layer.q_norm, L2Normalization):
            return x / (x.square().sum(-1, keepdim=True) + layer.q_norm.eps).sqrt()
        of = layer.q_norm.normalization
        return plain.norm(of, x, p[f"{prefix}{name}.weight"], p.get(f"{prefix}{name}.bias"), layer.q_norm.eps)

    if layer.norm_first:
        q, k = normed_heads("q_norm", q), normed_heads("k_norm", k)
    if cos is not None:
        q, k = plain.rotate(q, cos, sin), plain.rotate(k, cos, sin)
    if not layer.norm_first:
        q, k = normed_heads("q_norm", q), normed_heads("k_norm", k)
    return plain.linear(plain.attention(q, k, v, allowed), p[f"{prefix}proj.weight"], p.get(f"{prefix}proj.bias"))


@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("rotary", [6, 4, 0])
def test_multihead_attention(heads, groups, kind, rotary):
    layer = plain.randomise(octavo.nn.MultiheadAttention(16, heads, 6, num_gqa_groups=groups, normalization=kind))
    check_multihead_attention(layer, kind, rotary)


@pytest.mark.parametrize("first", [False, True], ids=["behind the rotation", "in front of it"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "L2Normalization"])
@pytest.mark.parametrize("rotary", [6, 4, 0])
def test_queries_and_keys_may_be_normed(kind, first, rotary):
    norm = {"qk_norm_type": kind, "qk_norm_eps": 1e-3, "qk_norm_before_rope": first}
    layer = plain.randomise(octavo.nn.MultiheadAttention(16, 4, 6, num_gqa_groups=2, **norm))
    # The same addend to every key changes no softmax: the bias of their norm has no gradient behind the rotation.
    check_multihead_attention(layer, "LayerNorm", rotary, zero=1e-5)


def test_another_norm_of_queries_and_keys_is_refused():
    for layer in (octavo.nn.MultiheadAttention, octavo.nn.TransformerLayer):
        with pytest.raises(InputError, match=r"unknown qk_norm_type 'L2Norm'. .*Known: L2Normalization, LayerNorm, RMSNorm"):
            layer(16, 4, 4, qk_norm_type="L2Norm")


def test_short_sequences_of_normed_queries_take_the_long_way(monkeypatch):
    calls = calls_of_the_short_kernel(monkeypatch)
    layer = octavo.nn.MultiheadAttention(16, 2, attn_mask_type="no_mask", qk_norm_type="RMSNorm").bfloat16()
    layer(plain.fresh(2, 9, 16).bfloat16())
    assert calls == []


def check_multihead_attention(layer, kind, rotary, **how):
    """Output and every gradient, with so many columns of each head rotated."""
    cos, sin = plain.angles(2, 9, rotary) if rotary else (None, None)

    class Rotated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def forward(self, x):
            return layer(x, None, (cos.float(), sin.float()) if rotary else None)

    def by_hand(p, x):
        return attention_by_hand(p, x, layer, kind, cos, sin, plain.causal(9), "inner.")

    plain.assert_equals_float64(Rotated(), by_hand, plain.fresh(2, 9, 16), **how)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (8, 2)])
def test_slices_of_whole_groups_are_working_attention_layers(heads, groups, degree):
    whole = plain.randomise(
        octavo.nn.MultiheadAttention(16, heads, 6, num_gqa_groups=groups, normalization="RMSNorm", proj_bias=False)
    )
    rotary = tuple(a.float() for a in plain.angles(2, 9, 6))
    x = plain.fresh(2, 9, 16)
    total = torch.zeros_like(x)
    for rank in range(degree):
        shard = octavo.nn.MultiheadAttention(
            16, heads // degree, 6, num_gqa_groups=groups // degree, normalization="RMSNorm", proj_bias=False
        )
        with torch.no_grad():
            shard.layernorm_qkv.layer_norm_weight.copy_(whole.layernorm_qkv.layer_norm_weight)
            shard.layernorm_qkv.weight.copy_(whole.layernorm_qkv.weight.chunk(degree)[rank])
            shard.layernorm_qkv.bias.copy_(whole.layernorm_qkv.bias.chunk(degree)[rank])
            shard.proj.weight.copy_(whole.proj.weight.chunk(degree, 1)[rank])
        total += shard(x, None, rotary)
    torch.testing.assert_close(total, whole(x, None, rotary), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("activation", ["gelu_exact", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("documents", [False, True])
def test_transformer_layer(kind, activation, bias, documents):
    layer = octavo.nn.TransformerLayer(16, 20, 4, 2, normalization=kind, activation=activation, bias=bias)
    plain.randomise(layer)
    cos, sin = plain.angles(2, 9, 4)
    allowed = plain.causal(9)
    if documents:
        number = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
        allowed = allowed & (number[:, None] == number)[None]

    class Called(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def forward(self, x):
            mask = allowed[:, None].expand(2, 1, 9, 9) if documents else None
            return layer(x, mask, (cos.float(), sin.float()))

    def by_hand(p, x):
        x = x + attention_by_hand(p, x, layer.self_attention, kind, cos, sin, allowed, "inner.self_attention.")
        p = {name.removeprefix("inner.layernorm_mlp."): value for name, value in p.items()}
        normed = plain.norm(kind, x, p["layer_norm_weight"], p.get("layer_norm_bias"), 1e-5)
        hidden = plain.linear(normed, p["fc1_weight"], p.get("fc1_bias"))
        if activation == "gelu_exact":
            hidden = plain.gelu(hidden)
        else:
            gate, up = deinterleave(hidden.movedim(-1, 0))
            hidden = (plain.silu(gate) * up).movedim(0, -1)
        return x + plain.linear(hidden, p["fc2_weight"], p.get("fc2_bias"))

    plain.assert_equals_float64(Called(), by_hand, plain.fresh(2, 9, 16), tolerance=5e-5)


def test_the_residual_keeps_the_dtype_of_the_input():
    layer = octavo.nn.TransformerLayer(16, 20, 4, params_dtype=torch.float32)
    assert layer(plain.fresh(2, 9, 16).bfloat16()).dtype == torch.bfloat16
    assert layer(plain.fresh(2, 9, 16)).dtype == torch.float32


def attended(layer, x, cotangent, **how):
    """The result and gradients of one call."""
    x = x.clone().requires_grad_()
    y = layer(x, **how)
    gradients = torch.autograd.grad(y, (x, *layer.parameters()), cotangent)
    return y.detach(), *gradients


def calls_of_the_short_kernel(monkeypatch):
    calls, inner = [], attention.short_attention
    monkeypatch.setattr(attention, "short_attention", lambda qkv, *how: calls.append(qkv.shape[1]) or inner(qkv, *how))
    return calls


@pytest.mark.parametrize("sequence_first", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("recipe", [None, octavo.recipe.CurrentScaling()], ids=["bf16", "fp8"])
def test_short_sequences_without_rotation_give_what_long_ones_do(recipe, groups, sequence_first, monkeypatch):
    calls = calls_of_the_short_kernel(monkeypatch)
    layer = octavo.nn.MultiheadAttention(
        64, 4, num_gqa_groups=groups, attn_mask_type="no_mask", qkv_format="sbhd" if sequence_first else "bshd"
    ).bfloat16()
    x, cotangent = (plain.fresh(3, 9, 64, seed=seed).bfloat16() for seed in (1, 2))
    if sequence_first:
        x, cotangent = x.transpose(0, 1), cotangent.transpose(0, 1)
    found = []
    for longest in (512, 0):
        monkeypatch.setattr(attention.short, "LONGEST", longest)
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            found.append(attended(layer, x, cotangent))
    assert calls == [9]
    for short, long in zip(*found, strict=True):
        assert short.shape == long.shape
        assert (short.float() - long.float()).norm() <= (0.02 if recipe is None else 0.08) * long.float().norm()


@pytest.mark.parametrize("why", ["causal", "mask", "rotation", "dropout", "float32", "too long", "empty"])
def test_what_the_short_kernel_does_not_take_goes_to_pytorch(why, monkeypatch):
    calls = calls_of_the_short_kernel(monkeypatch)
    layer = octavo.nn.MultiheadAttention(
        32, 2, attn_mask_type="causal" if why == "causal" else "no_mask", attention_dropout=0.1 * (why == "dropout")
    ).to(torch.float32 if why == "float32" else torch.bfloat16)
    x = torch.randn(0 if why == "empty" else 1, 513 if why == "too long" else 5, 32).to(layer.proj.weight.dtype)
    angles = tuple(torch.randn(1, 5, 16) for _ in range(2)) if why == "rotation" else None
    assert layer(x, torch.ones(1, 1, 5, 5, dtype=torch.bool) if why == "mask" else None, angles).shape == x.shape
    assert not calls


def test_the_kernel_depends_on_the_shape_alone(monkeypatch):
    calls = calls_of_the_short_kernel(monkeypatch)
    layer = octavo.nn.MultiheadAttention(32, 2, attn_mask_type="no_mask").bfloat16()
    for tokens in (3, 4, 5, 6, 7, 8, 3, 513):
        layer(torch.randn(1, tokens, 32).bfloat16())
    assert calls == [3, 4, 5, 6, 7, 8, 3]


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_scale_that_short_attention_refuses(scale):
    layer = octavo.nn.MultiheadAttention(32, 2, attn_mask_type="no_mask").bfloat16()
    layer.core_attention.softmax_scale = scale
    with pytest.raises(octavo.errors.InputError, match=f"softmax_scale = {scale}: .* above 0"):
        layer(torch.randn(1, 3, 32).bfloat16())


@pytest.mark.parametrize("order", ["bshd", "sbhd"])
@pytest.mark.parametrize(
    ("key", "value"),
    [((2, 5, 3, 8), (2, 5, 3, 8)), ((1, 5, 4, 8), (1, 5, 4, 8)), ((2, 5, 4, 8), (2, 4, 4, 8)), ((2, 5, 4, 6), (2, 5, 4, 6)),
     ((2, 5, 4, 8), (2, 5, 2, 8)), ((2, 5, 8), (2, 5, 8))],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(order, key, value):
    """Some of PyTorch's kernels compute them all the same."""
    inputs = [torch.randn(shape) for shape in ((2, 5, 4, 8), key, value)]
    inputs = [x.transpose(0, 1) for x in inputs] if order == "sbhd" else inputs
    layer = attention.DotProductAttention(4, 8, qkv_format=order)
    for kind in ("causal", "no_mask"):
        with pytest.raises(InputError, match=r"query, key and value are .*: give query \["):
            layer(*inputs, attn_mask_type=kind)
