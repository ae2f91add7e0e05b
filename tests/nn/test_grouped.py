"""GroupedLinear beside as many Linear layers, bit for bit: outputs, gradients and the state of every scale."""

import copy

import plain
import pytest
import torch

import octavo
from octavo.errors import InputError
from octavo.fp8.scaling import load_state_records, state_records
from octavo.kernels import gemm
from octavo.kernels.experts.routes import TILE, make_routes, routes_of_splits
from octavo.models.description import describe
from octavo.nn import grouped as in_nn

RECIPES = {
    "none": lambda: None,
    "delayed": lambda: octavo.recipe.DelayedScaling(amax_history_len=3),
    "current": octavo.recipe.CurrentScaling,
    "rowwise": octavo.recipe.RowwiseScaling,
    "block": octavo.recipe.BlockScaling,
}
SPLITS = [[16, 32, 48], [5, 0, 9], [0, 0, 7], [0, 0, 0], [1, 2, 3]]


def make(experts, k, n, bias=True, dtype=None):
    grouped = plain.randomise(octavo.nn.GroupedLinear(experts, k, n, bias=bias, params_dtype=dtype), seed=experts)
    layers = [octavo.nn.Linear(k, n, bias, params_dtype=dtype) for _ in range(experts)]
    with torch.no_grad():
        for i, layer in enumerate(layers):
            layer.weight.copy_(getattr(grouped, f"weight{i}"))
            if bias:
                layer.bias.copy_(getattr(grouped, f"bias{i}"))
    return grouped, layers


def apart(layers):
    return lambda x, splits, first=None: torch.cat(
        [layer(part, first) for layer, part in zip(layers, x.split(splits), strict=True)]
    )


def run(module, x, splits, recipe, seed, **how):
    x = x.clone().requires_grad_()
    with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        y = module(x, splits, **how)
    y.backward(plain.fresh(*y.shape, seed=seed).to(y.dtype))
    return y, x.grad


def assert_alike(grouped, layers):
    for i, layer in enumerate(layers):
        for name in ("weight", "bias"):
            one, other = getattr(grouped, f"{name}{i}"), getattr(layer, name)
            if other is not None:
                assert torch.equal(one.grad, other.grad), f"{name}{i}"
        for operand, entry in octavo.fp8.inspect(layer).items():
            mine = octavo.fp8.inspect(grouped)[f"weight{i}"][operand]
            for key in ("scale", "amax_history"):
                assert (mine[key] is None) == (entry[key] is None)
                assert entry[key] is None or torch.equal(mine[key], entry[key]), f"weight{i} {operand} {key}"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_many_linears_bit_for_bit(recipe, splits, bias, dtype):
    grouped, layers = make(3, 40, 24, bias)
    recipe = RECIPES[recipe]()
    for step in range(3):
        x = (plain.fresh(sum(splits), 40, seed=step) * 2**step).to(dtype)
        y, dx = run(grouped, x, splits, recipe, step)
        want_y, want_dx = run(apart(layers), x, splits, recipe, step)
        assert y.dtype == dtype
        assert torch.equal(y, want_y)
        assert torch.equal(dx, want_dx)
        assert_alike(grouped, layers)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_expert_without_rows_has_gradients_of_zero(recipe):
    grouped, _ = make(3, 32, 16)
    run(grouped, plain.fresh(12, 32), [12, 0, 0], RECIPES[recipe](), 0)
    assert grouped.weight0.grad.abs().sum() > 0
    for parameter in (grouped.weight1, grouped.bias1, grouped.weight2, grouped.bias2):
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_runs_it_eagerly(recipe):
    grouped, layers = make(3, 32, 16)
    compiled = torch.compile(grouped, backend="aot_eager")
    for step, splits in enumerate([[5, 0, 9], [1, 2, 3], [0, 0, 4]]):
        x = plain.fresh(sum(splits), 32, seed=step)
        y, dx = run(compiled, x, splits, RECIPES[recipe](), step)
        want_y, want_dx = run(apart(layers), x, splits, RECIPES[recipe](), step)
        assert torch.equal(y, want_y)
        assert torch.equal(dx, want_dx)
    assert_alike(grouped, layers)


