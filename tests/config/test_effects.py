"""Keys without effect, refused or left out, and notes on likely mistakes."""

import dataclasses
import tomllib

import pytest
import tomli_w
from minimal_run import MINIMAL, message, values

from octavo.config.effects import idle_keys
from octavo.config.fp8 import KEYS_OF_RECIPES
from octavo.config.run import RunConfig
from octavo.fp8.recipe import RECIPES

FIELDS = {"format": "fp8_format"}
"""Fields of the recipe classes under another name than the key's."""
IDLE = [
    (
        {"fp8__recipe": "current", "fp8__amax_history_len": 16},
        ["fp8.amax_history_len = 16", 'fp8.recipe = "current"', '"delayed"'],
    ),
    ({"fp8__recipe": "current", "fp8__margin": 1}, ["fp8.margin = 1", 'fp8.recipe = "current"']),
    ({"fp8__recipe": "rowwise", "fp8__format": "E4M3"}, ["fp8.format", '"rowwise"', '"delayed" or "current"']),
    ({"fp8__recipe": "block", "fp8__fast_accumulation": True}, ["fp8.fast_accumulation = true", '"block"']),
    ({"fp8__use_power_2_scales": True}, ["fp8.use_power_2_scales = true", '"delayed"', '= "current"']),
    ({"fp8__enabled": False, "fp8__recipe": "block"}, ['fp8.recipe = "block"', "fp8.enabled = false"]),
    ({"fp8__enabled": False, "fp8__skip": ["*"]}, ['fp8.skip = ["*"]', "fp8.enabled = false"]),
    ({"fp8__enabled": False, "train__compare_bf16": True}, ["train.compare_bf16 = true", "fp8.enabled = false"]),
    ({"train__loss_scale": 2.0}, ["train.loss_scale = 2.0", 'model.dtype = "bfloat16"', '"float16"']),
    ({"optimizer__schedule": "constant", "optimizer__min_lr_fraction": 0.5}, ["optimizer.min_lr_fraction = 0.5", '"constant"']),
    ({"data__validation_fraction": 0.0, "train__validate_every": 5}, ["train.validate_every = 5", "validation_fraction = 0.0"]),
    (
        {"data__validation_fraction": 0.0, "train__validate_batches": 5},
        ["train.validate_batches = 5", "a data.validation_source"],
    ),
    (
        {"data__validation_source": "b.txt", "data__validation_fraction": 0.2},
        ["data.validation_fraction = 0.2", 'data.validation_source = "b.txt"'],
    ),
    ({"data__validation_source": "b.txt", "data__validation_split": "test"}, ['data.validation_split = "test"', "a data set"]),
    ({"data__validation_split": "test"}, ['data.validation_split = "test"', "with no data.validation_source"]),
    ({"model__resize": True}, ["model.resize = true", "model.load = false", "model.load = true"]),
    ({"data__weights": [1]}, ["data.weights = [1.0]", "several sources in data.source"]),
    ({"data__source": "a.txt.gz", "data__text_field": "body"}, ['data.text_field = "body"', ".csv"]),
    (
        {"data__source": "a.jsonl", "data__format": "prompt", "data__text_field": "body"},
        ['data.text_field = "body"', 'data.format = "prompt"', "the columns prompt and completion"],
    ),
    ({"data__tokenizer": "gpt2", "data__vocab_size": 999}, ["data.vocab_size = 999", 'data.tokenizer = "gpt2"']),
    ({"data__text_field": "body"}, ['data.text_field = "body"', 'data.source = "text.txt"']),
    ({"data__source": ["a.jsonl", "b.parquet"], "data__split": "test"}, ['data.split = "test"', "a data set"]),
    ({"parallel__cp_comm_type": "p2p"}, ['parallel.cp_comm_type = "p2p"', "context_parallel_degree = 1"]),
    (
        {"moe__moe_load_balancing": "none", "moe__moe_aux_loss_coeff": 0.1},
        ["moe.moe_aux_loss_coeff = 0.1", 'moe.moe_load_balancing = "none"'],
    ),
    (
        {"moe__moe_load_balancing": "sinkhorn", "moe__moe_aux_loss_coeff": 0.1},
        ["moe.moe_aux_loss_coeff = 0.1", 'moe.moe_load_balancing = "sinkhorn"'],
    ),
    ({"checkpoint__async": True, "checkpoint__every": 0}, ["checkpoint.async = true", "checkpoint.every = 0"]),
]


@pytest.mark.parametrize(("changes", "words"), IDLE, ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "")
def test_a_key_without_effect_is_refused_with_the_key_that_decides(changes, words, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(values(**changes)))
    for said in (message(RunConfig.from_dict, values(**changes)), message(RunConfig.from_file, file)):
        for word in words:
            assert word in said, f"{word!r} is not in: {said}"
        assert said.count("no effect") == 1


def test_a_split_that_older_resolved_files_list_is_accepted_without_a_data_set():
    config = RunConfig.from_dict(values(data__source="a.jsonl", data__split="train"))
    assert not idle_keys(config)
    assert "split" not in tomllib.loads(config.to_toml())["data"]
    folder = RunConfig.from_dict(values(data__source="folder", data__split="train"))
    assert tomllib.loads(folder.to_toml())["data"]["split"] == "train"


