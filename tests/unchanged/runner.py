"""Runs cases in forked children: the imports are paid for once, and every case begins in a process that has done nothing.

`octavo` is called as a user calls it: the module that `python -m octavo` runs, and the names of the package.
"""

from __future__ import annotations

import fnmatch
import json
import os
import random
import runpy
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bits import checkpoint_bits, export_bits, machine
from cases import BASE, OWN_CODE, SAME_LOSSES, TRAIN, Start, Train
from loops import LOOPS
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401  what every child needs, imported once

import octavo

PRESET = Path(__file__).parents[2] / "presets" / "demo.toml"
TEXT = (
    "a scale for each tensor keeps small values in reach of the format while large ones saturate and the history of "
    "maxima decides what the next step may hold before anything overflows"
)
WORDS = TEXT.split()


def names(pattern: str) -> list[str]:
    """Of the cases that match."""
    return [name for name in (*TRAIN, *LOOPS) if fnmatch.fnmatchcase(name, pattern)]


def run(chosen: list[str], folder: Path, jobs: int) -> dict[str, Any]:
    """Results by case; a case that fails has {"failed": the end of its output}."""
    torch.set_num_threads(1)
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in _documents(90)), encoding="utf-8")
    data = folder / "data"
    prepared = folder / "prepare"
    prepared.mkdir()
    running = {_fork(lambda: _prepare(prepared, corpus, data), prepared): "prepare"}
    os.waitpid(next(iter(running)), 0)
    results: dict[str, Any] = {"data": _result(prepared)}
    waiting, running = list(chosen), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            (folder / name).mkdir()
            running[_fork(lambda name=name: _case(name, folder / name, corpus, data), folder / name)] = name
        pid, _ = os.wait()
        if pid in running:
            name = running.pop(pid)
            results[name] = _result(folder / name)
    for name, other in SAME_LOSSES.items():
        if "losses" in results.get(name, {}) and "losses" in results.get(other, {}):
            same = all(results[name][key] == results[other][key] for key in ("losses", "grad_norms"))
            results[name]["failed" if not same else "same_as"] = other if same else f"its losses are not those of {other}"
    return {"machine": machine(), "cases": results}


def _documents(count: int) -> Iterator[str]:
    """Texts of uneven length, by a linear congruential generator."""
    number = 1
    for _ in range(count):
        chosen = []
        number = (number * 1103515245 + 12345) % 2**31
        for _ in range(3 + (number >> 8) % 50):
            number = (number * 1103515245 + 12345) % 2**31
            chosen.append(WORDS[(number >> 8) % len(WORDS)])
        yield " ".join(chosen)


def _result(folder: Path) -> dict[str, Any]:
    path = folder / "result.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    said = (folder / "output").read_text(encoding="utf-8", errors="replace") if (folder / "output").is_file() else ""
    return {"failed": said[-3000:]}


def _fork(function: Callable[[], dict[str, Any]], folder: Path) -> int:
    """A child that writes what the function returns to result.json, its output in a file."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    _renew_threads()
    code = 1
    try:
        with _output_to(folder / "output"):
            os.chdir(folder)
            (folder / "result.json").write_text(json.dumps(function()), encoding="utf-8")
        code = 0
    except BaseException:
        with (folder / "output").open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
    os._exit(code)


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    yield
    sys.stdout.flush()
    sys.stderr.flush()


def _case(name: str, folder: Path, corpus: Path, data: Path) -> dict[str, Any]:
    if name in LOOPS:
        random.seed(0)  # their states are part of a checkpoint
        np.random.seed(0)
        return LOOPS[name](folder)
    return _train(TRAIN[name], folder, {"data.source": str(corpus), "data.folder": str(data)})


def _prepare(folder: Path, corpus: Path, data: Path) -> dict[str, Any]:
    """Tokenise the corpus for all cases; the tokenizer and the order of documents are in the fingerprint."""
    given = BASE | {"data.source": str(corpus), "data.folder": str(data)}
    with (folder / "said.json").open("w") as file:
        subprocess.run(_module("prepare", str(PRESET), *_overrides(given), "--json"), stdout=file, check=True)
    said = json.loads((folder / "said.json").read_text(encoding="utf-8"))
    return {"fingerprint": said["fingerprint"], "tokens": said["tokens"]}


def _module(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "octavo", *arguments]


def _overrides(keys: dict[str, Any]) -> list[str]:
    return [f"{key}={_toml(value)}" for key, value in keys.items()]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def _train(case: Train, folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    keys = BASE | data | {"train.output": str(folder / "run")} | case.keys
    if case.own:
        keys = {key: value for key, value in keys.items() if not key.startswith("model.config.")}
        AutoConfig.for_model(case.own, **OWN_CODE[case.own]).save_pretrained(folder / "source")
        keys |= {"model.source": str(folder / "source"), "model.blocks": "own"}
    if case.keys.get("fp8.enabled", True) is False or case.keys.get("fp8.recipe", "delayed") != "delayed":
        del keys["fp8.amax_history_len"]  # refused without delayed scaling
    for start in case.starts:
        _start(start, keys | start.keys, launcher=case.launcher)
    run = folder / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    octavo.export(run, folder / "export")
    return {
        "losses": [float(record["loss"]).hex() for record in records],
        "grad_norms": [float(record["grad_norm"]).hex() for record in records],
        "validation": [float(record["validation_loss"]).hex() for record in records if "validation_loss" in record],
        "tokens": [record["tokens"] for record in records],
        "checkpoint": checkpoint_bits(newest),
        "export": export_bits(folder / "export"),
    }


def _start(start: Start, keys: dict[str, Any], *, launcher: bool) -> None:
    arguments = ["train", str(PRESET), *_overrides(keys)]
    if launcher:
        ranks = ["--nproc-per-node", str(start.ranks), "--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
        subprocess.run([sys.executable, "-m", "torch.distributed.run", *ranks, "-m", "octavo", *arguments], check=True)
        return
    shared: dict[str, str] = {}
    if start.ranks > 1:
        shared = {"WORLD_SIZE": str(start.ranks), "LOCAL_WORLD_SIZE": str(start.ranks)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    children = {}
    for rank in range(start.ranks):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if shared else {}
            os.environ.update(shared | own)
            _renew_threads()
            os._exit(_command(arguments))
        children[pid] = rank
    codes = {children[pid]: os.waitstatus_to_exitcode(status) for pid, status in (os.waitpid(p, 0) for p in children)}
    if any(codes.values()):
        raise SystemExit(f"octavo train ended with {codes} (exit codes by rank)")


def _renew_threads() -> None:
    """In a forked child, whose first call makes PyTorch's pool of threads anew: two threads of a backward at once may crash."""
    torch.set_num_threads(torch.get_num_threads())


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _command(arguments: list[str]) -> int:
    """`python -m octavo …` in this process; its exit code."""
    sys.argv = ["octavo", *arguments]
    code: Any = 0
    try:
        runpy.run_module("octavo", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 0 if code is None else 1
