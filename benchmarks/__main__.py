"""`python -m benchmarks SUITE`, in a clone of Octavo: measures Octavo and its peers in the same run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from octavo.arguments import AsJson, Cases, Device, Output, Steps, Warmup, names, path
from octavo.cli import run
from octavo.errors import InputError
from octavo.job_ranks import started_by
from octavo.run.metrics import encode
from octavo.storage import local_path

Peers = Annotated[
    str | None, typer.Option(metavar="A,B", help="Peers beside Octavo: bf16, torchao, te; all installed ones if absent.")
]
Entries = Annotated[str | None, typer.Option(metavar="A,B", help="Only these entries, such as octavo-delayed.")]
Suite = Annotated[
    str,
    typer.Argument(
        metavar="SUITE",
        help="Suite: one-gpu, sharded, context, vision, checkpoint, memory, kernels, products, attention or layers.",
        show_default=False,
    ),
]
Breakdown = Annotated[bool, typer.Option("--breakdown", help="Also record the time of a step by kind of kernel.")]
Traces = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Folder for Chrome traces of the first rank; includes --breakdown.")
]
Gpus = Annotated[
    int | None, typer.Option(min=1, help="GPUs of a model on several (on a CPU: ranks); if absent all, for lora one.")
]
Folder = Annotated[str | None, typer.Option("--folder", metavar="PATH", help="Folder for temporary checkpoints.")]
RestoreGpus = Annotated[int | None, typer.Option(min=1, help="GPUs that restore; half of them if absent.")]
Starts = Annotated[
    int | None, typer.Option(min=1, help="Fresh starts of each entry, a row each, for how far its speed repeats; 1 if absent.")
]
Prices = Annotated[str | None, typer.Option(metavar="FILE.toml", help="Prices of machines, for costs of the suite vision.")]


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(
    epilog="Example: python -m benchmarks one-gpu --cases llama-1b,vit-huge --peers te --breakdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
def bench(
    suite: Suite,
    cases: Cases = None,
    peers: Peers = None,
    entries: Entries = None,
    steps: Steps = None,
    warmup: Warmup = None,
    breakdown: Breakdown = False,
    traces: Traces = None,
    output: Output = None,
    device: Device = None,
    gpus: Gpus = None,
    folder: Folder = None,
    saves: Annotated[int | None, typer.Option(min=1, help="Saves in the background; the last counts; 2 if absent.")] = None,
    restore_gpus: RestoreGpus = None,
    prices: Prices = None,
    starts: Starts = None,
    as_json: AsJson = False,
) -> None:
    """Measure Octavo and its peers in the same run: steps, checkpoints, kernels, errors of layers.

    Exit code 1: every entry of a workload failed. Out of memory is no failure in the suite context.
    """
    if found := started_by():
        raise InputError(
            f"python -m benchmarks starts its ranks itself, and {found}: start one task, with --gpus for the ranks."
        )
    from rich.console import Console

    from benchmarks.run import check_figures, render, run_suite

    console = Console(stderr=as_json)
    result = run_suite(
        suite,
        cases=names(cases, "--cases"),
        entries=names(entries, "--entries"),
        peers=None if peers is None else names(peers),
        steps=steps,
        warmup=warmup,
        breakdown=breakdown,
        traces=None if traces is None else local_path(traces, "--traces").resolve(),
        output=path(output, "--output"),
        device=device,
        gpus=gpus,
        folder=path(folder, "--folder"),
        saves=saves,
        restore_gpus=restore_gpus,
        prices=path(prices, "--prices"),
        starts=starts,
        command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
    )
    if as_json:
        print(encode(result, indent=2))
    else:
        render(result, console)
    check_figures(result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's; returns the exit code."""
    return run(app, arguments, "python -m benchmarks")


if __name__ == "__main__":
    sys.exit(main())
