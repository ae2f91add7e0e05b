"""The supervisor's guarantees, with real processes, signals and kills; each is of ranks and of jobs alike."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from octavo import supervision
from octavo.supervision import Process, Supervisor, children, fields_of, signal_name, start_time

FOREVER = "import time; time.sleep(600)"
IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def start(processes, text, **how):
    processes.start([sys.executable, "-c", text], os.environ, **how)


def until(reached):
    deadline = time.monotonic() + 100
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_subreaper():
    before = supervision._adopt_orphans(True)
    supervision._adopt_orphans(before)
    return before


def test_exit_codes_come_in_the_order_of_ends_and_below_zero_for_a_signal():
    with Supervisor() as processes:
        start(processes, "import time; time.sleep(1); raise SystemExit(3)")
        start(processes, "import os; os.kill(os.getpid(), 40)")
        turns = list(processes.wait())
    assert list(processes.codes.items()) == [(1, -40), (0, 3)]
    assert [code for codes in turns for code in codes] == [-40, 3]
    assert [signal_name(40), signal_name(9)] == ["signal 40", "SIGKILL"]


def test_output_goes_where_it_is_sent_and_input_is_empty(tmp_path, capfd):
    text = "import os, sys; print('out', flush=True); print('err', file=sys.stderr); print(len(sys.stdin.read()), os.getcwd())"
    with (tmp_path / "log").open("wb") as log, Supervisor() as processes:
        start(processes, text, folder=tmp_path, output=log)
        list(processes.wait())
    assert (tmp_path / "log").read_text().split() == ["out", "err", "0", str(tmp_path)]
    assert capfd.readouterr() == ("", "")
    with Supervisor() as processes:
        start(processes, text)
        list(processes.wait())
    assert capfd.readouterr() == (f"out\n0 {Path.cwd()}\n", "err\n")


def test_an_exception_ends_the_processes():
    before = set(children(os.getpid()))

    def fails():
        with Supervisor() as processes:
            start(processes, FOREVER)
            pids.extend(set(children(os.getpid())) - before)
            raise OSError("here")

    pids = []
    with pytest.raises(OSError, match="here"):
        fails()
    assert [start_time(pid) for pid in pids] == [None]


def test_a_process_that_ignores_the_signal_is_killed_after_the_patience(tmp_path):
    with (tmp_path / "log").open("wb") as log, Supervisor(patience=0.3) as processes:
        start(processes, IGNORES, output=log)
        for _ in processes.wait():
            if (tmp_path / "log").read_text() and not processes.asked:
                os.kill(os.getpid(), signal.SIGTERM)
    assert (processes.asked, processes.codes) == ([signal.SIGTERM], {0: -signal.SIGKILL})


def test_a_process_without_a_limit_of_patience_is_waited_for(tmp_path):
    ends = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), sys.exit(75)))\n"
    with (tmp_path / "log").open("wb") as log, Supervisor() as processes:
        start(processes, f"{ends}print('up', flush=True); time.sleep(600)", output=log)
        for _ in processes.wait():
            if (tmp_path / "log").read_text() and not processes.asked:
                processes.stop()
    assert processes.codes == {0: 75}


@pytest.mark.parametrize("sends", [signal.SIGTERM, None])
def test_a_signal_is_passed_on_as_it_is_or_as_the_one_that_is_sent_for_all(tmp_path, sends):
    """As often as it comes, or once; a process that starts later gets what came before."""
    count = f"""
import os, signal, time
file = {str(tmp_path)!r} + "/" + str(os.getpid())
def write(number, frame):
    with open(file, "a") as out:
        out.write(signal.Signals(number).name + " ")
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, write)
open(file, "w").close()
while True:
    time.sleep(1)
