"""Ranks and SMP's configuration of a job on this machine, from an estimator's `instance_type` and `distribution`.

Contradictions are refused before a folder is created: degrees that do not divide the ranks, FP8 on GPUs without it, keys of
other libraries. A note names the GPUs of the instance type that this host lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from octavo.compat.sagemaker.keys import ESTIMATOR, Keys
from octavo.config.degrees import DEGREES, check_composed, divisors, fit_degrees
from octavo.config.parallel import InitConfig
from octavo.errors import InputError, nearest
from octavo.hardware import Instance, find_instance, installed_gpus, lookup, system_memory_gib

SMP_PARAMETERS = (
    *DEGREES, "sm_activation_offloading", "activation_loading_horizon", "fsdp_cache_flush_warnings", "allow_empty_shards",
    "random_seed", "delayed_parameter_initialization",
)  # fmt: skip
"""Keys of SMP v2's configuration, `delayed_parameter_initialization` included, which only its walk-through has."""
_SMP_1 = (
    "active_microbatches", "auto_partition", "bf16", "bf16_params", "contiguous", "ddp", "ddp_dist_backend",
    "default_partition", "fp16", "fp16_params", "horovod", "memory_weight", "microbatches", "offload_activations", "optimize",
    "partitions", "pipeline", "pipeline_parallel_degree", "placement_strategy", "prescaled_batch", "sdp_gradient_clipping",
    "sdp_hierarchical", "sdp_max_live_parameters", "sdp_param_persistence_threshold", "sdp_reduce_bucket_size",
    "sharded_data_parallel_degree", "shard_optimizer_state", "skip_tracing",
)  # fmt: skip
"""Keys of SMP v1, another library."""
_KEYS = {
    "torch_distributed": ("enabled",),
    "pytorchddp": ("enabled", "custom_mpi_options", "communication_options"),
    "modelparallel": ("enabled", "parameters"),
    "dataparallel": ("enabled", "custom_mpi_options"),
}
"""Library → keys of its dictionary; MPI's options have no effect."""
_SWITCHES = ("sm_activation_offloading", "fsdp_cache_flush_warnings", "allow_empty_shards", "delayed_parameter_initialization")
_TRUE = ("1", "1.0", "true", "yes", "on", "t", "y")
_SMDDP = (
    'distribution["smdistributed"]["dataparallel"]: SageMaker\'s collectives are not available. Ranks start as with '
    '"torch_distributed", and the backend "smddp" is NCCL, or gloo without GPUs.'
)
_RANK_GIB = 0.5
"""Memory of a rank on a CPU before its model: the libraries that it imports."""


@dataclass(frozen=True)
class Layout:
    """The processes of a job.

    Attributes:
        ranks: processes of one world; None for a script that runs as one process.
        gpus: GPUs of this machine in use; 0 on a CPU.
        instance: the requested instance type; None for one without GPUs.
        parameters: SMP's configuration; None without SMP.
        notes: differences from the request, one sentence each.
    """

    ranks: int | None
    gpus: int
    instance: Instance | None
    parameters: dict[str, Any] | None
    notes: list[str] = field(default_factory=list)


class Distribution(NamedTuple):
    """An estimator's `distribution`.

    Attributes:
        ranks: True for several ranks.
        parameters: SMP's, checked; None without SMP.
        notes: on libraries that are replaced.
    """

    ranks: bool
    parameters: dict[str, Any] | None
    notes: tuple[str, ...] = ()


def layout_of(
    instance_type: str, instance_count: int, distribution: Mapping[str, Any] | None, hyperparameters: Mapping[str, Any]
) -> Layout:
    """The processes on this machine for an estimator's arguments.

    Raises:
        InputError: an unknown machine or key, FP8 on GPUs without it, or degrees that do not fit the ranks.
    """
    read = read_distribution(distribution)
    layout = fit_layout(instance_type, instance_count, hyperparameters, distributed=read.ranks, parameters=read.parameters)
    return replace(layout, notes=[*read.notes, *layout.notes])


