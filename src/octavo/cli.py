"""The `octavo` command: one function a subcommand, each a few lines over the library.

Subcommands import on demand: `octavo --help` and a mistyped key need no torch. Results go to stdout, as text or with `--json`
as one JSON document; errors, and progress of a `--json` command, go to stderr. Exit codes are those of `octavo.errors`.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.errors import EXIT_FAILED, OctavoError, RunStopped, warn

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
    """Run a command line, by default the process's own; returns the exit code, or exits as one of several ranks."""
    code = _run(arguments)
    if _is_joined():
        from octavo.watchdog.processes import leave

        leave(code)
    return code


def _run(arguments: Sequence[str] | None) -> int:
    """Run a command line and print its error; returns the exit code."""
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="octavo")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_FAILED if end.code else 0
    except OctavoError as error:
        # All ranks stop together, so rank 0 reports it; a launcher also sends the signal after another rank has failed.
        stopped_elsewhere = isinstance(error, RunStopped) and _rank() > 0
        if not getattr(error, "reported", False) and not stopped_elsewhere:
            _print_error(str(error))
        return error.exit_code
    except OSError as error:  # a full disk or missing permission: a traceback does not help
        if not getattr(error, "reported", False):
            _print_error(" ".join(str(error).split()))
        return EXIT_FAILED
    return 0


