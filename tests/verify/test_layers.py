"""Which layers the small model has, and the run's patterns of names with their numbers there."""

import random

import pytest
from transformers import AutoConfig
from verified import RUN, run_of

from octavo.build import build_model
from octavo.config.degrees import Degrees
from octavo.errors import InputError
from octavo.fp8.scaling import states_of
from octavo.models.families import spec_of
from octavo.models.lora import adapted
from octavo.models.sources import load_config
from octavo.plan.run import build_options
from octavo.train.optimizer import build_optimizer
from octavo.verify import layers, small

ONE = Degrees(1, 1, 1, 1, 1)


def shrunk(config):
    """The small run's model on meta, its run, and its layers."""
    whole = load_config(config.model.source, config.model.config)
    spec = spec_of(whole)
    few, chosen = layers.with_few_layers(config, whole, spec, small.experts_of(spec, ONE))
    model = build_model(small.small_config(whole, spec, ONE, chosen), build_options(few, blocks="auto"), device="meta")
    return model, few, chosen


def skipped(model):
    """The names of layers out of FP8."""
    return {name for name, state in states_of(model) if state.skipped}


def whole_model(config):
    return build_model(
        load_config(config.model.source, config.model.config), build_options(config, blocks="auto"), device="meta"
    )


def in_small(names, chosen):
    """Names of layers that the small model has, with their numbers there."""
    numbered = {layer: number for number, layer in enumerate(chosen)}
    found = set()
    for name in names:
        head, number, rest = name.split(".", 2) if name.startswith("layers.") else (name, None, None)
        if number is None:
            found.add(name)
        elif int(number) in numbered:
            found.add(f"{head}.{numbered[int(number)]}.{rest}")
    return found


@pytest.mark.parametrize(
    ("source", "patterns", "chosen"),
    [
        ("llama-1b", ["*.0.*", "*.15.*"], [0, 1, 2, 15]),
        ("llama-1b", ["*.1[45].*"], [0, 1, 14, 15]),
        ("llama-1b", ["model.layers.3.mlp*", "layers.1?.self_attention.qkv"], [0, 1, 3, 10, 11]),
        ("llama-1b", ["*.fc1", "*.self_attention.proj"], [0, 1]),
        ("mixtral-8x7b", ["*.31.*"], [0, 1, 31]),
    ],
)
def test_layers_out_of_fp8_are_those_of_the_run(source, patterns, chosen):
    config = run_of(source, fp8={"skip": patterns})
    model, _, found = shrunk(config)
    assert list(found) == chosen
    assert skipped(model) == in_small(skipped(whole_model(config)), chosen)
    assert skipped(model)


def test_patterns_at_random_name_the_same_layers():
    draw, seen = random.Random(50), 0
    for _ in range(12):
        number = draw.choice(("?", "1?", "[0-2]", "3", "15", "*1", "1[135]"))
        pattern = draw.choice(("layers.{}.*", "model.layers.{}.mlp*", "*.{}.self_attention.*", "*layers.{}")).format(number)
        config = run_of("llama-1b", fp8={"layers": {"*": "current", pattern: "bf16"}})
        model, _, chosen = shrunk(config)
        whole = whole_model(config)
        assert skipped(model) == in_small(skipped(whole), chosen), pattern
        seen += 0 < len(skipped(model)) < len(dict(states_of(model)))
    assert seen >= 6


def test_later_patterns_win_as_in_the_run():
    config = run_of("llama-1b", fp8={"layers": {"*.15.*": "bf16", "*.fc1": "current", "*.1?.*": "rowwise", "*.15.ffn": "bf16"}})
    model, _, chosen = shrunk(config)
    recipes = {name: (state.skipped != "", state.override and state.override.name) for name, state in states_of(model)}
    wanted = {
        name: (state.skipped != "", state.override and state.override.name) for name, state in states_of(whole_model(config))
    }
    for name, here in recipes.items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            assert here == wanted[f"layers.{chosen[int(number)]}.{rest}"], name
    assert {10, 15} <= set(chosen)


