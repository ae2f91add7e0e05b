"""float16 over tensor ranks: as near to float64 as one rank, and an overflow of any rank is one of all."""

import re

import float16_ranks
import pytest
import tensor_ranks
import torch
from float16_ranks import CLIPPED

import octavo
import ranks
from octavo.nn.arguments import Draws
from octavo.nn.experts import StackedExperts
from octavo.nn.unrounded import unrounded_linear

TENSOR = {"tensor_parallel_degree": 2}
ALIGNED = tensor_ranks.ALIGNED | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}
LORA, DROPPED = (octavo.LoRA(4, dropout=dropout, targets="all-linear") for dropout in (0.0, 0.3))


def check(world, degrees, cells):
    found, *_ = ranks.run(world, float16_ranks.cells, degrees, cells, timeout=600)
    for (shape, options), each in zip(cells, found, strict=True):
        exact = {name: value for name, value in options.items() if name not in ("recipe", "fp8_head")}
        one = float16_ranks.trained(shape, None, **options)
        wanted = float16_ranks.trained(shape, None, **exact, dtype=torch.float64, scale=1.0)
        limit = 0.2 if "recipe" in options else 0.02
        assert each["losses"] == pytest.approx(wanted["losses"], abs=limit), (shape, options)
        assert each["norms"] == pytest.approx(wanted["norms"], rel=limit), (shape, options)
        for kind in ("gradients", "parameters"):
            assert each[kind].keys() == wanted[kind].keys()
            apart, theirs = (tensor_ranks.distance(of[kind], wanted[kind]) for of in (each, one))
            assert apart < 1.6 * theirs + 1e-3, (kind, shape, options)
        for name, value in wanted["gradients"].items():
            apart, theirs = (((of["gradients"][name] - value).norm() / (value.norm() + 1e-9)).item() for of in (each, one))
            assert apart < 1.6 * theirs + 2e-3, (name, shape, options)


@pytest.mark.long(lambda world, degrees: world != 2)
@pytest.mark.parametrize(
    ("world", "degrees"),
    [
        (2, TENSOR),
        (4, TENSOR),
        (4, {"tensor_parallel_degree": 4}),
        (4, TENSOR | {"hybrid_shard_degree": 1}),
        (4, TENSOR | {"context_parallel_degree": 2}),
        (4, TENSOR | {"sync_each_micro_batch": True}),
    ],
    ids=str,
)
def test_tensor_ranks_train_as_one_rank_does(world, degrees):
    check(world, degrees, [("all-biases", {"micro_batches": 2}), ("one-group", {}), ("mixtral", {}), (ALIGNED, {"lora": LORA})])


@pytest.mark.long
def test_with_other_options():
    check(2, TENSOR, [
        ("neox", {"recompute": True}), ("qwen3-moe-mixed", {"recompute": "selective"}),
        ("plain", {"recompute": "mlp", "mlp_chunks": 2}), ("plain", {"offload": True, "given": {"tokens": 13}}),
        ("neox", {"given": {"padding": True}}), ("qwen3", {"given": {"documents": True}}),
        (tensor_ranks.MIXTURE, {"lora": LORA}), (ALIGNED, {"lora": DROPPED, "seed": 3}),
    ])  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_whole_experts_over_tensor_ranks(world):
    check(world, TENSOR | {"expert_parallel_degree": world}, [("mixtral", {}), ("qwen3-moe-mixed", {"micro_batches": 2})])


@pytest.mark.long(lambda recipe: recipe != "delayed")
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block"])
def test_in_fp8(recipe):
    shapes = tensor_ranks.ALIGNED, tensor_ranks.MIXTURE
    check(2, TENSOR, [(shape, {"recipe": recipe, "steps": 1}) for shape in shapes])


@pytest.mark.parametrize("world", [2, 4])
def test_summands_beyond_float16_have_sums_within_it(world):
    for errors in ranks.run(world, float16_ranks.beyond_float16):
        assert {name: error for name, error in errors.items() if not error < 2e-3} == {}


