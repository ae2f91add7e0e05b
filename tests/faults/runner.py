"""Starts `octavo` command lines as processes that can be killed, without paying for the imports each time.

Read from stdin, one JSON object a line: {"arguments": […], "environment": {…}, "folder": …, "file_limit": bytes or null}. Each
is run in a forked child with stdout and stderr in files of the folder; the answer is {"pid": …}, and when it has ended
{"status": …}, negative for a signal. The child is a process like any other, killed by the kernel's SIGKILL. One thread,
so that forking is safe.
"""

import json
import os
import resource
import sys
import traceback
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

torch.set_num_threads(1)

import transformers.models.auto.modeling_auto  # noqa: E402, F401

import octavo.train.trainer  # noqa: E402, F401
from octavo.cli import main  # noqa: E402


def child(order):
    for name in ("stdout", "stderr"):
        file = os.open(Path(order["folder"]) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, {"stdout": 1, "stderr": 2}[name])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(order["environment"])
    if order["file_limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_limit"], order["file_limit"]))
    code = 1
    try:
        code = main(order["arguments"])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def answer(content):
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # readline rather than iteration, whose read-ahead buffer a child would inherit and read again.
    while line := sys.stdin.readline():
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(order)
        answer({"pid": pid})
        answer({"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})
