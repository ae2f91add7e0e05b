"""Attention of short sequences, compiled, at the sizes of vision transformers: against PyTorch's in float64."""

import plain
import pytest
import torch
from torch.nn import functional

import octavo
from octavo.fp8.formats import E4M3, E5M2
from octavo.fp8.scaling import state_records
from octavo.kernels import reference
from octavo.kernels.attention import Tiles, launch, launch_backward, launch_backward_into, short_attention
from octavo.kernels.cast import Into, make

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = [  # batch, tokens, heads, groups, head dimension
    (8, 257, 16, 16, 80),  # ViT-Huge
    (8, 197, 12, 12, 64),  # ViT-Base
    (4, 258, 3, 3, 72),
    (2, 512, 4, 4, 128),
    (3, 300, 8, 2, 96),
    (2, 50, 12, 12, 64),
    (5, 129, 2, 2, 112),
    (2, 65, 6, 3, 40),
    (3, 17, 2, 2, 32),
    (2, 5, 2, 2, 16),
    (1, 1, 1, 1, 8),
]
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def exact(qkv, heads, groups, scale, d_out):
    """Result, lse and gradient in float64."""
    qkv = qkv.double().requires_grad_()
    per_group = heads // groups
    q, k, v = qkv.unflatten(-1, (groups, per_group + 2, -1)).split([per_group, 1, 1], -2)
    q, k, v = (x.flatten(2, 3).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(per_group, 1) for x in (k, v))
    out = functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)
    out.backward(d_out.double())
    return out.detach(), (q @ k.mT * scale).logsumexp(-1).detach(), qkv.grad


def case(batch, tokens, heads, groups, dim, dtype=torch.bfloat16):
    qkv = torch.randn(batch, tokens, (heads + 2 * groups) * dim, device="cuda").to(dtype)
    return qkv, torch.randn(batch, tokens, heads * dim, device="cuda").to(dtype), dim**-0.5


def off(got, want):
    """Relative error, by norms; where the exact result is nothing, the absolute one."""
    return ((got.double() - want).norm() / want.norm().clamp(min=1.0)).item()


def assert_close(d_qkv, want, heads, groups, tolerance):
    """Gradients of queries, keys and values each, and of no token alone much further off."""
    per_group = heads // groups
    got, want = (x.unflatten(-1, (groups, per_group + 2, -1)).split([per_group, 1, 1], -2) for x in (d_qkv, want))
    for one, other in zip(got, want, strict=True):
        assert off(one, other) < tolerance
        worst = (one.double() - other).flatten(2).norm(dim=-1) / other.flatten(2).norm(dim=-1).clamp(min=1e-1)
        assert worst.max() < 4 * tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("batch", "tokens", "heads", "groups", "dim"), SHAPES)
def test_kernels(dtype, batch, tokens, heads, groups, dim):
    qkv, d_out, scale = case(batch, tokens, heads, groups, dim, dtype)
    want, want_lse, want_d_qkv = exact(qkv, heads, groups, scale, d_out)
    out, lse = launch(qkv, heads, groups, scale)
    assert off(out, want) < ROUNDING[dtype]
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-3)
    d_qkv = launch_backward(d_out, qkv, out, lse, heads, groups, scale)
    assert_close(d_qkv, want_d_qkv, heads, groups, ROUNDING[dtype])
    assert torch.equal(d_qkv, launch_backward(d_out, qkv, out, lse, heads, groups, scale))


@pytest.mark.parametrize(
    "tiles", [Tiles(64, 64, 4), Tiles(64, 32, 4, 3), Tiles(128, 128, 8, 1), Tiles(32, 32, 4, registers=128)], ids=str
)
def test_other_tiles(tiles):
    qkv, d_out, scale = case(3, 257, 4, 4, 80)
    want, _, want_d_qkv = exact(qkv, 4, 4, scale, d_out)
    out, lse = launch(qkv, 4, 4, scale, tiles=tiles)
    assert off(out, want) < ROUNDING[torch.bfloat16]
    d_qkv = launch_backward(d_out, qkv, out, lse, 4, 4, scale, queries=tiles, keys=tiles)
    assert_close(d_qkv, want_d_qkv, 4, 4, ROUNDING[torch.bfloat16])


@pytest.mark.parametrize("tokens", [257, 200])
def test_large_logits(tokens):
    qkv, d_out, scale = case(2, tokens, 4, 4, 80, torch.float16)
    want, _, want_d_qkv = exact(qkv, 4, 4, scale * 30, d_out)
    qkv.requires_grad_()
    out = short_attention(qkv, 4, 4, scale * 30)
    out.backward(d_out)
    assert off(out.detach(), want) < 1e-2
    assert off(qkv.grad, want_d_qkv) < 2e-2


