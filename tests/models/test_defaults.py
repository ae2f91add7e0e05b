"""Settings that nobody names: FP8 in the head's backward, fast input gradients, and the model's own dtype of parameters."""

import copy
import dataclasses

import pytest
import torch
from llamas import llama_config
from torch import nn
from transformers import GPTNeoConfig, GPTNeoForCausalLM, LlamaForCausalLM

import octavo
from octavo.build import transform
from octavo.errors import InputError
from octavo.fp8.recipe import coerce
from octavo.fp8.scaling import states_of

RECIPES = {"delayed": octavo.recipe.DelayedScaling(amax_history_len=4), "current": octavo.recipe.CurrentScaling()}
NEO = GPTNeoConfig(
    vocab_size=61, hidden_size=32, num_layers=1, num_heads=2, attention_types=[[["global"], 1]], intermediate_size=48
)


def te_recipe(name):
    """A recipe object of Transformer Engine, as far as Octavo reads it."""
    fields = {"DelayedScaling": [("amax_history_len", int, 4)], "Float8CurrentScaling": []}[name]
    return dataclasses.make_dataclass(name, fields)()


@pytest.fixture
def llama():
    torch.manual_seed(torch.seed() % 2**31)
    return LlamaForCausalLM(llama_config())


def gradients(model, recipe=None, steps=1):
    """Gradients by name after `steps` forwards and backwards of the same samples."""
    ids = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(7))
    for _ in range(steps):
        model.zero_grad()
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_head_s_backward_is_fp8_unless_it_is_asked_for_otherwise(llama, recipe):
    found = {head: gradients(transform(copy.deepcopy(llama), fp8_head=head), recipe) for head in (None, "backward", False)}
    assert all(torch.equal(found[None][name], grad) for name, grad in found["backward"].items())
    assert not torch.equal(found[None]["head.weight"], found[False]["head.weight"])
    assert transform(copy.deepcopy(llama)).fp8_head == "backward"


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling"])
def test_a_recipe_of_transformer_engine_keeps_its_head_and_its_precise_gradients(llama, name):
    recipe = te_recipe(name)
    assert coerce(recipe).fast_accumulation is False
    assert type(coerce(recipe))().fast_accumulation == "input_gradient"
    plain = gradients(transform(copy.deepcopy(llama), fp8_head=False), recipe)
    for model in (transform(copy.deepcopy(llama), recipe), transform(copy.deepcopy(llama))):
        found = gradients(model, recipe)
        assert all(torch.equal(found[key], grad) for key, grad in plain.items())
    asked = gradients(transform(copy.deepcopy(llama), recipe, fp8_head="backward"), recipe)
    assert not torch.equal(asked["head.weight"], plain["head.weight"])


def test_models_with_code_of_their_own_have_no_fp8_head():
    theirs = GPTNeoForCausalLM(NEO)
    reports = {report.name: report for report in octavo.describe(transform(theirs)).layers}
    assert not reports["lm_head"].fp8
    with pytest.raises(InputError, match=r"fp8\.head"):
        transform(GPTNeoForCausalLM(NEO), fp8_head="backward")


@pytest.mark.parametrize("history", [False, True], ids=["fresh", "of a bf16 head"])
def test_the_first_scale_of_a_head_is_of_its_own_amax(llama, tmp_path, history):
    recipe = RECIPES["delayed"]
    model = transform(copy.deepcopy(llama), dtype=torch.float32)
    if history:
        before = transform(copy.deepcopy(llama), dtype=torch.float32, fp8_head=False)
        gradients(before, recipe)
        octavo.save(tmp_path / "bf16-head", before)
        with pytest.warns(UserWarning, match="fp8_head=False, and this model has 'backward'"):
            octavo.load(tmp_path / "bf16-head", model)
    scales = []
    state = vars(model.head)["fp8_state"]
    model.norm.register_forward_hook(lambda module, args, out: scales.append(out.detach()) and None)
    grad = gradients(model, recipe)["head.weight"]
    exact = gradients(transform(copy.deepcopy(llama), dtype=torch.float32, fp8_head=False), None)["head.weight"]
    assert (grad - exact).norm() < 0.1 * exact.norm()
    (hidden,) = scales
    entry = octavo.fp8.inspect(model)["head"]
    torch.testing.assert_close(entry["weight"]["scale"], 448 / model.head.weight.detach().abs().max())
    torch.testing.assert_close(entry["input"]["scale"], 448 / hidden.abs().max())
    assert {operand.value for operand in state.slots} == {"input", "weight"}