def test_products_of_ranks_are_not_rounded_before_their_sum():
    """Of one rank's slice of experts, and of a matrix: numbers beyond float16 in float32."""
    draw = torch.Generator().manual_seed(4)

    def drawn(*shape, factor=1.0):
        return (factor * torch.randn(shape, generator=draw)).half()

    x, weight, grad = drawn(6, 24, factor=300.0), drawn(16, 24, factor=300.0), drawn(6, 16, factor=300.0)
    wide = x.float().requires_grad_()
    y = unrounded_linear(wide, weight, torch.float32)
    y.backward(grad.float())
    assert y.abs().max() > 65504
    assert wide.grad.abs().max() > 65504
    torch.testing.assert_close(y.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1.0)
    torch.testing.assert_close(wide.grad.double(), grad.double() @ weight.double(), rtol=1e-5, atol=1.0)

    experts = StackedExperts(16, 32, 2, "swiglu", (None, None), Draws(None), dtype=torch.float16, device="cpu")
    with torch.no_grad():
        experts.fc1_weight.copy_(drawn(2 * 64, 16, factor=100.0))
        experts.fc2_weight.copy_(drawn(2 * 16, 32, factor=2000.0))
    chosen, scores = torch.randint(2, (6, 1), generator=draw), torch.ones(6, 1)
    x, grad, found = drawn(6, 16, factor=0.01), drawn(6, 16, factor=0.02), []
    for dtype in (torch.float16, None):
        own = x.float().requires_grad_()
        y = experts(own, scores, chosen, dtype=dtype)
        y.backward(grad.float())
        found.append((y.detach(), own.grad))
    for ours, exact in zip(*found, strict=True):
        assert exact.abs().max() > 65504
        assert (ours - exact).norm() < 5e-3 * exact.norm()


CELLS = [
    (2, TENSOR),
    (4, TENSOR),
    (4, TENSOR | {"hybrid_shard_degree": 1}),
    (4, TENSOR | {"context_parallel_degree": 2}),
    (4, {"tensor_parallel_degree": 4}),
]


@pytest.mark.long(lambda world, degrees, kind: (world, kind) not in ((2, "torch.amp"), (4, "fused")) or degrees != TENSOR)
@pytest.mark.parametrize("kind", ["torch.amp", "fused", "sharded"])
@pytest.mark.parametrize(("world", "degrees"), CELLS, ids=str)
@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor with numel=1:UserWarning")
def test_a_loss_scaler_of_pytorch_decides_alike_on_all_ranks(world, degrees, kind):
    """Infinities of one rank's part, of another in each step; with clipping and without."""
    for clip in (0.0, CLIPPED):
        planted = {1: world - 1, 3: 0, 4: 1}
        steps, wanted = float16_ranks.scaled_by_pytorch(None, "torch.amp", dict.fromkeys(planted), clip=clip)
        assert [changed for _, changed in steps] == [number not in planted for number in range(6)]
        assert [scale for scale, _ in steps] == [256.0, 256.0, 128.0, 128.0, 64.0, 32.0]
        for found, parameters in ranks.run(world, float16_ranks.scaled_by_pytorch, degrees, kind, planted, clip=clip):
            assert found == steps
            assert tensor_ranks.distance(parameters, wanted) < 2e-3


def test_a_loss_scaler_of_matrices_is_refused():
    for said in ranks.run(2, float16_ranks.scaled_matrices, TENSOR):
        assert re.search(r"GradScaler with an optimizer of octavo\.matrices.* octavo\.muon\(model\)", said), said


def test_muon_with_a_loss_scaler_of_pytorch():
    steps, wanted = float16_ranks.scaled_by_pytorch(None, "muon", {1: None}, steps=3)
    for found, parameters in ranks.run(2, float16_ranks.scaled_by_pytorch, TENSOR, "muon", {1: 1}, steps=3):
        assert found == steps
        assert tensor_ranks.distance(parameters, wanted) < 0.02
