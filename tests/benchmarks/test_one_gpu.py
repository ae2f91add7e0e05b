"""The one-GPU suite on a CPU: that the peer is a Llama, that figures follow from steps, that nothing is left out in silence."""

from __future__ import annotations

import io
import json
import math
import os
import re
import statistics
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from benchmarks.cases import CASES, Case
from benchmarks.chosen import experts_of
from benchmarks.measure import Measurement, RunningEntry, Target, all_fit
from benchmarks.peers import ENTRIES, build_octavo, build_plain
from benchmarks.plain import FAMILIES, PlainDecoder, places
from benchmarks.records import best_peer, document, render, row, write
from benchmarks.run import run_suite
from benchmarks.worker import Worker, answers, labelled_batches
from octavo.bench.results import commit
from octavo.errors import InputError
from octavo.hardware import Device, describe_device, lookup
from octavo.models.shapes import SHAPES
from octavo.plan.flops import matmul_parameters

CPU = torch.device("cpu")
H200 = Device("NVIDIA H200", lookup("NVIDIA H200"), (9, 0), 139.8, "cuda")
ONE_H200 = Target(H200, "cuda:0")
_SIZES = SHAPES["llama-tiny"] | {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
UNTIED = Case("untied", _SIZES, 2, 16)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("octavo-delayed", "a product an expert"),  # on a GPU of Hopper's one launch
        ("torch-bf16", "_grouped_mm"),
        ("torch-huggingface-bf16", "transformers, experts_implementation=grouped_mm"),
        ("te-delayed", "Transformer Engine's GroupedLinear, use_grouped_tensor=False"),
    ],
)
def test_rows_name_what_multiplies_the_experts(entry, said):
    class GroupedLinear(torch.nn.Module):
        use_grouped_tensor = False

    case, entry = CASES["tiny-mixtral"], ENTRIES[entry]
    model = torch.nn.Sequential(GroupedLinear()) if entry.group == "te" else entry.build(case, CPU, False).model
    measured = Measurement(entry, seconds=[0.1], loss=5.0, experts=experts_of(entry, case, model, CPU))
    assert row(case, measured, ONE_H200)["experts"] == said
    assert experts_of(entry, CASES["tiny"], model, CPU) is None
    assert "experts" not in row(CASES["tiny"], Measurement(entry, seconds=[0.1], loss=5.0), ONE_H200)


def test_routers_of_random_weights_visit_all_experts_about_equally():
    sizes = SHAPES["mixtral-8x7b"] | {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }  # fmt: skip
    case = Case("mixture", sizes, 2, 512)
    ids = torch.randint(512, (2, 512), generator=torch.Generator().manual_seed(0))
    worker = Worker(ENTRIES["octavo-bf16"], case, CPU, "")
    worker.build()
    largest = []
    for model in (build_octavo(case, CPU, False).model, worker.trainer.model):
        model.train()(input_ids=ids, labels=ids)
        visits = model.take_routing()[0][:, 8:16]
        largest.append((visits.amax(1) / visits.mean(1)).max())
    assert largest[1] < 1.3 < 2 < largest[0]


@pytest.mark.parametrize("case", [CASES["tiny"], UNTIED, CASES["tiny-mixtral"]], ids=lambda case: case.name)
def test_the_plain_model_is_hugging_faces(case):
    torch.manual_seed(0)
    plain = PlainDecoder(case.spec)
    theirs = AutoModelForCausalLM.from_config(case.hf_config(), dtype=torch.float32)
    missing = theirs.load_state_dict(plain.state_dict(), strict=True)
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    ids, _ = labelled_batches(case, CPU)[0]
    expected = theirs(input_ids=ids, labels=ids)
    torch.testing.assert_close(plain.logits(ids), expected.logits, rtol=1e-5, atol=1e-5)
    loss = plain(ids, ids)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.loss.backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-5)


