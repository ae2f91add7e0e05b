"""Comparisons that verify a layout, and their report.

Both run in float64, where sums do not depend on their order (docs/numerics.md):

    without FP8         the layout against one rank with the samples of all
    in the recipe       the layout against its data-parallel ranks alone, which cast the same samples and, if the layout
                        shards, hold all parameters


Under delayed and current scaling all casts are then the same, and scales and histories equal to the bit. By definition, casts
differ under rowwise and block scaling, if experts are distributed over ranks with other samples, and if tensor ranks share a
key-value head: there errors are bounded by the format, and scales are not compared.

After these steps the layout saves a checkpoint, from which another layout and one rank continue: they must hold the saved bits,
and compute the next steps like an uninterrupted training. Under delayed scaling that compares FP8 with one rank too: scales
exist, so no rank computes one from its samples.

A second pass runs in the training dtypes, against one rank, within the roundings of the formats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from octavo.config.degrees import DEGREES, Degrees, composes, divisors
from octavo.config.effects import with_values
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.models.families import decoder_spec
from octavo.models.sources import load_config
from octavo.models.spec import ModelSpec
from octavo.models.tensor_parallel import check_tensor
from octavo.nn.moe import Assignment
from octavo.plan.run import Target, check
from octavo.plan.verified import verified_keys, versions
from octavo.verify.compare import MOMENTS, Bounds, Difference, differences, is_record, loaded, with_ranks
from octavo.verify.layers import with_few_layers
from octavo.verify.pool import Pool
from octavo.verify.small import (
    MICRO_BATCH,
    check_small,
    exchange,
    experts_of,
    small_config,
    with_packing_of_format,
    without_files,
)
from octavo.verify.worker import Results, Task

EQUAL, ALIKE = Bounds(2.0**-22, 1e-10, 1e-10), Bounds(0.02, 0.1, 0.6, router=0.9)
"""Bounds in float64 if casts differ by definition. Observed: losses 0.011, norms 0.05, gradients 0.55, a router's moment 0.66.

A token that a different rounding routes to another expert changes its whole share of the router's gradient: by √(2p) if a share
p of the tokens does, and a small model has few tokens.
"""
NARROW = Bounds(0.003, 0.03, 0.1)
"""Bounds in 16 bits without FP8. A rounding to bf16 has an error of 0.17%; a gradient of two blocks passes about 40 in each of
two layouts: 0.17% · √80 is 1.5%. Observed: losses 0.0004, norms 0.003, gradients 0.035.

