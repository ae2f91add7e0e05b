"""The rows of published figures: each trains, is measured once and whole, fits its GPUs, and stands in the page's table."""

import dataclasses
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import ranks
from benchmarks import run
from benchmarks.cases import CASES, LORA_CASES, Case, VisionCase
from benchmarks.published import measure as measuring
from benchmarks.published import page
from benchmarks.published.__main__ import main
from benchmarks.published.measure import chosen, measure, memory_of, steps_of
from benchmarks.published.rows import ROWS, SAMPLES, UNITS, octavo_of
from benchmarks.sharded import build_plain_sharded
from benchmarks.suites import SUITES
from benchmarks.worker import labelled_batches
from octavo.errors import InputError, OctavoError
from octavo.hardware import GIB
from octavo.parallel import world
from octavo.plan.memory import USABLE

CPU = torch.device("cpu")
OF_CASES = {row.case: row.name for row in ROWS.values()}
"""Each case with one of its rows: that of the most GPUs."""


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_a_row_is_a_run_of_its_suite_that_fits_80_gb_and_ten_minutes(row):
    suite, how = SUITES[row.suite], steps_of(row)
    for one in (row, row.tiny()):
        case = suite.known[one.case]
        assert case.name == one.case
        assert all(suite.entries[name].trains(case) for name in one.entries)
        assert octavo_of([{"entry": name, "step_ms": 1.0} for name in one.entries])
        least, most = suite.ranks
        assert one.gpus >= least
        assert most is None
        if isinstance(case, Case):
            assert all(one.gpus % degree == 0 for degree in (case.context, case.expert, case.tensor))
    assert row.tiny().gpus == min(2, row.gpus)
    assert how.timed >= 2
    assert how.warmup >= 1
    assert how.minutes <= 10
    memory = memory_of(row)
    if isinstance(row.shape, VisionCase):
        assert memory is None
    else:
        assert 0 < memory.total <= USABLE * 79 * GIB
        assert memory.host == 0
    for figure in row.figures:
        assert figure.unit in UNITS
        assert figure.beside is None or figure.beside in ROWS
        assert any(suite.entries[name].layers == figure.layers for name in row.entries if name.startswith("octavo-"))


def test_batches_are_those_of_the_published_figures():
    tokens = {name: ROWS[name].shape.units * ROWS[name].gpus for name in ("A1", "S1", "T3-256k", "A9", "A4")}
    assert tokens == {"A1": 128 * 8192, "S1": 4 * 16_384, "T3-256k": 262_144, "A9": 512 * 4096, "A4": 32 * 4096}
    fields = {"tokens_per_second": 6_246.4, "gpus": 8, "sequence_length": 16_384}
    assert UNITS[SAMPLES](fields) == pytest.approx(3.05, rel=1e-4)  # the published figure in both units


def test_qwen3_30b_a3b_has_the_published_number_of_parameters():
    case = CASES["qwen3-30b-a3b-ep8-16-micro-batches"]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(case.hf_config())
    assert sum(p.numel() for p in theirs.parameters()) == 30_532_122_624
    assert (case.spec.experts, case.spec.top_k, case.spec.ffn_size, case.spec.head_dim) == (128, 8, 768, 128)


def measured(folder, *names, **how):
    """Documents of the tiny rows on two ranks, and what was said."""
    said = []
    given = {"device": "cpu", "gpus": 2, "folder": folder, "command": "python -m benchmarks.published", "say": said.append}
    return measure(cases=names, **given | how), said


@pytest.mark.long(lambda name: name not in ("N-1b-8",))
@pytest.mark.parametrize("name", OF_CASES.values())
@pytest.mark.usefixtures("with_torchvision", "forked_workers")
def test_the_tiny_case_of_every_row_trains_on_two_ranks(tmp_path, name):
    row = ROWS[name].tiny()
    if row.shape.package is not None:
        pytest.importorskip(row.shape.package, reason="needs timm: pip install -e '.[bench]'")
    (document,), _ = measured(tmp_path, name)
    assert json.loads((tmp_path / f"published-tiny-{name}.json").read_text()) == document
    assert (document["suite"], document["published"]) == ("published", f"tiny-{name}")
    assert row.is_complete(document)
    assert [one["entry"] for one in document["rows"]] == list(row.entries)
    start = math.log(10 if isinstance(row.shape, VisionCase) else 512)
    for one in document["rows"]:
        if one["entry"].startswith(("octavo-", "torch-")):
            assert "error" not in one, one["error"]
            assert (one["workload"], one["gpus"]) == (row.case, min(2, ROWS[name].gpus))
            assert one["loss"] == pytest.approx(start, abs=0.5)
        else:
            assert ("error" in one) != ("loss" in one)  # without its package a peer is a row with the reason