def test_the_keys_of_each_recipe_are_the_fields_of_its_class():
    for name, recipe in RECIPES.items():
        fields = {field.name for field in dataclasses.fields(recipe) if field.init} - {"reduce_amax"}
        assert {FIELDS.get(key, key) for key in KEYS_OF_RECIPES[name]} == fields
    fields = RunConfig.model_fields["fp8"].annotation.model_fields
    assert all(fields[key].description.endswith("(delayed scaling only).") for key in ("amax_history_len", "margin"))


def test_a_key_has_an_effect_if_a_layer_has_the_recipe_for_it():
    config = RunConfig.from_dict(values(fp8__recipe="block", fp8__layers={"a": "delayed"}, fp8__margin=3))
    assert config.fp8.margin == 3
    assert tomllib.loads(config.to_toml())["fp8"]["margin"] == 3


@pytest.mark.parametrize("override", [f"fp8.recipe={name}" for name in RECIPES] + ["fp8.enabled=false"])
@pytest.mark.parametrize("recipe", [*RECIPES])
def test_another_recipe_on_the_command_line_brings_its_own_settings(recipe, override, run_file, capsys):
    """Of a preset, of the resolved file of a run, and of one with every key, as older versions wrote it."""
    margin = {"margin": 3, "amax_history_len": 32} if recipe == "delayed" else {}
    run_file.write_text(MINIMAL + tomli_w.dumps({"fp8": {"recipe": recipe, "format": "HYBRID", **margin}}))
    config = RunConfig.from_file(run_file)
    every = config.model_dump(mode="json", exclude_none=True)
    resolved = [config.to_toml(), tomli_w.dumps(every), run_file.read_text()]
    capsys.readouterr()
    for text in resolved:
        run_file.write_text(text)
        found = RunConfig.from_file(run_file, [override])
        found.tell_notes()
        said = capsys.readouterr().err
        kept = override == "fp8.recipe=delayed"
        assert found.fp8.margin == (margin.get("margin", 0) if kept else 0)
        left_out = len(margin) * (not kept) + (override == "fp8.enabled=false" and recipe != "delayed")
        assert said.count("It is ignored.") == left_out
        assert ("fp8.margin = 3" in said) == bool(margin and not kept)
        assert not idle_keys(found)
    if override != "fp8.recipe=delayed":
        assert "fp8.margin = 2" in message(RunConfig.from_file, run_file, [override, "fp8.margin=2"])


def test_an_older_file_of_a_run_with_a_key_without_effect_is_read(run_file, capsys):
    run_file.write_text(MINIMAL + '[fp8]\nrecipe = "current"\nmargin = 3\n')
    assert "fp8.margin = 3" in message(RunConfig.from_file, run_file)
    (run_file.parent / "environment.json").write_text("{}")
    config = RunConfig.from_file(run_file)
    config.tell_notes()
    assert config.fp8.margin == 0
    assert "fp8.margin = 3" in capsys.readouterr().err
    (run_file.parent / "environment.json").unlink()
    assert RunConfig.from_file(run_file, recorded=True).fp8.margin == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optimizer.warmup_steps=10"], ["optimizer.warmup_steps = 10", "rises to 0.0003 at the last step and never falls"]),
        (["optimizer.warmup_steps=40"], ["optimizer.warmup_steps = 40", "rises to 7.5e-05 at the last step and never falls"]),
        (["train.validate_every=11"], ["train.validate_every = 11", "train.steps = 10"]),
        (["checkpoint.every=11"], ["checkpoint.every = 11"]),
        (["parallel.reduce_dtype=bfloat16"], ['parallel.reduce_dtype = "bfloat16"', "one rank"]),
        (["launch.timeout=5"], ["launch.timeout = 5.0", "one rank"]),
        (["parallel.reshard_after_forward=false"], ["parallel.reshard_after_forward = false", "one rank"]),
        (["parallel.reshard_after_forward=true"], []),  # in the resolved file of an older version's run
        (["optimizer.warmup_steps=9", "train.validate_every=10", "checkpoint.every=10", "log.every=10"], []),
        (["checkpoint.every=100", "data.validation_fraction=0.0"], []),
    ],
    ids=lambda value: value[0] if value and "=" in value[0] and " " not in value[0] else "",
)
def test_a_plausible_mistake_is_said_once_on_stderr(overrides, words, run_file, capsys, monkeypatch):
    config = RunConfig.from_file(run_file, overrides)
    assert capsys.readouterr().err == ""  # a run that is refused gets one message
    config.tell_notes()
    config.tell_notes()
    said = capsys.readouterr().err
    assert said.count("\n") == bool(words)
    assert all(word in said for word in words)
    RunConfig.from_file(run_file, overrides).tell_notes(2)
    assert not any("one rank" in line for line in capsys.readouterr().err.splitlines())  # of a plan for several
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    RunConfig.from_file(run_file, overrides).tell_notes()
    assert capsys.readouterr().err == ""
