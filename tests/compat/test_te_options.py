"""Options of Transformer Engine's layers beside float64 by hand: outputs and every gradient, with and without FP8."""

import copy
import inspect
import operator
import pickle

import plain
import pytest
import te_by_hand as by_hand
import torch
from fused_cases import WIDE, Case, assert_near, assert_within_format, exact, run, warm

import octavo
from octavo.compat.missing import MissingName
from octavo.errors import InputError

KINDS = ["LayerNorm", "RMSNorm"]
RECIPES = ["none", "delayed", "current", "block"]
HIDDEN, FFN, HEADS = 32, 48, 2
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
ACTIVATIONS = [*(name for name in by_hand.CURVES if name != "sigmoid"), *by_hand.GATES, "clamped_swiglu"]


def recipe_of(name):
    from transformer_engine.common import recipe

    return {
        "none": None,
        "delayed": recipe.DelayedScaling(amax_history_len=2),
        "current": recipe.Float8CurrentScaling(),
        "block": recipe.Float8BlockScaling(),
    }[name]


def check(module, alone, wanted, name="none", *, deeper=1.0):
    """alone(module, x) and wanted(parameters, x) give a tensor or a tuple; x: [T, B, hidden]."""

    def tuples(function):
        def call(of, x, pending):
            made = function(of, x + pending)
            return made if isinstance(made, tuple) else (made,)

        return call

    case, recipe = Case(module, tuples(alone), tuples(wanted)), recipe_of(name)
    x, pending = (plain.fresh(6, 3, HIDDEN, seed=seed).requires_grad_() for seed in (1, 2))
    if recipe is not None:
        recipe = octavo.fp8.recipe.coerce(recipe)
    warm(case, recipe, x, pending)
    found, expected = run(case, x, pending, recipe), exact(case, x, pending)
    normed = any("k_norm" in key for key in expected)
    for key in [key for key in expected if key.endswith("key_bias") and not normed]:  # which a softmax does not see
        assert expected.pop(key).abs().max() < 1e-12
        assert found.pop(key).abs().max() < (1e-4 if recipe is None else 1.0)
    if name == "none":
        assert_near(found, expected, WIDE, by_norm=False)
    else:
        assert_within_format(found, expected, deeper=deeper)
    return found