@pytest.mark.usefixtures("forked_workers")
def test_a_measured_row_is_left_out_and_one_that_is_not_complete_is_replaced(tmp_path):
    (document,), _ = measured(tmp_path, "N-1b-1")
    path = tmp_path / "published-tiny-N-1b-1.json"
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert measured(tmp_path, "N-1b-1") == ([], [f"tiny-N-1b-1: {path} is there, measured on {document['machine']['cpu']}"])
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    failed = {**document, "rows": [{**document["rows"][0], "error": "out of memory"}]}
    for fault in (
        "{",
        "[]",
        json.dumps({**document, "rows": []}),
        json.dumps(failed),
        json.dumps({**document, "published": "A1"}),
    ):
        path.write_text(fault)
        assert not measuring._is_there(ROWS["N-1b-1"].tiny(), tmp_path, lambda line: None)
    (again,), said = measured(tmp_path, "N-1b-1")
    assert said[0] == f"tiny-N-1b-1: {path} is not complete, and is replaced"
    assert again["rows"][0]["loss"] == document["rows"][0]["loss"]
    assert json.loads(path.read_text()) == again


@pytest.mark.long
@pytest.mark.usefixtures("forked_workers")
def test_an_interrupted_row_leaves_nothing_and_is_measured_again(tmp_path, monkeypatch):
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    folder, said = tmp_path / "results", []

    def interrupt(line):
        said.append(line)
        if line.endswith(": octavo-current-fp8-base"):  # the first entry has its figures
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(folder, "A4", say=interrupt)
    assert any(line.endswith(": octavo-delayed-fp8-base") for line in said)
    assert not folder.exists() or list(folder.iterdir()) == []
    assert list(place.iterdir()) == []
    (document,), _ = measured(folder, "A4")
    assert [one["entry"] for one in document["rows"]] == list(ROWS["A4"].entries)
    assert [path.name for path in folder.iterdir()] == ["published-tiny-A4.json"]


def test_an_interrupted_command_says_how_to_continue(monkeypatch, capsys):
    def interrupt(*args, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.published.__main__.measure", interrupt)
    assert main(["--cases", "A1"]) == 130
    assert capsys.readouterr().err == (
        "octavo: interrupted: the next call measures this row again, and leaves out those that are complete.\n"
    )


def test_rows_by_name_and_by_the_first_part_of_it():
    assert [row.name for row in chosen(["T3", "A1"])] == ["A1", "T3-32k", "T3-64k", "T3-128k", "T3-256k"]
    assert [row.name for row in chosen(["N-1b-2"])] == ["N-1b-2"]
    assert chosen(None) == list(ROWS.values())
    with pytest.raises(InputError, match=r"unknown row of published figures 'T4'\. Did you mean 'T3-64k'"):
        chosen(["T4"])


@pytest.fixture
def two_gpus(monkeypatch):
    """A host whose two GPUs nothing may use yet."""
    monkeypatch.setattr(measuring, "device_of", lambda device: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(measuring, "run_suite", lambda *args, **how: pytest.fail("a GPU was used"))


@pytest.mark.usefixtures("two_gpus")
def test_rows_of_more_gpus_are_refused_with_those_that_fit(tmp_path, capsys):
    assert main(["--cases", "A1,N-1b-1,T3-64k", "--output", str(tmp_path)]) == 2
    fit = "V-1,N-1b-1,N-1b-2,N-8b-1,N-8b-2"
    said = f"gpus = 2, and these need more: A1 8, T3-64k 8. Use --gpus 8, or --cases {fit}."
    assert said in capsys.readouterr().err.replace("\n", " ")
    assert main(["--gpus", "3", "--output", str(tmp_path)]) == 2
    assert "--gpus 3: use 1 to 2, the GPUs that torch sees." in capsys.readouterr().err
    for wrong in ("0", "-1", "nan"):
        assert main(["--cases", "N-8b-2", "--minutes", wrong, "--output", str(tmp_path)]) == 2
        assert f"--minutes {wrong} is not a time above 0" in capsys.readouterr().err
    assert main(["--cases", "N-8b-2", "--minutes", "0.5", "--output", str(tmp_path)]) == 2
    minutes = steps_of(ROWS["N-8b-2"]).minutes
    said = (
        f"--minutes 0.5: N-8b-2 is planned to take {minutes:.1f} minutes, and 0.5 are left. Use --minutes {math.ceil(minutes)}"
    )
    assert said in capsys.readouterr().err
    assert main(["--output", "s3://bucket/results"]) == 2
    assert "--output" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("two_gpus")
def test_a_missing_package_is_refused_before_any_row_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"^V-1: timm is not installed\. Install it by pip install .* out of --cases\.$"):
        measured(tmp_path, "N-1b-1", "V-1", device="cuda")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("two_gpus")
def test_rows_that_would_end_too_late_are_left_for_the_next_call(tmp_path, monkeypatch):
    def at_once(suite, *, cases, entries, **how):
        return {"rows": [{"workload": cases[0], "entry": name, "gpus": how["gpus"], "step_ms": 1.0} for name in entries]}

    monkeypatch.setattr(measuring, "run_suite", at_once)
    clock = iter([0.0, 0.0, 55.0])
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(clock))
    documents, said = measured(tmp_path, "N-1b-1", "N-1b-2", device="cuda", minutes=1.5)
    assert [document["published"] for document in documents] == ["N-1b-1"]
    assert said[-1].endswith("repeat the command for N-1b-2")


