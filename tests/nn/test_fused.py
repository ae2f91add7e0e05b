"""Fused layers beside float64 by hand, beside what a compiler is given instead of them, and what they keep for backward."""

from __future__ import annotations

import copy
import functools

import plain
import pytest
import torch
from fused_cases import (
    ACTIVATIONS,
    CASES,
    EPS,
    FP8,
    NORMS,
    RECIPES,
    SMALL,
    WIDE,
    Case,
    assert_near,
    assert_within_format,
    exact,
    inputs,
    layer_by_hand,
    layer_case,
    mlp_case,
    rotated_columns,
    run,
    same_bits,
    split_case,
    warm,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.nn.rotary import Rotation
from octavo.parallel import offload

torch_warns_of_itself = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
"""Dynamo instantiates `torch.autograd.Function` while it traces any such function."""


@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("which", CASES)
def test_without_fp8_they_are_float64(which, kind, bias):
    case = CASES[which](kind, bias)
    assert_near(run(case, *inputs(), None), exact(case, *inputs()), WIDE, by_norm=False)


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("which", ["linear", "split", "mlp", "layer", "normed layer", "parallel layer"])
def test_with_fp8_they_are_float64_but_for_its_rounding(which, kind, recipe):
    case = CASES[which](kind)
    warm(case, RECIPES[recipe])
    found = run(case, *inputs(), RECIPES[recipe])
    assert_within_format(found, exact(case, *inputs()))
    last = max(name for name in found if "output" in name)
    assert (found[last] - run(case, *inputs(), None)[last]).norm() > 0.003 * found[last].norm()


@pytest.mark.parametrize("recipe", ["none", "delayed", "block"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_every_activation(activation, recipe, bias):
    case = mlp_case("LayerNorm", bias, activation)
    warm(case, RECIPES[recipe])
    found, wanted = run(case, *inputs(), RECIPES[recipe]), exact(case, *inputs())
    if recipe == "none":
        assert_near(found, wanted, WIDE, by_norm=False)
    else:
        assert_within_format(found, wanted)


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("masked", ["causal", "no_mask", "mask"])
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_every_attention(recipe, masked, groups, rotate):
    case = layer_case(masked=masked, rotate=rotate, sizes=SMALL._replace(groups=groups))
    warm(case, RECIPES[recipe])
    found, wanted = run(case, *inputs(), RECIPES[recipe]), exact(case, *inputs())
    if recipe == "none":
        assert_near(found, wanted, WIDE, by_norm=False)
    else:
        assert_within_format(found, wanted, deeper=1.5)


COMPILED = [(which, recipe) for which in ("norm", "linear", "mlp", "layer") for recipe in RECIPES]
COMPILED += [(which, recipe) for which in ("normed layer", "parallel layer") for recipe in ("none", "delayed")]
FEW_COMPILED = [("mlp", "current"), ("layer", "block"), ("parallel layer", "delayed")]
"""Those of more than one product that are not long."""


@torch_warns_of_itself
@pytest.mark.long(lambda which, recipe: which not in ("norm", "linear") and (which, recipe) not in FEW_COMPILED)
@pytest.mark.parametrize(("which", "recipe"), COMPILED)
def test_they_are_what_a_compiler_is_given_instead(which, recipe):
    if which == "norm" and recipe != "none":
        pytest.skip("no product")
    case, twin = CASES[which](), CASES[which]()
    torch.compiler.reset()
    twin.module.compile(backend="aot_eager", fullgraph=True)  # which `forward_residual` runs too, unlike `torch.compile`'s
    for step in range(2):
        found = run(case, *inputs(1 + step), RECIPES[recipe])
        wanted = run(twin, *inputs(1 + step), RECIPES[recipe])
        # Sums in another order move what lies between two FP8 numbers to the other one, now and then.
        assert_near(found, wanted, WIDE if recipe == "none" else 0.02, by_norm=recipe != "none")
    if recipe == "delayed":
        for name, scale in octavo.fp8.scaling.state_records(case.module).items():
            torch.testing.assert_close(
                octavo.fp8.scaling.state_records(twin.module)[name], scale, rtol=0.05, atol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("which", CASES)
def test_a_stream_is_its_sum(which, recipe):
    """One tensor in, one out: the additions are then PyTorch's, and the same bits."""
    case, twin = CASES[which](), CASES[which]()
    angles = plain.angles(*SMALL.shape[:2], rotated_columns(SMALL, which == "parallel layer"))
    attention = {"rotary_pos_emb": tuple(t.float() for t in angles)} if "layer" in which else {}

    def alone(m, x, pending):
        h = x + pending
        if which == "norm":
            return (m(h),)
        if which == "split":
            return h, *m.forward_residual(
                h,
                rotation=Rotation(SMALL.heads, SMALL.groups, *(t.float() for t in plain.angles(*SMALL.shape[:2], SMALL.head))),
            )[1:]
        return (m(h, **attention),) if "layer" in which else (h, m(h))

    summed = twin._replace(call=alone)
    if "layer" in which:
        case = case._replace(call=lambda m, x, p, inner=case.call: (sum(inner(m, x, p)),))
    for _ in range(2):
        found, wanted = (run(c, *inputs(), RECIPES[recipe]) for c in (case, summed))
        # The gradient of the sum is added before it is rounded, or after: the last bit of float32.
        assert_near(found, wanted, 1e-6 if recipe == "none" else 2e-3, by_norm=True)
        same_bits({n: v for n, v in found.items() if "output" in n}, {n: v for n, v in wanted.items() if "output" in n})


@pytest.mark.parametrize("recipe", ["none", "delayed", "rowwise"])
@pytest.mark.parametrize("used", [[0], [1], [2], [3], [0, 2], [1, 3]], ids=str)
def test_outputs_that_nobody_uses(used, recipe):
    """Of h, q, k and v."""
    case = split_case()
    warm(case, RECIPES[recipe])
    found, wanted = run(case, *inputs(), RECIPES[recipe], used=used), exact(case, *inputs(), used)
    if used == [0]:
        assert all(found[name] is None for name, _ in case.module.named_parameters())
        found, wanted = ({n: t for n, t in of.items() if t is not None} for of in (found, wanted))
    if recipe == "none":
        assert_near(found, wanted, WIDE, by_norm=False)
    else:
        assert_within_format(found, wanted)


@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("which", ["linear", "mlp", "layer"])
@pytest.mark.parametrize("used", [0, 1])
def test_only_the_stream_or_only_the_product_is_used(which, used, recipe):
    case = CASES[which]()
    found, wanted = run(case, *inputs(), RECIPES[recipe], used=[used]), exact(case, *inputs(), [used])
    found = {name: torch.zeros_like(wanted[name]) if t is None and wanted[name] is not None else t for name, t in found.items()}
    wanted = {name: torch.zeros_like(found[name]) if t is None and found[name] is not None else t for name, t in wanted.items()}
    if recipe == "none":
        assert_near(found, wanted, WIDE, by_norm=False)
    else:
        assert_within_format(found, wanted)


_IN, _NORM = ["x", "pending"], ["layer_norm_weight", "layer_norm_bias"]
_BIASES, _WEIGHTS = ["bias", "fc1_bias", "fc2_bias"], ["weight", "fc1_weight", "fc2_weight"]
FROZEN = {
    "x": ["x"],
    "x and pending": _IN,
    "weights": _WEIGHTS,
    "norm": _NORM,
    "norm's weight": ["layer_norm_weight"],
    "biases": _BIASES,
    "all but the first weight": [*_IN, *_NORM, *_BIASES, "fc2_weight"],
    "all but the second weight": [*_IN, *_NORM, *_BIASES, "fc1_weight"],
    "all but the biases": [*_IN, *_NORM, *_WEIGHTS],
    "all but the first bias": [*_IN, *_NORM, *_WEIGHTS, "bias", "fc2_bias"],
    "all but the last bias": [*_IN, *_NORM, *_WEIGHTS, "fc1_bias"],
    "all but the norm's bias": [*_IN, "layer_norm_weight", *_WEIGHTS, *_BIASES],
    "all but pending": ["x", *_NORM, *_WEIGHTS, *_BIASES],
}


@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block"])
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("which", ["linear", "split", "mlp", "mlp again"])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(which, frozen, recipe):
    case, twin = (CASES[which]("LayerNorm") for _ in range(2))
    names = {name for name, _ in case.module.named_parameters()} | {"x", "pending"}
    if not names - set(FROZEN[frozen]):
        pytest.skip("nothing left")
    for parameter_name, parameter in case.module.named_parameters():
        parameter.requires_grad_(parameter_name not in FROZEN[frozen])
    x, pending = (
        t.detach().requires_grad_(name not in FROZEN[frozen]) for name, t in zip(("x", "pending"), inputs(), strict=True)
    )
    for _ in range(2):
        found, wanted = run(case, x, pending, RECIPES[recipe]), run(twin, *inputs(), RECIPES[recipe])
        assert all(found[name] is None for name in FROZEN[frozen] if name in found)
        # Which of two kernels' sums a gradient comes from may depend on what else is wanted.
        left = {name: t for name, t in wanted.items() if name not in FROZEN[frozen]}
        assert_near({name: found[name] for name in left}, left, 1e-6, by_norm=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("which", ["norm", "linear", "split", "mlp"])
def test_a_second_derivative_is_refused(which, recipe):
    case = CASES[which]()
    x, pending = inputs()
    with octavo.fp8_autocast(enabled=recipe != "none", fp8_recipe=RECIPES[recipe]):
        y = case.call(case.module, x, pending)[-1]
    with pytest.raises(RuntimeError, match="no second derivative: call backward without create_graph=True"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("which", CASES)
def test_a_graph_that_is_kept_gives_its_gradients_twice(which, recipe):
    case = CASES[which]()
    x, pending = inputs()
    leaves = [x, pending, *case.module.parameters()]
    with octavo.fp8_autocast(enabled=recipe != "none", fp8_recipe=RECIPES[recipe]):
        y = case.call(case.module, x, pending)[-1]
    g = plain.fresh(*y.shape, seed=5)
    first, second = (torch.autograd.grad(y, leaves, g, retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        # Between two backwards delayed scaling moves on: the second knows the amax of the first.
        assert torch.equal(a, b) if recipe != "delayed" else (a - b).norm() <= 0.25 * a.norm()


@pytest.mark.parametrize("recipe", ["none", "current", "rowwise", "block"])
@pytest.mark.parametrize("which", CASES)
def test_reentrant_checkpoints_change_no_bit(which, recipe):
    case = CASES[which]()
    repeated = case._replace(call=lambda m, x, p: checkpoint(lambda a, b: tuple(case.call(m, a, b)), x, p, use_reentrant=True))
    same_bits(run(repeated, *inputs(), RECIPES[recipe]), run(case, *inputs(), RECIPES[recipe]))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("which", CASES)
@pytest.mark.parametrize("away", [False, True], ids=["checkpointed", "offloaded"])
def test_checkpoints_and_offloading_change_no_bit(which, recipe, away, monkeypatch):
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 0)
    case, twin = CASES[which](), CASES[which]()

    def call(m, x, pending):
        if away:
            return offload.offloaded(case.call)(m, x, pending)
        return checkpoint(lambda a, b: tuple(case.call(m, a, b)), x, pending, use_reentrant=False)

    for _ in range(3):
        same_bits(run(case._replace(call=call), *inputs(), RECIPES[recipe]), run(twin, *inputs(), RECIPES[recipe]))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_a_first_product_that_is_made_again_changes_no_bit_and_is_not_kept(activation, recipe):
    cases = [CASES[which]("LayerNorm", activation=activation) for which in ("mlp", "mlp again")]
    hidden = (SMALL.batch * SMALL.tokens, len(cases[0].module.fc1_bias))
    for _ in range(3):
        found, kept = [], []
        for case in cases:
            shapes = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, to=shapes: to.append(t.shape) or t, lambda t: t):
                found.append(run(case, *inputs(), RECIPES[recipe]))
            kept.append(shapes.count(hidden))
        same_bits(*found)
        assert kept == [1, 0]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("which", CASES)
def test_what_comes_out_may_be_written_over(which, recipe):
    case = CASES[which]()
    with octavo.fp8_autocast(enabled=recipe != "none", fp8_recipe=RECIPES[recipe]):
        y = case.call(case.module, *inputs())[-1]
    before = y.detach().clone()
    y.add_(1).mul_(2)
    assert torch.equal(y.detach(), (before + 1) * 2)
    y.sum().backward()
    assert all(p.grad is not None for p in case.module.parameters())


@pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
@pytest.mark.parametrize("which", ["linear", "mlp", "layer"])
def test_under_torch_autocast_the_stream_stays_float32(which, recipe):
    case = CASES[which]()
    twin = CASES[which]()
    in_bf16 = case._replace(call=lambda m, x, p: autocast_call(case, m, x, p))
    for _ in range(3):
        found = run(in_bf16, *inputs(), RECIPES[recipe])
    assert found["output 0"].dtype == torch.float32
    assert found["output 1"].dtype == torch.bfloat16
    assert {t.dtype for name, t in found.items() if "output" not in name} == {torch.float32}
    wanted = exact(twin, *inputs())
    assert_near({"h": found["output 0"]}, {"h": wanted["output 0"]}, 1e-6 if which != "layer" else 0.05, by_norm=True)
    if recipe == "none":
        assert_near(found, wanted, 0.03, by_norm=True)
    else:
        assert_within_format(found, wanted)


def autocast_call(case, module, x, pending):
    with torch.autocast("cpu", torch.bfloat16):
        return case.call(module, x, pending)


@pytest.mark.parametrize("which", ["linear", "mlp", "layer"])
def test_a_float32_stream_takes_what_a_bf16_layer_adds(which):
    """And hands the layer a gradient of its own dtype."""
    case = CASES[which]()
    x, pending = inputs()
    narrow = pending.detach().bfloat16().requires_grad_()
    h, y = case.call(case.module, x, narrow)
    assert h.dtype == torch.float32
    (h.sum() + y.square().sum()).backward()
    assert narrow.grad.dtype == torch.bfloat16
    assert torch.equal(narrow.grad, x.grad.bfloat16())
    h, y = case.call(case.module, x.detach().bfloat16(), pending)
    assert h.dtype == torch.float32


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("which", CASES)
def test_master_weights_and_inputs_of_16_bits(which, dtype, recipe):
    case = CASES[which]()
    warm(case, RECIPES[recipe])
    found = run(case, *inputs(), RECIPES[recipe], dtype=dtype)
    rounded = [t.detach().to(dtype).float().requires_grad_() for t in inputs()]
    wanted = exact(case, *rounded)
    for name, tensor in found.items():
        assert tensor.dtype == (dtype if name in ("x", "pending") or "output" in name else torch.float32), name
    if recipe == "none":
        assert_near(found, wanted, 0.03 if dtype == torch.bfloat16 else 0.005, by_norm=True)
    else:
        assert_within_format(found, wanted)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("which", ["linear", "mlp", "layer"])
def test_later_micro_batches_use_the_weights_of_the_first(which, recipe):
    case, twin = CASES[which](), CASES[which]()
    fp8 = {"enabled": recipe != "none", "fp8_recipe": RECIPES[recipe]}

    def forward(m, first):
        with octavo.fp8_autocast(**fp8):
            return m(plain.fresh(*SMALL.shape), is_first_microbatch=first)

    kept = forward(case.module, True)
    with torch.no_grad():
        for p in [*case.module.parameters(), *twin.module.parameters()]:
            if p.dim() == 2:
                p.neg_()
    later = forward(case.module, False)
    again = forward(twin.module, None)
    assert torch.equal(later, again) == (recipe == "none")
    assert recipe == "none" or recipe == "delayed" or which == "layer" or torch.equal(later, kept)
    later.sum().backward()
    assert torch.equal(forward(case.module, True), again) or recipe == "delayed"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("which", ["linear", "mlp", "layer"])
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_leave_no_trace(which, off, recipe):
    case, twin = CASES[which](), CASES[which]()
    for _ in range(2):
        with off(), octavo.fp8_autocast(enabled=recipe != "none", fp8_recipe=RECIPES[recipe]):
            outputs = case.call(case.module, *inputs(30.0))
        assert not any(y.requires_grad for y in outputs)
        same_bits(run(case, *inputs(), RECIPES[recipe]), run(twin, *inputs(), RECIPES[recipe]))


def test_training_goes_on_after_weights_were_kept_in_inference_mode():
    case, twin = mlp_case(), mlp_case()
    with torch.inference_mode(), octavo.fp8_autocast(fp8_recipe=RECIPES["current"]):
        case.module(plain.fresh(*SMALL.shape), is_first_microbatch=True)
    calls = (c._replace(call=lambda m, x, p: m.forward_residual(x, p, is_first_microbatch=False)) for c in (case, twin))
    same_bits(*(run(c, *inputs(), RECIPES["current"]) for c in calls))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("which", CASES)
def test_copies_go_on_by_themselves(which, recipe):
    case = CASES[which]()
    warm(case, RECIPES[recipe])
    twin = case._replace(module=copy.deepcopy(case.module))
    wanted = run(case, *inputs(), RECIPES[recipe])
    run(case, *inputs(100.0), RECIPES[recipe])
    same_bits(run(twin, *inputs(), RECIPES[recipe]), wanted)


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("skipped", ["fc1", "fc2"])
def test_one_product_of_an_mlp_may_stay_out_of_fp8(skipped, recipe):
    case = mlp_case()
    getattr(case.module, f"{skipped}_fp8_state").skipped = "for a test"
    warm(case, RECIPES[recipe])
    found = run(case, *inputs(), RECIPES[recipe])
    assert_within_format(found, exact(case, *inputs()))
    both = mlp_case()
    warm(both, RECIPES[recipe])
    assert not torch.equal(run(both, *inputs(), RECIPES[recipe])["output 1"], found["output 1"])
    assert not octavo.fp8.inspect(case.module)[skipped]


@pytest.mark.parametrize("skipped", ["fc1", "fc2", None])
def test_gradients_of_each_backward_take_effect_before_the_next(skipped):
    """Also where only one product of an MLP runs in FP8."""
    case = mlp_case()
    if skipped:
        getattr(case.module, f"{skipped}_fp8_state").skipped = "for a test"
    with octavo.fp8_autocast(fp8_recipe=octavo.recipe.DelayedScaling(amax_history_len=4)):
        first, second = (case.module(plain.fresh(*SMALL.shape, seed=seed)) for seed in (1, 2))
    octavo.fp8.inspect(case.module)
    first.backward(torch.ones_like(first))
    second.backward(torch.full_like(second, 2.0))
    report = octavo.fp8.inspect(case.module)
    for name in {"fc1", "fc2"} - {skipped}:
        history = report[name]["grad_output"]["amax_history"]
        assert (history != 0).tolist() == [False, False, True, True], name
    if skipped != "fc2":
        assert report["fc2"]["grad_output"]["amax_history"].tolist() == [0, 0, 1, 2]


TOKENS, FFN = 64, 96
HIDDEN, HEADS, GROUPS, HEAD = SMALL.hidden, SMALL.heads, SMALL.groups, SMALL.head


def kept(module, recipe, *, dtype=torch.bfloat16, frozen=()):
    """What a layer keeps for backward: [(dtype, elements)] of each piece of memory, parameters in any dtype left out."""
    x, pending = (plain.fresh(1, TOKENS, HIDDEN, seed=s).to(dtype).requires_grad_() for s in (1, 2))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    sizes = {p.numel() for p in module.parameters()}
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found = {}

    def pack(tensor):
        memory = tensor.untyped_storage().data_ptr()
        if memory not in own and tensor.numel() >= TOKENS and tensor.numel() not in sizes:
            found[memory, tensor.dtype] = tensor.numel()
        return tensor

    rotary = tuple(table.float() for table in plain.angles(1, TOKENS, HEAD))
    own |= {table.untyped_storage().data_ptr() for table in rotary}
    with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe), saved_tensors_hooks(pack, lambda t: t):
        h, y = module.forward_residual(x, pending, None, rotary)
    h.sum().backward(retain_graph=True)
    y.sum().backward()
    return sorted((str(kind).removeprefix("torch."), elements) for (_, kind), elements in found.items())


def llama_block(ffn=FFN):
    return octavo.nn.TransformerLayer(
        HIDDEN,
        ffn,
        HEADS,
        num_gqa_groups=GROUPS,
        normalization="RMSNorm",
        bias=False,
        activation="swiglu",
        params_dtype=torch.float32,
    )


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_block_keeps_fp8_and_what_attention_and_the_activation_read(recipe):
    queries, keys = TOKENS * HEADS * HEAD, TOKENS * GROUPS * HEAD
    of_bf16 = (
        [TOKENS * HIDDEN] * 2 + [queries, keys, keys, queries] + [2 * TOKENS * FFN]
    )  # h twice; q, k, v, context; gate and up
    of_fp8 = [TOKENS * HIDDEN, queries, TOKENS * HIDDEN]  # transposed inputs of qkv, proj and fc1; fc2's is made again
    statistics = [TOKENS, TOKENS, TOKENS * HEADS]  # of two norms, and attention's sums of exponentials
    found = kept(llama_block(), RECIPES[recipe])
    wanted = [("bfloat16", n) for n in of_bf16] + [("float8_e4m3fn", n) for n in of_fp8] + [("float32", n) for n in statistics]
    assert found == sorted(wanted)


@pytest.mark.parametrize("recipe", ["rowwise", "block"])
def test_where_a_cast_cannot_be_repeated_fc2s_input_is_kept_in_fp8(recipe):
    found = kept(llama_block(), RECIPES[recipe])
    eights = [n for kind, n in found if kind == "float8_e4m3fn"]
    assert sorted(eights) == sorted([TOKENS * HIDDEN, TOKENS * HEADS * HEAD, TOKENS * HIDDEN, TOKENS * FFN])
    tensors = [n for kind, n in found if kind == "bfloat16"]
    assert len(tensors) == 7


def test_frozen_weights_keep_no_inputs():
    frozen = [name for name, p in llama_block().named_parameters() if p.dim() == 2]
    found = kept(llama_block(), RECIPES["delayed"], frozen=frozen)
    assert not [n for kind, n in found if kind == "float8_e4m3fn"]


def test_without_fp8_a_block_keeps_each_input_once():
    found = kept(llama_block(), None)
    queries, keys = TOKENS * HEADS * HEAD, TOKENS * GROUPS * HEAD
    # h and its norm twice, the joint product apart, the context (which is proj's input too), gate and up.
    wanted = [TOKENS * HIDDEN] * 4 + [queries, keys, keys, queries, 2 * TOKENS * FFN]
    assert sorted(n for kind, n in found if kind == "bfloat16") == sorted(wanted)


def layers(hidden=32, ffn=48, heads=4):
    return {
        "Linear": octavo.nn.Linear(hidden, ffn),
        "LayerNormLinear": octavo.nn.LayerNormLinear(hidden, ffn),
        "LayerNormMLP": octavo.nn.LayerNormMLP(hidden, ffn, activation="swiglu"),
        "TransformerLayer": octavo.nn.TransformerLayer(hidden, ffn, heads),
    }


LAYERS = ["Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"]


def step(layer, x, recipe, g=None):
    layer.zero_grad()
    x = x.detach().requires_grad_() if x.is_contiguous() else x.requires_grad_()
    with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        y = layer(x)
    y.backward(torch.ones_like(y) if g is None else g)
    return {"y": y.detach(), "x": x.grad} | {name: p.grad.clone() for name, p in layer.named_parameters()}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 5, 32), (2, 0, 32), (0, 32)], ids=str)
@pytest.mark.parametrize("which", LAYERS)
def test_empty_batches(which, shape, recipe):
    if which == "TransformerLayer" and len(shape) == 2:
        pytest.skip("a transformer layer wants a batch of sequences")
    layer = layers()[which]
    found = step(layer, torch.zeros(shape), RECIPES[recipe])
    assert found.pop("y").shape[:-1] == shape[:-1]
    assert found.pop("x").shape == shape
    assert all((grad == 0).all() for grad in found.values())
    if recipe == "delayed":
        report = octavo.fp8.inspect(layer)
        for entries in [report] if "input" in report else report.values():
            for operand in ("input", "grad_output"):
                assert entries[operand]["scale"] == 1
                assert (entries[operand]["amax_history"] == 0).all()
    x = plain.fresh(2, 3, 32)
    wanted = step(copy.deepcopy(layer), x, None)
    for _ in range(2):
        found = step(layer, x, RECIPES[recipe])
    assert_near(found, wanted, 0.2, by_norm=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(1, 1, 32), (3, 1, 32)], ids=str)
@pytest.mark.parametrize("which", LAYERS)
def test_sequences_of_one_token(which, shape, recipe):
    layer, x = layers()[which], plain.fresh(*shape)
    wanted = step(layers()[which].load_state_dict(layer.state_dict()) and layer, x, None)
    for _ in range(3):
        found = step(layer, x, RECIPES[recipe])
    for name, expected in wanted.items():
        assert (found[name] - expected).norm() <= 0.2 * expected.norm() + 1e-5, name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("hidden", "ffn", "heads"), [(45, 21, 3), (50, 35, 5), (17, 1, 1), (36, 44, 6)])
