"""`transform` on modules that keep their own code: which layers become FP8, what stays, and what is refused."""

import copy
import fnmatch
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import octavo
from octavo.build import describe, transform
from octavo.errors import EXIT_INPUT, InputError

DELAYED = octavo.recipe.DelayedScaling(amax_history_len=4)


def neo_config(**changes):
    values = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "intermediate_size": 48,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPTNeoConfig(**values | changes)


@pytest.fixture
def neo():
    torch.manual_seed(0)
    return GPTNeoForCausalLM(neo_config()).eval()


def tokens(seed=1, length=12):
    return torch.randint(61, (3, length), generator=torch.Generator().manual_seed(seed))


def refused(words, call, *arguments, **options):
    with pytest.raises(InputError) as raised:
        call(*arguments, **options)
    assert raised.value.exit_code == EXIT_INPUT
    for word in words:
        assert word in str(raised.value), f"{word!r} is not in: {raised.value}"


@pytest.mark.parametrize("first", ["describe", "transform"])
def test_the_name_is_the_function_whatever_was_used_before(monkeypatch, first):
    for name in ("describe", "transform"):
        getattr(octavo, name)
        monkeypatch.delattr(octavo, name)
    monkeypatch.setattr(octavo, "build", octavo.build)  # so that the first module is put back here too
    monkeypatch.delitem(sys.modules, "octavo.build")
    getattr(octavo, first)
    assert isinstance(octavo.transform(nn.Linear(4, 4)), octavo.nn.Linear)


def test_a_model_of_another_family_keeps_its_code_and_its_parameters(neo):
    linears = {name: m for name, m in neo.named_modules() if type(m) is nn.Linear}
    parameters = dict(neo.named_parameters())
    keys, head, ids = list(neo.state_dict()), neo.lm_head, tokens()
    wanted = neo(ids).logits
    model = transform(neo, dtype=torch.float32)
    assert model is neo
    assert type(model) is GPTNeoForCausalLM
    assert list(model.state_dict()) == keys
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert model.lm_head is head
    for name, linear in linears.items():
        layer = model.get_submodule(name)
        assert type(layer) is (nn.Linear if name == "lm_head" else octavo.nn.Linear)
        assert layer.weight is linear.weight
        assert layer.bias is linear.bias
    assert torch.equal(model(ids).logits, wanted)
    assert not model.training
    with octavo.fp8_autocast(fp8_recipe=DELAYED):
        eight = model(ids).logits
    assert not torch.equal(eight, wanted)
    torch.testing.assert_close(eight, wanted, rtol=0, atol=0.1 * wanted.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_trains_in_fp8_and_hugging_face_loads_the_result(neo, tmp_path, dtype):
    model = transform(neo, dtype=dtype, params_dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        with octavo.fp8_autocast(fp8_recipe=DELAYED):
            loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    report = octavo.fp8.inspect(model)
    assert len(report) == 2 * 6
    assert all(set(entry) == {"input", "weight", "grad_output"} for entry in report.values())
    assert all((tensor["scale"] != 1).all() for entry in report.values() for tensor in entry.values())
    octavo.export(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_plain_modules(tmp_path):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU())
    model = nn.Sequential(inner, nn.Linear(16, 4), nn.LayerNorm(4))
    weights = list(model.parameters())
    x = torch.randn(5, 8)
    wanted = model(x)
    result = transform(model, dtype=torch.float32)
    assert [type(m) for m in result.modules()].count(octavo.nn.Linear) == 2
    assert all(a is b for a, b in zip(result.parameters(), weights, strict=True))
    assert torch.equal(result(x), wanted)
    bare = nn.Linear(8, 4)
    layer = transform(bare, dtype=torch.float32)
    assert type(layer) is octavo.nn.Linear
    assert layer.weight is bare.weight
    with octavo.fp8_autocast(fp8_recipe=DELAYED):
        layer(x).sum().backward()
    assert set(octavo.fp8.inspect(layer)) == {"input", "weight", "grad_output"}
    assert describe(layer).fp8_layers == 1


def test_a_layer_that_is_used_in_two_places_is_one_fp8_layer():
    shared = nn.Linear(8, 8)
    model = transform(nn.Sequential(shared, nn.ReLU(), shared, nn.Sequential(shared)), dtype=torch.float32)
    assert type(model[0]) is octavo.nn.Linear
    assert model[2] is model[0]
    assert model[3][0] is model[0]
    assert [layer.fp8 for layer in describe(model).layers] == [True]


def test_a_layer_whose_weight_is_computed_by_a_hook_is_left_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)).eval()
    names, x = [name for name, _ in model.named_parameters()], torch.randn(3, 8)
    wanted = model(x)
    model = transform(model, dtype=torch.float32)
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(model(x), wanted)


