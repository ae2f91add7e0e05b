"""The `octavo` command: one function per subcommand, each a thin layer over the library.

Subcommands import on demand, so `octavo --help` and a mistyped key need no torch. Results go to stdout, as text or with
`--json` as one JSON document; errors, and progress of a `--json` command, go to stderr. Exit codes are those of
`octavo.errors`.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo import arguments as options
from octavo.arguments import AsJson, Commands, GpuName, Overrides, Ranks, RunFile, WithOverrides, WorldSize
from octavo.errors import (
    EXIT_FAILED,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    InputError,
    Interrupted,
    OctavoError,
    RunStopped,
    first_line,
    print_in_any_encoding,
    warn,
)
from octavo.job_ranks import TORCHRUN, adopt_ranks, refuse_ranks_of_ranks, started_by
from octavo.storage import local_path

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.config.run import RunConfig
    from octavo.run.summary import Result
    from octavo.watchdog.stopping import StopRequest


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train transformers in 8-bit floating point, from a laptop's CPU to Hopper GPUs.",
    epilog="Example: octavo train presets/demo.toml",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's; returns the exit code, or exits as one of several ranks."""
    code = run(app, arguments, "octavo")
    if _is_joined():
        from octavo.watchdog.processes import leave

        leave(code)
    return code


def run(app: typer.Typer, arguments: Sequence[str] | None, name: str) -> int:
    """Run a command line, by default the process's, and print its error; returns the exit code. name: the program's name."""
    print_in_any_encoding()
    try:
        Path.cwd()  # MKL would end the process with a message about its library
    except FileNotFoundError:
        warn("the current folder was deleted: change to another one.")
        return EXIT_INPUT
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name=name)
    except SystemExit as end:
        if end.code == EXIT_INTERRUPTED and not _launcher_reports():
            warn("interrupted.")
        return end.code if isinstance(end.code, int) else EXIT_FAILED if end.code else 0
    except OctavoError as error:
        # All ranks stop together, so rank 0 reports it; a launcher also sends the signal after another rank has failed.
        stopped_elsewhere = isinstance(error, RunStopped) and _rank() > 0
        interrupted = isinstance(error, Interrupted) and _launcher_reports()
        _tell(str(error), error.exit_code, error, quiet=stopped_elsewhere or interrupted)
        return error.exit_code
    except OSError as error:  # a full disk or an unusable path: a traceback does not help
        from octavo.storage import describe_fault

        message, code = describe_fault(error)
        _tell(message, code, error)
        return code
    except Exception as error:  # a bug: print its traceback
        from octavo.versions import broken

        if (sentence := broken(error)) is not None:
            _tell(f"{sentence}.", EXIT_INPUT, error)
            return EXIT_INPUT
        if not vars(error).get("of_user"):
            error.add_note(_unexpected())
        _tell_launcher(first_line(error), EXIT_FAILED)
        raise
    return 0


def _tell(message: str, code: int, error: BaseException, *, quiet: bool = False) -> None:
    """Print an error, unless that was done, and store it for a launcher."""
    if not quiet and not getattr(error, "reported", False):
        _tell_launcher(message, code)
        _print_error(message)


def _tell_launcher(message: str, code: int) -> None:
    from octavo.watchdog.processes import tell_launcher

    tell_launcher(message, code)


def _unexpected() -> str:
    """The line under the traceback of a bug."""
    from octavo._version import __version__

    return (
        f"Octavo {__version__} does not expect this error, so it is probably a bug. Report it with the lines above, the "
        "run file and the output of: octavo doctor --json"
    )