@pytest.mark.parametrize("kind", NORMS)
def test_sizes_that_are_no_multiples_of_16(kind, hidden, ffn, heads, recipe):
    """Odd head dimensions among them."""
    layer = plain.randomise(octavo.nn.TransformerLayer(hidden, ffn, heads, normalization=kind, activation="geglu"))
    by_hand = functools.partial(
        layer_by_hand, kind=kind, activation="geglu", heads=heads, groups=heads, angles=None, allowed=plain.causal(5)
    )
    for norm in (layer.self_attention.layernorm_qkv, layer.layernorm_mlp):
        norm.eps = EPS
    with torch.no_grad():
        layer.self_attention.layernorm_qkv.weight.mul_(0.3)
    case = Case(layer, lambda m, x, pending: m.forward_residual(x, pending), by_hand)
    x, pending = inputs(shape=(3, 5, hidden))
    for _ in range(3):
        found = run(case, x, pending, RECIPES[recipe])
    if recipe == "none":
        assert_near(found, exact(case, x, pending), 2e-5, by_norm=False)
    else:
        assert_within_format(found, exact(case, x, pending))


def strided(x, how):
    """The same values in other strides, or a repeated token."""
    if how == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "columns first":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if how == "every second":
        return x.repeat_interleave(2, -1)[..., ::2]
    if how == "in a wider row":
        return torch.cat((x, x), -1)[..., : x.shape[-1]]
    return x[:1, :1].expand(x.shape)


