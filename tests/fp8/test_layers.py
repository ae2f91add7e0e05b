"""Fused layers, dtypes under `torch.autocast`, and `torch.compile`."""

from __future__ import annotations

import contextlib
import math
from unittest import mock

import numpy as np
import pytest
import torch
from driving import RECIPES, array, bits, delayed, gradients, snapshot, step
from restatement import E4M3, amax, normalised, swiglu, tensorwise
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.fp8.columnwise import cache_columnwise
from octavo.fp8.quantizer import DenseOperand, LinearQuantizer
from octavo.fp8.recipe import Operand
from octavo.hardware import GIB
from octavo.kernels import gemm

NORMS = ["RMSNorm", "LayerNorm"]
HIDDEN = 48


def set_norm(layer, draw):
    """Norm weights and biases that are not 1 and 0."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("layer_norm"):
                parameter.copy_(torch.rand(HIDDEN, generator=draw) + 0.5)


def normed_of(layer, x, kind):
    bias = layer.layer_norm_bias
    return normalised(array(x), array(layer.layer_norm_weight), None if bias is None else array(bias), layer.eps, kind)


def bf16(values):
    """float64 rounded to bf16."""
    return torch.from_numpy(values).bfloat16().double().numpy()


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("seed", range(4))
def test_the_cast_reads_the_norms_float32_result(kind, seed):
    draw = torch.Generator().manual_seed(seed)
    for eps in (1e-5, 0.1):
        for layer in (
            octavo.nn.LayerNormLinear(HIDDEN, 16, eps=eps, normalization=kind, params_dtype=torch.bfloat16),
            octavo.nn.LayerNormMLP(HIDDEN, 16, eps=eps, normalization=kind, params_dtype=torch.bfloat16),
        ):
            set_norm(layer, draw)
            while True:
                x = torch.randn(5, HIDDEN, generator=draw).bfloat16()
                normed = normed_of(layer, x, kind)
                largest = np.abs(normed).max()
                if abs(bf16(largest.reshape(1))[0] - largest) > 1e-4 * largest:
                    break
            step(layer, x, torch.ones(5, 16 if isinstance(layer, octavo.nn.LayerNormLinear) else HIDDEN).bfloat16(), delayed(2))
            report = octavo.fp8.inspect(layer)
            report = report.get("fc1", report)
            assert report["input"]["amax_history"][1].item() == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("activation", ["swiglu", "gelu_exact"])
@pytest.mark.parametrize("ffn", [32, 24])
def test_the_second_cast_reads_the_activations_float32_result(kind, activation, ffn):
    draw = torch.Generator().manual_seed(ffn)
    layer = octavo.nn.LayerNormMLP(
        HIDDEN, ffn, bias=False, normalization=kind, activation=activation, params_dtype=torch.bfloat16
    )
    set_norm(layer, draw)
    with torch.no_grad():
        layer.fc1_weight.normal_(std=0.1, generator=draw)
    differs = 0
    for _ in range(4):
        x = torch.randn(5, HIDDEN, generator=draw).bfloat16()
        fresh = octavo.nn.LayerNormMLP(
            HIDDEN, ffn, bias=False, normalization=kind, activation=activation, params_dtype=torch.bfloat16
        )
        fresh.load_state_dict(layer.state_dict())
        step(fresh, x, torch.ones(5, HIDDEN).bfloat16(), delayed(2))
        # First step: every scale is that of the tensor's own amax. The output of fc1 is in the model's dtype.
        normed = normed_of(layer, x, kind).astype(np.float32)
        hidden = bf16(tensorwise(normed, E4M3) @ tensorwise(array(layer.fc1_weight), E4M3).T)
        if activation == "swiglu":
            block = math.gcd(ffn, 32)
            halves = hidden.reshape(5, ffn // block, 2, block)
            activated = swiglu(halves[:, :, 0], halves[:, :, 1])
        else:
            activated = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
        largest = np.abs(activated).max()
        differs += abs(bf16(largest.reshape(1))[0] - largest) > 1e-4 * largest
        found = octavo.fp8.inspect(fresh)["fc2"]["input"]["amax_history"][1].item()
        assert found == pytest.approx(largest, rel=1e-6)
        assert octavo.fp8.inspect(fresh)["fc1"]["weight"]["amax_history"][1].item() == amax(array(layer.fc1_weight))
    assert differs


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_an_mlp_is_its_parts(recipe, kind, activation):
    """Against norm, Linear, activation, Linear in float32, all gradients included: equal but for a rare FP8 rounding."""
    torch.manual_seed(8)
    mlp = octavo.nn.LayerNormMLP(HIDDEN, 32, normalization=kind, activation=activation)
    first, second = octavo.nn.Linear(HIDDEN, mlp.fc1_weight.shape[0]), octavo.nn.Linear(32, HIDDEN)
    first.weight, first.bias, second.weight, second.bias = (
        torch.nn.Parameter(p.detach().clone()) for p in (mlp.fc1_weight, mlp.fc1_bias, mlp.fc2_weight, mlp.fc2_bias)
    )
    norm = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}[kind](HIDDEN, eps=mlp.eps)

    def parts(x):
        hidden = first(norm(x))
        if activation == "gelu":
            return second(torch.nn.functional.gelu(hidden, approximate="tanh"))
        blocks = hidden.unflatten(-1, (-1, 2, 32))  # 32 gates, then their 32 ups
        return second((torch.nn.functional.silu(blocks[:, :, 0]) * blocks[:, :, 1]).flatten(1))

    for number in range(2):
        x, g = torch.randn(20, HIDDEN) * 2**number, torch.randn(20, HIDDEN)
        y, dx = step(mlp, x, g, RECIPES[recipe]())
        want_y, want_dx = step(parts, x, g, RECIPES[recipe]())
        found = gradients(mlp)
        pairs = {
            "output": (y, want_y),
            "input": (dx, want_dx),
            "fc1_weight": (found["fc1_weight"], first.weight.grad),
            "fc2_weight": (found["fc2_weight"], second.weight.grad),
            "fc1_bias": (found["fc1_bias"], first.bias.grad),
            "fc2_bias": (found["fc2_bias"], second.bias.grad),
            "layer_norm_weight": (found["layer_norm_weight"], norm.weight.grad),
        }
        for name, (one, other) in pairs.items():
            assert (one - other).norm() <= 0.01 * other.norm(), f"step {number}: {name}"
        for module in (first, second, norm):
            module.zero_grad()


@pytest.mark.parametrize("fp8", [True, False], ids=["FP8", "no FP8"])
@pytest.mark.parametrize("autocast", [True, False], ids=["torch.autocast", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_dtypes_are_pytorchs(recipe, dtype, autocast, fp8):
    ours, theirs = octavo.nn.Linear(20, 12, params_dtype=dtype), torch.nn.Linear(20, 12, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    kinds, outputs = [], []
    for layer in (theirs, ours):
        x = torch.linspace(-2, 2, 60).view(3, 20).to(dtype).requires_grad_()
        enabled = octavo.fp8_autocast(enabled=fp8 and layer is ours, fp8_recipe=RECIPES[recipe]())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), enabled:
            y = layer(x)
        y.float().square().sum().backward()
        kinds.append([y.dtype, x.grad.dtype, layer.weight.grad.dtype, layer.bias.grad.dtype])
        outputs.append(y.float())
    assert kinds[0] == kinds[1]
    if fp8:
        assert (outputs[0] - outputs[1]).norm() < 0.1 * outputs[0].norm()
        assert not torch.equal(*outputs)
    else:
        assert torch.equal(*outputs)


def test_under_torch_autocast_the_amax_of_a_master_weight_is_its_own():
    layer, x = octavo.nn.Linear(20, 12), torch.randn(3, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16), octavo.fp8_autocast(fp8_recipe=delayed()):
        layer(x)
    report = octavo.fp8.inspect(layer)
    for name, tensor in {"input": x, "weight": layer.weight}.items():
        found, exact = report[name]["amax_history"][-1], torch.tensor(amax(array(tensor)))
        assert bits(found) in (bits(exact), bits(exact.bfloat16().float()))


def test_inspect_of_a_layer_whose_first_forward_failed():
    with octavo.fp8_autocast():
        layer = octavo.nn.LayerNormMLP(HIDDEN, 32)  # inside: entering an autocast offers slots to earlier layers only
        layer.fc1_weight.data = torch.randn(64, HIDDEN - 16)
        with pytest.raises(RuntimeError, match=str(HIDDEN)):
            layer(torch.randn(3, HIDDEN))
    for entry in octavo.fp8.inspect(layer)["fc2"].values():
        assert entry["scale"] == 1
        assert not entry["amax_history"].any()


torch_warns_of_itself = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
"""Dynamo instantiates `torch.autograd.Function` while it traces any such function."""


@torch_warns_of_itself
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_compiled_layer_trains_as_an_eager_one(activation):
    torch.manual_seed(9)
    layer = octavo.nn.LayerNormMLP(32, 16, normalization="RMSNorm", activation=activation)
    x, target = torch.randn(6, 32), torch.randn(6, 32)

    def train(module, forward):
        optimizer, losses, states = torch.optim.SGD(module.parameters(), lr=0.05), [], []
        for _ in range(5):
            with octavo.fp8_autocast(fp8_recipe=delayed()):
                loss = (forward(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            states.append(snapshot(module))
        return losses, states

    twin = octavo.nn.LayerNormMLP(32, 16, normalization="RMSNorm", activation=activation)
    twin.load_state_dict(layer.state_dict())
    losses, states = train(layer, layer)
    compiled_losses, compiled_states = train(twin, torch.compile(twin, backend="aot_eager", fullgraph=True))
    np.testing.assert_allclose(compiled_losses, losses, rtol=1e-3)
    assert losses[-1] < losses[0]
    for at, tolerance in ((0, 1e-6), (-1, 0.02)):
        assert compiled_states[at].keys() == states[at].keys()
        for name, (scale, history) in states[at].items():
            for found, want in zip(compiled_states[at][name], (scale, history), strict=True):
                found, want = (np.array(pattern, dtype=np.uint32).view(np.float32) for pattern in (found, want))
                np.testing.assert_allclose(found, want, rtol=tolerance, err_msg=name)


@torch_warns_of_itself
@pytest.mark.long(lambda recipe, inside, rows: (list(RECIPES).index(recipe) + rows) % 2 == inside)  # every two together are not
@pytest.mark.parametrize("rows", [5, 1, 0])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_linear_gives_the_numbers_of_an_eager_one(recipe, inside, rows):
    """The update at the end of the context must not reach the scales that a compiled forward saved for its backward."""
    torch.compiler.reset()
    torch.manual_seed(10)
    layer, twin = octavo.nn.Linear(20, 12), octavo.nn.Linear(20, 12)
    twin.load_state_dict(layer.state_dict())
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for number in range(3):
        x, g = torch.randn(rows, 20) * 2**number, torch.randn(rows, 12)
        results = []
        for forward in (layer, compiled):
            own_x = x.clone().requires_grad_()
            with octavo.fp8_autocast(fp8_recipe=RECIPES[recipe]()):
                y = forward(own_x)
                if inside:
                    y.backward(g)
            if not inside:
                y.backward(g)
            results.append([y, own_x.grad, *gradients(layer if forward is layer else twin).values()])
        for name, eager, other in zip(("output", "dx", "dw", "db"), *results, strict=True):
            torch.testing.assert_close(other, eager, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        if recipe == "delayed" and rows:  # of nothing a compiler casts no weight
            assert snapshot(twin) == snapshot(layer)


@pytest.mark.long
@torch_warns_of_itself
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of Inductor
@pytest.mark.parametrize("recipe", ["block", "rowwise"])
def test_code_generated_for_a_cpu_gives_the_numbers_of_an_eager_layer(recipe):
    """Of changing sizes, which the compiler's second version takes as symbols, and of columns beside each other or not."""
    torch.compiler.reset()
    torch.manual_seed(10)
    layer, twin = octavo.nn.Linear(64, 96), octavo.nn.Linear(64, 96)
    twin.load_state_dict(layer.state_dict())
    compiled = torch.compile(twin, fullgraph=True)
    for rows in (289, 45, 16, 200, 128, 257):
        x, g = torch.randn(rows, 64), torch.randn(rows, 96)
        results = []
        for module, forward in ((layer, layer), (twin, compiled)):
            own_x = x.clone().requires_grad_()
            module.zero_grad()
            with octavo.fp8_autocast(fp8_recipe=RECIPES[recipe]()):
                y = forward(own_x)
            y.backward(g)
            results.append([y, own_x.grad, *gradients(module).values()])
        for name, eager, other in zip(("output", "dx", "dw", "db"), *results, strict=True):
            torch.testing.assert_close(
                other, eager, rtol=1e-6, atol=1e-5, msg=lambda text, at=f"{rows} {name}": f"{at}: {text}"
            )