def test_rows_of_a_wider_matrix():
    qkv, d_out, scale = case(4, 257, 4, 4, 80)
    wide = torch.full((4, 260, 1040), torch.nan, device="cuda", dtype=qkv.dtype)
    view = wide[:, 1:258, 40:1000].copy_(qkv)
    out, lse = launch(qkv, 4, 4, scale)
    assert torch.equal(launch(view, 4, 4, scale)[0], out)
    assert torch.equal(launch_backward(d_out, view, out, lse, 4, 4, scale), launch_backward(d_out, qkv, out, lse, 4, 4, scale))


@pytest.mark.parametrize("groups", [4, 2])
def test_function(groups):
    qkv, d_out, scale = case(4, 145, 4, groups, 80)
    want, _, want_d_qkv = exact(qkv, 4, groups, scale, d_out)
    qkv.requires_grad_()
    out = short_attention(qkv, 4, groups)
    out.backward(d_out)
    assert off(out.detach(), want) < ROUNDING[torch.bfloat16]
    assert_close(qkv.grad, want_d_qkv, 4, groups, ROUNDING[torch.bfloat16])


LAYOUTS = [(True, True), (True, False), (False, True), (False, False)]
formats = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)


def backward_case(*shape):
    """What a backward is given."""
    (heads, groups), (qkv, d_out, scale) = shape[2:4], case(*shape)
    return d_out, qkv, *launch(qkv, heads, groups, scale), heads, groups, scale


def asked(fmt, wide, row=True, column=True):
    """With a scale that fills half of the format."""
    amax = torch.zeros((), device="cuda")
    return Into(fmt.dtype, fmt.max, (fmt.max / 2 / wide.abs().max()).float(), amax, row, column)


def bits(x):
    return x.view(torch.uint8)


def assert_within_a_step(got, want):
    """Of FP8 made of float32 numbers that two compilations of the same sums may round apart in their last bit."""
    got, want = got.float(), want.float()
    assert (got == want).float().mean() > 0.99
    step = 0.25 if want.abs().max() > 448 else 0.13
    torch.testing.assert_close(got, want, rtol=step, atol=1e-4 * want.abs().max().item())


@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_is_made_of_the_float32_gradient(fmt, shape):
    arguments = backward_case(*shape)
    want = exact(arguments[1], *shape[2:4], arguments[6], arguments[0])[2]
    wide, sums = launch_backward_into(*arguments, Into(torch.float32), bias=True)
    assert_close(wide.row.view(want.shape), want, *shape[2:4], ROUNDING[torch.bfloat16])
    torch.testing.assert_close(sums, wide.row.sum(0), rtol=1e-4, atol=1e-5 * wide.row.abs().sum(0).max().item())
    cast = make(wide.row, asked(fmt, wide.row))
    for row, column in LAYOUTS:
        into = asked(fmt, wide.row, row, column)
        made, summed = launch_backward_into(*arguments, into, bias=True)
        torch.testing.assert_close(into.amax, wide.row.abs().max(), rtol=1e-5, atol=0)
        torch.testing.assert_close(summed, sums, rtol=1e-4, atol=1e-5 * wide.row.abs().sum(0).max().item())
        assert (made.row is not None, made.column is not None) == (row, column)
        if row:
            assert_within_a_step(made.row, cast.row)
        if column:
            assert_within_a_step(made.column, cast.column)
            assert made.scale_inv == cast.scale_inv
        if row and column:
            assert torch.equal(bits(made.row), bits(made.column).t())


@formats
@pytest.mark.parametrize("shape", [SHAPES[i] for i in (0, 1, 3, 4)], ids=str)
def test_fp8_repeats_bit_for_bit_and_is_the_same_turned_afterwards(fmt, shape):
    arguments = backward_case(*shape)
    into = asked(fmt, launch_backward(*arguments))
    (want, sums), again, turned = (launch_backward_into(*arguments, into, bias=True, turned=t) for t in (False, False, True))
    for made, summed in (again, turned):
        assert torch.equal(bits(made.row), bits(want.row))
        assert torch.equal(bits(made.column), bits(want.column))
        torch.testing.assert_close(summed, sums, rtol=1e-5, atol=1e-5 * sums.abs().max().item())
    assert torch.equal(again[1], sums)
    assert torch.equal(bits(want.row), bits(want.column).t())