def fit_layout(
    instance_type: str,
    instance_count: int,
    hyperparameters: Mapping[str, Any],
    *,
    distributed: bool,
    parameters: Mapping[str, Any] | None,
    processes: int | None = None,
    keys: Keys = ESTIMATOR,
) -> Layout:
    """The processes of a job on this machine.

    Args:
        instance_type: AWS's name, "local" or "local_gpu".
        instance_count: instances of this type.
        hyperparameters: checked for FP8 on GPUs without it.
        distributed: several ranks; else the script runs as one process.
        parameters: SMP's, checked; None without SMP.
        processes: ranks on each instance; None: one for each of its GPUs.
        keys: names in messages.

    Raises:
        InputError: an unknown machine, FP8 on GPUs without it, more ranks than GPUs, or degrees that do not fit the ranks.
    """
    if isinstance(instance_count, bool) or not isinstance(instance_count, int) or instance_count < 1:
        raise InputError(f"instance_count = {instance_count!r} is not a number of machines: give 1 or more.")
    here = installed_gpus()
    local = instance_type in ("local", "local_gpu")
    if instance_type == "local_gpu" and not here:
        raise InputError('instance_type = "local_gpu", and this machine has no GPU: give "local" for its CPU.')
    if instance_type == "local_gpu" and instance_count > 1:
        raise InputError(
            f'instance_type = "local_gpu" is this machine, and instance_count = {instance_count}: set it to 1; there is a rank '
            "for each GPU."
        )
    instance = None if local else find_instance(instance_type)
    if instance is not None and not instance.fp8 and _is_true(hyperparameters.get("fp8")):
        raise InputError(
            f'hyperparameters["fp8"] = {hyperparameters["fp8"]!r} and instance_type = {instance_type!r}: its GPUs, '
            f"{instance.gpu}, have no FP8 products. Set fp8 to 0, or give a type with them, such as ml.p5.48xlarge."
        )
    has = len(here) if instance_type == "local_gpu" else None if instance is None else instance.gpus
    if processes is not None and has is not None and processes > has:
        raise InputError(
            f"process_count_per_node = {processes} and instance_type = {instance_type!r}, which has {has} GPUs: each "
            f"process has its GPU. Give {has} or less, or leave it out."
        )
    chosen = None if parameters is None else dict(parameters)
    notes: list[str] = []
    if not distributed:
        gpus = len(here) if instance_type == "local_gpu" else 0 if instance is None else min(instance.gpus, len(here))
        notes += _without_ranks(instance_type, instance_count, instance, here, keys)
        return Layout(None, gpus, instance, chosen, notes)
    if instance_type == "local_gpu":
        ranks = gpus = processes or len(here)
    else:
        ranks, gpus = _ranks(instance, instance_type, instance_count, processes, here, notes)
    if parameters is not None:
        machines = f"instance_type = {instance_type!r}"
        machines += f" with {instance.gpus} GPUs" if instance is not None else ""
        machines += f", instance_count = {instance_count}"
        machines += f", process_count_per_node = {processes}" if processes is not None else ""
        if gpus and instance is not None and ranks < (processes or instance.gpus) * instance_count:
            machines += f", and {len(here)} GPUs on this machine"
        check_degrees(parameters, ranks, machines, keys)
    return Layout(ranks, gpus, instance, chosen, notes)


def _without_ranks(
    instance_type: str, instance_count: int, instance: Instance | None, here: list[str], keys: Keys
) -> Iterator[str]:
    """Notes on a job of one process: missing GPUs, and unused instances."""
    if instance is not None and not here:
        yield f"{instance_type} has {instance.gpus} x {instance.gpu}; this machine has no GPU: the script runs on its CPU."
    elif instance is not None and len(here) < instance.gpus:
        yield f"{instance_type} has {instance.gpus} x {instance.gpu}; this machine has {len(here)} x {here[0]}."
    if instance_count > 1:
        argument = keys.ranks.partition("=")[0]
        yield (
            f"instance_count = {instance_count}, and {argument} starts no ranks: the script runs once. Ranks need {keys.ranks}."
        )


