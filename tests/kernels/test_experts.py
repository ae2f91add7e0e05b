"""Kernels of experts in Triton's interpreter: rows in tiles beside exact rows, from the casts to a layer's gradients."""

import copy

import pytest
import torch

import octavo
from as_gpu import as_gpu
from octavo.fp8.formats import E4M3, E5M2
from octavo.kernels.experts import activation, cast, dispatch, gemm, permute, router
from octavo.kernels.experts import routes as routing
from octavo.kernels.experts.routes import TILE, make_routes
from octavo.kernels.quantize.quantized import Quantizer
from octavo.nn import experts as stacked
from octavo.nn import grouped as separate
from octavo.nn.moe import Experts, LayerNormMoE

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # of numpy, in the interpreter
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the interpreter is off where there is a GPU; tests/gpu runs the kernels"
    ),
    pytest.mark.usefixtures("exact_casts"),
]
EXPERTS, TOKENS, COLUMNS = 4, 90, 80
CHOSEN = {
    "spread": lambda: torch.rand(TOKENS, EXPERTS).argsort(1)[:, :2],
    "one expert": lambda: torch.full((TOKENS, 1), 2),
    "but one": lambda: torch.randint(1, EXPERTS, (TOKENS, 1)),
}
RECIPES = {
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=3, amax_compute_algo="max"),
    "current": octavo.recipe.CurrentScaling(),
    "rowwise": octavo.recipe.RowwiseScaling(),
    "block": octavo.recipe.BlockScaling(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(37, 300), (5, 128), (0, 130)])