def test_a_row_without_a_figure_of_octavo_s_is_a_failure():
    failed = {"entry": "octavo-bf16", "error": "out of memory"}
    peer = {"entry": "te-bf16", "step_ms": 1.0}
    measuring.check_octavo([{"published": "A1", "rows": [failed, {"entry": "octavo-delayed", "step_ms": 1.0}]}])
    with pytest.raises(OctavoError, match=r"^no figure of Octavo's in A9: ") as caught:
        measuring.check_octavo([{"published": "A9", "rows": [failed, peer]}])
    assert caught.value.exit_code == 1


def test_the_plan_names_each_row(capsys):
    assert main(["--plan", "--cases", "A1,V"]) == 0
    said = capsys.readouterr().out
    assert f"{memory_of(ROWS['A1']).total / GIB:.1f}" in said
    assert [line.split()[0] for line in said.splitlines() if line.startswith((" A1", " V"))] == ["A1", "V-1", "V-8"]


def results_of(name, **figures):
    """A document of a row, with these milliseconds a step of its entries; the others failed."""
    row = ROWS[name]
    rows = []
    for entry in row.entries:
        layers = SUITES[row.suite].entries[entry].layers
        given = {"workload": row.case, "entry": entry, "layers": layers}
        speed = figures.get(entry)
        more = {"error": "no"} if speed is None else {
            "step_ms": 1e6 / speed, "tokens_per_second": speed, "tflops": speed / 50, "gpus": row.gpus,
            "sequence_length": row.shape.sequence_length,
        }  # fmt: skip
        rows.append(given | more)
    return {
        "suite": "published", "published": name, "date": "2026-12-01T10:00:00+00:00", "rows": rows,
        "machine": {"gpu": "NVIDIA H100 80GB HBM3", "count": row.gpus},
    }  # fmt: skip


def lines_of(text, name):
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith(f"| {name} |")
    ]


