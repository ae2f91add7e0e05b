"""What the tests of `octavo verify` run: its tasks on ranks that are started already, with a fault on those of the layout."""

import contextlib
import dataclasses
import tempfile
from pathlib import Path
from unittest import mock

import ranks
from octavo.config.degrees import DEGREES, fit_degrees
from octavo.config.run import RunConfig
from octavo.models.families import spec_of
from octavo.models.sources import load_config
from octavo.verify import certificate, worker

RUN = {
    "data": {"source": "python:docstrings", "sequence_length": 64},
    "train": {"steps": 3, "global_batch": 8, "output": "runs/never"},
}
ALONE = {"hybrid_shard_degree": 0, **dict.fromkeys(DEGREES[1:], 1)}
PACKED = {"mistral-7b"}


def run_of(source, **sections):
    """A run file; Mistral's has documents."""
    sections = {**RUN, "model": {"source": source}, **sections}
    if source in PACKED:
        sections["data"] = sections["data"] | {"packing": "documents"}
    return RunConfig.from_dict(sections)


def comparisons(config, world, degrees, *, kinds=("plain", "fp8"), seeds=(3,), fault=None):
    """The comparisons of a layout by `precision, beside what`."""
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={**ALONE, **degrees})})
    fitted = fit_degrees(**{**ALONE, **{key: value for key, value in degrees.items() if key in ALONE}}, world_size=world)
    spec, found = spec_of(load_config(config.model.source, config.model.config)), {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (size, task) in certificate.tasks(config, fitted, spec, Path(folder), seeds).items():
            kind, what = name.split()
            if kind in kinds:
                planted = fault if what == "layout" else None
                found[name] = ranks.run(size, results, dataclasses.asdict(task), planted)[0]
    return {f"{each.precision}, {each.beside}": each for each in certificate.compared(found, config, fitted, spec)}


def results(task, name=None):
    """Results of a task, with a fault of `faults` by its name; of rank 0 alone, as the others' are the same."""
    with contextlib.ExitStack() as stack:
        if name is not None:
            from faults import FAULTS, NOT_COMPARED

            for owner, attribute, fault in (FAULTS | NOT_COMPARED)[name].planted:
                stack.enter_context(mock.patch.object(owner, attribute, fault(getattr(owner, attribute))))
        found = worker.results(worker.Task(**task))
    return found if worker.state.rank == 0 else None