def test_cases_have_the_shapes_of_the_released_models():
    counted = matmul_parameters(CASES["llama-1b"].spec)
    assert (counted.layers, counted.head) == (973_078_528, 262_668_288)
    assert matmul_parameters(CASES["llama-8b-8layers"].spec).layers * 4 == 6_979_321_856
    assert matmul_parameters(CASES["llama2-7b-8layers"].spec).layers * 4 == 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    for name, case in CASES.items():
        assert case.name == name
        many = re.search(r"-(\d+)-micro-batches$", name)
        times = int(many[1]) if many else 1
        if name.removeprefix("tiny-") in CASES and name.startswith("tiny-"):
            times = min(2, times)  # the tiny one of a published figure's case
        tokens = case.batch * case.sequence_length * times
        assert case.units * (int(name[-1]) if "-tp" in name else 1) == tokens
        if case.spec.family not in FAMILIES:
            continue
        with torch.device("meta"):
            counted = matmul_parameters(case.spec)
            assert sum(p.numel() for p in PlainDecoder(case.spec).parameters() if p.ndim > 1) == (
                counted.stored + (0 if case.spec.tied else case.spec.vocabulary * case.spec.hidden_size)
            )


@pytest.mark.parametrize(
    ("entry", "case"),
    [("torch-bf16", "tiny"), ("torch-bf16", "tiny-mixtral"), ("torch-huggingface-bf16", "tiny-mixtral")],
)
def test_a_step_trains(entry, case):
    case = CASES[case]
    trainer = ENTRIES[entry].build(case, CPU, False)
    ids, _ = labelled_batches(case, CPU)[0]
    losses = [float(trainer.step(ids, ids)) for _ in range(20)]
    assert abs(losses[0] - math.log(case.spec.vocabulary)) < 0.1
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in trainer.model.parameters())
    moments = [value for state in trainer.optimizer.state.values() for value in state.values() if value.ndim]
    assert moments
    assert all(value.dtype == torch.bfloat16 for value in moments)


def test_rows_of_the_plain_model_are_in_the_order_of_experts_and_filled_up():
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(40)])
    chosen[chosen == 3] = 4  # one expert without tokens, one with some twice
    copies, rows, ends = places(chosen, 6)
    assert (ends % 16 == 0).all()
    starts = ends - ends.diff(prepend=ends.new_zeros(1))
    assert torch.equal(copies[rows.flatten()], torch.arange(80))
    assert ((starts[chosen] <= rows) & (rows < ends[chosen])).all()
    assert (copies == 80).sum() == len(copies) - 80


