"""Ranks that srun or mpirun has started, by the variables of Slurm 22.05 and Open MPI 4.1; and trainings of such ranks."""

import json
import os

import pytest

from command_lines import CommandLine, octavo
from octavo import job_ranks
from octavo.cli import main
from octavo.errors import InputError
from octavo.parallel import world
from octavo.watchdog.launcher import launch

pytestmark = pytest.mark.usefixtures("bare_environment")

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def bare_environment(monkeypatch):
    """None of a launcher's variables; those that are adopted go with the test."""
    for name in [*os.environ]:
        if name.startswith(("SLURM", "OMPI", "PMI", "MPI_", "MV2", "TORCHELASTIC")) or name in OF_TORCHRUN:
            monkeypatch.delenv(name)
    for name in (*OF_TORCHRUN, "OMP_NUM_THREADS"):  # `adopt_ranks` may set them
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def slurm(task, tasks=2, *, nodes="n1", per_node=None, node=0, local=None, job="7", step="0"):
    per_node = str(tasks) if per_node is None else per_node
    return {
        "SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_PROCID": str(task), "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_LOCALID": str(task if local is None else local),
        "SLURM_NODEID": str(node), "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.9", "SLURM_STEP_NUM_NODES": str(per_node.count(",") + 1),
    }  # fmt: skip


def batch_shell(tasks=2):
    return {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": str(tasks),
            "SLURM_GTIDS": "0", "SLURM_JOB_NODELIST": "n1"}  # fmt: skip


def open_mpi(rank, ranks=2, *, here=None):
    here = ranks if here is None else here
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(ranks),
        "PMIX_NAMESPACE": "1131806721",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % here),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(here),
        "PMIX_RANK": str(rank),
    }


def adopted(monkeypatch, variables):
    """torchrun's variables after `adopt_ranks` beside `variables`."""
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        for name in OF_TORCHRUN:
            if name not in variables:
                patch.setenv(name, "")
                patch.delenv(name)
        job_ranks.adopt_ranks()
        return {name: os.environ[name] for name in OF_TORCHRUN if name in os.environ}


def test_tasks_of_srun_on_one_host(monkeypatch):
    first, second = (adopted(monkeypatch, slurm(task)) for task in range(2))
    port = first.pop("MASTER_PORT")
    assert port == second.pop("MASTER_PORT")
    assert job_ranks.FIRST_PORT <= int(port) < job_ranks.FIRST_PORT + job_ranks.PORTS < 29500
    each = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    assert first == each | {"RANK": "0", "LOCAL_RANK": "0"}
    assert second == each | {"RANK": "1", "LOCAL_RANK": "1"}
    others = [adopted(monkeypatch, slurm(1, job=job, step=step))["MASTER_PORT"] for job, step in (("8", "0"), ("7", "1"))]
    assert len({port, *others}) == 3


def test_tasks_of_several_hosts_meet_at_the_first_of_their_step_and_not_where_srun_was_called(monkeypatch):
    monkeypatch.setattr(job_ranks.socket, "getaddrinfo", lambda host, port: [host])  # the names of a cluster
    found = adopted(monkeypatch, slurm(3, 4, nodes="n[003-004]", per_node="3,1", node=1, local=0))
    assert {name: value for name, value in found.items() if name != "MASTER_PORT"} == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "n003",
    }  # fmt: skip
    for nodes, first in {
        "a7,b[1-2]": "a7", "rack[0-1]n[2,4]": "rack0n2", "gpu[12,14-15],x": "gpu12", "dgx-[a1-a2].c.org": "dgx-a1.c.org",
    }.items():  # fmt: skip
        assert adopted(monkeypatch, slurm(0, 2, nodes=nodes, per_node="1(x2)"))["MASTER_ADDR"] == first
    given = adopted(monkeypatch, slurm(0, 2, nodes="n[1-2]", per_node="1,1") | {"MASTER_ADDR": "h", "MASTER_PORT": "29501"})
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("h", "29501")


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2"},  # a shell of salloc
        batch_shell(),
        # of a job that a task of another job has submitted, with the variables of that task's step
        batch_shell(3) | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"},
        batch_shell(2) | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"},
        batch_shell() | {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # salloc with an interactive step
        slurm(0, 1),
        open_mpi(0, 1),
        {},
        slurm(1) | {"TORCHELASTIC_RUN_ID": "none"},  # torchrun in each task
    ],
)
def test_one_rank_stays_one(monkeypatch, variables):
    assert adopted(monkeypatch, variables) == {}


def test_a_shell_of_a_job_with_tasks_is_told(monkeypatch):
    for name, value in batch_shell(4).items():
        monkeypatch.setenv(name, value)
    assert "SLURM_NTASKS = 4, but this process is no task of srun: it trains as one rank" in job_ranks.alone_in_job()
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert job_ranks.alone_in_job() == ""


