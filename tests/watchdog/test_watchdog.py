"""The diagnosis as a function of heartbeats, processes of this host, and the watchdog between real ranks that nobody kills."""

import contextlib
import ctypes
import gc
import os
import subprocess
import sys

import pytest
import rank_training
import torch.distributed as dist

import ranks
from octavo.errors import InputError, OctavoError
from octavo.supervision import Process, start_time
from octavo.watchdog import diagnosis
from octavo.watchdog.diagnosis import Failure, Heartbeat, Progress
from octavo.watchdog.processes import SharedPage, without_garbage_collection
from octavo.watchdog.watchdog import PeerFailed, Watchdog, is_consequence


def heartbeat(phase, step=4, *, phases=0, seconds=100.0, training=1, first=False, ended=""):
    return Heartbeat(1, Progress(training, step, phases, phase, first), seconds, ended, "here", 1, 1, -1)


# The rank that is behind.

DATA, FORWARD, BACKWARD = (("data", 0), ("forward", 1), ("backward", 2))


def at(position, step=4, **more):
    return heartbeat(position[0], step, phases=position[1], **more)


@pytest.mark.parametrize(
    ("heartbeats", "ranks", "where"),
    [
        ([at(FORWARD), at(DATA), at(FORWARD)], (1,), "in data of step 4"),
        ([at(DATA, 5), at(BACKWARD), at(DATA, 5)], (1,), "in backward of step 4"),
        ([at(FORWARD), at(DATA, seconds=1), at(FORWARD)], (1,), "in data of step 4"),  # slow, and the others have waited
        (
            [at(DATA, 1, training=2), at(BACKWARD, 9), at(DATA, 1, training=2)],
            (1,),
            "in backward of step 9",
        ),  # a second training
        ([at(FORWARD), at(DATA), at(DATA)], (1, 2), "in data of step 4"),
        ([at(BACKWARD)] * 3, (0, 1, 2), "in backward of step 4"),
        (
            [heartbeat("checkpoint", phases=5), heartbeat("log", phases=5), heartbeat("checkpoint", phases=5)],
            (1,),
            "in log of step 4",
        ),
        ([at(FORWARD, 1, first=True), at(DATA, 1, first=True), at(FORWARD, 1, first=True)], (1,), "in data of step 1"),
    ],
)
def test_the_rank_that_is_behind_is_the_one_that_the_others_wait_for(heartbeats, ranks, where):
    found = diagnosis.stuck(dict(enumerate(heartbeats)), 50)
    assert (found.kind, found.ranks) == ("stuck", ranks)
    assert set(found.positions) == {where}


@pytest.mark.parametrize(
    "heartbeats",
    [
        [at(FORWARD, seconds=49), at(DATA, seconds=50)],
        [heartbeat("start", 0), heartbeat("start", 0)],
        [heartbeat("start", 0), at(FORWARD, 1, first=True)],  # one loads, the other compiles already
        [at(BACKWARD, 1, first=True), at(FORWARD, 1, first=True)],
        [heartbeat("checkpoint"), heartbeat("checkpoint")],  # slow storage, but no rank waits for another
        [at(FORWARD, ended="done"), at(DATA, seconds=3)],
    ],
)
def test_nobody_is_late(heartbeats):
    assert diagnosis.stuck(dict(enumerate(heartbeats)), 50) is None


def test_silent_and_killed_ranks_have_not_ended_in_good_order():
    heartbeats = {0: at(FORWARD), 1: at(FORWARD, ended="done"), 2: at(FORWARD)}
    progress = {2: Progress(1, 4, 2, "backward")}
    assert diagnosis.killed(heartbeats, [1], progress) is None
    assert diagnosis.killed(heartbeats, [1, 2], progress) == Failure("killed", (2,), ("in backward of step 4",))
    quiet = {0: 3.0, 1: 99.0, 2: 31.2, 3: 40.4}
    found = diagnosis.silent(heartbeats, quiet, 30, progress)  # rank 3 was never heard of
    assert found == Failure("silent", (2, 3), ("in backward of step 4", "in start, before the first step"), "40")
    assert diagnosis.silent(heartbeats, quiet, 50, progress) is None
    assert diagnosis.left(heartbeats).ranks == (1,)


