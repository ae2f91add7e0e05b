"""Octavo's adapters are PEFT's: loss, logits, gradients and folders, in both directions; and what is refused."""

import copy
import dataclasses
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from expectations import refused
from llamas import VOCABULARY, llama, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import octavo
from octavo.fp8.recipe import Operand
from octavo.fp8.scaling import states_of
from octavo.models.convert import conversion
from octavo.models.lora import adapted
from octavo.models.peft_folder import from_folder, peft_tensors

peft = pytest.importorskip("peft", reason="needs peft, of the dev extra: pip install -e '.[dev]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks for it
    # PEFT looks for the patterns that it has made of gate and up among modules, and applies them to parameters.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]


def peft_model(base, folder=None, std=0.1, **options):
    """PEFT's model around a copy of `base`, B random too, and its folder."""
    options = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * std)
    if folder is not None:
        model.save_pretrained(folder)
    return model


def gradients(model, tensor=lambda parameter: parameter.grad):
    """Those of what an Octavo model trains, by PEFT's names."""
    trained = {name: tensor(p) for name, p in model.named_parameters() if p.requires_grad}
    return peft_tensors(trained, conversion(model.spec))


def of_peft(model):
    return {
        name.replace(".default", "").replace("modules_to_save.", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


KINDS = {
    "llama": ({}, {}),
    "all-biases": ({"attention_bias": True, "mlp_bias": True}, {"use_rslora": True}),
    "queries-and-values": ({}, {"target_modules": ["q_proj", "v_proj"]}),
    "one-layer": ({}, {"target_modules": ["model.layers.1.mlp.up_proj", "model.layers.0.self_attn.k_proj", "down_proj"]}),
    "regular-expression": ({"model_type": "qwen2"}, {"target_modules": r".*layers\.0\.(mlp\.gate_proj|self_attn\.o_proj)"}),
    "whole-head": ({}, {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "qwen3": ({"model_type": "qwen3"}, {}),
    "phi3": ({"model_type": "phi3"}, {}),
    "neox": ({"model_type": "gpt_neox"}, {}),
    "neox-serial": ({"model_type": "gpt_neox", "use_parallel_residual": False}, {"target_modules": ["query_key_value"]}),
    "mixtral-attention": (
        {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 48},
        {"target_modules": ["q_proj", "o_proj"]},
    ),
    "mixtral": ({"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 48}, {"use_rslora": True}),
    "qwen3-moe-and-dense": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "mlp_only_layers": [1]},
        {},
    ),
    "experts-alone": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "router-of-one-layer": (
        {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 48},
        {"target_modules": r".*layers\.0\.self_attn\.q_proj", "target_parameters": ["model.layers.1.mlp.gate.weight"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_peft_computes_peft_s_loss_logits_and_gradients_and_goes_back_bit_for_bit(kind, tmp_path):
    shape, options = KINDS[kind]
    base = llama(**shape)
    reference = peft_model(base, tmp_path / "theirs", **options)
    model = octavo.transform(copy.deepcopy(base), dtype=torch.float32, lora=from_folder(tmp_path / "theirs"))
    ids = tokens(2, 16)
    torch.testing.assert_close(model(input_ids=ids).logits, reference(input_ids=ids).logits, rtol=2e-5, atol=2e-5)
    wanted, found = reference(input_ids=ids, labels=ids).loss, model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    wanted.backward()
    found.backward()
    theirs, ours = of_peft(reference), gradients(model)
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-4 * parameter.grad.abs().max(), msg=name)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)

    octavo.export(model, tmp_path / "ours")
    files = [load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("theirs", "ours")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours")
    config = again.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora) == (3, 5, options.get("use_rslora", False))
    assert {name for name, _ in again.named_parameters()} == {name for name, _ in reference.named_parameters()}
    assert torch.equal(again.eval()(input_ids=ids).logits, reference.eval()(input_ids=ids).logits)


def test_new_adapters_change_nothing_have_peft_s_variance_and_do_not_depend_on_the_layout():
    base = llama(hidden_size=256, intermediate_size=320)
    model = octavo.transform(copy.deepcopy(base), dtype=torch.float32, lora=octavo.LoRA(16))
    ids = tokens(2, 16)
    torch.testing.assert_close(model(input_ids=ids).logits, base(input_ids=ids).logits, rtol=1e-5, atol=1e-4)
    found = gradients(model, lambda parameter: parameter.detach())
    theirs = of_peft(peft_model(base, std=0.0, r=16))
    assert found.keys() == theirs.keys()
    for name, tensor in found.items():
        if "lora_B" in name:
            assert not tensor.any()
        else:
            assert tensor.std().item() == pytest.approx(theirs[name].std().item(), rel=0.1)
            assert abs(tensor.mean().item()) < 0.01
    parts = [t for name, t in found.items() if "lora_A" in name]
    assert len({tuple(part.flatten()[:4].tolist()) for part in parts}) == len(parts)  # each has draws of its own


@pytest.mark.parametrize("recompute", [False, True, "selective"])
@pytest.mark.parametrize("recipe", ["DelayedScaling", "CurrentScaling", "RowwiseScaling", "BlockScaling"])
def test_fp8_products_are_the_base_s_alone_and_recomputation_repeats_them(recipe, recompute):
    torch.manual_seed(1)
    base = llama()
    chosen = getattr(octavo.recipe, recipe)()
    options = octavo.LoRA(4, dropout=0.25)
    ids = tokens(2, 16)
    results = []
    for how in (False, recompute):
        model = octavo.transform(copy.deepcopy(base), chosen, dtype=torch.bfloat16, lora=options, recompute=how)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("lora_B"):
                    parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.02)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        torch.manual_seed(7)
        with octavo.fp8_autocast(fp8_recipe=chosen):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    (first, wanted), (again, found) = results
    assert torch.equal(first, again)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    exact = octavo.transform(copy.deepcopy(base), dtype=torch.float32, lora=octavo.LoRA(4))
    assert abs(exact(input_ids=ids, labels=ids).loss - first) < 0.2
    assert all(gradient.abs().max() > 0 for gradient in wanted.values())


@pytest.mark.parametrize("targets", ["all-linear", ["query_key_value"], ["dense_h_to_4h"]])
@pytest.mark.parametrize("parallel", [True, False])
def test_no_product_is_computed_for_a_gradient_of_frozen_embeddings(parallel, targets):
    """The first block's input has none. Beside its attention, with `parallel`, neither does the input of its MLP."""
    torch.manual_seed(2)
    recipe = octavo.recipe.DelayedScaling()
    base = llama(model_type="gpt_neox", use_parallel_residual=parallel)
    model = octavo.transform(base, recipe, dtype=torch.bfloat16, lora=octavo.LoRA(4, targets=targets))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.05)
    ids = tokens(2, 16)
    for _ in range(2):
        with octavo.fp8_autocast(fp8_recipe=recipe):
            model(input_ids=ids, labels=ids).loss.backward()
    states = {name: state for name, state in states_of(model) if name.startswith("layers.")}
    casts = {name: bool(state.slots[Operand.GRAD_OUTPUT].history.any()) for name, state in states.items()}
    of_mlp = not parallel and targets != ["dense_h_to_4h"]
    wanted = dict.fromkeys(casts, True)
    wanted |= {"layers.0.self_attention.qkv": False, "layers.0.ffn.fc1": of_mlp}
    wanted |= {"layers.0.ffn.fc2": of_mlp or "query_key_value" not in targets}
    wanted |= {"layers.0.self_attention.proj": targets != ["dense_h_to_4h"]}
    assert casts == wanted
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters() if parameter.requires_grad)


def test_dropout_is_of_training_alone_and_each_matrix_draws_its_own():
    model = octavo.transform(llama(), dtype=torch.float32, lora=octavo.LoRA(4, dropout=0.5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_()
    ids = tokens(1, 16)
    first, second = (model(input_ids=ids).logits for _ in range(2))
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "lora.rank = 0"),
        ({"rank": 25}, ("lora.rank = 25", "k_proj is [24, 48]", "lora.rank = 24")),
        ({"alpha": -1.0}, "lora.alpha = -1.0"),
        ({"dropout": 1.0}, "lora.dropout = 1.0"),
        ({"targets": "q_proj"}, ("lora.targets = 'q_proj'", "list")),
        ({"targets": ()}, "lora.targets"),
        ({"targets": ["q_porj"]}, ("'q_porj' matches no matrix", "The nearest is 'q_proj'")),
        ({"targets": ["embed_tokens"]}, ("takes no adapter", "lora.save_whole")),
        ({"save_whole": ["lm_haed"]}, ("'lm_haed'", "The nearest is 'lm_head'")),
    ],
)
def test_options_that_no_model_takes_are_refused_with_the_nearest_that_works(options, words):
    refused(words, lambda: octavo.transform(llama(), lora=octavo.LoRA(**({"rank": 4} | options))))


def test_models_and_options_without_adapters_are_refused_by_name():
    lora = octavo.LoRA(4)
    refused("octavo.transform(peft.get_peft_model", octavo.transform, torch.nn.Linear(16, 16), lora=lora)
    experts = llama(**KINDS["mixtral"][0])

    def refuse_targets(words, targets, **options):
        refused(words, octavo.transform, experts, lora=octavo.LoRA(4, targets=targets, **options))

    refuse_targets(("lora.dropout = 0.1", "PEFT has no dropout", "lora.dropout = 0"), "all-linear", dropout=0.1)
    refuse_targets(("down_proj", "Add 'gate_up_proj'"), ["experts.down_proj"])
    refuse_targets("add 'up_proj' or 'w3'", ["w1", "w2"])
    refuse_targets("has twice the rank", ["layers.0.*.gate_up_proj", "layers.1.*.w[13]", "down_proj"])
    dense = llama(**KINDS["qwen3-moe-and-dense"][0])
    refused("PEFT would read", octavo.transform, dense, lora=octavo.LoRA(4, targets=["layers.1.mlp.down_proj"]))
    refused(
        "tie_word_embeddings", octavo.transform, llama(tie_word_embeddings=True), lora=octavo.LoRA(4, save_whole=["lm_head"])
    )
    refused('recompute = "mlp"', octavo.transform, llama(), lora=lora, recompute="mlp")
    refused("mlp_chunks = 2", octavo.transform, llama(), lora=lora, mlp_chunks=2)
    model = octavo.transform(llama(), lora=lora)
    refused("PeftModel.from_pretrained", octavo.to_huggingface, model)


def test_adapters_of_a_base_of_another_name_are_said_and_norms_trained_whole_refused(tmp_path, capsys):
    base = llama()
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = base.config._name_or_path = str(tmp_path / "base")
    peft_model(base, tmp_path / "theirs")
    for name, said in (("base", False), ("twin", True)):
        llama().save_pretrained(tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        octavo.transform(model, lora=from_folder(tmp_path / "theirs"))
        assert ("were trained on" in capsys.readouterr().err) == said
    file = tmp_path / "theirs" / "adapter_model.safetensors"
    norm = {"base_model.model.model.layers.0.input_layernorm.weight": torch.ones(48)}
    save_file({**load_file(file), **norm}, file)
    refused("only modules outside of blocks", octavo.transform, llama(), lora=from_folder(tmp_path / "theirs"))


def test_adapters_of_another_base_or_another_kind_are_refused_with_the_shapes(tmp_path):
    folder = tmp_path / "theirs"
    base = llama()
    peft_model(base, folder)
    lora = from_folder(folder)
    other = llama(hidden_size=64)
    refused(("of another base", "q_proj.lora_A.weight is [3, 48] there and [3, 64] here"), octavo.transform, other, lora=lora)
    fewer = octavo.LoRA(3, 5.0, targets=["q_proj"], load=str(folder))
    refused(("of other matrices", "lora.targets"), octavo.transform, llama(), lora=fewer)
    refused("lora.rank = 4, and in the folder 3.", octavo.transform, llama(), lora=octavo.LoRA(4, load=str(folder)))
    other = octavo.LoRA(alpha=5.5, rslora=True, load=str(folder))
    refused(
        ("lora.alpha = 5.5, and in the folder ", "lora.rslora = true, and in the folder false"),
        octavo.transform,
        llama(),
        lora=other,
    )
    every = ("lora.rank = 3", "lora.alpha = ", "lora.rslora = ", "lora.targets = ")
    refused(every, octavo.transform, llama(), lora=octavo.LoRA(4, load=str(folder)))
    config = json.loads((folder / "adapter_config.json").read_text())
    other_keys = {
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {r".*\.gate_up_proj": 10},
        "target_parameters": ["norm.weight"],
    }
    for key, value in {"use_dora": True, "bias": "all", "init_lora_weights": "pissa", **other_keys}.items():
        (folder / "adapter_config.json").write_text(json.dumps(config | {key: value}))
        refused(key, from_folder, folder)
    refused("not a PEFT folder", from_folder, tmp_path)


VARIANTS = {
    "kasa_config": {"beta": 0.1, "gamma": 0.1},
    "monteclora_config": {},
    "velora_config": {"num_groups": 4},
    "use_bdlora": {},
    "arrow_config": {},
    "alora_invocation_tokens": [1, 2],
    "use_qalora": True,
    "lora_bias": True,
    "of_a_later_release": {"power": 2},
}


@pytest.mark.parametrize("key", VARIANTS)
def test_a_key_that_changes_what_adapters_compute_is_refused_by_name_and_null_is_not(key, tmp_path):
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], key: VARIANTS[key]}
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(settings))
    refused((str(file), f"{key} = {VARIANTS[key]!r} is not", "PeftModel.from_pretrained"), from_folder, tmp_path)
    file.write_text(json.dumps(settings | {key: None}))
    assert from_folder(tmp_path).rank == 4