def _ranks(
    instance: Instance | None,
    instance_type: str,
    instance_count: int,
    processes: int | None,
    here: list[str],
    notes: list[str],
) -> tuple[int, int]:
    """(ranks, GPUs of this machine in use); adds to `notes`."""
    each = processes or (1 if instance is None else instance.gpus)
    asked = each * instance_count
    machines = f"{instance_count} x {instance_type}" if instance_count > 1 else instance_type
    if instance is None or not here:
        if asked * _RANK_GIB > system_memory_gib():
            raise InputError(
                f"instance_type = {instance_type!r} and instance_count = {instance_count} are {asked} ranks, and this machine "
                f"has {'no GPU and ' if instance else ''}{system_memory_gib():.0f} GiB of memory for them: each takes at least "
                f"{_RANK_GIB} GiB. Lower instance_count, or give a smaller type."
            )
        if instance is not None:
            notes.append(f"{machines} has {asked} x {instance.gpu}; this machine has no GPU: {asked} ranks on its CPU.")
        elif instance_count > 1 and instance_type != "local":
            notes.append(f"{machines}: all {asked} ranks run on this machine.")
        return asked, 0
    use = min(asked, len(here))
    if use < asked:
        notes.append(f"{machines} has {asked} x {instance.gpu}; this machine has {len(here)} x {here[0]}: {use} ranks.")
    elif instance_count > 1:
        notes.append(f"{machines}: all {asked} ranks run on this machine.")
    known = lookup(here[0])
    if known is not None and known.name != instance.gpu and use == asked:
        notes.append(f"{machines} has {instance.gpu}s; those of this machine are {here[0]}.")
    return use, use


def read_distribution(distribution: Mapping[str, Any] | None) -> Distribution:
    """Reads `distribution`. SageMaker's data parallel library starts ranks too, with NCCL or gloo for its collectives.

    Raises:
        InputError: another library, or an unknown key.
    """
    if distribution is None:
        return Distribution(False, None)
    if not isinstance(distribution, Mapping):
        raise InputError(f"distribution = {distribution!r} is not a dictionary.")
    known = ("torch_distributed", "pytorchddp", "smdistributed")
    for name, value in distribution.items():
        if name in ("mpi", "parameter_server", "multi_worker_mirrored_strategy", "pytorchxla", "instance_groups"):
            if isinstance(value, Mapping) and value.get("enabled") is False:
                continue
            raise InputError(f'distribution["{name}"] is not started here: use "torch_distributed", with one rank a GPU.')
        if name not in known:
            guess = nearest(str(name), known)
            hint = f" Did you mean {guess!r}?" if guess else ""
            raise InputError(f"unknown key {name!r} in distribution.{hint} Known: {', '.join(known)}.")
    starters = [_enabled(distribution, name) for name in ("torch_distributed", "pytorchddp")]  # each is checked
    distributed = any(starters)
    inside = {} if distribution.get("smdistributed") is None else distribution["smdistributed"]
    if not isinstance(inside, Mapping):
        raise InputError(f'distribution["smdistributed"] is {inside!r}: write {{"modelparallel": {{"enabled": True}}}}.')
    for name in inside:
        if name not in ("modelparallel", "dataparallel"):
            raise InputError(f'unknown key {name!r} in distribution["smdistributed"]. Known: modelparallel, dataparallel.')
    smddp, smp = _enabled(inside, "dataparallel"), _enabled(inside, "modelparallel")
    if smddp and smp:
        raise InputError(
            'distribution["smdistributed"] enables "modelparallel" and "dataparallel", of which the SDK takes one: leave '
            '"dataparallel" out.'
        )
    if smddp:
        options = inside["dataparallel"].get("custom_mpi_options")
        more = " custom_mpi_options has no effect." if options else ""
        return Distribution(True, None, (f"{_SMDDP}{more}",))
    if not smp:
        return Distribution(distributed, None)
    if not distributed:
        raise InputError(
            'distribution enables "smdistributed" "modelparallel" without "torch_distributed", which starts its ranks: add '
            '"torch_distributed": {"enabled": True}.'
        )
    parameters = inside["modelparallel"].get("parameters")
    return Distribution(True, check_parameters({} if parameters is None else parameters))


def _enabled(table: Mapping[str, Any], name: str) -> bool:
    value = table.get(name)
    if value is None:
        return False
    if not isinstance(value, Mapping) or not isinstance(value.get("enabled", False), bool):
        raise InputError(f'"{name}" in distribution is {value!r}: write {{"enabled": True}}.')
    for key in value:
        if key not in _KEYS[name]:
            guess = nearest(str(key), _KEYS[name])
            hint = f" Did you mean {guess!r}?" if guess else ""
            raise InputError(f'unknown key {key!r} in "{name}" of distribution.{hint} Known: {", ".join(_KEYS[name])}.')
    return bool(value.get("enabled", False))