# Messages.


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (Failure("killed", (2,), ("in backward of step 17",)), "rank 2 of 4 was killed in backward of step 17 (SIGKILL"),
        (Failure("killed", (1, 2), ("in data of step 3",) * 2), "ranks 1 and 2 of 4 were killed in data of step 3 (SIGKILL"),
        (
            Failure("killed", (0, 1, 2), ("in data of step 3",) * 2 + ("in forward of step 3",)),
            "ranks 0, 1 and 2 of 4 were killed in data of step 3 (rank 0), in data of step 3 (rank 1), in forward of",
        ),
        (Failure("silent", (1,), ("in data of step 4",), "30"), "rank 1 of 4 has been silent for 30 s in data of step 4 (froz"),
        (Failure("stuck", (1,), ("in data of step 4",), "30"), "rank 1 of 4 has not moved for 30 s in data of step 4, and the"),
        (
            Failure("stuck", (0, 1, 2, 3), ("in backward of step 4",) * 4, "30"),
            "all 4 ranks have not moved for 30 s in backward of step 4, so a collective hangs: is the network up?",
        ),
        (Failure("store"), "the launcher's key-value store is gone"),
    ],
)
def test_messages_name_rank_and_phase(failure, message):
    assert failure.message(4).startswith(message)
    assert Failure.from_json(diagnosis.to_json(failure)) == failure


def test_a_failure_is_told_with_its_type_unless_it_explains_itself():
    progress = Progress(1, 2, 1, "forward")
    assert (
        Failure.of_error(OctavoError("loss is nan"), 3, progress).message(4)
        == "rank 3 of 4 failed in forward of step 2: loss is nan"
    )
    assert Failure.of_error(KeyError("x"), 3, progress).detail == "KeyError: 'x'"
    assert Failure.of_error(AssertionError(), 3, progress).detail == "AssertionError"
    assert (
        Failure.of_error(InputError("no such key."), 3, progress).message(4)
        == "no such key. (rank 3 of 4, in forward of step 2)"
    )
    assert len(Failure.of_error(ValueError("long " * 10_000), 3, progress).detail) < 2000


def test_heartbeats_read_back():
    original = heartbeat("forward", phases=3, seconds=1.5, ended="done")
    assert Heartbeat.from_json(diagnosis.to_json(original)) == original


def raised(make):
    try:
        make()
    except BaseException as error:
        return error


def wrapped(outer, inner):
    def make():
        try:
            raise inner
        except type(inner):
            raise outer from None

    return raised(make)


class Joined(Exception):
    def __init__(self, failures):
        self.failures = failures


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (dist.DistNetworkError("anything"), True),
        (wrapped(OctavoError("rank 0 of 4 lost the others"), RuntimeError("Broken pipe")), True),
        (OctavoError("rank 2 of 4: the loss is nan"), True),  # told by that rank while agreeing
        (OctavoError("rank 0 of 4: the loss is nan"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("no connection between them"), False),
        (Joined({2: (OSError("no space"), None)}), True),
        (Joined({0: (OSError("no space"), None)}), False),
    ],
)
def test_a_consequence_of_another_ranks_failure_is_told_from_an_own_error(error, consequence):
    assert is_consequence(error, 0) == consequence


# Processes.


def test_a_kernel_that_has_no_descriptors_of_processes_and_no_shared_pages(monkeypatch):
    def refused(*arguments):
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refused)
    monkeypatch.setattr(os, "memfd_create", refused)
    with subprocess.Popen(["sleep", "60"]) as child:
        process = Process(child.pid, start_time(child.pid))
        assert process.descriptor is None
        assert not process.ended()
        process.kill()
        child.wait()
        assert process.ended()
    page, progress = SharedPage.create(), Progress(1, 2, 3, "data")
    progress.write(page.memory)
    assert Progress.read(page.memory) == progress
    assert SharedPage.of(os.getpid(), page.descriptor) is None
    page.close()