@torch_warns_of_itself
@pytest.mark.parametrize("recipe", RECIPES)
def test_inspect_tells_of_a_compiled_layer_what_it_tells_of_an_eager_one(recipe):
    torch.compiler.reset()
    torch.manual_seed(10)
    layer, twin = octavo.nn.Linear(20, 12), octavo.nn.Linear(20, 12)
    twin.load_state_dict(layer.state_dict())
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for number in range(2):
        x, g = torch.randn(5, 20) * 2**number, torch.randn(5, 12)
        step(layer, x, g, RECIPES[recipe]())
        step(compiled, x, g, RECIPES[recipe]())
        if recipe == "delayed":
            assert snapshot(twin) == snapshot(layer)
        else:  # compiled code keeps no scales of recipes that have no state
            told = octavo.fp8.inspect(layer)
            assert octavo.fp8.inspect(twin) == {name: entry | {"scale": None} for name, entry in told.items()}


@torch_warns_of_itself
def test_a_compiled_layer_in_a_checkpoint_repeats_its_casts_or_is_refused():
    torch.compiler.reset()
    torch.manual_seed(12)
    layer, twin = octavo.nn.Linear(20, 12), octavo.nn.Linear(20, 12)
    twin.load_state_dict(layer.state_dict())
    compiled = torch.compile(twin, backend="aot_eager")
    for number in range(3):
        x, g = torch.randn(5, 20) * 3**number, torch.randn(5, 12)
        own_x = x.clone().requires_grad_()
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            y = checkpoint(compiled, own_x, use_reentrant=False, context_fn=octavo.fp8.autocast.recomputing)
        y.backward(g)
        _, dx = step(layer, x, g, delayed())[:2]
        torch.testing.assert_close(own_x.grad, dx, rtol=1e-6, atol=1e-6)
        assert snapshot(twin) == snapshot(layer)


