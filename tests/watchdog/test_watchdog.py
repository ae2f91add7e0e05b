"""Which rank is at fault, as a function of what is known; and the watch between real ranks that nobody kills."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

import pytest
import rank_watching
import torch.distributed as dist

import ranks
from octavo.errors import InputError, OctavoError
from octavo.watchdog import diagnosis
from octavo.watchdog.diagnosis import Beat, Cause, Place
from octavo.watchdog.processes import Page, Process, start_time
from octavo.watchdog.watchdog import PeerFailed, Watch, is_consequence

pytestmark = ranks.alone


def beat(phase, step=4, *, move=0, seconds=100.0, part=1, first=False, ended=""):
    return Beat(1, Place(part, step, move, phase, first), seconds, ended, "here", 1, 1, -1)


# Who is behind.

DATA, FORWARD, BACKWARD = (("data", 0), ("forward", 1), ("backward", 2))


def at(place, step=4, **more):
    return beat(place[0], step, move=place[1], **more)


@pytest.mark.parametrize(
    ("beats", "ranks", "where"),
    [
        ([at(FORWARD), at(DATA), at(FORWARD)], (1,), "in data of step 4"),
        ([at(DATA, 5), at(BACKWARD), at(DATA, 5)], (1,), "in backward of step 4"),
        ([at(FORWARD), at(DATA, seconds=1), at(FORWARD)], (1,), "in data of step 4"),  # slow, and the others have waited
        ([at(DATA, 1, part=2), at(BACKWARD, 9), at(DATA, 1, part=2)], (1,), "in backward of step 9"),  # a second training
        ([at(FORWARD), at(DATA), at(DATA)], (1, 2), "in data of step 4"),
        ([at(BACKWARD)] * 3, (0, 1, 2), "in backward of step 4"),
        ([beat("checkpoint", move=5), beat("log", move=5), beat("checkpoint", move=5)], (1,), "in log of step 4"),
        ([at(FORWARD, 1, first=True), at(DATA, 1, first=True), at(FORWARD, 1, first=True)], (1,), "in data of step 1"),
    ],
)
def test_the_rank_that_is_behind_is_the_one_that_the_others_wait_for(beats, ranks, where):
    found = diagnosis.stuck(dict(enumerate(beats)), 50)
    assert (found.kind, found.ranks) == ("stuck", ranks)
    assert set(found.places) == {where}


@pytest.mark.parametrize(
    "beats",
    [
        [at(FORWARD, seconds=49), at(DATA, seconds=50)],
        [beat("start", 0), beat("start", 0)],
        [beat("start", 0), at(FORWARD, 1, first=True)],  # one loads, the other compiles already
        [at(BACKWARD, 1, first=True), at(FORWARD, 1, first=True)],
        [beat("checkpoint"), beat("checkpoint")],  # slow storage, but nobody waits for anybody
        [at(FORWARD, ended="done"), at(DATA, seconds=3)],
    ],
)
def test_nobody_is_late(beats):
    assert diagnosis.stuck(dict(enumerate(beats)), 50) is None


def test_silent_and_killed_ranks_have_not_ended_in_good_order():
    beats = {0: at(FORWARD), 1: at(FORWARD, ended="done"), 2: at(FORWARD)}
    places = {2: Place(1, 4, 2, "backward")}
    assert diagnosis.killed(beats, [1], places) is None
    assert diagnosis.killed(beats, [1, 2], places) == Cause("killed", (2,), ("in backward of step 4",))
    quiet = {0: 3.0, 1: 99.0, 2: 31.2, 3: 40.4}
    found = diagnosis.silent(beats, quiet, 30, places)  # rank 3 was never heard of
    assert found == Cause("silent", (2, 3), ("in backward of step 4", "in start, before the first step"), "40")
    assert diagnosis.silent(beats, quiet, 50, places) is None
    assert diagnosis.left(beats).ranks == (1,)


# What is said.


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (Cause("killed", (2,), ("in backward of step 17",)), "rank 2 of 4 was killed in backward of step 17 (SIGKILL"),
        (Cause("killed", (1, 2), ("in data of step 3",) * 2), "ranks 1 and 2 of 4 were killed in data of step 3 (SIGKILL"),
        (
            Cause("killed", (0, 1, 2), ("in data of step 3",) * 2 + ("in forward of step 3",)),
            "ranks 0, 1 and 2 of 4 were killed in data of step 3 (rank 0), in data of step 3 (rank 1), in forward of",
        ),
        (Cause("silent", (1,), ("in data of step 4",), "30"), "rank 1 of 4 has been silent for 30 s in data of step 4 (froz"),
        (Cause("stuck", (1,), ("in data of step 4",), "30"), "rank 1 of 4 has not moved for 30 s in data of step 4, and the"),
        (
            Cause("stuck", (0, 1, 2, 3), ("in backward of step 4",) * 4, "30"),
            "all 4 ranks have not moved for 30 s in backward of step 4, so a collective hangs: is the network up?",
        ),
        (Cause("store"), "the launcher's key-value store is gone"),
    ],
)
def test_messages_name_rank_and_phase(cause, said):
    assert cause.message(4).startswith(said)
    assert Cause.from_json(cause.to_json()) == cause


def test_a_failure_is_told_with_its_type_unless_it_explains_itself():
    place = Place(1, 2, 1, "forward")
    assert (
        diagnosis.failure(OctavoError("loss is nan"), 3, place).message(4)
        == "rank 3 of 4 failed in forward of step 2: loss is nan"
    )
    assert diagnosis.failure(KeyError("x"), 3, place).text == "KeyError: 'x'"
    assert diagnosis.failure(AssertionError(), 3, place).text == "AssertionError"
    assert (
        diagnosis.failure(InputError("no such key."), 3, place).message(4) == "no such key. (rank 3 of 4, in forward of step 2)"
    )
    assert len(diagnosis.failure(ValueError("long " * 10_000), 3, place).text) < 2000


def test_beats_read_back():
    original = beat("forward", move=3, seconds=1.5, ended="done")
    assert Beat.from_json(original.to_json()) == original


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
    ("error", "echo"),
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
def test_an_echo_of_another_ranks_end_is_told_from_an_own_error(error, echo):
    assert is_consequence(error, 0) == echo


# Processes.


def test_a_process_is_seen_to_end_and_is_no_later_one_of_its_number():
    child = subprocess.Popen(["sleep", "60"])
    try:
        started = start_time(child.pid)
        process, later = Process(child.pid, started), Process(child.pid, started + 1)
        assert not process.ended()
        assert later.ended()
        later.kill()  # not the one that was meant
        assert not process.ended(within=0.05)
        process.kill()
        assert process.ended(within=10)  # before anybody has waited for it
        assert child.wait() == -signal.SIGKILL
        assert start_time(child.pid) is None
        process.close()
    finally:
        child.kill()
        child.wait()


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
    page, place = Page.own(), Place(1, 2, 3, "data")
    place.write(page.memory)
    assert Place.read(page.memory) == place
    assert Page.of(os.getpid(), page.descriptor) is None
    page.close()


def test_a_page_can_be_read_after_the_death_of_its_process():
    code = (
        "import sys; from octavo.watchdog.processes import Page; from octavo.watchdog.diagnosis import Place; p = Page.own(); "
    )
    code += "print(p.descriptor, flush=True); input(); Place(1, 17, 2, 'backward').write(p.memory); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        page = Page.of(child.pid, int(child.stdout.readline()))
        print(file=child.stdin, flush=True)
        child.stdout.readline()
        child.kill()
    assert str(Place.read(page.memory)) == "in backward of step 17"
    page.close()
    assert Page.of(child.pid, 3) is None
    assert Page.of(os.getpid(), -1) is None


PARENT = """
import subprocess, sys
code = "import octavo.watchdog.processes as p; p.die_with_launcher(asked=True); print('up', flush=True); input()"
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
    assert child.ended(within=10)
    child.close()


