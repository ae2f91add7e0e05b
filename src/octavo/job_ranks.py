"""Translates the rank variables of Slurm and MPI to torchrun's.

torchrun and `--ranks` give each process RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; srun and mpirun use other
names, and set no port. `adopt_ranks` sets torchrun's variables from theirs, so that all other code reads only these. The host
is rank 0's in Slurm's node list; the port follows from the numbers of job and step, the same on all ranks. A missing variable
is an error, never a guess. No torch is imported: a command adopts its ranks before slow imports.

    a task of srun                 SLURM_PROCID of SLURM_STEP_NUM_TASKS
    a shell of salloc, or sbatch   one rank: SLURM_NTASKS is what srun would start
    mpirun, mpiexec                OMPI_COMM_WORLD_RANK, MV2_COMM_WORLD_RANK, PMI_RANK, … of … _SIZE
    torchrun inside a task         set by torchrun

Not supported: heterogeneous Slurm jobs, and PMIx without one of the names above.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from octavo.errors import InputError

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Set by torchrun and by `--ranks`: rank variables are complete, whatever started the launcher."""
FIRST_PORT, PORTS = 15_000, 14_000
"""Ports that jobs share: below Linux's ephemeral ones and PyTorch's 29500."""
_LOOPBACK = "127.0.0.1"
_NO_TASKS = range(0xFFFFFFF0, 0x100000000)
"""Numbers of Slurm steps that are not from srun: batch, extern, interactive, pending."""
_OF_STEPS = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_LAUNCH_NODE_IPADDR")


@dataclass(frozen=True)
class _Names:
    """Variables of a launcher: rank and number of ranks, the same on this host, and those that identify a job."""

    launcher: str
    rank: str
    world: str
    local: str
    local_world: str
    job: tuple[str, ...]


_MPI = (
    _Names(
        "mpirun",
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Names(
        "mpirun",
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_JOBID", "PMI_ID_JOB"),
    ),
    _Names("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_JOBID", "PMI_PORT")),
)
_SLURM = _Names(
    *("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID", "SLURM_STEPID"),
)
VARIABLES = tuple(
    name for names in (*_MPI, _SLURM) for name in (names.rank, names.world, names.local, names.local_world) if name
)
"""Variables that mark a process as one of a launcher's ranks."""


@dataclass(frozen=True)
class _Found:
    """A process's place among a launcher's ranks; None: unknown."""

    names: _Names
    world_name: str
    rank: int
    world: int
    local: int | None
    local_world: int | None


def adopt_ranks(*, meet: bool = True) -> None:
    """Set torchrun's variables from those of Slurm or MPI; does nothing without them, or under torchrun.

    meet: the ranks will connect, and need rank 0's host and a port; False for a command that only reports or prepares.

    Raises:
        InputError: variables contradict each other, or do not determine the host or port.
    """
    environment = os.environ
    if TORCHRUN in environment or (job := _found(environment)) is None or job.world == 1:
        return
    if _is_nested(environment, job):
        return
    _agree(environment, job)
    values = {"RANK": job.rank, "WORLD_SIZE": job.world, "LOCAL_RANK": job.local, "LOCAL_WORLD_SIZE": job.local_world}
    place: dict[str, object] = {}
    if meet:
        place["MASTER_ADDR"] = environment.get("MASTER_ADDR") or _host(environment, job)
        place["MASTER_PORT"] = environment.get("MASTER_PORT") or _port(environment, job)
    for name, value in (values | place).items():
        if value is not None:
            environment[name] = str(value)
    if job.local_world and (threads := _threads(environment, job.local_world)):
        environment.setdefault("OMP_NUM_THREADS", str(threads))


def alone_in_job() -> str:
    """A note for one rank in a shell of a Slurm job of several tasks; else empty."""
    environment = os.environ
    if "SLURM_JOB_ID" not in environment or TORCHRUN in environment or _in_step(environment):
        return ""
    tasks = environment.get("SLURM_NTASKS", "1")
    if not tasks.isdecimal() or int(tasks) < 2:
        return ""
    return (
        f"SLURM_NTASKS = {tasks}, but this process is no task of srun: it trains as one rank. For {tasks} ranks start the "
        "command with srun."
    )


def started_by() -> str:
    """The launcher that started several ranks, with the variables that show it; empty without one."""
    if TORCHRUN in os.environ or (job := _found(os.environ)) is None or job.world == 1:
        return ""
    return f"{job.names.launcher} has started {job.world} ({job.world_name})"


