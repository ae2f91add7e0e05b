"""Mixtures of experts: beside experts run one by one in PyTorch, and the grouped kernels in Triton's interpreter."""

import copy

import pytest
import torch
from torch.nn import functional

import octavo
from octavo.errors import InputError
from octavo.nn import LayerNormMLP
from octavo.nn.mlp import interleave
from octavo.nn.moe import Experts, LayerNormMoE, balancing_loss

HIDDEN, FFN = 64, 48
RECIPES = {
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=3, amax_compute_algo="max"),
    "current": octavo.recipe.CurrentScaling(),
    "rowwise": octavo.recipe.RowwiseScaling(),
    "block": octavo.recipe.BlockScaling(),
}


def layer(experts, **settings):
    torch.manual_seed(0)
    return LayerNormMoE(HIDDEN, FFN, 1e-5, experts, **settings)


def plain(module, x):
    """The definition, in the dtype of x: each token through its experts, one by one."""
    p = {name: parameter.detach().to(x).requires_grad_() for name, parameter in module.named_parameters()}
    fc1, fc2 = (p[f"experts.{name}"].chunk(module.config.count) for name in ("fc1_weight", "fc2_weight"))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * p["layer_norm_weight"]
    logits = normed @ p["router_weight"].t()
    scores, chosen = logits.softmax(-1).topk(module.config.top_k)
    if module.config.normalized:
        scores = scores / scores.sum(-1, keepdim=True)
    tokens = []
    for row, weights, experts in zip(normed, scores, chosen, strict=True):
        parts = []
        for weight, expert in zip(weights, experts, strict=True):
            gate, up = (fc1[expert] @ row).chunk(2)
            parts.append(weight * (fc2[expert] @ (functional.silu(gate) * up)))
        tokens.append(torch.stack(parts).sum(0))
    return torch.stack(tokens), p, logits


