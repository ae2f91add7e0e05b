"""Run files: what is read, what overrides change, what every mistake is answered with, and that `to_toml` reads back equal."""

import dataclasses
import math
import os
import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config.effects import idle_keys, without_effect
from octavo.config.fp8 import KEYS_OF_RECIPES
from octavo.config.parallel import InitConfig
from octavo.config.run import RunConfig, known_keys
from octavo.config.synonyms import _SYNONYMS, closest
from octavo.data.order import SampleOrder
from octavo.errors import EXIT_INPUT, InputError
from octavo.fp8.recipe import RECIPES
from octavo.parallel.world import seed_everything

MINIMAL = """\
[model]
source = "llama-tiny"
[data]
source = "text.txt"
sequence_length = 64
[train]
steps = 10
global_batch = 4
"""
PRESETS = sorted((Path(__file__).parents[1] / "presets").glob("*.toml"))


def values(**changes):
    """The minimal run as a dict, with `section__key=value` changed."""
    tables = tomllib.loads(MINIMAL)
    for name, value in changes.items():
        section, key = name.split("__")
        tables.setdefault(section, {})[key] = value
    return tables


@pytest.fixture
def run_file(tmp_path):
    file = tmp_path / "my-run.toml"
    file.write_text(MINIMAL)
    return file


def message(call, *arguments):
    """The message of an InputError with exit code 2."""
    with pytest.raises(InputError) as raised:
        call(*arguments)
    assert raised.value.exit_code == EXIT_INPUT
    return str(raised.value)


def test_defaults(run_file):
    config = RunConfig.from_file(run_file)
    assert config.train.output == "runs/my-run"
    assert config.output == Path("runs/my-run")
    assert (config.model.dtype, config.model.params_dtype, config.model.load) == ("bfloat16", "float32", False)
    assert (config.data.packing, config.data.tokenizer, config.data.text_field) == ("join", "train", "text")
    parallel = config.parallel
    assert (parallel.hybrid_shard_degree, parallel.tensor_parallel_degree) == (0, 1)
    assert (parallel.context_parallel_degree, parallel.expert_parallel_degree) == (1, 1)
    assert (config.fp8.enabled, config.fp8.recipe, config.fp8.format, config.fp8.margin) == (True, "delayed", "HYBRID", 0)
    assert (config.fp8.amax_history_len, config.fp8.amax_compute_algo) == (1024, "max")
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.train.micro_batch is None
    assert RunConfig.from_dict(values()).output == Path("runs/run")


def test_what_is_said_is_kept(run_file):
    run_file.write_text(MINIMAL + 'output = "elsewhere/x"\nmicro_batch = 2\n[fp8]\nenabled = "auto"\nskip = ["layers.0.*"]\n')
    config = RunConfig.from_file(str(run_file))
    assert config.train.output == "elsewhere/x"
    assert config.train.micro_batch == 2
    assert config.fp8.enabled == "auto"
    assert config.fp8.skip == ["layers.0.*"]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_parse_and_round_trip(path):
    config = RunConfig.from_file(path)
    assert config.output == Path("runs") / path.stem
    assert RunConfig.from_dict(tomllib.loads(config.to_toml())) == config


def test_every_field_has_a_description():
    for section, field in RunConfig.model_fields.items():
        for key, inner in field.annotation.model_fields.items():
            assert inner.description, f"{section}.{key}"
            assert inner.description.strip() == inner.description
            assert inner.description.endswith((".", ")"))


def test_known_keys_are_the_keys_of_the_resolved_file_or_have_no_effect():
    config = RunConfig.from_dict(values(model__config={"a": 1}, train__output="x"))
    written = tomllib.loads(config.to_toml())
    found = {f"{section}.{key}" for section, table in written.items() for key in table}
    unset = {"data.max_documents", "data.max_tokens", "parallel.param_dtype", "train.micro_batch"}
    unset |= {"fp8.head", "fp8.fast_accumulation", "train.tokens", "train.epochs", "train.sample_prompt"}
    unset |= {"data.validation_source"} | {key for key in known_keys() if key.startswith("moe.")}
    idle = {
        "data.weights",
        "data.validation_split",
        "optimizer.decay_steps",
        "train.early_stopping",
        "checkpoint.best",
        "data.text_field",
        "data.subset",
        "data.split",
        "fp8.use_power_2_scales",
        "train.loss_scale",
        "parallel.cp_comm_type",
        "parallel.expert_dispatch_fp8",
        "parallel.activation_loading_horizon",
    }
    assert found | unset | idle == set(known_keys())
    assert {each.key for each in without_effect(config)} == idle
    assert not found & idle
    assert len(known_keys()) == len(set(known_keys()))