def test_every_entry_sees_the_same_tokens():
    case = CASES["tiny"]
    first, second = ([tokens for tokens, _ in labelled_batches(case, CPU)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].shape == (case.batch, case.sequence_length)
    assert not torch.equal(first[0], first[1])
    assert 0 <= min(int(b.min()) for b in first) <= max(int(b.max()) for b in first) < case.spec.vocabulary


@pytest.mark.long
def test_a_run_on_a_cpu_is_measured_written_and_rendered(tmp_path):
    said = []
    results = run_suite(
        "one-gpu", cases=["tiny"], entries=["octavo-delayed", "torch-bf16"], steps=4, warmup=1,
        output=tmp_path, device="cpu", command="python -m benchmarks one-gpu", say=said.append,
    )  # fmt: skip
    path = tmp_path / "one-gpu-tiny.json"
    assert json.loads(path.read_text()) == results
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert f"wrote {path}" in said
    assert (results["suite"], results["command"]) == ("one-gpu", "python -m benchmarks one-gpu")
    assert results["machine"]["gpu"] is None
    assert results["machine"]["torch"] in (torch.__version__, torch.__version__.split("+")[0])
    own, figures = results["rows"]
    assert own["entry"] == "octavo-delayed"
    assert abs(own["loss"] - math.log(512)) < 0.2
    assert own["interleaved"] == figures["interleaved"] is True
    assert (figures["workload"], figures["entry"], figures["head"], figures["steps"]) == ("tiny", "torch-bf16", "bf16", 4)
    assert figures["tokens_per_second"] == pytest.approx(64 / (figures["step_ms"] / 1e3))
    assert len(figures["each_step_ms"]) == 4
    assert figures["step_ms"] == pytest.approx(statistics.median(figures["each_step_ms"]))
    assert (figures["mfu"], figures["peak_gib"]) == (None, None)
    # One step to warm up, four timed, one untimed between the turns: the losses of the same model in this process.
    trainer, batches = build_plain(CASES["tiny"], CPU, False), labelled_batches(CASES["tiny"], CPU)
    losses = [float(trainer.step(*batches[i % 4])) for i in range(6)]
    assert own["loss_step"] == figures["loss_step"] == 6
    assert figures["loss"] == pytest.approx(losses[-1], rel=1e-3)
    assert "torch-bf16" in rendered(results)


@pytest.mark.parametrize("name", ["octavo-current", "octavo-rowwise", "octavo-block"])
def test_the_other_recipes_train_too(name):
    case = CASES["tiny"]
    trainer = ENTRIES[name].build(case, CPU, False)
    ids, _ = labelled_batches(case, CPU)[0]
    losses = [float(trainer.step(ids, ids)) for _ in range(8)]
    assert abs(losses[0] - math.log(case.spec.vocabulary)) < 0.2
    assert losses[-1] < losses[0]


BROKEN_PEERS = {
    "raise ImportError('torchao is broken here\\nin a second line')": "ImportError: torchao is broken here",
    "import os; os._exit(7)": "its process ended with exit code 7",
}


@pytest.mark.long(lambda source: "_exit" not in source)
@pytest.mark.parametrize("source", BROKEN_PEERS)
def test_a_broken_peer_is_a_row_with_its_error(tmp_path, monkeypatch, source):
    (tmp_path / "torchao.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    output = tmp_path / "results" / "all.json"
    results = run_suite(
        "one-gpu",
        cases=["tiny"],
        entries=["ao-tensorwise"],
        steps=2,
        warmup=1,
        output=output,
        device="cpu",
        command="python -m benchmarks",
    )
    error = BROKEN_PEERS[source]
    assert results["rows"] == [{"workload": "tiny", "entry": "ao-tensorwise", "head": "bf16", "error": error}]
    assert json.loads(output.read_text()) == results
    assert error in rendered(results)
    assert "failed" in rendered(results)


@pytest.mark.long(lambda fit: not fit)
@pytest.mark.parametrize("fit", [True, False])
def test_every_entry_trains_as_many_steps_whether_they_take_turns_or_not(tmp_path, monkeypatch, forked_workers, fit):
    """Else the first of two would lie a step ahead, and a loss beside another would say nothing."""
    monkeypatch.setattr("benchmarks.measure.all_fit", lambda *given: fit)
    names = ["octavo-bf16", "torch-bf16", "octavo-delayed"]
    asked = {"cases": ["tiny"], "steps": 5, "warmup": 2, "device": "cpu", "command": "python -m benchmarks one-gpu"}
    rows = run_suite("one-gpu", entries=names, output=tmp_path / "all", **asked)["rows"]
    assert [(row["entry"], row["interleaved"], row["steps"], row["loss_step"]) for row in rows] == [
        (name, fit, 5, 8) for name in names
    ]
    if not fit:
        before = CASES["tiny"], CPU, False
        trainer, batches = ENTRIES["octavo-bf16"].build(*before), labelled_batches(CASES["tiny"], CPU)
        assert rows[0]["loss"] == pytest.approx([float(trainer.step(*batches[i % 4])) for i in range(8)][-1], rel=1e-3)


@pytest.mark.long
def test_an_entry_alone_takes_its_steps_at_once(tmp_path, monkeypatch, forked_workers):
    turns = []
    turn = RunningEntry.turn
    monkeypatch.setattr(RunningEntry, "turn", lambda entry, steps: turns.append(steps) or turn(entry, steps))
    said = []
    (row,) = run_suite(
        "one-gpu", cases=["tiny"], entries=["torch-bf16"], steps=3, warmup=1,
        output=tmp_path, device="cpu", command="python -m benchmarks one-gpu", say=said.append,
    )["rows"]  # fmt: skip
    assert [steps for steps in turns if steps] == [3]
    assert (row["steps"], row["loss_step"], row["interleaved"]) == (3, 4, False)
    assert not any("turns" in line for line in said)


@pytest.mark.long
def test_what_ends_a_suite_loses_no_finished_entry(tmp_path, monkeypatch, forked_workers):
    monkeypatch.setattr("benchmarks.measure.all_fit", lambda *given: False)

    def say(line):
        if line == "tiny: torch-bf16":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_suite(
            "one-gpu", cases=["tiny"], entries=["octavo-bf16", "torch-bf16"], steps=2, warmup=1,
            output=tmp_path, device="cpu", command="python -m benchmarks one-gpu", say=say,
        )  # fmt: skip
    (kept,) = json.loads((tmp_path / "one-gpu-tiny.json").read_text())["rows"]
    assert (kept["entry"], kept["steps"], kept["interleaved"]) == ("octavo-bf16", 2, False)


def test_a_worker_answers_until_something_fails():
    class Broken:
        def build(self):
            return {}

        def warm_up(self, steps):
            return {"warmed": steps}

        def measure(self, steps):
            raise RuntimeError("\n  CUDA out of memory\ndetails")

    requests = ['{"do": "build"}', '{"do": "warm_up", "steps": 3}', *['{"do": "measure", "steps": 2}'] * 2]
    assert [json.loads(answer) for answer in answers(requests, Broken())] == [
        {},
        {"warmed": 3},
        {"error": "RuntimeError: CUDA out of memory"},
    ]


def test_entries_stay_resident_only_where_the_memory_holds_them_all():
    answers = [{"held_gib": 8.0, "needed_gib": 34.0}, {"held_gib": 9.0, "needed_gib": 30.0}]
    assert all_fit(answers, CASES["llama-1b"], 8, ONE_H200)  # 35 + 7 x 10 of 139.8
    assert not all_fit(answers, CASES["llama-1b"], 11, ONE_H200)
    cpu = Device("CPU", None, None, 20.0, "cpu")
    assert all_fit([{}], CASES["llama-1b"], 1, Target(cpu, "cpu"))  # 1.24 × 10⁹ × 8 bytes are 9.2 GiB
    assert not all_fit([{}], CASES["llama-1b"], 2, Target(cpu, "cpu"))
    assert not all_fit([{}] * 2, CASES["llama-1b"], 1, Target(cpu, "cpu", 2))  # 16 bytes of each, on both ranks together


def test_rows_follow_from_steps():
    case = CASES["llama-1b"]
    measured = Measurement(ENTRIES["octavo-delayed"])
    measured.take([{"seconds": [0.3, 0.2], "loss": 11.5, "peak_gib": 30.0}])
    other = {"seconds": [9.0, 9.0], "loss": 11.0, "peak_gib": 31.0}  # a second rank
    measured.take([{"seconds": [0.2, 0.2], "loss": 11.5, "peak_gib": 30.0}, other])
    figures = row(case, measured, ONE_H200)
    assert figures["step_ms"] == pytest.approx(200)
    assert figures["tokens_per_second"] == pytest.approx(16_384 / 0.2)
    flops_a_token = 6 * 1_235_746_816 + 6 * 16 * 2048 * 4096
    assert figures["tflops"] == pytest.approx(flops_a_token * 16_384 / 0.2 / 1e12)
    ideal = 16_384 * (6 * 973_078_528 / 1979e12 + (6 * 262_668_288 + 6 * 16 * 2048 * 4096) / 989e12)
    assert figures["mfu"] == pytest.approx(ideal / 0.2)
    assert (figures["loss"], figures["peak_gib"], figures["steps"]) == (11.25, 31.0, 4)


def test_a_loss_that_is_no_number_is_an_error():
    measured = Measurement(ENTRIES["torch-bf16"])
    measured.take([{"seconds": [0.1], "loss": math.nan}])
    assert row(CASES["tiny"], measured, Target(describe_device("cpu"), "cpu"))["error"] == "the loss is nan after 1 timed steps"


def test_the_ratio_is_to_the_fastest_peer_that_is_not_octavo(tmp_path):
    rows = []
    for name, seconds in (("octavo-delayed", 0.1), ("torch-bf16", 0.2), ("ao-tensorwise", 0.125)):
        measured = Measurement(ENTRIES[name])
        measured.take([{"seconds": [seconds], "loss": 11.0, "peak_gib": 20.0}])
        rows.append(row(CASES["llama-1b"], measured, ONE_H200))
    best = best_peer(rows)
    assert best is not None
    assert best["entry"] == "ao-tensorwise"
    assert best_peer(rows[:1]) is None
    results = document("one-gpu", "python -m benchmarks", ONE_H200, [ENTRIES["ao-tensorwise"]], rows)
    assert list(results["machine"]["peers"]) == ["torchao"]
    text = rendered(results)
    assert "1.250" in text
    assert "0.625" in text
    other = {**results, "rows": [*rows, {"workload": "tiny", "entry": "torch-bf16", "head": "bf16", "error": "none"}]}
    assert [path.name for path in write(other, tmp_path)] == ["one-gpu-llama-1b.json", "one-gpu-tiny.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"suite": "one-gpus"}, "unknown benchmark suite 'one-gpus'. Did you mean 'one-gpu'?"),
        ({"cases": ["llama-1"]}, "unknown case 'llama-1'. Did you mean 'llama-1b'?"),
        ({"entries": ["torch-bf17"]}, "unknown entry 'torch-bf17'. Did you mean 'torch-bf16'?"),
        ({"device": "gpu"}, "device 'gpu'"),
        ({"device": "meta"}, "device 'meta' has no benchmarks"),
        ({"device": "cuda:64"}, "device 'cuda:64' does not exist"),
        ({"gpus": 2}, "gpus = 2: the suite one-gpu needs 1."),
        (
            {"suite": "context", "entries": ["octavo-bf16"], "gpus": 1},
            "gpus = 1: the suite context needs 2 at least. Use --gpus 2",
        ),
        ({"suite": "sharded", "entries": ["ao-rowwise"]}, "unknown entry 'ao-rowwise'"),
    ],
)
def test_wrong_names_are_refused_before_anything_runs(change, message):
    asked = {
        "suite": "one-gpu",
        "cases": ["tiny"],
        "entries": ["torch-bf16"],
        "steps": 1,
        "warmup": 0,
        "device": "cpu",
        **change,
    }
    with pytest.raises(InputError) as caught:
        run_suite(**asked, output=Path("unused"), command="python -m benchmarks")
    assert message in str(caught.value)
    assert not Path("unused").exists()


def test_the_commit_is_this_checkouts_or_the_environments(monkeypatch):
    monkeypatch.setenv("OCTAVO_COMMIT", "abc")
    known = commit()
    assert known == "abc" or (known is not None and len(known) == 40)
    monkeypatch.setenv("PATH", "")
    assert commit() == "abc"
    monkeypatch.delenv("OCTAVO_COMMIT")
    assert commit() is None


def rendered(results: dict) -> str:
    text = io.StringIO()
    render(results, Console(file=text, width=160))
    return text.getvalue()


def test_results_are_written_where_the_user_is_and_never_over_others(tmp_path, monkeypatch, forked_workers):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    published = tmp_path / "benchmarks" / "one-gpu-tiny.json"
    published.write_text("published")
    said = []
    asked = {"cases": ["tiny"], "entries": ["torch-bf16"], "steps": 1, "warmup": 0, "device": "cpu"}
    run_suite("one-gpu", **asked, command="python -m benchmarks")
    first = (tmp_path / "one-gpu-tiny.json").read_text()
    assert published.read_text() == "published"
    for output in (None, tmp_path / "benchmarks"):
        with pytest.raises(InputError, match=r"one-gpu-tiny\.json: results are there already"):
            run_suite("one-gpu", **asked, output=output, command="python -m benchmarks", say=said.append)
    assert not said  # before anything is measured
    assert (tmp_path / "one-gpu-tiny.json").read_text() == first
    assert published.read_text() == "published"
    run_suite("one-gpu", **asked, output=published, command="python -m benchmarks by name", say=said.append)
    assert json.loads(published.read_text())["command"] == "python -m benchmarks by name"
    assert f"replaces {published}" in said


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("folder.json", "a folder, and a name in .json is a file"),
        ("text.txt", "a file, and its name does not end in .json"),
        ("text.txt/results.json", "--output: results.json cannot be written in '.*text.txt': it is a file"),
        ("text.txt/results", "--output: one-gpu-tiny.json cannot be written in '.*text.txt/results': '.*text.txt' is a file"),
        ("link", "--output: one-gpu-tiny.json cannot be written in '.*link': it is a broken symbolic link"),
        # Where permissions allow root to write, and nothing can be.
        ("/proc/results.json", "--output: results.json cannot be written in '/proc': "),
        ("/proc/results", "--output: one-gpu-tiny.json cannot be written in '/proc/results': "),
        (f"{'n' * 245}.json", "--output: n*.json cannot be written in .*: File name too long. Give a shorter path"),
    ],
)
def test_results_that_could_not_be_written_are_refused_before_a_run(tmp_path, output, message):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "text.txt").write_text("")
    (tmp_path / "link").symlink_to("nothing")
    before, said = sorted(tmp_path.iterdir()), []
    with pytest.raises(InputError, match=message):
        run_suite(
            "one-gpu", cases=["tiny"], entries=["torch-bf16"], device="cpu", output=tmp_path / output,
            command="python -m benchmarks", say=said.append,
        )  # fmt: skip
    assert not said
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_folder_without_permission_is_refused_before_a_run(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(InputError, match=r"--output: one-gpu-tiny\.json cannot be written in '.*closed': .*permissions"):
        run_suite("one-gpu", cases=["tiny"], device="cpu", output=tmp_path / "closed", command="python -m benchmarks")
