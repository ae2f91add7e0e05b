"""The walk-through's figures as a table, a plot and JSON: python examples/walkthrough/table.py FOLDER --length T --gpus N.

FOLDER holds what `measure.sh` leaves: runs/STEP/metrics.jsonl of run files, jobs/STEP/log.txt of the estimator. A step without
figures ran out of memory, or failed: its log says which.
"""

import argparse
import json
import re
import statistics
from pathlib import Path

STEPS = {"no-context": "no context parallelism", "context": "context parallelism", "context-fp8": "context parallelism, FP8"}
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("--length", type=int, required=True, help="tokens of a chunk")
parser.add_argument("--gpus", type=int, required=True)
parser.add_argument("--warmup", type=int, default=5, help="steps that are left out")
options = parser.parse_args()


def of_run(step: str) -> dict[str, float] | None:
    """Medians of a run file's steps."""
    path = options.folder / "runs" / step / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    lines = lines[options.warmup :]
    if not lines:
        return None
    speed = statistics.median(line["tokens_per_second"] for line in lines)
    found = {"samples_per_second": speed / options.length, "tokens_per_second_per_gpu": speed / options.gpus}
    if lines[0].get("tflops") is not None:
        found["tflops_per_gpu"] = statistics.median(line["tflops"] for line in lines)
    return found | {"peak_gib": max(line["memory_gib"] for line in lines)}


def of_job(step: str) -> dict[str, float] | None:
    """The median of an estimator's steps."""
    path = options.folder / "jobs" / step / "log.txt"
    text = path.read_text(errors="replace") if path.is_file() else ""
    speeds = [float(speed) for speed in re.findall(r"^step \d+: .* ([\d.]+) samples/s$", text, re.M)][options.warmup :]
    return {"samples_per_second": statistics.median(speeds)} if speeds else None


def reason(step: str, way: str) -> str:
    """Full memory, or nothing known."""
    text = "".join(path.read_text(errors="replace") for path in options.folder.glob(f"{way}-{step}.txt"))
    return "out of memory" if "out of memory" in text else "not run"


rows = []
for step in STEPS:
    for way, found in (("run", of_run(step)), ("estimator", of_job(step))):
        rows.append({"step": step, "way": way} | (found or {"failed": reason(step, way)}))
(options.folder / "walkthrough.json").write_text(json.dumps({"suite": "walkthrough", "rows": rows}, indent=1) + "\n")
lines = ["| step | way | samples/s | tokens/s a GPU | TFLOP/s a GPU | peak GiB |", "|---|---|---|---|---|---|"]
names = {"samples_per_second": ".3f", "tokens_per_second_per_gpu": ",.0f", "tflops_per_gpu": ".3g", "peak_gib": ".1f"}
for row in rows:
    figures = [format(row[name], form) if name in row else "-" for name, form in names.items()]
    cells = [row["failed"], "-", "-", "-"] if "failed" in row else figures
    lines.append(f"| {STEPS[row['step']]} | {row['way']} | {' | '.join(cells)} |")
print("\n".join(lines))
(options.folder / "walkthrough.md").write_text("\n".join(lines) + "\n")

import matplotlib  # noqa: E402 - after the table, which needs none of it

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

figure, axes = pyplot.subplots(figsize=(7, 2.6), layout="constrained")
shown = [row for row in rows if row["way"] == "run"][::-1]
bars = axes.barh([STEPS[row["step"]] for row in shown], [row.get("samples_per_second", 0) for row in shown], color="#3b6ea5")
labels = [f"{row['samples_per_second']:.3f}" if "failed" not in row else row["failed"] for row in shown]
axes.bar_label(bars, labels, padding=4)
axes.margins(x=0.2)
axes.set_xlabel(f"samples/s of {options.length:,} tokens on {options.gpus} GPUs")
axes.spines[["top", "right"]].set_visible(False)
figure.savefig(options.folder / "walkthrough.png", dpi=150)
