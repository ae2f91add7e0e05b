"""Attention and whole transformer layers outside FP8 beside float64 by hand, and the layout of the joint qkv matrix.

And short attention, which is one function with the norm and the product in front, beside the same in pieces.
"""

import plain
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.errors import InputError
from octavo.fp8.scaling import state_records
from octavo.kernels.attention import short_attention
from octavo.nn import attention
from octavo.nn.attention import merge_qkv, split_qkv
from octavo.nn.fused import Rotation
from octavo.nn.mlp import deinterleave

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
    if cos is not None:
        q, k = plain.rotate(q, cos, sin), plain.rotate(k, cos, sin)
    return plain.linear(plain.attention(q, k, v, allowed), p[f"{prefix}proj.weight"], p.get(f"{prefix}proj.bias"))


@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("rotary", [True, False])
def test_multihead_attention(heads, groups, kind, rotary):
    layer = plain.randomise(octavo.nn.MultiheadAttention(16, heads, 6, num_gqa_groups=groups, normalization=kind))
    cos, sin = plain.angles(2, 9, 6) if rotary else (None, None)

    class Rotated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def forward(self, x):
            return layer(x, None, (cos.float(), sin.float()) if rotary else None)

    def by_hand(p, x):
        return attention_by_hand(p, x, layer, kind, cos, sin, plain.causal(9), "inner.")

    plain.assert_equals_float64(Rotated(), by_hand, plain.fresh(2, 9, 16))


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
    calls = []
    monkeypatch.setattr(attention, "_lengths", set())
    inner = attention.short.forward
    monkeypatch.setattr(attention.short, "forward", lambda qkv, *how: calls.append(qkv.shape[1]) or inner(qkv, *how))
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
    for most in (4, 0):
        monkeypatch.setattr(attention, "MOST_LENGTHS", most)
        attention._lengths.clear()
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


def test_a_process_compiles_few_lengths(monkeypatch):
    calls = calls_of_the_short_kernel(monkeypatch)
    layer = octavo.nn.MultiheadAttention(32, 2, attn_mask_type="no_mask").bfloat16()
    for tokens in (3, 4, 5, 6, 7, 8, 3, 6):
        layer(torch.randn(1, tokens, 32).bfloat16())
    assert calls == [3, 4, 5, 6, 3, 6]


RECIPES = {
    "none": None,
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=3),
    "current": octavo.recipe.CurrentScaling(),
    "rowwise": octavo.recipe.RowwiseScaling(),
    "block": octavo.recipe.BlockScaling(),
}


def short_layer(groups=2, bias=True, dtype=torch.bfloat16, kind="LayerNorm", seed=0):
    torch.manual_seed(seed)
    return octavo.nn.MultiheadAttention(
        64, 4, num_gqa_groups=groups, attn_mask_type="no_mask", bias=bias, normalization=kind, params_dtype=dtype
    )


def whole(layer, stream):
    return layer(stream)


def in_pieces(layer, stream):
    """Norm and product, then attention, each a function of autograd's."""
    h, qkv = layer.layernorm_qkv(stream)
    return h, layer.proj(short_attention(qkv, layer.heads, layer.groups))


