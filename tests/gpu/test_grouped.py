"""GroupedLinear on a GPU: every recipe beside the CPU's, where one launch takes all experts and where it does not."""

import copy

import pytest
import torch

import octavo
from octavo.kernels import gemm
from octavo.nn import grouped as in_nn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

RECIPES = {
    "none": lambda: None,
    "delayed": lambda: octavo.recipe.DelayedScaling(amax_history_len=3),
    "current": octavo.recipe.CurrentScaling,
    "rowwise": octavo.recipe.RowwiseScaling,
    "block": octavo.recipe.BlockScaling,
}
SPLITS = [[128, 256, 64, 512], [0, 3, 0, 77], [1, 130, 511, 17], [0, 0, 0, 5], [0, 0, 0, 0]]
SHAPES = [(256, 512), (1024, 256), (264, 40), (40, 24), (37, 19)]  # in all three grouped, in two of them, and in neither


def near(found, want, tolerance, name):
    assert found.shape == want.shape
    assert found.dtype == want.dtype
    found, want = found.float().cpu(), want.float().cpu()
    assert found.isfinite().all(), name
    assert (found - want).norm() <= tolerance * want.norm() + 1e-6, name


def run(layer, device, splits, recipe, dtype, cotangent_size=1.0):
    layer = layer.to(device)
    layer.zero_grad()
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(sum(splits), layer.in_features, generator=draw).to(dtype).to(device).requires_grad_()
    g = (torch.randn(sum(splits), layer.out_features, generator=draw) * cotangent_size).to(dtype).to(device)
    with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        y = layer(x, splits)
    y.backward(g)
    return {"y": y.detach(), "dx": x.grad} | {name: p.grad.clone() for name, p in layer.named_parameters()}


def both(k, n, splits, recipe, dtype=torch.bfloat16, bias=True):
    torch.manual_seed(3)
    layer = octavo.nn.GroupedLinear(len(splits), k, n, bias=bias)
    twin = octavo.nn.GroupedLinear(len(splits), k, n, bias=bias)
    twin.load_state_dict(layer.state_dict())
    return run(twin, "cuda", splits, recipe, dtype), run(layer, "cpu", splits, recipe, dtype)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_gpu_follows_cpu(recipe, splits, shape, bias):
    found, want = both(*shape, splits, RECIPES[recipe](), bias=bias)
    for name, tensor in want.items():
        # The scales are the same to the bit; FP8 leaves only the order of float32 sums, and a result in bfloat16.
        near(found[name], tensor, 0.01, name)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("splits", [[128, 256, 64, 512], [0, 3, 0, 77]], ids=str)
