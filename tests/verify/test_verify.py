"""`octavo verify`: right layouts are equal, faults are found and named, and wrong questions are refused."""

import dataclasses
import json
import subprocess
import sys

import pytest
from verified import results

import ranks
from octavo.config.degrees import DEGREES, fit_degrees
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.models.families import spec_of
from octavo.models.sources import load_config
from octavo.verify import certificate, small
from octavo.verify.compare import differences, is_record

pytestmark = ranks.alone

RUN = {
    "data": {"source": "python:docstrings", "sequence_length": 64},
    "train": {"steps": 3, "global_batch": 8, "output": "runs/never"},
}
ALONE = {"hybrid_shard_degree": 0, **dict.fromkeys(DEGREES[1:], 1)}
WORDS = {"llama-1b": {}, "mistral-7b": {"packing": "documents"}, "mixtral-8x7b": {}, "gpt-neox-20b": {}}


def run_of(source, **sections):
    config = RunConfig.from_dict({**RUN, "model": {"source": source}, **sections})
    return config.model_copy(update={"data": config.data.model_copy(update=WORDS.get(source, {}))})


def compared(config, world, degrees, *, fp8, fault=None):
    """Differences of a layout from its data-parallel ranks (without FP8: from one), of one seed."""
    fitted = fit_degrees(**{**ALONE, **degrees}, world_size=world)
    found = []
    for layout, size, name in (({**ALONE, **degrees}, world, fault), (ALONE, fitted.data if fp8 else 1, None)):
        run = config.model_dump(mode="json")
        run["parallel"] |= layout
        task = {"run": run, "like": dataclasses.asdict(fitted), "fp8": fp8, "data": fitted.data, "seeds": [3]}
        found.append(ranks.run(size, results, task, name)[0])
    exact = not fp8 or certificate.casts_alike(config, fitted)
    return differences(*found, certificate.EQUAL if exact else certificate.ALIKE)


TENSOR = {"tensor_parallel_degree": 2}
LAYOUTS = [
    ("llama-1b", 2, {}, False),
    ("llama-1b", 2, TENSOR, True),
    ("mistral-7b", 4, TENSOR | {"context_parallel_degree": 2}, True),
    ("mixtral-8x7b", 4, TENSOR | {"expert_parallel_degree": 2}, True),
    ("mixtral-8x7b", 2, {"expert_parallel_degree": 2}, False),
    ("gpt-neox-20b", 2, {"context_parallel_degree": 2}, True),
]


@pytest.mark.parametrize(("source", "world", "degrees", "fp8"), LAYOUTS)
def test_a_layout_is_equal(source, world, degrees, fp8):
    found = compared(run_of(source), world, degrees, fp8=fp8)
    assert [each for each in found if not each.within] == []
    kept = {"gradient", "loss", "norm", "parameter", "exp_avg", "exp_avg_sq"}
    assert {each.name.split()[0] for each in found} == (kept | {"history"} if fp8 else kept)
    assert sum(is_record(each.name) for each in found) == (26 if fp8 else 0)


@pytest.mark.parametrize(
    "section", [{"recompute": True}, {"recompute": "selective"}, {"offload": True}, {"mlp_chunks": 2}], ids=str
)
@pytest.mark.long(lambda section: section != {"recompute": True})
def test_what_the_run_recomputes_and_offloads_is_equal(section):
    config = run_of("llama-1b", train=RUN["train"] | section)
    assert all(each.within for each in compared(config, 2, TENSOR, fp8=True))


@pytest.mark.parametrize("source", ["llama-1b", "mixtral-8x7b"])
def test_scales_of_current_scaling_are_equal(source):
    found = compared(run_of(source, fp8={"recipe": "current"}), 2, TENSOR, fp8=True)
    assert [each for each in found if not each.within] == []
    assert sum(each.name.startswith("scale ") for each in found) == 26


@pytest.mark.parametrize(
    ("source", "degrees", "recipe"),
    [
        ("mixtral-8x7b", {"expert_parallel_degree": 2}, "delayed"),
        ("llama-1b", {"context_parallel_degree": 2}, "rowwise"),
        ("mixtral-8x7b", TENSOR, "rowwise"),
    ],
)
def test_casts_that_are_others_by_rule_are_bounded(source, degrees, recipe):
    found = compared(run_of(source, fp8={"recipe": recipe}), 2, degrees, fp8=True)
    assert [each for each in found if not each.within and not is_record(each.name)] == []
    assert max(each.error for each in found if each.name.startswith("gradient ")) > certificate.EQUAL.tensor


