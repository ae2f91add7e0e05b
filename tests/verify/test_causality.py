"""`octavo verify --causality`: no later token, other sequence or document before changes a logit, in any layout."""

import dataclasses
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from verified import ALONE, run_of

import ranks
from octavo.arguments import check_fuzz
from octavo.config.degrees import fit_degrees
from octavo.errors import InputError
from octavo.models import decoder
from octavo.models.families import spec_of
from octavo.models.sources import load_config
from octavo.verify import certificate, worker

pytestmark = ranks.alone

TENSOR = {"tensor_parallel_degree": 2}


def results(task, leaks):
    """Of a task; leaks: attention takes all documents for one."""
    with mock.patch.object(worker.small, "LAST", 3):  # no step behind the first ones
        if not leaks:
            return worker.results(worker.Task(**task))
        found = decoder.pattern_of

        def one_document(position_ids, *arguments, **options):
            return found(None, *arguments, **options)

        with mock.patch.object(decoder, "pattern_of", one_document):
            return worker.results(worker.Task(**task))


def causality(config, world, degrees, *, leaks=False):
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={**ALONE, **degrees})})
    fitted = fit_degrees(**{**ALONE, **degrees}, world_size=world)
    spec, found = spec_of(load_config(config.model.source, config.model.config)), {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (size, task) in certificate.tasks(config, fitted, spec, Path(folder), (3,), causality=True).items():
            if name in ("plain layout", "fp8 layout"):
                alone = dataclasses.replace(task, saves=None, loads=None, then=None)
                found[name] = ranks.run(size, results, dataclasses.asdict(alone), leaks)[0]["causality"]
    return {kind: {name.split(",")[0]: value.item() for name, value in each.items()} for kind, each in found.items()}


@pytest.mark.parametrize(
    ("source", "world", "degrees"),
    [
        ("llama-1b", 2, TENSOR),
        ("mistral-7b", 4, TENSOR | {"context_parallel_degree": 2}),
        ("mixtral-8x7b", 2, {"expert_parallel_degree": 2}),
    ],
)
@pytest.mark.long(lambda source: source != "llama-1b")
def test_logits_depend_on_earlier_tokens_of_their_document_alone(source, world, degrees):
    for found in causality(run_of(source), world, degrees).values():
        wanted = ["later tokens", "other sequences", *["the document before"][: source == "mistral-7b"]]
        assert list(found) == [f"logits behind a change of {name}" for name in wanted]
        assert max(found.values()) <= certificate.EQUAL.tensor


def test_a_leak_between_documents_is_found():
    found = causality(run_of("mistral-7b"), 2, {"context_parallel_degree": 2}, leaks=True)["plain layout"]
    assert found["logits behind a change of the document before"] > 1e-3
    assert found["logits behind a change of later tokens"] <= certificate.EQUAL.tensor


@pytest.mark.long
def test_current_scaling_is_not_causal_by_definition():
    config = run_of("llama-1b", fp8={"recipe": "current"})
    found = causality(config, 2, TENSOR)
    assert max(found["plain layout"].values()) <= certificate.EQUAL.tensor
    assert max(found["fp8 layout"].values()) > certificate.EQUAL.tensor  # so nothing is claimed of it
    assert certificate.sets_scales_of_others(config)
    for recipe in ("delayed", "rowwise", "block"):
        assert not certificate.sets_scales_of_others(run_of("llama-1b", fp8={"recipe": recipe}))


@pytest.mark.parametrize("recipe", ["rowwise", "block"])
@pytest.mark.long
def test_scales_of_rows_and_of_blocks_are_of_their_token(recipe):
    for found in causality(run_of("llama-1b", fp8={"recipe": recipe}), 2, TENSOR).values():
        assert max(found.values()) <= certificate.EQUAL.tensor


def test_it_goes_with_a_run_file_on_cpus():
    for options, name in (({"gpu": True}, "--gpu"), ({"cases": 3}, "--fuzz")):
        given = {"run_file": None if "cases" in options else "run.toml", "cases": None, "seed": None, "gpu": False} | options
        with pytest.raises(InputError, match=f"leave {name} out"):
            check_fuzz(**given, causality=True)