def test_forward_hooks_are_still_called():
    model, seen = nn.Sequential(nn.Linear(8, 8)), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    transform(model, dtype=torch.float32)(torch.randn(3, 8))
    assert seen == [(3, 8)]


class Doubled(nn.Linear):
    """A linear layer with code of its own."""

    def forward(self, input):
        return 2 * super().forward(input)


def test_a_subclass_of_linear_is_left_alone_and_named():
    model = nn.Sequential(Doubled(8, 8), nn.Linear(8, 8), nn.Conv1d(8, 8, 1))
    x, layer = torch.randn(3, 8, 8), model[0]
    wanted = model(x)
    model = transform(model, dtype=torch.float32)
    assert model[0] is layer
    assert torch.equal(model(x), wanted)
    reports = {report.name: report for report in describe(model).layers}
    assert [report.fp8 for report in reports.values()] == [False, True, False]
    assert "Doubled" in reports["0"].reason
    assert "Conv1d" in reports["2"].reason
    assert reports["1"].reason == ""
    assert "1 of 3 matrices" in str(describe(model))


class ToyForCausalLM(nn.Module):
    """Named as Hugging Face's models are, but none of them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)


def test_a_class_that_is_only_named_like_a_causal_model_keeps_its_code():
    model = ToyForCausalLM()
    assert transform(model, dtype=torch.float32) is model
    assert type(model.layer) is octavo.nn.Linear


def test_describe_counts_the_layers_and_gives_reasons(neo):
    found = describe(transform(neo, skip=["transformer.h.1.mlp.*"]))
    assert found.fp8_layers == 10
    reasons = {report.name: report.reason for report in found.layers if not report.fp8}
    assert set(reasons) == {
        "transformer.wte", "transformer.wpe", "transformer.h.1.mlp.c_fc", "transformer.h.1.mlp.c_proj", "lm_head",
    }  # fmt: skip
    assert "embedding" in reasons["transformer.wte"]
    assert "transformer.h.1.mlp.*" in reasons["transformer.h.1.mlp.c_fc"]
    assert "head" in reasons["lm_head"]
    shapes = {report.name: report.shape for report in found.layers}
    assert shapes["transformer.h.0.mlp.c_fc"] == (48, 32)


def test_unknown_names_are_refused_with_the_known_ones(neo):
    refused(["cp_comm_type", "'ring'", "p2p"], transform, neo, cp_comm_type="ring")
    refused(["cp_comm_type", "Did you mean 'all_gather'"], transform, neo, cp_comm_type="allgather")
    refused(["recipe", "str", "DelayedScaling"], transform, neo, "delayed")
    refused(["'nope'"], transform, neo, skip=["nope"])
    assert type(neo.lm_head) is nn.Linear


@pytest.mark.parametrize("kind", [OPTForCausalLM, nn.Sequential])
def test_a_model_on_meta_gets_the_initial_values_of_its_modules(kind):
    def made():
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(40, 30)) if kind is nn.Sequential else kind(opt_config())
        return dict(transform(model, dtype=torch.float32, device="cpu").named_parameters())

    first, second = made(), made()
    assert first.keys() == second.keys()
    for name, parameter in first.items():
        assert parameter.isfinite().all(), name
        assert torch.equal(parameter, second[name]), name
    if kind is nn.Sequential:
        assert 0.8 / 40**0.5 < first["0.weight"].abs().max() <= 1 / 40**0.5
    else:
        assert first["model.decoder.layers.0.fc1.weight"].std().item() == pytest.approx(0.02, rel=0.2)


def test_octavo_s_own_layers_on_meta_get_their_initial_values():
    def block():
        return nn.Sequential(octavo.nn.TransformerLayer(32, 64, 4, normalization="LayerNorm"), octavo.nn.RMSNorm(32))

    with octavo.delayed_init():
        model = block()
    model = transform(model, dtype=torch.float32, device="cpu")
    for (name, filled), usual in zip(model.named_parameters(), block().parameters(), strict=True):
        assert filled.abs().max().item() == pytest.approx(usual.abs().max().item(), rel=0.2), name
        assert filled.abs().min().item() == pytest.approx(usual.abs().min().item(), abs=0.05), name


def test_a_parameter_on_meta_that_nothing_would_fill_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return self.linear(x) * self.gain

    with octavo.delayed_init():
        model = Scaled()
    refused(["gain", "Scaled"], transform, model)


def test_buffers_that_the_meta_device_would_lose_are_refused(neo, tmp_path):
    neo.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = GPTNeoForCausalLM(neo.config)
    refused(["attn.attention.bias", "GPTNeoForCausalLM", "meta"], transform, model, load_from=tmp_path)


def opt_config():
    return OPTConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, ffn_dim=48, num_attention_heads=2, word_embed_proj_dim=32,
        max_position_embeddings=64,
    )  # fmt: skip


def test_a_tied_model_on_meta_is_filled_from_its_folder_and_stays_tied(tmp_path):
    torch.manual_seed(0)
    source = OPTForCausalLM(opt_config()).eval()
    source.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = OPTForCausalLM(opt_config()).eval()
    model = transform(empty, dtype=torch.float32, load_from=tmp_path)
    torch.testing.assert_close(model(tokens()).logits, source(tokens()).logits, rtol=1e-5, atol=1e-5)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "shape"), [("fc1.weight", (64, 32)), ("fc1.bias", (1,)), ("fc2.weight", (48,)), ("final_layer_norm.bias", ())]
)
def test_a_wrong_shape_in_a_folder_is_refused_for_any_model(tmp_path, name, shape):
    model = OPTForCausalLM(opt_config())
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    name = f"model.decoder.layers.1.{name}"
    save_file(load_file(file) | {name: torch.zeros(shape)}, file, metadata={"format": "pt"})
    refused(["shape", name], transform, model, load_from=tmp_path)


def test_rotary_buffers_stay_float32():
    config = Qwen2Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    model = Qwen2ForCausalLM(config)
    before = model.model.rotary_emb.inv_freq.clone()
    model = transform(model, dtype=torch.bfloat16, blocks="own")
    after = model.model.rotary_emb.inv_freq
    assert after.dtype == torch.float32
    assert torch.equal(after, before)


def test_a_copy_of_a_model_with_master_weights_is_a_model_of_its_own():
    torch.manual_seed(0)
    model = transform(nn.Sequential(nn.Linear(8, 8)), dtype=torch.bfloat16, params_dtype=torch.float32)
    x = torch.randn(3, 8)
    wanted, twin = model(x), copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
    assert wanted.dtype == torch.bfloat16
    assert torch.equal(twin(x), wanted)


@pytest.mark.parametrize(
    "pattern",
    ["transformer.h.0", "transformer.h.0.*", "*.c_fc", "transformer.h.*.attn", "transformer.h.1.attn.attention.out_proj"],
)
def test_skipped_layers_compute_the_unquantised_product(neo, pattern):
    model = transform(neo, dtype=torch.float32, skip=[pattern])
    layers = {name: m for name, m in model.named_modules() if type(m) is octavo.nn.Linear}
    prefixes = {name: [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)] for name in layers}
    meant = {name for name in layers if any(fnmatch.fnmatchcase(p, pattern) for p in [name, *prefixes[name]])}
    assert meant
    assert meant != set(layers)
    assert {report.name for report in describe(model).layers if report.name in layers and not report.fp8} == meant
    for name, layer in layers.items():
        x = torch.randn(4, layer.in_features)
        with octavo.fp8_autocast(fp8_recipe=DELAYED):
            y = layer(x)
        assert torch.equal(y, functional.linear(x, layer.weight, layer.bias)) == (name in meant)


def test_what_was_frozen_stays_frozen():
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    model = LlamaForCausalLM(config)
    frozen = ["model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    decoder = transform(copy.deepcopy(model), dtype=torch.float32)
    assert {name for name, p in decoder.named_parameters() if not p.requires_grad} == {
        "embedding.weight",
        "layers.0.ffn.fc1.weight",
    }
    model.get_parameter(frozen[1]).requires_grad_(True)
    refused([frozen[2], "are one parameter"], transform, model, dtype=torch.float32)


def tagged():
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    for name, parameter in model.named_parameters():
        parameter.decay = "norm" not in name
        parameter._seen = [name]
    return model


def test_attributes_of_parameters_are_carried_over():
    decoder = transform(tagged(), dtype=torch.float32)
    assert {name for name, parameter in decoder.named_parameters() if not parameter.decay} == {
        "layers.0.self_attention.layernorm.weight",
        "layers.0.ffn.layernorm.weight",
        "norm.weight",
    }
    assert decoder.embedding.weight._seen == ["model.embed_tokens.weight"]
    assert not hasattr(decoder.layers[0].ffn.fc1.weight, "_seen")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (False, ["the attribute decay differs", "k_proj.weight: False", "after octavo.transform"]),
        (torch.ones(3), ["has the attribute decay, a tensor", "after octavo.transform"]),
    ],
)
def test_attributes_that_one_parameter_cannot_have_are_refused(value, words):
    model = tagged()
    model.get_parameter("model.layers.0.self_attn.k_proj.weight").decay = value
    refused(words, transform, model, dtype=torch.float32)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight"])
def test_hooks_of_parameters_that_are_replaced_are_refused(register, name):
    model = tagged()
    getattr(model.get_parameter(name), register)(lambda given: None)
    refused([name, register, "after octavo.transform"], transform, model, dtype=torch.float32)


def test_hooks_and_attributes_of_a_models_own_code_stay():
    model, seen = linears(), []
    model[0].weight.decay = False
    model[0].weight.register_hook(lambda gradient: seen.append("gradient"))
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    model = transform(model, dtype=torch.float32)
    with octavo.fp8_autocast(fp8_recipe=DELAYED):
        model(torch.randn(4, 16)).sum().backward()
    assert seen == ["gradient", "accumulated"]
    assert model[0].weight.decay is False


def test_a_hook_of_a_parameter_without_storage_is_refused():
    with octavo.delayed_init():
        model = linears()
    model[0].weight.register_hook(lambda gradient: gradient)
    refused(["0.weight", "register_hook"], transform, model, dtype=torch.float32)


def linears():
    return nn.Sequential(nn.Linear(16, 16))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": torch.int64}, ["dtype = torch.int64", "torch.bfloat16"]),
        ({"params_dtype": torch.float64}, ["params_dtype = torch.float64"]),
        ({"dtype": "bfloat16"}, ["dtype = 'bfloat16'"]),
        ({"skip": "*.proj"}, ["skip = '*.proj'", "list"]),
        ({"skip": [3]}, ["skip = [3]"]),
        ({"layers": ["0"]}, ["layers = ['0']", "dict"]),
        ({"layers": {"0": "delayed"}}, ["'delayed'", "octavo.recipe.DelayedScaling()"]),
        ({"recipe": octavo.recipe.CurrentScaling}, ["CurrentScaling", "octavo.recipe.DelayedScaling()"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_argument_of_the_wrong_kind_is_refused_and_changes_nothing(arguments, words):
    model = linears()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InputError) as raised:
        octavo.transform(model, **arguments)
    assert all(word in str(raised.value) for word in words), raised.value
    assert type(model[0]) is nn.Linear
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_loop_for_several_ranks_runs_on_one():
    config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    model, ids = transform(LlamaForCausalLM(config), dtype=torch.float32), tokens()
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model(ids, labels=ids).loss.backward()
    twice = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    for gradient, parameter in zip(twice, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, 2 * parameter.grad)


def test_a_model_without_a_layer_for_fp8_is_told():
    with pytest.warns(UserWarning, match="Conv2d has no linear layer"):
        octavo.transform(nn.Conv2d(3, 3, 3))
    with pytest.raises(InputError, match="got int"):
        octavo.transform(3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: octavo.recipe.DelayedScaling(amax_history_len=2.5), "amax_history_len = 2.5"),
        (lambda: octavo.recipe.DelayedScaling(amax_history_len=True), "amax_history_len = True"),
        (lambda: octavo.recipe.DelayedScaling(amax_history_len="4"), "amax_history_len = '4'"),
        (lambda: octavo.recipe.DelayedScaling(margin=1.5), "margin = 1.5"),
        (lambda: octavo.recipe.DelayedScaling(margin=65), "margin = 65"),
        (lambda: octavo.recipe.DelayedScaling(reduce_amax="no"), "reduce_amax = 'no'"),
        (lambda: octavo.recipe.CurrentScaling(use_power_2_scales=1), "use_power_2_scales = 1"),
        (lambda: octavo.recipe.CurrentScaling(fp8_format="E4M3"), "unknown FP8 format 'E4M3'.*octavo.recipe.Format.E4M3"),
        (lambda: octavo.fp8_autocast("no").__enter__(), "enabled = 'no'"),
        (lambda: octavo.fp8_autocast(emulate=1).__enter__(), "emulate = 1"),
        (lambda: octavo.fp8_autocast(fp8_group=3).__enter__(), "fp8_group = 3"),
        (lambda: octavo.graphed(lambda: None, linears().parameters(), warmup=1.5), "warmup = 1.5"),
        (lambda: octavo.graphed(lambda: None, []), "of the loss, and parameters"),
        (lambda: octavo.graphed(lambda: None, linears()), "of the loss, and parameters"),
        (lambda: octavo.graphed(3, linears().parameters()), "of the loss, and parameters"),
        (lambda: octavo.init(3), "got int"),
        (lambda: octavo.init({"random_seed": 2**63}), "random_seed"),
        (lambda: octavo.init(timeout=-1), "timeout = -1"),
    ],
)
def test_arguments_of_the_wrong_kind(make, words):
    with pytest.raises(InputError, match=words):
        make()