def test_large_experts_follow_the_cpu(recipe, splits, monkeypatch):
    monkeypatch.setattr(in_nn, "_LARGE", 0.0)
    found, want = both(256, 512, splits, RECIPES[recipe]())
    for name, tensor in want.items():
        near(found[name], tensor, 0.01, name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_expert_without_rows_has_gradients_of_zero(recipe):
    found, _ = both(256, 128, [64, 0, 32, 0], RECIPES[recipe]())
    for i in (1, 3):
        assert found[f"weight{i}"].count_nonzero() == found[f"bias{i}"].count_nonzero() == 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_as_many_linears(recipe, dtype):
    splits, recipe = [160, 0, 33, 512], RECIPES[recipe]()
    torch.manual_seed(4)
    grouped = octavo.nn.GroupedLinear(4, 512, 256, device="cuda", params_dtype=dtype)
    found = run(grouped, "cuda", splits, recipe, torch.bfloat16)
    x = torch.randn(sum(splits), 512, generator=torch.Generator().manual_seed(7)).bfloat16().cuda()
    parts = []
    for i in range(4):
        linear = octavo.nn.Linear(512, 256, device="cuda", params_dtype=dtype)
        with torch.no_grad():
            linear.weight.copy_(getattr(grouped, f"weight{i}"))
            linear.bias.copy_(getattr(grouped, f"bias{i}"))
            with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                parts.append(linear(x.split(splits)[i]))
    near(found["y"], torch.cat(parts), 0.005, "y")


@pytest.mark.parametrize("recipe", ["none", "rowwise"])
def test_it_repeats_bit_for_bit(recipe):
    one, other = (both(512, 256, [100, 7, 0, 300], RECIPES[recipe]())[0] for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_expanded_gradient_is_taken():
    grouped = octavo.nn.GroupedLinear(2, 64, 64, device="cuda", params_dtype=torch.bfloat16)
    for recipe in RECIPES.values():
        with octavo.fp8_autocast(enabled=recipe() is not None, fp8_recipe=recipe()):
            y = grouped(torch.randn(40, 64, device="cuda", dtype=torch.bfloat16), torch.tensor([24, 16], device="cuda"))
        y.sum().backward()
    assert grouped.weight0.grad.isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("splits", [[128, 256, 0], [3, 0, 20], [17, 1000, 5]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_launch_equals_the_loop(recipe, splits, dtype, monkeypatch):
    if not gemm.has_grouped_products(torch.device("cuda")):
        pytest.skip("no grouped products here")
    torch.manual_seed(5)
    layer = octavo.nn.GroupedLinear(3, 512, 256, params_dtype=dtype)
    twin = copy.deepcopy(layer)
    found = run(layer, "cuda", splits, RECIPES[recipe](), torch.bfloat16)
    monkeypatch.setattr(gemm, "has_grouped_products", lambda device: False)
    for name, tensor in run(twin, "cuda", splits, RECIPES[recipe](), torch.bfloat16).items():
        near(found[name], tensor, 0.005, name)
    if recipe != "none":
        for name, entries in octavo.fp8.inspect(twin).items():
            for operand, entry in entries.items():
                for key in ("scale", "amax_history"):
                    mine = octavo.fp8.inspect(layer)[name][operand][key]
                    assert entry[key] is None or torch.equal(mine, entry[key]), f"{name} {operand} {key}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_graph_repeats_the_steps_whatever_the_host_writes_in_between(recipe):
    splits = [300, 0, 212]
    torch.manual_seed(6)
    eager = octavo.nn.GroupedLinear(3, 256, 512, device="cuda")
    recorded = copy.deepcopy(eager)
    scaling = RECIPES[recipe]()
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)

    def loss_of(layer):
        def loss(x):
            with octavo.fp8_autocast(enabled=scaling is not None, fp8_recipe=scaling):
                return layer(x, splits).float().square().mean()

        return loss

    graph = octavo.graphed(loss_of(recorded), recorded.parameters())
    for step in range(10):
        rows = x * (1 + step / 10)
        eager.zero_grad()
        want = loss_of(eager)(rows)
        want.backward()
        recorded.zero_grad()
        found = graph(rows)
        reused = [torch.arange(9000 + i, dtype=torch.int32).pin_memory() for i in range(8)]
        near(found.detach(), want.detach(), 0.005, "loss")
        for (name, one), other in zip(eager.named_parameters(), recorded.parameters(), strict=True):
            near(other.grad, one.grad, 0.01, f"{name} in step {step}")
        del reused


@pytest.mark.parametrize("recipe", RECIPES)
def test_default_dtype_and_device_change_nothing(recipe):
    torch.manual_seed(8)
    layer = octavo.nn.GroupedLinear(3, 256, 128)
    twin = copy.deepcopy(layer)
    want = run(layer, "cuda", [128, 3, 77], RECIPES[recipe](), torch.bfloat16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        twin.cuda()
        x = torch.randn(208, 256, generator=torch.Generator().manual_seed(7), dtype=torch.float32).bfloat16().cuda()
        with torch.device("cuda"), octavo.fp8_autocast(enabled=recipe != "none", fp8_recipe=RECIPES[recipe]()):
            y = twin(x, [128, 3, 77])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(y, want["y"])