STRIDES = ["transposed", "columns first", "every second", "in a wider row", "expanded"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", STRIDES)
@pytest.mark.parametrize("which", LAYERS)
def test_strides_of_inputs_and_gradients_do_not_matter(which, how, recipe):
    layer = layers()[which]
    x, g = strided(plain.fresh(3, 4, 32), how), strided(plain.fresh(3, 4, layer(torch.zeros(1, 1, 32)).shape[-1], seed=1), how)
    assert not x.is_contiguous()
    twin = copy.deepcopy(layer)
    for _ in range(2):
        found, wanted = (
            step(layer, x.detach(), RECIPES[recipe], g),
            step(twin, x.detach().contiguous(), RECIPES[recipe], g.contiguous()),
        )
        assert_near(found, wanted, 1e-6 if recipe == "none" else 0.01, by_norm=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["LayerNormLinear", "LayerNormMLP"])
def test_nan_and_inf_stay_in_their_token(which, value, recipe):
    layer, twin = (layers()[which] for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    clean = plain.fresh(4, 32)
    spoilt = clean.clone()
    spoilt[1, 3] = value
    for _ in range(3):
        found, wanted = (step(m, x, RECIPES[recipe], g)
                         for m, x, g in ((layer, spoilt, None), (twin, clean, None)))  # fmt: skip
    assert found["y"][1].isnan().all()
    others = [0, 2, 3]
    assert found["y"][others].isfinite().all()
    assert found["x"][others].isfinite().all()
    assert (found["y"][others] - wanted["y"][others]).norm() <= 0.1 * wanted["y"][others].norm()
    if recipe == "delayed":
        report = octavo.fp8.inspect(layer)
        for entries in [report] if which == "LayerNormLinear" else report.values():
            for operand, entry in entries.items():
                assert entry["scale"].isfinite(), operand
                assert entry["amax_history"].isfinite().all(), operand


@pytest.mark.parametrize("recipe", FP8)
def test_an_infinite_hidden_element_saturates_or_shows(recipe):
    """A first product that overflows float16: FP8 makes the largest number of infinity, and NaN stays NaN."""
    layer = octavo.nn.LayerNormMLP(32, 48, activation="srelu", bias=False)
    with torch.no_grad():
        layer.fc1_weight[0] = torch.inf
    y = step(layer, plain.fresh(4, 32), RECIPES[recipe])["y"]
    assert not y.isinf().any()