def test_values_are_immutable():
    config = RunConfig.from_dict(values())
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__sorce": "a"}, ["unknown key model.sorce", "Did you mean model.source?"]),
        ({"fp8__amax_history_length": 3}, ["fp8.amax_history_length", "Did you mean fp8.amax_history_len?"]),
        ({"parallel__contxt_parallel_degree": 3}, ["Did you mean parallel.context_parallel_degree?"]),
        ({"train__lr": 1.0}, ["unknown key train.lr", "Did you mean optimizer.lr?"]),
        ({"train__sequence_length": 8}, ["unknown key train.sequence_length", "Did you mean data.sequence_length?"]),
        ({"optimizer__steps": 8}, ["unknown key optimizer.steps", "Did you mean train.steps?"]),
        ({"optimiser__lr": 1.0}, ["unknown section optimiser", "Did you mean optimizer?", "checkpoint"]),
        ({"xyzzy__lr": 1.0}, ["unknown section xyzzy", "model, data, parallel, moe, fp8, optimizer, train, checkpoint, log"]),
        ({"train__steps": "ten"}, ["train.steps", "'ten'", "integer"]),
        ({"train__steps": 0}, ["train.steps = 0", "greater than or equal to 1"]),
        ({"train__steps": True}, ["train.steps = True", "integer"]),
        ({"optimizer__lr": True}, ["optimizer.lr = True", "number"]),
        ({"optimizer__lr": "1e-3"}, ["optimizer.lr = '1e-3'", "number"]),
        ({"optimizer__betas": ["0.9", True]}, ["optimizer.betas", "number"]),
        ({"data__source": ""}, ["data.source = ''", "at least 1 character"]),
        ({"train__output": ""}, ["train.output = ''", "at least 1 character"]),
        ({"train__steps": 1.5}, ["train.steps = 1.5", "integer"]),
        ({"data__source": 3}, ["data.source = 3", "string"]),
        ({"data__validation_fraction": 1.0}, ["data.validation_fraction = 1.0", "less than 1"]),
        ({"fp8__recipe": "mxfp8"}, ["fp8.recipe = 'mxfp8'", "delayed", "current", "rowwise", "block"]),
        ({"fp8__enabled": "maybe"}, ["fp8.enabled = 'maybe'", "auto"]),
        ({"fp8__head": "forward"}, ["fp8.head = 'forward'", "boolean", "backward"]),
        ({"parallel__reshard_after_forward": "maybe"}, ["parallel.reshard_after_forward = 'maybe'", "boolean", "'auto'"]),
        ({"train__recompute": "blocks"}, ["train.recompute = 'blocks'", "boolean", "mlp"]),
        ({"log__trackers": ["wandb", "mlflow"]}, ["log.trackers", "'mlflow'", "tensorboard"]),
        ({"optimizer__lr": -1e-3}, ["optimizer.lr = -0.001", "greater than 0"]),
        ({"optimizer__lr": math.nan}, ["optimizer.lr = nan"]),
        ({"optimizer__lr": math.inf}, ["optimizer.lr = inf"]),
        ({"optimizer__betas": [0.9, 1.0]}, ["optimizer.betas = [0.9, 1.0]", "[0, 1)"]),
        ({"optimizer__betas": [0.9]}, ["optimizer.betas = [0.9]"]),
        ({"data__sequence_length": 1}, ["data.sequence_length = 1", "use 2 or more"]),
        ({"data__sequence_length": -4}, ["data.sequence_length = -4", "use 2 or more"]),
        ({"model__load": True, "model__config": {"hidden_size": 8}}, ["model.config", "model.load"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mistake_is_answered_with_key_value_and_remedy(changes, words):
    said = message(RunConfig.from_dict, values(**changes))
    for word in words:
        assert word in said, f"{word!r} is not in: {said}"


def test_a_run_without_a_length_is_refused_with_the_three_ways():
    tables = values()
    del tables["train"]["steps"]
    said = message(RunConfig.from_dict, tables)
    assert "train.steps is missing: give train.steps, train.tokens or train.epochs" in said


@pytest.mark.parametrize("key", ["model.source", "data.source", "data.sequence_length", "train.global_batch"])
def test_a_missing_key_is_named_and_described(key):
    section, name = key.split(".")
    tables = values()
    del tables[section][name]
    said = message(RunConfig.from_dict, tables)
    assert f"{key} is missing: {RunConfig.model_fields[section].annotation.model_fields[name].description}" in said


@pytest.mark.parametrize("section", ["model", "data", "train"])
def test_a_missing_section_is_named(section):
    tables = values()
    del tables[section]
    assert f"add a [{section}] section" in message(RunConfig.from_dict, tables)
    tables[section] = 5
    assert f"{section} = 5" in message(RunConfig.from_dict, tables)


def test_all_mistakes_are_told_at_once(run_file):
    run_file.write_text(MINIMAL.replace("steps = 10", 'steps = "x"') + "[log]\nevry = 3\n[fp8]\nmargin = 0.5\n")
    said = message(RunConfig.from_file, run_file)
    assert said.startswith(str(run_file))
    for word in ("train.steps", "log.evry", "Did you mean log.every?", "fp8.margin = 0.5"):
        assert word in said


def test_limits_themselves_are_allowed():
    assert RunConfig.from_dict(values(data__sequence_length=2)).data.sequence_length == 2
    assert RunConfig.from_dict(values(optimizer__warmup_steps=11)).optimizer.warmup_steps == 11
    found = RunConfig.from_dict(values(optimizer__betas=[0, 0.999], optimizer__clip=0, data__validation_fraction=0))
    assert (found.optimizer.betas, found.optimizer.clip, found.data.validation_fraction) == ((0, 0.999), 0, 0)


@pytest.mark.parametrize("text", ["[model", "a = ", "[model]\nsource = 1\nsource = 2\n", "\ufeff\ufeff[model]"])
def test_a_file_that_is_not_toml_is_named(run_file, text):
    run_file.write_text(text)
    said = message(RunConfig.from_file, run_file)
    assert str(run_file) in said
    assert "not valid TOML" in said


def test_a_file_that_is_not_text_is_named(run_file):
    run_file.write_bytes(b"\xff\xfe\x00\x81")
    assert str(run_file) in message(RunConfig.from_file, run_file)


def test_a_margin_is_bounded():
    for margin in (-64, 64):
        assert RunConfig.from_dict(values(fp8__margin=margin)).fp8.margin == margin
    for margin in (-65, 65):
        assert f"fp8.margin = {margin}" in message(RunConfig.from_dict, values(fp8__margin=margin))


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
    ({"data__weights": [1]}, ["data.weights = [1.0]", "several sources in data.source"]),
    ({"data__source": "a.txt.gz", "data__text_field": "body"}, ['data.text_field = "body"', ".csv"]),
    ({"data__tokenizer": "gpt2", "data__vocab_size": 999}, ["data.vocab_size = 999", 'data.tokenizer = "gpt2"']),
    ({"data__text_field": "body"}, ['data.text_field = "body"', 'data.source = "text.txt"']),
    ({"data__source": ["a.jsonl", "b.parquet"], "data__split": "test"}, ['data.split = "test"', "a data set"]),
    ({"parallel__cp_comm_type": "p2p"}, ['parallel.cp_comm_type = "p2p"', "context_parallel_degree = 1"]),
    (
        {"moe__moe_load_balancing": "none", "moe__moe_aux_loss_coeff": 0.1},
        ["moe.moe_aux_loss_coeff = 0.1", 'moe.moe_load_balancing = "none"'],
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


def test_validation_text_of_its_own_is_enough_to_validate():
    changes = {"data__validation_source": "owner/set", "data__validation_split": "test", "train__validate_every": 5}
    for fraction in ({}, {"data__validation_fraction": 0.05}):  # a key at its default counts as not set
        config = RunConfig.from_dict(values(**changes, **fraction))
        written = tomllib.loads(config.to_toml())
        assert "validation_fraction" not in written["data"]
        assert RunConfig.from_dict(written) == config
        assert config.data.held_out == 0
    held_out = config.data.of_validation
    assert (held_out.sources, held_out.split, held_out.max_tokens, held_out.of_validation) == (
        ["owner/set"],
        "test",
        None,
        None,
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__weights": [1, 2]}, ["has 2 weights", "data.source names 1 source: give one weight a source"]),
        ({"data__source": ["a.txt", "b.txt"], "data__weights": [1]}, ["has 1 weight,", "names 2 sources", "[] joins"]),
        ({"data__source": ["a.txt", "b.txt"], "data__weights": [1, 0]}, ["data.weights", "greater than 0"]),
        ({"data__source": ["a.txt", "b.txt"], "data__weights": [1, -1.5]}, ["data.weights", "greater than 0"]),
        ({"data__source": ["a.txt", "b.txt"], "data__weights": [1, math.inf]}, ["data.weights", "finite"]),
        ({"data__source": ["a.txt", "b.txt"], "data__weights": 0.5}, ["data.weights = 0.5"]),
        ({"data__seed": 2**64}, ["data.seed = 18446744073709551616", "at most 9223372036854775807"]),
        ({"data__seed": -1}, ["data.seed = -1"]),
        ({"train__seed": 2**63}, ["train.seed = 9223372036854775808", "at most 9223372036854775807"]),
    ],
)
def test_weights_and_seeds_out_of_range_are_refused_with_the_limit(changes, words):
    said = message(RunConfig.from_dict, values(**changes))
    for word in words:
        assert word in said


def test_the_largest_seeds_work():
    """Of the generators of data (numpy's Philox) and of `octavo.init`, whose ranks add their numbers to the seed."""
    config = RunConfig.from_dict(values(data__seed=2**63 - 1, train__seed=2**63 - 1))
    assert SampleOrder([3], [1], config.data.seed)[0] in range(3)
    assert InitConfig(random_seed=config.train.seed).random_seed == 2**63 - 1
    seed_everything(config.train.seed + 2**20)


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
        assert said.count("It is left out.") == left_out
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


def test_a_missing_file_is_answered_with_the_nearest(run_file, tmp_path):
    said = message(RunConfig.from_file, tmp_path / "my-rum.toml")
    assert str(tmp_path / "my-rum.toml") in said
    assert f"Did you mean {run_file}?" in said
    said = message(RunConfig.from_file, tmp_path / "none" / "x.toml")
    assert "does not exist" in said
    assert "Did you mean" not in said
    said = message(RunConfig.from_file, tmp_path)
    assert f"is a folder. Did you mean {run_file}?" in said
    run_file.rename(tmp_path / "pyproject.toml")
    assert "Did you mean" not in message(RunConfig.from_file, tmp_path)


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("optimizer.lr=1e-4", lambda c: c.optimizer.lr == 1e-4),
        ("optimizer.lr=3", lambda c: c.optimizer.lr == 3.0),
        (" optimizer.lr = 0.5 ", lambda c: c.optimizer.lr == 0.5),
        ("train.steps=1_000", lambda c: c.train.steps == 1000),
        ("train.output=runs/two", lambda c: c.train.output == "runs/two"),
        ('train.output="runs/a b"', lambda c: c.train.output == "runs/a b"),
        ("train.output='runs/c'", lambda c: c.train.output == "runs/c"),
        ("train.output=a=b", lambda c: c.train.output == "a=b"),
        ("fp8.enabled=true", lambda c: c.fp8.enabled is True),
        ("fp8.enabled=auto", lambda c: c.fp8.enabled == "auto"),
        ("data.source=texts/*.jsonl", lambda c: c.data.source == "texts/*.jsonl"),
        ('data.source=["a.txt", "b.txt"]', lambda c: c.data.source == ["a.txt", "b.txt"]),
        ("optimizer.betas=[0.8, 0.9]", lambda c: c.optimizer.betas == (0.8, 0.9)),
        ("fp8.skip=[]", lambda c: c.fp8.skip == []),
        ("model.config.hidden_size=96", lambda c: c.model.config == {"hidden_size": 96}),
        ("model.config.hidden_act=gelu", lambda c: c.model.config == {"hidden_act": "gelu"}),
        ("model.config.rope_parameters.factor=2.0", lambda c: c.model.config == {"rope_parameters": {"factor": 2.0}}),
    ],
)
def test_overrides(run_file, override, read):
    assert read(RunConfig.from_file(run_file, [override]))


