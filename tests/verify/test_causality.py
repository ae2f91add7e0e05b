"""`octavo verify --causality`: no later token, other sequence or document before changes a bit of a logit, in any layout."""

import dataclasses
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from causality_faults import DOCUMENT, LATER, LEAKS, RANKS, SEQUENCES
from verified import ALONE, run_of

import ranks
from faults import CONTEXT, EXPERT, HEADS, RING, TENSOR
from octavo.arguments import check_fuzz
from octavo.config.degrees import fit_degrees
from octavo.errors import InputError
from octavo.models.families import spec_of
from octavo.models.sources import load_config
from octavo.verify import certificate, worker


def results(task, name):
    """Of a task; name: of a leak that is planted."""
    with mock.patch.object(worker.small, "LAST", 3):  # no step after the first ones
        if name is None:
            return worker.results(worker.Task(**task))
        leak = LEAKS[name]
        with mock.patch.object(leak.owner, leak.name, leak.fault(getattr(leak.owner, leak.name))):
            return worker.results(worker.Task(**task))


def causality(config, world, degrees, *, leak=None, kinds=("plain", "fp8")):
    """The comparisons by causality of a layout, by kind, and the differences of each by the change."""
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={**ALONE, **degrees})})
    fitted = fit_degrees(**{**ALONE, **{key: n for key, n in degrees.items() if key in ALONE}}, world_size=world)
    spec, found = spec_of(load_config(config.model.source, config.model.config)), {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (size, task) in certificate.tasks(config, fitted, spec, Path(folder), (3,), causality=True).items():
            kind, what = name.split()
            if kind in kinds and what == "layout" and "narrow" not in kind:
                alone = dataclasses.replace(task, saves=None, loads=None, then=None, further=False)
                every = ranks.run(size, results, dataclasses.asdict(alone), leak)[0]["causality"]
                found[kind] = certificate.causal(every, kind, spec)
    return found


def changes(comparison):
    return [each.name.partition(" by ")[2].partition(",")[0] for each in comparison.differences]


@pytest.mark.parametrize(
    ("source", "world", "degrees"),
    [
        ("llama-1b", 2, TENSOR),
        ("llama-1b", 4, {"hybrid_shard_degree": 2}),
        ("llama-1b", 2, CONTEXT),
        ("llama-1b", 2, RING),
        ("llama-1b", 2, HEADS),
        ("mistral-7b", 2, HEADS),
        ("mistral-7b", 4, TENSOR | CONTEXT),
        ("mixtral-8x7b", 2, EXPERT),
        ("mixtral-8x7b", 2, TENSOR | EXPERT),
        ("gpt-neox-20b", 2, TENSOR),
    ],
)
@pytest.mark.long(lambda source, degrees: (source, degrees) != ("llama-1b", TENSOR))
def test_logits_depend_on_earlier_tokens_of_their_document_alone(source, world, degrees):
    for found in causality(run_of(source), world, degrees).values():
        several = not {"tensor_parallel_degree", "context_parallel_degree"} & degrees.keys()
        assert changes(found) == [LATER, SEQUENCES, *[RANKS] * several, *[DOCUMENT] * (source == "mistral-7b")]
        assert found.first is None
        assert found.largest.error == 0.0 or source == "mixtral-8x7b"


@pytest.mark.long(lambda name: name not in ("a mask shifted by one", "a later chunk is exchanged"))
@pytest.mark.parametrize("name", LEAKS)
def test_a_planted_leak_is_found(name):
    leak = LEAKS[name]
    first = causality(run_of(leak.source), 2, leak.degrees, leak=name, kinds=[leak.kind])[leak.kind].first
    assert first.name.startswith("logits of token ")
    assert first.name.partition(" by ")[2].startswith(leak.found_by)
    assert first.error > 1e-6


def test_the_least_leak_is_found_and_named():
    found = {
        "later tokens, seed 3": torch.tensor([2.0**-60, 4, 6], dtype=torch.float64),
        "other sequences, seed 3": torch.tensor([0.0, 0, -1], dtype=torch.float64),
    }
    dense, experts = (spec_of(load_config(source, {})) for source in ("llama-1b", "mixtral-8x7b"))
    comparison = certificate.causal(found, "plain", dense)
    assert comparison.first.name == "logits of token 4 by later tokens (others from token 6 on), seed 3"
    assert certificate.causal(found, "plain", experts).first is None
    found["other sequences, seed 3"][0] = 1e-3
    assert certificate.causal(found, "plain", experts).first.name == "logits of token 0 by other sequences, seed 3"


@pytest.mark.long
def test_current_scaling_is_not_causal_by_definition():
    config = run_of("llama-1b", fp8={"recipe": "current"})
    found = causality(config, 2, TENSOR)
    assert found["plain"].first is None
    assert found["fp8"].first is not None  # so nothing is claimed of it
    assert certificate.sets_scales_of_others(config)
    for recipe in ("delayed", "rowwise", "block"):
        assert not certificate.sets_scales_of_others(run_of("llama-1b", fp8={"recipe": recipe}))


@pytest.mark.parametrize("recipe", ["rowwise", "block"])
@pytest.mark.parametrize("degrees", [TENSOR, CONTEXT], ids=["tensor", "context"])
@pytest.mark.long
def test_scales_of_rows_and_of_blocks_are_of_their_token(recipe, degrees):
    for found in causality(run_of("llama-1b", fp8={"recipe": recipe}), 2, degrees).values():
        assert (found.first, found.largest.error) == (None, 0.0)


def test_it_goes_with_a_run_file_on_cpus():
    for options, name in (({"gpu": True}, "--gpu"), ({"cases": 3}, "--fuzz")):
        given = {"run_file": None if "cases" in options else "run.toml", "cases": None, "seed": None, "gpu": False} | options
        with pytest.raises(InputError, match=f"leave {name} out"):
            check_fuzz(**given, causality=True)
