"""Command lines as processes that tests can kill by the dozen, without paying for the imports each time.

They are forked from the server of `ranks`, which has everything imported. Each is a process like any other, with its own
streams, signals and exit code; what a fresh interpreter does before `main` is left to the tests that start one. torchrun's
ranks are its children as always: it forks them before it has a thread, and they wait for their command and environment.
"""

import contextlib
import gc
import json
import multiprocessing.reduction
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import torch

import ranks


def octavo(arguments):
    """The command `octavo`."""
    from octavo.cli import main

    return main(arguments)


def torchrun(arguments, starts):
    """torchrun, which starts ranks at most `starts` times, restarts counted."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    waiting = [_WaitingRank() for _ in range(starts)]
    SubprocessHandler._popen = lambda handler, command, environment: waiting.pop(0).start(command, environment)
    sys.argv = ["torchrun", *arguments]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


def launcher(arguments):
    """The command `octavo train … --ranks N`; its ranks are forked from it, which has no other thread yet."""
    from octavo import supervision

    supervision.subprocess = types.SimpleNamespace(Popen=_ForkedRank, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    return octavo(arguments)


def compat(arguments):
    """A script in the interpreter that `python -m octavo.compat` becomes."""
    _rank(["-m", "octavo.compat", *arguments])


def python(arguments):
    """`python -m module …` or `python -c code …`, with the folders of PYTHONPATH before all others and their sitecustomize."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder and folder not in sys.path]
    sys.orig_argv = [sys.executable, *arguments]
    sites = [Path(folder, "sitecustomize.py") for folder in folders if folder]
    kept = [runpy.run_path(str(site)) for site in sites if site.is_file()][:1]  # noqa: F841 - its names live as long as modules
    option, what, *rest = arguments
    sys.argv = [option, *rest]
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


class CommandLine:
    """`function(arguments)` in a process with stdout and stderr in files of the folder.

    Args:
        function: `octavo`, or another function of an importable module; it returns the exit code.
        environment: variables beside those of this process.
        file_limit: bytes that a file may have.
    """

    def __init__(self, function, folder, *arguments, environment=None, file_limit=None):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        for stream in ("stdout", "stderr"):
            (folder / stream).touch()
        variables = os.environ | {"TOKENIZERS_PARALLELISM": "false"} | (environment or {})
        self._process = ranks.context.Process(target=_child, args=(function, arguments, str(folder), variables, file_limit))
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        """Exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout=None):
        """The same once it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.folder), timeout)
        return self._process.exitcode

    def kill(self, number=signal.SIGKILL):
        """Send a signal; a process that has ended on its own is left alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait_for_steps(self, metrics, count):
        """Return once `count` lines of metrics are there."""
        while not metrics.is_file() or metrics.read_bytes().count(b"\n") < count:
            time.sleep(0.002)

    def close(self):
        """Kill it if it runs."""
        if self.poll() is None:
            self.kill()
        self.wait()

    @property
    def stdout(self):
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self):
        return (self.folder / "stderr").read_text()


class Popen:
    """What `benchmarks.group` uses of `subprocess.Popen`, for the command `[sys.executable, "-m", module, …]`."""

    def __init__(self, command, *, env, stdin, stdout, stderr, text, encoding):
        assert stdin == stdout == subprocess.PIPE
        assert text
        reading, writing = os.pipe(), os.pipe()
        error = 2 if stderr is None else stderr.fileno()
        streams = [_Descriptor(reading[0]), _Descriptor(writing[1]), _Descriptor(error)]
        self._process = ranks.context.Process(target=_piped_child, args=(command[1:], dict(env), streams))
        self._process.start()
        os.close(reading[0])
        os.close(writing[1])
        self.stdin, self.stdout = os.fdopen(reading[1], "w", encoding=encoding), os.fdopen(writing[0], encoding=encoding)

    def kill(self):
        self._process.kill()

    def wait(self):
        self._process.join()
        return self._process.exitcode


class _Descriptor:
    """A file descriptor that an argument of a process hands on."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return _received, (multiprocessing.reduction.DupFd(self.number),)


def _received(duplicate):
    return duplicate.detach()


def _piped_child(arguments, variables, streams):
    gc.freeze()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0)  # multiprocessing has put /dev/null there
    _leave(variables, python, arguments)


def _child(function, arguments, folder, variables, file_limit):
    gc.freeze()  # as in `ranks`
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    _leave(variables, function, *arguments)


def _leave(variables, function, *arguments):
    """Exit as an interpreter would that has only this to do."""
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    code = 1
    try:
        code = function(*arguments) or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        while trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)  # torch's, where ranks have joined
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _WaitingRank:
    """A child that waits for its start, as torch.distributed.elastic's Popen once started."""

    def __init__(self):
        reading, self._writing = os.pipe()
        self._status = None
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writing)
            os.setsid()
            with os.fdopen(reading) as pipe:
                order = pipe.readline()
            if not order:  # the launcher has ended
                os._exit(0)
            command, variables = json.loads(order)
            sys.stdout.reconfigure(write_through=True)  # python -u
            _leave(variables, _rank, command[command.index("-u") + 1 :])
        os.close(reading)

    def start(self, command, variables):
        os.write(self._writing, json.dumps([command, variables]).encode() + b"\n")
        return self

    def poll(self):
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, timeout=None):
        deadline = time.monotonic() + timeout if timeout is not None else float("inf")
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return self._status


class _ForkedRank:
    """What `octavo.supervision` uses of `subprocess.Popen`, for the command `[python, …, "-m", "octavo", …]`."""

    def __init__(self, command, *, cwd, env, stdin, stdout, stderr, process_group, preexec_fn):
        assert (cwd, stdin, stdout, stderr) == (None, subprocess.DEVNULL, None, None)
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, process_group)
            for number in signal.valid_signals():  # a new interpreter has none of the launcher's
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            preexec_fn()
            _leave(env, octavo, list(command[command.index("octavo") + 1 :]))

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self):
        while self.poll() is None:
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _rank(command):
    if command[:2] == ["-m", "octavo.compat"]:
        from octavo.compat import start

        start.install_all()  # as the interpreter does that octavo.compat becomes
        command = command[2:]
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")