def test_overrides_join_what_the_file_says_and_the_last_wins(run_file):
    run_file.write_text(MINIMAL + "[model.config]\nhidden_size = 32\nvocab_size = 99\n")
    config = RunConfig.from_file(run_file, ["model.config.hidden_size=64", "train.steps=3", "train.steps=4"])
    assert config.model.config == {"hidden_size": 64, "vocab_size": 99}
    assert config.train.steps == 4
    assert config.train.global_batch == 4


@pytest.mark.parametrize("override", ["optimizer.lr", "lr=1", "=1", ".lr=1", "optimizer.=1", "", "a..b=1"])
def test_an_override_of_bad_form_is_shown_with_an_example(run_file, override):
    said = message(RunConfig.from_file, run_file, [override])
    assert repr(override) in said
    assert "section.key=value" in said


def test_mistakes_in_overrides(run_file):
    assert "source is a value" in message(RunConfig.from_file, run_file, ["model.source.name=x"])
    assert "Did you mean optimizer.lr?" in message(RunConfig.from_file, run_file, ["optimizer.rl=1"])
    assert "optimizer.lr = 'fast'" in message(RunConfig.from_file, run_file, ["optimizer.lr=fast"])
    assert "model.load must be false" in message(
        RunConfig.from_file, run_file, ["model.load=true", "model.config.vocab_size=9"]
    )


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("optimizer.learning_rate=1", "optimizer.lr?"),
        ("train.learning-rate=1", "optimizer.lr?"),
        ("train.batch_size=8", "train.global_batch (sequences in an optimizer step"),
        ("train.per_device_train_batch_size=8", "train.micro_batch (sequences in a forward of one rank"),
        ("train.gradient_accumulation_steps=8", "train.global_batch (train.micro_batch x ranks x accumulation steps)?"),
        ("optimizer.warmup_ratio=0.1", "optimizer.warmup_steps (in optimizer steps: the ratio x train.steps)?"),
        ("optimizer.max_grad_norm=1", "optimizer.clip?"),
        ("train.bf16=true", 'model.dtype (model.dtype = "bfloat16", the default)?'),
        ("train.max_steps=9", "train.steps?"),
        ("data.context_length=9", "data.sequence_length?"),
        ("train.output_dir=x", "train.output?"),
        ("model.model_name_or_path=x", "model.source (and model.load = true for its weights)?"),
        ("data.dataset=x", "data.source?"),
        ("train.save_steps=5", "checkpoint.every?"),
        ("train.eval_steps=5", "train.validate_every?"),
        ("log.logging_steps=5", "log.every?"),
        ("train.Steps=5", "train.steps?"),
        ("Train.Steps=5", "train.steps?"),
        ("Train.steps=5", "train?"),
        ("hparams.learning_rate=5", "optimizer.lr?"),
        ("checkpoint.async_=true", "checkpoint.async?"),
    ],
)
def test_a_name_of_other_trainers_is_answered_with_the_key(run_file, override, meant):
    assert f"Did you mean {meant}" in message(RunConfig.from_file, run_file, [override])


