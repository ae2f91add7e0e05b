"""The comparisons that verify a layout, and their report.

Both compute in float64, where sums do not depend on their order (docs/numerics.md):

    without FP8         the layout beside one rank with the samples of all
    in the recipe       the layout beside its data-parallel ranks alone, which cast their own samples as the layout's do

Under delayed and current scaling all casts are the same then, and scales and histories are equal to the bit. Ranks have casts
of their own by rule under rowwise and block scaling, and where experts are spread over ranks with other samples: errors are
bounded by the format there, and scales are not compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from octavo.config.degrees import Degrees
from octavo.config.effects import with_values
from octavo.config.run import RunConfig
from octavo.errors import InputError, OctavoError
from octavo.models.families import decoder_spec
from octavo.models.sources import load_config
from octavo.plan.run import Target, check
from octavo.verify.compare import Bounds, Difference, differences, is_record
from octavo.verify.small import check_small, small_config
from octavo.verify.worker import Task
from octavo.watchdog.launcher import launch

EQUAL, ALIKE = Bounds(2.0**-22, 1e-10, 1e-10), Bounds(0.01, 0.1, 0.6)
"""In float64, and where casts are others by rule; seen there: losses 0.003, norms 0.03, the gradient of a router 0.41."""
SEEDS = [0, 1, 2]
NOT_COVERED = "kernels of GPUs, collectives beside products, precision that trains, dropout, sizes of the real model"
_ONE_SCALE = ("delayed", "current", "bf16")
_LAYOUT = ("hybrid_shard_degree", "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A layout in a precision beside another layout, and the differences. exact: their casts are the same."""

    precision: str
    beside: str
    exact: bool
    differences: Sequence[Difference]

    @property
    def first(self) -> Difference | None:
        """The first difference beyond its bound."""
        return next((each for each in self.differences if not each.within), None)

    @property
    def largest(self) -> Difference:
        """The largest error of a float64 tensor."""
        wide = (each for each in self.differences if not is_record(each.name) and not each.name.startswith("loss "))
        return max(wide, key=lambda each: each.error)


def verify(
    config: RunConfig, ranks: int, *, given: Sequence[str] = (), say: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, Any], list[str]]:
    """Verify the layout of a run on so many CPU ranks: the report as a dict and as lines of text.

    Args:
        config: the run. Its model, data and weights are not read.
        ranks: CPU ranks, two or more.
        given: keys from the command line. Their degrees must fit the ranks; those of the run file are lowered to divisors.
        say: shows progress.

    Raises:
        InputError: the run does not fit the ranks, or its model is not Octavo's decoder.
    """
    if ranks < 2:
        raise InputError(f"--ranks {ranks}: a layout has 2 ranks or more, which are compared with fewer.")
    hf_config = load_config(config.model.source, config.model.config)
    spec, reason = (None, 'blocks = "own"') if config.model.blocks == "own" else decoder_spec(hf_config)
    spec = check_small(spec, hf_config.model_type, reason)
    config, lowered = _lowered(config, ranks, given)
    # Samples are of `small`, and weights are random.
    run = with_values(config, {"train.global_batch": ranks, "train.micro_batch": 1, "model.load": False})
    degrees, comparisons = check(run, target=Target(world_size=ranks)).degrees, []
    with tempfile.TemporaryDirectory() as folder:
        runs = _Runs(Path(folder), config, degrees, say)
        comparisons.append(Comparison("without FP8", "one rank", True, runs.compared(1, fp8=False, bounds=EQUAL)))
        if config.fp8.enabled is not False and max(degrees.tensor, degrees.context, degrees.expert) > 1:
            exact = casts_alike(config, degrees)
            found = runs.compared(degrees.data, fp8=True, bounds=EQUAL if exact else ALIKE)
            beside = "one rank" if degrees.data == 1 else f"{degrees.data} data-parallel ranks"
            kept = [each for each in found if exact or not is_record(each.name)]
            comparisons.append(Comparison(f"{config.fp8.recipe} scaling", beside, exact, kept))
    small = small_config(hf_config, spec, degrees)
    figures = {
        "ranks": ranks,
        "degrees": dataclasses.asdict(degrees),
        "model": {key: getattr(small, key) for key in _SHOWN if getattr(small, key, None) is not None},
        "verified": all(each.first is None for each in comparisons),
        "comparisons": [_figures(each) for each in comparisons],
        **({"lowered": lowered} if lowered else {}),
        "not_covered": NOT_COVERED,
    }
    return figures, [_head(figures), *lowered, *map(_line, comparisons), f"not covered: {NOT_COVERED}"]


