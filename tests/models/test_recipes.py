"""A recipe for each layer by pattern, the head in FP8, and objectives other than the plain cross entropy."""

import copy

import pytest
import torch
from expectations import refused
from torch import nn
from torch.nn import functional
from transformers import GPTNeoConfig, GPTNeoForCausalLM, LlamaForCausalLM

import octavo
from building import built_model
from octavo.build import describe, transform
from octavo.fp8 import scaling
from octavo.fp8.recipe import CurrentScaling, DelayedScaling, RowwiseScaling
from octavo.kernels.cross_entropy import Objective
from octavo.models.sources import load_config

CONFIG = load_config(
    "llama-tiny",
    {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 44, "num_attention_heads": 4, "num_hidden_layers": 2},
)
NEO = GPTNeoConfig(
    vocab_size=97, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48, attention_types=[[["global", "local"], 1]],
    window_size=4, max_position_embeddings=64, attention_dropout=0.0, resid_dropout=0.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
DELAYED = DelayedScaling(amax_history_len=4)
SHORT = DelayedScaling(amax_history_len=2, margin=1)
FC1, FC2, PROJ, QKV = "ffn.fc1", "ffn.fc2", "self_attention.proj", "self_attention.qkv"


def build(config=CONFIG, **changes):
    make = {"dtype": torch.float32, "params_dtype": torch.float32, "device": "cpu", "seed": 3}
    return built_model(config, **make | changes)


def tokens(seed=1, length=24):
    return torch.randint(97, (2, length), generator=torch.Generator().manual_seed(seed))


def step(model, recipe=DELAYED):
    with octavo.fp8_autocast(fp8_recipe=recipe):
        loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    return loss


def test_each_layer_runs_by_the_last_pattern_that_names_it_and_skip_is_above_all():
    layers = {"layers.0.*": None, "*.fc1": RowwiseScaling(), "model.layers.*.mlp.down_proj": SHORT, "*.proj": SHORT}
    model = build(layers=layers, skip=["layers.1.self_attention.proj"])
    wanted = {
        f"layers.0.{QKV}": ("", "in high precision by pattern 'layers.0.*'"),
        f"layers.0.{PROJ}": ("delayed", "delayed scaling by pattern '*.proj'"),
        f"layers.0.{FC1}": ("rowwise", "rowwise scaling by pattern '*.fc1'"),
        f"layers.0.{FC2}": ("delayed", "delayed scaling by pattern 'model.layers.*.mlp.down_proj'"),
        f"layers.1.{QKV}": ("", ""),
        f"layers.1.{PROJ}": ("", "skipped by pattern 'layers.1.self_attention.proj'"),
        f"layers.1.{FC1}": ("rowwise", "rowwise scaling by pattern '*.fc1'"),
        f"layers.1.{FC2}": ("delayed", "delayed scaling by pattern 'model.layers.*.mlp.down_proj'"),
    }
    reports = {report.name: report for report in describe(model).layers if report.name.startswith("layers")}
    assert {name: (report.recipe, report.reason) for name, report in reports.items()} == wanted
    out = {f"layers.0.{QKV}", f"layers.1.{PROJ}"}
    assert {name for name, report in reports.items() if not report.fp8} == out
    assert "rowwise scaling by pattern '*.fc1'" in str(describe(model))
    step(model)
    step(model)
    seen = octavo.fp8.inspect(model)
    assert {name for name, entry in seen.items() if not entry} == out
    assert seen[f"layers.0.{FC1}"]["weight"]["amax_history"] is None
    assert seen[f"layers.0.{FC1}"]["weight"]["scale"].shape == (88, 1)
    for name, length in ((f"layers.1.{QKV}", 4), (f"layers.0.{PROJ}", 2), (f"layers.1.{FC2}", 2)):
        for operand in ("input", "weight", "grad_output"):
            assert seen[name][operand]["amax_history"].shape == (length,), (name, operand)
            assert seen[name][operand]["amax_history"].count_nonzero() > 0, (name, operand)
    weight = model.layers[1].ffn.fc2.weight
    assert seen[f"layers.1.{FC2}"]["weight"]["scale"] == 448 / 2 / weight.abs().max()  # its margin, not the autocast's


@pytest.mark.parametrize("own", [RowwiseScaling(), CurrentScaling(), SHORT, octavo.recipe.BlockScaling()], ids=lambda r: r.name)
@pytest.mark.parametrize("around", [DELAYED, RowwiseScaling()], ids=lambda r: r.name)
def test_every_layer_by_its_own_recipe_is_that_recipe_for_all(own, around):
    """To the bit, gradients and later steps included: nothing of the recipe around them is left in them."""
    one, other = build(), build(layers={"*": own})
    for _ in range(3):
        assert torch.equal(step(one, own), step(other, around))
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    with octavo.fp8_autocast(enabled=False):
        assert torch.equal(*(model(input_ids=tokens()).logits for model in (build(), other)))


def test_a_recomputed_layer_repeats_its_own_recipe():
    layers = {"*.fc1": RowwiseScaling(), "*.proj": SHORT, "layers.0.self_attention.qkv": None}
    models = [build(layers=layers, recompute=recompute) for recompute in (False, True)]
    for _ in range(3):
        assert torch.equal(*(step(model) for model in models))
    for (name, a), (_, b) in zip(*(model.named_parameters() for model in models), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for a, b in zip(*(scaling.state_records(model).values() for model in models), strict=True):
        assert torch.equal(a, b)


def test_compiled_layers_run_by_their_own_recipe():
    layers = {"layers.0.*": None, "*.fc1": RowwiseScaling(), "*.proj": SHORT}
    eager, compiled = build(layers=layers), build(layers=layers)
    for layer in compiled.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(*(step(model) for model in (eager, compiled)), rtol=1e-5, atol=0)


def test_records_go_back_into_each_layers_own_history_and_a_copy_keeps_its_recipe():
    layers = {"*.fc1": RowwiseScaling(), "*.proj": SHORT}
    model, other = build(layers=layers, skip=["*.fc2"]), build(layers=layers, skip=["*.fc2"])
    step(model)
    records = scaling.state_records(model)
    delayed = {f"layers.{n}.{part}" for n in range(2) for part in (QKV, PROJ)} | {"head"}
    assert {name.rsplit(".", 2)[0] for name in records} == delayed
    scaling.load_state_records(other, records, DELAYED)
    found = scaling.state_records(other)
    assert found.keys() == records.keys()
    for name, record in records.items():
        assert torch.equal(found[name], record), name
    twin = copy.deepcopy(model)
    assert torch.equal(*(step(one) for one in (model, twin)))
    assert [r.recipe for r in describe(twin).layers] == [r.recipe for r in describe(model).layers]


def test_transform_takes_recipes_for_any_module_and_those_of_transformer_engine():
    class Float8CurrentScaling:
        """Named as Transformer Engine's."""

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model = transform(copy.deepcopy(plain), dtype=torch.float32, layers={"0": Float8CurrentScaling(), "2": None})
    assert [(r.fp8, r.recipe) for r in describe(model).layers] == [(True, "current"), (True, ""), (False, "")]
    neo = transform(GPTNeoForCausalLM(NEO), layers={"transformer.h.0.*": None})
    assert sum("by pattern" in r.reason for r in describe(neo).layers) == 6
    llama = transform(LlamaForCausalLM(CONFIG), layers={"model.layers.1": None, "*.proj": RowwiseScaling()}, fp8_head=True)
    assert {r.name: r.recipe for r in describe(llama).layers}["layers.1.self_attention.proj"] == "rowwise"
    assert {r.name: r.fp8 for r in describe(llama).layers}["head"]
    refused(["fp8.layers pattern 'nope'", "describe"], transform, plain, layers={"nope": None})
    refused(["FP8 recipe", "str"], transform, plain, layers={"0": "rowwise"})
    refused(["fp8.head = true", "Sequential"], transform, plain, fp8_head=True)


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest():
    refused(["fp8.layers pattern", "layers.0.self_attention.proj"], build, layers={"layers.0.self_atention.proj": None})


def head_of(model):
    return next(report for report in describe(model).layers if report.name == "head")


def test_the_head_is_described_as_it_runs():
    assert not head_of(build(fp8_head=False)).fp8
    assert "high precision" in head_of(build(fp8_head=False)).reason
    report = head_of(build(fp8_head=True))
    assert report.fp8
    assert report.reason == "gradients accumulate precisely"
    for name in ("head", "lm_head"):
        assert head_of(build(fp8_head=True, skip=[name])).reason == f"skipped by pattern {name!r}"
        assert not head_of(build(fp8_head=True, layers={name: None})).fp8
    assert "one scale a tensor" in head_of(build(fp8_head=True, layers={"head": RowwiseScaling()})).reason


def test_a_head_that_is_skipped_is_that_of_a_model_without_it():
    wanted = step(build(fp8_head=False, skip=["layers.*"]), CurrentScaling())
    assert torch.equal(step(build(fp8_head=True, skip=["*"]), CurrentScaling()), wanted)
    assert not torch.equal(step(build(fp8_head=True, skip=["layers.*"]), CurrentScaling()), wanted)


@pytest.mark.parametrize("fp8_head", [False, True])
def test_the_objective_is_of_training_alone_and_is_pytorchs(fp8_head):
    objective = Objective(label_smoothing=0.2, z_loss=0.01)
    model, plain = build(objective=objective, fp8_head=fp8_head), build(fp8_head=fp8_head)
    recipe = CurrentScaling() if fp8_head else None
    with octavo.fp8_autocast(enabled=fp8_head, fp8_recipe=recipe):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        with torch.no_grad():
            evaluated, wanted = (m.eval()(input_ids=tokens(), labels=tokens()).loss for m in (model, plain))
    assert torch.equal(evaluated, wanted)
    if not fp8_head:
        logits = model(input_ids=tokens()).logits[:, :-1].flatten(0, 1)
        exact = functional.cross_entropy(logits, tokens()[:, 1:].flatten(), label_smoothing=0.2)
        exact = exact + 0.01 * logits.logsumexp(-1).square().mean()
        torch.testing.assert_close(loss, exact)
        given, asked = (torch.autograd.grad(value, list(model.parameters())) for value in (loss, exact))
        for a, b in zip(given, asked, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert (loss - wanted).abs() > 0.01


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"fp8_head": True}, ["fp8.head = true", "gpt_neo", "Set fp8.head = false"]),
        ({"fp8_head": "backward"}, ['fp8.head = "backward"', "gpt_neo", "Set fp8.head = false"]),
        ({"objective": Objective(label_smoothing=0.1)}, ["train.label_smoothing = 0.1", "Set train.label_smoothing = 0.0"]),
        ({"objective": Objective(z_loss=1e-4), "fp8_head": True}, ["train.z_loss = 0.0001", "fp8.head = true"]),
    ],
)
def test_a_model_that_keeps_its_own_code_keeps_its_own_head_and_loss(asked, words):
    refused(words, build, NEO, **asked)
    build(NEO, objective=Objective())
