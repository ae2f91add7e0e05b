"""Linear layers against the restatement: every scale and history bit for bit, every product within its accumulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from driving import RECIPES, array, bits, check_state, check_states, delayed, step
from hypothesis import given, settings
from hypothesis import strategies as st
from restatement import E4M3, E5M2, amax, blockwise, cast, delayed_states, operands, power_of_two_below, round_trip, scale_of

import octavo

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = [(7, 33, 19), (16, 32, 48), (130, 200, 150), (1, 128, 1), (129, 16, 257)]
SETTINGS = list(itertools.product([True, False], [1, 2, 32], ["max", "most_recent"], [0, 2]))


def strange(draw, shape, dtype, specials=True):
    """A tensor of a random magnitude, or zeros, or one with infinities or NaNs in it, or of nothing else."""
    x = torch.from_numpy(draw.standard_normal(shape) * 10.0 ** draw.choice([-44, -20, -3, 0, 0, 0, 2, 20])).to(dtype)
    kind = draw.integers(10 if specials else 8)
    if kind == 0:
        x.zero_()
    elif kind in (8, 9):
        value = [float("inf"), float("-inf"), float("nan")][draw.integers(3)]
        x.view(-1)[draw.choice(x.numel(), x.numel() if draw.integers(4) == 0 else 2)] = value
    return x


@pytest.mark.parametrize(("hybrid", "length", "algorithm", "margin"), SETTINGS)
def test_scales_and_histories_are_exact_over_many_steps(hybrid, length, algorithm, margin):
    draw = np.random.default_rng([hybrid, length, len(algorithm), margin])
    for dtype in DTYPES.values() if length == 2 else [torch.bfloat16 if margin else torch.float32]:
        layer = octavo.nn.Linear(5, 18, params_dtype=dtype)
        states = delayed_states(hybrid, length, algorithm, margin)
        recipe = delayed(length, algorithm, margin, hybrid)
        for number in range(38 if length > 2 else 14):
            x, g = strange(draw, (3, 5), dtype), strange(draw, (3, 18), dtype)
            with torch.no_grad():
                layer.weight.copy_(strange(draw, (18, 5), dtype, specials=False))
            step(layer, x, g, recipe)
            for name, tensor in {"input": x, "weight": layer.weight, "grad_output": g}.items():
                states[name].step(array(tensor))
            check_states(layer, states, f"{dtype}, step {number}")


AMAX = st.one_of(st.floats(0, width=32), st.floats(0, 4, width=32), st.sampled_from([0.0, 448.0, 57344.0, 2.0**-149]))
ALGORITHM = st.sampled_from(["max", "most_recent"])


@settings(max_examples=40, deadline=None)
@given(amaxes=st.lists(AMAX, min_size=1, max_size=8), length=st.integers(1, 5), algorithm=ALGORITHM, margin=st.integers(0, 4))
def test_any_sequence_of_amaxes_gives_the_restated_scale(amaxes, length, algorithm, margin):
    layer = octavo.nn.Linear(1, 1, bias=False)
    states = delayed_states(True, length, algorithm, margin)
    for value in amaxes:
        x = torch.tensor([[value]])
        step(layer, x, -x, delayed(length, algorithm, margin))
        for name, tensor in {"input": x, "weight": layer.weight, "grad_output": x}.items():
            states[name].step(array(tensor))
        check_states(layer, states, f"after {value}")


def edges(fmt):
    """Every value, midpoint, and float32 neighbour of a midpoint, of both signs; what saturates; NaN."""
    middle = ((fmt.magnitudes[:-1] + fmt.magnitudes[1:]) / 2).astype(np.float32)
    near = [np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    beyond = np.array([fmt.max * 1.01, fmt.max * 1.07, 1e38, np.inf, np.nan, 1e-45], dtype=np.float32)
    positive = np.concatenate([fmt.magnitudes.astype(np.float32), middle, *near, beyond])
    return np.concatenate([positive, -positive])


@pytest.mark.parametrize("first", [448.0, 3.0, 0.7])
def test_casts_are_exact(first):
    """A weight of 1 lets the cast values through: the output is q/scale of the input, the input's gradient of g."""
    layer = octavo.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    step(layer, torch.tensor([[first]]), torch.tensor([[first * 128]]), delayed())
    report = octavo.fp8.inspect(layer)
    scales = {name: report[name]["scale"].numpy() for name in ("input", "grad_output")}
    draw = np.random.default_rng(0)
    x = np.concatenate([edges(E4M3) / scales["input"], draw.standard_normal(400)])
    g = np.concatenate([edges(E5M2) / scales["grad_output"], draw.standard_normal(400)])
    rows = max(len(x), len(g))
    x, g = (np.pad(values, (0, rows - len(values)))[:, None].astype(np.float32) for values in (x, g))
    y, dx = step(layer, torch.from_numpy(x), torch.from_numpy(g), delayed())
    for seen, given_, fmt, name in ((y, x, E4M3, "input"), (dx, g, E5M2, "grad_output")):
        want = round_trip(given_, scales[name], fmt)
        np.testing.assert_allclose(array(seen), want, rtol=1e-6, atol=0)
        again = fmt.encode(np.clip(array(seen).astype(np.float64) * scales[name], -fmt.max, fmt.max))
        quiet = given_ != 0
        assert (fmt.decode(again) == fmt.decode(cast(given_, scales[name], fmt)))[quiet & ~np.isnan(given_)].all()


