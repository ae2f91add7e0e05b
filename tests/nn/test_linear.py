"""Linear layers and norms outside FP8 are PyTorch's: values, gradients, dtypes."""

import copy
import functools

import plain
import pytest
import torch
from torch import nn

import octavo
from octavo.errors import InputError
from octavo.fp8.recipe import RECIPES
from octavo.kernels import gemm
from octavo.nn.linear import high_precision

SHAPES = [(12,), (5, 12), (2, 3, 12), (2, 1, 4, 12)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape, bias):
    layer = plain.randomise(octavo.nn.Linear(12, 7, bias=bias))
    by_hand = lambda p, x: x @ p["weight"].T + (p["bias"] if bias else 0)  # noqa: E731
    plain.assert_equals_float64(layer, by_hand, plain.fresh(*shape))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_linear(shape, kind, bias):
    layer = plain.randomise(octavo.nn.LayerNormLinear(12, 7, eps=1e-3, bias=bias, normalization=kind))

    def by_hand(p, x):
        normed = plain.norm(kind, x, p["layer_norm_weight"], p.get("layer_norm_bias"), 1e-3)
        return plain.linear(normed, p["weight"], p.get("bias"))

    plain.assert_equals_float64(layer, by_hand, plain.fresh(*shape) + 0.5)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(lambda x: f(x).sum(0))(x),
}
DIFFERENTIATED = {
    "Linear": lambda: octavo.nn.Linear(16, 16),
    "LayerNormLinear": lambda: octavo.nn.LayerNormLinear(16, 16),
    "LayerNormMLP": lambda: octavo.nn.LayerNormMLP(16, 32),
    "RMSNorm": lambda: octavo.nn.RMSNorm(16),
    "GroupedLinear": lambda: octavo.nn.GroupedLinear(2, 16, 16),
    "TransformerLayer": lambda: octavo.nn.TransformerLayer(16, 32, 2),
}


def called(kind):
    layer, batched = DIFFERENTIATED[kind](), kind == "TransformerLayer"
    function = functools.partial(layer, m_splits=[3, 5]) if kind == "GroupedLinear" else layer
    return layer, function, torch.randn(*((2, 4) if batched else (8,)), 16)


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", DIFFERENTIATED)
def test_transforms_of_functions_are_right_or_refused(kind, transform, fp8):
    layer, function, x = called(kind)
    with octavo.fp8_autocast(enabled=fp8):
        if fp8 or kind not in ("Linear", "GroupedLinear"):
            with pytest.raises(InputError, match=r"cannot be transformed by torch\.func .* take gradients by backward\(\)"):
                TRANSFORMS[transform](function, x)
            return
        found = TRANSFORMS[transform](function, x)
    if kind == "GroupedLinear":
        pairs = zip(layer.weights, layer.biases, strict=True)
        parts = [(weight.double(), bias.double()) for weight, bias in pairs]
        by_hand = lambda x: torch.cat([rows @ w.T + b for rows, (w, b) in zip(x.split([3, 5]), parts, strict=True)])  # noqa: E731
    else:
        by_hand = lambda x: x @ layer.weight.double().T + layer.bias.double()  # noqa: E731
    wanted = TRANSFORMS[transform](by_hand, x.double())
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_refused_transform_leaves_no_scales(transform):
    """With the autocast inside of the transform, around a layer that has not run yet: it and others run afterwards."""
    layer, function, x = called("Linear")

    def in_fp8(x):
        with octavo.fp8_autocast():
            return function(x)

    with pytest.raises(InputError, match=r"cannot be transformed by torch\.func"):
        TRANSFORMS[transform](in_fp8, x)
    in_fp8(x).sum().backward()
    assert torch.isfinite(layer.weight.grad).all()


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("kind", DIFFERENTIATED)
def test_a_call_with_other_parameters(kind, fp8):
    """By `torch.func.functional_call`, gradients included."""
    layer, function, x = called(kind)
    options = {"m_splits": [3, 5]} if kind == "GroupedLinear" else {}
    recipe = octavo.recipe.CurrentScaling()
    others = {name: (p.detach() * 2).requires_grad_() for name, p in layer.named_parameters()}
    with octavo.fp8_autocast(enabled=fp8, fp8_recipe=recipe):
        y = torch.func.functional_call(layer, others, (x,), options)
    found = torch.autograd.grad(y.square().sum(), list(others.values()))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)
    with octavo.fp8_autocast(enabled=fp8, fp8_recipe=recipe):
        again = function(x)
    assert torch.equal(again, y)
    for one, other in zip(found, torch.autograd.grad(again.square().sum(), list(layer.parameters())), strict=True):
        assert torch.equal(one, other)


def test_a_delta_of_another_shape_is_refused():
    x = torch.randn(2, 3, 12)
    for shape in ((12,), (1, 3, 12), (3, 2, 12)):
        with pytest.raises(InputError, match="give both the same"):
            octavo.nn.RMSNorm(12)(x, torch.randn(shape))