@app.callback(invoke_without_command=True)
def _octavo(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from octavo._version import __version__

        print(__version__)
        raise typer.Exit


@app.command(cls=WithOverrides, epilog="Example: octavo train presets/demo.toml optimizer.lr=1e-3 train.output=runs/second")
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the resolved run, its arithmetic and its memory; write nothing.")
    ] = False,
    ranks: Ranks = None,
    world_size: WorldSize = None,
    gpu: GpuName = None,
    as_json: AsJson = False,
) -> None:
    """Train a run, or continue it from its newest checkpoint."""
    from octavo.watchdog.processes import die_with_launcher

    if ranks is not None and ranks > 1 and not dry_run:
        refuse_ranks_of_ranks(ranks)
    adopt_ranks(meet=not dry_run)
    die_with_launcher()
    config = _config(run_file, overrides)
    if dry_run:
        if None not in (ranks, world_size) and ranks != world_size:
            raise InputError(f"--ranks {ranks} and --world-size {world_size}: give only one of them.")
        from octavo.run.paths import check_paths

        _say_start(run_file, _console(stderr=True, quiet=_rank() > 0 or not _on_terminal()))
        check_paths(config)
        from octavo.plan import dry_run as arithmetic
        from octavo.plan import run as plan
        from octavo.run.folder import check_output

        figures, text = arithmetic.dry_run(
            plan.check(config, target=arithmetic.target(ranks if world_size is None else world_size, gpu))
        )
        check_output(config.output)
        _print_once(figures if as_json else text)
        return
    if world_size is not None or gpu is not None:
        raise InputError("--world-size and --gpu are for a planned run, but this one would start: add --dry-run.")
    from octavo.watchdog.stopping import StopRequest

    if ranks is not None and ranks > 1:
        with StopRequest():  # until the ranks have started
            code = _launch(config, ranks, run_file, overrides, as_json)
        if code is not None:
            raise typer.Exit(code)
    with StopRequest() as stop:  # before the slow import of torch: a scheduler may send a signal at any time
        console = _console(stderr=as_json, quiet=_rank() > 0, on_closed=stop.output_closed)
        result = _train(run_file, config, console, stop)
        from octavo.run.summary import summary_lines
    _print_once(result.as_dict() if as_json else summary_lines(result))


def _launch(config: RunConfig, ranks: int, run_file: str, overrides: list[str] | None, as_json: bool) -> int | None:
    """Train as several processes of this host; returns their exit code, or None if the run is finished."""
    from octavo.config.degrees import DEGREES, fit_batch, fit_degrees
    from octavo.run.finished import finished
    from octavo.run.paths import check_paths
    from octavo.watchdog.launcher import launch

    if finished(config) is not None:
        return None
    check_paths(config)
    degrees = fit_degrees(**{key: getattr(config.parallel, key) for key in DEGREES}, world_size=ranks)
    fit_batch(config.train.global_batch, config.train.micro_batch, degrees.data)
    # Without the user's folder, whose files may have the names of modules, unless Octavo is imported from there.
    safe = [] if Path(__file__).parent.parent == Path.cwd() else ["-P"]
    command = [sys.executable, *safe, "-m", "octavo", "train", *(["--json"] if as_json else []), "--", run_file]
    return launch([*command, *(overrides or ())], ranks, timeout=config.launch.timeout, grace=config.launch.grace)


def _train(run_file: str, config: RunConfig, console: Console, stop: StopRequest) -> Result:
    """Train, or report that the run is finished; checks without torch come first, since its import takes seconds."""
    _say_start(run_file, console)
    from octavo.run.finished import finished
    from octavo.run.paths import check_paths
    from octavo.watchdog.processes import signals_held, without_garbage_collection

    if (ended := finished(config)) is not None:
        config.tell_notes()
        result, lines = ended
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        return result
    check_paths(config)
    with signals_held(), without_garbage_collection():
        from octavo.train.trainer import Trainer

    return Trainer(config, console=console).train(stop=stop)


def _say_start(run_file: str, console: Console) -> None:
    from octavo._version import __version__

    console.print(f"octavo {__version__}: reading {run_file} …", markup=False, highlight=False, soft_wrap=True)


