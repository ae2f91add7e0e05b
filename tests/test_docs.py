"""The documents agree with the code."""

import json
import re
import statistics
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import octavo
from benchmarks import curves, lengths, pages, readme
from benchmarks.vision import page
from octavo import doctor
from octavo.cli import main
from octavo.config.run import RunConfig, known_keys
from octavo.hardware import FP8_CAPABILITY, LEAST_CAPABILITY
from octavo.libraries import LEAST_DRIVER
from octavo.run.resume import CHANGEABLE, FP8_CHANGES

ROOT = Path(__file__).parent.parent
RUN_FILES = (ROOT / "docs" / "run-files.md").read_text(encoding="utf-8")


def test_the_oldest_driver_and_gpu_on_the_readme_are_those_that_the_doctor_compares_with():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    least, fp8 = (".".join(map(str, capability)) for capability in (LEAST_CAPABILITY, FP8_CAPABILITY))
    assert f"A GPU needs compute capability {least}, and {fp8} for FP8; its driver {LEAST_DRIVER[13]} for" in text
    assert f"CUDA 13 (the usual one), {LEAST_DRIVER[12]} for CUDA 12." in text


def test_every_key_is_documented_in_its_section_with_its_meaning():
    sections = dict(re.findall(r"^## \[(\w+)\]\n(.*?)(?=^## )", RUN_FILES, re.M | re.S))
    assert set(sections) == set(RunConfig.model_fields)
    for name in known_keys():
        section, key = name.split(".")
        fields = RunConfig.model_fields[section].annotation.model_fields
        field = next(field for own, field in fields.items() if key == (field.alias or own))
        row = next(line for line in sections[section].splitlines() if line.startswith(f"| `{key}` "))
        assert row.endswith(f"| {field.description} |"), name
        if not field.is_required():
            default = field.get_default(call_default_factory=True)
            shown = "none" if default is None else f"`{json.dumps(list(default) if isinstance(default, tuple) else default)}`"
            assert f"| {shown} |" in row, name
    assert RUN_FILES.count("\n| `") - len(known_keys()) == 16  # the rows of the run's folder, and of the changes of [fp8]


def test_the_keys_that_may_change_are_the_table_of_resume():
    part = RUN_FILES.split("## Continuing a run")[1].split("## The folder")[0]
    assert set(re.findall(r"`([a-z0-9_]+\.[a-z0-9_*]+)`", part)) - {"train.steps", "train.extended"} == {
        *CHANGEABLE,
        *FP8_CHANGES,
    }