@pytest.mark.long(lambda recipe, evaluated: (list(RECIPES).index(recipe) % 2 == 0) == evaluated)
@torch_warns_of_itself
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_compiled_layer_in_a_reentrant_checkpoint_is_refused(recipe, evaluated):
    torch.compiler.reset()
    compiled = torch.compile(octavo.nn.Linear(32, 32), backend="aot_eager")
    x = torch.randn(16, 32, requires_grad=True)
    with octavo.fp8_autocast(fp8_recipe=RECIPES[recipe]()):
        if evaluated:  # by the very code that the checkpoint's forward runs
            with torch.no_grad():
                compiled(x)
        with pytest.raises(octavo.errors.InputError, match="reentrant checkpoint"):
            checkpoint(compiled, x, use_reentrant=True)


@torch_warns_of_itself
def test_a_compiled_layer_keeps_the_weight_of_the_first_micro_batch():
    torch.compiler.reset()
    torch.manual_seed(12)
    layer, twin = octavo.nn.Linear(20, 12), octavo.nn.Linear(20, 12)
    twin.load_state_dict(layer.state_dict())
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for number in range(6):
        x, g = torch.randn(5, 20), torch.randn(5, 12)
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            y = layer(x, is_first_microbatch=number % 3 == 0)
            y.backward(g)
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            other = compiled(x, is_first_microbatch=number % 3 == 0)
            other.backward(g)
        torch.testing.assert_close(other, y, rtol=1e-6, atol=1e-6)
        assert snapshot(twin) == snapshot(layer)
        with torch.no_grad():
            layer.weight.mul_(-1.5)
            twin.weight.mul_(-1.5)


