"""The feed-forward layer outside FP8, and the layout of its joint gate and up matrix."""

import plain
import pytest
import torch

import octavo
from octavo.errors import InputError
from octavo.fp8.recipe import RECIPES
from octavo.kernels import reference
from octavo.nn.mlp import deinterleave, gate_up_block, interleave

SIZES = [1, 3, 44, 45, 128, 176, 300, 384]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tail", [(), (5,)])
def test_interleave_and_deinterleave_are_inverse(size, tail):
    gate, up = plain.fresh(size, *tail, seed=1), plain.fresh(size, *tail, seed=2)
    joint = interleave(gate, up)
    assert joint.shape == (2 * size, *tail)
    back = deinterleave(joint)
    assert torch.equal(back[0], gate)
    assert torch.equal(back[1], up)
    assert torch.equal(interleave(*deinterleave(joint)), joint)


@pytest.mark.parametrize(("size", "block"), [(384, 32), (176, 16), (44, 4), (45, 1), (64, 32), (8192, 32), (24, 8)])
def test_blocks_of_gates_stand_before_their_ups(size, block):
    gate, up = torch.arange(size), -1 - torch.arange(size)
    joint = interleave(gate, up).tolist()
    rows = gate_up_block(size)
    assert block in (None, rows)
    assert size % rows == 0
    wanted = []
    for start in range(0, size, rows):
        wanted += range(start, start + rows)
        wanted += [-1 - i for i in range(start, start + rows)]
    assert joint == wanted


@pytest.mark.parametrize(
    ("size", "degree"), [(256, 1), (256, 2), (384, 3), (8192, 8), (14336, 8), (11008, 2), (11008, 4), (64, 2), (176, 11)]
)
def test_a_slice_of_rows_has_the_gates_that_belong_to_its_ups(size, degree):
    joint = interleave(torch.arange(size), -1 - torch.arange(size))
    for part in joint.chunk(degree):
        gates, ups = part[part >= 0], -1 - part[part < 0]
        assert sorted(gates.tolist()) == sorted(ups.tolist())


@pytest.mark.parametrize(("size", "degree"), [(256, 1), (256, 2), (64, 2)])
def test_slices_of_rows_are_working_layers_whose_outputs_add_up(size, degree):
    make = {"bias": False, "activation": "swiglu", "normalization": "RMSNorm"}
    whole = plain.randomise(octavo.nn.LayerNormMLP(12, size, **make))
    # A rank's columns of the second matrix belong to the rows that it holds of the first.
    total = torch.zeros(5, 12)
    x = plain.fresh(5, 12)
    for rank in range(degree):
        shard = octavo.nn.LayerNormMLP(12, size // degree, **make)
        with torch.no_grad():
            shard.layer_norm_weight.copy_(whole.layer_norm_weight)
            shard.fc1_weight.copy_(whole.fc1_weight.chunk(degree)[rank])
            shard.fc2_weight.copy_(whole.fc2_weight.chunk(degree, 1)[rank])
        total += shard(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [1, 44, 45, 176])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bias", [True, False])
def test_swiglu(size, kind, bias):
    layer = plain.randomise(octavo.nn.LayerNormMLP(12, size, 1e-3, bias=bias, normalization=kind, activation="swiglu"))

    def by_hand(p, x):
        normed = plain.norm(kind, x, p["layer_norm_weight"], p.get("layer_norm_bias"), 1e-3)
        gate_weight, up_weight = deinterleave(p["fc1_weight"])
        gate_bias, up_bias = deinterleave(p["fc1_bias"]) if bias else (None, None)
        hidden = plain.silu(plain.linear(normed, gate_weight, gate_bias)) * plain.linear(normed, up_weight, up_bias)
        return plain.linear(hidden, p["fc2_weight"], p.get("fc2_bias"))

    plain.assert_equals_float64(layer, by_hand, plain.fresh(2, 3, 12))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("bias", [True, False])
def test_gelu(kind, bias):
    layer = plain.randomise(octavo.nn.LayerNormMLP(12, 20, 1e-3, bias=bias, normalization=kind, activation="gelu_exact"))

    def by_hand(p, x):
        normed = plain.norm(kind, x, p["layer_norm_weight"], p.get("layer_norm_bias"), 1e-3)
        return plain.linear(
            plain.gelu(plain.linear(normed, p["fc1_weight"], p.get("fc1_bias"))), p["fc2_weight"], p.get("fc2_bias")
        )

    plain.assert_equals_float64(layer, by_hand, plain.fresh(2, 3, 12))


def test_master_weights_compute_in_the_dtype_of_the_input():
    layer = plain.randomise(octavo.nn.LayerNormMLP(16, 32, activation="swiglu"))
    x = plain.fresh(6, 16)
    y = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    error = (y.float() - layer(x)).norm() / layer(x).norm()
    assert error < 2**-6
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_an_unknown_activation_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="Did you mean 'swiglu'"):
        octavo.nn.LayerNormMLP(4, 8, activation="swigl")