def test_adapters_of_whole_numbers_are_refused_and_those_of_16_bits_read(tmp_path):
    base = llama()
    peft_model(base, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    stored, ids = load_file(file), tokens(2, 16)
    for dtype in (torch.bfloat16, torch.float16):
        save_file({name: tensor.to(dtype) for name, tensor in stored.items()}, file)
        reference = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
        model = octavo.transform(copy.deepcopy(base), dtype=torch.float32, lora=from_folder(tmp_path))
        torch.testing.assert_close(model(input_ids=ids).logits, reference(input_ids=ids).logits, rtol=2e-5, atol=2e-5)
    name = next(iter(stored))
    save_file(stored | {name: (100 * stored[name]).to(torch.int8)}, file)
    refused((f"whole numbers: {name} (I8)", "float32"), octavo.transform, llama(), lora=from_folder(tmp_path))


NO_VALUES = {
    "r": ("4", 0, 4.5, None, True),
    "lora_alpha": ("abc", None, [1], 0, float("nan")),
    "lora_dropout": ("a", 1, -0.1),
    "use_rslora": ("false", 1),
    "target_modules": (5, ["q_proj", 3], {"q_proj": 1}),
    "modules_to_save": ("lm_head", 3),
    "target_parameters": ("experts", [1]),
    "rank_pattern": (["a"],),
    "base_model_name_or_path": (7,),
}


@pytest.mark.parametrize("key", NO_VALUES)
def test_a_value_that_peft_does_not_write_is_refused_by_its_key(key, tmp_path):
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    for value in NO_VALUES[key]:
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings | {key: value}))
        refused(("adapter_config.json", f"{key} = ", "Correct it"), from_folder, tmp_path)