"""
    expected = "SIGUSR1 SIGUSR1 " if sends is None else "SIGTERM "

    def read():
        return [file.read_text() for file in tmp_path.iterdir()]

    with Supervisor(sends=sends) as processes:
        start(processes, count)
        until(lambda: read() == [""])
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: read() == ["SIGTERM " if sends else "SIGUSR1 "])
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: read() == [expected])
        assert processes.asked == ([sends] if sends else [signal.SIGUSR1] * 2)


def test_a_process_that_starts_after_a_signal_gets_it():
    with Supervisor() as processes:
        os.kill(os.getpid(), signal.SIGTERM)
        start(processes, FOREVER)
        list(processes.wait())
    assert processes.codes == {0: -signal.SIGTERM}


def test_a_signal_that_interrupts_the_sending_of_another_goes_out_once():
    signals, sent = [signal.SIGINT], []

    class Interrupted(supervision._Supervised):
        def __init__(self):
            self._sent = 0

        @property
        def process(self):
            if len(signals) == 1:  # the handler of the second
                signals.append(signal.SIGTERM)
                self.send(signals)
            return mock.Mock(send_signal=sent.append)

    Interrupted().send(signals)
    assert sorted(sent) == [signal.SIGINT, signal.SIGTERM]


def test_an_ignored_signal_stays_ignored_unless_it_is_always_handled():
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for always in (False, True):
            with Supervisor(always=always) as processes:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGHUP)
                assert processes.asked == ([signal.SIGTERM] if always else [])
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_what_is_left_behind_is_reaped_while_the_processes_run_and_killed_at_the_end(tmp_path):
    """By a process in a session of its own whose parent ends at once: one that ends soon, and one that stays."""
    text = f"""
import os, subprocess, sys, time
for seconds in (0, 600):
    leaves = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(%s)']," % seconds
    leaves += " start_new_session=True, stdout=subprocess.DEVNULL); print(child.pid)"
    pid = subprocess.run([sys.executable, "-c", leaves], stdout=subprocess.PIPE, text=True, check=True).stdout
    open({str(tmp_path)!r} + "/" + str(seconds), "w").write(pid)
open({str(tmp_path)!r} + "/ready", "w").close()
time.sleep(600)
"""
    # Other code of this process has not waited for a child of its own, which has ended.
    with subprocess.Popen([sys.executable, "-c", ""], start_new_session=True) as unwaited, Supervisor() as processes:
        os.waitid(os.P_PID, unwaited.pid, os.WEXITED | os.WNOWAIT)
        start(processes, text)
        for _ in processes.wait():
            if (tmp_path / "ready").exists():
                short, long = (int((tmp_path / name).read_text()) for name in ("0", "600"))
                if not Path(f"/proc/{short}").exists():  # not even as a process that was not waited for
                    assert int(fields_of(f"/proc/{long}/stat")[1]) == os.getpid()
                    processes.stop()
    assert not Path(f"/proc/{long}").exists()
    assert not is_subreaper()


def test_other_children_of_this_process_are_left_alone():
    """Older ones, also in groups of their own, and ones that another thread starts, whose exit codes it gets."""
    others = []

    def start_others():
        others.extend(subprocess.Popen([sys.executable, "-c", text]) for text in ("raise SystemExit(7)", FOREVER))

    with subprocess.Popen([sys.executable, "-c", FOREVER], start_new_session=True) as older:
        with Supervisor() as processes:
            start(processes, "import time; time.sleep(3)")
            thread = threading.Thread(target=start_others)
            thread.start()
            list(processes.wait())
            thread.join()
        failed, running = others
        found = failed.wait(), running.poll(), older.poll()
        for process in (running, older):
            process.kill()
        running.wait()
    assert found == (7, None, None)


KILLED = """
import os, sys
from octavo.supervision import Supervisor
with Supervisor() as processes:
    processes.start([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"], os.environ)
    list(processes.wait())
"""


def test_processes_end_with_a_supervisor_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as supervisor:
        pid = int(supervisor.stdout.readline())
        child = Process(pid, start_time(pid))
        supervisor.kill()
    assert child.ended(within=100)
    child.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_whose_parent_has_ended_before_it_could_ask_is_told_at_once(number):
    gone = subprocess.Popen(["true"])
    gone.wait()
    code = f"from octavo.supervision import die_with_parent; die_with_parent({gone.pid}, {int(number)}); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-number, "")


def test_a_process_lives_on_beside_its_parent():
    code = "import os; from octavo.supervision import die_with_parent; die_with_parent(os.getppid()); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "lives\n")


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
        assert process.ended(within=100)  # before anybody has waited for it
        assert child.wait() == -signal.SIGKILL
        assert start_time(child.pid) is None
        process.close()
    finally:
        child.kill()
        child.wait()