def test_every_name_of_other_trainers_leads_to_a_known_key_and_is_none_itself():
    known = known_keys()
    for name, key, _ in _SYNONYMS:
        if key in known:
            assert f"{key.partition('.')[0]}.{name}" not in known
            assert closest(name, known)[0] in known
    assert closest("num_train_epochs", known)[0] == "train.epochs"
    assert closest("xyzzy", known) == (None, "")


def test_a_section_that_is_a_value_is_refused_beside_keywords_too(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f"optimizer = 3\n{MINIMAL}")
    with pytest.raises(InputError, match=r"optimizer = 3: Input should be"):
        RunConfig.from_file(file, sections={"optimizer": {"lr": 1e-4}})


def test_a_key_outside_of_all_sections_is_answered_with_its_section(run_file):
    run_file.write_text("learning_rate = 3\n" + MINIMAL)
    assert "learning_rate outside of all sections. Did you mean optimizer.lr?" in message(RunConfig.from_file, run_file)
    run_file.write_text(MINIMAL.replace("[train]", "[[train]]"))
    assert "write [train], not [[train]]" in message(RunConfig.from_file, run_file)
    run_file.write_text(MINIMAL + '[log]\ntrackers = "wandb"\n')
    assert 'write a list: ["wandb"]' in message(RunConfig.from_file, run_file)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lr=1"], ["Did you mean optimizer.lr=1?"]),
        (["--lr", "3"], ["Did you mean optimizer.lr=3?"]),
        (["optimizer.lr", "3"], ["Did you mean optimizer.lr=3?"]),
        (["optimizer.lr", "=", "3"], ["Did you mean optimizer.lr=3?"]),
        (["train.steps:4"], ["Did you mean train.steps=4?"]),
        (["train/steps=4"], ["Did you mean train.steps=4?"]),
        (["train.steps=", "3"], ["has no value", "Write train.steps=3"]),
        (["train.output="], ["has no value"]),
        (["optimizer=3"], ["optimizer is a section", "optimizer.lr"]),
        (["other.toml"], ["One command takes one run file"]),
        (["optimizer.lr.x=3"], ["lr is a value, not a table"]),
        (["train.output='a"], ["the quote is not closed"]),
        (["optimizer.lr=3e-4,"], ["write 0.0003"]),
        (['optimizer.lr="3e-4"'], ["write 0.0003"]),
        (["train.steps=1e3"], ["write 1000"]),
        (["train.steps=1,000"], ["write 1000"]),
        (["train.steps=\u0664"], ["write 4"]),
        (["fp8.enabled=True"], ["write true"]),
        (["train.micro_batch=None"], ["leave the key out"]),
        (["train.steps=1e400"], ["train.steps = inf"]),
        ([f"train.seed={10**30}"], [f"train.seed = {10**30}", f"at most {2**63 - 1}"]),
        ([f"train.steps={'9' * 5000}"], ["train.steps", "…"]),
        (["optimizer.lr=1\ntrain.steps=7"], ["optimizer.lr"]),
        (["log.trackers=wandb,mlflow"], ["'mlflow'", "tensorboard"]),
        (["log.trackers=wandb,wandb"], ["named twice"]),
        (["train.output=~nobody-of-this-name/x"], ["train.output", "no user 'nobody-of-this-name'"]),
    ],
    ids=str,
)
def test_a_plausible_form_of_an_override_is_answered_with_the_right_one(run_file, overrides, words):
    said = message(lambda: RunConfig.from_file(run_file, overrides).output)
    assert all(word in said for word in words), said
    assert len(said) < 1500


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("log.trackers=wandb", lambda c: c.log.trackers == ["wandb"]),
        ("log.trackers=wandb,trackio", lambda c: c.log.trackers == ["wandb", "trackio"]),
        ("log.trackers=[wandb, trackio]", lambda c: c.log.trackers == ["wandb", "trackio"]),
        ('log.trackers=["wandb", "trackio"]', lambda c: c.log.trackers == ["wandb", "trackio"]),
        ("fp8.skip=layers.0.*", lambda c: c.fp8.skip == ["layers.0.*"]),
        ("fp8.skip=[layers.0.*,layers.[12].*]", lambda c: c.fp8.skip == ["layers.0.*", "layers.[12].*"]),
        ("fp8.skip=layers.[1,2].*", lambda c: c.fp8.skip == ["layers.[1,2].*"]),
        ("data.source=[a.txt,b.txt]", lambda c: c.data.source == ["a.txt", "b.txt"]),
        ("data.source=a.txt,b.txt", lambda c: c.data.source == ["a.txt", "b.txt"]),
        ("data.source=[ab].txt", lambda c: c.data.source == "[ab].txt"),
        ("optimizer.betas=0.8,0.9", lambda c: c.optimizer.betas == (0.8, 0.9)),
        ("train.output=2026-01-31", lambda c: c.train.output == "2026-01-31"),
        ("train.output=007", lambda c: c.train.output == "007"),
        ("train.output=17", lambda c: c.train.output == "17"),
        ("train.output=~/x", lambda c: c.output == Path("~/x").expanduser()),
    ],
)
def test_a_bare_word_is_read_by_the_type_of_its_key(run_file, override, read):
    assert read(RunConfig.from_file(run_file, [override]))