def test_every_key_of_the_installed_peft_is_known(tmp_path):
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert from_folder(tmp_path).rank == 4
    variants = {each.name for each in dataclasses.fields(peft.LoraConfig) if each.metadata.get("is_lora_variant")}
    assert {"use_dora", "kasa_config"} <= variants
    for key in saved.keys() - {"peft_type", "r", "lora_alpha", "bias", "target_modules"}:
        (tmp_path / "adapter_config.json").write_text(json.dumps(saved | {key: None}))
        assert from_folder(tmp_path).rank == 4, key
    for key in variants:
        (tmp_path / "adapter_config.json").write_text(json.dumps(saved | {key: {"beta": 1}}))
        refused(f"{key} = ", from_folder, tmp_path)


@pytest.mark.parametrize(("start", "words"), [("mica", "trains lora_A alone"), ("loftq", "changes the base weights")])
def test_ways_to_begin_that_adapters_alone_do_not_hold_are_refused(start, words, tmp_path):
    file = tmp_path / "adapter_config.json"
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    file.write_text(json.dumps(settings | {"init_lora_weights": start}))
    refused((start, words), from_folder, tmp_path)
    file.write_text(json.dumps(settings | {"init_lora_weights": "eva"}))
    assert from_folder(tmp_path).alpha == 8


