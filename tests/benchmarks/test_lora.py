"""The LoRA suite: entries have PEFT's adapters, peers are compared with PEFT before they are timed, and FLOPs."""

import dataclasses
import json
import math
import time

import pytest
import torch

from benchmarks import lora, lora_gap, one_process
from benchmarks.cases import CASES, LORA_CASES
from benchmarks.lora import LORA
from benchmarks.run import run_suite
from octavo.errors import InputError
from octavo.models.convert import conversion
from octavo.models.peft_folder import peft_tensors
from octavo.plan.flops import adapter_parameters, matmul_parameters

pytest.importorskip("peft", reason="needs peft, of the dev extra: pip install -e '.[dev]'")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
CPU = torch.device("cpu")
CASE = LORA_CASES["tiny-lora"]


def test_octavo_s_entries_have_peft_s_adapters():
    peft = LORA["torch-peft"].build(CASE, CPU, False)
    names = {name.replace(".default", ""): p.shape for name, p in peft.model.named_parameters() if p.requires_grad}
    ids = torch.randint(CASE.spec.vocabulary, (CASE.batch, CASE.sequence_length))
    for name, entry in LORA.items():
        if entry.group is not None:
            continue
        trainer = entry.build(CASE, CPU, False)
        trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        assert {k: t.shape for k, t in peft_tensors(trained, conversion(CASE.spec)).items()} == names
        stored = {p.dtype for n, p in trainer.model.named_parameters() if n.endswith(("qkv.weight", "fc1_weight"))}
        assert stored == {torch.uint8 if entry.stored else torch.bfloat16}
        losses = [float(trainer.step(ids, ids)) for _ in range(6)]
        assert losses[0] == pytest.approx(math.log(CASE.spec.vocabulary), abs=0.3)
        assert losses[-1] < losses[0]


def test_a_peer_is_compared_with_peft_in_float32_before_it_is_timed():
    assert LORA["torch-peft-compiled"].build.keywords == {}
    model, loss = lora._peft_model(CASE, CPU)
    lora.compare(CASE, CPU, model, loss, limit=lora.LIMITS["bf16"])
    model, loss = lora._peft_model(CASE, CPU)
    with pytest.raises(InputError, match=r"^gradients of two blocks: a relative error of 0\.(49|50?)\d* .*0\.05 is allowed"):
        lora.compare(CASE, CPU, model, lambda *batch: halved(loss(*batch)), limit=lora.LIMITS["bf16"])


def halved(loss):
    """The loss with half of its gradient."""
    return loss.detach() / 2 + loss / 2


@pytest.mark.long
def test_a_compiled_peer_learns_as_the_eager_one():
    eager, compiled = LORA["torch-peft"].build(CASE, CPU, False), LORA["torch-peft-compiled"].build(CASE, CPU, True)
    ids = torch.randint(CASE.spec.vocabulary, (CASE.batch, CASE.sequence_length))
    for _ in range(3):
        assert float(compiled.step(ids, ids)) == pytest.approx(float(eager.step(ids, ids)), rel=2e-3)


def test_a_base_that_fits_in_fp8_alone_is_for_entries_that_store_it_so():
    stored = LORA_CASES["llama-70b-lora"]
    assert {name for name, entry in LORA.items() if entry.trains(stored)} == {n for n in LORA if "fp8-base" in n}
    assert all(entry.trains(CASE) for entry in LORA.values())


@pytest.mark.long
def test_the_suite_writes_rows_of_octavo_and_peft(tmp_path, forked_workers):
    results = run_suite(
        "lora", entries=["octavo-delayed-fp8-base", "torch-peft"], steps=2, warmup=1, output=tmp_path, device="cpu",
        command="python -m benchmarks lora",
    )  # fmt: skip
    assert [(row["workload"], row["entry"], row.get("error")) for row in results["rows"]] == [
        ("tiny-lora", "octavo-delayed-fp8-base", None), ("tiny-lora", "torch-peft", None),
    ]  # fmt: skip
    assert results["machine"]["peers"].keys() == {"peft", "transformers"}