def test_rows_that_travel_in_fp8_come_back_as_they_were_cast(rows, columns, dtype, monkeypatch):
    x = (torch.randn(rows, columns) * torch.exp2(torch.randint(-20, 12, (rows, columns)).float())).to(dtype)
    q, scale_inv = dispatch.narrow(x)
    assert q.is_contiguous()
    assert scale_inv.shape == (rows, -(-columns // 128))
    found = dispatch.launch(q, scale_inv, dtype)
    assert torch.equal(found, dispatch.widen(q, scale_inv, dtype))
    for piece, back in zip(x.split(128, 1), found.split(128, 1), strict=True):
        largest = piece.float().abs().amax(1, keepdim=True) if rows else piece.float()
        # Half a unit in the last of 3 bits, or half the smallest subnormal at a scale that may be half the best.
        assert ((piece.float() - back.float()).abs() <= piece.float().abs() * 2**-4 + largest * 2**-16).all()


def both(kind):
    """Exact routes, and those of tiles."""
    chosen = CHOSEN[kind]()
    return make_routes(chosen, EXPERTS, 1), make_routes(chosen, EXPERTS, TILE)


def quantizer(fmt, **settings):
    scale = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(3)) * 20 + 1
    return Quantizer(fmt.dtype, fmt.max, scale, torch.full((EXPERTS,), 0.125), **settings)


def of_tokens(x, routes, dim=0):
    """The rows of real tokens, in one order under all routes."""
    return (
        x.view(torch.uint8).index_select(dim, routes.rows.flatten().long())
        if x.element_size() == 1
        else x[routes.rows.flatten().long()]
    )


@pytest.mark.parametrize("kind", CHOSEN)
def test_routes_hold_every_copy_once_and_each_tile_has_one_expert(kind):
    chosen = CHOSEN[kind]()
    routes = make_routes(chosen, EXPERTS, TILE)
    assert len(routes.tokens) % TILE == 0
    held = torch.full((len(routes.tokens),), -1)
    held[routes.rows.flatten().long()] = torch.arange(TOKENS).repeat_interleave(chosen.shape[1])
    assert torch.equal(held, routes.tokens.long())
    assert torch.equal(routes.experts.long()[routes.rows.long() // TILE], chosen)
    ends = routes.ends.tolist()
    assert all(end % TILE == 0 for end in ends)
    assert (routes.experts[ends[-1] // TILE :] == EXPERTS).all()
    assert make_routes(chosen, EXPERTS, 1).splits == tuple(torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist())


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(90, 4, 2), (1500, 5, 1), (700, 130, 3), (3, 300, 2), (0, 4, 2)])
def test_the_kernels_routes_are_those_of_a_stable_sort(tokens, experts, top_k):
    chosen = torch.rand(tokens, experts).argsort(1)[:, :top_k]
    found, wanted = routing.launch(chosen, experts), make_routes(chosen, experts, TILE)
    for name in ("tokens", "rows", "experts", "ends"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype == torch.int32
        assert torch.equal(one, other), name


@pytest.mark.parametrize("kind", CHOSEN)
@pytest.mark.parametrize("layouts", [(True, False), (True, True), (False, True), (False, False)], ids=str)
def test_rows_are_cast_by_the_scale_of_their_expert(kind, layouts):
    x = (torch.randn(TOKENS, COLUMNS) * 30).bfloat16()
    exact, tiles = both(kind)
    results = []
    for routes in (exact, tiles):
        how = quantizer(E5M2, rowwise=layouts[0], columnwise=layouts[1])
        results.append((permute.permute(x, routes, how), how.amax, routes))
    (one, amax, _), (other, found, _) = results
    assert torch.equal(amax, found)
    for name, dim in (("rowwise_data", 0), ("columnwise_data", 1)):
        first, second = getattr(one, name), getattr(other, name)
        if first is not None:
            assert torch.equal(of_tokens(first, exact, dim), of_tokens(second, tiles, dim))
    padding = tiles.tokens[: int(tiles.ends[-1])] < 0
    if other.rowwise_data is not None:
        assert not other.rowwise_data.view(torch.uint8)[: int(tiles.ends[-1])][padding].any()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("shape", [(3, 48, 80), (2, 30, 16)], ids=str)
@pytest.mark.parametrize("columnwise", [True, False])
def test_stacked_matrices_have_a_scale_each(fmt, shape, columnwise):
    weight = torch.randn(shape) * 9
    settings = {"scale": torch.rand(shape[0]) * 20, "columnwise": columnwise}
    one, other = (Quantizer(fmt.dtype, fmt.max, amax=torch.zeros(shape[0]), **settings) for _ in range(2))
    wanted, found = cast.cast_stacked(weight, one), cast.launch(weight, other)
    assert torch.equal(one.amax, other.amax)
    amaxes = torch.zeros(shape[0])
    separate = [matrix.clone() for matrix in weight]
    unaligned = [torch.empty(matrix.numel() + 1)[1:].view(shape[1:]).copy_(matrix) for matrix in weight]
    of_separate = [cast.launch(matrices, other._replace(amax=amaxes)) for matrices in (separate, unaligned)]
    assert torch.equal(amaxes, other.amax)
    for a, *others in zip(wanted, found, *of_separate, strict=True):
        for b in others:
            assert (a is None and b is None) or torch.equal(a.contiguous().view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("scales", ["row", "block", "square"])
@pytest.mark.parametrize("layouts", [(True, False), (True, True), (False, True)], ids=str)
def test_all_matrices_at_once_have_the_scales_of_each(scales, layouts):
    weight = torch.randn(3, 256, 144) * torch.rand(3, 256, 1).exp2()
    how = {"rowwise": layouts[0], "columnwise": layouts[1]}
    wanted, scale = cast.cast_stacked_scaled(weight, E4M3.dtype, E4M3.max, scales, **how)
    found, same = cast.launch_scaled(weight, E4M3.dtype, E4M3.max, scales, **how)
    assert torch.equal(same, scale)
    for a, b in zip(wanted, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.shape == b.shape
            assert b.is_contiguous()
            assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("kind", CHOSEN)
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_activations_are_weighted_by_row(kind, name):
    width = COLUMNS * (2 if name == "swiglu" else 1)
    exact, tiles = both(kind)
    x = torch.randn(exact.rows.numel(), width)
    dy, weights = torch.randn(len(x), COLUMNS), torch.rand(len(x))
    wanted = found = None
    for routes in (exact, tiles):
        at = routes.rows.flatten().long()
        own = [torch.zeros(len(routes.tokens), *part.shape[1:]).index_copy(0, at, part) for part in (x, dy, weights)]
        forward = activation.expert_activation(name, own[0], own[2], routes, quantizer(E4M3))
        again = quantizer(E4M3, rowwise=False, columnwise=True)._replace(amax=None)
        how = quantizer(E5M2, columnwise=True)
        dx, repeated, d_weights = activation.expert_activation_backward(
            name, own[1], own[0], own[2], routes, how, recompute=again
        )
        plain, _, _ = activation.expert_activation_backward(name, own[1], own[0], own[2], routes, Quantizer(torch.float32))
        results = (
            of_tokens(forward.rowwise_data, routes), of_tokens(dx.rowwise_data, routes),
            of_tokens(dx.columnwise_data, routes, 1), of_tokens(repeated.columnwise_data, routes, 1), how.amax,
            d_weights[at], plain.rowwise_data[at],
        )  # fmt: skip
        wanted, found = found, results
    for one, other in zip(wanted, found, strict=True):
        if one.dtype == torch.uint8:  # an FP8 step apart where the float32 results round apart
            assert (one.int() - other.int()).abs().le(1).all()
            assert (one != other).float().mean() < 1e-2
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CHOSEN)
def test_copies_are_added_in_float32(kind):
    exact, tiles = both(kind)
    y = torch.randn(exact.rows.numel(), COLUMNS).bfloat16()
    wanted = permute.add_copies(torch.zeros_like(y).index_copy(0, exact.rows.flatten().long(), y), exact.rows, exact.tile)
    spread = y.new_full((len(tiles.tokens), COLUMNS), torch.nan).index_copy(0, tiles.rows.flatten().long(), y)
    assert torch.equal(permute.add_copies(spread, tiles.rows, TILE), wanted)


@pytest.mark.parametrize("kind", CHOSEN)
@pytest.mark.parametrize("precise", [True, False])
def test_products_of_groups(kind, precise):
    exact, tiles = both(kind)
    x, weight = torch.randn(TOKENS, COLUMNS), torch.randn(EXPERTS, 48, COLUMNS)
    operands = [permute.permute(x, routes, quantizer(E5M2, columnwise=True)) for routes in (exact, tiles)]
    w = cast.cast_stacked(weight, quantizer(E4M3))
    wanted = gemm.grouped_mm(operands[0].rowwise, w.rowwise, exact, torch.float32)
    found = gemm.launch_rows(operands[1].rowwise, w.rowwise, tiles, torch.float32, "tensor", precise=precise)
    torch.testing.assert_close(of_tokens(found, tiles), of_tokens(wanted, exact), rtol=1e-4, atol=1e-3)
    bias = torch.randn(EXPERTS, 48)
    wanted = gemm.grouped_mm(operands[0].rowwise, w.rowwise, exact, torch.float32, bias=bias)
    found = gemm.grouped_mm(operands[1].rowwise, w.rowwise, tiles, torch.float32, precise=precise, bias=bias)
    torch.testing.assert_close(of_tokens(found, tiles), of_tokens(wanted, exact), rtol=1e-4, atol=1e-3)
    dw = gemm.grouped_weight_mm(operands[0].columnwise, operands[0].columnwise, exact, torch.float32)
    same = gemm.launch_weights(operands[1].columnwise, operands[1].columnwise, tiles, torch.float32, "tensor", precise=precise)
    torch.testing.assert_close(same, dw, rtol=1e-4, atol=1e-3)


@pytest.mark.long(lambda precise: not precise)
@pytest.mark.parametrize("precise", [True, False])
def test_weight_gradients_over_many_tiles_and_partial_sums(precise):
    chosen = torch.cat((torch.zeros(1150), torch.full((300,), 2))).long()[torch.randperm(1450)][:, None]
    routes = make_routes(chosen, 3, TILE)
    one = torch.ones(3)
    rows = routes.tokens[None, :] >= 0
    dy, x = (torch.where(rows, torch.randn(size, len(routes.tokens)), 0.0).to(E4M3.dtype) for size in (1168, 272))
    found = gemm.launch_weights((dy, one), (x, one * 2), routes, torch.float32, "tensor", precise=precise)
    begin = 0
    for dw, end in zip(found, routes.ends.tolist(), strict=True):
        wanted = dy[:, begin:end].double() @ x[:, begin:end].double().t() * 2
        torch.testing.assert_close(dw.double(), wanted, rtol=1e-5, atol=1e-3)
        begin = end


@pytest.mark.parametrize("kind", CHOSEN)
@pytest.mark.parametrize("rowwise", [True, False])
def test_columns_have_a_scale_for_each_expert(kind, rowwise):
    _, routes = both(kind)
    x = torch.zeros(len(routes.tokens), COLUMNS)
    x[routes.rows.flatten().long()] = torch.randn(routes.rows.numel(), COLUMNS) * torch.rand(COLUMNS).exp2()
    x[int(routes.ends[-1]) :] = torch.inf  # not defined there
    wanted = cast._by_columns(x, routes, E4M3.dtype, E4M3.max)
    along, found = cast.launch_rows(
        x, E4M3.dtype, E4M3.max, rowwise=rowwise, columnwise=True, experts=routes.experts, count=EXPERTS
    )
    inside = slice(int(routes.ends[-1]))
    assert torch.equal(found.scale, wanted.scale)
    assert torch.equal(found.scale_inv, wanted.scale_inv)
    assert torch.equal(found.data.view(torch.uint8)[:, inside], wanted.data.view(torch.uint8)[:, inside])
    if rowwise:
        alone, _ = cast.launch_rows(x, E4M3.dtype, E4M3.max, rowwise=True, columnwise=False)
        assert torch.equal(along.data.view(torch.uint8)[inside], alone.data.view(torch.uint8)[inside])


@pytest.mark.long(lambda recipe: recipe != "block")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_over_tiles_equals_one_product_an_expert(recipe, monkeypatch):
    torch.manual_seed(0)
    module = LayerNormMoE(64, 48, 1e-5, Experts(EXPERTS, 2))
    twin = copy.deepcopy(module)
    results = []
    for layer, tile in ((module, 1), (twin, TILE)):
        monkeypatch.setattr(stacked, "make_routes", lambda chosen, count, tile=tile: make_routes(chosen, count, tile))
        for step in range(2):
            layer.zero_grad()
            x = torch.randn(30, 64, generator=torch.Generator().manual_seed(step)).bfloat16().requires_grad_()
            with octavo.fp8_autocast(enabled=True, fp8_recipe=RECIPES[recipe]):
                h, y, _ = layer(x)
            (h + y).float().square().mean().backward()
        results.append({"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
    for name, tensor in results[0].items():
        assert (results[1][name].float() - tensor.float()).norm() <= 1e-2 * tensor.float().norm(), name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("splits", [[128, 256, 0], [3, 0, 20], [130, 1, 0]], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_separate_matrices_over_tiles_equal_one_product_an_expert(recipe, splits, bias, dtype, monkeypatch):
    torch.manual_seed(0)
    layer = octavo.nn.GroupedLinear(3, 32, 48, bias=bias, params_dtype=dtype)
    layers = layer, copy.deepcopy(layer)
    results, rows = [], sum(splits)
    for layer, tile in zip(layers, (1, TILE), strict=True):
        monkeypatch.setattr(separate, "routes_of_splits", lambda *rest, tile=tile: routing.routes_of_splits(*rest, tile))
        for step in range(2):
            layer.zero_grad()
            draw = torch.Generator().manual_seed(step)
            x = (torch.randn(rows, 32, generator=draw) * 2**step).to(dtype).requires_grad_()
            with octavo.fp8_autocast(enabled=True, fp8_recipe=RECIPES[recipe]):
                y = layer(x, splits)
            y.backward(torch.randn(rows, 48, generator=draw).to(dtype))
        results.append({"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
    for name, tensor in results[0].items():
        assert results[1][name].dtype == tensor.dtype
        assert (results[1][name].float() - tensor.float()).norm() <= 4e-3 * tensor.float().norm(), name
    one, other = map(octavo.fp8.inspect, layers)
    for name, entries in one.items():
        for operand, entry in entries.items():
            for key in ("scale", "amax_history"):
                mine, its = other[name][operand][key], entry[key]
                assert (mine is None) == (its is None)
                assert its is None or torch.equal(mine, its), f"{name} {operand} {key}"


@pytest.mark.parametrize("other_paths", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_router_multiplies_pieces_of_bf16_as_float32(dtype, other_paths, monkeypatch):
    x, weight = torch.randn(70, 80).bfloat16(), torch.randn(5, 80).to(dtype)
    grad = torch.randn(70, 5) * torch.exp2(torch.randint(-30, 0, (70, 5)).float())
    dx = torch.randn(70, 80).bfloat16() * 1e-2 if other_paths else None
    with as_gpu(monkeypatch):
        logits = router.logits(x, weight)
        d_found, d_weight = router.gradients(grad, x, weight, dx)
        assert router.gradients(grad, x, weight, dx, want_x=False, want_weight=False) == (None, None)
    wide, g = x.double(), grad.double()
    exact = wide @ weight.double().t(), g.t() @ wide
    for one, other, rounding in ((logits, exact[0], 1e-6), (d_weight, exact[1], 1e-6 if dtype == torch.float32 else 2**-8)):
        assert ((one - other).abs() <= rounding * other.norm(dim=1, keepdim=True)).all()
    assert (logits.dtype, d_weight.dtype) == (torch.float32, dtype)
    exact = g @ weight.double() + (0 if dx is None else dx.double())
    assert d_found.dtype == torch.bfloat16
    assert ((d_found - exact).abs() <= exact.abs() * 2**-8 + 1e-6 * exact.norm(dim=1, keepdim=True)).all()