def stepped(run, layer, recipe, *, dtype=torch.bfloat16, tokens=9, steps=3, wrap=None):
    """Outputs and gradients of the last of several steps, each with inputs of its own."""
    for step in range(steps):
        x, pending = (plain.fresh(3, tokens, 64, seed=10 * step + i).to(dtype).requires_grad_() for i in (1, 2))
        cotangents = [plain.fresh(3, tokens, 64, seed=10 * step + i).to(dtype) for i in (3, 4)]
        layer.zero_grad()
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            outputs = run(layer, (x, pending)) if wrap is None else wrap(lambda a, b: run(layer, (a, b)), x, pending)
        torch.autograd.backward(outputs, cotangents)
    found = {"h": outputs[0].detach(), "attended": outputs[1].detach(), "x": x.grad, "pending": pending.grad}
    return found | {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


def assert_like_pieces(found, wanted, *, same_bits):
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        assert found[name].dtype == expected.dtype, name
        if same_bits or name in ("h", "attended"):
            assert torch.equal(found[name], expected), name
        else:  # FP8 made of float32, or of what was rounded to 16 bits before: now and then the number beside
            assert (found[name].float() - expected.float()).norm() <= 0.05 * expected.float().norm() + 1e-4, name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("groups", [4, 2])
def test_short_attention_is_what_its_pieces_are(groups, bias, recipe):
    layer, twin = (short_layer(groups, bias) for _ in range(2))
    found, wanted = stepped(whole, layer, RECIPES[recipe]), stepped(in_pieces, twin, RECIPES[recipe])
    assert_like_pieces(found, wanted, same_bits=recipe != "delayed")


@pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 37])
def test_short_attention_with_master_weights(tokens, dtype, recipe):
    layer, twin = (short_layer(kind="RMSNorm", dtype=torch.float32) for _ in range(2))
    found, wanted = (stepped(run, m, RECIPES[recipe], dtype=dtype, tokens=tokens)
                     for run, m in ((whole, layer), (in_pieces, twin)))  # fmt: skip
    assert found["layernorm_qkv.weight"].dtype == torch.float32
    # Of one token the softmax is 1, and the gradients of queries and keys are nothing but rounding.
    if tokens == 1:
        for of in (found, wanted):
            of["layernorm_qkv.weight"], of["layernorm_qkv.bias"] = (
                split_qkv(of[f"layernorm_qkv.{name}"], 4, 2)[2] for name in ("weight", "bias")
            )
    assert_like_pieces(found, wanted, same_bits=recipe != "delayed")


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_short_attention_under_torch_autocast(recipe):
    layer, twin = (short_layer(dtype=torch.float32) for _ in range(2))

    def under(run):
        def inner(m, stream):
            with torch.autocast("cpu", torch.bfloat16):
                return run(m, stream)

        return inner

    found, wanted = (stepped(under(run), m, RECIPES[recipe], dtype=torch.float32)
                     for run, m in ((whole, layer), (in_pieces, twin)))  # fmt: skip
    assert found["h"].dtype == torch.float32
    assert found["attended"].dtype == torch.bfloat16
    assert_like_pieces(found, wanted, same_bits=recipe == "none")


def test_histories_of_short_attention_are_those_of_its_pieces():
    layer, twin = (short_layer() for _ in range(2))
    for run, module in ((whole, layer), (in_pieces, twin)):
        stepped(run, module, RECIPES["delayed"])
    records, wanted = state_records(layer), state_records(twin)
    assert records.keys() == wanted.keys()
    for name, record in records.items():
        rounding = 2**-7 if name.startswith("layernorm_qkv.grad_output") else 0
        torch.testing.assert_close(record, wanted[name], rtol=rounding, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert (records["layernorm_qkv.grad_output.amax_history"] != 0).sum() == 2  # the newest waits in slot 0 no more


def test_delayed_scaling_runs_the_backward_of_short_attention_once_and_into_fp8(monkeypatch):
    asked = []
    backward, backward_into = attention.short.backward, attention.short.backward_into
    monkeypatch.setattr(attention.short, "backward", lambda *args: asked.append("wide") or backward(*args))
    monkeypatch.setattr(
        attention.short, "backward_into", lambda *args, **how: asked.append("fp8") or backward_into(*args, **how)
    )
    for recipe in RECIPES.values():
        stepped(whole, short_layer(), recipe, steps=1)
    assert asked == ["wide", "fp8", "wide", "wide", "wide"]


@pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
@pytest.mark.parametrize(
    "trained", [["layernorm_qkv.bias"], ["layernorm_qkv.weight"], ["layernorm_qkv.layer_norm_weight"], ["proj.weight"]], ids=str
)
def test_what_is_frozen_around_short_attention_gets_no_gradient(trained, recipe):
    found = []
    for run in (whole, in_pieces):
        layer = short_layer()
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name in trained)
        for _ in range(2):
            layer.zero_grad()
            with octavo.fp8_autocast(enabled=recipe != "none", fp8_recipe=RECIPES[recipe]):
                y = run(layer, (plain.fresh(3, 9, 64).bfloat16(), None))[1]
            y.backward(plain.fresh(3, 9, 64, seed=1).bfloat16())
        found.append({name: p.grad for name, p in layer.named_parameters() if p.grad is not None})
    assert list(found[0]) == trained
    for name in trained:
        assert (found[0][name].float() - found[1][name].float()).norm() <= 0.05 * found[1][name].float().norm()


