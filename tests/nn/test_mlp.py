"""The feed-forward layer outside FP8, and the layout of its joint gate and up matrix."""

import plain
import pytest
import torch

import octavo
from octavo.errors import InputError
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


def test_a_layer_that_gives_its_norm_away_keeps_its_first_product():
    with pytest.raises(InputError, match=r"checkpoint=True, return_layernorm_output=True.*Leave one out"):
        octavo.nn.LayerNormMLP(8, 8, checkpoint=True, return_layernorm_output=True)