def test_a_returned_norm_is_that_of_the_sum():
    layer = plain.randomise(octavo.nn.LayerNormLinear(12, 7, return_layernorm_output=True))
    x, delta = plain.fresh(5, 12), plain.fresh(5, 12)
    for found, wanted in zip(layer(x, delta=delta), layer(x + delta), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("read", ["both", "product", "input"])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_returned_input_is_what_the_product_reads(kind, dtype, recipe, read):
    """Bit for bit a norm in front of a linear layer, with the gradients that come by either result."""
    layer = plain.randomise(octavo.nn.LayerNormLinear(48, 20, normalization=kind, params_dtype=torch.float32))
    norm, linear = getattr(octavo.nn, kind)(48), octavo.nn.Linear(48, 20)
    with torch.no_grad():
        for own, other in ((norm.weight, "layer_norm_weight"), (norm.bias, "layer_norm_bias")):
            if own is not None:
                own.copy_(getattr(layer, other))
        linear.weight.copy_(layer.weight)
        linear.bias.copy_(layer.bias)
    parameters = layer.layer_norm_weight, layer.layer_norm_bias, layer.weight, layer.bias
    others = norm.weight, norm.bias, linear.weight, linear.bias
    how = RECIPES[recipe]() if recipe else None
    for step in range(3):
        x = plain.fresh(3, 17, 48, seed=step).to(dtype).mul_(2**step).requires_grad_()
        apart = x.detach().clone().requires_grad_()
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=how):
            y, normed = layer(x, return_input=True)
            want_normed = norm(apart)
            want_y, same = linear(want_normed, return_input=True)
        assert same is want_normed
        assert torch.equal(normed, want_normed)
        assert normed.dtype == dtype
        assert torch.equal(y, want_y)
        for results in ((y, normed), (want_y, want_normed)):
            results = {"both": results, "product": results[:1], "input": results[1:]}[read]
            sum((r * plain.fresh(*r.shape, seed=9 + step).to(r.dtype)).sum() for r in results).backward()
        assert torch.equal(x.grad, apart.grad)
        for one, other in zip(parameters, others, strict=True):
            if one is not None:
                assert (one.grad is None) == (other.grad is None)
                assert one.grad is None or torch.equal(one.grad, other.grad)
    if recipe == "delayed" and read != "input":
        for one, other in zip(octavo.fp8.inspect(layer).values(), octavo.fp8.inspect(linear).values(), strict=True):
            assert torch.equal(one["amax_history"], other["amax_history"])


def test_a_returned_input_beside_the_residual_stream_is_refused():
    for layer, name in ((octavo.nn.LayerNormLinear(12, 7), "return_input"), (octavo.nn.LayerNormMLP(12, 8), "return_inputs")):
        with pytest.raises(InputError, match=rf"{type(layer).__name__} does not return inputs.*return_residual.*leave one out"):
            layer(torch.randn(2, 12), return_residual=True, **{name: True})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms(shape, kind):
    layer = plain.randomise(getattr(octavo.nn, kind)(12, 1e-3))
    by_hand = lambda p, x: plain.norm(kind, x, p["weight"], p.get("bias"), 1e-3)  # noqa: E731
    plain.assert_equals_float64(layer, by_hand, plain.fresh(*shape) + 0.5)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_take_their_statistics_in_float32(kind):
    layer = getattr(octavo.nn, kind)(512, params_dtype=torch.bfloat16)
    x = (plain.fresh(4, 512) * 0.1 + 20).bfloat16()
    wanted = plain.norm(kind, x.double(), torch.ones(512), torch.zeros(512), 1e-5)
    found = layer(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-3)


def test_an_unknown_norm_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="Did you mean 'RMSNorm'"):
        octavo.nn.LayerNormLinear(4, 4, normalization="RmsNorm")


@pytest.mark.parametrize("make", [octavo.nn.Linear, octavo.nn.LayerNormLinear])
def test_master_weights_give_the_input_dtype_and_keep_their_own(make):
    layer = plain.randomise(make(16, 8, params_dtype=torch.float32))
    x = plain.fresh(6, 16).bfloat16().requires_grad_()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(torch.ones_like(y))
    assert x.grad.dtype == torch.bfloat16
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in layer.parameters())
    exact = copy.deepcopy(layer)(x.detach().float())
    torch.testing.assert_close(y.float(), exact, rtol=2**-6, atol=2**-6)