def check_micro_batch(grouped, layers, splits, recipe, step, micro):
    """A micro-batch of both; afterwards all weights change, which only the next first one may see."""
    x = plain.fresh(sum(splits), 32, seed=10 * step + micro)
    y, dx = run(grouped, x, splits, recipe, micro, is_first_microbatch=micro == 0)
    want_y, want_dx = run(apart(layers), x, splits, recipe, micro, first=micro == 0)
    assert torch.equal(y, want_y)
    assert torch.equal(dx, want_dx)
    with torch.no_grad():
        for parameter in (*grouped.parameters(), *(p for layer in layers for p in layer.parameters())):
            parameter.mul_(1.5)


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_micro_batches_keep_the_fp8_weight_of_the_first(recipe):
    grouped, layers = make(3, 32, 16)
    recipe = RECIPES[recipe]()
    for step in range(2):
        for micro in range(3):
            check_micro_batch(grouped, layers, [5, 0, 9], recipe, step, micro)
        assert_alike(grouped, layers)


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block"])
def test_micro_batches_of_any_sizes_share_the_weight(recipe, monkeypatch):
    """A micro-batch without rows, or with large products, runs one expert after the other."""
    grouped, layers = make(3, 32, 16)
    recipe, large = RECIPES[recipe](), in_nn._LARGE
    for step in range(2):
        for micro, (splits, limit) in enumerate([([5, 0, 9], large), ([0, 0, 0], large), ([4, 4, 1], 0), ([1, 2, 3], large)]):
            monkeypatch.setattr(in_nn, "_LARGE", limit)
            check_micro_batch(grouped, layers, splits, recipe, step, micro)
        assert_alike(grouped, layers)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(recipe):
    grouped, layers = make(3, 32, 16)
    for module in (grouped.weight1, layers[1].weight, grouped.bias0, layers[0].bias):
        module.requires_grad_(False)
    x = plain.fresh(14, 32)
    y, dx = run(grouped, x, [5, 2, 7], RECIPES[recipe](), 1)
    want_y, want_dx = run(apart(layers), x, [5, 2, 7], RECIPES[recipe](), 1)
    assert torch.equal(y, want_y)
    assert torch.equal(dx, want_dx)
    assert grouped.weight1.grad is grouped.bias0.grad is None
    for i in (0, 2):
        assert torch.equal(getattr(grouped, f"weight{i}").grad, layers[i].weight.grad)
    with octavo.fp8_autocast(enabled=recipe != "none", fp8_recipe=RECIPES[recipe]()):
        y = grouped(x, [5, 2, 7])  # x wants none: only the parameters are trained
    y.sum().backward()
    with torch.no_grad(), octavo.fp8_autocast(enabled=recipe != "none", fp8_recipe=RECIPES[recipe]()):
        assert grouped(x, [5, 2, 7]).shape == y.shape


@pytest.mark.parametrize("recipe", RECIPES)
def test_under_autocast(recipe):
    grouped, layers = make(2, 32, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx = run(grouped, plain.fresh(9, 32), [4, 5], RECIPES[recipe](), 2)
        want_y, want_dx = run(apart(layers), plain.fresh(9, 32), [4, 5], RECIPES[recipe](), 2)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, want_y)
    assert torch.equal(dx, want_dx)
    assert_alike(grouped, layers)