def bound(left, right, dtype, bias=0.0):
    """What float32 accumulation, and bf16 rounding of the product and of the sum with the bias, may do to left · rightᵀ."""
    sizes = np.abs(left) @ np.abs(right).T
    allowed = (left.shape[1] + 16) * 2.0**-24 * sizes + 1e-30
    if dtype == torch.bfloat16:
        product = np.abs(left @ right.T)
        allowed = allowed + 2.0**-8 * (2 * product + np.abs(bias))
    return allowed


def close(tensor, pair, dtype, bias=None, what=""):
    """A product of the library equals left · rightᵀ (+ bias) of the restated operands."""
    left, right = pair
    bias = np.zeros(right.shape[0]) if bias is None else bias
    want, error = left @ right.T + bias, bound(left, right, dtype, bias)
    off = np.abs(array(tensor).astype(np.float64) - want) / error
    assert tensor.dtype == dtype
    assert off.max() <= 1, f"{what}: {off.max():.3g} times the allowed error, {np.mean(off > 1):.2%} of the elements"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_output_and_gradients_are_products_of_the_restated_operands(recipe, dtype, shape):
    rows, inner, outer = shape
    draw = np.random.default_rng([rows, inner, outer])
    layer = octavo.nn.Linear(inner, outer, params_dtype=dtype)
    states = delayed_states(True, 4, "max", 0)
    for number in range(3 if recipe == "delayed" else 2):
        # Rows and columns of very different sizes tell a scale of a row from one of a column, of a block, of the tensor.
        sizes = np.exp2(draw.integers(-6, 6, (rows, 1))) * np.exp2(draw.integers(-6, 6, inner))
        x = torch.from_numpy(draw.standard_normal((rows, inner)) * sizes).to(dtype)
        g = torch.from_numpy(draw.standard_normal((rows, outer)) * np.exp2(draw.integers(-6, 6, (rows, 1)))).to(dtype)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(draw.standard_normal((outer, inner)) * np.exp2(draw.integers(-4, 4, inner))))
            layer.bias.copy_(torch.from_numpy(draw.standard_normal(outer)))
        if rows > 2:
            x[1], g[2] = 0, 0
        layer.zero_grad()
        y, dx = step(layer, x, g, RECIPES[recipe]())
        want = operands(array(x), array(layer.weight), array(g), recipe, states)
        close(y, want.output, dtype, array(layer.bias), f"output, step {number}")
        close(dx, want.input_gradient, dtype, what=f"input gradient, step {number}")
        close(layer.weight.grad, want.weight_gradient, dtype, what=f"weight gradient, step {number}")
        close(layer.bias.grad[:, None], (array(g).T.astype(np.float64), np.ones((1, rows))), dtype, what="bias gradient")
        if recipe == "delayed":
            for name, tensor in {"input": x, "weight": layer.weight, "grad_output": g}.items():
                states[name].step(array(tensor))
            check_states(layer, states)