HIDDEN = 32
LAYERS = {
    "Linear": (lambda: octavo.nn.Linear(HIDDEN, 16), ()),
    "LayerNormLinear": (lambda: octavo.nn.LayerNormLinear(HIDDEN, 16), ()),
    "LayerNormMLP": (lambda: octavo.nn.LayerNormMLP(HIDDEN, 48), ()),
    "RMSNorm": (lambda: octavo.nn.RMSNorm(HIDDEN), ()),
    "LayerNorm": (lambda: octavo.nn.LayerNorm(HIDDEN), ()),
    "GroupedLinear": (lambda: octavo.nn.GroupedLinear(2, HIDDEN, 16), ([3, 5],)),
    "TransformerLayer": (lambda: octavo.nn.TransformerLayer(HIDDEN, 48, 2), ()),
}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_an_input_of_another_dtype_or_size_is_refused_by_name(name, fp8):
    make, others = LAYERS[name]
    layer, shape = make(), (2, 4, HIDDEN)
    with octavo.fp8_autocast(enabled=fp8):
        for dtype in (torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float64):
            if dtype == torch.float64 and name == "Linear" and not fp8:
                continue
            with pytest.raises(InputError, match=f"(an FP8 layer|{name}|LayerNormLinear) got an input of {dtype}"):
                layer(torch.ones(shape).to(dtype), *others)
        for size in (HIDDEN // 2, HIDDEN * 2):
            with pytest.raises(InputError, match=f"got an input of shape .*{size}.*must be {HIDDEN}"):
                layer(plain.fresh(2, 4, size), *others)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert layer(plain.fresh(*shape).to(dtype), *others).dtype == dtype


def test_float64_is_for_linear_outside_of_fp8():
    layer, x = octavo.nn.Linear(HIDDEN, 16).double(), plain.fresh(4, HIDDEN).double()
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_attention_refuses_other_dtypes_by_name():
    attention = octavo.nn.DotProductAttention(2, 16)
    q = plain.fresh(1, 4, 2, 16)
    with pytest.raises(InputError, match=r"DotProductAttention got an input of torch[.]int64"):
        attention(q, q.long(), q)


@pytest.mark.parametrize("make", [octavo.nn.Linear, octavo.nn.LayerNormLinear])
def test_autocast_is_obeyed(make):
    layer = plain.randomise(make(16, 8))
    x = plain.fresh(6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=2**-6, atol=2**-5)


def test_linear_under_autocast_is_pytorchs_bit_for_bit():
    layer = plain.randomise(octavo.nn.Linear(16, 8))
    theirs = nn.Linear(16, 8)
    theirs.load_state_dict(layer.state_dict())
    x = plain.fresh(6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), theirs(x))
    assert torch.equal(layer(x), theirs(x))


def test_from_linear_keeps_the_very_parameters_and_the_mode():
    linear = nn.Linear(6, 4).eval()
    linear.weight.requires_grad_(False)
    layer = octavo.nn.Linear.from_linear(linear)
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert not layer.training
    assert not layer.weight.requires_grad
    assert layer.state_dict().keys() == linear.state_dict().keys()
    x = plain.fresh(3, 6)
    assert torch.equal(layer(x), linear(x))


def test_initial_weights_are_distributed_as_pytorchs():
    for layer in (octavo.nn.Linear(400, 300), octavo.nn.LayerNormLinear(400, 300)):
        for parameter in (layer.weight, layer.bias):
            bound = 400**-0.5
            assert parameter.abs().max() <= bound
            assert parameter.abs().max() > 0.97 * bound
            assert abs(parameter.mean()) < 5 * bound / parameter.numel() ** 0.5


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_params_dtype_and_device(device):
    layers = [
        octavo.nn.Linear(16, 8, params_dtype=torch.bfloat16, device=device),
        octavo.nn.LayerNormLinear(16, 8, params_dtype=torch.bfloat16, device=device),
        octavo.nn.LayerNormMLP(16, 32, params_dtype=torch.bfloat16, device=device),
        octavo.nn.TransformerLayer(16, 32, 2, params_dtype=torch.bfloat16, device=device),
        octavo.nn.LayerNorm(16, params_dtype=torch.bfloat16, device=device),
        octavo.nn.RMSNorm(16, params_dtype=torch.bfloat16, device=device),
    ]
    for layer in layers:
        assert {(p.dtype, p.device.type) for p in layer.parameters()} == {(torch.bfloat16, device)}


@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16)])
def test_a_result_of_widened_products_may_be_written_in_place(shape, monkeypatch):
    """As PyTorch's own may: GPT-like code adds its residual to it. Of CPUs without bf16 products."""
    monkeypatch.setattr(gemm, "widens", lambda x: True)
    x, weight = torch.randn(shape).bfloat16().requires_grad_(), torch.randn(8, 16).bfloat16().requires_grad_()
    y = high_precision(x, weight)
    y += 1
    y.square().sum().backward()
    wanted = [t.detach().double().requires_grad_() for t in (x, weight)]
    (torch.nn.functional.linear(*wanted) + 1).square().sum().backward()
    for found, exact in zip((x, weight), wanted, strict=True):
        assert (found.grad.double() - exact.grad).norm() <= 2**-6 * exact.grad.norm()