@pytest.mark.parametrize("fast", [False, True, "input_gradient"])
@pytest.mark.parametrize("kind", [octavo.recipe.DelayedScaling, octavo.recipe.CurrentScaling])
def test_a_recipe_says_which_products_accumulate_fast(kind, fast, monkeypatch):
    found, product = {}, gemm.scaled_mm

    def multiplied(*args, precise=False, **how):
        result = product(*args, precise=precise, **how)
        found[tuple(result.shape)] = precise
        return result

    monkeypatch.setattr(gemm, "scaled_mm", multiplied)
    layer, recipe = octavo.nn.Linear(16, 32, bias=False), kind(fast_accumulation=fast)
    x, dy = torch.randn(8, 16, requires_grad=True), torch.randn(8, 32)
    step(layer, x, dy, recipe)
    assert found == {(8, 32): False, (8, 16): not fast, (32, 16): fast is not True}  # output, gradients of input and weight


@pytest.mark.parametrize("kind", [octavo.recipe.DelayedScaling, octavo.recipe.CurrentScaling])
@pytest.mark.parametrize("fast", ["weight_gradient", "yes", 1, None])
def test_other_accumulations_are_refused(kind, fast):
    with pytest.raises(octavo.errors.InputError, match=r"input_gradient.*Change fp8\.fast_accumulation"):
        kind(fast_accumulation=fast)


