"""Which parameters decay: the matrices that decay in Hugging Face's model, by everyone's rules and by Octavo's."""

import copy
import math
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parameter import UninitializedParameter
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import get_parameter_names

import octavo
import ranks
from octavo.errors import InputError
from octavo.models.convert import conversion_of

sys.path.insert(0, str(Path(__file__).parent / "models"))
from llamas import SHAPES, llama
from vits import vit

import group_ranks

FAMILIES = (
    "plain", "tied", "all-biases", "mistral", "qwen2", "qwen3", "qwen3-biases", "phi3", "neox", "mixtral", "qwen3-moe-mixed",
)  # fmt: skip
PATTERNS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Of the Trainer in transformers 5; `test_the_patterns_are_those_of_this_trainer` holds it to them."""


def transformers_rule(model):
    return set(get_parameter_names(model, [nn.LayerNorm], PATTERNS))


def aws_rule(model):
    """The rule of AWS's example for SMP: no parameter of an `nn.LayerNorm` decays, and none that is called bias."""
    found = set()
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            if not isinstance(module, nn.LayerNorm) and name != "bias":
                found.add(f"{prefix}.{name}" if prefix else name)
    return found


def name_rule(*words):
    return lambda model: {name for name, _ in model.named_parameters() if not any(word in name for word in words)}


def dimension_rule(model):
    return {name for name, p in model.named_parameters() if p.ndim > 1 and not name.endswith(".bias")}


def theirs(model, names):
    """Hugging Face's names of a transformed model's parameters."""
    way = conversion_of(model)
    own = {name for name, _ in model.named_parameters()}
    return {each for name in names & own for each in way.names(name)}


def original(family):
    return vit() if family == "vit" else llama(**SHAPES[family])


@pytest.mark.parametrize("family", [*FAMILIES, "vit"])
@pytest.mark.parametrize("rule", [transformers_rule, aws_rule, name_rule("bias", "norm"), dimension_rule], ids=range(4))
def test_a_rule_finds_the_same_matrices_as_in_hugging_faces_model(family, rule):
    reference = original(family)
    kept = rule(reference) & {name for name, _ in reference.named_parameters()}
    model = octavo.transform(copy.deepcopy(reference), dtype=torch.float32)
    assert conversion_of(model) is not None
    assert theirs(model, rule(model)) == kept


@pytest.mark.parametrize("family", [*FAMILIES, "vit"])
def test_octavos_rule_is_that_of_transformers(family):
    reference = original(family)
    model = octavo.transform(copy.deepcopy(reference), dtype=torch.float32)
    names = {id(p): name for name, p in model.named_parameters()}
    first, second = octavo.parameter_groups(model, 0.3)
    assert (first["weight_decay"], second["weight_decay"]) == (0.3, 0.0)
    decayed = {names[id(p)] for p in first["params"]}
    kept = transformers_rule(reference) & {name for name, _ in reference.named_parameters()}
    assert theirs(model, decayed) == kept
    assert sorted(map(id, [*first["params"], *second["params"]])) == sorted(map(id, model.parameters()))


def test_the_patterns_are_those_of_this_trainer(tmp_path):
    for family in FAMILIES:
        model = llama(**SHAPES[family])
        trainer = Trainer(model, TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
        assert set(trainer.get_decay_parameter_names(model)) == transformers_rule(model)


@pytest.mark.parametrize("family", ["plain", "tied", "qwen3", "neox", "mixtral"])
def test_the_groups_of_transformers_trainer(tmp_path, family):
    model = octavo.transform(llama(**SHAPES[family]), dtype=torch.float32)
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, weight_decay=0.3)
    groups = Trainer(model, arguments).create_optimizer().param_groups
    found = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    own = {id(p): group["weight_decay"] for group in octavo.parameter_groups(model, 0.3) for p in group["params"]}
    assert found == own