@app.callback(invoke_without_command=True)
def _octavo(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from octavo._version import __version__

        print(__version__)
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
        from octavo.train import dry_run as arithmetic
        from octavo.train import plan

        figures, text = arithmetic.dry_run(plan.check(config))
        _print_once(figures if as_json else text)
        return
    from octavo.watchdog.stopping import StopRequest

    with StopRequest() as stop:  # before the slow import of torch: a scheduler may send a signal at any time
        from octavo.run.summary import summary_lines
        from octavo.train.loop import train as run

        console = _console(stderr=as_json, quiet=_rank() > 0, on_closed=stop.output_closed)
        result = run(config, console=console, stop=stop)
    _print_once(result.as_dict() if as_json else summary_lines(result))


@app.command(epilog="Example: octavo prepare presets/demo.toml data.vocab_size=8192")
def prepare(run_file: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Tokenise the data of a run in advance, on a machine without a GPU."""
    config = _config(run_file, overrides)
    from octavo.data.prepared import prepare as run

    prepared = run(config.data, console=_console(stderr=as_json, quiet=_rank() > 0))
    config.tell_notes()
    counts = {name: split.tokens for name, split in prepared.manifest.splits.items()}
    result = {
        "folder": str(prepared.folder),
        "fingerprint": prepared.manifest.fingerprint,
        "vocab_size": prepared.manifest.vocab_size,
        "tokens": counts,
    }
    text = f"{counts['train']:,} tokens to train on and {counts['validation']:,} to validate on, in {prepared.folder}"
    _print_once(result if as_json else [text])


@app.command(epilog="Example: octavo export runs/demo --to demo-hf")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/demo.", show_default=False)],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="A new folder for the weights.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Write a run's newest weights, config and tokenizer for Hugging Face."""
    from octavo.run.export import export_run

    checkpoint = export_run(run, to)
    text = f"{checkpoint} is in {to}: AutoModelForCausalLM.from_pretrained({str(to)!r}) loads it."
    _print({"checkpoint": str(checkpoint), "folder": str(to)} if as_json else [text])


@app.command(epilog='Example: octavo sample runs/demo --prompt "Return the"')
def sample(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, an export or a Hugging Face model.", show_default=False)
    ],
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help='Text to continue; "-" reads it from stdin; a new text if absent.')
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(metavar="step-N", help="A run's checkpoint; its newest if absent.")] = None,
    tokens: Annotated[int | None, typer.Option(help="New tokens at most; 128 if absent, fewer where positions end.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token each time.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Share of the probability from which tokens are drawn.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print text from a run's newest checkpoint or from a model's folder, through Hugging Face's generation."""
    from octavo.run.sample import sample as generate

    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    found = generate(source, text, checkpoint=checkpoint, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)
    _print(found if as_json else [found["text"]])


@app.command(epilog="Example: octavo compare runs/demo/bf16 runs/demo --plot curves.png")
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; the first is the reference.")],
    last: Annotated[int, typer.Option(help="Steps at the end whose mean loss is compared.")] = 50,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the loss curves.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the losses of runs of the same steps, such as FP8 and bf16."""
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
    """Show hardware, packages and kernels for training in FP8, and what is missing."""
    from octavo.doctor import examine, render

    found = examine()
    if as_json:
        _print(found)
    else:
        render(found, _console())


@app.command(epilog="Example: octavo bench one-gpu --cases llama-1b,vit-huge --peers te --breakdown")
def bench(
    suite: Annotated[
        str,
        typer.Argument(
            metavar="SUITE", help="Suite: one-gpu, sharded, checkpoint, kernels, products or layers.", show_default=False
        ),
    ],
    cases: Annotated[str | None, typer.Option(metavar="A,B", help="Workloads, kernels or layers; all if absent.")] = None,
    peers: Annotated[
        str | None, typer.Option(metavar="A,B", help="Peers beside Octavo: bf16, torchao, te; all installed ones if absent.")
    ] = None,
    entries: Annotated[str | None, typer.Option(metavar="A,B", help="Only these entries, such as octavo-delayed.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Measured steps of an entry, calls of a kernel, or seeds of a layer; 20, 100 or 3 if absent."),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Steps before measuring; 5, for a kernel 10, for a layer 20 if absent.")
    ] = None,
    breakdown: Annotated[bool, typer.Option("--breakdown", help="Also record the time of a step by kind of kernel.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A .json file, or a folder for one new file a workload; here if absent.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device; a GPU if there is one.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of a sharded model (on a CPU: ranks); all if absent.")] = None,
    folder: Annotated[Path | None, typer.Option("--folder", metavar="PATH", help="Folder for temporary checkpoints.")] = None,
    saves: Annotated[int, typer.Option(min=1, help="Checkpoints written in the background; the last counts.")] = 2,
    restore_gpus: Annotated[int | None, typer.Option(min=1, help="GPUs that restore; half of them if absent.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure Octavo and its peers in the same run: steps, checkpoints, kernels, errors of layers."""
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


def _console(*, stderr: bool = False, quiet: bool = False, on_closed: Callable[[], None] | None = None) -> Console:
    """A console; `on_closed` is called in place of an exit when its pipe has lost its reader."""
    from rich.console import Console

    console = Console(stderr=stderr, quiet=quiet)
    if on_closed is not None:
        console.on_broken_pipe = on_closed  # type: ignore[method-assign]
    return console


def _rank() -> int:
    """This process's rank from the launcher's environment; 0 without a launcher or with a single rank."""
    rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return int(rank) if rank.isdecimal() and world.isdecimal() and int(world) > 1 else 0


def _is_joined() -> bool:
    """True if this process has joined other ranks; does not import torch."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _print_error(message: str) -> None:
    """Print an error on stderr; ranks other than 0 wait first."""
    # All ranks find the same fault in the input: after rank 0 has printed it and exited, the launcher ends the others. A fault
    # of one rank alone is printed by that rank.
    if rank := _rank():
        time.sleep(3)
        message = f"rank {rank}: {message}"
    warn(message)


def _print_once(result: dict[str, Any] | list[str]) -> None:
    """Print the result of all ranks, on rank 0."""
    if _rank() == 0:
        _print(result)


def _print(result: dict[str, Any] | list[str]) -> None:
    """Print one JSON document, or lines."""
    from octavo.run.metrics import encode

    print(encode(result, indent=2) if isinstance(result, dict) else "\n".join(result))


if __name__ == "__main__":
    sys.exit(main())
