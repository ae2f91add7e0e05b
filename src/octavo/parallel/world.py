"""The ranks of a job: `octavo.init` starts the process groups, `octavo.state` holds ranks, degrees and groups.

Ranks come from the environment of torchrun, Slurm or MPI (`octavo.job_ranks`), or from the caller's process group (as under
`mp.spawn`); without any there is one rank. The layout keeps the busiest traffic between neighbours:

    rank = ((replicate × shard + …) × context + …) × tensor + …      replicate outermost, tensor innermost

Without `init` everything works as on one rank. If all ranks are on one host, sockets are bound to the loopback interface.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import math
import os
import random
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from octavo.config.degrees import DEGREES, Degrees, fit_degrees
from octavo.config.parallel import InitConfig
from octavo.errors import InputError, OctavoError, first_line, warn
from octavo.job_ranks import adopt_ranks, alone_in_job, may_bind_gpus
from octavo.parallel import calls
from octavo.parallel.coordination import all_ranks
from octavo.parallel.rendezvous import round_store
from octavo.process import process
from octavo.storage import local_path

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class State:
    """Ranks, degrees and process groups; `octavo.state` is the one instance.

    Before `octavo.init` it describes one rank: sizes 1, ranks 0, groups and meshes None.

    Attributes:
        initialised: `init` was called.
        config: the argument of `init`.
        degrees: the resolved degrees.
        rank, world_size, local_rank: this rank, the number of ranks, and the rank on this host.
        hybrid_shard_degree: ranks that a parameter is sharded over.
        tensor_parallel_degree, tp_size, tp_rank: tensor-parallel ranks, which hold parts of the same matrices.
        context_parallel_degree, cp_size, cp_rank: context-parallel ranks, which hold parts of the same sequences.
        expert_parallel_degree, ep_size, ep_rank: expert-parallel ranks, which hold different experts.
        dp_size, dp_rank: data-parallel ranks, which see different samples.
        token_rank: this rank among those that see different tokens, whose random numbers differ.
        dp_process_group, tp_process_group, cp_process_group, ep_process_group: the groups of these ranks.
        rep_rank_process_group: the ranks that hold the same shard of the parameters.
        token_process_group: the ranks that see different tokens: other samples, or another part of the same sequences.
        world_process_group: all ranks.
        control: gloo group of all ranks, for collectives on host memory.
        mesh: dimensions replicate, hybrid_shard and tensor.
        shard_mesh: [replicate, hybrid_shard], or [hybrid_shard] with one replica.
        expert_mesh: [replicate, expert_shard, expert], of experts; None where every rank computes with all of them.
        rng_tracker: created by the first `get_rng_state_tracker`; None before.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._describe(InitConfig(), fit_degrees(world_size=1), rank=0, local_rank=0)
        self.initialised = False
        self.device = torch.device("cpu")
        self.mesh: DeviceMesh | None = None
        self.shard_mesh: DeviceMesh | None = None
        self.expert_mesh: DeviceMesh | None = None
        self.control: dist.ProcessGroup | None = None
        self.world_process_group: dist.ProcessGroup | None = None
        self.rep_rank_process_group: dist.ProcessGroup | None = None
        self.token_process_group: dist.ProcessGroup | None = None
        self.dp_process_group: dist.ProcessGroup | None = None
        self.tp_process_group: dist.ProcessGroup | None = None
        self.cp_process_group: dist.ProcessGroup | None = None
        self.ep_process_group: dist.ProcessGroup | None = None
        self._created_group = False

    def _describe(self, config: InitConfig, degrees: Degrees, *, rank: int, local_rank: int) -> None:
        self.config = config
        self.degrees = degrees
        self.rank, self.world_size, self.local_rank = rank, degrees.world, local_rank
        self.hybrid_shard_degree = degrees.hybrid_shard
        self.tensor_parallel_degree = self.tp_size = degrees.tensor
        self.context_parallel_degree = self.cp_size = degrees.context
        self.expert_parallel_degree = self.ep_size = degrees.expert
        self.dp_size = degrees.data
        self.tp_rank = rank % degrees.tensor
        self.cp_rank = rank // degrees.tensor % degrees.context
        self.ep_rank = rank % degrees.expert
        self.dp_rank = rank // (degrees.tensor * degrees.context)
        self.token_rank = rank // degrees.tensor
        self.rng_tracker: RngStateTracker | None = None  # drops a tracker with an earlier call's seed

    def get_rng_state_tracker(self) -> RngStateTracker:
        """Random generators that differ between tensor-parallel ranks, for dropout inside split layers."""
        if self.rng_tracker is None:
            self.rng_tracker = RngStateTracker(self.device)
            self.rng_tracker.add("model-parallel-rng", self.config.random_seed + 2718 + self.tp_rank)
        return self.rng_tracker