def casts_alike(config: RunConfig, degrees: Degrees) -> bool:
    """True if a layout casts as its data-parallel ranks alone: by one scale a tensor, its experts within tensor groups."""
    return {config.fp8.recipe, *config.fp8.layers.values()} <= set(_ONE_SCALE) and degrees.tensor % degrees.expert == 0


def _lowered(config: RunConfig, ranks: int, given: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """The run with degrees of its file lowered to what divides the ranks, and a line for each that was."""
    parallel = config.parallel
    tensor = math.gcd(parallel.tensor_parallel_degree, ranks)
    shards = parallel.hybrid_shard_degree and math.gcd(parallel.hybrid_shard_degree, ranks // tensor)
    whole = shards or ranks // tensor
    fitting = {
        "tensor_parallel_degree": tensor,
        "hybrid_shard_degree": shards,
        "context_parallel_degree": math.gcd(parallel.context_parallel_degree, whole),
        "expert_parallel_degree": math.gcd(parallel.expert_parallel_degree, whole * tensor),
    }
    lower = {
        f"parallel.{key}": value
        for key, value in fitting.items()
        if value != getattr(parallel, key) and f"parallel.{key}" not in given
    }
    said = [f"{key} is {value} here: the run file's does not divide {ranks} ranks" for key, value in lower.items()]
    return with_values(config, lower), said


_SHOWN = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")


class _Runs:
    """Results of layouts in a folder: the verified one's, and those beside it."""

    def __init__(self, folder: Path, config: RunConfig, degrees: Degrees, say: Callable[[str], None]) -> None:
        self._folder, self._config, self._degrees, self._say = folder, config, degrees, say

    def compared(self, ranks: int, *, fp8: bool, bounds: Bounds) -> list[Difference]:
        """Differences of the verified layout from so many data-parallel ranks."""
        own = {key: getattr(self._config.parallel, key) for key in _LAYOUT}
        name = "fp8" if fp8 else "plain"
        found = self._result(f"{name}-layout", own, self._degrees.world, fp8=fp8)
        wanted = self._result(f"{name}-beside", {"hybrid_shard_degree": 0, **dict.fromkeys(_LAYOUT[1:], 1)}, ranks, fp8=fp8)
        return differences(found, wanted, bounds)

    def _result(self, name: str, degrees: Mapping[str, int], ranks: int, *, fp8: bool) -> Mapping[str, Any]:
        run = self._config.model_dump(mode="json")
        run["parallel"] |= degrees
        task = Task(run, dataclasses.asdict(self._degrees), fp8, self._degrees.data, SEEDS)
        (self._folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(task)), encoding="utf-8")
        self._say(f"training {ranks} rank{'s'[: ranks > 1]} {'in the recipe' if fp8 else 'without FP8'}, {len(SEEDS)} seeds …")
        command = [sys.executable, "-m", "octavo.verify.worker", str(self._folder), name]
        with _on_cpus():
            code = launch(command, ranks, timeout=60.0, grace=10.0)
        if code:
            raise OctavoError(f"{ranks} ranks ended with exit code {code} (above): nothing was verified.")
        return load_file(self._folder / f"{name}.safetensors")


@contextlib.contextmanager
def _on_cpus() -> Iterator[None]:
    """An environment for ranks without GPUs, one thread each."""
    before = {key: os.environ.get(key) for key in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _figures(comparison: Comparison) -> dict[str, Any]:
    first = comparison.first
    return {
        "precision": comparison.precision,
        "beside": comparison.beside,
        "exact": comparison.exact,
        "verified": first is None,
        "first": None if first is None else first.name,
        "largest": comparison.largest.error,
        "errors": {each.name: each.error for each in comparison.differences},
    }


def _head(figures: Mapping[str, Any]) -> str:
    degrees, model = figures["degrees"], figures["model"]
    kinds = ", ".join(
        f"{name} {degrees[name]}" for name in ("hybrid_shard", "tensor", "context", "expert") if degrees[name] > 1
    )
    sizes = ", ".join(f"{key} {value}" for key, value in model.items() if key != "model_type")
    return f"{figures['ranks']} ranks ({kinds or 'no degrees'}) of a small {model['model_type']}: {sizes}"


def _line(comparison: Comparison) -> str:
    first, largest = comparison.first, comparison.largest
    records = sum(is_record(each.name) for each in comparison.differences)
    what = f"{comparison.precision}, beside {comparison.beside}"
    if first is not None:
        return f"DIFFERS  {what}: {first.name} by {first.error:.1e}"
    tensors = f"{len(comparison.differences) - records} tensors within {largest.error:.1e}"
    if not comparison.exact:
        return f"alike    {what}, whose casts are others by rule: {tensors}"
    return f"equal    {what}: {tensors}" + (f", {records} scales and histories equal to the bit" if records else "")