def test_a_file_whose_name_has_a_comma_stays_one_source(run_file, tmp_path):
    (tmp_path / "a,b.txt").write_text("text")
    assert RunConfig.from_file(run_file, [f"data.source={tmp_path}/a,b.txt"]).data.source == f"{tmp_path}/a,b.txt"


@pytest.mark.parametrize(
    "content",
    [b"\xef\xbb\xbf" + MINIMAL.encode(), MINIMAL.replace("\n", "\r\n").encode(), MINIMAL.replace("\n", "\n\t").encode()],
    ids=["byte order mark", "CRLF", "tabs"],
)
def test_files_of_other_editors_are_read(run_file, content):
    run_file.write_bytes(content)
    assert RunConfig.from_file(run_file).train.steps == 10


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (MINIMAL.encode("utf-16"), "byte 1 is not UTF-8"),
        (b"\0" * 10_000, "not valid TOML"),
        (b"[model]\nsource = " + b"[" * 10_000, "nested too deeply"),
        (b"[train]\nsteps = " + b"9" * 5000, "thousands of digits"),
        ((".".join(["a"] * 3000) + " = 1\n").encode(), "unknown section a"),
        (b"", "add a [model] section"),
    ],
    ids=["UTF-16", "zeros", "nested", "digits", "dots", "empty"],
)
def test_a_file_that_is_no_run_file_is_one_message(run_file, content, words):
    run_file.write_bytes(content)
    assert words in message(RunConfig.from_file, run_file)


