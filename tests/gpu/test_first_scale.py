"""The first cast of delayed scaling on a GPU, where the host learns late of what has begun, and graphs wait for it."""

import copy

import pytest
import torch

import octavo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

HIDDEN = 256
LAYERS = {
    "linear": lambda: octavo.nn.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cuda"),
    "norm and linear": lambda: octavo.nn.LayerNormLinear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cuda"),
    "mlp": lambda: octavo.nn.LayerNormMLP(
        HIDDEN, 512, activation="swiglu", normalization="RMSNorm", params_dtype=torch.bfloat16, device="cuda"
    ),
}


def delayed():
    return octavo.recipe.DelayedScaling(amax_history_len=4)


def step(layer, x, g, recipe):
    x = x.clone().requires_grad_()
    with octavo.fp8_autocast(fp8_recipe=recipe):
        y = layer(x)
    y.backward(g)
    found = [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
    layer.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_first_step_has_the_bits_of_current_scaling(make):
    torch.manual_seed(0)
    first = make()
    second = copy.deepcopy(first)
    x = torch.randn(512, HIDDEN, device="cuda", dtype=torch.bfloat16)
    g = torch.randn_like(x) * 1e-6
    for found, wanted in zip(step(first, x, g, delayed()), step(second, x, g, octavo.recipe.CurrentScaling()), strict=True):
        assert torch.equal(found, wanted)
        assert found.any()


@pytest.mark.parametrize(("weights", "inputs"), [(1e-3, 1.0), (1e-5, 1.0), (1.0, 1e4), (1e-4, 3e5)])
def test_an_evaluation_of_a_model_that_never_trained_is_exact(weights, inputs):
    torch.manual_seed(1)
    layer = LAYERS["linear"]()
    with torch.no_grad():
        layer.weight.normal_(std=weights)
        layer.bias.zero_()
        x = torch.randn(512, HIDDEN, device="cuda", dtype=torch.bfloat16) * inputs
        want = x.double() @ layer.weight.double().T
        with octavo.fp8_autocast(fp8_recipe=delayed()):
            found = layer(x).double()
    assert (found - want).norm() / want.norm() < 0.06


def test_the_host_learns_late_of_what_has_begun_without_a_change_of_a_bit():
    """A copy through a checkpoint's records knows at once; both train alike."""
    torch.manual_seed(2)
    layer = LAYERS["mlp"]()
    batches = [torch.randn(2, 64, HIDDEN, device="cuda", dtype=torch.bfloat16) * 2.0**i for i in range(6)]
    results = []
    for hurry in (False, True):
        twin = copy.deepcopy(layer)
        found = []
        for x, g in batches:
            found += step(twin, x, g, delayed())
            if hurry:
                torch.cuda.synchronize()
                twin = copy.deepcopy(twin)
        results.append(found)
    assert all(map(torch.equal, *results))


def test_a_graph_waits_for_an_operand_that_has_not_begun(capsys):
    """The gradient is 0 for some calls: no graph before it has begun, and every call has the numbers of the loop."""
    torch.manual_seed(3)
    base = LAYERS["linear"]()
    factors = [0.0] * 12 + [1e-5] * 6
    losses = []
    for warmup in (3, 100):
        layer = copy.deepcopy(base)

        def loss(x, factor, layer=layer):
            with octavo.fp8_autocast(fp8_recipe=delayed()):
                return (layer(x).float() * factor).sum()

        run = octavo.graphed(loss, layer.parameters(), warmup=warmup)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        draw = torch.Generator("cuda").manual_seed(4)
        own, recorded = [], []
        for factor in factors:
            x = torch.randn(64, HIDDEN, device="cuda", generator=draw).bfloat16()
            own.append(run(x, torch.tensor(factor, device="cuda")).item())
            own.append(layer.weight.grad.float().norm().item())
            recorded.append(run._recorded is not None)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(own)
        assert not any(recorded[:12])
        assert recorded[-1] is (warmup == 3)
    assert losses[0] == losses[1]
    assert "grad_output of Linear" in capsys.readouterr().err
