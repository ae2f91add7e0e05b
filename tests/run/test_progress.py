"""Progress of a run: a live line on a terminal, plain lines elsewhere, and no field without a value."""

import io
import re
import sys

import pytest
from rich.console import Console

from octavo.run.progress import StepProgress, duration, format_step


def record(step, **more):
    return {"step": step, "loss": 2.5, "tokens_per_second": 12345.6, "memory_gib": 1.25, "step_seconds": 0.5, **more}


def shown(terminal, every=1, steps=10, width=160, **more):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width)
    with StepProgress(console, label="delayed", steps=steps, done=0, every=every) as progress:
        for step in range(1, steps + 1):
            progress.step(record(step, **more))
    return out.getvalue()


def test_a_line_has_every_field_that_is_known():
    line = format_step(record(4, tflops=0.01234, mfu=0.4321, validation_loss=3.0, perplexity=20.0855), 10, 0.5)
    assert line == (
        "step 4/10  loss 2.5000  validation 3.0000 (perplexity 20.1)  12,346 tok/s  0.0123 TFLOP/s  MFU 43.2%  "
        "1.2 GiB  ETA 0:03"
    )
    assert format_step(record(10), 10, 0.5) == "step 10/10  loss 2.5000  12,346 tok/s  1.2 GiB  ETA 0:00"


def test_elsewhere_than_on_a_terminal_there_is_one_plain_line_a_step():
    text = shown(terminal=False)
    assert [line.split("  ")[1] for line in text.splitlines()] == [f"step {n}/10" for n in range(1, 11)]
    assert "\x1b" not in text
    assert [line.split("  ")[1] for line in shown(False, every=4).splitlines()] == [
        "step 1/10", "step 4/10", "step 8/10", "step 10/10",
    ]  # fmt: skip


def test_on_a_terminal_one_line_is_redrawn():
    text = shown(terminal=True)
    assert "\x1b[" in text
    assert "step 10/10" in text
    assert text.count("\n") < 10


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


@pytest.mark.parametrize("width", [40, 80, 109, 110])
def test_a_narrow_terminal_shows_every_field_and_leaves_out_the_bar(width):
    known = {"tflops": 0.01234, "mfu": 0.4321, "validation_loss": 3.0, "perplexity": 20.0855}
    text = shown(terminal=True, width=width, **known)
    last = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", text[text.rindex("10/10") - 20 :])
    assert "…" not in last
    words = " ".join(last.split())
    assert " ".join(format_step(record(10, **known), 10, 0.5).split()) in words
    assert ("━" in last) == (width >= 110)