@app.command(cls=WithOverrides, epilog="Example: octavo prepare presets/demo.toml data.vocab_size=8192")
def prepare(
    run_file: RunFile,
    overrides: Overrides = None,
    show: options.Show = None,
    channels: options.Channels = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise the data of a run in advance, on a machine without a GPU."""
    adopt_ranks(meet=False)
    config, channels_folder = _config(run_file, overrides), options.path(channels, "--channels")
    from octavo.data.prepared import prepare_all as run

    prepared = run(config.data, console=_console(stderr=as_json, quiet=_rank() > 0))
    config.tell_notes()
    counts: dict[str, int] = {name: split.tokens for name, split in prepared.manifest.splits.items()}
    result: dict[str, Any] = {
        "folder": str(prepared.folder),
        "fingerprint": prepared.manifest.fingerprint,
        "vocab_size": prepared.manifest.vocab_size,
        "tokens": counts,
    }
    text = [f"{counts['train']:,} tokens to train on and {counts['validation']:,} to validate on, in {prepared.folder}"]
    for name, each in prepared.sets.items():
        counts[f"validation/{name}"] = each.manifest.splits["train"].tokens
        text.append(f"{counts[f'validation/{name}']:,} tokens to validate on as {name}, in {each.folder}")
    if (show is not None or prepared.manifest.examples is not None) and _rank() == 0:
        from octavo.data import show as shown

        texts = shown.documents(prepared, show) if show else []
        console = _console(quiet=as_json)
        for number, runs in enumerate(texts, start=1):
            console.rule(f"{number}", characters="─", style="none")
            console.print(shown.colored(runs, plain=not console.color_system), soft_wrap=True)
        text += shown.lines_of(prepared, config.data)
        result |= shown.as_json(prepared, config.data, texts)
    if channels_folder is not None and _rank() == 0:
        from octavo.run.channels import write_channels

        written = write_channels(prepared, config.data, channels_folder)
        text += [
            f"{count:,} chunks of {config.data.sequence_length:,} tokens in {channels_folder / name}"
            for name, count in written.items()
        ]
        result["channels"] = {str(channels_folder / name): count for name, count in written.items()}
    _print_once(result if as_json else text)


@app.command(cls=WithOverrides, epilog="Example: octavo describe runs/demo")
def describe(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder or a run file, such as runs/demo.", show_default=False)
    ],
    overrides: Overrides = None,
    world_size: WorldSize = None,
    gpu: GpuName = None,
    as_json: AsJson = False,
) -> None:
    """Show the matrices of a run in FP8, the others with the reason, and its memory; no weights are read."""
    adopt_ranks(meet=False)
    from octavo.plan.dry_run import describe_run, target

    figures, text = describe_run(local_path(run, "RUN"), overrides or (), target(world_size, gpu))
    _print_once(figures if as_json else text)


@app.command(cls=WithOverrides, epilog="Example: octavo verify presets/demo.toml --ranks 4 parallel.tensor_parallel_degree=2")
def verify(
    run_file: options.SomeRunFile = None,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", help="Ranks of the layout: 2 of the CPU, or with --gpu all GPUs.")
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Two layers of full width on GPUs, overlapped and not.")] = False,
    output: Annotated[str, typer.Option("--output", metavar="FILE.json", help="File for the differences.")] = "verify.json",
    causality: Annotated[
        bool,
        typer.Option("--causality", help="Also check that no later token, other sequence or earlier document changes logits."),
    ] = False,
    fuzz: options.FuzzCases = None,
    seed: options.FuzzSeed = None,
    resume: options.FuzzResume = False,
    as_json: AsJson = False,
) -> None:
    """Compare a run's layout on CPU ranks with one rank, on a small model in float64, whose sums do not depend on order.

    The exit code is 1 if anything differs; the first difference is named.
    """
    refuse_ranks_of_ranks(2 if ranks is None else ranks)
    path = local_path(output, "--output")
    options.check_fuzz(run_file, fuzz, seed, gpu=gpu, causality=causality, resume=resume, ranks=ranks)
    config = None if run_file is None else _config(run_file, overrides)
    from octavo.storage import check_file, write_atomic

    check_file(path, "--output", ".json")  # before the imports, which take seconds
    from octavo.verify.certificate import verify as compared
    from octavo.verify.fuzz import fuzz as drawn
    from octavo.verify.gpu import verify_on_gpus

    console = _console(stderr=True, quiet=not _on_terminal())
    overridden = [override.partition("=")[0] for override in overrides or ()]

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    if config is None:
        figures, text = drawn(fuzz or 1, seed or 0, ranks, output=path, resume=resume, say=say)
    else:
        on_cpus = partial(compared, config, 2 if ranks is None else ranks, overridden=overridden, causality=causality)
        figures, text = verify_on_gpus(config, ranks, say=say) if gpu else on_cpus(say=say)
    try:
        _print_to_reader(figures if as_json else text)  # before the file is written, since the disk may be full
    finally:
        write_atomic(path, json.dumps(figures, indent=1) + "\n")
    if not as_json:
        _print_to_reader([f"each {'difference' if config else 'case'} is in {path}"])
    if not figures["verified"]:
        raise typer.Exit(EXIT_FAILED)


@app.command(epilog="Example: octavo export runs/demo --to demo-hf")
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/demo.", show_default=False)],
    to: Annotated[str, typer.Option("--to", metavar="FOLDER", help="A new folder for the weights.", show_default=False)],
    checkpoint: Annotated[str | None, typer.Option(metavar="step-N", help="A checkpoint; the newest if absent.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="For a run with adapters, export the whole model instead of a PEFT folder.")
    ] = False,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="Export matrices in FP8 with the run's scales, for compressed-tensors and vLLM.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's weights, config and tokenizer for Hugging Face; for a run with adapters only these, for PEFT."""
    from octavo.fp8_export import export_fp8
    from octavo.run.export import export_run
    from octavo.storage import new_folder

    folder = new_folder(local_path(to, "--to"), "--to")
    write = export_fp8 if fp8 else export_run
    written = write(local_path(run, "RUN"), folder, checkpoint, merge=merge)
    adapters = (folder / "adapter_config.json").is_file()
    loads = f"PeftModel.from_pretrained(model, {str(folder)!r})" if adapters else ""
    loads = loads or f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    text = f"{written} is in {folder}: {loads} loads it{f', vllm serve {folder} serves it' if fp8 else ''}."
    _print({"checkpoint": str(written), "folder": str(folder)} if as_json else [text])


@app.command(epilog='Example: octavo sample runs/demo --prompt "Return the"')
def sample(
    source: Annotated[
        str, typer.Argument(metavar="RUN", help="The folder of a run, an export or a Hugging Face model.", show_default=False)
    ],
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help='Text to continue; "-" reads it from stdin; a new text if absent.')
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(metavar="step-N", help="A run's checkpoint; its newest if absent.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Most new tokens; 128 if absent, or fewer if positions end.")] = None,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Share of the probability from which tokens are drawn.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's turn, formatted by the chat template.")] = False,
    messages: Annotated[
        str | None, typer.Option(metavar="FILE", help="Conversations to answer: JSON with messages, or JSON lines.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print text from a run's newest checkpoint or from a model's folder, through Hugging Face's generation."""
    from octavo.run.sample import Chat, chats_of, prompt_of_stdin, samples

    if messages is not None and (chat or prompt is not None):
        raise InputError("--messages gives the conversation: leave out --prompt and --chat.")
    if chat and not (prompt or "").strip():
        raise InputError('--chat needs the text of a user: give --prompt "…", or a file of conversations by --messages.')
    text = prompt_of_stdin() if prompt == "-" else prompt
    settings: dict[str, Any] = {"checkpoint": checkpoint, "tokens": tokens, "temperature": temperature}
    settings |= {"top_p": top_p, "seed": seed}
    prompts: list[Any] = [text]
    if messages is not None:
        prompts = list(chats_of(messages))
    elif chat:
        prompts = [Chat.of({"messages": [{"role": "user", "content": text}]}, "--prompt")]
    results = samples(source, prompts, **settings)
    if as_json:
        _print(results[0] if len(results) == 1 else {"conversations": results})
    else:
        _print([each["text"] for each in results])


@app.command(epilog="Example: octavo compare runs/demo/bf16 runs/demo --plot curves.png")
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run folders; the first is the reference.")],
    last: Annotated[
        int | None, typer.Option(help="Steps at the end whose mean loss is compared; a tenth, at most 50, if absent.")
    ] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE.png", help="Draw the loss curves.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the losses of runs of the same steps, such as FP8 and bf16."""
    from octavo.run.compare import compare as side_by_side
    from octavo.run.compare import lines
    from octavo.run.plots import check_picture, draw_comparison

    if (picture := options.path(plot, "--plot")) is not None:
        check_picture(picture)
    comparison = side_by_side([local_path(run, "RUN") for run in runs], last=last)
    if picture is not None:
        draw_comparison(comparison, picture)
    for warning in comparison["warnings"]:
        warn(warning)
    _print(comparison if as_json else lines(comparison))


@app.command(epilog="Example: octavo doctor --json")
def doctor(as_json: AsJson = False) -> None:
    """Show hardware, packages and kernels for training in FP8, and what is missing."""
    from octavo.doctor import examine, render

    facts = examine()
    if as_json:
        _print(facts)
    else:
        render(facts, _console())


@app.command(cls=options.Bench, epilog="Example: octavo bench layers --cases llama-layer")
def bench(
    suite: options.BenchSuite,
    cases: options.Cases = None,
    steps: options.Steps = None,
    warmup: options.Warmup = None,
    output: options.Output = None,
    device: options.Device = None,
    tokens: options.TimedTokens = None,
    hidden: options.TimedHidden = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: times and errors of layers in FP8, or each kernel's speed relative to a device copy.

    Comparisons with other libraries are in a clone of Octavo: python -m benchmarks --help. Exit code 1: a case failed.
    """
    if tasks := started_by():
        raise InputError(f"octavo bench is one process, and {tasks}: start one task.")
    from octavo.bench.run import check_figures, render, run_suite

    console = _console(stderr=as_json)
    result = run_suite(
        suite,
        cases=options.names(cases, "--cases"),
        steps=steps,
        warmup=warmup,
        output=options.path(output, "--output"),
        device=device,
        tokens=tokens,
        hidden=hidden,
        command=shlex.join(["octavo", *sys.argv[1:]]),
        say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
    )
    if as_json:
        _print(result)
    else:
        render(result, console)
    check_figures(result)


@app.command(epilog="Example: octavo migrate train.py launch.py --run-file run.toml")
def migrate(
    scripts: options.Scripts,
    run_file: options.NewRunFile = None,
    world_size: WorldSize = None,
    as_json: AsJson = False,
) -> None:
    """Show a script's uses of SMP, Transformer Engine, FSDP1 and Accelerate, and their effect in Octavo.

    The exit code is 1 if a script needs a change first, and 0 once a run file is written.
    """
    from octavo.compat.migrate.report import lines, runs_unchanged, summary
    from octavo.compat.migrate.script import read

    new_run_file = options.path(run_file, "--run-file")
    paths = [local_path(script, "SCRIPT") for script in scripts]
    parsed = [read(path, paths) for path in paths]
    if new_run_file is not None:
        from octavo.compat.migrate.run_file import write_run_file

        write_run_file(new_run_file, parsed, world_size=world_size)
        warn(f"{new_run_file} is written: octavo train {new_run_file} --dry-run")
    _print(summary(parsed) if as_json else [line for script in parsed for line in lines(script)])
    if new_run_file is None and not all(map(runs_unchanged, parsed)):
        raise typer.Exit(1)


def _config(run_file: str, overrides: list[str] | None) -> RunConfig:
    from octavo.config.run import RunConfig

    return RunConfig.from_file(run_file, overrides or ())


def _console(*, stderr: bool = False, quiet: bool = False, on_closed: Callable[[], None] | None = None) -> Console:
    """A console; if its pipe has no reader any more, `on_closed` is called instead of an exit."""
    from rich.console import Console

    console = Console(stderr=stderr, quiet=quiet)
    if on_closed is not None:
        console.on_broken_pipe = on_closed  # type: ignore[method-assign]
    return console


def _rank() -> int:
    """This process's rank from the launcher's environment; 0 without a launcher or with a single rank."""
    rank, world = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return int(rank) if rank.isdecimal() and world.isdecimal() and int(world) > 1 else 0


def _launcher_reports() -> bool:
    """True if an interruption is reported once for all ranks: by their launcher, or by rank 0."""
    return TORCHRUN in os.environ or _rank() > 0


def _is_joined() -> bool:
    """True if this process has joined other ranks; does not import torch."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _print_error(message: str) -> None:
    """Print an error on stderr; ranks other than 0 wait first."""
    # All ranks find the same error in the input: after rank 0 has printed it and exited, the launcher ends the others. An error
    # of one rank alone is printed by that rank.
    if rank := _rank():
        from octavo.watchdog.processes import wait_for_rank_0

        wait_for_rank_0(3)
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


def _on_terminal() -> bool:
    """True if stderr is a terminal; it is None where a caller has closed it."""
    return sys.stderr is not None and sys.stderr.isatty()


def _print_to_reader(result: dict[str, Any] | list[str]) -> None:
    """Print a result; a reader that exits early, such as `head`, is not an error."""
    try:
        _print(result)
        if sys.stdout is not None:  # a caller has closed it
            sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)  # for the rest, and the flush at exit
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