def refuse_ranks_of_ranks(ranks: int) -> None:
    """Refuse to start ranks in each task of a launcher."""
    if tasks := started_by():
        raise InputError(
            f"--ranks {ranks} starts ranks on one host, but {tasks} already, which train together: leave --ranks out, or start "
            "one task."
        )


def may_bind_gpus() -> bool:
    """True in a task of srun, which may see only its GPU."""
    return _in_step(os.environ)


def _found(environment: Mapping[str, str]) -> _Found | None:
    """This process's place among ranks, by its variables; None if no launcher started ranks."""
    mpi = next((_of_mpi(environment, names) for names in _MPI if names.rank in environment), None)
    slurm = _of_slurm(environment)
    if mpi is None or slurm is None:
        return slurm if mpi is None else mpi
    # srun also sets PMI_RANK, and knows the host. Under mpirun, tasks of srun are daemons that start ranks.
    return slurm if (slurm.rank, slurm.world) == (mpi.rank, mpi.world) else mpi


def _of_mpi(environment: Mapping[str, str], names: _Names) -> _Found:
    if names.world not in environment:
        raise InputError(
            f"{names.rank} = {environment[names.rank]} in the environment, but {names.world} is not: set {names.world} to the "
            f"number of ranks, or unset {names.rank} for one rank."
        )
    rank, world = _number(environment, names.rank), _number(environment, names.world)
    local, local_world = (
        _number(environment, name) if name in environment else None for name in (names.local, names.local_world)
    )
    return _checked(_Found(names, names.world, rank, world, local, local_world))


def _of_slurm(environment: Mapping[str, str]) -> _Found | None:
    if not _in_step(environment):
        return None
    world_name = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") if name in environment), "")
    if not world_name:
        raise InputError(
            f"SLURM_PROCID = {environment['SLURM_PROCID']} in the environment, but SLURM_STEP_NUM_TASKS is not: start the "
            "ranks with srun, or unset SLURM_PROCID for one rank."
        )
    rank, world = _number(environment, "SLURM_PROCID"), _number(environment, world_name)
    het = environment.get("SLURM_HET_SIZE", "1")
    if het not in ("", "0", "1") and "RANK" not in environment:
        raise InputError(
            f"SLURM_HET_SIZE = {het}: ranks of a heterogeneous job are not numbered jointly. Set RANK, WORLD_SIZE, LOCAL_RANK, "
            "MASTER_ADDR and MASTER_PORT for each task, or unset SLURM_PROCID for one rank."
        )
    local = _number(environment, "SLURM_LOCALID") if "SLURM_LOCALID" in environment else None
    here = _tasks_here(environment)
    if here is None and _on_one_node(environment):
        here = world
    return _checked(_Found(_SLURM, world_name, rank, world, local, here))


def _in_step(environment: Mapping[str, str]) -> bool:
    """True in a task of srun; False in a shell of salloc or sbatch, also if a task of another job submitted it."""
    if "SLURM_PROCID" not in environment:
        return False
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID") or ""
    if step.isdecimal() and int(step) in _NO_TASKS:
        return False
    if environment["SLURM_PROCID"].strip() != "0":
        return True
    if not any(name in environment for name in _OF_STEPS):
        return False
    # sbatch forwards its step's variables, in addition to the new job's tasks and the shell's single task.
    tasks, of_job = environment.get("SLURM_STEP_NUM_TASKS", ""), environment.get("SLURM_NTASKS", "")
    here, numbers = _tasks_here(environment), environment.get("SLURM_GTIDS", "")
    return not (tasks and of_job and tasks != of_job) and not (here and numbers and here != len(numbers.split(",")))


