"""The launcher of ranks: exit codes, signals, the store; its ranks are small scripts."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from octavo.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, InputError
from octavo.supervision import Supervisor, start_time
from octavo.watchdog import launcher
from octavo.watchdog.launcher import launch

SLEEPS = "import time; time.sleep(300)"


@pytest.fixture(autouse=True)
def no_outer_launcher(monkeypatch):
    """Neither its variables nor signals that a shell ignores in the background, which a launcher would not pass on."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    handlers = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(ranks, script, *, timeout=300, grace=300):
    """The exit code of ranks that run `script`, in which `rank` is known."""
    text = f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{script}"
    return launch([sys.executable, "-c", text], ranks, timeout=timeout, grace=grace)


def test_all_end_well():
    assert run(3, "sys.exit(0)") == 0


@pytest.mark.parametrize(("code", "grace"), [(1, 0.2), (2, 300), (EXIT_STOPPED, 300)])
def test_the_code_is_that_of_the_first_that_failed_and_the_others_are_ended(code, grace):
    began = time.monotonic()
    assert run(3, f"sys.exit({code}) if rank == 1 else time.sleep(250)", grace=grace) == code
    assert time.monotonic() - began < 200


def test_ranks_are_minded_while_the_store_is_being_made(monkeypatch, tmp_path):
    """Its import of torch takes long on a busy host; a rank that waits for rank 0 to say a fault would say it again."""
    serve_store, ended = launcher.serve_store, threading.Event()

    def slow(*arguments):
        assert ended.wait(100)
        return serve_store(*arguments)

    kill = Supervisor.kill
    monkeypatch.setattr(launcher, "serve_store", slow)
    monkeypatch.setattr(Supervisor, "kill", lambda processes: (kill(processes), ended.set()))
    script = f"sys.exit(2) if rank == 0 else time.sleep(50)\nopen({str(tmp_path / 'said')!r}, 'w').close()"
    assert run(2, script) == 2
    assert not (tmp_path / "said").exists()


@pytest.mark.parametrize("rank_0", ["while time.monotonic() < began + 3: pass\n    sys.exit(2)", "time.sleep(250)"])
def test_a_rank_waits_while_rank_0_is_busy(rank_0, tmp_path):
    script = f"""
from octavo.watchdog.processes import wait_for_rank_0
began = time.monotonic()
if rank == 0:
    {rank_0}
wait_for_rank_0(1)
open({str(tmp_path / "said")!r}, "w").close()
sys.exit(2)"""
    assert run(2, script) == 2
    assert (tmp_path / "said").exists() == ("sleep" in rank_0)


def test_a_store_that_cannot_be_made_ends_the_ranks(monkeypatch):
    def fails(*_):
        raise OSError("no more files")

    monkeypatch.setattr(launcher, "serve_store", fails)
    with pytest.raises(OSError, match="no more files"):
        run(2, "time.sleep(250)")


@pytest.mark.long(lambda end: "9" not in end)
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 40)", "sys.exit(1)"])
def test_a_failure_is_not_taken_for_a_stop(capfd, end):
    """A rank that would save and exit with 75 at a SIGTERM is not sent one because another has failed."""
    script = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({EXIT_STOPPED}))\n{end} if rank == 1 else time.sleep(250)"
    assert run(2, script, grace=0.2) == EXIT_FAILED
    said = {"9)": "rank 1 of 2 was ended by SIGKILL", "40)": "rank 1 of 2 was ended by signal 40.", "1)": ""}
    assert said[end.split()[-1].split("(")[-1]] in capfd.readouterr().err


def test_a_watchdogs_report_is_not_followed_by_another(capfd):
    script = "os.kill(os.getpid(), 9) if rank == 1 else (time.sleep(1), sys.exit(1))"
    assert run(2, script) == EXIT_FAILED
    assert capfd.readouterr().err == ""


def test_a_rank_that_does_not_end_is_killed_after_the_grace():
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1 if rank else 250)\nsys.exit(3)"
    began = time.monotonic()
    assert run(2, script, grace=0.5) == 3
    assert time.monotonic() - began < 200