def test_a_page_can_be_read_after_the_death_of_its_process():
    code = "from octavo.watchdog.processes import SharedPage; from octavo.watchdog.diagnosis import Progress; "
    code += "p = SharedPage.create(); "
    code += (
        "print(p.descriptor, flush=True); input(); Progress(1, 17, 2, 'backward').write(p.memory); print(flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        page = SharedPage.of(child.pid, int(child.stdout.readline()))
        print(file=child.stdin, flush=True)
        child.stdout.readline()
        child.kill()
    assert str(Progress.read(page.memory)) == "in backward of step 17"
    page.close()
    assert SharedPage.of(child.pid, 3) is None
    assert SharedPage.of(os.getpid(), -1) is None


PARENT = """
import os, subprocess, sys
os.environ["TORCHELASTIC_RUN_ID"] = "1"
code = "import octavo.watchdog.processes as p; p.die_with_launcher(); print('up', flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
input()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "prctl"), reason="Linux only")
def test_a_process_dies_with_its_launcher_if_it_was_asked_to():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        pid = int(parent.stdout.readline())
        child = Process(pid, start_time(pid))
        assert not child.ended()
        parent.kill()
    assert child.ended(within=100)
    child.close()


# The watchdog.


def test_one_rank_alone_has_no_thread_and_hides_nothing():
    mine = ValueError("mine")
    with contextlib.suppress(ValueError), Watchdog() as watchdog:
        watchdog.start()
        watchdog.step(3)
        watchdog.phase("forward")
        assert (watchdog.progress.phase, watchdog.progress.step, watchdog.progress.first) == ("forward", 3, True)
        watchdog.step(4)
        assert (watchdog.progress.phase, watchdog.progress.phases, watchdog.progress.first) == ("data", 0, False)
        assert watchdog._heartbeat is None
        raise mine
    assert mine.__traceback__ is not None
    assert not hasattr(mine, "reported")


def test_ranks_that_end_well_leave_no_trace():
    assert ranks.run(3, rank_training.in_watchdog, rank_training.nothing) == [None] * 3


def test_every_rank_raises_the_first_failure_whichever_raised_first():
    said = "rank 1 of 3 failed in forward of step 2: ValueError: the first failure"
    peer = ("PeerFailed", said, True, 1)
    assert ranks.run(3, rank_training.in_watchdog, rank_training.raises_after_its_consequence) == [
        peer,
        ("ValueError", "the first failure", True, None),
        peer,
    ]


def test_an_explained_error_keeps_its_exit_code_on_every_rank():
    assert (
        ranks.run(3, rank_training.in_watchdog, rank_training.all_find_the_same)
        == [("InputError", "data.source is missing: name one.", True, 2)] * 3
    )


def test_a_stop_is_no_fault():
    assert ranks.run(3, rank_training.in_watchdog, rank_training.stops) == [("RunStopped", "stopped, saved.", False, 75)] * 3


def test_ranks_that_lose_one_that_was_asked_to_stop_have_its_exit_code():
    first, *others = ranks.run(3, rank_training.in_watchdog, rank_training.one_stops_alone)
    assert first == ("RunStopped", "stopped by SIGTERM before the first step: nothing to save.", False, 75)
    said = f"rank 0 of 3 ended in forward of step 2 while the others still ran: {first[1]}"
    assert others == [("PeerFailed", said, True, 75)] * 2


def test_a_broken_connection_is_the_failure_if_no_other_is_found():
    found = ranks.run(3, rank_training.in_watchdog, rank_training.consequences_without_a_failure, 1)
    own = [rank for rank, (name, *_) in enumerate(found) if name == "RuntimeError"]
    assert len(own) == 1
    said = f"rank {own[0]} of 3 failed in forward of step 2: RuntimeError: rank {own[0]}: connection reset by peer"
    assert [answer for rank, answer in enumerate(found) if rank not in own] == [("PeerFailed", said, True, 1)] * 2


def test_a_rank_that_ended_while_the_others_ran_is_named():
    first, second, third = ranks.run(3, rank_training.in_watchdog, rank_training.one_ends_early)
    assert third is None
    assert first == second == ("PeerFailed", "rank 2 of 3 ended in forward of step 2 while the others still ran: done", True, 1)


def test_peer_failed_is_an_octavo_error():
    assert issubclass(PeerFailed, OctavoError)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_paused_and_left_as_it_was(enabled):
    try:
        (gc.enable if enabled else gc.disable)()
        with contextlib.suppress(ImportError), without_garbage_collection():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