def randomised(module, zero=False):
    """Random parameters; weights of zero-centred norms around 0, and scores of the size of 1."""
    plain.randomise(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            part, last = name.rpartition(".")[::2]
            if last == "layer_norm_weight" or (part == "layernorm" and last == "weight"):
                parameter.copy_(plain.fresh(*parameter.shape, seed=len(name)) * 0.3 + (not zero))
            if last in ("query_weight", "key_weight"):
                parameter.mul_(0.3)
    return module


@pytest.mark.parametrize("zero", [True, False], ids=["around 0", "around 1"])
@pytest.mark.parametrize("kind", KINDS)
def test_norms(te, kind, zero):
    module = getattr(te, kind)(HIDDEN, eps=by_hand.EPS, zero_centered_gamma=zero)
    assert (module.weight == (0 if zero else 1)).all()
    torch.nn.init.normal_(module.weight, std=0.1)
    check(module, lambda m, x: m(x), lambda p, x: by_hand.normed(p, x, kind=kind, zero=zero))
    # In 16 bits weight + 1 would be rounded: of weights below 2⁻⁹ nothing would be left.
    small = getattr(te, kind)(HIDDEN, eps=by_hand.EPS, zero_centered_gamma=True, params_dtype=torch.bfloat16)
    torch.nn.init.constant_(small.weight, 2.0**-10)
    x = plain.fresh(64, HIDDEN)
    expected = plain.norm(kind, x.double(), 1 + 2.0**-10, 0.0, by_hand.EPS)
    assert ((small(x).double() - expected).norm() / expected.norm()).item() < 1e-6


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("zero", [True, False], ids=["around 0", "around 1"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_layer_with_a_norm(te, kind, zero, name):
    how = {"eps": by_hand.EPS, "normalization": kind, "zero_centered_gamma": zero}
    plain_one = te.LayerNormLinear(HIDDEN, FFN, **how)
    assert (plain_one.layer_norm_weight == (0 if zero else 1)).all()
    full = {"return_bias": True, "return_layernorm_output": True, "return_layernorm_output_gathered": True}
    module = randomised(te.LayerNormLinear(HIDDEN, FFN, **how, **full), zero)

    def wanted(p, x):
        y = by_hand.normed(p, x, "layer_norm_", kind=kind, zero=zero)
        return plain.linear(y, p["weight"]), p["bias"].clone(), y

    check(module, lambda m, x: m(x), wanted, name)
    plain_one.load_state_dict(module.state_dict())
    check(plain_one, lambda m, x: m(x), lambda p, x: wanted(p, x)[0] + p["bias"], name)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(te, activation, name):
    params = by_hand.CLAMP if activation == "clamped_swiglu" else None
    how = {"activation": activation, "activation_params": params, "zero_centered_gamma": True, "return_bias": True}
    module = randomised(te.LayerNormMLP(HIDDEN, FFN, by_hand.EPS, return_layernorm_output=True, **how), zero=True)

    def wanted(p, x):
        y, out = by_hand.mlp(p, x, zero=True, activation=activation, params=params)
        return out - p["fc2_bias"], p["fc2_bias"].clone(), y

    # A slope with a jump: where the rounding of FP8 takes a number to its other side, the gradient is another.
    deeper = 2.0 if activation in ("relu", "reglu", "clamped_swiglu") else 1.0
    check(module, lambda m, x: m(x), wanted, name, deeper=deeper)
    fused = te.LayerNormMLP(HIDDEN, FFN, by_hand.EPS, bias=False, **how)
    fused.load_state_dict({key: value for key, value in module.state_dict().items() if key in fused.state_dict()})
    no_biases = {"fc2_bias": torch.zeros(())}
    check(fused, lambda m, x: m(x)[0], lambda p, x: wanted(p | no_biases, x)[0], name, deeper=deeper)


def test_parameters_of_activations(te):
    clamped = te.TransformerLayer(HIDDEN, FFN, HEADS, activation="clamped_swiglu", **QUIET)
    assert clamped.layernorm_mlp.activation == "clamped_swiglu(7.0, 1.702, 1.0)"
    for params, said in [
        ({"limt": 7.0}, "Did you mean 'limit'"),
        ({"limit": 0}, "a limit above 0"),
        ({"alpha": "1"}, "finite"),
    ]:
        with pytest.raises(InputError, match=said):
            te.LayerNormMLP(HIDDEN, FFN, activation="clamped_swiglu", activation_params=params)
    with pytest.raises(InputError, match="only 'clamped_swiglu' has parameters"):
        te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", activation_params={"limit": 7.0})
    with pytest.raises(InputError, match="unknown activation 'reluglu'"):
        te.LayerNormMLP(HIDDEN, FFN, activation="reluglu")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("norm", [True, False], ids=["with a norm", "without"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention(te, kind, norm, name):
    module = te.MultiheadAttention(
        HIDDEN, HEADS, attention_dropout=0.0, layernorm_epsilon=by_hand.EPS, normalization=kind, input_layernorm=norm,
        zero_centered_gamma=True, return_bias=True, return_layernorm_output=True,
        qk_norm_type="RMSNorm", qk_norm_eps=by_hand.EPS,
    )  # fmt: skip

    def wanted(p, x):
        y, out = by_hand.attention(p, x, heads=HEADS, norm=norm, kind=kind, zero=True)
        results = out - p["proj.bias"], p["proj.bias"].clone()
        return (*results, y) if norm else results

    check(randomised(module, zero=True), lambda m, x: m(x), wanted, name, deeper=1.5)


LAYERS = {
    "zero-centred": ({"zero_centered_gamma": True}, {"zero": True}),
    "post": ({"apply_residual_connection_post_layernorm": True}, {"post": True}),
    "output": ({"output_layernorm": True}, {"output": True}),
    "zero-centred output": ({"output_layernorm": True, "zero_centered_gamma": True}, {"output": True, "zero": True}),
    "post output": (
        {"apply_residual_connection_post_layernorm": True, "output_layernorm": True}, {"post": True, "output": True},
    ),
    "parallel output": ({"parallel_attention_mlp": True, "output_layernorm": True}, {"parallel": True, "output": True}),
    "no biases": ({"bias": False, "zero_centered_gamma": True}, {"zero": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", LAYERS)
def test_layers(te, which, kind, name):
    arguments, how = LAYERS[which]
    module = te.TransformerLayer(
        HIDDEN, FFN, HEADS, layernorm_epsilon=by_hand.EPS, normalization=kind, activation="qgeglu", **QUIET, **arguments
    )
    randomised(module, zero="zero" in how)
    check(
        module, lambda m, x: m(x), lambda p, x: by_hand.layer(p, x, heads=HEADS, kind=kind, activation="qgeglu", **how), name,
        deeper=2.5 if "output_layernorm" in arguments else 1.75,  # without a norm in front scores are larger
    )  # fmt: skip
    again = te.TransformerLayer(HIDDEN, FFN, HEADS, normalization=kind, activation="qgeglu", fuse_qkv_params=True, **arguments)
    again.load_state_dict(module.state_dict())


def test_layers_that_there_are_not(te):
    with pytest.raises(InputError, match=r"apply_residual_connection_post_layernorm=True.*with parallel_attention_mlp=True"):
        te.TransformerLayer(
            HIDDEN, FFN, HEADS, apply_residual_connection_post_layernorm=True, parallel_attention_mlp=True
        )  # fmt: skip
    with pytest.raises(InputError, match="drop_path_rate"):
        te.TransformerLayer(HIDDEN, FFN, HEADS, drop_path_rate=1.0)


@pytest.mark.parametrize("order", ["sbhd", "bshd"])
def test_dropped_paths(te, order):
    """Of the first dimension, as there; with one output layer to see: what remains is divided by the share that remains."""
    module = randomised(te.TransformerLayer(HIDDEN, FFN, HEADS, attn_input_format=order, drop_path_rate=0.4, **QUIET))
    torch.nn.init.zeros_(module.layernorm_mlp.fc2_weight)  # attention alone changes the stream
    torch.nn.init.zeros_(module.layernorm_mlp.fc2_bias)
    x = plain.fresh(*((200, 2) if order == "sbhd" else (200, 3)), HIDDEN)
    torch.manual_seed(5)
    dropped = (module(x) - x).flatten(1)
    whole = (module.eval()(x) - x).flatten(1)
    kept = dropped.norm(dim=1) > 0
    assert 0.5 < kept.float().mean() < 0.7
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.6, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("parameters_split", [("first_", "second"), {"first": 32, "rest": 16}], ids=["names", "sizes"])
@pytest.mark.parametrize("layer", ["Linear", "LayerNormLinear"])
def test_rows_of_several_parameters(te, layer, parameters_split, name):
    make = getattr(te, layer)
    module = randomised(make(HIDDEN, FFN, parameters_split=parameters_split))
    names = ["first", "second"] if isinstance(parameters_split, tuple) else ["first", "rest"]
    sizes = [24, 24] if isinstance(parameters_split, tuple) else [32, 16]
    wanted = [f"{name}_{kind}" for kind in ("weight", "bias") for name in names]
    assert [name for name, _ in module.named_parameters() if not name.startswith("layer_norm")] == wanted
    assert [len(getattr(module, name)) for name in wanted] == sizes * 2
    assert isinstance(module, make)

    def exactly(p, x):
        if layer == "LayerNormLinear":
            x = plain.norm("LayerNorm", x, p["layer_norm_weight"], p["layer_norm_bias"], 1e-5)
        return torch.cat([plain.linear(x, p[f"{name}_weight"], p[f"{name}_bias"]) for name in names], -1)

    check(module, lambda m, x: m(x), exactly, name)
    other = make(HIDDEN, FFN, parameters_split=parameters_split, bias=False, return_bias=True)
    other.load_state_dict({key: value for key, value in module.state_dict().items() if "_bias" not in key}, strict=False)
    y, bias = other(plain.fresh(4, HIDDEN))
    assert bias is None
    assert y.shape == (4, FFN)


@pytest.mark.parametrize(
    "parameters_split", [(), ("a", "a_"), ("a", "b", "c", "d", "e"), {"a": 40}, {"a": 47.0}, (1, 2)], ids=str
)
def test_splits_that_there_are_not(te, parameters_split):
    with pytest.raises(InputError, match=r"parameters_split=.*48 rows"):
        te.Linear(HIDDEN, FFN, parameters_split=parameters_split)
    with pytest.raises(InputError, match="another layer_norm_weight"):
        te.LayerNormLinear(HIDDEN, FFN, parameters_split={"layer_norm": FFN})
    with pytest.raises(AttributeError, match="has a_weight, b_weight; without parameters_split it has weight"):
        _ = te.Linear(HIDDEN, FFN, parameters_split=("a", "b")).weight


def history(layer):
    return {
        operand: (entry["scale"].item(), entry["amax_history"][0].item(), entry["amax_history"][-1].item())
        for operand, entry in octavo.fp8.inspect(layer).items()
    }


def test_calibration(te):
    """The newest entry of the history is that of the last call, and scales follow with the next FP8 forward of training."""
    layer = te.Linear(HIDDEN, FFN)
    first, last, later = (plain.fresh(8, HIDDEN, seed=seed, size=size) for seed, size in ((1, 4.0), (2, 2.0), (3, 0.5)))
    plainly = layer(last)
    with torch.no_grad():
        for x in (first, last):
            with te.fp8_autocast(enabled=False, calibrating=True):
                assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    largest, of_weight = last.abs().max().item(), layer.weight.abs().max().item()
    assert history(layer) == {"input": (1, largest, 0), "weight": (1, of_weight, 0), "grad_output": (1, 0, 0)}
    with torch.no_grad(), te.fp8_autocast():  # an evaluation: scales are as they were, and so they stay
        error = (layer(last) - plainly).norm() / plainly.norm()
    assert 0 < error < 0.1
    assert history(layer)["input"] == (1, largest, 0)
    saved = copy.deepcopy(layer.state_dict())
    for one in (layer, te.Linear(HIDDEN, FFN)):  # the second gets its history from the first's state dict
        one.load_state_dict(saved)
        with te.fp8_autocast():
            one(later)
        found = history(one)
        assert found["input"] == (pytest.approx(448 / largest, rel=1e-6), 0, largest)
        assert found["weight"] == (pytest.approx(448 / of_weight, rel=1e-6), 0, of_weight)


def test_a_model_trained_without_fp8_is_calibrated_saved_and_evaluated_in_fp8(te, tmp_path):
    """As Transformer Engine's example of digits does with `--use-fp8-infer`."""

    def fresh_model():
        return torch.nn.Sequential(te.Linear(HIDDEN, 64), torch.nn.ReLU(), te.Linear(64, 16))

    model, x = fresh_model(), plain.fresh(256, HIDDEN)
    target = (x[:, :4] > 0).long() @ torch.tensor([8, 4, 2, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(60):
        with te.fp8_autocast(enabled=False):
            loss = torch.nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def accuracy(of, **context):
        of.eval()
        with torch.no_grad(), te.fp8_autocast(**context):
            return (of(x).argmax(-1) == target).float().mean().item()

    exact = accuracy(model, enabled=False)
    assert accuracy(model, enabled=False, calibrating=True) == exact > 0.9
    torch.save(model.state_dict(), tmp_path / "digits.pt")
    again = fresh_model()
    again.load_state_dict(torch.load(tmp_path / "digits.pt"))
    assert accuracy(again, enabled=True) > exact - 0.05
    records = octavo.fp8.scaling.state_records(again)
    assert records["0.input.amax_history"][0] == x.abs().max()
    assert records["2.weight.amax_history"][0] == again[2].weight.abs().max()


@pytest.mark.parametrize("layer", ["LayerNormLinear", "LayerNormMLP", "GroupedLinear", "TransformerLayer"])
def test_calibration_of_every_product(te, layer):
    size = {"GroupedLinear": (2, HIDDEN, FFN), "TransformerLayer": (HIDDEN, FFN, HEADS), "LayerNormMLP": (HIDDEN, FFN)}
    module = getattr(te, layer)(*size.get(layer, (HIDDEN, FFN)), **(QUIET if layer == "TransformerLayer" else {}))
    twin = getattr(te, layer)(*size.get(layer, (HIDDEN, FFN)), **(QUIET if layer == "TransformerLayer" else {}))
    twin.load_state_dict(module.state_dict())
    x = plain.fresh(6, 3, HIDDEN)
    rest = ([10, 8],) if layer == "GroupedLinear" else ()
    with te.fp8_autocast(enabled=False, calibrating=True):
        y = module(x, *rest)
    measured = octavo.fp8.scaling.state_records(module)
    with te.fp8_autocast(enabled=False):
        assert torch.equal(y, twin(x, *rest))
    from transformer_engine.common.recipe import DelayedScaling

    with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=1)):  # whose casts measure the same, but for their rounding
        twin(x, *rest)
    cast = octavo.fp8.scaling.state_records(twin)
    checked = 0
    for name, scale in cast.items():
        if name.endswith("scale") and "grad_output" not in name:
            amax = measured[name.replace(".scale", ".amax_history")][0]
            torch.testing.assert_close(448 / amax, scale, rtol=0.1, atol=0, msg=lambda text, n=name: f"{n}: {text}")
            checked += 1
    assert checked == {"LayerNormLinear": 2, "LayerNormMLP": 4, "GroupedLinear": 4, "TransformerLayer": 8}[layer]
    with te.fp8_autocast(enabled=False, calibrating=True):
        torch.testing.assert_close(module(x, *rest), y)
        with te.fp8_autocast(enabled=False):  # nothing is measured in here
            before = {k: v.clone() for k, v in octavo.fp8.scaling.state_records(module).items()}
            module(x * 3, *rest)
        assert all(torch.equal(v, before[k]) for k, v in octavo.fp8.scaling.state_records(module).items())


def test_calibration_of_recipes_without_a_history(te):
    layer = te.Linear(HIDDEN, FFN)
    with te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=recipe_of("current")):
        layer(plain.fresh(8, HIDDEN))
    assert octavo.fp8.scaling.state_records(layer) == {}
    from transformer_engine.common.recipe import MXFP8BlockScaling

    with pytest.raises(InputError, match="MXFP8BlockScaling"), te.fp8_autocast(False, True, MXFP8BlockScaling()):
        pass


REFUSED = {
    "tp_size": 2, "fuse_wgrad_accumulation": True, "delay_wgrad_compute": True, "ub_overlap_ag": True, "ub_overlap_rs": True,
    "ub_overlap_rs_dgrad": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True, "ub_tp_comm_overlap": True,
    "symmetric_ar_type": "multimem_all_reduce", "save_original_input": True, "single_grouped_weight": True,
    "single_grouped_bias": True,
}  # fmt: skip
"""A value of each argument that this library has nothing for."""


@pytest.mark.parametrize("layer", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "MultiheadAttention"])
def test_refused_by_name(te, layer):
    size = {"GroupedLinear": (2, HIDDEN, FFN), "MultiheadAttention": (HIDDEN, HEADS)}.get(layer, (HIDDEN, FFN))
    make = getattr(te, layer)
    for name in inspect.signature(make).parameters:
        if name in REFUSED:
            with pytest.raises(InputError, match=rf"\({name}="):
                make(*size, **{name: REFUSED[name]})


DTYPES = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


@pytest.mark.parametrize("autocast", [False, True], ids=["", "under autocast"])
@pytest.mark.parametrize(("of_parameters", "of_input"), DTYPES)
@pytest.mark.parametrize("which", ["LayerNormLinear", "LayerNormMLP", "TransformerLayer"])
def test_dtypes_of_parameters_and_inputs(te, which, of_parameters, of_input, autocast):
    """Gradients have the dtypes of what they belong to; results that of the input, or of the autocast."""
    how = {"zero_centered_gamma": True, "params_dtype": of_parameters}
    if which == "TransformerLayer":
        module = te.TransformerLayer(
            HIDDEN, FFN, HEADS, layernorm_epsilon=by_hand.EPS, activation="qgeglu", output_layernorm=True, **how, **QUIET
        )
    elif which == "LayerNormMLP":
        module = te.LayerNormMLP(HIDDEN, FFN, by_hand.EPS, activation="clamped_swiglu", **how)
    else:
        module = te.LayerNormLinear(HIDDEN, FFN, by_hand.EPS, **how)
    randomised(module, zero=True)
    p = {name: parameter.detach().double() for name, parameter in module.named_parameters()}
    x = plain.fresh(6, 3, HIDDEN).to(of_input).requires_grad_()
    exactly = {
        "LayerNormLinear": lambda x: by_hand.linear(p, by_hand.normed(p, x, "layer_norm_", zero=True)),
        "LayerNormMLP": lambda x: by_hand.mlp(p, x, zero=True, activation="clamped_swiglu")[1],
        "TransformerLayer": lambda x: by_hand.layer(p, x, heads=HEADS, zero=True, activation="qgeglu", output=True),
    }[which](x.detach().double())
    for recipe, tolerance in ((None, 0.03), (recipe_of("current"), 0.2)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), te.fp8_autocast(recipe is not None, fp8_recipe=recipe):
            y = module(x)
        assert y.dtype == (torch.bfloat16 if autocast else of_input)
        assert (y.double() - exactly).norm() < tolerance * exactly.norm()
        y.sum().backward()
        assert x.grad.dtype == of_input
        assert {parameter.grad.dtype for parameter in module.parameters()} == {of_parameters}


def test_calibration_of_compiled_code_and_of_experts(te):
    layer, x = te.Linear(HIDDEN, FFN), plain.fresh(8, HIDDEN)
    compiled = torch.compile(layer, backend="eager")
    with te.fp8_autocast(enabled=False, calibrating=True):
        compiled(x)
    assert history(layer)["input"] == (1, x.abs().max().item(), 0)
    experts = octavo.nn.TransformerLayer(HIDDEN, FFN, HEADS, experts=octavo.nn.Experts(4, 2), bias=False)
    with (
        te.fp8_autocast(enabled=False, calibrating=True),
        pytest.raises(InputError, match="experts of LayerNormMoE cannot be calibrated"),
    ):
        experts(plain.fresh(2, 3, HIDDEN))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("layer", "sizes", "products"),
    [
        ("Linear", (32, 16), 1),
        ("LayerNormLinear", (32, 16), 1),
        ("LayerNormMLP", (32, 64), 2),
        ("GroupedLinear", (2, 32, 16), 2),
    ],
)
def test_what_clients_read_of_a_layer(te, layer, sizes, products, bias):
    module = getattr(te, layer)(*sizes, bias=bias, device="cpu")
    assert (module.use_bias, module.apply_bias) == (bias, bias)
    assert (module.tp_size, module.tp_group, module.sequence_parallel, module.parallel_mode) == (1, None, False, None)
    assert dict(module.fp8_meta) == {"recipe": None, "num_gemms": products, "fp8_checkpoint": False}
    x = torch.randn(8, 32)
    for _ in range(2):
        with te.fp8_autocast():
            y = module(x, [4, 4]) if layer == "GroupedLinear" else module(x)
        y.square().sum().backward()
    meta = module.fp8_meta
    forward, backward = meta["scaling_fwd"], meta["scaling_bwd"]
    assert meta["recipe"].amax_history_len == forward.amax_history.shape[0] == backward.amax_history.shape[0] == 1024
    assert (forward.amax_history.shape[1], backward.amax_history.shape[1]) == (3 * products, 2 * products)
    found = list(octavo.fp8.inspect(module).values()) if products > 1 else [octavo.fp8.inspect(module)]
    for number, own in enumerate(found):
        scales = torch.stack([own["input"]["scale"], own["weight"]["scale"]])
        assert torch.equal(forward.scale[3 * number : 3 * number + 2], scales)
        assert torch.equal(forward.amax_history[:, 3 * number + 1], own["weight"]["amax_history"])
        assert backward.scale[2 * number] == own["grad_output"]["scale"]
    writes = (
        lambda: forward.scale.fill_(2), lambda: forward.scale.__setitem__(0, 2), lambda: forward.scale[0].mul_(2),
        lambda: operator.imul(forward.scale, 2), lambda: torch.add(forward.scale, 1, out=forward.scale),
        lambda: meta.__setitem__("recipe", None), lambda: meta.update(recipe=None), lambda: meta.pop("recipe"),
    )  # fmt: skip
    for write in writes:
        with pytest.raises(InputError, match="fp8_meta has copies of scales and histories"):
            write()
    doubled = forward.scale * 2
    doubled[0] = 1  # what is computed of them is the script's
    assert type(doubled) is torch.Tensor
    for layer in module.modules():
        for name in ("init_fp8_metadata", "get_fp8_weights_scratchpad", "get_fp8_params", "set_meta_tensor"):
            assert not hasattr(layer, name)
            if type(layer).__module__.startswith("octavo.compat"):
                with pytest.raises(MissingName, match=name):
                    getattr(layer, name)


@pytest.mark.parametrize("options", [{}, {"fuse_qkv_params": True}, {"layer_type": "decoder"}, {"input_layernorm": True}])
def test_attributes_that_clients_read_of_layers_inside(te, options):
    attention = "input_layernorm" in options
    make = te.MultiheadAttention if attention else te.TransformerLayer
    layer = make(32, *(() if attention else (64,)), 4, bias="layer_type" not in options, **options)
    products = [
        module for module in layer.modules() if any("weight" in name for name, _ in module.named_parameters(recurse=False))
    ]
    assert len(products) == {"layer_type": 6, "input_layernorm": 2}.get(next(iter(options), ""), 3)
    for module in layer.modules():
        assert (module.tp_size, module.tp_group, module.sequence_parallel) == (1, None, False)
    for module in products:
        biased = any("bias" in name and "norm" not in name for name, own in module.named_parameters(recurse=False))
        assert module.use_bias is biased is ("layer_type" not in options)
        assert module.fp8_meta["recipe"] is None
    x = torch.randn(8, 2, 32, requires_grad=True)
    given = {"encoder_output": torch.randn(8, 2, 32)} if "layer_type" in options else {}
    with te.fp8_autocast():
        y = layer(x, **given)
    y.sum().backward()
    for module in products:
        assert module.fp8_meta["scaling_fwd"].amax_history.max() > 0
    copied = pickle.loads(pickle.dumps(copy.deepcopy(layer)))  # noqa: S301
    assert [type(one) for one in copied.modules()] == [type(one) for one in layer.modules()]
