"""`octavo bench`: the two suites that need no other library, so that an installed Octavo can measure its GPU.

Comparisons with peers are in `benchmarks/` of a clone. In Python:

run_suite("layers", cases=["llama-layer"], command="octavo bench layers --cases llama-layer")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from octavo.bench import results
from octavo.bench.kernels import KERNELS, measure_kernels
from octavo.bench.layers import LAYERS, OCTAVO, SETTLING, measure_layers, size_of
from octavo.bench.results import print_errors, print_kernels, print_times
from octavo.errors import InputError, unknown
from octavo.hardware import describe_device
from octavo.kernels.timing import median_us

KNOWN: dict[str, dict[str, Any]] = {"layers": dict(LAYERS), "kernels": dict(KERNELS)}
"""The cases of each suite, by name."""
STEPS = {"layers": (3, SETTLING), "kernels": (100, 10)}
"""Default numbers of seeds, or calls, and of passes that settle delayed scaling, or calls before them."""

ROUNDS, PAUSE_CYCLES = 30, 20_000_000
"""Timed calls of a layer, and the pause before each: about 10 ms, for its host's launches."""

Say = Callable[[str], None]


def run_suite(
    suite: str,
    *,
    cases: Sequence[str] | None = None,
    steps: int | None = None,
    warmup: int | None = None,
    output: Path | None = None,
    device: str | None = None,
    tokens: int | None = None,
    hidden: int | None = None,
    command: str,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Measure layers or kernels in this process; returns the document that was written.

    Arguments are the options of `octavo bench`; None is an option that is absent.

    Args:
        output: a .json file, replaced if it exists; or a folder for a new file SUITE.json; None: the current folder.
        tokens, hidden: of the timed layers, on a GPU: a sequence's tokens, and features.
        command: the command line, for the record.
        say: called with progress messages.

    Raises:
        InputError: an unknown suite, case or device, kernels or a size without a GPU, a size of kernels, or an output that
            cannot be written.
    """
    if suite not in KNOWN:
        raise unknown("benchmark suite", suite, KNOWN)
    for name in cases or ():
        if name not in KNOWN[suite]:
            raise unknown("case", name, KNOWN[suite])
    used = device_of(device)
    if suite == "kernels":
        check_gpu(suite, used)
    if (tokens, hidden) != (None, None) and (suite == "kernels" or used.type != "cuda"):
        why = "kernels have their shapes" if suite == "kernels" else f"nothing is timed on the device {used.type}"
        raise InputError(f"--tokens and --hidden are of the timed layers on a GPU: {why}. Remove them.")
    timed = size_of(tokens, hidden)
    output = output or Path()
    file = output if output.suffix == ".json" else output / f"{suite}.json"
    results.check_output([file], output, say)
    chosen = [KNOWN[suite][name] for name in dict.fromkeys(cases or KNOWN[suite])]
    first, second = STEPS[suite]
    count, before = first if steps is None else steps, second if warmup is None else warmup
    if suite == "kernels":
        rows = measure_kernels(chosen, used, iterations=count, warmup=before, say=say)
    else:
        rows = measure_layers(
            chosen, used, [OCTAVO], seeds=count, settling=before, say=say, timer=_timer(used, before), timed=timed
        )
    name = f"cuda:{used.index or 0}" if used.type == "cuda" else "cpu"
    document = results.document(suite, command, describe_device(name), rows)
    results.write({file: document})
    say(f"wrote {file}")
    return document


def _timer(device: torch.device, warmup: int) -> Callable[..., list[float]] | None:
    """Times calls on a GPU; None for a CPU, whose FP8 is emulated."""
    if device.type != "cuda":
        return None
    return partial(median_us, device=device, rounds=ROUNDS, warm_up=max(1, warmup), pause_cycles=PAUSE_CYCLES)


def device_of(asked: str | None) -> torch.device:
    """The device by its name; a GPU if there is one and none is asked for.

    Raises:
        InputError: it is none, of another kind, or not there.
    """
    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise InputError(f"device {asked!r} is not a device's name: use cpu, cuda or cuda:0.") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {asked!r} has no benchmarks: use cpu or cuda.")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(f"device {asked!r} does not exist: torch sees {count} GPUs. Use {'cuda:0' if count else 'cpu'}.")
    return device


def check_gpu(suite: str, device: torch.device) -> None:
    """Raise an InputError for a suite of a GPU on a CPU."""
    if device.type != "cuda":
        what = "measures memory" if suite == "memory" else "times kernels"
        raise InputError(f"the suite {suite} {what} of a GPU, and the device is cpu. Use --device cuda where there is one.")


def render(document: dict[str, Any], console: Console) -> None:
    """Print a table of kernels; or of errors for each layer, and of the times of all."""
    if document["suite"] == "kernels":
        print_kernels(document, console)
    else:
        print_errors(document, console)
        print_times(document, console)


def check_figures(document: dict[str, Any]) -> None:
    """Check that each layer or kernel has a figure.

    Raises:
        OctavoError: names those without.
    """
    figures: dict[str, bool] = {}
    for row in document["rows"]:
        name, has = row.get("layer", row.get("workload")), "error" not in row and row.get("octavo_error", 0) is not None
        figures[name] = figures.get(name, False) or has
    results.check_figures(figures)
