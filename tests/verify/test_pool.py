"""Ranks that are forked from one process: each job is a world of its own, and one that fails ends alone."""

import dataclasses
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
from verified import run_of

from octavo.config.degrees import fit_degrees
from octavo.errors import InputError, OctavoError
from octavo.models.families import spec_of
from octavo.models.sources import load_config
from octavo.supervision import children
from octavo.verify import certificate
from octavo.verify.certificate import ON_CPUS
from octavo.verify.pool import Pool


def kill_a_rank():
    """Once two ranks run, the second is killed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        (server,) = (pid for pid in children(os.getpid()) if b"octavo.verify.pool" in command_of(pid))
        if len(forked := sorted(children(server))) == 2:
            os.kill(forked[1], signal.SIGKILL)
            return
        time.sleep(0.01)


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.long
def test_a_job_that_fails_is_named_and_the_next_one_runs(tmp_path, monkeypatch):
    (tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))  # longer than the name of a socket may be
    config, degrees = run_of("llama-1b"), fit_degrees(world_size=2)
    spec = spec_of(load_config("llama-1b", {}))
    ranks, task = certificate.tasks(config, degrees, spec, tmp_path, [3])["plain layout"]
    (tmp_path / "plain.json").write_text(json.dumps(dataclasses.asdict(task)))
    wrong = dataclasses.replace(task, run=task.run | {"data": {"source": 3}})
    (tmp_path / "wrong.json").write_text(json.dumps(dataclasses.asdict(wrong)))
    with Pool(ON_CPUS) as pool:
        with pytest.raises(OctavoError, match=r"data\.source"):
            pool.run(ranks, tmp_path, ["wrong"])
        with pytest.raises(OctavoError, match=r"^rank [01] of 2: FileNotFoundError: .*absent.json"):
            pool.run(ranks, tmp_path, ["absent"])
        (server,) = (pid for pid in children(os.getpid()) if b"octavo.verify.pool" in command_of(pid))
        os.kill(server, signal.SIGINT)  # of a terminal, to all: it ends with the process that asks, without a traceback
        killer = threading.Thread(target=kill_a_rank)
        killer.start()
        with pytest.raises(OctavoError, match=r"^rank 1 of 2 was ended by SIGKILL"):
            pool.run(ranks, tmp_path, ["plain"])
        killer.join()
        pool.run(ranks, tmp_path, ["plain"])
        first = (tmp_path / "plain.safetensors").read_bytes()
        pool.run(ranks, tmp_path, ["plain"])  # of the same bits: nothing of the first is left
    assert (tmp_path / "plain.safetensors").read_bytes() == first
    assert not [pid for pid in children(os.getpid()) if b"octavo.verify.pool" in command_of(pid)]


def test_it_is_one_process_s_and_its_main_thread_s(monkeypatch):
    errors = []

    def start():
        try:
            Pool(ON_CPUS).__enter__()
        except InputError as error:
            errors.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    monkeypatch.setenv("RANK", "0")
    start()
    assert ["main thread" in error for error in errors] == [True, False]
    assert "RANK" in errors[1]