@pytest.mark.parametrize("experts", [Experts(4, 2), Experts(5, 3, normalized=False), Experts(3, 1), Experts(2, 2)], ids=str)
def test_the_result_and_every_gradient_are_those_of_experts_run_one_by_one(experts):
    module = layer(experts)
    x = torch.randn(37, HIDDEN, requires_grad=True)
    delta, dy, dh = torch.randn(3, 37, HIDDEN)
    h, y, _ = module(x, delta=delta)
    torch.autograd.backward((y, h), (dy, dh))
    exact = (x.detach() + delta).double().requires_grad_()
    wanted, parameters, _ = plain(module, exact)
    torch.autograd.backward((wanted, exact), (dy.double(), dh.double()))
    assert torch.equal(h, x + delta)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), parameters[name].grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_expert_in_fp8_has_the_bits_of_an_mlp(recipe):
    mixture = layer(Experts(1, 1))
    mlp = LayerNormMLP(HIDDEN, FFN, bias=False, normalization="RMSNorm", activation="swiglu")
    with torch.no_grad():
        mlp.fc1_weight.copy_(interleave(*mixture.experts.fc1_weight.chunk(2)))
        mlp.fc2_weight.copy_(mixture.experts.fc2_weight)
        mixture.layer_norm_weight.copy_(torch.rand(HIDDEN) + 0.5)
        mlp.layer_norm_weight.copy_(mixture.layer_norm_weight)
    for _ in range(3):
        x = torch.randn(40, HIDDEN)
        results = []
        for module in (mixture, mlp):
            module.zero_grad()
            own = x.clone().requires_grad_()
            with octavo.fp8_autocast(enabled=True, fp8_recipe=RECIPES[recipe]):
                y = module(own)
            y = y[1] if isinstance(y, tuple) else y
            y.square().sum().backward()
            results.append((y.detach(), own.grad, (module.experts if module is mixture else module).fc2_weight.grad))
        for found, wanted in zip(*results, strict=True):
            assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    if recipe == "delayed":
        found, wanted = (octavo.fp8.inspect(module)["fc1"]["input"] for module in (mixture.experts, mlp))
        assert torch.equal(found["scale"][0], wanted["scale"])
        assert torch.equal(found["amax_history"][:, 0], wanted["amax_history"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_forward_without_gradients_has_the_result_of_one_with_them(recipe):
    x = torch.randn(40, HIDDEN)

    def result(module):
        with octavo.fp8_autocast(enabled=True, fp8_recipe=RECIPES[recipe]):
            return module(x)[1].detach()

    module = layer(Experts(4, 2)).eval()
    wanted = result(copy.deepcopy(module))
    with torch.no_grad():
        assert torch.equal(result(module), wanted)


def steps(module, recipe, forced=None, count=3):
    """Results and gradients of the last of some steps; forced: the expert of all tokens."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        module.zero_grad()
        x = torch.randn(30, HIDDEN, generator=draw).bfloat16().requires_grad_()
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            h, y, routed = module(x)
        ((h + y).float().square().mean() + 1e-3 * routed[:4].square().sum()).backward()
    return {"y": y.detach(), "routing": routed.detach(), "x": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


def send_all_to(monkeypatch, expert):
    def route(self, logits):
        chosen = torch.full((len(logits), 1), expert)
        return logits.softmax(-1).gather(1, chosen), chosen

    monkeypatch.setattr(LayerNormMoE, "_route", route)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_experts_without_tokens_have_no_gradient_and_keep_their_scales(recipe, monkeypatch):
    send_all_to(monkeypatch, 2)
    module = layer(Experts(4, 1))
    found = steps(module, RECIPES.get(recipe))
    for name in ("fc1_weight", "fc2_weight"):
        gradients = found[f"experts.{name}"].unflatten(0, (4, -1))
        assert gradients[2].any()
        assert not gradients[[0, 1, 3]].any()
        assert gradients.isfinite().all()
    if recipe == "delayed":
        scale = octavo.fp8.inspect(module)["experts.fc1"]["input"]["scale"]
        assert torch.equal(scale[[0, 1, 3]], torch.ones(3))
        assert scale[2] != 1


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_frozen_experts_give_the_same_input_gradients_and_save_nothing_for_their_own(recipe):
    found, saved = [], []
    for frozen in (False, True):
        module = layer(Experts(4, 2))
        module.experts.fc1_weight.requires_grad_(not frozen)
        module.experts.fc2_weight.requires_grad_(not frozen)
        kept = {}
        weights = {p.data_ptr() for p in module.parameters()}

        def pack(x, kept=kept, weights=weights):
            if x.data_ptr() not in weights:
                kept[x.data_ptr()] = x.nbytes
            return x

        draw = torch.Generator().manual_seed(3)
        for _ in range(3):
            kept.clear()
            module.zero_grad()
            x = torch.randn(30, HIDDEN, generator=draw).requires_grad_()
            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
                octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=RECIPES.get(recipe)),
            ):
                h, y, _ = module(x)
            (h + y).square().sum().backward()
        found.append((y, x.grad, module.router_weight.grad, module.layer_norm_weight.grad))
        saved.append(sum(kept.values()))
        assert (module.experts.fc1_weight.grad is None, module.experts.fc2_weight.grad is None) == (frozen, frozen)
    assert all(map(torch.equal, *found))
    if recipe in ("rowwise", "block"):
        assert saved[1] < saved[0]  # without the columnwise operands
    else:  # these are made again from what the gradients of router and activation need anyway
        assert saved[1] == saved[0]


def test_routing_counts_named_tokens_and_its_loss_has_the_gradient_of_probabilities():
    module = layer(Experts(4, 2))
    x = torch.randn(2, 10, HIDDEN)
    counted = torch.ones(2, 10, dtype=torch.bool)
    counted[1, 4:] = False
    _, _, routed = module(x, counted=counted)
    _, _, logits = plain(module, x.flatten(0, 1).double())
    logits = logits[counted.flatten()].detach().requires_grad_()
    probabilities = logits.softmax(-1)
    visits = functional.one_hot(probabilities.topk(2).indices, 4).sum((0, 1)).double()
    torch.testing.assert_close(routed[:4].double(), probabilities.sum(0), rtol=1e-4, atol=1e-5)
    assert torch.equal(routed[4:8].double(), visits)
    torch.testing.assert_close(routed[8].double(), logits.logsumexp(-1).square().sum(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(routed[9].double(), -(probabilities * probabilities.log()).sum(), rtol=1e-4, atol=1e-5)
    loss = balancing_loss(routed[None], routed[4:8].detach(), 2)
    wanted = 4 * (visits / 14 * probabilities.mean(0)).sum()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-4, atol=1e-6)
    loss.backward()
    assert module.router_weight.grad.any()


def test_no_tokens():
    x = torch.randn(2, 0, HIDDEN, requires_grad=True)
    h, y, routed = layer(Experts(4, 2))(x)
    y.sum().backward()
    assert h.shape == y.shape == x.grad.shape == (2, 0, HIDDEN)
    assert not routed.any()


def test_the_routing_has_no_second_derivative():
    x = torch.randn(12, HIDDEN, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(layer(Experts(4, 2))(x)[2].square().sum(), x, create_graph=True)


def test_jitter_is_of_training_alone():
    module = layer(Experts(4, 2, jitter=0.1))
    x = torch.randn(12, HIDDEN)
    torch.manual_seed(5)
    one = module(x)[1]
    assert not torch.equal(one, module(x)[1])
    torch.manual_seed(5)
    assert torch.equal(one, module(x)[1])
    module.eval()
    assert torch.equal(module(x)[1], module(x)[1])


@pytest.mark.parametrize(
    ("experts", "named"),
    [
        (Experts(4, 5), "from 1 to 4"),
        (Experts(4, 0), "from 1 to 4"),
        (Experts(4, 2.5), "2.5 experts per token of 4"),
        (Experts(0, 0), "0 experts .* from 1"),
        (Experts(-1, 1), "-1 experts"),
        (Experts(4, 2, jitter=1.0), "below 1"),
    ],
    ids=str,
)
def test_impossible_mixtures_are_refused(experts, named):
    with pytest.raises(InputError, match=named):
        layer(experts)


def test_a_deep_copy_has_scales_of_its_own():
    module = layer(Experts(4, 2))
    steps(module, RECIPES["delayed"])
    before = octavo.fp8.inspect(module)["experts.fc1"]["input"]["scale"]
    twin = copy.deepcopy(module)
    assert torch.equal(octavo.fp8.inspect(twin)["experts.fc1"]["input"]["scale"], before)
    for _ in range(3):
        with octavo.fp8_autocast(enabled=True, fp8_recipe=RECIPES["delayed"]):
            y = twin(torch.randn(30, HIDDEN) * 9)[1]
        y.sum().backward()
    assert torch.equal(octavo.fp8.inspect(module)["experts.fc1"]["input"]["scale"], before)


def assigned(module, x, counted=None, training=True):
    """As `plain`, by "sinkhorn" or "balanced": (y, parameters, logits, experts), by their definitions."""
    p = {name: parameter.detach().to(x).requires_grad_() for name, parameter in module.named_parameters()}
    count, top_k = module.config.count, module.config.top_k
    fc1, fc2 = (p[f"experts.{name}"].chunk(count) for name in ("fc1_weight", "fc2_weight"))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * p["layer_norm_weight"]
    logits = normed @ p["router_weight"].t()
    weights = logits.sigmoid() if module.config.assignment == "sinkhorn" and top_k == 1 else logits.softmax(-1)
    if module.config.assignment == "balanced" and training:
        chosen = torch.tensor([[(token * top_k + i) % count for i in range(top_k)] for token in range(len(x))])
    else:
        cost = logits.detach().exp()
        transport = cost.clone()
        if training:
            taken = cost if counted is None else cost[counted]
            rows, columns, change = None, cost.new_ones(count), 1.0
            while change > 1e-4:
                rows = 1 / (len(taken) * ((taken * columns).sum(1) + 1e-8))
                before, columns = columns, 1 / (count * ((taken * rows[:, None]).sum(0) + 1e-8))
                change = (columns - before).abs().mean()
            transport = cost * columns
        chosen = transport.topk(top_k).indices
    scores = weights.gather(1, chosen)
    if module.config.assignment == "balanced" and module.config.normalized:
        scores = scores / scores.sum(-1, keepdim=True)
    tokens = []
    for row, ws, experts in zip(normed, scores, chosen, strict=True):
        parts = []
        for weight, expert in zip(ws, experts, strict=True):
            gate, up = (fc1[expert] @ row).chunk(2)
            parts.append(weight * (fc2[expert] @ (functional.silu(gate) * up)))
        tokens.append(torch.stack(parts).sum(0))
    return torch.stack(tokens), p, logits, chosen


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("assignment", ["sinkhorn", "balanced"])
@pytest.mark.parametrize(
    ("count", "top_k", "normalized"), [(4, 1, True), (4, 2, True), (5, 3, False), (3, 3, True), (1, 1, True)]
)
def test_assignments_and_every_gradient_are_those_of_their_definitions(count, top_k, normalized, assignment, padded, training):
    module = layer(Experts(count, top_k, normalized, assignment=assignment)).train(training)
    with torch.no_grad():
        module.router_weight.mul_(4)  # so that an assignment is another than that of the largest
    x, dy = torch.randn(37, HIDDEN, requires_grad=True), torch.randn(37, HIDDEN)
    counted = torch.arange(37) < 25 if padded else None
    _, y, routing = module(x, counted=counted)
    (y * dy).sum().add(routing[-2]).backward()  # and the z loss
    exact = x.detach().double().requires_grad_()
    wanted, parameters, logits, chosen = assigned(module, exact, counted, training)
    squares = logits.logsumexp(-1).square()
    (wanted * dy.double()).sum().add((squares if counted is None else squares[counted]).sum()).backward()
    torch.testing.assert_close(y.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), parameters[name].grad, rtol=1e-4, atol=1e-3, msg=name)
    visits = torch.zeros(37, count).scatter_(1, chosen, 1.0)
    assert torch.equal(routing[count : 2 * count], visits[:25].sum(0) if padded else visits.sum(0))


def test_an_unknown_assignment_is_refused():
    with pytest.raises(InputError, match=r"unknown assignment 'sinkhorm'\. Did you mean 'sinkhorn'"):
        layer(Experts(4, 2, assignment="sinkhorm"))