FP8 casts have errors of 2.6% and 5.3%; a gradient passes eight of each: 17%. Observed: losses 0.006, norms 0.02, gradients
0.31. Their bounds are those of `ALIKE`, like those of experts, whose choice may depend on rounding."""
NARROW_ADAPTERS = Bounds(0.003, 0.03, 0.2)
"""As `NARROW`, for adapters, whose products are rounded once more between the two matrices. Observed: moments 0.11."""
SEEDS = [0, 1, 2]
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
NOT_COVERED = "GPU kernels, collectives that overlap products, dropout, sizes of the real model"
NOT_ASSIGNED = ", choices of routers that balance the tokens of their rank (moe.moe_load_balancing)"
NOT_DOCUMENTS = ', documents within a sequence (data.packing is not set; set "documents" to verify them)'
NOT_IN_16 = ", roundings to float16"
NOT_SCHEDULED = ", steps at which fp8.schedule changes the precision"
NOT_RESIZED = ", words that model.resize adds"
NOT_CAUSAL = "current scaling, by definition: the amax over all tokens sets the scale"
CAUSALITY = "by causality"
_ONE_SCALE = ("delayed", "current", "bf16")
_ONE = Degrees(1, 1, 1, 1, 1)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison of a layout in a precision with another layout, or with a continued training, and the differences.

    exact: both cast the same.
    """

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
    config: RunConfig,
    ranks: int,
    *,
    overridden: Sequence[str] = (),
    causality: bool = False,
    seeds: Sequence[int] | None = None,
    pool: Pool | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], list[str]]:
    """Verify the layout of a run on CPU ranks: returns the report as a dict and as lines of text.

    Args:
        config: the run. Its model, data and weights are not read.
        ranks: number of CPU ranks, at least two.
        overridden: keys from the command line. Their degrees must fit the ranks; the run file's are lowered to divisors.
        causality: also check that other tokens do not change logits that they must not.
        seeds: number of seeds of weights and samples, with one training each; None: three.
        pool: starts the ranks; None: a pool for this verification.
        say: called with progress messages.

    Raises:
        InputError: the run does not fit the ranks, or its model is not Octavo's decoder.
    """
    if ranks < 2:
        raise InputError(f"--ranks {ranks}: a layout needs at least 2 ranks, to be compared with fewer.")
    hf_config = load_config(config.model.source, config.model.config)
    spec, reason = (None, 'blocks = "own"') if config.model.blocks == "own" else decoder_spec(hf_config)
    spec = check_small(spec, hf_config.model_type, reason)
    config, lowered = _lowered(with_packing_of_format(config), ranks, overridden)
    run = without_files(with_values(config, {"train.global_batch": ranks, "train.micro_batch": 1}))
    degrees = check(run, target=Target(world_size=ranks), notes=False).degrees
    config.tell_notes(ranks)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        pool = pool or started.enter_context(Pool(ON_CPUS))
        trainings = tasks(config, degrees, spec, Path(folder), seeds or SEEDS, causality=causality)
        comparisons = compared(_run(trainings, Path(folder), pool, say), config, degrees, spec)
    _, layers = with_few_layers(config, hf_config, spec, experts_of(spec, degrees))
    small = small_config(hf_config, spec, degrees, layers)
    figures = {
        **versions(),
        "ranks": ranks,
        "degrees": dataclasses.asdict(degrees),
        "model": {key: getattr(small, key) for key in _SHOWN if getattr(small, key, None) is not None},
        "keys": verified_keys(config),
        "verified": all(each.first is None for each in comparisons),
        "comparisons": [_figures(each) for each in comparisons],
        **({"lowered": lowered} if lowered else {}),
        **({"not_causal": NOT_CAUSAL} if causality and sets_scales_of_others(config) else {}),
        "not_covered": not_covered(config),
    }
    said = [f"not causal: {NOT_CAUSAL}"] if "not_causal" in figures else []
    return figures, [
        _head(figures),
        *lowered,
        *[_line(each, ranks) for each in comparisons],
        *said,
        f"not covered: {figures['not_covered']}",
    ]


def not_covered(config: RunConfig) -> str:
    """The parts of a run that no comparison has, in words."""
    missing = {
        NOT_ASSIGNED: assignment_of(config) != "largest",
        NOT_IN_16: config.model.dtype == "float16",
        NOT_SCHEDULED: config.fp8.enabled is not False and bool(config.fp8.schedule),
        NOT_RESIZED: config.model.resize,
        NOT_DOCUMENTS: config.data.packing is None,
    }
    return NOT_COVERED + "".join(part for part, is_missing in missing.items() if is_missing)


def casts_alike(config: RunConfig, degrees: Degrees, spec: ModelSpec) -> bool:
    """True if a layout casts the same as its data-parallel ranks alone.

    That needs scales of whole tensors, experts within tensor groups, and no key-value head shared by tensor ranks, each of
    which would cast only its queries' gradient.
    """
    one_scale = {config.fp8.recipe, *config.fp8.layers.values()} <= set(_ONE_SCALE)
    experts = degrees.tensor % degrees.expert == 0 and not config.parallel.expert_dispatch_fp8
    return one_scale and experts and spec.kv_heads % degrees.tensor == 0


def sets_scales_of_others(config: RunConfig) -> bool:
    """True if a token affects other tokens' scales, hence results, in the same forward: under current scaling."""
    return config.fp8.enabled is not False and "current" in {config.fp8.recipe, *config.fp8.layers.values()}


def continues_alike(config: RunConfig, degrees: Degrees, then: Degrees, spec: ModelSpec) -> bool:
    """True if another layout that loads this one's checkpoint casts the same: by the saved scales, or from equal samples."""
    if {config.fp8.recipe, *config.fp8.layers.values()} <= {"delayed", "bf16"}:
        shared = any(spec.kv_heads % each.tensor for each in (degrees, then))
        return not config.parallel.expert_dispatch_fp8 and not shared
    return degrees.data == then.data and all(casts_alike(config, each, spec) for each in (degrees, then))


