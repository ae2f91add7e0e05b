"""`train.verify`: a run's first start asks for what `octavo verify` has found of its layout."""

import dataclasses
import json
from unittest import mock

import datasets
import pytest
from rich.console import Console
from transformers import AutoConfig

import ranks
from octavo.cli import main
from octavo.config.degrees import fit_degrees
from octavo.config.optimizer import OptimizerConfig
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.plan.verified import refuse_unverified, verified_keys, versions
from octavo.run.metrics import read_metrics
from octavo.train.trainer import Trainer

GIVEN = [
    "optimizer.schedule=constant",
    "parallel.tensor_parallel_degree=2",
    "model.config.attention_dropout=0.0",
    "fp8.enabled=false",
]


def trained(file, overrides):
    """What is refused; empty for a run that has trained."""
    try:
        Trainer(RunConfig.from_file(file, overrides), console=Console(quiet=True)).train()
    except InputError as error:
        return str(error)
    return ""


def written(path, config, degrees, **changes):
    found = versions() | {"degrees": dataclasses.asdict(degrees), "keys": verified_keys(config), "verified": True}
    path.write_text(json.dumps(found | changes))


def test_a_run_starts_with_its_certificate_and_continues_without(tiny_run):
    tiny = tiny_run(steps=4, every=2)
    path = tiny.folder / "found.json"
    given = [*GIVEN, f"train.verify={json.dumps(str(path))}"]
    assert (
        f"found.json does not exist. Run octavo verify RUN.toml --ranks 2 --output {path}"
        in ranks.run(2, trained, tiny.file, given)[0]
    )
    assert not list(tiny.output.glob("*.jsonl"))
    config = RunConfig.from_file(tiny.file, given)
    degrees = fit_degrees(world_size=2, tensor_parallel_degree=2)
    written(path, config, degrees, verified=False)
    assert "reports that the layout differs from one rank" in ranks.run(2, trained, tiny.file, given)[0]
    written(path, config, degrees)
    assert ranks.run(2, trained, tiny.file, [*given, "train.steps=2"]) == ["", ""]
    path.unlink()
    assert ranks.run(2, trained, tiny.file, [*given, "train.steps=4"]) == ["", ""]  # not its first start
    assert len(read_metrics(tiny.output / "metrics.jsonl")) == 4


def trained_on_a_set_of_the_hub(file, overrides):
    texts = [{"text": f"{n} sheep sleep, and {n % 7} do not. " * 20} for n in range(200)]
    with mock.patch("datasets.load_dataset", return_value=datasets.Dataset.from_list(texts)):
        return trained(file, [*overrides, "data.source=someone/texts", "data.split=train"])


@pytest.mark.long
def test_packing_that_only_prepared_data_tell_is_compared_then(tiny_run, tmp_path):
    tiny, path = tiny_run(steps=1), tmp_path / "verify.json"
    folder = json.dumps(str(tmp_path / "data"))
    given = [*GIVEN, f"train.verify={json.dumps(str(path))}", f"data.folder={folder}", "data.validation_fraction=0.1"]
    config, degrees = RunConfig.from_file(tiny.file, given), fit_degrees(world_size=2, tensor_parallel_degree=2)
    written(path, config.model_copy(update={"data": config.data.model_copy(update={"packing": "documents"})}), degrees)
    said = ranks.run(2, trained_on_a_set_of_the_hub, tiny.file, given)
    assert all('verified data.packing = "documents", but the run has "join". Run' in each for each in said)
    assert (tmp_path / "data").is_dir()  # prepared
    written(path, config, degrees)
    assert ranks.run(2, trained_on_a_set_of_the_hub, tiny.file, given) == ["", ""]


def test_what_is_of_another_run_is_named(tiny_run, tmp_path):
    path = tmp_path / "verify.json"
    tiny = tiny_run()
    config = RunConfig.from_file(tiny.file, [*GIVEN, f"train.verify={json.dumps(str(path))}"])
    of_many = fit_degrees(world_size=16, tensor_parallel_degree=2)

    def said(other=config, degrees=of_many, **changes):
        written(path, other, degrees, **changes)
        with pytest.raises(InputError) as error:
            refuse_unverified(config, of_many)
        return str(error.value)

    written(path, config, fit_degrees(world_size=4, tensor_parallel_degree=2))
    refuse_unverified(config, of_many)  # fewer shards
    documents = config.model_copy(update={"data": config.data.model_copy(update={"packing": "documents"})})
    written(path, documents, of_many)
    refuse_unverified(config, of_many)  # the data are not prepared: they may be packed so
    joined = config.model_copy(update={"data": config.data.model_copy(update={"packing": "join"})})
    with pytest.raises(InputError, match=r'verified data\.packing = "documents", but the run has "join"'):
        refuse_unverified(joined, of_many)
    written(path, config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 0.5})}), of_many)
    refuse_unverified(config, of_many)
    for override, text in (
        ("train.recompute=true", "verified train.recompute = true, but the run has false"),
        ("model.config.intermediate_size=96", "verified model.config.intermediate_size = 96, but the run has"),
        ("optimizer.name=muon", 'verified optimizer.name = "muon", but the run has "adamw"'),
        ("optimizer.layer_decay=0.5", "verified optimizer.layer_decay = 0.5, but the run has 1.0"),
        ("optimizer.clip=0.0", 'verified optimizer.clip = 0, but the run has "above 0"'),
        ("parallel.reduce_dtype=bfloat16", 'verified parallel.reduce_dtype = "bfloat16", but the run has "float32"'),
    ):
        assert text in said(RunConfig.from_file(tiny.file, [*GIVEN, override]))
    tables = ({"*.fc1": 0.5, "*.0.*": 0.25}, {"*.0.*": 0.25, "*.fc1": 0.5})
    in_order, other = (config.model_copy(update={"optimizer": OptimizerConfig(rates=rates)}) for rates in tables)
    assert "verified optimizer.rates = " in said(in_order)
    written(path, in_order, of_many)
    refuse_unverified(in_order, of_many)
    with pytest.raises(InputError, match=r"verified optimizer\.rates = .*, but the run has .*, with the run's other keys"):
        refuse_unverified(other, of_many)  # whose last pattern, which wins, is another
    assert "was written by Octavo 0.0.9, but the run has" in said(version="0.0.9")
    assert "was written by PyTorch 2.1.0, but the run has" in said(torch="2.1.0")
    assert "was written by Octavo of an unknown version" in said(version=None)
    assert "verified tensor degree 4, but the run has 2" in said(degrees=fit_degrees(world_size=16, tensor_parallel_degree=4))
    assert "verified shard degree 1, but the run has 8. Run octavo verify RUN.toml --ranks 4" in said(
        degrees=fit_degrees(world_size=2, tensor_parallel_degree=2)
    )
    whole = json.loads(path.read_text())
    others = ({"verified": "no"}, {"keys": []}, {"degrees": {}}, {"degrees": whole["degrees"] | {"tensor": "2"}})
    for text in ("{}", "[]", "3", *(json.dumps(whole | other) for other in others)):
        path.write_text(text)
        with pytest.raises(InputError, match="is not a report of octavo verify about a run's layout"):
            refuse_unverified(config, of_many)
    path.write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        refuse_unverified(config, of_many)
    refuse_unverified(config, fit_degrees(world_size=1))  # one rank has no layout