def _tasks_here(environment: Mapping[str, str]) -> int | None:
    """Tasks of this node by SLURM_STEP_TASKS_PER_NODE, such as "2(x3),1"; None if it is absent."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if (match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())) is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = environment.get("SLURM_NODEID", "0" if len(counts) == 1 else "")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def _checked(job: _Found) -> _Found:
    names = job.names
    if not 0 <= job.rank < job.world:
        raise InputError(
            f"{names.rank} = {job.rank} and {job.world_name} = {job.world} in the environment: ranks count from 0 to "
            f"{job.world_name} - 1. Unset {names.rank} for one rank."
        )
    return job


def _is_nested(environment: Mapping[str, str], job: _Found) -> bool:
    """True if a launcher inside each task has set consistent variables of more ranks."""
    if not all(environment.get(name, "").isdecimal() for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return False
    world, rank = int(environment["WORLD_SIZE"]), int(environment["RANK"])
    return world > job.world and world % job.world == 0 and rank * job.world // world == job.rank


def _agree(environment: Mapping[str, str], job: _Found) -> None:
    """Refuse torchrun variables that contradict the launcher's."""
    names = job.names
    for name, value, theirs in (
        ("WORLD_SIZE", job.world, job.world_name),
        ("RANK", job.rank, names.rank),
        ("LOCAL_RANK", job.local, names.local),
        ("LOCAL_WORLD_SIZE", job.local_world, "the tasks of this host"),
    ):
        if name in environment and value is not None and _number(environment, name) != value:
            raise InputError(
                f"{name} = {environment[name]} and {theirs} = {value} in the environment contradict each other: unset {name} "
                f"to train as the {job.world} ranks of {names.launcher}. For one rank in each task unset {names.rank} "
                f"(env -u {names.rank} …)."
            )


def _host(environment: Mapping[str, str], job: _Found) -> str:
    """The host of rank 0."""
    names = job.names
    if job.local_world == job.world:
        return _LOOPBACK
    if names is _SLURM:
        if "arbitrary" in environment.get("SLURM_DISTRIBUTION", ""):
            raise _unknown_host("SLURM_DISTRIBUTION = arbitrary: rank 0 may be on any node", "node of rank 0")
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
        if nodes:
            return _resolved(_first_host(nodes))
        if address := environment.get("SLURM_LAUNCH_NODE_IPADDR"):
            return address
        raise _unknown_host("SLURM_STEP_NODELIST is not set", "node of rank 0")
    here = f"{names.local_world} = {job.local_world}" if job.local_world else f"{names.local_world} is not set"
    raise _unknown_host(f"{names.world} = {job.world} and {here}: ranks on several hosts, whose addresses MPI does not give",
                        "host of rank 0")  # fmt: skip


def _resolved(host: str) -> str:
    with contextlib.suppress(OSError):
        socket.getaddrinfo(host, None)
        return host
    raise _unknown_host(f"Slurm's node {host!r} cannot be resolved", f"address of {host}")


def _unknown_host(why: str, what: str) -> InputError:
    return InputError(f"MASTER_ADDR is not set, and {why}. Set MASTER_ADDR to the {what}, the same for all ranks.")


def _on_one_node(environment: Mapping[str, str]) -> bool:
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES")
    return nodes == "1" or (nodes is None and len(list(_parts(environment.get("SLURM_STEP_NODELIST", ",")))) == 1
                            and "[" not in environment.get("SLURM_STEP_NODELIST", ""))  # fmt: skip


def _first_host(nodes: str) -> str:
    """The first name of a Slurm node list, such as "n[001-004,007],m1" or "rack[0-1]n[2,4]"."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", next(_parts(nodes)))


def _parts(nodes: str) -> Iterator[str]:
    """Parts of a list between commas outside brackets."""
    return (part[0] for part in re.finditer(r"(?:[^,\[]|\[[^]]*\])+", nodes))


def _port(environment: Mapping[str, str], job: _Found) -> int:
    """A port that all ranks of a job derive equally, and other jobs rarely."""
    names = job.names
    identity = [f"{name}={environment[name]}" for name in names.job if environment.get(name)]
    if not identity:
        raise InputError(
            f"MASTER_PORT is not set, and nothing identifies this job of {names.launcher} ({names.job[0]} is not set). "
            "Set MASTER_PORT to a free port of the host of rank 0, the same for all ranks."
        )
    return FIRST_PORT + zlib.crc32(" ".join(identity).encode()) % PORTS


def _threads(environment: Mapping[str, str], tasks: int) -> int:
    """A rank's share of the cores, as with `--ranks`: if each rank had threads for all cores, ranks would slow each other.

    0 if the launcher has bound each task to separate cores.
    """
    cores, here = len(os.sched_getaffinity(0)), environment.get("SLURM_CPUS_ON_NODE", "")
    shared = int(here) if here.isdecimal() else os.cpu_count() or 1
    return max(1, cores // tasks) if cores >= shared else 0


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not text.isdecimal():
        raise InputError(f"{name} = {environment[name]!r} in the environment is not a whole number: unset it.")
    return int(text)