def other_layout(degrees: Degrees, spec: ModelSpec, assignment: Assignment = "largest") -> Degrees:
    """Another layout of equally many ranks, to continue from this one's checkpoint; assignment: from the run's [moe]."""
    spec = dataclasses.replace(spec, assignment=assignment)
    tensor, context = degrees.tensor, degrees.context
    if tensor > 1:
        tensor = divisors(tensor)[-2]  # half of an even degree
    elif context > 1:
        context //= divisors(context)[1]
    elif degrees.expert == 1:
        tensor = 2
        try:
            check_tensor(spec, tensor)
        except InputError:
            tensor = 1
        if tensor == 1 or degrees.world % 2:
            shards = 1 if degrees.hybrid_shard > 1 else degrees.world
            return dataclasses.replace(degrees, hybrid_shard=shards)
    return Degrees(degrees.world, degrees.world // tensor, tensor, context, math.gcd(degrees.expert, tensor))


def assignment_of(config: RunConfig) -> Assignment:
    """The assignment of tokens to experts by the run's routers."""
    asked = config.moe.moe_load_balancing
    return asked if asked in ("sinkhorn", "balanced") else "largest"


def tasks(
    config: RunConfig,
    degrees: Degrees,
    spec: ModelSpec,
    folder: Path,
    seeds: Sequence[int] = SEEDS,
    *,
    causality: bool = False,
) -> dict[str, tuple[int, Task]]:
    """Name → (ranks, task) of all trainings that are compared; a checkpoint's writer precedes its reader."""
    other = other_layout(degrees, spec, assignment_of(config))
    whole = load_config(config.model.source, config.model.config)
    config, layers = with_few_layers(config, whole, spec, experts_of(spec, degrees))
    rows = math.lcm(MICRO_BATCH * degrees.data, other.data)
    by_name: dict[str, tuple[int, Task]] = {}

    def layout(of: Degrees, fp8: bool) -> dict[str, Any]:
        """Keys of [parallel]; those without effect have their defaults."""
        keys: dict[str, Any] = dict(zip(DEGREES, (of.hybrid_shard, of.tensor, of.context, of.expert), strict=True))
        parallel = config.parallel
        by = exchange(parallel.cp_comm_type, spec, degrees, of) if of.context > 1 else "all_gather"
        return keys | {"cp_comm_type": by, "expert_dispatch_fp8": parallel.expert_dispatch_fp8 and fp8 and of.expert > 1}

    def add(name: str, of: Degrees, *, fp8: bool, **options: Any) -> None:
        run = without_files(config).model_dump(mode="json")
        run["parallel"] |= layout(of, fp8)
        if not fp8:
            run["lora"]["base"] = "params_dtype"  # a base in FP8 needs products in FP8
        by_name[name] = of.world, Task(run, dataclasses.asdict(degrees), list(layers), fp8, rows, list(seeds), **options)

    for fp8 in (False, True) if config.fp8.enabled is not False else (False,):
        at, kind = str(folder / f"fp8-{fp8}"), "fp8" if fp8 else "plain"
        add(f"{kind} layout", degrees, fp8=fp8, saves=at, loads=at, then=layout(other, fp8), further=fp8, causality=causality)
        alone = not fp8 or (degrees.data == 1 and degrees.world > 1)
        if fp8 and not alone:  # each with all parameters, or sharded if the layout is not
            shards = 1 if degrees.hybrid_shard > 1 else degrees.data
            add(f"{kind} data", Degrees(degrees.data, shards, 1, 1, 1), fp8=fp8)
        add(f"{kind} one", _ONE, fp8=fp8, trains=alone, loads=at, further=not fp8)
    passes = (False, True) if config.fp8.enabled is not False else (False,)
    for fp8 in passes if config.model.dtype != "float16" else ():  # float16 needs loss scaling
        kind = "narrow-fp8" if fp8 else "narrow"
        add(f"{kind} layout", degrees, fp8=fp8, wide=False)
        add(f"{kind} one", _ONE, fp8=fp8, wide=False)
    return by_name


def compared(results: Mapping[str, Results], config: RunConfig, degrees: Degrees, spec: ModelSpec) -> list[Comparison]:
    """The comparisons of the results of `tasks`."""
    other, comparisons = other_layout(degrees, spec, assignment_of(config)), []
    for kind in (kind for kind in ("plain", "fp8") if f"{kind} layout" in results):
        layout, one = results[f"{kind} layout"], results[f"{kind} one"]
        beside = results.get(f"{kind} data", one)
        precision = "without FP8" if kind == "plain" else f"{config.fp8.recipe} scaling"
        exact = kind == "plain" or casts_alike(config, degrees, spec)
        if "trained" in beside:
            ranks = "one rank" if beside is one else f"{degrees.data} data-parallel ranks"
            every = _differences(exact, layout["trained"], beside["trained"], layout["parts"], degrees)
            comparisons.append(Comparison(precision, f"beside {ranks}", exact, every))
        further = layout["further"] if kind == "fp8" else one["further"]
        for then, each in ((other, layout), (_ONE, one)):
            exact = kind == "plain" or continues_alike(config, degrees, then, spec)
            where = "on one rank" if each is one else f"in {_named(then)}"
            parts = each["parts continued"]
            same = loaded(each["loaded"], layout["trained"])
            same = with_ranks(same, each["loaded"], layout["trained"], parts, _samples(then))
            next_ = _differences(exact, each["continued"], further, parts, then)
            comparisons.append(Comparison(precision, f"continued {where}", exact, [*same, *next_]))
        if "causality" in layout and (kind == "plain" or not sets_scales_of_others(config)):
            comparisons.append(causal(layout["causality"], precision, spec))
    for kind in (kind for kind in ("narrow", "narrow-fp8") if f"{kind} layout" in results):
        precision = f"{config.model.dtype}, " + ("without FP8" if kind == "narrow" else f"{config.fp8.recipe} scaling")
        ours, theirs = (results[f"{kind} {name}"]["trained"] for name in ("layout", "one"))
        narrow = NARROW if config.lora.rank is None else NARROW_ADAPTERS
        bounds = ALIKE if kind == "narrow-fp8" or spec.experts else narrow
        every = _differences(False, ours, theirs, results[f"{kind} layout"]["parts"], degrees, bounds)
        comparisons.append(Comparison(precision, "beside one rank", False, every))
    return comparisons


def causal(changes: Mapping[str, Tensor], precision: str, spec: ModelSpec) -> Comparison:
    """The comparison of a result of `causality.changed`: no bit may change; with experts at most 1e-10 of the largest logit."""
    bound = EQUAL.tensor if spec.experts else 0.0
    return Comparison(precision, CAUSALITY, True, [_change(name, each, bound) for name, each in changes.items()])


def _change(name: str, largest: Tensor, bound: float) -> Difference:
    """A change as a difference; its name includes the token if it exceeds the bound."""
    name, _, seed = name.rpartition(", seed ")
    error, token, first = largest.tolist()
    within = error <= bound
    of = "logits" if within else f"logits of token {token:.0f}"
    begins = "" if within or first < 0 else f" (others from token {first:.0f} on)"
    return Difference(f"{of} by {name}{begins}, seed {seed}", error, within)


def _differences(
    exact: bool,
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    parts: Mapping[str, Tensor],
    degrees: Degrees,
    bounds: Bounds = ALIKE,
) -> list[Difference]:
    """Differences of a layout's results, with the ranks that hold the parts; scales and histories only if casts are equal."""
    every = differences(tensors, wanted, EQUAL if exact else bounds)
    every = [each for each in every if exact or not is_record(each.name)]
    return with_ranks(every, tensors, wanted, parts, _samples(degrees))


def _samples(degrees: Degrees) -> list[range]:
    """The ranks of each data-parallel share of the samples."""
    each = degrees.tensor * degrees.context
    return [range(n * each, (n + 1) * each) for n in range(degrees.data)]


def _lowered(config: RunConfig, ranks: int, overridden: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """The run with the file's degrees lowered to divisors of the ranks, and a line for each lowered degree."""
    parallel = config.parallel
    tensor = math.gcd(parallel.tensor_parallel_degree, ranks)
    shards = parallel.hybrid_shard_degree and math.gcd(parallel.hybrid_shard_degree, ranks // tensor)
    whole = shards or ranks // tensor
    experts = [n for n in divisors(math.gcd(parallel.expert_parallel_degree, whole * tensor)) if composes(tensor, n)]
    fitting = {
        "tensor_parallel_degree": tensor,
        "hybrid_shard_degree": shards,
        "context_parallel_degree": math.gcd(parallel.context_parallel_degree, whole),
        "expert_parallel_degree": experts[-1],
    }
    lower = {
        f"parallel.{key}": value
        for key, value in fitting.items()
        if value != getattr(parallel, key) and f"parallel.{key}" not in overridden
    }
    said = [f"{key} is {value} here: the run file's value does not divide {ranks} ranks" for key, value in lower.items()]
    return with_values(config, lower), said


_OF_PARAMETERS = ("parameter", "gradient", *MOMENTS, "step", "scale", "history")
_SHOWN = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def _run(all_tasks: Mapping[str, tuple[int, Task]], folder: Path, pool: Pool, say: Callable[[str], None]) -> dict[str, Results]:
    """The results of the tasks. Tasks with equally many ranks are one job."""
    for name, (_, task) in all_tasks.items():
        (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(task)), encoding="utf-8")
    for ranks in dict.fromkeys(ranks for ranks, _ in all_tasks.values()):
        those = {name: task for name, (each, task) in all_tasks.items() if each == ranks}
        seeds = max(len(task.seeds) for task in those.values())
        say(f"training on {ranks} rank{'s'[: ranks > 1]}, {seeds} seed{'s'[: seeds > 1]} …")
        pool.run(ranks, folder, list(those))
    return {name: _read(folder / f"{name}.safetensors") for name in all_tasks}


def _read(path: Path) -> Results:
    phases: Results = {}
    with safe_open(path, "pt") as file:
        for key in file.metadata()["order"].split("\n"):
            phase, _, name = key.partition(": ")
            phases.setdefault(phase, {})[name] = file.get_tensor(key)
    return phases


def _figures(comparison: Comparison) -> dict[str, Any]:
    first = comparison.first
    return {
        "precision": comparison.precision,
        "beside": comparison.beside,
        "exact": comparison.exact,
        "verified": first is None,
        "first": None if first is None else first.name,
        "ranks": None if first is None else list(first.ranks),
        "largest": comparison.largest.error,
        "parameters": _by_parameter(comparison.differences),
        "errors": {each.name: each.error for each in comparison.differences},
    }


def _by_parameter(every: Sequence[Difference]) -> dict[str, float]:
    """The largest error of each parameter (values, gradient, moments) and of each FP8 record, over all seeds."""
    errors: dict[str, float] = {}
    for each in every:
        kind, _, name = each.name.partition(" ")
        if kind in _OF_PARAMETERS:
            name = name.partition(",")[0].split()[0]
            errors[name] = max(errors.get(name, 0.0), each.error)
    return errors


def _named(degrees: Degrees) -> str:
    sizes = {"replicate": degrees.replicate, "hybrid_shard": degrees.hybrid_shard, "tensor": degrees.tensor}
    sizes |= {"context": degrees.context, "expert": degrees.expert}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _head(figures: Mapping[str, Any]) -> str:
    model, layout = figures["model"], _named(Degrees(**figures["degrees"]))
    sizes = ", ".join(f"{key} {value}" for key, value in model.items() if key != "model_type")
    return f"{figures['ranks']} ranks ({layout}) of a small {model['model_type']}: {sizes}"


def _where(first: Difference, ranks: int) -> str:
    """The ranks of a difference in words."""
    if not first.ranks:
        return ""
    if len(first.ranks) == ranks:
        return ", on every rank"
    several = "s"[: len(first.ranks) > 1]
    return f", in the part of rank{several} {', '.join(map(str, first.ranks))}"


def _line(comparison: Comparison, ranks: int) -> str:
    first, largest = comparison.first, comparison.largest
    records = sum(is_record(each.name) for each in comparison.differences)
    what = f"{comparison.precision}, {comparison.beside}"
    if first is not None:
        return f"DIFFERS  {what}: {first.name} by {first.error:.1e}{_where(first, ranks)}"
    if comparison.beside == CAUSALITY:
        by = ", ".join(
            dict.fromkeys(each.name.partition(" by ")[2].rpartition(", seed ")[0] for each in comparison.differences)
        )
        bits = "to the bit" if largest.error == 0.0 else f"within {largest.error:.1e}"
        return f"equal    {what}: logits, {bits}, after changes of {by}"
    tensors = f"{len(comparison.differences) - records} tensors within {largest.error:.1e}"
    if not comparison.exact:
        return f"alike    {what}, which rounds differently by rule: {tensors}"
    return f"equal    {what}: {tensors}" + (f", {records} scales and histories equal to the bit" if records else "")