NAMED = {
    "norms' gradients are not summed": "gradient layers.0.ffn.layernorm.weight",
    "replicated parameters count twice in the norm": "norm of step 1",
    "a target at a seam is nobody's": "gradient embedding.weight",
    "amaxes of the histories are not joined": "gradient ",
    "gate and up are cut in wrong blocks": "gradient ",
}


@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_is_found_and_named(fault):
    model = {"source": "llama-1b", "config": {"intermediate_size": 224}}  # 3.5 blocks of gate and up a rank
    found = compared(run_of("llama-1b", model=model), 2, TENSOR, fp8="amax" in fault, fault=fault)
    first = next(each for each in found if not each.within)
    assert first.name.startswith(NAMED[fault]), first


@pytest.mark.parametrize("source", ["llama-8b", "mistral-7b", "mixtral-8x7b", "gpt-neox-20b", "llama-70b"])
@pytest.mark.parametrize(
    "degrees", [{}, TENSOR, {"tensor_parallel_degree": 4}, TENSOR | {"context_parallel_degree": 2}], ids=str
)
def test_a_small_model_is_divided_as_the_large_one(source, degrees):
    world = 8
    fitted, config = fit_degrees(**{**ALONE, **degrees}, world_size=world), load_config(source, {})
    spec, found = spec_of(config), spec_of(small.small_config(config, spec_of(config), fitted))
    parts = fitted.tensor * fitted.context
    assert found.heads % parts == 0
    assert (found.kv_heads % fitted.tensor == 0) == (spec.kv_heads % fitted.tensor == 0)
    assert (found.heads > found.kv_heads) == (spec.heads > spec.kv_heads)
    assert found.ffn_size // fitted.tensor % 128 == spec.ffn_size // fitted.tensor % 128
    assert found.vocabulary % (16 * fitted.tensor) == spec.vocabulary % (16 * fitted.tensor)
    assert small.length(fitted) % (2 * parts) == 0
    assert (found.tied, found.parallel, found.qkv_bias, found.family) == (spec.tied, spec.parallel, spec.qkv_bias, spec.family)
    windows = {window for window in found.windows if window is not None}
    assert bool(windows) == any(window is not None for window in spec.windows)
    assert all(window < small.length(fitted) for window in windows)
    assert found.layers <= 4
    assert found.hidden_size <= 512


def test_degrees_of_the_file_are_lowered_and_those_that_are_given_are_not():
    config = run_of("llama-1b", parallel={"hybrid_shard_degree": 8, "tensor_parallel_degree": 4})
    lowered, said = certificate._lowered(config, 2, ())
    assert (lowered.parallel.hybrid_shard_degree, lowered.parallel.tensor_parallel_degree) == (1, 2)
    assert len(said) == 2
    with pytest.raises(InputError, match="do not fit 2 ranks"):
        certificate.verify(config, 2, given=["parallel.tensor_parallel_degree"])


def test_a_model_that_keeps_its_own_code_is_refused():
    with pytest.raises(InputError, match='llama keeps its own code: blocks = "own"'):
        certificate.verify(run_of("llama-1b", model={"source": "llama-1b", "blocks": "own"}), 2)


def test_one_rank_is_no_layout():
    with pytest.raises(InputError, match="--ranks 1"):
        certificate.verify(run_of("llama-1b"), 1)


def test_the_command(tmp_path):
    run = tmp_path / "run.toml"
    sections = ('[model]\nsource = "llama-1b"', '[data]\nsource = "python:docstrings"\nsequence_length = 64')
    run.write_text("\n".join([*sections, "[train]\nsteps = 3\nglobal_batch = 4\n"]))
    output = tmp_path / "found.json"
    command = ["octavo", "verify", str(run), "parallel.tensor_parallel_degree=2", "--output", str(output)]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "equal    delayed scaling, beside one rank" in done.stdout
    found = json.loads(output.read_text())
    assert found["verified"]
    assert [each["beside"] for each in found["comparisons"]] == ["one rank", "one rank"]
    errors = found["comparisons"][1]["errors"]
    assert len(errors) > 200
    assert next(iter(errors)).startswith("gradient embedding.weight")
    assert "GPU" in found["not_covered"]