@formats
@pytest.mark.parametrize(
    "tiles", [Tiles(64, 64, 4), Tiles(64, 32, 4, 3), Tiles(128, 128, 8, 1), Tiles(32, 32, 4, registers=128)], ids=str
)
def test_both_layouts_agree_to_the_bit_for_any_tiles(fmt, tiles):
    arguments = backward_case(3, 257, 4, 4, 80)
    wide = launch_backward_into(*arguments, Into(torch.float32))[0].row
    for queries, keys in ((tiles, tiles), (None, tiles), (tiles, None)):
        made, summed = launch_backward_into(*arguments, asked(fmt, wide), bias=True, queries=queries, keys=keys)
        assert torch.equal(bits(made.row), bits(made.column).t())
        torch.testing.assert_close(summed, wide.sum(0), rtol=1e-2, atol=1e-4 * wide.abs().sum(0).max().item())
        assert off(reference.dequantize(made.row, made.scale_inv), wide) < (0.04 if fmt is E4M3 else 0.08)


def test_the_amax_knows_no_nan():
    arguments = backward_case(2, 257, 4, 4, 80)
    arguments[0][0, 5, 3] = torch.nan
    wide = launch_backward_into(*arguments, Into(torch.float32))[0].row
    into = asked(E5M2, wide.nan_to_num(nan=0.0))
    made, _ = launch_backward_into(*arguments, into)
    torch.testing.assert_close(into.amax, wide.nan_to_num(nan=0.0).abs().max(), rtol=1e-5, atol=0)
    assert torch.equal(made.row.float().isnan(), wide.isnan())
    assert torch.equal(made.column.float().isnan(), wide.isnan().t())


def test_more_elements_than_31_bits_count():
    """The last sequence of many, whose gradients lie beyond 2³¹ bytes, is what it is alone."""
    d_out, qkv, out, lse, *how = backward_case(2400, 257, 16, 16, 80)
    into = Into(E5M2.dtype, E5M2.max, torch.tensor(1000.0, device="cuda"), None, True, True)
    last, _ = launch_backward_into(*(x[-1:].clone() for x in (d_out, qkv, out, lse)), *how, into)
    made, _ = launch_backward_into(d_out, qkv, out, lse, *how, into)
    assert made.row.numel() > 2**31
    assert torch.equal(bits(made.row[-257:]), bits(last.row))
    assert torch.equal(bits(made.column[:, -257:]), bits(last.column))


RECIPES = {
    "none": None,
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=3),
    "current": octavo.recipe.CurrentScaling(),
    "rowwise": octavo.recipe.RowwiseScaling(),
    "block": octavo.recipe.BlockScaling(),
}


def in_pieces(layer, stream):
    """Norm and product, then attention, each a function of autograd's."""
    h, qkv = layer.layernorm_qkv(stream)
    return h, layer.proj(short_attention(qkv, layer.heads, layer.groups))


def stepped(run, layer, recipe, tokens):
    """Outputs and gradients of the last of three steps, each with inputs of its own."""
    for step in range(3):
        streams = (plain.fresh(8, tokens, 320, seed=10 * step + i).to("cuda", torch.bfloat16) for i in range(4))
        x, pending, *cotangents = streams
        x.requires_grad_()
        pending.requires_grad_()
        layer.zero_grad()
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            outputs = run(layer, (x, pending))
        torch.autograd.backward(outputs, cotangents)
    found = {"h": outputs[0].detach(), "attended": outputs[1].detach(), "x": x.grad, "pending": pending.grad}
    return found | {name: p.grad.clone() for name, p in layer.named_parameters()}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize(("groups", "tokens"), [(4, 258), (4, 64), (2, 130)])
def test_the_layer_is_what_its_pieces_are(groups, tokens, bias, recipe):
    """8 · T tokens, so that FP8 products take them."""
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(
            octavo.nn.MultiheadAttention(
                320, 4, num_gqa_groups=groups, attn_mask_type="no_mask", bias=bias, params_dtype=torch.float32, device="cuda"
            )
        )
    found = stepped(lambda layer, stream: layer(stream), layers[0], RECIPES[recipe], tokens)
    wanted = stepped(in_pieces, layers[1], RECIPES[recipe], tokens)
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        if recipe != "delayed" or name in ("h", "attended"):
            assert torch.equal(found[name], expected), name
        else:  # FP8 made of float32, or of what was rounded to bfloat16 before: now and then the number beside
            assert off(found[name], expected.double()) < 0.05, name
    if recipe == "delayed":
        records, others = (state_records(layer) for layer in layers)
        for name, record in records.items():
            rounding = 2**-7 if name.startswith("layernorm_qkv.grad_output") else 0
            torch.testing.assert_close(record, others[name], rtol=rounding, atol=0, msg=lambda m, n=name: f"{n}: {m}")