def test_a_path_that_is_no_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    (tmp_path / "file").write_text("")
    assert "is a pipe or a device" in message(RunConfig.from_file, tmp_path / "pipe.toml")
    assert "is a link to nothing" in message(RunConfig.from_file, tmp_path / "loop.toml")
    assert "does not exist" in message(RunConfig.from_file, tmp_path / "file" / "x.toml")
    assert "File name too long" in message(RunConfig.from_file, tmp_path / ("x" * 300))
    assert "outside of quotes" in message(RunConfig.from_file, "~/none.toml")


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
WORD = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@settings(deadline=None, max_examples=60, report_multiple_bugs=False)
@given(
    st.fixed_dictionaries(
        {
            "model__source": WORD,
            "model__config": st.dictionaries(WORD, JSON, max_size=4),
            "data__source": WORD | st.lists(WORD, max_size=3),
            "data__max_tokens": st.none() | st.integers(2, 2**63 - 1),
            "fp8__skip": st.lists(WORD, max_size=3),
            "fp8__enabled": st.sampled_from([True, "auto"]),
            "fp8__margin": st.integers(-8, 8),
            "optimizer__lr": POSITIVE,
            "optimizer__eps": POSITIVE,
            "optimizer__betas": st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
            "train__output": st.none() | WORD,
            "train__steps": st.integers(1, 2**63 - 1),
            "log__trackers": st.lists(st.sampled_from(["wandb", "trackio"]), max_size=2, unique=True),
        }
    )
)
def test_to_toml_reads_back_equal(changes):
    config = RunConfig.from_dict(values(**changes))
    text = config.to_toml()
    again = RunConfig.from_dict(tomllib.loads(text))
    assert again == config
    assert again.to_toml() == text