@pytest.mark.parametrize("around", ["nothing", "hooks", "micro-batches"])
@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_float32_weights_are_read_once_and_those_of_16_bits_twice_unless_kept(name, dtype, kept, around):
    """Under hooks, as of checkpoints and offloading, memory goes first. The gradients have the same bits either way."""
    x = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    found = []
    for context in (contextlib.nullcontext(), hooks if around == "hooks" else contextlib.nullcontext()):
        layer = octavo.nn.LayerNormMLP(HIDDEN, 32, bias=False, params_dtype=dtype)
        layer.load_state_dict(found[0][0] if found else layer.state_dict())
        cache_columnwise([layer], GIB if kept and found else None)
        reads = mock.patch.object(LinearQuantizer, "_operand", side_effect=DenseOperand)
        y = x.clone().requires_grad_()
        with reads as counted, context, octavo.fp8_autocast(fp8_recipe=RECIPES[name]()), torch.autocast("cpu", torch.bfloat16):
            layer(y, is_first_microbatch=True if around == "micro-batches" else None).float().square().sum().backward()
        found.append((layer.state_dict(), y.grad, *(parameter.grad for parameter in layer.parameters())))
    at_once = around == "nothing" and (dtype == torch.float32 or kept)
    assert counted.call_count == 2 * (1 if at_once or around == "micro-batches" else 2)
    assert all(map(torch.equal, found[0][1:], found[1][1:]))


@pytest.mark.parametrize("make", [octavo.nn.Linear, octavo.nn.LayerNormLinear])
def test_a_float32_weight_whose_layout_no_backward_reads_is_cast_rowwise_alone(make):
    layer, x, made = make(HIDDEN, 32, bias=False, params_dtype=torch.float32), torch.randn(16, HIDDEN).bfloat16(), []
    cast = LinearQuantizer._cast

    def noted(self, operand, *args, **how):
        made.append((operand, how["rowwise"], how["columnwise"]))
        return cast(self, operand, *args, **how)

    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name == "weight")
    for wanted in (False, True):
        with mock.patch.object(LinearQuantizer, "_cast", noted), octavo.fp8_autocast(), torch.autocast("cpu", torch.bfloat16):
            layer(x.clone().requires_grad_(wanted))
        assert [how for operand, *how in made if operand is Operand.WEIGHT][-1] == [True, wanted]


@pytest.mark.parametrize("make", [octavo.nn.LayerNormLinear, octavo.nn.LayerNormMLP])
def test_the_gradient_of_a_float32_bias_is_not_rounded_to_its_weights_dtype(make):
    torch.manual_seed(3)
    layer, x = make(HIDDEN, 32, params_dtype=torch.bfloat16), torch.randn(64, HIDDEN).bfloat16().requires_grad_()
    layer.layer_norm_bias = torch.nn.Parameter(layer.layer_norm_bias.float())
    with octavo.fp8_autocast():
        y = layer(x)
    (y.float() * torch.randn(y.shape)).sum().backward()
    bias, weight = layer.layer_norm_bias.grad, layer.layer_norm_weight.grad
    assert (bias.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
    assert (bias != bias.bfloat16()).float().mean() > 0.9


def test_parts_of_a_flat_parameter_are_cast_twice():
    """FSDP1 frees the flat parameter of a layer between forward and backward."""
    flat, x = torch.randn(2 * 32 * HIDDEN), torch.randn(16, HIDDEN).bfloat16().requires_grad_()
    layer = octavo.nn.Linear(HIDDEN, 32, bias=False, params_dtype=torch.float32)
    layer.weight.data = flat[: 32 * HIDDEN].view(32, HIDDEN)
    reads = mock.patch.object(LinearQuantizer, "_operand", side_effect=DenseOperand)
    with octavo.fp8_autocast(), reads as counted:
        layer(x).float().sum().backward()
    assert counted.call_count == 2
