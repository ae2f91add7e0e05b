"""Progress of a run: lines that stay, a live line on a terminal, their widths, and no field without a value."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from octavo.run.progress import StepProgress, duration, step_line, validation_lines

RATES = {"lr": 3e-4, "grad_norm": 1.234}
ALL = RATES | {"epoch": 1.25, "tflops": 828.4, "mfu": 0.4321, "loss_scale": 65536.0, "skipped": True}
CHECKED = {"validation_loss": 3.0, "perplexity": 20.0855}


def record(step, **more):
    return {"step": step, "loss": 2.5, "tokens_per_second": 12345.6, "memory_gib": 1.25, "step_seconds": 0.5, **more}


def shown(records, *, every=1, steps=10, done=0, terminal=False, width=160):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width)
    with StepProgress(console, label="delayed", steps=steps, done=done, every=every) as progress:
        for each in records:
            progress.step(each)
    return out.getvalue()


def steps_of(text):
    return [int(n) for n in re.findall(r"^delayed  step (\d+)/", text, re.MULTILINE)]


def test_a_line_has_every_field_that_is_known():
    assert step_line(record(4, **ALL | CHECKED), 10, 0.5, 200) == (
        "step 4/10  loss 2.5000  skipped  epoch 1.25  lr 3.0e-04  norm 1.23  scale 65,536  12,346 tok/s  828 TFLOP/s  "
        "MFU 43.2%  1.2 GiB  ETA 0:03"
    )
    none = dict.fromkeys(("tflops", "mfu", "epoch", "loss_scale"))
    assert step_line(record(10, skipped=False, **none), 10, 0.5, 200) == (
        "step 10/10  loss 2.5000  12,346 tok/s  1.2 GiB  ETA 0:00"
    )


@pytest.mark.parametrize(
    ("norm", "text"), [(0.001234, "1.2e-03"), (0.5, "0.50"), (999.0, "999.00"), (31234.0, "3.1e+04"), (float("inf"), "inf")]
)
def test_a_norm_of_any_size_is_short(norm, text):
    assert f"norm {text}  " in step_line(record(1, grad_norm=norm), 10, 0.5, 200)


def test_a_narrow_line_leaves_out_the_fields_that_say_least():
    lines = {width: step_line(record(4, **ALL), 10, 0.5, width) for width in range(40, 140)}
    assert all(len(line) <= width for width, line in lines.items())
    gone = {width: [word for word in lines[139].split("  ") if word not in line] for width, line in lines.items()}
    assert [gone[width] for width in (139, 125, 116, 105)] == [
        [], ["828 TFLOP/s"], ["828 TFLOP/s", "1.2 GiB"], ["828 TFLOP/s", "MFU 43.2%", "1.2 GiB"],
    ]  # fmt: skip
    assert lines[80] == "step 4/10  loss 2.5000  skipped  lr 3.0e-04  norm 1.23  12,346 tok/s  ETA 0:03"
    assert lines[45] == "step 4/10  loss 2.5000  skipped  ETA 0:03"
    # All steps of a run have the same fields, whatever the digits of the step.
    fields = {re.sub(r"[\d.]+", "", step_line(record(n, **RATES), 10_000, 0.5, 60).split("ETA")[0]) for n in (9, 9999)}
    assert len(fields) == 1


def test_experts_are_on_the_line_of_a_file():
    routing = {"expert_load": [1.25, 0.75], "largest_expert_load": 1.257, "router_entropy": 1.9239, "dropped_tokens": 0}
    line = step_line(record(4, **RATES, **routing), 10, 0.5, 110)
    assert line == ("step 4/10  loss 2.5000  lr 3.0e-04  norm 1.23  12,346 tok/s  load 1.26  entropy 1.92  dropped 0  ETA 0:03")
    assert "load 1.26  entropy 1.92  ETA" in step_line(record(1000, **RATES, **routing), 1000, 0.5, 103)


def test_the_results_of_a_validation_are_never_left_out():
    own = {"evaluation/accuracy": 0.512345678, "evaluation/correct": 41, "evaluation/none": None}
    assert validation_lines(record(4, **CHECKED, **own), 10, 110) == [
        "step 4/10  loss 2.5000  validation 3.0000  perplexity 20.1  evaluation/accuracy 0.51235  evaluation/correct 41"
    ]
    assert validation_lines(record(4, **CHECKED, **own), 10, 60) == [
        "step 4/10  loss 2.5000  validation 3.0000  perplexity 20.1",
        "step 4/10  evaluation/accuracy 0.51235",
        "step 4/10  evaluation/correct 41",
    ]
    assert validation_lines(record(4), 10, 60) == []


def test_elsewhere_than_on_a_terminal_there_are_plain_lines():
    records = [record(n, **ALL) for n in range(1, 11)]
    text = shown(records)
    assert steps_of(text) == list(range(1, 11))
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 110
    assert steps_of(shown(records, every=4)) == [1, 4, 8, 10]
    assert steps_of(shown(records[5:], every=4, done=5)) == [6, 8, 10]  # the first step of this start


@pytest.mark.parametrize("terminal", [False, True])
def test_a_validation_has_a_line_between_the_others_and_so_has_the_last_step_of_a_run_that_stops(terminal):
    records = [record(n) for n in range(1, 8)]
    records[2] |= CHECKED
    records[4] |= {"evaluation/accuracy": 0.5}
    text = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", shown(records, every=6, terminal=terminal).replace("\r", "\n"))
    assert [line for line in text.splitlines() if line.startswith("delayed  step")] == [
        "delayed  step 1/10  loss 2.5000  12,346 tok/s  1.2 GiB  ETA 0:04",
        "delayed  step 3/10  loss 2.5000  validation 3.0000  perplexity 20.1",
        "delayed  step 5/10  loss 2.5000  evaluation/accuracy 0.5",
        "delayed  step 6/10  loss 2.5000  12,346 tok/s  1.2 GiB  ETA 0:02",
        "delayed  step 7/10  loss 2.5000  12,346 tok/s  1.2 GiB  ETA 0:02",
    ]


def test_a_rank_that_shows_nothing_leaves_stderr_alone(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    console = Console(file=out, force_terminal=True, quiet=True)
    with StepProgress(console, label="fp8", steps=1, done=0, every=1) as progress:
        progress.step(record(1))
        sys.stderr.write("octavo: a checkpoint is damaged")
    assert (out.getvalue(), err.getvalue()) == ("", "octavo: a checkpoint is damaged")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (125, "2:05"), (3725, "1:02:05")])
def test_a_duration(seconds, text):
    assert duration(seconds) == text


RUN = """
import time
from rich.console import Console
from octavo.run.progress import StepProgress
with StepProgress(Console(), label="bf16", steps=123456, done=0, every=20) as progress:
    for step in range(1, 46):
        record = {"step": step, "loss": 2.5, "lr": 3e-4, "grad_norm": 1.25, "epoch": 1.25, "tokens_per_second": 96705.6,
                  "memory_gib": 24.0, "step_seconds": 0.5, "tflops": 828.0, "mfu": 0.46}
        if step == 30:
            record |= {"validation_loss": 3.0, "perplexity": 20.0855, "evaluation/accuracy": 0.5, "evaluation/recall": 0.25}
        progress.step(record)
        time.sleep(0.01)
