"""Run files: keys, values and limits, and the resolved file."""

import json
import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from minimal_run import MINIMAL, message, values

from octavo.config.effects import without_effect
from octavo.config.lora import LoRA
from octavo.config.parallel import InitConfig
from octavo.config.run import RunConfig, known_keys
from octavo.data.order import SampleOrder
from octavo.errors import InputError
from octavo.parallel.world import seed_everything
from octavo.storage import path_fault

PRESETS = sorted((Path(__file__).parents[2] / "presets").glob("*.toml"))


def test_defaults(run_file):
    config = RunConfig.from_file(run_file)
    assert config.train.output == "runs/my-run"
    assert config.output == Path("runs/my-run")
    assert (config.model.dtype, config.model.params_dtype, config.model.load) == ("bfloat16", "float32", False)
    assert (config.data.packing, config.data.tokenizer, config.data.text_field) == (None, "train", "text")
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
    unset = {
        "data.packing",
        "data.overlong",
        "data.max_documents",
        "data.max_tokens",
        "parallel.param_dtype",
        "train.micro_batch",
    }
    unset |= {"fp8.head", "fp8.fast_accumulation", "train.tokens", "train.epochs", "train.sample_prompt"}
    unset |= {"data.format", "data.chat_template", "data.chat_template_variables"}
    unset |= {"data.validation_source", "lora.rank"} | {key for key in known_keys() if key.startswith("moe.")}
    idle = {
        "model.resize",
        "data.weights",
        "data.validation_split",
        "optimizer.decay_steps",
        *(f"optimizer.{key}" for key in ("adamw_lr", "muon_scale", "muon_momentum", "muon_nesterov")),
        "train.early_stopping",
        "checkpoint.best",
        "checkpoint.best_is",
        *(f"train.eval_{key}" for key in ("tasks", "limit", "shots", "batch")),
        *(f"optimizer.{key}" for key in ("muon_scale", "muon_momentum", "muon_nesterov", "adamw_lr")),
        "data.text_field",
        "data.subset",
        "data.split",
        "fp8.use_power_2_scales",
        *(key for key in known_keys() if key.startswith("lora.") and key != "lora.rank"),
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
        (
            {"xyzzy__lr": 1.0},
            ["unknown section xyzzy", "model, data, parallel, moe, fp8, lora, optimizer, train, checkpoint, log"],
        ),
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
        ({"data__weights": [1, 2]}, ["has 2 weights", "data.source has 1 source: give one weight per source"]),
        ({"data__source": ["a.txt", "b.txt"], "data__weights": [1]}, ["has 1 weight,", "has 2 sources", "[] joins"]),
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


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
WORD = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
NAME = WORD.filter(lambda text: not path_fault(text))
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@settings(deadline=None, max_examples=60, report_multiple_bugs=False)
@given(
    st.fixed_dictionaries(
        {
            "model__source": NAME,
            "model__config": st.dictionaries(WORD, JSON, max_size=4),
            "data__source": NAME | st.lists(NAME, max_size=3),
            "data__max_tokens": st.none() | st.integers(2, 2**63 - 1),
            "fp8__skip": st.lists(WORD, max_size=3),
            "fp8__enabled": st.sampled_from([True, "auto"]),
            "fp8__margin": st.integers(-8, 8),
            "optimizer__lr": POSITIVE,
            "optimizer__eps": POSITIVE,
            "optimizer__betas": st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2),
            "train__output": st.none() | NAME,
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
    needs = r"it needs a run without train\.tokens and train\.epochs\. Remove one of the two\."
    words = rf"train\.steps = 4 has no effect with {key} = 3[.0]*: {needs}"
    with pytest.raises(InputError, match=words):
        RunConfig.from_dict(values(train__steps=4, **{given: 3}))


ADAPTERS = {"peft_type": "LORA", "r": 6, "lora_alpha": 18, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]}


def test_adapters_to_begin_with_give_their_settings_where_these_are_absent(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({**ADAPTERS, "modules_to_save": ["lm_head"]}))
    load = str(tmp_path)
    found = RunConfig.from_dict(values(lora__load=load)).lora
    assert (found.rank, found.alpha, found.rslora, found.targets) == (6, 18.0, True, ["q_proj", "down_proj"])
    assert (found.save_whole, found.dropout) == (["lm_head"], 0.0)
    assert found.options == LoRA(load=load) == LoRA(6, 18.0, 0.0, ("q_proj", "down_proj"), True, ("lm_head",), load)
    given = RunConfig.from_dict(values(lora__load=load, lora__rank=4, lora__rslora=False, lora__targets=["q_proj"])).lora
    assert (given.rank, given.alpha, given.rslora, given.targets) == (4, 18.0, False, ["q_proj"])
    assert RunConfig.from_dict(RunConfig.from_dict(values(lora__load=load)).model_dump()).lora == found
    nowhere = str(tmp_path / "nowhere")
    assert "nowhere' is not a PEFT folder" in message(RunConfig.from_dict, values(lora__load=nowhere))
    assert RunConfig.from_dict(values(lora__load=nowhere, lora__rank=4)).lora.rank == 4  # it may be on the training machine
    (tmp_path / "adapter_config.json").write_text(json.dumps({**ADAPTERS, "use_dora": True}))
    assert "use_dora = True is not supported" in message(RunConfig.from_dict, values(lora__load=load))
