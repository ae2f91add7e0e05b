"""`octavo.graphed`: what the graph computes is what the loop computes, to the bit."""

import copy

import pytest
import replicas
import torch

import octavo
import ranks
from benchmarks.cases import VisionCase
from benchmarks.vision.replicas import REPLICAS
from octavo.errors import InputError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

VIT = VisionCase("small-vit", 320, 2, 4, 1280, 32, 16, 224, 16)  # heads of 80, as vit-huge has
RECIPES = {
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=4),
    "current": octavo.recipe.CurrentScaling(),
    "rowwise": octavo.recipe.RowwiseScaling(),
    "bf16": None,
}


def setting(recipe):
    torch.manual_seed(0)
    shape = (128, 256, 2)
    model = torch.nn.Sequential(
        *(octavo.nn.TransformerLayer(*shape, self_attn_mask_type="no_mask", device="cuda") for _ in range(2))
    )

    def loss(x, y):
        with torch.autocast("cuda", torch.bfloat16), octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            return (model(x).float() - y).square().mean()

    batches = [(torch.randn(4, 33, 128, device="cuda"), torch.randn(4, 33, 128, device="cuda")) for _ in range(8)]
    return model, loss, batches, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", RECIPES)
def test_the_graph_repeats_the_loop(name):
    losses, weights = [], []
    for graph in (False, True):
        model, loss, batches, optimizer = setting(RECIPES[name])
        step = octavo.graphed(loss, model.parameters(), warmup=3 if graph else 100)
        own = []
        for batch in batches:
            own.append(step(*batch).item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(own)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert losses[0] == losses[1]
    assert all(map(torch.equal, *weights))
    assert len(set(losses[0])) == len(losses[0])


def test_other_shapes_are_refused():
    model, loss, batches, optimizer = setting(None)
    step = octavo.graphed(loss, model.parameters(), warmup=1)
    for batch in batches[:2]:
        step(*batch)
        optimizer.zero_grad()
    with pytest.raises(InputError, match="drop the last, smaller batch"):
        step(*(tensor[:2] for tensor in batches[2]))


def test_a_model_of_the_host_is_never_recorded():
    model = torch.nn.Linear(3, 4)
    step = octavo.graphed(lambda x: model(x).sum(), model.parameters(), warmup=1)
    for number in range(4):
        x = torch.full((2, 3), float(number))
        assert step(x).item() == model(x).sum().item()
        assert model.weight.grad.unique().item() == 2 * number
        model.zero_grad()


def test_tensors_of_the_host_are_refused_beside_a_gpus():
    model = torch.nn.Linear(3, 4, device="cuda")
    step = octavo.graphed(lambda x, factor: (model(x) * factor).sum(), model.parameters())
    with pytest.raises(InputError, match=r"input 1 of a graphed step is on cpu, .* \.to\(device, non_blocking=True\)"):
        step(torch.ones(2, 3, device="cuda"), torch.tensor(0.5))
    with pytest.raises(InputError, match=r"parameters are on cpu and cuda, .*model\.to\('cuda'\)"):
        octavo.graphed(lambda x: model(x).sum(), [*model.parameters(), torch.nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize("warmup", [1, 2])
def test_a_leaf_that_the_loss_makes_is_recorded_and_one_from_outside_refused(warmup):
    """With one call before it, the recording is where a leaf is met again."""
    model, prompt = torch.nn.Linear(3, 4, device="cuda"), torch.zeros(3, device="cuda", requires_grad=True)
    # Autograd's thread may still have the graph of an eager call, and PyTorch warns when a step of the same weights meets it.
    plain = copy.deepcopy(model)

    def penalty(x, model=model):
        between = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(between).square().sum(), between, create_graph=True)
        return slope.square().mean()

    step = octavo.graphed(penalty, model.parameters(), warmup=warmup)
    for number in range(4):
        x = torch.full((2, 3), float(number), device="cuda")
        torch.testing.assert_close(step(x), penalty(x, plain).detach())
        model.zero_grad()
    step = octavo.graphed(lambda x: model(x + prompt).mean(), model.parameters(), warmup=warmup)
    step(x)
    model.zero_grad()
    with pytest.raises(InputError, match=r"trains 1 tensors .*, the first of shape \(3,\)"):
        step(x)


@pytest.mark.parametrize("recipe", replicas.RECIPES)
def test_graphs_of_two_ranks_average_as_distributed_data_parallel(recipe):
    """Collectives of amaxes and gradients are recorded: 20 steps, 17 of them replays."""
    graph = ranks.run(2, replicas.train, "graphed", recipe, steps=20, large_bytes=10_000, timeout=300)
    eager = ranks.run(2, replicas.train, "graphed", recipe, steps=20, warmup=100, timeout=300)
    theirs = ranks.run(2, replicas.train, "ddp", recipe, steps=20, timeout=300)
    gloo = ranks.run(2, replicas.train, "graphed by gloo", recipe, steps=20, large_bytes=10_000, timeout=300)
    assert graph[0][3] == graph[1][3] == eager[0][3] == gloo[1][3]  # weights, scales and histories
    assert bool(graph[0][3][1]) is (recipe == "delayed")
    for (losses, gradients, _, _), (eager_losses, *_), (their_losses, their_gradients, _, _) in zip(
        graph, eager, theirs, strict=True
    ):
        assert losses == eager_losses
        assert len(set(losses)) > len(losses) // 2  # of a bf16 head, so that some are alike
        assert losses == pytest.approx(their_losses, rel=1e-2)
        for gradient, wanted in zip(gradients[0], their_gradients[0], strict=True):
            assert (gradient - wanted).norm() <= 1e-3 * wanted.norm() + 1e-9


def test_a_loss_of_distributed_data_parallel_is_refused():
    for messages, _ in ranks.run(2, replicas.refusals, timeout=300):
        assert "call the model inside it (model.module)" in messages["ddp"]


@pytest.mark.parametrize("name", [name for name in REPLICAS if "flash-attention" not in name])  # whose heads of 80 are wrong
def test_entries_of_the_vision_suite_are_replicas(name):
    pytest.importorskip("timm", exc_type=ImportError)
    if name.startswith("te-"):
        pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
    (losses, digest), (other_losses, other) = ranks.run(2, replicas.train_entry, name, VIT, steps=8, timeout=300)
    (plain, _), _ = ranks.run(2, replicas.train_entry, "torch-bf16", VIT, steps=8, timeout=300)
    assert digest == other
    assert losses != other_losses  # of other images
    assert losses == pytest.approx(plain, rel=3e-2)