# The watch.


def test_one_rank_alone_has_no_thread_and_hides_nothing():
    mine = ValueError("mine")
    with contextlib.suppress(ValueError), Watch() as watch:
        watch.start()
        watch.step(3)
        watch.phase("forward")
        assert (watch.place.phase, watch.place.step, watch.place.first) == ("forward", 3, True)
        watch.step(4)
        assert (watch.place.phase, watch.place.move, watch.place.first) == ("data", 0, False)
        assert watch._lookout is None
        raise mine
    assert mine.__traceback__ is not None
    assert not hasattr(mine, "reported")


def test_ranks_that_end_well_leave_no_trace():
    assert ranks.run(3, rank_watching.in_watch, rank_watching.nothing) == [None] * 3


def test_the_first_cause_leaves_every_rank_whoever_raised_first():
    said = "rank 1 of 3 failed in forward of step 2: ValueError: the first cause"
    peer = ("PeerFailed", said, True, 1)
    assert ranks.run(3, rank_watching.in_watch, rank_watching.raises_after_its_echo) == [
        peer,
        ("ValueError", "the first cause", True, None),
        peer,
    ]


def test_an_explained_error_keeps_its_exit_code_on_every_rank():
    assert (
        ranks.run(3, rank_watching.in_watch, rank_watching.all_find_the_same)
        == [("InputError", "data.source is missing: name one.", True, 2)] * 3
    )


def test_a_stop_is_no_fault():
    assert ranks.run(3, rank_watching.in_watch, rank_watching.stops) == [("RunStopped", "stopped, saved.", False, 75)] * 3


def test_ranks_that_lose_one_that_was_asked_to_stop_have_its_exit_code():
    first, *others = ranks.run(3, rank_watching.in_watch, rank_watching.one_stops_alone)
    assert first == ("RunStopped", "stopped by SIGTERM before the first step: nothing to save.", False, 75)
    said = f"rank 0 of 3 ended in forward of step 2 while the others still ran: {first[1]}"
    assert others == [("PeerFailed", said, True, 75)] * 2


def test_a_broken_connection_is_the_cause_where_no_other_is_found():
    found = ranks.run(3, rank_watching.in_watch, rank_watching.echoes_without_a_cause, 0.5)
    own = [rank for rank, (name, *_) in enumerate(found) if name == "RuntimeError"]
    assert len(own) == 1
    said = f"rank {own[0]} of 3 failed in forward of step 2: RuntimeError: rank {own[0]}: connection reset by peer"
    assert [answer for rank, answer in enumerate(found) if rank not in own] == [("PeerFailed", said, True, 1)] * 2


def test_a_rank_that_ended_while_the_others_ran_is_named():
    first, second, third = ranks.run(3, rank_watching.in_watch, rank_watching.one_ends_early)
    assert third is None
    assert first == second == ("PeerFailed", "rank 2 of 3 ended in forward of step 2 while the others still ran: done", True, 1)


def test_peer_failed_is_an_octavo_error():
    assert issubclass(PeerFailed, OctavoError)