@pytest.mark.parametrize("recipe", ["none", "delayed"])
@pytest.mark.parametrize("used", [0, 1])
def test_only_the_stream_or_only_short_attention_is_used(used, recipe):
    found = []
    for run in (whole, in_pieces):
        layer = short_layer()
        x = plain.fresh(3, 9, 64).bfloat16().requires_grad_()
        with octavo.fp8_autocast(enabled=recipe != "none", fp8_recipe=RECIPES[recipe]):
            y = run(layer, (x, None))[used]
        y.backward(plain.fresh(3, 9, 64, seed=1).bfloat16())
        found.append({"x": x.grad} | {n: p.grad for n, p in layer.named_parameters() if p.grad is not None})
    if used == 0:
        assert list(found[0]) == ["x"]
    assert_like_pieces(*found, same_bits=recipe == "none" or used == 0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_short_attention_keeps_what_its_pieces_keep(recipe):
    found = []
    for run in (whole, in_pieces):
        layer, kept = short_layer(), []
        memory = {p.untyped_storage().data_ptr() for p in layer.parameters()}

        def pack(tensor, kept=kept, memory=memory):
            if tensor.untyped_storage().data_ptr() not in memory:
                memory.add(tensor.untyped_storage().data_ptr())
                kept.append((str(tensor.dtype), tensor.untyped_storage().nbytes()))
            return tensor

        x, pending = (plain.fresh(3, 9, 64, seed=seed).bfloat16().requires_grad_() for seed in (1, 2))
        fp8 = octavo.fp8_autocast(enabled=recipe != "none", fp8_recipe=RECIPES[recipe])
        with fp8, saved_tensors_hooks(pack, lambda t: t):
            outputs = run(layer, (x, pending))
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
        found.append(sorted(kept))
    assert found[0] == found[1]


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_a_second_derivative_of_short_attention_is_refused(recipe):
    layer = short_layer()
    x = plain.fresh(2, 5, 64).bfloat16().requires_grad_()
    with octavo.fp8_autocast(enabled=recipe != "none", fp8_recipe=RECIPES[recipe]):
        _, context = layer.layernorm_qkv((x, None), None, Rotation(4, 2, None, None, softmax_scale=0.25))
    with pytest.raises(RuntimeError, match="no second derivative: call backward without create_graph=True"):
        torch.autograd.grad(context.float().square().sum(), x, create_graph=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_around_short_attention_changes_no_bit(recipe):
    def again(call, x, pending):
        return checkpoint(call, x, pending, use_reentrant=False)

    layer, twin = (short_layer() for _ in range(2))
    found, wanted = stepped(whole, layer, RECIPES[recipe], wrap=again), stepped(whole, twin, RECIPES[recipe])
    assert_like_pieces(found, wanted, same_bits=True)


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_short_attention_without_gradients_leaves_no_trace(recipe):
    layer, twin = (short_layer() for _ in range(2))
    with torch.no_grad(), octavo.fp8_autocast(enabled=recipe != "none", fp8_recipe=RECIPES[recipe]):
        _, y = layer((plain.fresh(3, 9, 64, size=30.0).bfloat16(), None))
    assert not y.requires_grad
    assert_like_pieces(stepped(whole, layer, RECIPES[recipe]), stepped(whole, twin, RECIPES[recipe]), same_bits=True)


def test_hooks_around_short_attention_see_the_stream_and_its_result():
    layer, seen = short_layer(), []
    layer.layernorm_qkv.register_forward_hook(lambda module, args, output: seen.append([tuple(y.shape) for y in output]))
    layer(plain.fresh(3, 9, 64).bfloat16())
    assert seen == [[(3, 9, 64), (3, 9, 64)]]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_product_leaves_attention_to_pytorch():
    layer, twin = (short_layer() for _ in range(2))
    torch.compiler.reset()
    layer.layernorm_qkv.compile(backend="aot_eager")
    found, wanted = stepped(whole, layer, None), stepped(whole, twin, None)
    for name, expected in wanted.items():
        assert (found[name].float() - expected.float()).norm() <= 0.02 * expected.float().norm(), name


def test_a_scale_that_short_attention_does_not_take_is_refused():
    layer = short_layer()
    layer.core_attention.softmax_scale = -1.0
    with pytest.raises(InputError, match="more than 0"):
        layer(plain.fresh(2, 5, 64).bfloat16())