def test_a_checkpoint_holds_what_is_trained_alone_and_refuses_another_base(tmp_path):
    base, ids = llama(), tokens(2, 16)
    lora = octavo.LoRA(4, targets=["q_proj", "down_proj"], save_whole=["lm_head"])

    def start(source=base, lora=lora):
        model = octavo.transform(copy.deepcopy(source), dtype=torch.float32, lora=lora)
        return model, torch.optim.AdamW(octavo.parameter_groups(model, 0.1), lr=1e-2)

    def step(model, optimizer):
        with octavo.fp8_autocast():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model, optimizer = start()
    losses = [step(model, optimizer) for _ in range(4)]
    octavo.save(tmp_path / "saved", model, optimizer)
    on = [step(model, optimizer) for _ in range(2)]
    assert losses[-1] < losses[0]
    stored = {
        name for file in (tmp_path / "saved").glob("*.safetensors") for name in load_file(file) if name.startswith("model.")
    }
    assert all("lora_" in name or name == "model.head.weight" for name in stored)
    assert len(stored) == 2 * 2 * 2 + 1

    again, optimizer = start()
    octavo.load(tmp_path / "saved", again, optimizer)
    assert [step(again, optimizer) for _ in range(2)] == on

    other = copy.deepcopy(base)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    refused(("adapters of another base", "hash"), octavo.load, tmp_path / "saved", *start(other))
    more = octavo.LoRA(4, alpha=4.0, targets=["q_proj", "down_proj"], save_whole=["lm_head"])
    refused("scale was 2.0 and is 1.0", octavo.load, tmp_path / "saved", *start(lora=more))
    whole = octavo.transform(copy.deepcopy(base), dtype=torch.float32)
    refused("adapters only", octavo.load, tmp_path / "saved", whole)


def test_the_fingerprint_is_of_names_shapes_places_and_values():
    base = llama()
    first = adapted(octavo.transform(copy.deepcopy(base), lora=octavo.LoRA(2))).base
    assert adapted(octavo.transform(copy.deepcopy(base), lora=octavo.LoRA(4, targets=["k_proj"]))).base == first
    with torch.no_grad():
        weight = base.model.layers[0].self_attn.q_proj.weight
        weight[[0, 1]] = weight[[1, 0]]
    assert adapted(octavo.transform(copy.deepcopy(base), lora=octavo.LoRA(2))).base != first
    assert base.config.vocab_size == VOCABULARY


def test_the_example_trains_and_says_the_truth(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lora", str(tmp_path)])
    names = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "lora.py"), run_name="__main__")
    said = capsys.readouterr().out.splitlines()[-1]
    assert names["losses"][-1] < 0.95 * names["losses"][0]
    assert names["there"] == pytest.approx(names["losses"][-1], rel=0.15)
    assert f"with loss {names['there']:.3f} there" in said