@pytest.mark.parametrize("family", ["plain", "tied", "qwen3", "phi3", "neox", "mixtral"])
def test_steps_of_adamw_are_those_of_hugging_faces_model(family):
    """Each with the groups of its own; Octavo's then has Hugging Face's weights, up to the rounding of another order."""
    reference = llama(**SHAPES[family])
    model = octavo.transform(copy.deepcopy(reference), dtype=torch.float32)
    decayed = transformers_rule(reference)
    groups = [
        {"params": [p for n, p in reference.named_parameters() if (n in decayed) is kept], "weight_decay": 0.5 if kept else 0.0}
        for kept in (True, False)
    ]
    optimizers = (
        torch.optim.AdamW(groups, lr=1e-3, eps=1e-3),
        torch.optim.AdamW(octavo.parameter_groups(model, 0.5), lr=1e-3, eps=1e-3),
    )
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    draw = torch.Generator().manual_seed(3)
    for _ in range(4):
        ids = torch.randint(6, 97, (2, 20), generator=draw)
        for each, optimizer in zip((reference.train(), model.train()), optimizers, strict=True):
            each(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    way, state = conversion_of(model), reference.state_dict()
    for name, parameter in model.named_parameters():
        for their, part in way.split(name, parameter.detach()).items():
            moved = (state[their] - before[their]).abs().max()
            assert moved > 0
            torch.testing.assert_close(part, state[their], rtol=1e-4, atol=1e-2 * float(moved))


class Own(nn.Module):
    """Layers of `octavo.nn` in a model of one's own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 32)
        self.layer = octavo.nn.TransformerLayer(32, 48, 2, normalization="RMSNorm")
        self.norm = octavo.nn.LayerNorm(32)
        self.scale = nn.Parameter(torch.ones(32))
        self.head = nn.Linear(32, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.relative_bias = nn.Parameter(torch.zeros(4, 4))
        self.frozen = nn.Linear(32, 32).requires_grad_(False)


def test_own_models_ties_frozen_parts_and_stacked_biases():
    model = Own()
    names = {id(p): name for name, p in model.named_parameters()}
    first, second = octavo.parameter_groups(model, 0.1)
    assert [names[id(p)] for p in first["params"]] == [
        "embedding.weight", "layer.self_attention.layernorm_qkv.weight", "layer.self_attention.proj.weight",
        "layer.layernorm_mlp.fc1_weight", "layer.layernorm_mlp.fc2_weight",
    ]  # fmt: skip
    rest = {name for name, p in model.named_parameters() if p.requires_grad} - {names[id(p)] for p in first["params"]}
    assert {names[id(p)] for p in second["params"]} == rest
    torch.optim.SGD(octavo.parameter_groups(model, 0.1), lr=0.1)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of a name that peft reads in transformers
def test_adapters_of_peft():
    peft = pytest.importorskip("peft")
    model = octavo.transform(peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"])), dtype=torch.float32)
    (group,) = octavo.parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert len(group["params"]) == 4
    assert all("lora_" in names[id(p)] for p in group["params"])
    assert group["weight_decay"] == 0.1


def test_a_group_without_parameters_is_left_out():
    assert [group["weight_decay"] for group in octavo.parameter_groups(nn.LayerNorm(4), 0.1)] == [0.0]
    assert [group["weight_decay"] for group in octavo.parameter_groups(nn.Linear(4, 4, bias=False), 0)] == [0.0]


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = UninitializedParameter()


@pytest.mark.parametrize(
    ("model", "decay", "words"),
    [
        ([nn.Linear(2, 2)], 0.1, "model is of type list"),
        (nn.Linear(2, 2), -0.1, r"weight_decay = -0\.1"),
        (nn.Linear(2, 2), math.nan, "weight_decay = nan"),
        (nn.Linear(2, 2), math.inf, "weight_decay = inf"),
        (nn.Linear(2, 2), True, "weight_decay = True"),
        (nn.Linear(2, 2), "0.1", "weight_decay = '0.1'"),
        (nn.Linear(2, 2).requires_grad_(False), 0.1, "Linear has no parameter that is trained"),
        (nn.Identity(), 0.1, "Identity has no parameter that is trained"),
        (Lazy(), 0.1, "weight has no shape yet"),
    ],
)
def test_what_cannot_be_grouped_is_refused(model, decay, words):
    with pytest.raises(InputError, match=words):
        octavo.parameter_groups(model, decay)


@pytest.mark.parametrize(
    ("degrees", "family"),
    [({}, "neox"), ({"context_parallel_degree": 2}, "qwen3"), ({"expert_parallel_degree": 2}, "mixtral")],
    ids=["shards", "context", "experts"],
)
def test_sharded_models_have_the_groups_of_one_rank(degrees, family):
    shape = SHAPES[family]
    whole = octavo.transform(llama(**shape), dtype=torch.float32)
    names = {id(p): name for name, p in whole.named_parameters()}
    expected = [[names[id(p)] for p in group["params"]] for group in octavo.parameter_groups(whole, 0.1)]
    for found, by_names in ranks.run(2, group_ranks.groups, degrees, shape):
        assert found == expected
        assert by_names == set(expected[0])


def test_flat_parameters_are_refused():
    assert all("FullyShardedDataParallel" in text for text in ranks.run(2, group_ranks.flat))


# names


def test_older_state_dicts_load_and_fused_names_stay_attributes():
    model = octavo.transform(llama(**SHAPES["neox"]), dtype=torch.float32)
    layer = model.layers[1]
    assert layer.layernorm_mlp is layer.ffn
    assert layer.layernorm_mlp.fc1_weight is layer.ffn.fc1.weight
    assert layer.self_attention.layernorm_qkv.layer_norm_bias is layer.self_attention.layernorm.bias
    old = {
        name.replace("self_attention.layernorm.", "self_attention.layernorm_qkv.layer_norm_")
        .replace("self_attention.qkv.", "self_attention.layernorm_qkv.")
        .replace("ffn.layernorm.", "layernorm_mlp.layer_norm_")
        .replace("ffn.fc1.", "layernorm_mlp.fc1_")
        .replace("ffn.fc2.", "layernorm_mlp.fc2_"): tensor
        for name, tensor in model.state_dict().items()
    }
    assert not any("ffn" in name for name in old)
    given = dict(old)
    fresh = octavo.transform(llama(seed=9, **SHAPES["neox"]), dtype=torch.float32)
    fresh.load_state_dict(old)
    assert old.keys() == given.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
    fresh.layers[0].ffn.fc1_weight = nn.Parameter(torch.zeros_like(fresh.layers[0].ffn.fc1.weight))
    assert not fresh.layers[0].ffn.fc1.weight.any()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fresh.load_state_dict({**old, "layers.0.layernorm_mlp.fc3_weight": torch.ones(1)})


def test_copies_and_pickles_keep_the_norm_of_the_first_product():
    model = octavo.transform(llama(), dtype=torch.float32)
    ids = torch.arange(24)[None]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - bytes of this test
        with torch.no_grad():
            twin.layers[0].self_attention.layernorm.weight.mul_(2)
            changed = twin(input_ids=ids, labels=ids).loss
            twin.layers[0].self_attention.layernorm.weight.div_(2)
            assert torch.equal(twin(input_ids=ids, labels=ids).loss, model(input_ids=ids, labels=ids).loss)
        assert not torch.equal(changed, model(input_ids=ids, labels=ids).loss)


def test_a_product_is_not_called_by_itself():
    with pytest.raises(TypeError, match="call the LayerNormMLP"):
        octavo.transform(llama(), dtype=torch.float32).layers[0].ffn.fc1(torch.ones(1, 48))


def test_octavos_layer_norm_is_pytorchs():
    norm = octavo.nn.LayerNorm(8)
    assert isinstance(norm, nn.LayerNorm)
    assert norm.normalized_shape == (8,)
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), functional.layer_norm(x, (8,)))


def test_hooks_of_what_is_not_called_are_said_and_old_names_behave_as_attributes():
    model = octavo.transform(llama(), dtype=torch.float32)
    layer = model.layers[0]
    for module in (layer.ffn.fc1, layer.ffn.layernorm, layer.self_attention.layernorm):
        for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
            with pytest.warns(UserWarning, match="never runs.*ffn, self_attention"):
                getattr(module, register)(lambda *given: None).remove()
    layer.ffn.register_forward_hook(lambda *given: None)
    state = model.state_dict()
    state["layers.0.layernorm_mlp.fc1_weight"] = torch.zeros_like(state["layers.0.ffn.fc1.weight"])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*layers\.0\.layernorm_mlp\.fc1_weight"):
        model.load_state_dict(state)
    del layer.layernorm_mlp.fc2_weight
    assert "fc2.weight" not in dict(layer.ffn.named_parameters())