def test_a_model_whose_config_has_changed_is_named(tiny_run, tmp_path):
    tiny, path, source = tiny_run(), tmp_path / "verify.json", tmp_path / "model"
    keys = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512}
    AutoConfig.for_model("llama", **keys).save_pretrained(source)
    given = [f"model.source={json.dumps(str(source))}", "fp8.enabled=false", f"train.verify={json.dumps(str(path))}"]
    config = RunConfig.from_file(tiny.file, given).model_copy()
    config = config.model_copy(update={"model": config.model.model_copy(update={"config": {}})})
    degrees = fit_degrees(world_size=2, tensor_parallel_degree=2)
    written(path, config, degrees)
    refuse_unverified(config, degrees)
    other = AutoConfig.for_model("llama", **keys | {"num_key_value_heads": 1})
    other.save_pretrained(source)
    with pytest.raises(InputError, match=r"verified model\.config\.num_key_value_heads = 2, but the run has 1\. Run"):
        refuse_unverified(config, degrees)
    AutoConfig.for_model("llama", **keys).save_pretrained(tmp_path / "moved")
    moved = config.model_copy(update={"model": config.model.model_copy(update={"source": str(tmp_path / "moved")})})
    refuse_unverified(moved, degrees)  # the same model


def test_a_layout_of_more_ranks_than_are_verified_is_named(tiny_run, tmp_path):
    config = RunConfig.from_file(tiny_run().file, [*GIVEN, f"train.verify={json.dumps(str(tmp_path / 'verify.json'))}"])
    with pytest.raises(InputError, match=r"starts at most 256 processes, and this run's .* degrees need 512"):
        refuse_unverified(config, fit_degrees(world_size=1024, tensor_parallel_degree=16, context_parallel_degree=16))


@pytest.mark.parametrize(
    ("given", "ranks_and_keys"),
    [
        ({"world_size": 64}, (2, [])),
        ({"world_size": 64, "hybrid_shard_degree": 8}, (4, ["hybrid_shard_degree=2"])),
        (
            {"world_size": 8, "tensor_parallel_degree": 2, "context_parallel_degree": 4},
            (8, ["tensor_parallel_degree=2", "context_parallel_degree=4"]),
        ),
        (
            {"world_size": 64, "hybrid_shard_degree": 8, "expert_parallel_degree": 8},
            (16, ["hybrid_shard_degree=8", "expert_parallel_degree=8"]),
        ),
        (
            {"world_size": 16, "tensor_parallel_degree": 2, "expert_parallel_degree": 4},
            (4, ["tensor_parallel_degree=2", "expert_parallel_degree=4"]),
        ),
    ],
)
def test_the_command_that_is_named_verifies_these_degrees(given, ranks_and_keys, tiny_run, tmp_path):
    config = RunConfig.from_file(tiny_run().file, [*GIVEN, f"train.verify={json.dumps(str(tmp_path / 'verify.json'))}"])
    world, keys = ranks_and_keys
    degrees = fit_degrees(**given)
    with pytest.raises(InputError) as error:
        refuse_unverified(config, degrees)
    command = str(error.value).partition("Run ")[2].partition(", or set")[0]
    parallel = [f"parallel.{key}" for key in keys]
    assert command.split() == [
        "octavo",
        "verify",
        "RUN.toml",
        "--ranks",
        str(world),
        "--output",
        str(tmp_path / "verify.json"),
        *parallel,
    ]
    named = fit_degrees(world_size=world, **{key: int(size) for key, _, size in (each.partition("=") for each in keys)})
    written(tmp_path / "verify.json", config, named)
    refuse_unverified(config, degrees)


@pytest.mark.long
def test_what_the_command_finds_lets_the_run_start(tiny_run):
    tiny = tiny_run(steps=2)
    path = tiny.folder / "verify.json"
    assert main(["verify", str(tiny.file), "--ranks", "2", "--output", str(path), *GIVEN]) == 0
    assert ranks.run(2, trained, tiny.file, [*GIVEN, f"train.verify={json.dumps(str(path))}"]) == ["", ""]
