"""The `octavo` command: one function a subcommand, each a few lines over the library.

A subcommand imports what it runs when it runs it, so that `octavo --help` and a mistyped key are answered without loading
torch. Results go to stdout, as text or with `--json` as one JSON document; progress of a `--json` command and every error
go to stderr. Exit codes are those of `octavo.errors`.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.errors import EXIT_FAILED, OctavoError, RunStopped

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.config.run import RunConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train transformers in 8-bit floating point, from a laptop's CPU to Hopper GPUs.",
    epilog="Example: octavo train presets/demo.toml",
)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.toml", help="A run file, such as presets/demo.toml.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Keys to set over the run file.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (by default the process's own); returns the exit code, or ends the process if it is one of several."""
    code = _answer(arguments)
    if _is_joined():
        from octavo.watchdog.processes import leave

        leave(code)
    return code


def _answer(arguments: Sequence[str] | None) -> int:
    """The exit code of a command line, whose errors are said."""
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="octavo")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_FAILED if end.code else 0
    except OctavoError as error:
        # A stop concerns all ranks, and one is enough to say it; a launcher also sends the signal when another rank has failed.
        stops_with_others = isinstance(error, RunStopped) and _rank() > 0
        if not getattr(error, "reported", False) and not stops_with_others:
            _say_once(str(error))
        return error.exit_code
    except OSError as error:  # a full disk, a folder without permission: the machine's fault, and no traceback explains it
        if not getattr(error, "reported", False):
            _say_once(" ".join(str(error).split()))
        return EXIT_FAILED
    return 0


@app.callback(invoke_without_command=True)
def _octavo(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False
) -> None:
    if version:
        from octavo._version import __version__

        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise typer.Exit


@app.command(epilog="Example: octavo train presets/demo.toml optimizer.lr=1e-3 train.output=runs/second")
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the resolved run and its arithmetic; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a run, or continue it from its newest checkpoint."""
    from octavo.watchdog.processes import die_with_launcher

    die_with_launcher()
    config = _config(run_file, overrides)
    if dry_run:
        from octavo.train.plan import check
        from octavo.train.plan import dry_run as count

        plan = count(check(config))
        _print_once(plan.as_dict() if as_json else plan.lines())
        return
    from octavo.watchdog.stopping import StopRequest

    with StopRequest() as stop:  # before torch is loaded: a scheduler may change its mind at once
        from octavo.run.summary import summary_lines
        from octavo.train.loop import train as run

        result = run(config, console=_console(stderr=as_json, quiet=_rank() > 0), stop=stop)
    _print_once(result.as_dict() if as_json else summary_lines(result))


@app.command(epilog="Example: octavo prepare presets/demo.toml data.vocab_size=8192")
def prepare(run_file: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Tokenise the data of a run beforehand, where there is no GPU to keep waiting."""
    config = _config(run_file, overrides)
    from octavo.data.prepared import prepare as run

    prepared = run(config.data, console=_console(stderr=as_json, quiet=_rank() > 0))
    counts = prepared.token_counts
    if as_json:
        _print_once(
            {
                "folder": str(prepared.folder),
                "fingerprint": prepared.fingerprint,
                "vocab_size": prepared.vocab_size,
                "tokens": counts,
            }
        )
    else:
        _print_once(
            [f"{counts['train']:,} tokens to train on and {counts['validation']:,} to validate on, in {prepared.folder}"]
        )


@app.command(epilog="Example: octavo export runs/demo --to demo-hf")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/demo.", show_default=False)],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="A new folder for the weights.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Write a run's newest weights, config and tokenizer as Hugging Face loads them."""
    from octavo.run.export import export_run

    checkpoint = export_run(run, to)
    if as_json:
        _print({"checkpoint": str(checkpoint), "folder": str(to)})
    else:
        _print([f"{checkpoint} is in {to}: AutoModelForCausalLM.from_pretrained({str(to)!r}) loads it."])