"""


@pytest.mark.parametrize("width", [60, 80, 120])
def test_on_a_terminal_lines_stay_above_a_live_one_and_none_is_wrapped(width):
    """Drawn for a real terminal, by a program of its own: rich asks the process's terminal for its size."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    given = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    program = subprocess.Popen(
        [sys.executable, "-c", RUN], stdin=theirs, stdout=theirs, stderr=theirs, env={**given, "TERM": "xterm-256color"},
        cwd=Path(__file__).parent,
    )  # fmt: skip
    os.close(theirs)
    drawn = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the program has ended
            break
        drawn += part
        if not part:
            break
    os.close(ours)
    assert program.wait() == 0
    text = drawn.decode()
    rows = [re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", row) for row in re.split(r"\r\n|\r|\n", text)]
    assert max(map(len, rows)) <= width
    stays = [row for row in rows if row.startswith("bf16  ")]
    assert list(dict.fromkeys(re.search(r"step (\d+)/123456", row)[1] for row in stays)) == ["1", "20", "30", "40", "45"]
    results = " ".join(" ".join(row.split("  ")[2:]) for row in stays if "step 30/" in row)
    assert results == "loss 2.5000 validation 3.0000 perplexity 20.1 evaluation/accuracy 0.5 evaluation/recall 0.25"
    stays = [row for row in stays if "step 30/" not in row]
    assert all(("norm 1.25" in row) == (width >= 80) for row in stays)
    assert ("lr 3.0e-04" in stays[0]) == (width >= 80)
    assert ("MFU 46.0%" in stays[0]) == (width >= 120)
    live = {row.rstrip() for row in rows if row.startswith("bf16 ") and row not in stays}
    assert any(re.search(r"step 4\d/123456  loss 2.5000", row) for row in live)
    assert any("━" in row or "╸" in row for row in live) == (width >= 110)
    assert not any("…" in row for row in rows)
    assert "\x1b[2A" not in text
    assert text.count("\x1b[1A") <= 1  # the live line has one row; it is removed at the end