@pytest.mark.parametrize("text", ["a\x7fb", "é", 'a\u2028b\n"c"\\\t\x00', "\U0001f600 x", ""])
@pytest.mark.parametrize("where", ["value", "key", "inner key"])
def test_any_text_survives_to_toml(text, where):
    table = {"value": {"k": text}, "key": {f"k{text}": 1}, "inner key": {"k": {text: [text]}}}[where]
    config = RunConfig.from_dict(values(model__config=table))
    assert tomllib.loads(config.to_toml())["model"]["config"] == table


@pytest.mark.parametrize("number", [math.inf, -math.inf, 1e300, 5e-324, -0.0, 0.1, 1e22])
def test_any_float_survives_to_toml(number):
    config = RunConfig.from_dict(values(model__config={"k": number, "list": [0.0, number], "table": {"k": number}}))
    found = tomllib.loads(config.to_toml())["model"]["config"]
    assert [repr(n) for n in (found["k"], *found["list"], found["table"]["k"])] == [
        repr(n) for n in (number, 0.0, number, number)
    ]


def test_false_asks_for_nothing_where_a_key_is_unset_by_default():
    config = RunConfig.from_dict(values(fp8__enabled=False, fp8__head=False, fp8__fast_accumulation=False))
    assert "head" not in tomllib.loads(config.to_toml())["fp8"]
    with pytest.raises(InputError, match=r"fp8\.head = \"backward\" has no effect with fp8\.enabled = false"):
        RunConfig.from_dict(values(fp8__enabled=False, fp8__head="backward"))


@pytest.mark.parametrize("given", ["train__epochs", "train__tokens"])
def test_two_lengths_of_a_run_are_refused_with_the_one_that_is_set(given):
    key = given.replace("__", ".")
    words = rf"train\.steps = 4 has no effect with {key} = 3[.0]*: it needs a run without train\.tokens and train\.epochs"
    with pytest.raises(InputError, match=words):
        RunConfig.from_dict(values(train__steps=4, **{given: 3}))