class RngStateTracker:
    """Named random generators of one device, in addition to the default one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[str, torch.Tensor] = {}

    def add(self, name: str, seed: int) -> None:
        """Create a generator.

        Raises:
            InputError: the name is taken.
        """
        if name in self._states:
            raise InputError(f"there is a random generator {name!r} already: give another name.")
        self._states[name] = torch.Generator(self._device).manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """A context in which this generator replaces the default one, which is restored afterwards.

        Raises:
            InputError: there is no generator of that name.
        """
        if name not in self._states:
            raise InputError(f"no random generator {name!r}: known are {', '.join(self._states)}.")
        on_gpu = self._device.type == "cuda"
        with torch.random.fork_rng(devices=[self._device] if on_gpu else []):
            if on_gpu:
                torch.cuda.set_rng_state(self._states[name], self._device)
            else:
                torch.set_rng_state(self._states[name])
            try:
                yield
            finally:
                self._states[name] = torch.cuda.get_rng_state(self._device) if on_gpu else torch.get_rng_state()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Every generator's state by name, uint8."""
        return {name: value.clone() for name, value in self._states.items()}

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Restore the states of `get_states`."""
        self._states = {name: value.clone() for name, value in states.items()}


state = State()
"""`octavo.state`."""


def init(config: Mapping[str, Any] | str | Path | None = None, *, timeout: float = 600.0) -> None:
    """Start the process groups and lay the ranks out.

    Ranks are those of the environment of torchrun, srun or mpirun, or of `torch.distributed` if the caller has initialised it.
    Otherwise there is one rank, and no process group. GPUs use NCCL, CPUs gloo.

    Args:
        config: degrees and seeds by SMP's names, or the path of a TOML or JSON file with them; None: defaults.
        timeout: of collectives, in seconds.

    Raises:
        InputError: an unknown key, degrees that do not fit the number of ranks, variables of ranks that contradict each other
            or leave the host of rank 0 open; nothing was started. A key whose value differs between ranks.
        OctavoError: the ranks did not meet.
    """
    chosen = _read(config)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise InputError(f"octavo.init: timeout = {timeout!r} is not a number of seconds above 0 (usual: 600).")
    if not dist.is_initialized():
        adopt_ranks()
    world, rank, local = _rank_numbers()
    gpu = _gpu(local, torch.cuda.device_count(), bound=may_bind_gpus()) if torch.cuda.is_available() else None
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if world > 1 and missing and not dist.is_initialized():
        raise InputError(
            f"WORLD_SIZE = {world} in the environment, but {', '.join(missing)} is not: start the ranks with torchrun or srun, "
            "or call torch.distributed.init_process_group first. For one rank unset WORLD_SIZE."
        )
    degrees = fit_degrees(**chosen.model_dump(include=set(DEGREES)), world_size=world, section="")
    if chosen.expert_dispatch_fp8 and degrees.expert == 1:
        raise InputError(
            "octavo.init: expert_dispatch_fp8 = True has no effect with expert_parallel_degree = 1, where no token is sent: "
            "set the degree, or leave it out."
        )
    if state.mesh is not None and state.degrees != degrees:
        raise InputError(f"octavo.init was called before with {state.degrees}: call octavo.shutdown() first to change them.")
    state._describe(chosen, degrees, rank=rank, local_rank=local)
    state.initialised = True
    state.device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if state.device.type == "cuda":
        torch.cuda.set_device(state.device)
    seed_everything(chosen.random_seed + state.token_rank)
    if state.mesh is None and (world > 1 or dist.is_initialized()):
        try:
            _connect(degrees, timeout)
        except InputError:
            shutdown()
            raise
        except BaseException:
            if not dist.is_initialized():  # the ranks did not meet
                state._reset()
            raise
        if world > 1:
            for model in process.models_of_one_rank:
                model.register_forward_pre_hook(_refuse_of_one_rank)
            process.models_of_one_rank.clear()
    elif world == 1 and (note := alone_in_job()):
        warn(note)


def shutdown() -> None:
    """Destroy the process groups that `init` created; `octavo.state` then describes one rank.

    In a world that the caller created by `torch.distributed.init_process_group`, these groups end with that world: call
    `torch.distributed.destroy_process_group`.
    """
    calls.leave("octavo.shutdown was called there")
    atexit.unregister(_destroy_at_exit)
    if state._created_group and dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()  # PyTorch would reuse this mesh, whose groups have ended, for a later, equal one
    state._reset()


def _destroy_at_exit() -> None:
    """Destroy the groups at the end of a script without `shutdown`: else each rank of NCCL warns that this was not done.

    Not after an exception: other ranks may not have one, and the call would wait for them.
    """
    if getattr(sys, "last_type", None) is None and state._created_group and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _connect(degrees: Degrees, timeout: float) -> None:
    wait = datetime.timedelta(seconds=timeout)
    if on_one_host():
        for name in _INTERFACES:
            os.environ.setdefault(name, "lo")
    if not dist.is_initialized():
        on_gpu = state.device.type == "cuda"
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        store = round_store(state.rank, state.world_size, timeout)
        ranks: dict[str, Any] = {} if store is None else {"store": store, "rank": state.rank, "world_size": state.world_size}
        with _met(state.rank, state.world_size):
            dist.init_process_group(backend, timeout=wait, device_id=state.device if on_gpu else None, **ranks)
        state._created_group = True
        atexit.register(_destroy_at_exit)
    calls.begin(wait)
    everyone = all_ranks(wait)
    state.control = everyone.group
    _refuse_other_configs(everyone.all_gather(state.config.model_dump()))
    shape = (degrees.replicate, degrees.hybrid_shard, degrees.tensor)
    mesh = init_device_mesh(state.device.type, shape, mesh_dim_names=("replicate", "hybrid_shard", "tensor"))
    # Given a replicate dimension of size 1, FSDP2 would all-reduce every gradient over it as well.
    state.shard_mesh = mesh["hybrid_shard"] if degrees.replicate == 1 else mesh["replicate", "hybrid_shard"]
    state.mesh = mesh
    state.world_process_group = dist.group.WORLD
    state.tp_process_group = mesh["tensor"].get_group()
    state.rep_rank_process_group = mesh["replicate"].get_group()
    # [data, context, tensor]; consecutive ranks form an expert group.
    layout = torch.arange(degrees.world, device="cpu").view(degrees.data, degrees.context, degrees.tensor)
    state.dp_process_group = _group_of_this_rank(layout.permute(1, 2, 0).flatten(0, 1))
    state.cp_process_group = _group_of_this_rank(layout.permute(0, 2, 1).flatten(0, 1))
    state.token_process_group = _group_of_this_rank(layout.permute(2, 0, 1).flatten(1))
    if degrees.expert > 1:
        state.expert_mesh = expert_mesh(state.device.type, degrees)
        state.ep_process_group = state.expert_mesh["expert"].get_group()
    else:
        state.ep_process_group = _group_of_this_rank(layout.view(-1, 1))


def _refuse_other_configs(configs: list[dict[str, Any]]) -> None:
    """Raise an InputError, the same on every rank, unless all ranks were given the same."""
    for rank, config in enumerate(configs):
        for key, first in configs[0].items():
            if config[key] != first:
                raise InputError(
                    f"octavo.init: {key} = {first!r} on rank 0, and {config[key]!r} on rank {rank}. Give every rank the same: "
                    "random numbers that must differ between ranks already depend on the rank."
                )


def _refuse_of_one_rank(model: Any, _: Any) -> None:
    """A forward pre-hook of models that were created before `octavo.init`."""
    if state.world_size > 1 and model.training and torch.is_grad_enabled():
        raise InputError(
            f"octavo.transform created this {type(model).__name__} before octavo.init, for one rank: each of the "
            f"{state.world_size} ranks would train a separate model. Call octavo.init first."
        )


@contextlib.contextmanager
def _met(rank: int, world: int) -> Iterator[None]:
    """Around the rendezvous: adds the variables with the address to errors of addresses and of missing ranks."""
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if "EADDRINUSE" in str(error):
            raise InputError(
                f"MASTER_PORT = {port}: another process of {host} has this port. Set MASTER_PORT to a free one, the same for "
                "all ranks."
            ) from error
        raise OctavoError(
            f"rank {rank} of {world} did not meet the others at {host}:{port} (MASTER_ADDR:MASTER_PORT): {first_line(error)}. "
            "Set them to the host of rank 0 and to a port that all ranks can reach."
        ) from error
    except RuntimeError as error:
        if "Unable to find address for" not in str(error):
            raise
        raise InputError(
            f"GLOO_SOCKET_IFNAME = {os.environ.get('GLOO_SOCKET_IFNAME')}: this host has no network interface of that name "
            "with an address. Set it to one of `ip address`, or unset it."
        ) from error


def _gpu(local: int, gpus: int, *, bound: bool) -> int:
    """The GPU of a rank; bound: its process may see only that GPU (NCCL refuses ranks that share one).

    Raises:
        InputError: there are fewer GPUs than ranks on this host.
    """
    if local < gpus:
        return local
    if bound and gpus == 1:
        return 0
    raise InputError(f"rank {local} of this host has no GPU: there are {gpus}. Start {gpus} ranks (--ranks {gpus}).")


def expert_mesh(device_type: str, degrees: Degrees) -> DeviceMesh:
    """[replicate, expert_shard, expert]: consecutive ranks, tensor ranks too, hold different experts. Collective."""
    shape = (degrees.replicate, degrees.hybrid_shard * degrees.tensor // degrees.expert, degrees.expert)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "expert_shard", "expert"))


def on_one_host() -> bool:
    """True if the environment says that all ranks are on this host."""
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "").strip()
    return os.environ.get("MASTER_ADDR") in _LOOPBACK or (local_size != "" and local_size == os.environ.get("WORLD_SIZE"))


def _group_of_this_rank(groups: torch.Tensor) -> dist.ProcessGroup | None:
    """The process group of the row of `groups` [groups, ranks] with this rank. Collective."""
    if groups.shape[0] == 1:
        return dist.group.WORLD  # the same ranks, without another communicator
    group: Any = dist.new_subgroups_by_enumeration(groups.tolist())[0]  # annotated otherwise from version to version
    return group


def _rank_numbers() -> tuple[int, int, int]:
    """(world size, rank, rank on this host)."""
    if dist.is_initialized():
        world, rank = dist.get_world_size(), dist.get_rank()
    else:
        world, rank = rank_variable("WORLD_SIZE", 1), rank_variable("RANK", 0)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 1
    return world, rank, rank_variable("LOCAL_RANK", rank % max(devices, 1))


def rank_variable(name: str, default: int) -> int:
    """A number of torchrun's environment.

    Raises:
        InputError: it is not a whole number.
    """
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{name} = {text!r} in the environment is not a whole number: unset it, or set {default}.") from None


def _read(config: Mapping[str, Any] | str | Path | None) -> InitConfig:
    if config is None:
        return InitConfig()
    if isinstance(config, Mapping):
        return InitConfig.from_dict(config, where="octavo.init")
    if not isinstance(config, str | Path):
        raise InputError(f"octavo.init got {type(config).__name__}: give a dict, the path of a TOML or JSON file, or nothing.")
    path = local_path(config, "octavo.init: config")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"octavo.init: {str(path)!r} cannot be read as TOML or JSON: {error}.") from None
    return InitConfig.from_dict(values.get("parallel", values), where=str(path))


def repeat_bits() -> None:
    """Make GPU computations of this process deterministic from now on."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats only with a fixed workspace
    torch.use_deterministic_algorithms(True)
    # Attention in a model's original code: no backward of these repeats on Hopper, even with that setting.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def seed_everything(seed: int) -> None:
    """Seed the default generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