def test_a_killed_rank_that_nobody_reports_is_said(capfd):
    assert run(2, "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(250)", grace=0.2) == EXIT_FAILED
    assert capfd.readouterr().err == (
        "octavo: rank 1 of 2 was ended by SIGKILL, which Linux sends when the host's memory runs out.\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_reaches_every_rank(number, tmp_path):
    script = f"""
def stop(*_):
    open({str(tmp_path)!r} + f"/{{rank}}", "w").write("x")
    sys.exit({EXIT_STOPPED})
signal.signal({int(number)}, stop)
open({str(tmp_path)!r} + f"/ready-{{rank}}", "w").close()
time.sleep(250)
"""

    def send():
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    assert run(2, script) == EXIT_STOPPED
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "ready-0", "ready-1"}
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_signal_before_the_ranks_listen(capfd):
    def send():
        while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # the launcher does not listen yet
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    assert run(2, SLEEPS) == EXIT_STOPPED
    assert capfd.readouterr().err == (
        "octavo: stopped by SIGTERM before the first step: nothing to save. Run the same command again.\n"
    )


def test_ranks_meet_at_the_launchers_store():
    script = """
import datetime
from torch.distributed import TCPStore
assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "2" and os.environ["LOCAL_RANK"] == str(rank)
port, wait = int(os.environ["MASTER_PORT"]), datetime.timedelta(seconds=200)
store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=wait)
store.set(str(rank), "here")
sys.exit(0 if store.get(str(1 - rank)) == b"here" else 3)
"""
    assert run(2, script) == 0


def test_each_signal_comes_once(tmp_path):
    script = f"""
def count(*_):
    with open({str(tmp_path)!r} + f"/{{rank}}", "a") as file:
        file.write("x")
signal.signal(signal.SIGINT, count)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
open({str(tmp_path)!r} + f"/{{rank}}", "w").close()
time.sleep(250)
"""

    def send():
        for number, seen in ((signal.SIGINT, ""), (signal.SIGINT, "x"), (signal.SIGTERM, "xx")):
            while not all((tmp_path / name).exists() and (tmp_path / name).read_text() == seen for name in "01"):
                time.sleep(0.02)
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    assert run(2, script) == 0
    assert [(tmp_path / name).read_text() for name in "01"] == ["xx", "xx"]


def test_a_second_interrupt_reaches_the_ranks_and_gives_their_exit_code(tmp_path):
    """The first asks them to save; at the second, each raises, and `octavo` ends with 130."""
    script = f"""
def second(*_):
    sys.exit({EXIT_INTERRUPTED})
def first(*_):
    signal.signal(signal.SIGINT, second)
    open({str(tmp_path)!r} + f"/asked-{{rank}}", "w").close()
signal.signal(signal.SIGINT, first)
open({str(tmp_path)!r} + f"/ready-{{rank}}", "w").close()
time.sleep(250)
time.sleep(250)
"""

    def send():
        for name in ("ready", "asked"):
            while len(list(tmp_path.glob(f"{name}-*"))) < 2:
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()
    assert run(2, script) == EXIT_INTERRUPTED


@pytest.mark.parametrize("end", ["sys.exit(0)", "os.kill(os.getpid(), 9)"])
def test_what_a_rank_leaves_behind_ends_with_the_ranks(tmp_path, end):
    """In a session of its own, from a rank that ends well, or that is killed."""
    script = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open({str(tmp_path)!r} + f"/{{rank}}", "w").write(str(child.pid))
{end}"""
    run(2, script, grace=0.2)
    pids = [int((tmp_path / name).read_text()) for name in "01"]
    assert [start_time(pid) for pid in pids] == [None, None]


def test_another_thread_starts_no_ranks():
    found = []

    def try_it():
        try:
            run(2, "")
        except InputError as error:
            found.append(str(error))

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    assert "the main thread" in found[0]


def test_a_rank_starts_no_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match=r"--ranks 2 starts the ranks, and RANK is set already"):
        run(2, "")


def test_ranks_end_with_the_launcher(tmp_path):
    script = f"""
import os, sys
from pathlib import Path
sys.argv = []
from octavo.watchdog.processes import die_with_launcher
die_with_launcher()
Path({str(tmp_path)!r}, os.environ["RANK"]).write_text(str(os.getpid()))
import time
time.sleep(250)
"""
    start = f"launch([sys.executable, '-c', {script!r}], 2, timeout=1, grace=1)"
    text = f"import sys\nfrom octavo.watchdog.launcher import launch\n{start}"
    launcher = subprocess.Popen([sys.executable, "-c", text])
    while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"):
        assert launcher.poll() is None
        time.sleep(0.02)
    pids = [int((tmp_path / name).read_text()) for name in "01"]
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 100
    while any(start_time(pid) is not None for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [start_time(pid) for pid in pids] == [None, None]
