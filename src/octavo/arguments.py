"""Arguments and options of commands: shared ones, and those too long for `cli.py`; the message for a mistyped key."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from octavo.config.degrees import MOST_CPU_RANKS
from octavo.errors import InputError, Interrupted
from octavo.storage import local_path

OF_A_CLONE = ("one-gpu", "lora", "sharded", "context", "vision", "checkpoint", "memory", "products", "attention")
"""Suites of `benchmarks/`, which are only in Octavo's repository."""


class Commands(TyperGroup):
    """Ctrl-C in any command is an error with a message and a separate exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


class Bench(TyperCommand):
    """`octavo bench`: for a suite outside the package, the error has the command for a clone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments."""
        suite = next((each for each in args if each in OF_A_CLONE), None)
        if suite is None:
            return super().parse_args(ctx, args)
        clone = Path(__file__).parents[2]
        where = f"Run it in {clone}" if (clone / "benchmarks" / "__main__.py").is_file() else "Run it in a clone of Octavo"
        command = shlex.join(["python", "-m", "benchmarks", *args])
        raise InputError(f"the suite {suite} is not in the package, which has layers and kernels. {where}: {command}")


class WithOverrides(TyperCommand):
    """A command with overrides: for a key written as an option, the error has the override."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments."""
        arguments = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # No public exception type covers all versions of typer; those for an unknown option have this attribute.
            name = getattr(error, "option_name", None)
            if getattr(error, "possibilities", True):  # an option of the command has no value, or is near
                raise
            start = next((i for i, each in enumerate(arguments) if name and each.startswith(name)), None)
            if start is None:
                raise
            from octavo.config.reading import as_override
            from octavo.config.run import RunConfig

            meant = as_override(arguments[start:], RunConfig)
            if meant is None:
                raise
            raise InputError(f"no such option: {name}. Keys are set without dashes: did you mean {meant}?") from None


RunFile = Annotated[str, typer.Argument(metavar="RUN.toml", help="A run file, such as presets/demo.toml.", show_default=False)]
SomeRunFile = Annotated[
    str | None, typer.Argument(metavar="[RUN.toml]", help="A run file; none with --fuzz.", show_default=False)
]
FuzzCases = Annotated[
    int | None, typer.Option("--fuzz", min=1, metavar="N", help="Verify N layouts and models at random instead of a run file.")
]
FuzzSeed = Annotated[
    int | None,
    typer.Option("--seed", min=0, metavar="S", help="Number of the first case, which reproduces it; 0 if absent."),
]
FuzzResume = Annotated[bool, typer.Option("--resume", help="Continue with cases that --output lacks or has as different.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Keys to set over the run file.", show_default=False),
]
Ranks = Annotated[
    int | None,
    typer.Option("--ranks", min=1, metavar="N", help="Processes to start on this host, one a GPU; one if absent."),
]
WorldSize = Annotated[
    int | None, typer.Option("--world-size", metavar="N", help="Ranks of a planned run; the present ones if absent.")
]
GpuName = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help='GPU of a planned run, such as h200 or "h100 sxm"; the present one if absent.'),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]

Show = Annotated[
    int | None,
    typer.Option("--show", metavar="N", min=1, help="Also print the first N documents with their trained tokens coloured."),
]
Channels = Annotated[
    str | None,
    typer.Option(
        "--channels", metavar="FOLDER", help="Also write chunks as JSON lines: train/training.json, test/validation.json."
    ),
]
Scripts = Annotated[
    list[str], typer.Argument(metavar="SCRIPT...", help="Scripts or notebooks; they are read, not run.", show_default=False)
]
NewRunFile = Annotated[
    str | None, typer.Option("--run-file", metavar="OUT.toml", help="Write a run file from SMP's arguments in the scripts.")
]

BenchSuite = Annotated[str, typer.Argument(metavar="SUITE", help="Suite: layers or kernels.", show_default=False)]
Cases = Annotated[str | None, typer.Option(metavar="A,B", help="Workloads, kernels or layers; all if absent.")]
Steps = Annotated[
    int | None,
    typer.Option(min=1, help="Measured steps of an entry, calls of a kernel, or seeds of a layer; 20, 100 or 3 if absent."),
]
Warmup = Annotated[
    int | None, typer.Option(min=0, help="Steps before measuring; 5, for a kernel 10, for a layer 20 if absent.")
]
TimedTokens = Annotated[int | None, typer.Option("--tokens", min=1, help="Tokens of a timed layer; 2 x 1,024 if absent.")]
TimedHidden = Annotated[int | None, typer.Option("--hidden", min=1, help="Features of a timed layer; 2,048 if absent.")]
Device = Annotated[str | None, typer.Option(help="Device; a GPU if there is one.")]
Output = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="A .json file, or a folder for one new file per workload; here if absent."),
]


def path(text: str | None, option: str) -> Path | None:
    """The path of an option; None if absent. Path options are strings, since Path would change the form of an address.

    Raises:
        InputError: it is an address, or empty.
    """
    return None if text is None else local_path(text, option)


def names(text: str | None, option: str = "") -> list[str]:
    """Comma-separated names; an option without any name is refused."""
    listed = [name.strip() for name in (text or "").split(",") if name.strip()]
    if option and text is not None and not listed:
        raise InputError(f'{option} "{text}" has no names: give some, separated by commas, or leave it out for all.')
    return listed


def check_fuzz(
    run_file: str | None,
    cases: int | None,
    seed: int | None,
    *,
    gpu: bool,
    causality: bool,
    resume: bool = False,
    ranks: int | None = None,
) -> None:
    """Raise an InputError unless `octavo verify` has either a run file or --fuzz, with compatible options."""
    if ranks is not None and ranks < 2 and not gpu:
        raise InputError(f"--ranks {ranks}: a layout needs at least 2 ranks, to be compared with fewer.")
    if ranks is not None and ranks > MOST_CPU_RANKS and not gpu:
        raise InputError(
            f"--ranks {ranks}: octavo verify starts at most {MOST_CPU_RANKS} processes. Give --ranks {MOST_CPU_RANKS} or less: "
            "two shards and two replicas verify any number."
        )
    if causality and (gpu or cases is not None):
        raise InputError(f"--causality checks a run file's layout on CPUs: leave {'--gpu' if gpu else '--fuzz'} out.")
    if cases is not None and run_file is not None:
        raise InputError(f"--fuzz {cases} generates its runs: leave {run_file} out, or leave --fuzz out to verify it.")
    if cases is None and run_file is None:
        raise InputError("no run file: give one, as in octavo verify presets/demo.toml, or --fuzz 10 for random runs.")
    if cases is None and resume:
        raise InputError("--resume continues the cases of --fuzz: give --fuzz N, or leave --resume out.")
    if cases is None and seed is not None:
        raise InputError(f"--seed {seed} is the first case of --fuzz: give --fuzz 1, or leave --seed out.")
    if cases is not None and gpu:
        raise InputError(f"--fuzz {cases} generates runs of CPU ranks: leave --gpu out.")