def test_one_expert_may_stay_out_of_fp8():
    grouped, layers = make(3, 32, 16)
    grouped.weight1_fp8_state.skipped = layers[1].fp8_state.skipped = "by this test"
    y, dx = run(grouped, plain.fresh(14, 32), [5, 2, 7], octavo.recipe.RowwiseScaling(), 1)
    want_y, want_dx = run(apart(layers), plain.fresh(14, 32), [5, 2, 7], octavo.recipe.RowwiseScaling(), 1)
    assert torch.equal(y, want_y)
    assert torch.equal(dx, want_dx)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputation_repeats_it(recipe):
    grouped, _ = make(3, 32, 16)
    twin = copy.deepcopy(grouped)
    again = lambda x, splits: torch.utils.checkpoint.checkpoint(twin, x, splits, use_reentrant=False)  # noqa: E731
    for step in range(2):
        x = plain.fresh(14, 32, seed=step)
        y, dx = run(grouped, x, [5, 0, 9], RECIPES[recipe](), step)
        other_y, other_dx = run(again, x, [5, 0, 9], RECIPES[recipe](), step)
        assert torch.equal(y, other_y)
        assert torch.equal(dx, other_dx)
    for (name, one), other in zip(grouped.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block"])
@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["input", "weight"])
def test_an_odd_value_of_one_expert_reaches_no_other(recipe, value, where):
    grouped, layers = make(3, 32, 16)
    recipe = RECIPES[recipe]()
    for step in range(3):
        x = plain.fresh(14, 32, seed=step)
        with torch.no_grad():
            for tensor in (x[5:7],) if where == "input" else (grouped.weight1, layers[1].weight):
                tensor.fill_(value if step == 1 else 0.5)
        found = run(grouped, x, [5, 2, 7], recipe, step)
        wanted = run(apart(layers), x, [5, 2, 7], recipe, step)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        for i in (0, 2):
            assert torch.equal(getattr(grouped, f"weight{i}").grad, layers[i].weight.grad)
        for i, layer in enumerate(layers):
            for operand, entry in octavo.fp8.inspect(layer).items():
                mine = octavo.fp8.inspect(grouped)[f"weight{i}"][operand]
                for key in ("scale", "amax_history"):
                    torch.testing.assert_close(mine[key], entry[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block"])
def test_micro_batches_in_any_order_and_evaluations_between_them(recipe):
    grouped, layers = make(3, 32, 16)
    recipe = RECIPES[recipe]()
    for step, first in enumerate([False, True, None, False, False, True, False]):
        x, splits = plain.fresh(14, 32, seed=step), [[5, 0, 9], [0, 7, 7]][step % 2]
        y, dx = run(grouped, x, splits, recipe, step, is_first_microbatch=first)
        want_y, want_dx = run(apart(layers), x, splits, recipe, step, first=first)
        assert torch.equal(y, want_y)
        assert torch.equal(dx, want_dx)
        assert_alike(grouped, layers)
        with torch.no_grad():
            for parameter in (*grouped.parameters(), *(p for layer in layers for p in layer.parameters())):
                parameter.mul_(1.5)
            with octavo.fp8_autocast(fp8_recipe=recipe):
                assert torch.equal(grouped(x, splits), apart(layers)(x, splits))


@pytest.mark.parametrize("recipe", RECIPES)
def test_backwards_after_later_forwards(recipe):
    """Each backward has the scales of its own forward, whatever the recipes of those after it; also a repeated one."""
    grouped, layers = make(3, 32, 16)
    recipes, found = [RECIPES[recipe](), octavo.recipe.CurrentScaling(), RECIPES[recipe]()], []
    for module in (grouped, apart(layers)):
        calls = []
        for call, each in enumerate(recipes):
            x = (plain.fresh(14, 32, seed=call) * 3**call).requires_grad_()
            with octavo.fp8_autocast(enabled=each is not None, fp8_recipe=each):
                calls.append((x, module(x, [[5, 0, 9], [2, 12, 0]][call % 2])))
        for _, y in (*reversed(calls), calls[0]):
            y.backward(plain.fresh(14, 16), retain_graph=True)
        found.append([tensor for x, y in calls for tensor in (x.grad, y)])
    assert all(map(torch.equal, *found))
    assert_alike(grouped, layers)


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_and_gradients_in_any_layout(recipe):
    grouped, layers = make(3, 32, 16)
    x, found = plain.fresh(32, 14), []
    for module in (grouped, apart(layers)):
        rows = x.clone().t().requires_grad_()
        with octavo.fp8_autocast(enabled=recipe != "none", fp8_recipe=RECIPES[recipe]()):
            y = module(rows, [5, 0, 9])
        y.mul_(2)
        y.sum().backward()
        found.append([y, rows.grad])
    assert all(map(torch.equal, *found))
    assert_alike(grouped, layers)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gradient_changed_in_place_changes_no_other(recipe):
    """As an optimizer inside the backward does."""
    grouped, layers = make(3, 32, 16)
    pairs = [(getattr(grouped, f"weight{i}"), layer.weight) for i, layer in enumerate(layers)]
    for weight in (weight for pair in pairs for weight in pair):
        optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)

        def update(weight, optimizer=optimizer):
            weight.grad.mul_(3)
            optimizer.step()
            optimizer.zero_grad()

        weight.register_post_accumulate_grad_hook(update)
    for step in range(3):
        for module in (grouped, apart(layers)):
            run(module, plain.fresh(14, 32, seed=step), [5, 0, 9], RECIPES[recipe](), step)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_copy_between_micro_batches_has_its_own_weight(recipe):
    grouped, layers = make(3, 32, 16)
    recipe, x = RECIPES[recipe](), plain.fresh(14, 32)
    run(grouped, x, [5, 0, 9], recipe, 0, is_first_microbatch=True)
    run(apart(layers), x, [5, 0, 9], recipe, 0, first=True)
    twin, others = copy.deepcopy(grouped), copy.deepcopy(layers)
    with torch.no_grad():
        for parameter in (*twin.parameters(), *(p for layer in others for p in layer.parameters())):
            parameter.mul_(2)
    for one, many in ((grouped, layers), (twin, others)):
        y, dx = run(one, x, [5, 0, 9], recipe, 1, is_first_microbatch=False)
        want_y, want_dx = run(apart(many), x, [5, 0, 9], recipe, 1, first=False)
        assert torch.equal(y, want_y)
        assert torch.equal(dx, want_dx)
        assert_alike(one, many)


@pytest.mark.parametrize("splits", [[4, 0, 5], (4, 0, 5), torch.tensor([4, 0, 5]), torch.tensor([4, 0, 5], dtype=torch.int32)])
def test_splits_in_any_form_and_dimensions_in_front(splits):
    grouped, _ = make(3, 32, 16)
    x = plain.fresh(9, 32)
    want = torch.cat([part @ w.T + b for part, w, b in zip(x.split([4, 0, 5]), grouped.weights, grouped.biases, strict=True)])
    torch.testing.assert_close(grouped(x, splits), want)
    torch.testing.assert_close(grouped(x.view(3, 3, 32), splits), want.view(3, 3, 16))


@pytest.mark.parametrize("splits", [[4, 5], [4, 0, 4], [10, 0, -1], []])
def test_splits_that_do_not_fit_are_refused(splits):
    with pytest.raises(InputError, match="m_splits"):
        make(3, 32, 16)[0](plain.fresh(9, 32), splits)


@pytest.mark.parametrize("splits", [[4.0, 0, 5], torch.tensor([4.0, 0, 5]), torch.tensor([[4, 0, 5]]), "405", None, 9], ids=str)
def test_splits_that_are_no_whole_numbers_are_refused(splits):
    with pytest.raises(InputError, match=r"m_splits = .*: give a list of whole numbers"):
        make(3, 32, 16)[0](plain.fresh(9, 32), splits)


def test_return_bias_leaves_it_to_the_caller():
    grouped, _ = make(2, 32, 16)
    x = plain.fresh(9, 32)
    whole, grouped.return_bias = grouped(x, [4, 5]), True
    y, biases = grouped(x, [4, 5])
    parts = [part + bias for part, bias in zip(y.split([4, 5]), biases, strict=True)]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_names_are_transformer_engines_and_every_record_says_which_expert():
    grouped, _ = make(2, 32, 16)
    assert set(grouped.state_dict()) == {"weight0", "bias0", "weight1", "bias1"}
    model = torch.nn.ModuleDict({"experts": grouped})
    run(grouped, plain.fresh(9, 32), [4, 5], RECIPES["delayed"](), 0)
    assert set(octavo.fp8.inspect(model)) == {"experts.weight0", "experts.weight1"}
    assert [(layer.name, layer.fp8) for layer in describe(model).layers] == [
        ("experts.weight0", True),
        ("experts.weight1", True),
    ]
    records = state_records(model)
    assert {name.rsplit(".", 2)[0] for name in records} == {"experts.weight0", "experts.weight1"}
    other = torch.nn.ModuleDict({"experts": octavo.nn.GroupedLinear(2, 32, 16)})
    load_state_records(other, records, RECIPES["delayed"]())
    again = state_records(other)
    assert all(torch.equal(records[name], again[name]) for name in records)


def test_initial_weights_are_those_of_linear():
    grouped = octavo.nn.GroupedLinear(3, 400, 300)
    for weight in grouped.weights:
        assert 0.97 * 400**-0.5 < weight.abs().max() <= 400**-0.5
    assert not torch.equal(grouped.weight0, grouped.weight1)
    filled = octavo.nn.GroupedLinear(2, 8, 4, init_method=torch.nn.init.ones_)
    assert filled.weight1.unique().item() == 1
    assert filled.bias1.unique().item() == 0


@pytest.mark.parametrize("splits", [[3, 0, 20], [128, 0, 256], [0, 1, 0, 0]], ids=str)
@pytest.mark.parametrize("tile", [1, TILE])
def test_routes_of_splits_are_those_of_sorted_tokens(splits, tile):
    chosen = torch.arange(len(splits)).repeat_interleave(torch.tensor(splits))[:, None]
    found, wanted = routes_of_splits(splits, chosen.device, tile), make_routes(chosen, len(splits), tile)
    size = len(found.tokens)
    assert size == sum(-(-count // tile) * tile for count in splits)
    assert torch.equal(found.tokens, wanted.tokens[:size])
    assert torch.equal(found.experts, wanted.experts[: size // tile])
    for name in ("rows", "ends"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))
    assert (found.tile, found.splits) == (wanted.tile, wanted.splits)


@pytest.mark.parametrize("large", [in_nn._LARGE, 0.0])
def test_bfloat16_in_one_function_has_the_gradients_of_the_loop(large, monkeypatch):
    grouped, layers = make(3, 32, 16)
    x = plain.fresh(14, 32).bfloat16()
    want_y, want_dx = run(apart(layers), x, [5, 0, 9], None, 3)
    monkeypatch.setattr(gemm, "has_grouped_products", lambda device: True)
    monkeypatch.setattr(in_nn, "_LARGE", large)
    monkeypatch.setattr(
        torch,
        "_grouped_mm",
        lambda a, b, offs: torch.cat([part @ m for part, m in zip(a.tensor_split(offs[:-1].long()), b, strict=True)]),
    )
    y, dx = run(grouped, x, [5, 0, 9], None, 3)
    close = {"rtol": 2**-6, "atol": 2**-6}
    torch.testing.assert_close(y, want_y, **close)
    torch.testing.assert_close(dx, want_dx, **close)
    for i, layer in enumerate(layers):
        for name in ("weight", "bias"):
            found = getattr(grouped, f"{name}{i}").grad
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, getattr(layer, name).grad, rtol=2**-6, atol=2**-4)