def test_ranks_of_mpirun_and_of_a_launcher_in_each_task(monkeypatch):
    found = adopted(monkeypatch, open_mpi(1))
    assert found.pop("MASTER_PORT").isdecimal()
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert found == ranks | {"MASTER_ADDR": "127.0.0.1"}
    place = {"MASTER_ADDR": "h", "MASTER_PORT": "29501"}
    assert adopted(monkeypatch, slurm(0) | open_mpi(1) | place) == ranks | place  # srun has started mpirun's daemons
    of_mpich = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert adopted(monkeypatch, of_mpich | place) == ranks | place
    of_srun = slurm(1) | {"PMI_RANK": "1", "PMI_SIZE": "2"}  # srun --mpi=pmi2
    assert adopted(monkeypatch, of_srun)["MASTER_ADDR"] == "127.0.0.1"
    own = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29501"}
    assert adopted(monkeypatch, slurm(1, per_node="1,1", local=0) | own) == own


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        (slurm(1) | {"WORLD_SIZE": "1"}, ["WORLD_SIZE = 1 and SLURM_STEP_NUM_TASKS = 2", "contradict", "unset WORLD_SIZE"]),
        (slurm(1) | {"WORLD_SIZE": "2", "RANK": "0"}, ["RANK = 0 and SLURM_PROCID = 1", "env -u SLURM_PROCID"]),
        (slurm(1) | {"LOCAL_RANK": "0"}, ["LOCAL_RANK = 0 and SLURM_LOCALID = 1"]),
        (open_mpi(1) | {"RANK": "0"}, ["RANK = 0 and OMPI_COMM_WORLD_RANK = 1"]),
        (slurm(1) | {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, ["WORLD_SIZE = 4 and SLURM_STEP_NUM_TASKS = 2"]),
        (slurm(2, 2), ["SLURM_PROCID = 2 and SLURM_STEP_NUM_TASKS = 2", "count from 0"]),
        (slurm(1) | {"SLURM_PROCID": "one"}, ["SLURM_PROCID = 'one'", "not a whole number"]),
        ({"SLURM_PROCID": "1"}, ["SLURM_PROCID = 1", "SLURM_STEP_NUM_TASKS is not"]),
        ({"PMI_RANK": "1"}, ["PMI_RANK = 1", "PMI_SIZE is not"]),
        (open_mpi(1, 4, here=2), ["MASTER_ADDR is not set", "OMPI_COMM_WORLD_LOCAL_SIZE = 2", "the same for all ranks"]),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["MASTER_ADDR is not set", "MPI_LOCALNRANKS is not set"]),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "h"}, ["MASTER_PORT is not set", "PMI_JOBID is not set"]),
        (
            slurm(0, nodes="no-such-node-[1-2]", per_node="1,1"),
            ["MASTER_ADDR is not set", "'no-such-node-1' cannot be resolved"],
        ),
        (slurm(0, nodes="n[1-2]", per_node="1,1") | {"SLURM_DISTRIBUTION": "arbitrary"}, ["SLURM_DISTRIBUTION = arbitrary"]),
        (slurm(1) | {"SLURM_HET_SIZE": "2"}, ["SLURM_HET_SIZE = 2", "Set RANK, WORLD_SIZE"]),
    ],
)
def test_contradictions_and_what_nothing_tells_are_refused_by_name(monkeypatch, variables, parts):
    with pytest.raises(InputError) as raised:
        adopted(monkeypatch, variables)
    assert all(part in str(raised.value) for part in parts), str(raised.value)


def test_what_only_tells_needs_no_host_of_rank_0(tiny_run, monkeypatch, capsys):
    for name, value in slurm(0, nodes="no-such-node-[1-2]", per_node="1,1").items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(tiny_run().file), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"]["data_parallel"] == 2
    assert main(["train", str(tiny_run("real").file)]) == 2
    assert "MASTER_ADDR is not set, and Slurm's node 'no-such-node-1' cannot be resolved" in capsys.readouterr().err


def test_starting_ranks_in_each_of_several_tasks_is_refused(tiny_run, monkeypatch, capsys):
    for name, value in slurm(0).items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(tiny_run().file), "--ranks", "2"]) == 2
    message = capsys.readouterr().err
    assert "--ranks 2 starts ranks on one host, but srun has started 2 (SLURM_STEP_NUM_TASKS) already" in message
    with pytest.raises(InputError, match="--ranks 2 starts ranks on one host"):
        launch(["true"], 2, timeout=1, grace=1)
    assert main(["bench", "kernels"]) == 2
    assert "octavo bench is one process, and srun has started 2" in capsys.readouterr().err


def test_a_task_with_one_gpu_of_its_own_uses_the_first():
    assert [world._gpu(local, 4, bound=True) for local in range(4)] == [0, 1, 2, 3]
    assert world._gpu(3, 1, bound=True) == 0
    for gpus, bound in ((1, False), (2, True)):
        with pytest.raises(InputError, match=f"rank 3 of this host has no GPU: there are {gpus}"):
            world._gpu(3, gpus, bound=bound)


@pytest.mark.parametrize("launcher", [slurm, open_mpi])
def test_tasks_train_one_run_together(launcher, tiny_run, tmp_path):
    """The second task used to end with the message that the run's folder is in use, and the first to train alone."""
    run, job = tiny_run(steps=2), str(os.getpid())  # its port
    own = {"SLURM_JOB_ID": job} if launcher is slurm else {"PMIX_NAMESPACE": job}
    tasks = [
        CommandLine(octavo, tmp_path / f"task-{task}", ["train", str(run.file), "--json"], environment=launcher(task) | own)
        for task in range(2)
    ]
    try:
        codes = [task.wait(200) for task in tasks]
    finally:
        for task in tasks:
            task.close()
    assert codes == [0, 0], [task.stderr for task in tasks]
    assert json.loads(tasks[0].stdout)["folder"] == str(run.output)
    assert tasks[1].stdout == ""
    alone = tiny_run("alone", steps=2)
    assert main(["train", str(alone.file)]) == 0
    joined, single = (
        [json.loads(line)["loss"] for line in (each.output / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
        for each in (run, alone)
    )
    assert joined == pytest.approx(single, rel=1e-3)
