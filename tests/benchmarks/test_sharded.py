"""The sharded suite on two ranks of a CPU: that both sides compute the whole model, and that a rank that fails is named."""

import io
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.distributed.tensor import DTensor

import ranks
from benchmarks import sharded
from benchmarks.cases import CASES, CONTEXT_CASES, Case
from benchmarks.chosen import frees_blocks
from benchmarks.plain import PlainDecoder
from benchmarks.records import render
from benchmarks.run import run_suite
from benchmarks.sharded import CONTEXT, SHARDED, build_plain_sharded
from benchmarks.worker import labelled_batches
from octavo.errors import InputError
from octavo.hardware import GIB
from octavo.models.shapes import SHAPES
from octavo.parallel import gathered, world
from octavo.plan.flops import matmul_parameters
from octavo.plan.memory import estimate
from octavo.plan.saved import BlockRecipes, Setup, parameters

CPU = torch.device("cpu")
TINY = CASES["tiny"]
_SIZES = SHAPES["llama-tiny"] | {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
OCTAVO = [name for name in SHARDED if name.startswith("octavo-")]
UNTIED = Case("untied", _SIZES, 2, 16)
FIGURES = {
    "workload", "entry", "head", "tokens_per_second", "step_ms", "tflops", "mfu", "peak_gib", "loss", "loss_step", "layers",
    "batch", "sequence_length", "steps", "interleaved", "gpus", "build_seconds", "start_seconds",
    "attention", "each_step_ms",
}  # fmt: skip


def test_the_whole_8b_shape():
    for name in ("llama-8b-8k", "llama-8b-16k"):
        counted = matmul_parameters(CASES[name].spec)
        with torch.device("meta"):
            model = PlainDecoder(CASES[name].spec)
        assert sum(p.numel() for p in model.parameters()) == 8_030_261_248  # as published
        assert counted.layers + counted.head == 8_030_261_248 - 4096 * (128_256 + 2 * 32 + 1)
        assert CASES[name].units == 16_384


def test_fresh_starts_have_a_row_each(tmp_path, forked_workers):
    how = {"output": tmp_path / "starts.json", "device": "cpu", "gpus": 2, "command": "python -m benchmarks sharded"}
    entry = "octavo-delayed-fast-fp8-head-bf16-states"
    results = run_suite("sharded", cases=["tiny"], entries=[entry], steps=2, warmup=1, starts=2, **how)
    assert json.loads((tmp_path / "starts.json").read_text()) == results
    first, second = results["rows"]
    assert (first["start"], second["start"]) == (1, 2)
    assert first["loss"] == second["loss"]  # of the same seed and batches
    console = Console(file=io.StringIO(), width=200)
    render(results, console)
    slow, fast = sorted((row["step_ms"] for row in results["rows"]), reverse=True)
    said = f"tiny: {entry}: {fast:.1f} to {slow:.1f} ms a step in 2 starts, a spread of {slow / fast - 1:.1%}"
    assert said in console.file.getvalue()


@pytest.mark.parametrize(
    ("suite", "more", "said"), [("kernels", {}, "only the suites"), ("sharded", {"traces": Path("t")}, "--traces")]
)
def test_starts_that_are_refused(suite, more, said, monkeypatch):
    monkeypatch.setattr("benchmarks.run._check_gpu", lambda *args: None)
    with pytest.raises(InputError, match=said):
        run_suite(suite, starts=2, device="cpu", command="", **more)


def test_a_run_on_two_ranks(tmp_path, forked_workers):
    results = run_suite(
        "sharded", cases=["tiny"], entries=["octavo-delayed", "torch-bf16"], steps=2, warmup=2,
        output=tmp_path, device="cpu", gpus=2, command="python -m benchmarks sharded",
    )  # fmt: skip
    assert json.loads((tmp_path / "sharded-tiny.json").read_text()) == results
    assert results["machine"]["count"] == 0  # of GPUs
    for figures in results["rows"]:
        assert set(figures) == FIGURES | {"reshard_after_forward"}, figures
        assert figures["reshard_after_forward"] is True  # on a CPU
        assert (figures["gpus"], figures["steps"], figures["interleaved"]) == (2, 2, True)
        assert figures["tokens_per_second"] == pytest.approx(TINY.units / (figures["step_ms"] / 1e3))
        assert 0 < figures["build_seconds"] < figures["start_seconds"]
    # Two steps to warm up, two timed, one untimed between: here by one rank over the tokens of both.
    trainer, batches = SHARDED["octavo-bf16"].build(TINY, CPU, False), [labelled_batches(TINY, CPU, rank) for rank in range(2)]
    losses = [trainer.step(*[torch.cat([part[i % 4][0] for part in batches])] * 2).item() for i in range(5)]
    delayed, _ = (figures["loss"] for figures in results["rows"])
    assert delayed == pytest.approx(losses[-1], rel=5e-3)
    ours, theirs = (figures["attention"] for figures in results["rows"])
    assert ours.startswith("PyTorch's kernel on cpu")
    assert theirs == "scaled_dot_product_attention, flash attention"  # PyTorch's own name of what a CPU takes
    text = io.StringIO()
    render(results, Console(file=text, width=80))
    assert "…" not in text.getvalue()
    assert "vs peer" in text.getvalue()


def test_one_rank_for_comparison(tmp_path, forked_workers):
    """Octavo alone: a model with float32 weights that is not sharded."""
    results = run_suite(
        "sharded", cases=["tiny"], entries=["octavo-bf16", "torch-bf16"], steps=2, warmup=2,
        output=tmp_path, device="cpu", gpus=1, command="python -m benchmarks sharded",
    )  # fmt: skip
    own, peer = results["rows"]
    assert "reshard_after_forward" not in own
    trainer, batches = SHARDED["octavo-bf16"].build(TINY, CPU, False), labelled_batches(TINY, CPU, 0)
    assert own["loss"] == pytest.approx([trainer.step(*batches[i % 4]).item() for i in range(5)][-1], rel=1e-3)
    assert own["gpus"] == 1
    assert "need 2 GPUs at least" in peer["error"]


def test_experts_spread_over_two_ranks(tmp_path, forked_workers):
    """The loss of one rank that holds all experts, over the tokens of both; peers have no such entry."""
    said = []
    results = run_suite(
        "sharded", cases=["tiny-mixtral-ep2"], entries=["octavo-bf16", "te-bf16"], steps=2, warmup=1,
        output=tmp_path, device="cpu", gpus=2, command="python -m benchmarks sharded", say=said.append,
    )  # fmt: skip
    assert "tiny-mixtral-ep2: without te-bf16" in said
    (own,) = results["rows"]
    case, whole = CASES["tiny-mixtral-ep2"], CASES["tiny-mixtral"]
    assert (case.expert, whole.expert, case.sizes) == (2, 1, whole.sizes)
    trainer, batches = SHARDED["octavo-bf16"].build(whole, CPU, False), [labelled_batches(case, CPU, rank) for rank in range(2)]
    losses = [trainer.step(*[torch.cat([part[i % 4][0] for part in batches])] * 2).item() for i in range(3)]
    assert own["loss"] == pytest.approx(losses[-1], rel=1e-3)
    with pytest.raises(InputError, match=r"2 GPUs hold the experts, and 3 ranks are no multiple of that. Use --gpus 4"):
        run_suite(
            "sharded", cases=["tiny-mixtral-ep2"], entries=["octavo-bf16"], output=tmp_path / "b.json", device="cpu", gpus=3,
            command="python -m benchmarks sharded",
        )  # fmt: skip


def test_matrices_split_over_two_ranks(tmp_path, forked_workers):
    """The loss of one rank that holds all matrices, over the samples that both share; peers have no such entry."""
    said = []
    results = run_suite(
        "sharded", cases=["tiny-tp2"], entries=["octavo-bf16", "te-bf16"], steps=2, warmup=1,
        output=tmp_path, device="cpu", gpus=2, command="python -m benchmarks sharded", say=said.append,
    )  # fmt: skip
    assert "tiny-tp2: without te-bf16" in said
    (own,) = results["rows"]
    case, whole = CASES["tiny-tp2"], CASES["tiny"]
    assert (case.tensor, whole.tensor, case.sizes, case.units) == (2, 1, whole.sizes, whole.units // 2)
    trainer, batches = SHARDED["octavo-bf16"].build(whole, CPU, False), labelled_batches(case, CPU)
    losses = [trainer.step(*batches[i % 4]).item() for i in range(3)]
    assert own["loss"] == pytest.approx(losses[-1], rel=1e-3)
    assert own["tokens_per_second"] == pytest.approx(2 * 32 / 2 / (own["step_ms"] / 1e3))


@pytest.mark.long
def test_a_step_of_four_micro_batches_is_that_of_the_whole_batch(tmp_path, forked_workers):
    kept, summed = "octavo-delayed-fast-input-fp8-head-backward", "octavo-delayed-fast-input-fp8-head-backward-sync-each"
    results = run_suite(
        "sharded", cases=["tiny-4-micro-batches"], entries=["octavo-bf16", kept, summed], steps=2, warmup=1,
        output=tmp_path / "all.json", device="cpu", gpus=2, command="python -m benchmarks sharded",
    )  # fmt: skip
    case = CASES["tiny-4-micro-batches"]
    trainer = SHARDED["octavo-bf16"].build(case, CPU, False)
    batches = [labelled_batches(case, CPU, rank) for rank in range(2)]
    whole = [tuple(torch.cat(parts) for parts in zip(*both, strict=True)) for both in zip(*batches, strict=True)]
    losses = [trainer.step(*whole[i]).item() for i in range(3)]  # one to warm up, two timed
    for figures in results["rows"]:
        assert figures["micro_batches"] == 4
        assert figures["tokens_per_second"] == pytest.approx(4 * 2 * 32 / (figures["step_ms"] / 1e3))
        assert figures["loss"] == pytest.approx(losses[-1], rel=1e-3 if figures["entry"] == "octavo-bf16" else 5e-3)
    assert [figures["entry"] for figures in results["rows"]] == ["octavo-bf16", kept, summed]


def test_lengths_of_one_gpu_and_of_two():
    """Each length has both degrees, with no fewer than 16,384 tokens of a GPU; the page says what it takes."""
    page = (Path(__file__).parents[2] / "docs" / "context-parallelism.md").read_text(encoding="utf-8")
    whole = {name: case for name, case in CONTEXT_CASES.items() if name.startswith("llama-8b-")}
    # Those of eight layers are for GPUs of 80 GB, and those that more GPUs share for published figures.
    settings = {name: case for name, case in whole.items() if "8layers" not in name and case.context <= 2}
    assert {name.removesuffix("-cp2") for name in settings} == {f"llama-8b-{k}k" for k in (8, 16, 32, 64, 128, 256)}
    assert len(settings) == 12
    for name, case in settings.items():
        assert case.units >= 16_384
        setup = Setup(
            case.spec, parameters(case.spec), case.batch, case.sequence_length, blocks=(BlockRecipes(*("delayed",) * 4),) * 32,
            head="backward", recompute=case.recompute, offload=case.offload, world=2, shard=2, context=case.context,
            history=1024,
        )  # fmt: skip
        made = estimate(setup)
        assert (made.total / GIB < 131) == (name != "llama-8b-32k"), name
        assert made.host / GIB < 80  # of each rank
        _, line = [line for line in page.splitlines() if line.startswith(f"| {case.sequence_length:,} |")]  # of estimates
        settings, total = [cell.strip() for cell in line.strip("|").split("|")][2 * case.context - 1 :][:2]
        assert total == f"{made.total / GIB:.1f}", name
        assert (f"offload {made.host / GIB:.1f}" in settings) == case.offload
        assert ("recompute" in settings) == bool(case.recompute)


def test_entries_that_differ_by_their_exchange_train_shared_sequences():
    whole = [name for name, entry in CONTEXT.items() if entry.trains(CONTEXT_CASES["llama-8b-16k"])]
    heads = [f"te-delayed{kernel}{head}" for kernel in ("", "-flash-attention") for head in ("", "-fp8-head")]
    assert whole == ["octavo-bf16", "octavo-delayed", *heads]
    assert all(entry.trains(CONTEXT_CASES["llama-8b-16k-cp2"]) for entry in CONTEXT.values())
    assert len(CONTEXT) == 16
    assert {name for name, entry in CONTEXT.items() if "-fp8-head" in name} == {
        name for name, entry in CONTEXT.items() if name.startswith("te-") and entry.head == "fp8"
    }


def plain_gradients(case):
    """(loss, gradients) of the sharded peer and of the whole model in bfloat16, and what a step leaves behind."""
    world.init()
    trainer = build_plain_sharded(case, CPU, False)
    weights = {name: p.full_tensor().detach() for name, p in trainer.model.named_parameters()}
    own, _ = labelled_batches(case, CPU, world.state.rank)[0]
    loss = trainer.model(own, own)
    loss.backward()
    summed = {name: p.grad.full_tensor() for name, p in trainer.model.named_parameters()}
    assert all(isinstance(p, DTensor) and p.dtype == p.grad.dtype == torch.float32 for p in trainer.model.parameters())
    trainer.step(own, own)
    moments = [value for state in trainer.optimizer.state.values() for value in state.values() if value.ndim]
    assert moments
    assert all(value.dtype == torch.float32 for value in moments)

    whole = PlainDecoder(case.spec)
    whole.load_state_dict(weights, strict=False)
    whole = whole.to(torch.bfloat16)
    both = torch.cat([labelled_batches(case, CPU, rank)[0][0] for rank in range(2)])
    expected = whole(both, both)
    expected.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    return total.item() / 2, summed, expected.item(), {name: p.grad.float() for name, p in whole.named_parameters()}


@pytest.mark.parametrize("case", [TINY, UNTIED], ids=lambda case: case.name)
def test_the_sharded_peer_is_the_whole_model(case):
    for loss, found, expected, whole in ranks.run(2, plain_gradients, case):
        assert loss == pytest.approx(expected, rel=1e-3)
        assert found.keys() == whole.keys()
        for name, gradient in whole.items():
            assert (found[name] - gradient).norm() <= 0.02 * gradient.norm(), name


def octavo_parameters():
    world.init()
    found = []
    for name in OCTAVO:
        trainer = SHARDED[name].build(UNTIED, CPU, False, seed=3)
        own, _ = labelled_batches(UNTIED, CPU, world.state.rank)[0]
        trainer.step(own, own)
        found += [(name, isinstance(p, DTensor), p.dtype, p.to_local().numel(), p.numel()) for p in trainer.model.parameters()]
    return found


@pytest.mark.long
def test_octavos_weights_are_sharded_in_float32_or_as_the_name_says():
    for found in zip(*ranks.run(2, octavo_parameters), strict=True):
        (name, *first), (_, *second) = found
        assert first[:2] == second[:2] == [True, torch.bfloat16 if name.endswith("bf16-states") else torch.float32]
        assert first[2] + second[2] == first[3]


def kept_blocks(memory):
    """Of three entries, whether each block is gathered behind a forward, and whether the row says that it is freed."""
    gathered.memory_of_gpu = lambda kind: memory
    world.init({})
    found = []
    for suffix in ("", "-kept", "-freed"):
        training = SHARDED[f"octavo-delayed-fast-input-fp8-head-backward{suffix}"].build(CASES["tiny"], CPU, False)
        training.loss(*labelled_batches(CASES["tiny"], CPU)[0])
        there = {block._get_fsdp_state()._fsdp_param_group.is_unsharded for block in training.model.layers}
        found.append((there, frees_blocks(training.model)))
    return found


@pytest.mark.parametrize("memory", [None, GIB])
def test_gathered_weights_are_kept_by_the_entry_that_says_so_and_by_the_rule(memory):
    for usual, kept, freed in ranks.run(2, kept_blocks, memory):
        assert kept == ({True}, False)
        assert freed == ({False}, True)
        assert usual == (freed if memory is None else kept)


def test_torchao_converts_the_blocks_and_joins_amaxes_behind_the_optimizer(monkeypatch):
    float8, order = types.ModuleType("torchao.float8"), []

    def convert(model, *, config, module_filter_fn):
        linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        order.append((config, [name for name in linear if not module_filter_fn(None, name)]))

    float8.Float8LinearConfig = dict
    float8.convert_to_float8_training = convert
    float8.precompute_float8_dynamic_scale_for_fsdp = lambda model: order.append(next(model.parameters()).detach().clone())
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)
    monkeypatch.setattr(sharded, "_shard", lambda *arguments: None)
    trainer = SHARDED["ao-tensorwise"].build(UNTIED, CPU, False)
    assert order == [({"enable_fsdp_float8_all_gather": True, "emulate": True}, ["lm_head"])]
    before = next(trainer.model.parameters()).detach().clone()
    trainer.step(*labelled_batches(UNTIED, CPU, 0)[0])
    assert torch.equal(order[1], next(trainer.model.parameters()))
    assert not torch.equal(order[1], before)


@pytest.mark.long
def test_a_rank_that_fails_is_a_row_with_its_error(tmp_path, break_rank_1):
    break_rank_1("print('last words', file=sys.stderr, flush=True); os._exit(7)")  # an exception: test_checkpoint.py
    results = run_suite(
        "sharded", cases=["tiny"], entries=["octavo-delayed"], steps=2, warmup=1,
        output=tmp_path / "all.json", device="cpu", command="python -m benchmarks",
    )  # fmt: skip
    (figures,) = results["rows"]
    assert figures == {
        "workload": "tiny",
        "entry": "octavo-delayed",
        "head": "bf16",
        "error": "rank 1: its process ended with exit code 7: last words",
    }


def test_sequences_over_two_ranks_are_one_ranks(tmp_path, forked_workers):
    results = run_suite(
        "context", cases=["tiny-cp2"], entries=["octavo-delayed-a2a"], steps=2, warmup=1,
        output=tmp_path / "all.json", device="cpu", gpus=2, command="python -m benchmarks context",
    )  # fmt: skip
    case = CONTEXT_CASES["tiny-cp2"]
    trainer, batches = CONTEXT["octavo-bf16"].build(case, CPU, False), labelled_batches(case, CPU)
    losses = [trainer.step(*batches[i % 4]).item() for i in range(3)]  # one to warm up, two timed
    for figures in results["rows"]:
        assert figures["tokens_per_second"] == pytest.approx(32 / (figures["step_ms"] / 1e3))  # a rank has half of each
        assert figures["loss"] == pytest.approx(losses[-1], rel=5e-3)
    with pytest.raises(InputError, match="2 GPUs share each sequence, and 3 ranks"):
        run_suite(
            "context", cases=["tiny-cp2"], device="cpu", gpus=3, output=tmp_path / "no.json", command="python -m benchmarks"
        )