def _is_true(value: Any) -> bool:
    """True for a hyperparameter that is a true flag, as a number or as text."""
    return str(value).strip().lower() in _TRUE


def check_parameters(parameters: Mapping[str, Any], where: str = ESTIMATOR.smp) -> dict[str, Any]:
    """SMP's parameters, checked key by key. where: their place in the call, for messages.

    Raises:
        InputError: an unknown key, one of SMP v1, a value of the wrong type, or an unsupported combination of degrees.
    """
    if not isinstance(parameters, Mapping):
        raise InputError(f"{where} is {parameters!r}: write a dictionary, such as {{'context_parallel_degree': 8}}.")
    for name, value in parameters.items():
        if name in _SMP_1:
            raise InputError(
                f"{where} has {name!r} = {value!r}, a key of SMP v1. Octavo has those of v2: {', '.join(SMP_PARAMETERS)}."
            )
        if name not in SMP_PARAMETERS:
            guess = nearest(str(name), SMP_PARAMETERS)
            hint = f" Did you mean {guess!r}?" if guess else ""
            raise InputError(f"{where}: unknown key {name!r}.{hint} Known: {', '.join(SMP_PARAMETERS)}.")
    InitConfig.from_dict({key: value for key, value in parameters.items() if key in InitConfig.model_fields}, where=where)
    for name in _SWITCHES:
        if not isinstance(parameters.get(name, False), bool):
            raise InputError(f"{where}: {name} = {parameters[name]!r}: give True or False.")
    try:
        check_composed(*(parameters.get(name, 1) for name in ("tensor_parallel_degree", "expert_parallel_degree")))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return dict(parameters)


def check_degrees(parameters: Mapping[str, Any], ranks: int, machines: str, keys: Keys = ESTIMATOR) -> None:
    """Check that SMP's degrees fit the ranks.

    Raises:
        InputError: they do not; the message names the machines, the ranks, and the nearest degrees that fit.
    """
    try:
        fit_degrees(**{key: parameters[key] for key in DEGREES if key in parameters}, world_size=ranks)
    except InputError as error:
        reason = str(error).partition(", or start more ranks")[0].rstrip(".").replace("parallel.", "")
        start = "parallel degrees do not fit"
        raise InputError(
            f"{keys.smp}: degrees do not fit{reason.removeprefix(start)}. The ranks are those of {machines}."
        ) from None


def memory_advice(hyperparameters: Mapping[str, Any] | None, parameters: Mapping[str, Any] | None, ranks: int | None) -> str:
    """Settings that lower the memory of a rank, as text; empty if none is known.

    parameters: SMP's. ranks: None for a script of one process.
    """
    hyperparameters = hyperparameters or {}
    advice = []
    if parameters is not None and ranks:
        context = parameters.get("context_parallel_degree", 1)
        most = ranks // parameters.get("tensor_parallel_degree", 1)
        shard = parameters.get("hybrid_shard_degree", 0) or most
        larger = [degree for degree in divisors(shard) if degree > context]
        length = hyperparameters.get("max_context_width")
        if larger:
            tokens = f" of {length} tokens" if length else ""
            degrees = ("a degree of " if len(larger) == 1 else "degrees of ") + _and(larger)
            divide = "divides" if len(larger) == 1 else "divide"
            advice.append(
                f"context_parallel_degree = 1 puts whole sequences{tokens} on each rank: {degrees} {divide} their activations"
                if context == 1
                else f"context_parallel_degree is {context}: {degrees} {divide} activations further"
            )
        if shard < most:
            over = "all ranks" if most == ranks else f"all {most} ranks with the same part of a matrix"
            advice.append(f"hybrid_shard_degree = {shard}: {most} shards parameters and states over {over}")
    if hyperparameters.get("activation_checkpointing") in (0, "0", False):
        advice.append("activation_checkpointing = 1 saves less for backward")
    if isinstance(size := hyperparameters.get("train_batch_size"), int) and size > 1:
        advice.append(f"train_batch_size = {size} can be lower")
    return "; ".join(advice)


def _and(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
