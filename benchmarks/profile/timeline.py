"""Timeline of a trace: the kernels of each stream of a GPU in an interval of a step.

    python -m benchmarks context --cases llama-8b-16k-cp2 --traces traces
    python -m benchmarks.profile.timeline traces/llama-8b-16k-cp2-octavo-delayed.json.gz --from 120 --to 160 --plot out.png

prints the busy time of each kind of kernel in each stream, and draws them. Milliseconds count from the first kernel of a trace.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.files import read_json
from benchmarks.profile.breakdown import kind_of
from octavo.errors import InputError, OctavoError, warn
from octavo.storage import check_file, describe_fault, local_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KERNELS = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
"""Categories of a Chrome trace that run on a GPU."""
_COLOURS = {
    "attention": "#1f77b4", "fp8 products": "#2ca02c", "bf16 products": "#98df8a", "communication": "#d62728",
    "norms": "#9467bd", "activation": "#ff7f0e", "casts": "#bcbd22", "rope": "#17becf",
}  # fmt: skip
_REST = "#7f7f7f"


class Call(NamedTuple):
    """A call of a kernel: its stream, its kind, and its start and end in milliseconds."""

    stream: int
    kind: str
    start: float
    end: float


def calls_of(trace: Mapping[str, Any]) -> list[Call]:
    """The calls of a Chrome trace in the order of their starts, or those that `main` has written."""
    if "calls" in trace:
        return [Call(int(stream), str(kind), float(start), float(end)) for stream, kind, start, end in trace["calls"]]
    events = [event for event in trace["traceEvents"] if event.get("cat") in _KERNELS]
    begun = min((event["ts"] for event in events), default=0.0)
    times = ((event, (event["ts"] - begun) / 1e3, event["dur"] / 1e3) for event in events)
    return sorted(
        (Call(event["args"]["stream"], kind_of(event["name"]), start, start + ms) for event, start, ms in times),
        key=lambda call: call.start,
    )


def cut(calls: Sequence[Call], first: float, last: float) -> list[Call]:
    """Calls between two times, in milliseconds from the first.

    Raises:
        InputError: nothing runs there.
    """
    found = [call for call in calls if call.end > first and call.start < last]
    if not found:
        end = max((call.end for call in calls), default=0.0)
        until = "the end" if math.isinf(last) else f"{last:g} ms"
        raise InputError(
            f"no kernel runs between {first:g} ms and {until}: the trace has 0 to {end:.1f} ms. Change --from and --to."
        )
    return [call._replace(start=max(call.start, first) - first, end=min(call.end, last) - first) for call in found]


def table(calls: Sequence[Call]) -> str:
    """Milliseconds of each kind in each stream, the busiest stream first."""
    busy: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for call in calls:
        busy[call.stream][call.kind] += call.end - call.start
    lines = []
    for stream, kinds in sorted(busy.items(), key=lambda item: -sum(item[1].values())):
        parts = [f"{kind} {ms:.2f}" for kind, ms in sorted(kinds.items(), key=lambda item: -item[1])]
        lines.append(f"stream {stream}: {', '.join(parts)} ms")
    return "\n".join(lines)


def figure(calls: Sequence[Call]) -> Figure:
    """A row for each stream, the busiest on top, with a bar for each call in the colour of its kind."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    busy: dict[int, float] = defaultdict(float)
    for call in calls:
        busy[call.stream] += call.end - call.start
    streams = sorted(busy, key=lambda stream: -busy[stream])
    drawn = Figure(figsize=(12, 1.2 + 0.5 * len(streams)), layout="constrained")
    axes = drawn.subplots()
    for call in calls:
        bar = [(call.start, call.end - call.start)]
        axes.broken_barh(bar, (streams.index(call.stream) - 0.4, 0.8), facecolors=_COLOURS.get(call.kind, _REST))
    axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    seen = {call.kind for call in calls}
    patches = [Patch(color=colour, label=kind) for kind, colour in _COLOURS.items() if kind in seen]
    patches += [Patch(color=_REST, label="other")] if seen - set(_COLOURS) else []
    axes.legend(
        handles=patches, ncols=len(patches), loc="upper center", bbox_to_anchor=(0.5, 1.25), frameon=False, fontsize="small"
    )
    return drawn


def main(arguments: Sequence[str]) -> int:
    """Print the table, write the calls, draw them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile.timeline", description="Timeline of a trace.")
    parser.add_argument("trace", help="a file of python -m benchmarks --traces, or of --output")
    parser.add_argument("--from", dest="first", type=float, default=0.0, metavar="MS", help="0 if absent")
    parser.add_argument("--to", dest="last", type=float, default=float("inf"), metavar="MS", help="the end if absent")
    parser.add_argument("--output", metavar="FILE.json", help="for the calls of this stretch")
    parser.add_argument("--plot", metavar="FILE.png")
    given = parser.parse_args(arguments)
    try:
        given.trace = local_path(given.trace, "trace")
        given.output = None if given.output is None else local_path(given.output, "--output")
        given.plot = None if given.plot is None else local_path(given.plot, "--plot")
        _check(given)
        calls = cut(_read(given.trace), given.first, given.last)
        if given.output is not None:
            rounded = [[call.stream, call.kind, round(call.start, 4), round(call.end, 4)] for call in calls]
            given.output.write_text(json.dumps({"trace": given.trace.name, "calls": rounded}) + "\n", encoding="utf-8")
        if given.plot is not None:
            figure(calls).savefig(given.plot, dpi=120, format="png")
    except OctavoError as error:
        warn(str(error))
        return error.exit_code
    except OSError as error:  # of a file that is written, such as a full disk
        message, code = describe_fault(error)
        warn(message)
        return code
    print(table(calls))
    return 0


def _check(given: argparse.Namespace) -> None:
    """Refuse a stretch of no length and files that could not be written."""
    if not 0 <= given.first < given.last:  # NaN too
        swapped = f", such as --from {given.last:g} --to {given.first:g}" if 0 <= given.last < given.first else ""
        raise InputError(
            f"--from {given.first:g} and --to {given.last:g} are no stretch of a trace: --from is 0 ms or more, and --to is "
            f"above it{swapped}."
        )
    if given.output is not None:
        check_file(given.output, "--output", ".json")
        if given.output.exists() and given.trace.exists() and given.output.samefile(given.trace):
            raise InputError(
                f"--output {given.output} is the trace itself, whose other calls would be lost: give another name."
            )
    if given.plot is not None:
        check_file(given.plot, "--plot", ".png")


def _read(path: Path) -> list[Call]:
    """The calls of a file.

    Raises:
        InputError: it is no trace, or has no kernel of a GPU.
    """
    what, give = "a trace", "a file of python -m benchmarks --traces, or of --output"
    found = read_json(path, what, give)
    if not isinstance(found, dict) or not {"calls", "traceEvents"} & found.keys():
        raise InputError(f"{path} is not {what}: it has neither traceEvents nor calls. Give {give}.")
    try:
        calls = calls_of(found)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(f"{path} is not {what}: its calls are not as PyTorch's profiler writes them. Give {give}.") from None
    if not calls:
        raise InputError(f"{path} has no kernel of a GPU. Give {give}.")
    return calls


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