def test_parameters_keep_their_dtype(llama):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for theirs in (copy.deepcopy(llama), GPTNeoForCausalLM(NEO), nn.Sequential(nn.Linear(16, 16))):
            model = transform(theirs.to(dtype), dtype=torch.float32 if dtype == torch.float32 else dtype)
            assert {p.dtype for p in model.parameters()} == {dtype}
    given = transform(copy.deepcopy(llama), params_dtype=torch.bfloat16)
    assert {p.dtype for p in given.parameters()} == {torch.bfloat16}


def test_small_updates_move_the_weights(llama):
    """At a rate of 1e-5 most bf16 weights round the update away."""
    moved = {}
    for params_dtype in (None, torch.bfloat16):
        model = transform(copy.deepcopy(llama), params_dtype=params_dtype)
        before = [p.detach().clone() for p in model.parameters() if p.ndim == 2]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        gradients(model, RECIPES["current"])
        optimizer.step()
        after = [p.detach() for p in model.parameters() if p.ndim == 2]
        moved[params_dtype] = sum((a != b).sum() for a, b in zip(before, after, strict=True)) / sum(map(torch.numel, after))
    assert moved[None] > 0.8
    assert moved[torch.bfloat16] < 0.5


def test_parameters_of_several_dtypes(llama):
    mixed = copy.deepcopy(llama)
    mixed.lm_head.bfloat16()
    with pytest.raises(InputError, match="parameters of several dtypes: set params_dtype"):
        transform(mixed)
    assert {p.dtype for p in transform(mixed, params_dtype=torch.float32).parameters()} == {torch.float32}
    own = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16).bfloat16(), nn.Linear(16, 16))
    assert [p.dtype for p in transform(own).parameters()] == [torch.float32] * 2 + [torch.bfloat16] * 2 + [torch.float32] * 2
    with pytest.raises(InputError, match=r"parameters of torch\.float64.*params_dtype=torch\.float32"):
        transform(copy.deepcopy(llama).double())


def test_a_checkpoint_of_another_dtype_is_refused_naming_params_dtype(llama, tmp_path):
    older = transform(copy.deepcopy(llama), params_dtype=torch.bfloat16)
    octavo.save(tmp_path / "bf16", older)
    model = transform(copy.deepcopy(llama))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(InputError, match=r"parameters of another dtype.* params_dtype=torch\.bfloat16"):
        octavo.load(tmp_path / "bf16", model)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert not any(state.slots for _, state in states_of(model))
    octavo.load(tmp_path / "bf16", transform(copy.deepcopy(llama), params_dtype=torch.bfloat16))


def test_a_checkpoint_of_the_same_shapes_and_other_heads_is_refused(tmp_path):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64}
    octavo.save(tmp_path / "four", transform(LlamaForCausalLM(llama_config(**sizes))))
    other = transform(LlamaForCausalLM(llama_config(**sizes | {"num_attention_heads": 8, "num_key_value_heads": 8})))
    with pytest.raises(InputError, match="heads was 4 and is 8; kv_heads was 4 and is 8; head_dim was 16 and is 8"):
        octavo.load(tmp_path / "four", other)
    longer = transform(LlamaForCausalLM(llama_config(**sizes, rms_norm_eps=0.1)))
    with pytest.warns(UserWarning, match=r"norm_eps was .* and is 0\.1"):
        octavo.load(tmp_path / "four", longer)


@pytest.mark.parametrize("head", ["backward", True])
def test_an_evaluation_with_labels_leaves_the_head_s_history(llama, head):
    found = []
    for others in ((), (octavo.recipe.DelayedScaling(amax_history_len=1), octavo.recipe.DelayedScaling(amax_history_len=9))):
        model = transform(copy.deepcopy(llama), fp8_head=head)
        for _ in range(3):
            grads = gradients(model, RECIPES["delayed"])
            for recipe in others:
                with torch.no_grad(), octavo.fp8_autocast(fp8_recipe=recipe):
                    model(input_ids=torch.zeros(1, 4, dtype=torch.int64), labels=torch.zeros(1, 4, dtype=torch.int64))
        found.append((grads, octavo.fp8.inspect(model)["head"]))
    (plain, history), (evaluated, other) = found
    assert all(torch.equal(evaluated[name], grad) for name, grad in plain.items())
    assert all(torch.equal(other[operand]["amax_history"], entry["amax_history"]) for operand, entry in history.items())