@app.command(epilog="Example: octavo compare runs/demo/bf16 runs/demo --plot curves.png")
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; the first is the reference.")],
    last: Annotated[int, typer.Option(help="Steps at the end whose mean loss is compared.")] = 50,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the loss curves.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the losses of runs of the same steps, such as FP8 beside bf16."""
    from octavo.run.compare import check_picture, draw, lines
    from octavo.run.compare import compare as side_by_side

    if plot is not None:
        check_picture(plot)
    found = side_by_side(runs, last=last)
    if plot is not None:
        draw(found, plot)
    _print(found if as_json else lines(found))


@app.command(epilog="Example: octavo doctor --json")
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has for training in FP8, and what is missing."""
    from octavo.doctor import examine, render

    found = examine()
    if as_json:
        _print(found)
    else:
        render(found, _console(stderr=False))


@app.command(epilog="Example: octavo bench one-gpu --cases llama-1b,vit-huge --peers te --breakdown")
def bench(
    suite: Annotated[
        str,
        typer.Argument(
            metavar="SUITE",
            help="What to measure: one-gpu, sharded, checkpoint, kernels, products or layers.",
            show_default=False,
        ),
    ],
    cases: Annotated[str | None, typer.Option(metavar="A,B", help="Only these workloads, kernels or layers.")] = None,
    peers: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Peers beside Octavo's entries: bf16, torchao, te; all that are installed if absent."),
    ] = None,
    entries: Annotated[str | None, typer.Option(metavar="A,B", help="Exactly these entries, such as octavo-delayed.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Measured steps of each entry, calls of a kernel, or seeds of a layer; 20, 100 or 3 if absent."
        ),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Steps before measuring; 5, 10 of a kernel or 20 of a layer if absent.")
    ] = None,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Also record where the time of a step goes, by kind of kernel.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A .json file, or a folder for a file a workload."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to run; a GPU if there is one.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of a sharded model (on a CPU: ranks); all if absent.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="PATH", help="Where checkpoints are written and removed.")
    ] = None,
    saves: Annotated[int, typer.Option(min=1, help="Checkpoints written in the background; the last counts.")] = 2,
    restore_gpus: Annotated[int | None, typer.Option(min=1, help="GPUs that restore; half of them if absent.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure Octavo beside its peers in the same run: its steps, checkpoints, kernels, and the errors of its layers."""
    from octavo.bench.run import render, run_suite

    console = _console(stderr=as_json)
    result = run_suite(
        suite,
        cases=_names(cases),
        entries=_names(entries),
        peers=None if peers is None else _names(peers),
        steps=steps,
        warmup=warmup,
        breakdown=breakdown,
        output=output,
        device=device,
        gpus=gpus,
        folder=folder,
        saves=saves,
        restore_gpus=restore_gpus,
        command=shlex.join(["octavo", *sys.argv[1:]]),
        say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
    )
    if as_json:
        _print(result)
    else:
        render(result, console)


def _config(run_file: Path, overrides: list[str] | None) -> RunConfig:
    from octavo.config.run import RunConfig

    return RunConfig.from_file(run_file, overrides or ())


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _console(*, stderr: bool, quiet: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, quiet=quiet)


def _rank() -> int:
    """Which rank of several this process is, as its launcher says; 0 where there is one alone, or nobody says."""
    rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return int(rank) if rank.isdecimal() and world.isdecimal() and int(world) > 1 else 0


def _is_joined() -> bool:
    """Whether this process is one of several ranks that have met; asked without loading torch."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _say_once(message: str) -> None:
    """An error on stderr. Every rank of a job finds the same mistake in its input; what only this one sees must be said too.

    So the others give the first one time to speak, whose end makes the launcher end them.
    """
    if rank := _rank():
        time.sleep(3)
        message = f"rank {rank}: {message}"
    sys.stderr.write(f"octavo: {message}\n")


def _print_once(result: dict[str, Any] | list[str]) -> None:
    """The result of what several ranks do together, from the first one."""
    if _rank() == 0:
        _print(result)


def _print(result: dict[str, Any] | list[str]) -> None:
    """One JSON document, or lines."""
    print(json.dumps(_plain(result), indent=2, allow_nan=False) if isinstance(result, dict) else "\n".join(result))


def _plain(value: Any) -> Any:
    """What JSON has no number for, as metrics.jsonl writes it: "NaN", "Infinity", "-Infinity"."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


if __name__ == "__main__":
    sys.exit(main())