def test_the_page_has_the_measured_rows_and_names_the_others(tmp_path):
    empty = page.block(tmp_path, tmp_path)
    assert empty.startswith("Rows, not yet measured: A1, S1")
    assert page.COMMAND in empty
    assert lines_of(empty, "A1") + lines_of(empty, "N-1b-8") == []
    one = "octavo-delayed-fast-input-fp8-head-backward"
    documents = [
        results_of(
            "S1", **{"octavo-bf16": 7_000.0, "octavo-delayed": 12_000.0, "octavo-delayed-a2a": 12_288.0, "te-delayed-a2a": 2e4}
        ),
        results_of("N-1b-1", **{one: 100_000.0}),
        results_of("N-1b-8", **{one: 97_500.0}),
    ]
    for document in documents:
        (tmp_path / ROWS[document["published"]].file).write_text(json.dumps(document))
    text = page.rewrite("a\n<!-- Published figures -->\nold\n<!-- End of published figures -->\nb\n", tmp_path, tmp_path)
    assert page.rewrite(text, tmp_path, tmp_path) == text
    plain, fp8 = lines_of(text, "S1")
    link = "8 H100s, [2026-12-01](published-S1.json)"
    assert plain[5:] == ["3.42, 140 TFLOP/s", f"{7_000 * 8 / 16_384 / 2.03:.3f}", link]
    assert fp8[5:] == ["6.00, 246 TFLOP/s", f"{6 / 3.05:.3f}", link]
    assert lines_of(text, "N-1b-8")[0][5:7] == ["97,500, 1,950 TFLOP/s", "0.975"]
    documents[1]["machine"]["gpu"] = "NVIDIA H200"  # a ratio of two kinds of GPU would say nothing
    (tmp_path / ROWS["N-1b-1"].file).write_text(json.dumps(documents[1]))
    assert lines_of(page.block(tmp_path, tmp_path), "N-1b-8")[0][5:7] == ["97,500, 1,950 TFLOP/s", "\N{EN DASH}"]
    assert lines_of(text, "N-1b-2") == []
    assert "Not measured: A1, T3-32k" in text.replace("\n", " ")
    broken = documents[0] | {"rows": documents[0]["rows"][:-1]}
    (tmp_path / ROWS["S1"].file).write_text(json.dumps(broken))
    with pytest.raises(InputError, match=r"published-S1\.json is not complete: it lacks an entry of row S1"):
        page.block(tmp_path, tmp_path)


def test_lora_over_several_ranks_is_octavos_alone(tmp_path):
    suite, cases = SUITES["lora"], [LORA_CASES["tiny-lora"]]
    assert run._target(suite, "cpu", None).ranks == 1
    two = run._target(suite, "cpu", 2)
    said = []
    ((_, able),) = run._plan(suite, [cases[0].name], list(suite.entries.values()), two, said.append)
    assert {entry.name for entry in able} == {
        name for name in suite.entries if name.startswith("octavo-") and not name.endswith(("-graph", "-graph-fp8-head"))
    }
    assert "torch-peft" in said[0]


@pytest.mark.long
@pytest.mark.usefixtures("forked_workers")
def test_a_sharded_base_in_fp8_trains_as_one_rank_s(tmp_path):
    (document,), _ = measured(tmp_path, "A4")
    name = "octavo-delayed-fp8-base"
    (found,) = [one for one in document["rows"] if one["entry"] == name]
    case = LORA_CASES[ROWS["A4"].tiny().case]
    assert (case.stored, case.micro_batches) == (True, 2)
    trainer, batches = SUITES["lora"].entries[name].build(case, CPU, False), [labelled_batches(case, CPU, r) for r in range(2)]
    whole = [tuple(torch.cat(parts) for parts in zip(*both, strict=True)) for both in zip(*batches, strict=True)]
    losses = [trainer.step(*whole[i % 4]).item() for i in range(found["loss_step"])]
    assert found["loss"] == pytest.approx(losses[-1], rel=2e-3)


def peers_losses(case, sync_each):
    """Losses and saved elements of the plain sharded model."""
    world.init()
    trainer = build_plain_sharded(case, CPU, False)
    trainer.micro_batches, trainer.sync_each = case.micro_batches, sync_each
    batches, elements = labelled_batches(case, CPU, world.state.rank), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: elements.append(x.numel()) or x, lambda x: x):
        losses = [trainer.step(*batch).item() for batch in batches[:3]]
    return losses, sum(elements)


@pytest.mark.long
def test_peers_recompute_layers_and_reduce_in_each_micro_batch():
    case = CASES["tiny-4-micro-batches"]
    recomputed = dataclasses.replace(case, recompute=True)
    usual = ranks.run(2, peers_losses, case, False)
    each = ranks.run(2, peers_losses, case, True)
    again = ranks.run(2, peers_losses, recomputed, True)
    for (losses, saved), (summed, _), (others, fewer) in zip(usual, each, again, strict=True):
        assert losses == pytest.approx(summed, rel=1e-5)
        assert others == pytest.approx(summed, rel=1e-5)
        assert fewer < saved / 2