def test_a_step_s_flops_have_no_weight_gradient_of_frozen_matrices():
    whole = dataclasses.replace(CASES["llama-8b-8k"], sequence_length=4096)
    case, full = LORA_CASES["llama-8b-lora"], whole.flops()
    flops, matrices = case.flops(), matmul_parameters(case.spec)
    q_o, k_v, gate_up, down = 4096 + 4096, 4096 + 1024, 4096 + 14336, 14336 + 4096
    adapters = 32 * 16 * (2 * q_o + 2 * k_v + 2 * gate_up + down)
    assert adapter_parameters(case.spec, 16) == adapters == 41_943_040
    assert (flops.layers, flops.head) == (4 * matrices.layers, 4 * matrices.head)
    assert flops.total == full.total - 2 * (matrices.layers + matrices.head) + 6 * adapters
    split = flops.by_precision(layers="fp8", head="fp8", head_forward="bf16")
    assert split == {
        "bf16": flops.attention + 6 * adapters + 2 * matrices.head, "fp8": 4 * matrices.layers + 2 * matrices.head,
    }  # fmt: skip


@pytest.mark.long
def test_pairs_of_runs_share_weights_adapters_and_samples(tmp_path):
    """A base in FP8 and one in bfloat16 begin with the losses of one pretrained model, and their gaps are those of the rows."""
    said = []
    how = {"tiny": True, "seeds": 2, "pretraining": 4, "steps": 4, "batch": 2, "length": 64, "rank": 4, "device": "cpu"}
    found = lora_gap.measure(tmp_path / "base", **how, say=said.append)
    assert [row["seed"] for row in found["rows"]] == [1, 2]
    gaps = [row["gap_percent"]["held_out"] for row in found["rows"]]
    for row, gap in zip(found["rows"], gaps, strict=True):
        assert row["fp8"]["before"] == pytest.approx(row["bf16"]["before"], rel=2e-3)
        assert row["fp8"]["held_out"] != row["bf16"]["held_out"]
        assert gap == pytest.approx(100 * (row["fp8"]["held_out"] / row["bf16"]["held_out"] - 1))
    mean, error = found["mean_gap_and_error_percent"]["held_out"]
    assert mean == pytest.approx(sum(gaps) / 2)
    assert error == pytest.approx(abs(gaps[0] - gaps[1]) / 2)
    assert f"held_out: mean gap {mean:+.4f}%, standard error {error:.4f}%" in said
    again = lora_gap.measure(tmp_path / "base", **how, say=said.append)
    assert again == found


@pytest.mark.long
def test_entries_in_one_process_take_turns_and_a_failed_one_has_its_error(tmp_path, monkeypatch, capsys):
    path, missing = tmp_path / "lora.json", LORA["torch-peft-liger"]
    failing = dataclasses.replace(missing, build=lambda *given, **how: 1 / 0)
    monkeypatch.setitem(LORA, missing.name, failing)
    given = ["lora", "tiny-lora", "octavo-bf16,torch-peft-liger,torch-peft", "--steps", "4", "--warmup", "2", "--breakdown"]
    results = one_process.main([*given, "--device", "cpu", "--output", str(path)])
    assert json.loads(path.read_text()) == results
    ours, failed, theirs = results["rows"]
    assert failed["error"] == "ZeroDivisionError: division by zero"
    for row in (ours, theirs):
        assert (row["interleaved"], row["steps"], row["loss_step"]) == (True, 4, 7)
        assert row["start_seconds"] > row["build_seconds"] > 0
        assert row["largest_kernels"]
    printed = capsys.readouterr().out
    assert f"tiny-lora octavo-bf16: step {ours['step_ms']:.1f} ms" in printed


def test_an_entry_that_does_not_start_in_time_is_stopped():
    with pytest.raises(TimeoutError, match=r"^not started after 0\.05 s$"), one_process.limited(0.05):
        time.sleep(5)