def test_frozen_parameters_and_adapters_are_those_of_the_run():
    config = run_of("llama-1b", train=RUN["train"] | {"freeze": ["*layers.1?.*", "*embed*"]})
    model, _, chosen = shrunk(config)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    wanted = {name for name, parameter in whole_model(config).named_parameters() if not parameter.requires_grad}
    assert list(chosen) == [0, 1, 10, 11]
    assert frozen == in_small(wanted, chosen)
    config = run_of("llama-1b", lora={"rank": 4, "targets": ["model.layers.3.*", "layers.4.self_attn.q_proj"]})
    model, _, chosen = shrunk(config)
    assert list(chosen) == [0, 1, 3, 4]
    targets = adapted(model).targets
    assert {name for name in targets if ".2." in name} == {
        f"model.layers.2.{part}"
        for part in (
            *(f"self_attn.{one}_proj" for one in "qkvo"),
            *(f"mlp.{one}_proj" for one in ("gate", "up", "down")),
        )
    }
    assert [name for name in targets if ".2." not in name] == ["model.layers.3.self_attn.q_proj"]


def test_stored_names_count_where_no_other_does():
    """layers.3.layernorm_mlp is the stored name of an MLP, whose norm alone the first pattern matches."""
    for pattern, some in (("layers.3.*norm*", ".layernorm."), ("layers.3.layernorm_mlp*", ".fc1.")):
        config = run_of("llama-1b", train=RUN["train"] | {"freeze": [pattern]})
        model, few, chosen = shrunk(config)
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        wanted = {name for name, parameter in whole_model(config).named_parameters() if not parameter.requires_grad}
        assert frozen == in_small(wanted, chosen)
        assert any(some in name for name in frozen)
        assert any("layernorm_mlp" in name for name in few.train.freeze) == (some == ".fc1.")


def test_rates_make_no_kind_of_layers():
    config = run_of("llama-1b", optimizer={"rates": {"*": 0.5, "*.1.*": 0.25, "*.15.*": 0.125}})
    _, few, chosen = shrunk(config)
    assert list(chosen) == [0, 1]
    assert not any("15" in pattern for pattern in few.optimizer.rates)
    whole = load_config("llama-1b", {})
    model = build_model(small.small_config(whole, spec_of(whole), ONE, chosen), build_options(few, blocks="auto"), device="cpu")
    groups = build_optimizer(model, few.optimizer).param_groups
    rates = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    found = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert found == {name: 0.25 if ".1." in name else 0.5 for name in found}


def test_kinds_of_windows_and_patterns(tmp_path):
    AutoConfig.for_model(
        "qwen2", num_hidden_layers=8, use_sliding_window=True, sliding_window=16, max_window_layers=4, hidden_size=64,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, vocab_size=512,
    ).save_pretrained(tmp_path)  # fmt: skip
    config = run_of(str(tmp_path), fp8={"skip": ["*.7.*"]})
    model, _, chosen = shrunk(config)
    assert list(chosen) == [0, 1, 4, 5, 7]
    assert [window is not None for window in model.spec.windows] == [False, False, True, True, True]
    assert {name.split(".")[1] for name in skipped(model)} == {"4"}


def test_kinds_of_experts_and_patterns(tmp_path):
    AutoConfig.for_model(
        "qwen3_moe", num_hidden_layers=8, mlp_only_layers=[0, 5], hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=128, moe_intermediate_size=64, num_experts=16, num_experts_per_tok=2, vocab_size=512,
    ).save_pretrained(tmp_path)  # fmt: skip
    names = ["*.5.*", "model.layers.7.mlp.experts.*"]
    config = run_of(str(tmp_path), fp8={"skip": names})
    model, few, chosen = shrunk(config)
    assert list(chosen) == [0, 1, 2, 5, 7]
    assert list(model.spec.dense) == [0, 3]
    assert skipped(model) == in_small(skipped(whole_model(config)), chosen)
    assert {name.split(".")[1] for name in skipped(model)} == {"3", "4"}
    assert not any("experts.12" in name for name in few.fp8.skip)


def test_more_layers_than_a_small_model_has_are_refused():
    table = {f"*.{n}.*": "current" if n % 2 else "bf16" for n in range(16)}
    with pytest.raises(InputError, match=r"fp8.layers: its patterns make so many kinds .* are 16, and .* has 12 at most"):
        shrunk(run_of("llama-1b", fp8={"layers": table}))