@pytest.mark.parametrize("name", ["torch", "triton", "transformers"])
def test_tested_versions_are_the_range_of_the_package_the_pin_is_within_and_the_doctor_says_the_same(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = next(r.specifier for r in map(Requirement, project["dependencies"]) if r.name == name)
    bounds = {part.operator: Version(part.version) for part in allowed}
    assert bounds.keys() == {">=", "<"}
    row = re.search(rf"^\| {name} \| (\S+) \| (\S+) \| (\S+) \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    oldest, newest, pinned = map(Version, row.groups())
    assert oldest.release[:2] == bounds[">="].release
    following = (newest.major, newest.minor + 1)  # later patches of the newest are admitted, later minor versions are not
    assert following == bounds["<"].release
    assert f"\n{name}=={pinned}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert oldest <= pinned <= newest
    assert version(name) in allowed
    (install,) = (package.install for package in doctor.PACKAGES if package.name == name)
    assert Requirement(install.removeprefix("pip install ").strip("'")).specifier == allowed


def rows_of(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]


REPLACED = ("rms-norm-backward-fp8", "cross-entropy", "cross-entropy-fp8")
"""Kernels of that file that have been replaced."""


def test_figures_of_the_kernels_are_in_benchmarks():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for row in rows_of("kernels"):
        if row["workload"] not in ("copy", *REPLACED):
            shape = " \u00d7 ".join(f"{n:,}" for n in row["shape"])
            share = 100 * row["share_of_copy"]
            found = re.search(rf"^\| {row['workload']} \| {shape} \| {row['us']:.0f} \| {share:.0f}% \| (.+) \|$", text, re.M)
            assert found, row["workload"]
            assert (found[1] == "\u2013") == (share >= 80), row["workload"]


def test_errors_of_the_layers_are_in_benchmarks():
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8").replace("\n", " ")
    ratios = [row["octavo_error"] / row["te_error"] for row in rows_of("layers")]
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    assert f"of {len(ratios)} ratios the smallest was {low:.2f}, the median {middle:.2f} and the largest {high:.2f}" in text
    assert high < 1.05


def figures_of(row):
    figures = (
        f"{row['tokens_per_second']:,.0f}",
        f"{row['step_ms']:,.0f}",
        f"{row['tflops']:.0f}",
        f"{100 * row['mfu']:.1f}%",
        f"{row['peak_gib']:.1f}",
    )
    return f"| {' | '.join(figures)} |"


def signed(percent):
    return f"{percent:+.2f}".replace("-", "\N{MINUS SIGN}")


def test_figures_of_the_page_on_performance_are_in_benchmarks():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").replace("**", "")
    for row in rows_of("recompute-llama-1b"):
        assert f"{row['tokens_per_second']:,} tokens a second and {row['peak_gib']:.1f} GiB" in text, row["entry"]
    tflops = {}
    for row in rows_of("attention"):
        tflops.setdefault(row["workload"], []).append(row["tflops"])
    for flash, cudnn in tflops.values():
        assert f" {cudnn:.0f} | {flash:.0f} |" in text
    whole = tflops["llama-8b-16k"][0]
    window, documents = (100 * whole / tflops[f"llama-8b-16k-{kind}-4k"][0] - 100 for kind in ("window", "documents"))
    assert f"A pair costs {window:.0f}% more in the window and {documents:.0f}% more in the documents" in text
    before, after = (row for row in rows_of("step-flash-attention"))
    assert f"{after['kernel_ms']['attention']:.1f} ms in place of {before['kernel_ms']['attention']:.1f}" in text.replace(
        "\n", " "
    )
    assert f"step {after['step_ms']:.1f} ms in place of {before['step_ms']:.1f}" in text.replace("\n", " ")
    blocks = {}
    for row in rows_of("products"):
        times = blocks.setdefault((row["workload"], row["precision"]), [0.0, 0.0])
        times[0] += row["torch_us"]
        times[1] += row["us"]
    gains = [row["gain"] for row in rows_of("products")]
    assert f"between {100 / min(gains) - 100:.1f}% slower and {100 * max(gains) - 100:.0f}% faster" in text
    backward = {}
    for row in rows_of("products"):
        if row["product"] != "output":
            key = row["workload"], row["precision"]
            backward[key] = backward.get(key, 0.0) + row["us"]
    saved = [100 * (1 - us / backward[workload, "fp8"]) for (workload, kind), us in backward.items() if kind == "fp8 fast"]
    assert f"{min(saved):.0f} to {max(saved):.0f}% off backward's products" in text
    experts = {}
    for row in rows_of("products-mixtral-8x7b"):
        times = experts.setdefault(row["precision"], [0.0, 0.0])
        times[0] += row["torch_us"]
        times[1] += row["us"]
    for theirs, ours in [*blocks.values(), *experts.values()]:
        assert f" {theirs:,.0f} → {ours:,.0f}, {theirs / ours:.3f} ×" in text  # noqa: RUF001
    longer = [100 / row["gain"] - 100 for row in rows_of("products-mixtral-8x7b") if row["precision"] == "fp8"]
    outputs, rest = longer[::3], longer[1::3] + longer[2::3]
    assert f"outputs take up to {max(outputs):.0f}% longer" in text
    assert f"accumulate precisely, {min(rest):.0f} to {max(rest):.0f}% longer" in text


def test_figures_of_grouped_layers_are_in_benchmarks():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    table = text.split("### GroupedLinear")[1].split("\n## ")[0]
    found = {}
    for row in rows_of("grouped-linear"):
        found.setdefault((row["workload"], row["recipe"]), {})[row["entry"]] = row
    for (_, recipe), rows in found.items():
        one, times = rows["octavo"], {name: f"{row['ms']:.2f}" for name, row in rows.items()}
        if recipe == "rowwise":  # never one after the other
            del times["octavo-single"]
        experts = f"{one['experts']} of {one['columns_in']:,} \u00d7 {one['columns_out']:,}"
        cells = [
            experts,
            f"{one['rows']:,}",
            recipe,
            *(times.get(name, "\u2013") for name in ("octavo", "octavo-single", "te")),
        ]
        assert f"| {' | '.join(cells)} |\n" in table


@pytest.mark.parametrize(
    "name", ["one-gpu-llama-1b-beside-te", "one-gpu-llama-8b-8layers", "one-gpu-llama2-7b-8layers", "one-gpu-vit-huge"]
)
def test_where_a_step_goes_is_in_benchmarks(name):
    """Each column of a table of kinds of kernels, and its sum, is an entry's."""
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    table = text.split(f"benchmarks/results/{name}.json")[1].split("| kind |")[1].split("\n\n")[0].splitlines()
    cells = {line.split(" | ")[0].removeprefix("| "): line.removesuffix(" |").split(" | ")[1:] for line in table[2:]}
    columns = [dict(zip(cells, column, strict=True)) for column in zip(*cells.values(), strict=True)]
    assert len(columns) >= 3
    entries = [row["kernel_ms"] | {"all": sum(row["kernel_ms"].values())} for row in rows_of(name)]
    for column in columns:
        assert column in [{kind: f"{kernels.get(kind, 0):.1f}" for kind in cells} for kernels in entries]


def between(ones, others):
    """How far the mean gap of some runs is above that of others, with its standard error."""
    ones, others = ([row["gap_percent"] for row in rows] for rows in (ones, others))
    error = (statistics.variance(ones) / len(ones) + statistics.variance(others) / len(others)) ** 0.5
    return f"{statistics.mean(ones) - statistics.mean(others):.2f} \N{PLUS-MINUS SIGN} {error:.2f}%"


def ratio_of(ours, theirs):
    return f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.3f}"


@pytest.mark.parametrize("name", ["starts-llama-8b-8layers-b1", "starts-llama-1b"])
def test_figures_of_fresh_starts_are_in_benchmarks(name):
    rows = rows_of(name)
    steps, hosts = ([row[key] for row in rows] for key in ("step_ms", "host_ms"))
    chosen: dict[str, set[str]] = {}
    for row in rows:
        for choices in row["products"]:
            for product, algorithm in choices.items():
                chosen.setdefault(product.split(", ", 1)[1], set()).add(algorithm)
    several = sum(len(algorithms) > 1 for algorithms in chosen.values())
    figures = f"{len(rows)} | {min(steps):.1f} to {max(steps):.1f} | {max(steps) / min(steps) - 1:.1%} | "
    figures += f"{several} of {len(chosen)} | {min(hosts):.0f} to {max(hosts):.0f}"
    assert f" | {figures} |" in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def test_the_picture_of_a_run_is_generated():
    """Mend it with `python -m benchmarks.pages`."""
    document = json.loads((ROOT / "benchmarks" / "results" / "loss-pairs.json").read_text(encoding="utf-8"))
    assert curves.picture(document, pages.PAIR) == pages.PICTURE.read_text(encoding="utf-8")
    assert "results/loss-pairs.json" in (ROOT / "README.md").read_text(encoding="utf-8")


def results_page():
    return (ROOT / "docs" / "results.md").read_text(encoding="utf-8").replace("**", "")


def test_the_tables_of_the_results_are_generated():
    """Mend them with `python -m benchmarks.pages`, which refuses a file beside a newer one of its workload."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert pages.rewrite(text, ROOT / "benchmarks" / "results", ROOT / "docs") == text
    assert len(pages.named(text)) == len(set(pages.named(text))) > 20


def test_every_file_of_results_is_cited():
    cited = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    for path in (ROOT / "benchmarks" / "results").iterdir():
        assert re.search(rf"(?<![\w-]){re.escape(path.name)}", cited), path.name


def test_files_without_their_whole_provenance_are_named_in_the_results():
    found = set()
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        machine = document.get("machine", {})
        command = re.match(
            r"octavo |bash |python -m (octavo|benchmarks)\b|[A-Z_]+=", document.get("command", "")
        )  # others describe a script
        device = machine.get("cpu") or (machine.get("gpu") and machine.get("driver"))
        if not (command and document["commit"] and device and machine["torch"] and machine["triton"]):
            found.add(path.name)
    assert found == set(re.findall(r"`([\w-]+\.json)`", results_page().split("## Provenance")[1]))


def test_speeds_beside_the_best_peer_are_made_of_benchmarks():
    """Mend them with `python -m benchmarks.pages`, or with `python -m benchmarks.readme README.md` and other results."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    page, files = readme.named(text)
    assert page == Path("README.md")
    assert readme.rewrite(text, page, files, ROOT) == text


def test_the_readme_has_no_figures_of_other_machines():
    measured = (ROOT / "README.md").read_text(encoding="utf-8").split("## Measured")[1].split("## More")[0]
    assert not re.search(r"(another|other|third|second) machine", measured)


def fastest(rows, prefix):
    return max((row for row in rows if row["entry"].startswith(prefix)), key=lambda row: row["tokens_per_second"])


def test_figures_of_two_gpus_and_long_sequences_are_in_benchmarks():
    page = (ROOT / "docs" / "context-parallelism.md").read_text(encoding="utf-8")
    shared, own, _ = rows_of("context-llama-8b-16k")
    for row, degree in ((own, 1), (shared, 2)):
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `context_parallel_degree = {degree}`, ")]
        figures = f"{row['tokens_per_second']:,.0f} | {row['step_ms']:,.0f} | {row['exposed_communication_ms']:.1f}"
        assert line.endswith(f"| {figures} | {row['peak_gib']:.1f} |")
    names = [f"te-flash-context-llama-8b-8layers-{length}-cp2" for length in ("16k", "128k")]
    for name in (*names, "context-llama-8b-16k-cp2", "context-llama-8b-128k-cp2"):
        ours, peer = (fastest(rows_of(name), prefix) for prefix in ("octavo-", "te-"))
        (line,) = [line for line in page.splitlines() if line.startswith("|") and f"{name}.json" in line]
        figures = [f"{row['tokens_per_second']:,.0f} | {row['peak_gib']:.1f}" for row in (ours, peer)]
        assert line.endswith(f"| {' | '.join(figures)} | {ratio_of(ours, peer)} |")
    cudnn = fastest(rows_of("te-flash-context-llama-8b-8layers-16k-cp2"), "te-delayed-fp8-head")
    losses = [f"{row['loss']:.2f}" for row in rows_of(names[1])]
    assert f"falls to {losses[0]} here and to {losses[1]} there" in " ".join(page.split())
    assert f"it has {cudnn['tokens_per_second']:,.0f} tokens/s" in page
    (shown,) = (row for row in rows_of("context-llama-8b-16k-cp2") if "exposed_communication_ms" in row)
    assert f"of the {shown['exposed_communication_ms']:.1f} ms of a step that nothing hides" in " ".join(page.split())


def test_the_cost_of_sums_in_each_micro_batch_is_in_benchmarks():
    page = (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")
    kept, summed = rows_of("sharded-llama-8b-8layers-b1-4-micro-batches")
    assert summed["entry"] == f"{kept['entry']}-sync-each"
    for row, value in ((kept, "false"), (summed, "true")):
        assert f"| `{value}` | {row['step_ms']:.1f} | {row['peak_gib']:.1f} |" in page


def test_what_two_gpus_lose_is_in_benchmarks():
    text = " ".join(results_page().split())
    *_, plain, kept = rows_of("sharded-llama-8b-8layers-kept")
    gain = 100 * (kept["tokens_per_second"] / plain["tokens_per_second"] - 1)
    faster = f"{gain:.1f}% faster for {kept['peak_gib'] - plain['peak_gib']:.1f} GiB"
    assert faster in (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")
    *alone, both = rows_of("sharded-llama-8b-8layers-auto")
    slow, fast = sorted(row["tokens_per_second"] for row in alone)
    rate = both["tokens_per_second"]
    assert both["reshard_after_forward"] is False
    of_mean, of_slow = 100 * (1 - 2 * rate / (fast + slow)), 100 * (1 - rate / slow)
    assert f"{of_mean:.1f}% less" in text
    assert f"{of_slow:.1f}% less than the slower one" in text
    for name, said in (("16k", "1.25"), ("8k", "1.30")):
        speeds = {row["entry"]: row for row in rows_of(f"sharded-llama-8b-{name}")}
        assert f"{float(ratio_of(speeds['octavo-delayed'], speeds['torch-bf16'])):.2f}" == said
    assert "1.25 and 1.30 times as fast as compiled PyTorch in bf16" in text


def test_figures_of_long_sequences_that_two_gpus_share_are_in_benchmarks():
    page = (ROOT / "docs" / "context-parallelism.md").read_text(encoding="utf-8")
    shared, alone = (row["tokens_per_second"] for row in rows_of("context-llama-8b-8k"))
    assert f"{alone:,.0f} tokens/s a GPU and degree 2 at {shared:,.0f}, {100 * (1 - shared / alone):.1f}% less" in page
    assert all("OutOfMemoryError" in row["error"] for row in rows_of("context-llama-8b-32k"))
    for row in rows_of("context-llama-8b-32k-cp2"):
        samples = 2 * row["tokens_per_second"] / 32_768
        figures = f"{row['tokens_per_second']:,.0f} | {samples:.3f} | {row['tflops']:.0f} | {row['peak_gib']:.1f}"
        assert f"| {figures} |" in page


def test_the_table_of_lengths_is_that_of_benchmarks(capsys):
    page = (ROOT / "docs" / "context-parallelism.md").read_text(encoding="utf-8")
    assert lengths.main([str(path) for path in sorted((ROOT / "benchmarks" / "results").glob("context-*.json"))]) == 0
    table, _, _ = capsys.readouterr().out.partition("\n\n")
    assert len(table.splitlines()) == 8
    assert table in page
    (alone,), (shared,) = (rows_of(f"context-llama-8b-256k{suffix}") for suffix in ("", "-cp2"))
    assert f"they are {shared['tokens_per_second'] / alone['tokens_per_second']:.2f} times as fast" in page.replace("\n", " ")


def test_figures_of_recomputation_and_offloading_are_in_benchmarks():
    text = (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")
    for row in [*rows_of("memory"), *rows_of("memory-h100"), *rows_of("memory-offload")]:
        named = row["settings"] if row["settings"] == "none" else f"`{row['settings']}`"
        figures = (
            f"{row['tokens_per_second']:,.0f} | {row['step_ms']:,.0f} | {row['peak_gib']:.2f} | {row['estimated_gib']:.2f}"
        )
        assert f"| {named} | {figures} |" in text
    selective, whole = (row["host_gib"] for row in rows_of("memory-offload"))
    assert f"Without recomputation {whole:.1f} GiB wait in host memory" in " ".join(text.split())
    assert f"with selective recomputation {selective:.1f}" in " ".join(text.split())


def test_gaps_of_perturbed_runs_are_in_benchmarks():
    results = results_page()
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for name in ("loss-llama-1b-low-rate", "loss-llama-1b-perturbed"):
        groups, labels = {}, {}
        for row in rows_of(name):
            groups.setdefault(row["group"], []).append(row["gap_percent"])
            keys = re.sub(r" ?optimizer\.warmup_steps=\d+", "", row["keys"]).strip()
            more = (
                ", fast accumulation in weight gradients only (an experiment)"
                if row["group"] == "delayed-weight-gradient"
                else ""
            )
            labels.setdefault(row["group"], set()).add(f"`{keys}`{more}")
        assert f"standard deviation of {statistics.stdev(groups['bf16']):.2f}%" in " ".join(results.split())
        page = results if name.endswith("low-rate") else performance
        for group, gaps in groups.items():
            mean = "\N{EN DASH}" if group == "bf16" else f"{signed(statistics.mean(gaps))}%"
            figures = f" | {len(gaps)} | {mean} | {', '.join(map(signed, sorted(gaps)))} |"
            assert any(f"| {label}{figures}" in page for label in labels[group]), group
    flowing = results.replace("\n", " ")
    bf16, fp8 = (
        [row for row in rows_of("loss-llama-1b-perturbed") if (row["group"] == "bf16") is own] for own in (True, False)
    )
    assert f"all {len(fp8)} runs in FP8 together are {between(fp8, bf16)} above" in flowing
    low = rows_of("loss-llama-1b-low-rate")
    fast = [row for row in low if "fast_accumulation=true" in row["keys"]]
    others = [row for row in low if row["group"] not in ("bf16", "delayed-weight-gradient") and row not in fast]
    plain = [row for row in low if row["group"] == "bf16"]
    assert (len(fast), len(others), len(plain)) == (7, 9, 4)
    usual = statistics.mean(row["validation_loss"] for row in plain)
    assert f"the bf16 runs differ by {100 * statistics.stdev(row['validation_loss'] for row in plain) / usual:.2f}%" in flowing
    above = [100 * (statistics.mean(row["validation_loss"] for row in rows) / usual - 1) for rows in (others, fast)]
    assert f"FP8 costs {above[0]:.2f}%, or {above[1]:.2f}% with fast accumulation in both" in flowing
    assert f"in both gradients: seven runs end {between(fast, plain)} above bf16's mean" in flowing
    assert f"fast in input gradients alone: nine runs end {between(others, plain)} above it" in flowing
    assert f"difference of the two groups is {between(fast, others)}," in flowing
    evaluated = [100 * (row["validation_loss_in_fp8"] / row["validation_loss"] - 1) for row in plain]
    assert f"{max(evaluated):.2f}% for weights that were trained in bf16" in flowing


def test_gaps_of_pairs_are_in_benchmarks():
    results = results_page()
    flowing, low = results.replace("\n", " "), rows_of("loss-llama-1b-low-rate")
    pairs = [row for row in rows_of("loss-pairs") if row["entry"] != "octavo-bf16"]
    table = results.split("loss-pairs.json")[1]
    for row in pairs:
        gaps = [f"{signed(row[key])}%" for key in ("gap_percent", "validation_gap_percent")]
        assert f" | {row['keys'].partition('train.seed=')[2][0]} | {' | '.join(gaps)} |" in table
    for key, text in (("gap_percent", "The mean of the four is"), ("validation_gap_percent", "in validation")):
        gaps = [row[key] for row in pairs]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5
        assert f"{text} {signed(statistics.mean(gaps))} ± {error:.2f}%" in flowing
    seven = [row["gap_percent"] for row in pairs]
    seven += [row["gap_percent"] for row in low if "input_gradient" in row["keys"]]
    assert len(seven) == 7
    error = statistics.stdev(seven) / len(seven) ** 0.5
    assert f"three runs of the table above it is {signed(statistics.mean(seven))} ± {error:.2f}%" in flowing


@pytest.mark.parametrize("name", ["pythia-160m", "mixtral-small"])
def test_gaps_of_pairs_of_small_models_are_in_benchmarks(name):
    part = results_page().split(f"loss-pairs-{name}.json")[1].split("\n\n")
    pairs = [row for row in rows_of(f"loss-pairs-{name}") if row["entry"] != "octavo-bf16"]
    means = []
    for key in ("gap_percent", "validation_gap_percent"):
        gaps = [row[key] for row in pairs]
        means.append(f"{signed(statistics.mean(gaps))} \u00b1 {statistics.stdev(gaps) / len(gaps) ** 0.5:.2f}%")
    assert f"Their mean is {means[0]}, in validation {means[1]}." in part[2]
    for row in pairs:
        gaps = [f"{signed(row[key])}%" for key in ("gap_percent", "validation_gap_percent")]
        assert f"| {row['run'].removeprefix('seed-')} | {' | '.join(gaps)} |" in part[1]


def test_speeds_of_mixtures_are_in_benchmarks():
    flowing = " ".join(results_page().split())
    parallelism = (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8").replace("\n", " ")
    *alone, spread = rows_of("sharded-mixtral-8x7b-2layers-h100")
    gain = 100 * (spread["tokens_per_second"] / statistics.mean(row["tokens_per_second"] for row in alone) - 1)
    assert f"Experts spread over two GPUs train {gain:.1f}% more" in flowing
    for row in (*alone, spread):
        assert f"{row['tokens_per_second']:,.0f}" in parallelism


def test_replicas_of_vision_transformers_are_in_benchmarks():
    text = (ROOT / "docs" / "vision.md").read_text(encoding="utf-8").replace("\n", " ")
    two, one, other = rows_of("vision-vit-huge-patch16-h100-two")
    before = [row for row in rows_of("vision-vit-huge-patch16-h100") if row["entry"] == "octavo-delayed"]
    rates = [f"{row['images_per_second']:.0f}" for row in (one, other, two)]
    assert f"alone trains {rates[0]} images/s at patch 16 and the other {rates[1]}, each trains {rates[2]}" in text
    assert f"{100 * (1 - two['images_per_second'] / other['images_per_second']):.1f}% less than the slower one" in text
    assert f"{two['exposed_communication_ms']:.1f} of {two['step_ms']:.1f} ms is communication" in text
    products = [f"{row['kernel_ms']['fp8 products']:.1f}" for row in (two, one)]
    assert f"products take {products[0]} ms rather than {products[1]}" in text
    assert f"{before[1]['exposed_communication_ms']:.1f} ms were exposed" in text
    assert f"{before[1]['images_per_second']:.0f} of {before[0]['images_per_second']:.0f} images/s remained" in text


def test_gains_of_vision_transformers_are_in_benchmarks():
    text = (ROOT / "docs" / "vision.md").read_text(encoding="utf-8").replace("\n", " ")
    grouped, *singles = rows_of("vision-vit-huge-patch16-groups-two")
    slow, fast = sorted(row["images_per_second"] for row in singles)
    rate = grouped["images_per_second"]
    for part in (
        "train {:.0f} images/s each, where one alone trains {:.0f} and the other {:.0f}",
        "{3:.1f}% less than their mean, and {4:.1f}% less than the slower one, for which the other waits. ",
    ):
        assert part.format(rate, slow, fast, 100 * (1 - 2 * rate / (slow + fast)), 100 * (1 - rate / slow)) in text
    two, one, _, peer = rows_of("vision-vit-huge-patch16-two")
    both, alone, theirs = (row["images_per_second"] for row in (two, one, peer))
    assert (
        f"alone trains {alone:.0f} images/s at patch 16, each trains {both:.0f}, {100 * (1 - both / alone):.1f}% less" in text
    )
    products = [f"{row['kernel_ms']['fp8 products']:.1f}" for row in (two, one)]
    assert f"FP8 products take {products[0]} ms rather than {products[1]}" in text
    assert f"is {both / theirs:.2f} times Transformer Engine's {theirs:.0f} by its block" in text
    ours, _, theirs = (row["images_per_second"] for row in rows_of("vision-vit-huge-patch16-b64-two"))
    assert f"With 64 images Octavo trains {ours:.0f} and Transformer Engine {theirs:.0f}" in text
    gains = []
    for name, peer in (("registers", "te-delayed-block"), ("b64", "te-delayed-block"), ("registers", "te-delayed")):
        rates = {row["entry"]: row["images_per_second"] for row in rows_of(f"vision-vit-huge-patch16-{name}")}
        gains.append(f"{rates['octavo-delayed'] / rates[peer]:.2f}")
    own, faster = (
        f"is {gains[0]} times as fast as Transformer Engine by its block",
        f"{gains[2]} times as fast as by the faster one",
    )
    assert f"{own}, and {faster}" in text
    assert f"With 64 images it is {gains[1]} times as fast" in text
    late = next(row for row in rows_of("vision-vit-huge-patch16-b64") if row["entry"] == "te-delayed-block")
    waits = late["step_ms"] - sum(late["kernel_ms"].values())
    assert f"the GPU then waits for the host in {waits:.0f} of {late['step_ms']:.0f} ms a step" in text


def test_steps_of_the_walk_through_are_in_benchmarks():
    text = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
    names = {
        "no-context": "no context parallelism",
        "context": "context parallelism",
        "context-fp8": "context parallelism, FP8",
    }
    ways = {"run": "run file", "estimator": "estimator"}
    for row in rows_of("walkthrough-llama-8b"):
        cells = [row.get("failed") or f"{row['samples_per_second']:.3f}", "", "", ""]
        if "peak_gib" in row:
            cells[1:] = f"{row['tokens_per_second_per_gpu']:,.0f}", f"{row['tflops_per_gpu']:.0f}", f"{row['peak_gib']:.1f}"
        line = f"| {names[row['step']]} | {ways[row['way']]} | {' | '.join(cells)} |"
        assert " ".join(line.split()) in " ".join(text.split()), line


def test_gaps_of_the_demo_are_in_benchmarks():
    results, seeds = results_page(), {}
    for row in rows_of("loss-demo-seeds"):
        seeds.setdefault(row["entry"], []).append(row["gap_percent"])
    delayed, current = seeds["octavo-delayed"], seeds["octavo-current"]
    demo = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"between \u2212{-min(delayed):.2f}% and +{max(delayed):.2f}%" in demo
    means = [statistics.mean(gaps) for gaps in (delayed, current)]
    assert f"ends {means[0]:.2f}% above bf16 in the mean and current scaling {means[1]:.2f}%" in results
    errors = [statistics.stdev(gaps) / len(gaps) ** 0.5 for gaps in (delayed, current)]
    assert f"standard errors of {errors[0]:.2f}% and {errors[1]:.2f}%" in results


def test_the_table_of_vision_transformers_is_made_of_benchmarks():
    """Mend it with `python -m benchmarks.pages`."""
    text = (ROOT / "docs" / "vision.md").read_text(encoding="utf-8")
    assert page.rewrite(text, ROOT / "benchmarks" / "results") == text


def test_estimates_on_the_pages_are_those_of_a_dry_run(capsys):
    def memory(*arguments):
        assert main(["train", *map(str, arguments), "--dry-run"]) == 0
        return capsys.readouterr().out.partition("\nmemory")[2]

    page = (ROOT / "docs" / "context-parallelism.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d,]+) \| (.*) \| ([\d.]+) \| (.*) \| ([\d.]+) \|$", page, re.M)
    assert len(rows) == 6
    for tokens, *cells in rows:
        for degree, setting, gib in ((1, *cells[:2]), (2, *cells[2:])):
            length, offload = tokens.replace(",", ""), "offload" in setting
            batch = next((n for word, n in (("two", 2), ("four", 4)) if setting.startswith(word)), 1)
            recompute = re.search(r'recompute = ([\w"]+)', setting)
            said = memory(
                ROOT / "presets" / "llama-8b-128k.toml",
                "--world-size",
                2,
                "--gpu",
                "h200",
                f"data.sequence_length={length}",
                f"parallel.context_parallel_degree={degree}",
                f"train.micro_batch={batch}",
                f"train.global_batch={batch * 2 // degree}",
                f"train.recompute={recompute[1] if recompute else 'false'}",
                f"train.offload={str(offload).lower()}",
                "model.config.max_position_embeddings=262144",
            )
            assert said.split()[0] == gib, (tokens, degree)
            host = re.search(r"offload ([\d.]+)", setting)
            assert (f"and {host[1]} GiB of host memory" in said) if host else "host memory" not in said
            assert ("does not fit" in setting) == ("does not fit" in said)
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    batch = ("train.global_batch=16", "train.micro_batch=16")
    said = memory(ROOT / "presets" / "llama-1b.toml", "--gpu", "rtx 4090", *batch)
    assert f"```text\nmemory{said.rstrip()}\n```" in page


def test_figures_of_lora_are_in_benchmarks():
    part = results_page().split("## LoRA\n")[1].split("\n## ")[0]
    names = ("lora-llama-8b", "lora-llama-8b-graph", "lora-llama-70b")
    measured = {(name, row["entry"]): row for name in names for row in rows_of(name)}
    told = [measured[name, "octavo-delayed-fp8-base"] for name in ("lora-llama-8b", "lora-llama-70b")]
    told += [measured["lora-llama-8b", entry] for entry in ("torch-peft-compiled", "ao-peft-tensorwise")]
    graph = "octavo-delayed-fp8-base-graph"
    of_peer = measured["lora-llama-8b-graph", "ao-peft-tensorwise-fp8-head"]
    recorded, whole_head = (measured["lora-llama-8b-graph", f"{graph}{head}"] for head in ("", "-fp8-head"))
    kernels = [sum(row["kernel_ms"].values()) for row in (whole_head, measured["lora-llama-70b", "octavo-delayed-fp8-base"])]
    kernels += [whole_head["kernel_ms"][kind] for kind in ("fp8 products", "attention", "bf16 products")]
    hosts = [row["host_ms"] for row in (recorded, whole_head, of_peer)]
    (flash,) = [row for row in rows_of("lora-llama-8b-flash") if row["entry"].startswith("ao-")]
    assert all(f"{ms:,.0f} " in " ".join(part.split()) for ms in (*kernels, *hosts, flash["host_ms"], flash["step_ms"]))
    told += [recorded, whole_head, of_peer]
    said = [figure for row in told for figure in (f"{row['tokens_per_second']:,.0f}", f"{row['peak_gib']:.1f}")]
    page = (ROOT / "docs" / "lora.md").read_text(encoding="utf-8")
    assert all(figure in page for figure in said)
    for recipe in ("delayed", "current"):
        pairs = [row for row in rows_of("lora-gap") if row["recipe"] == recipe]
        cells = []
        for key in ("training_percent", "held_out_percent", "held_out_without_casts_percent"):
            gaps = [row[key] for row in pairs]
            cells.append(f"{statistics.fmean(gaps):+.3f} ± {statistics.stdev(gaps) / len(gaps) ** 0.5:.3f}%")
        assert f"| {recipe} | {' | '.join(cells)} |" in part


def test_every_page_is_in_the_contents_of_the_site():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = [line for part in re.findall(r"```\{toctree\}\n(.*?)```", index, re.S) for line in part.splitlines()]
    pages = [line for line in listed if line and not line.startswith(":")]
    assert sorted(pages) == sorted(page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "index")


def test_every_public_name_is_on_the_page_of_python():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    described = set(re.findall(r"octavo\.(\w+)", page))
    assert set(octavo.__all__) - {"config", "launch"} <= described  # run files and the estimator have pages of their own