@pytest.mark.parametrize("recipe", RECIPES)
def test_leading_dimensions_are_rows(recipe):
    draw = torch.Generator().manual_seed(1)
    x, g = torch.randn(2, 3, 5, 20, generator=draw), torch.randn(2, 3, 5, 9, generator=draw)
    layer = octavo.nn.Linear(20, 9)
    y, dx = step(layer, x, g, RECIPES[recipe]())
    dw = layer.weight.grad.clone()
    layer.zero_grad()
    flat = octavo.nn.Linear(20, 9)
    flat.load_state_dict(layer.state_dict())
    flat_y, flat_dx = step(flat, x.view(30, 20), g.view(30, 9), RECIPES[recipe]())
    assert torch.equal(y.view(30, 9), flat_y)
    assert torch.equal(dx.view(30, 20), flat_dx)
    assert torch.equal(dw, flat.weight.grad)


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("hybrid", [True, False])
def test_current_scales_are_exact(hybrid, powers):
    fmt = octavo.recipe.Format.HYBRID if hybrid else octavo.recipe.Format.E4M3
    draw = np.random.default_rng(5)
    layer = octavo.nn.Linear(6, 4)
    for number in range(30):
        x, g = strange(draw, (3, 6), torch.float32), strange(draw, (3, 4), torch.float32)
        if number == 0:
            x.fill_(1)
        step(layer, x, g, octavo.recipe.CurrentScaling(fp8_format=fmt, use_power_2_scales=powers))
        report = octavo.fp8.inspect(layer)
        for name, tensor in {"input": x, "weight": layer.weight, "grad_output": g}.items():
            largest = amax(array(tensor))
            if 0 < largest < 1e-35:
                continue  # max / amax is beyond float32: the design names no scale
            want = scale_of(largest, E5M2 if hybrid and name == "grad_output" else E4M3)
            want = power_of_two_below(want) if powers else want
            assert report[name]["amax_history"] is None
            assert bits(report[name]["scale"]).tolist() == bits(want).tolist(), f"step {number}, {name}: amax {largest!r}"


@pytest.mark.parametrize("value", [0.0, 1e-42, float("inf"), float("nan")])
@pytest.mark.parametrize("recipe", ["current", "powers of two", "rowwise", "block"])
def test_an_input_without_a_usable_amax_has_the_scale_one(recipe, value):
    """Zeros stay zeros and tiny values do not turn into NaN; an infinity saturates to 448; only NaN stays NaN."""
    layer = octavo.nn.Linear(16, 16, bias=False)
    torch.nn.init.eye_(layer.weight)
    x = torch.full((1, 16), 0.75)
    x[0, 3] = value
    if value == 1e-42:
        x.fill_(value)
    y, dx = step(layer, x, torch.ones(1, 16), RECIPES[recipe]())
    assert torch.allclose(dx, torch.ones_like(dx), rtol=1e-6)
    if np.isnan(value):
        assert y.isnan().any()
        return
    assert y.isfinite().all()
    if value == float("inf"):
        # amax inf → scale 1: the infinity becomes the largest value, the others keep theirs.
        assert torch.allclose(y, torch.where(x.isinf(), 448.0, x), rtol=1e-6)
    if value == 0:
        assert y[0, 3] == 0


def test_block_scales_are_powers_of_two_rounded_down():
    layer = octavo.nn.Linear(256, 16)
    x = torch.linspace(0.1, 7, 256).repeat(2, 1)
    step(layer, x, torch.ones(2, 16), octavo.recipe.BlockScaling())
    report = octavo.fp8.inspect(layer)
    parts = array(x).reshape(2, 2, 128)
    want = power_of_two_below(scale_of(np.abs(parts).max(-1), E4M3))
    assert report["input"]["scale"].tolist() == want.tolist()
    assert report["weight"]["scale"].shape == (1, 2)
    assert blockwise(array(x), E4M3, 1).shape == (2, 256)


def test_a_state_is_seen_while_its_context_is_open():
    """Slot 0 collects inside the context; the update comes when it ends."""
    layer = octavo.nn.Linear(8, 8)
    states = delayed_states(True, 3, "max", 0)
    x = torch.randn(4, 8)
    with octavo.fp8_autocast(fp8_recipe=delayed(3)):
        y = layer(x)
        for name, tensor in {"input": x, "weight": layer.weight}.items():
            states[name].record(array(tensor))
            check_state(octavo.fp8.inspect(layer)[name], states[name])
    y.sum().backward()
    states["grad_output"].step(np.ones((4, 8)))
    states["input"].update()
    states["weight"].update()
    check_states(layer, states)


def test_saturation_is_reported():
    layer = octavo.nn.Linear(8, 8)
    torch.nn.init.constant_(layer.weight, 0.25)
    for size, saturated in ((1.0, False), (1.01, True), (1.01, False)):
        step(layer, torch.full((2, 8), size), torch.ones(2, 8), delayed())
        report = octavo.fp8.inspect(layer)
        assert (report["input"]["saturated"], report["weight"]["saturated"]) == (saturated, False)


def test_a_tensor_at_its_own_scale_is_not_reported_as_saturated():
    """amax × (max / amax) may round to the float32 above max; nothing is lost by that."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        layer, x = octavo.nn.Linear(8, 8), torch.randn(2, 8, generator=draw)
        step(layer, x, x, delayed())
        step(layer, x, x, delayed())
        assert not octavo.fp8.inspect(layer)["input"]["saturated"]