def composed(layer, x, recipe):
    """A norm, a linear layer, an activation in float32 and a linear layer, each by itself: result and inputs of products."""
    norm = getattr(octavo.nn, layer.normalization)(layer.hidden_size)
    fc1 = octavo.nn.Linear(*layer.fc1_weight.shape[::-1])
    fc2 = octavo.nn.Linear(*layer.fc2_weight.shape[::-1])
    pairs = {"layer_norm_weight": norm.weight, "layer_norm_bias": norm.bias, "fc1_weight": fc1.weight}
    pairs |= {"fc1_bias": fc1.bias, "fc2_weight": fc2.weight, "fc2_bias": fc2.bias}
    pairs = {name: parameter for name, parameter in pairs.items() if parameter is not None}
    with torch.no_grad():
        for name, parameter in pairs.items():
            parameter.copy_(getattr(layer, name))
    with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        normed = norm(x)
        activated = reference.activation(layer.activation, fc1(normed).float(), layer.gate_rows).to(x.dtype)
        return (fc2(activated), normed, activated), pairs


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("read", [(0, 1, 2), (0,), (1,), (2,)], ids=str)
def test_returned_inputs_are_what_the_products_read(read, dtype, activation, recipe, checkpoint):
    how = RECIPES[recipe]() if recipe else None
    layer = octavo.nn.LayerNormMLP(48, 32, activation=activation, checkpoint=checkpoint, normalization="RMSNorm")
    plain.randomise(layer)
    x = plain.fresh(3, 17, 48, seed=5).to(dtype).requires_grad_()
    apart = x.detach().clone().requires_grad_()
    with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=how):
        found = layer(x, return_inputs=True)
    wanted, pairs = composed(layer, apart, how)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        assert one.shape == other.shape
        if recipe is not None:  # of a product in high precision another function may order sums otherwise
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)
    for results in (found, wanted):
        sum((results[i] * plain.fresh(*results[i].shape, seed=9 + i).to(dtype)).sum() for i in read).backward()
    # The layer casts float32 gradients of the activation; the parts by themselves round them first, and E5M2 has two bits.
    off = 1e-5 if dtype == torch.float32 and recipe is None else 0.04 if dtype == torch.bfloat16 else 0.02
    for one, other in ((x, apart), *((getattr(layer, name), parameter) for name, parameter in pairs.items())):
        if other.grad is None:  # where the result is not read; a fused layer may give zeros
            assert one.grad is None or not one.grad.any()
        else:
            assert (one.grad - other.grad).norm() <= off * other.grad.norm()


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_returned_inputs_of_frozen_weights_have_the_gradient_of_the_layers_input(recipe, checkpoint):
    how = RECIPES[recipe]()
    layer = plain.randomise(octavo.nn.LayerNormMLP(48, 32, checkpoint=checkpoint, normalization="RMSNorm")).requires_grad_(
        False
    )
    x = plain.fresh(17, 48, seed=6).requires_grad_()
    apart = x.detach().clone().requires_grad_()
    with octavo.fp8_autocast(fp8_recipe=how):
        found = layer(x, return_inputs=True)
    wanted, pairs = composed(layer, apart, how)
    for results in (found, wanted):
        torch.autograd.backward([*results], [plain.fresh(*one.shape, seed=i) for i, one in enumerate(results)])
    assert (x.grad - apart.grad).norm() <= 0.02 * apart.grad.norm()
    assert all(getattr(layer, name).grad is None for name in pairs)


@pytest.mark.parametrize("result", [1, 2])
@pytest.mark.parametrize("shape", [(6, 48), (2, 3, 48)])
@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_returned_input_that_is_changed_in_place_is_refused(checkpoint, recipe, shape, result):
    layer = octavo.nn.LayerNormMLP(48, 32, checkpoint=checkpoint)
    with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=RECIPES[recipe]() if recipe else None):
        results = layer(plain.fresh(*shape), return_inputs=True)

    def change():
        results[result].mul_(2)
        results[0].sum().backward()

    with pytest.raises(RuntimeError, match="modified"):  # at once, or in backward
        change()


def test_a_layer_that_gives_its_norm_away_keeps_its_first_product():
    with pytest.raises(InputError, match=r"checkpoint=True, return_layernorm_output=True.*Leave one out"):
        octavo.nn.LayerNormMLP(8, 8, checkpoint=True, return_layernorm_output=True)
