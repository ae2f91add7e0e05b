"""Memory of a run in its dry run, for other GPUs and ranks than those at hand; the message of a run that ran out of it."""

import dataclasses
import json
import resource

import pytest
import torch
from transformers import GPT2Config

from octavo.cli import main
from octavo.config.recompute import LEVELS
from octavo.config.run import RunConfig
from octavo.errors import OctavoError
from octavo.hardware import GIB, GPUS, lookup
from octavo.plan.advice import COSTS, explaining, lines, memory_of, out_of_memory, setup_of
from octavo.plan.memory import PARTS, USABLE, estimate
from octavo.plan.run import Target, check
from octavo.plan.saved import BlockRecipes

ROOT_8B = "model.source=llama-8b"
SHAPE_8B = [ROOT_8B, "model.config={}", "data.sequence_length=8192"]


def planned(run, *overrides, ranks=1, gpu="h200"):
    return check(RunConfig.from_file(run.file, overrides), target=Target(ranks, lookup(gpu)))


def dry(run, capsys, *arguments):
    assert main(["train", str(run.file), "--dry-run", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_dry_run_plans_ranks_of_a_gpu_that_is_not_there(tiny_run, capsys):
    run = tiny_run()
    found = dry(run, capsys, "--world-size", "8", "--gpu", "H200", *SHAPE_8B, "train.global_batch=16")
    memory = found["memory"]
    assert (found["device"], memory["ranks"], memory["device_gib"]) == ("H200", 8, 139)
    assert found["fp8"] == "FP8 on H200: delayed scaling, HYBRID"
    assert found["batch"]["data_parallel"] == 8
    assert list(memory["parts_gib"]) == list(PARTS)
    assert memory["parts_gib"]["parameters"] == pytest.approx(8_030_261_248 * 4 / 8 / GIB)
    assert memory["parts_gib"]["optimizer states"] == pytest.approx(8_030_261_248 * 8 / 8 / GIB)
    assert memory["total_gib"] == pytest.approx(sum(memory["parts_gib"].values()))
    assert memory["fits"] is True
    assert memory["options"] == []


def test_a_dry_run_before_the_preparation_has_the_epochs_and_no_steps(tiny_run, capsys):
    run = tiny_run()
    assert main(["train", str(run.file), "--dry-run", "train.epochs=2", f"data.folder={run.folder / 'fresh'}"]) == 0
    assert "epochs      2; the number of steps is unknown until the data is prepared" in capsys.readouterr().out


def test_settings_that_fit_are_named_and_really_fit(tiny_run, capsys):
    run, batch = tiny_run(), ["train.global_batch=8", "train.micro_batch=8"]
    memory = dry(run, capsys, "--world-size", "1", "--gpu", "h200", *SHAPE_8B, *batch)["memory"]
    assert memory["fits"] is False
    assert memory["total_gib"] > memory["usable_gib"] == pytest.approx(USABLE * 139)
    ranks, *_ = (option["changes"] for option in memory["options"] if "ranks" in option["changes"])
    assert ranks["ranks"] > 1
    assert any(option["changes"].get("model.params_dtype") == "bfloat16" for option in memory["options"])
    for option in memory["options"]:
        changes = dict(option["changes"])
        world = changes.pop("ranks", 1)
        overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        kept = [key for key in batch if key.partition("=")[0] not in changes]
        again = dry(run, capsys, "--world-size", str(world), "--gpu", "h200", *SHAPE_8B, *kept, *overrides)["memory"]
        assert again["fits"] is True
        assert again["total_gib"] == pytest.approx(option["total_gib"])


@pytest.mark.parametrize(
    ("gpu", "first"),
    [
        ("h200", None),
        ("h100 sxm", {"train.micro_batch": 8}),
        ("L40S", {"train.micro_batch": 4}),
        (
            "RTX 4090",
            {"ranks": 2, "train.micro_batch": 8, "train.recompute": "selective"},
        ),  # no setting of one rank fits beside 18 GiB of states
    ],
)
def test_the_setting_with_the_least_cost_in_speed_comes_first(gpu, first, tiny_run):
    sizes = ["model.source=llama-1b", "model.config={}", "data.sequence_length=4096", "train.global_batch=16"]
    plan = planned(tiny_run(), *sizes, "train.micro_batch=16", gpu=gpu)
    found = memory_of(plan)
    assert found.fits is (first is None)
    assert (dict(found.options[0].changes) if found.options else None) == first


def test_more_recomputation_costs_more():
    """The advice tries settings by these costs; a run file's levels have the same order."""
    assert sorted(LEVELS, key=COSTS.__getitem__) == list(LEVELS)
    assert len({COSTS[level] for level in LEVELS}) == len(LEVELS)


PLANS = {
    # Eight micro-batches keep 263 GiB of whole gradients, which a single one does not.
    "70B on 64": (["llama-70b", "h100 sxm", 64, 8192, 512, 1, "true"], {"train.micro_batch": 8, "train.offload": True}),
    "70B on 64, sharded over 8": (
        ["llama-70b", "h100 sxm", 64, 8192, 512, 1, "true", "parallel.hybrid_shard_degree=8"],
        {"parallel.hybrid_shard_degree": 32, "train.micro_batch": 8, "train.offload": True},
    ),
    "8B on 1": (
        ["llama-8b", "h100 sxm", 1, 8192, 64, 8, "false"],
        {
            "ranks": 2, "parallel.sync_each_micro_batch": True, "train.micro_batch": 2, "train.recompute": "selective",
            "train.offload": True,
        },
    ),
    "8B on 2": (
        ["llama-8b", "h100 sxm", 2, 8192, 64, 8, "false"],
        {
            "parallel.sync_each_micro_batch": True, "train.micro_batch": 2, "train.recompute": "selective",
            "train.offload": True,
        },
    ),
    "8B on 8": (["llama-8b", "h100 sxm", 8, 16384, 256, 4, "false"], {"train.recompute": "selective", "train.offload": True}),
    "8B of 128k on 8": (
        ["llama-8b", "h100 sxm", 8, 131072, 16, 1, "false"],
        {"parallel.sync_each_micro_batch": True, "train.recompute": "selective", "train.offload": True},
    ),
    "Mixtral on 8, whole on each": (
        ["mixtral-8x7b", "h200", 8, 4096, 64, 8, "true", "parallel.hybrid_shard_degree=1"],
        {"parallel.hybrid_shard_degree": 0},
    ),
    "Mixtral on 8": (
        ["mixtral-8x7b", "h200", 8, 4096, 64, 1, "true"],
        {"train.micro_batch": 8},
    ),
    "Mixtral on 16": (
        ["mixtral-8x7b", "h100 sxm", 16, 8192, 80, 5, "true"],
        {"parallel.expert_parallel_degree": 2},
    ),
}  # fmt: skip


@pytest.mark.long(lambda name: name not in ("8B on 1", "8B of 128k on 8", "Mixtral on 8"))
@pytest.mark.parametrize("name", PLANS)
def test_the_whole_space_of_settings_is_searched_and_what_it_names_is_a_run_that_fits(name, tiny_run):
    (source, gpu, ranks, length, batch, micro, recompute, *more), expected = PLANS[name]
    settings = [
        f"model.source={source}", "model.config={}", f"data.sequence_length={length}", f"train.global_batch={batch}",
        f"train.micro_batch={micro}", f"train.recompute={recompute}", *more,
    ]  # fmt: skip
    run = tiny_run()
    found = memory_of(planned(run, *settings, ranks=ranks, gpu=gpu))
    assert found.fits is False
    assert dict(found.options[0].changes) == expected
    for option in found.options:
        changes = [f"{key}={json.dumps(value)}" for key, value in option.changes.items() if key != "ranks"]
        again = memory_of(planned(run, *settings, *changes, ranks=option.changes.get("ranks", ranks), gpu=gpu))
        assert again.fits
        assert again.estimate == option.estimate


def test_sums_in_each_micro_batch_make_70b_fit(tiny_run):
    """Whole gradients take 4 bytes of each of 70.6e9 parameters, and their shards a 64th of that."""
    settings = ["model.source=llama-70b", "model.config={}", "data.sequence_length=8192", "train.global_batch=512"]
    settings += ["train.micro_batch=1", "train.recompute=true"]
    run = tiny_run()
    found = memory_of(planned(run, *settings, ranks=64, gpu="h100 sxm"))
    parameters = 70_553_706_496
    assert found.estimate.parts["gradients"] == pytest.approx(4 * parameters, rel=0.01)
    (option,) = (one for one in found.options if dict(one.changes) == {"parallel.sync_each_micro_batch": True})
    assert option.estimate.parts["gradients"] == pytest.approx(4 * parameters / 64, rel=0.01)
    synced = memory_of(planned(run, *settings, "parallel.sync_each_micro_batch=true", ranks=64, gpu="h100 sxm"))
    assert synced.fits
    assert synced.estimate == option.estimate


def test_each_level_of_recomputation_takes_less_memory_and_more_time_than_the_one_before(tiny_run):
    settings = ["model.source=llama-8b", "model.config={}", "data.sequence_length=8192", "train.global_batch=8"]
    run, totals = tiny_run(), []
    for level in LEVELS:
        plan = planned(run, *settings, f"train.recompute={json.dumps(level)}", gpu="h200")
        totals.append(estimate(setup_of(plan)).total)
        for option in memory_of(plan).options:
            assert LEVELS.index(option.changes.get("train.recompute", level)) >= LEVELS.index(level)
    assert totals == sorted(set(totals), reverse=True)
    assert [COSTS[level] for level in LEVELS] == sorted({COSTS[level] for level in LEVELS})


def test_selective_recomputation_is_not_advised_beside_dropout_of_attention(tiny_run):
    (source, gpu, ranks, length, batch, micro, recompute), expected = PLANS["8B on 8"]
    settings = [f"model.source={source}", f"data.sequence_length={length}", f"train.global_batch={batch}"]
    settings += [f"train.micro_batch={micro}", f"train.recompute={recompute}", "model.config={attention_dropout = 0.1}"]
    found = memory_of(planned(tiny_run(), *settings, ranks=ranks, gpu=gpu))
    assert expected["train.recompute"] == "selective"
    assert found.options
    assert "selective" not in [option.changes.get("train.recompute") for option in found.options]


def test_the_setup_follows_the_run(tiny_run):
    run = tiny_run()
    plan = planned(run, ranks=2)
    setup = setup_of(plan)
    delayed = BlockRecipes(*("delayed",) * 4)
    assert setup.blocks == (delayed, delayed)
    assert (setup.head, setup.history, setup.accumulates, setup.micro_batch) == ("backward", 4, False, 2)
    assert (setup.world, setup.shard, setup.params_bytes, setup.compute_bytes) == (2, 2, 4, 2)
    assert setup.parameters == plan.parameters == sum(torch.Size(shape).numel() for shape, _ in plan.weights.values())
    chosen = setup_of(
        planned(run, 'fp8.layers={"layers.0.*" = "rowwise"}', 'fp8.skip=["*.fc2", "head"]', "train.micro_batch=1")
    )
    assert chosen.blocks == (BlockRecipes("rowwise", "rowwise", "rowwise", None), delayed._replace(fc2=None))
    assert (chosen.head, chosen.accumulates) == (False, True)
    off = setup_of(planned(run, "fp8.enabled=false", "model.dtype=float32", "train.recompute=mlp", "train.offload=true"))
    assert off.blocks == ()
    assert (off.head, off.history, off.compute_bytes, off.recompute, off.offload) == (False, 0, 4, "mlp", True)
    without = setup_of(planned(run, gpu="A100 40GB"))  # no FP8 products
    assert without.blocks == ()
    assert without.head is False


@pytest.mark.parametrize(
    ("layers", "gpu", "more", "line", "gib"),
    [
        (
            8,
            "h200",
            [],
            "blocks stay gathered from forward to backward: 3.3 GiB, at most 1/25 of a GPU's memory (5.6 GiB)",
            3.25,
        ),
        (
            13,
            "h200",
            [],
            "blocks stay gathered from forward to backward: 5.3 GiB, at most 1/25 of a GPU's memory (5.6 GiB)",
            5.28,
        ),
        (14, "h200", [], "blocks are freed after their forward: gathered they take 5.7 GiB, more than 1/25 of a GPU's", None),
        (
            8,
            "h100 sxm",
            [],
            "blocks are freed after their forward: gathered they take 3.3 GiB, more than 1/25 of a GPU's",
            None,
        ),
        (8, "h200", ["fp8.enabled=false"], "blocks stay gathered from forward to backward: 3.3 GiB", 3.25),
        (
            8,
            "h200",
            ["fp8.enabled=false", "parallel.param_dtype=float32"],
            "blocks are freed after their forward: gathered",
            None,
        ),
    ],
)
def test_the_plan_says_how_long_blocks_stay_gathered_and_estimates_that(layers, gpu, more, line, gib, tiny_run, capsys):
    run, chosen = tiny_run(), [ROOT_8B, f'model.config={{"num_hidden_layers" = {layers}}}', "train.micro_batch=1", *more]
    plan = planned(run, *chosen, ranks=2, gpu=gpu)
    found = memory_of(plan)
    assert lines(plan, found)[0].startswith(f"gathered    {line}")
    assert setup_of(plan).reshard == (gib is None)
    given = planned(run, *chosen, f"parallel.reshard_after_forward={json.dumps(gib is None)}", ranks=2, gpu=gpu)
    assert memory_of(given).estimate == found.estimate
    assert lines(given, memory_of(given))[0].startswith("memory ")
    if gib is not None:
        assert plan.gathering.why.count(" GiB") == 2
        freed = estimate(dataclasses.replace(setup_of(plan), reshard=True)).parts["gathered weights"]
        there = 2 if "fp8.enabled=false" in more else 1.5  # blocks at a time: the next one is received in one of two layouts
        expected = pytest.approx(gib * (layers - there) / layers, rel=0.02)
        assert (found.estimate.parts["gathered weights"] - freed) / GIB == expected
    answer = dry(run, capsys, "--world-size", "2", "--gpu", gpu, *chosen)["memory"]
    assert answer["reshard_after_forward"] == (gib is None)
    assert dry(run, capsys, "--gpu", gpu, *chosen)["memory"]["reshard_after_forward"] is None
    assert "gathered  " not in "".join(lines(planned(run, *chosen, gpu=gpu), found))


@pytest.mark.parametrize("asked", ['"auto"', "false"])
def test_freed_blocks_are_named_where_they_make_a_run_fit(asked, tiny_run):
    """Weights and activations that fill a GPU of some 100 GiB, of which "auto" keeps 3.3 in gathered blocks."""
    sizes = [ROOT_8B, 'model.config={"num_hidden_layers" = 8}', "data.sequence_length=8192", "train.global_batch=16"]
    plan = planned(tiny_run(), *sizes, "train.micro_batch=8", f"parallel.reshard_after_forward={asked}", ranks=2)
    kept, freed = (estimate(dataclasses.replace(setup_of(plan), reshard=reshard)).total for reshard in (False, True))
    between = dataclasses.replace(plan.hardware, memory_gib=(kept + freed) / 2 / USABLE / GIB)
    small = dataclasses.replace(plan, hardware=between)
    found = memory_of(small)
    assert found.fits is False
    assert small.gathering.reshard is False
    assert dict(found.options[0].changes) == {"parallel.reshard_after_forward": True}
    assert found.options[0].estimate.total == freed
    assert "- parallel.reshard_after_forward = true: " in "\n".join(lines(small, found))
    advice = str(out_of_memory(torch.OutOfMemoryError("CUDA out of memory."), small))
    assert "Set parallel.reshard_after_forward = true: " in advice
    assert "The run then continues." in advice


def test_each_of_two_trainings_has_its_own_choice(tiny_run):
    """Weights of float32 products are gathered in float32: twice the bytes of the same in FP8."""
    sizes = [ROOT_8B, 'model.config={"num_hidden_layers" = 8}', "train.micro_batch=1", "model.dtype=float32"]
    both, one = (planned(tiny_run(f"{i}"), *sizes, f"train.compare_bf16={i}", ranks=2) for i in ("true", "false"))
    without = planned(tiny_run("without"), *sizes, "fp8.enabled=false", ranks=2)
    assert (both.gathering.reshard, one.gathering.reshard, without.gathering.reshard) == (False, False, True)
    totals = [memory_of(plan).estimate.total for plan in (both, one, without)]
    assert totals[0] == max(totals[1:])


def test_own_code_has_exact_states_and_unknown_activations(tiny_run, tmp_path, capsys):
    GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=64).save_pretrained(tmp_path / "gpt2")
    source = [f"model.source={tmp_path / 'gpt2'}", "model.config={}"]
    memory = dry(tiny_run(), capsys, *source)["memory"]
    assert (memory["total_gib"], memory["fits"], memory["parts_gib"]["activations"]) == (None, None, None)
    plan = planned(tiny_run("again"), *source)
    assert memory["exact_gib"] * GIB == 16 * plan.parameters
    text = "\n".join(lines(plan, memory_of(plan)))
    assert "activations unknown" in text
    assert "without these it fits H200 with 139.0 GiB" in text


def test_options_of_a_plan_are_checked(tiny_run, capsys):
    file = str(tiny_run().file)
    for arguments, parts in (
        (["--dry-run", "--gpu", "h1000"], ["unknown GPU 'h1000'", "RTX 4090", "Change --gpu"]),
        (["--dry-run", "--gpu", "H100"], ["several GPUs: H100 SXM, H100 PCIe, H100 NVL"]),
        (["--dry-run", "--world-size", "0"], ["--world-size 0", "at least 1 rank"]),
        (["--dry-run", "--world-size", "3"], ["train.global_batch = 4", "multiple of 3"]),
        (["--gpu", "h200"], ["add --dry-run"]),
    ):
        assert main(["train", file, *arguments]) == 2
        message = capsys.readouterr().err
        assert all(part in message for part in parts), message
    for gpu in GPUS:
        assert planned(tiny_run(gpu.name.replace(" ", "-")), gpu=gpu.name).hardware.memory_gib == gpu.memory_gib


def test_a_cpu_that_cannot_allocate_is_explained(tiny_run):
    plan = check(RunConfig.from_file(tiny_run().file))
    for allocate, asked in (
        (lambda: torch.empty(2**50, dtype=torch.uint8), " for 1125899906842624 bytes"),
        (lambda: bytearray(2**60), ""),
    ):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        message = str(out_of_memory(caught.value, plan))
        assert message.startswith(f"out of memory{asked}: this machine has ")
        assert "in use. The run's estimate is" in message
        assert "temporaries" in message or "activations" in message
        assert "Lower data.sequence_length" in message or "Set train." in message
        assert "\n" not in message


def test_work_inside_the_context_fails_with_the_message(tiny_run):
    plan = check(RunConfig.from_file(tiny_run().file))
    with pytest.raises(OctavoError, match=r"^out of memory for 1125899906842624 bytes: ") as caught, explaining(plan):
        torch.empty(2**50, dtype=torch.uint8)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), explaining(plan):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_a_full_gpu_is_explained_with_the_key_to_lower(tiny_run):
    half = "model.params_dtype=bfloat16"
    plan = planned(tiny_run(), *SHAPE_8B, half, "train.global_batch=8", "train.micro_batch=8")
    plan = dataclasses.replace(plan, hardware=dataclasses.replace(plan.hardware, memory_gib=74.5 / USABLE))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …")
    explained = out_of_memory(error, plan)
    assert explained.exit_code == 1
    option = memory_of(plan).options[0]
    assert str(option).startswith('train.recompute = "selective", train.offload = true: ')
    assert str(option).endswith(" and 32.2 GiB of host memory")  # 16,512 bytes of 65,536 tokens in 32 layers
    assert str(explained).startswith("out of memory for 2.00 GiB: H200 has ")
    assert f"Set {option} by the estimate. The run then continues." in str(explained)
    one_gpu = planned(
        tiny_run("1b"),
        "model.source=llama-1b",
        "model.config={}",
        "data.sequence_length=4096",
        "train.global_batch=64",
        "train.micro_batch=64",
    )
    assert "Set train.micro_batch = 16: " in str(out_of_memory(error, one_gpu))
    for text in ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"):
        assert str(out_of_memory(RuntimeError(text), one_gpu)).startswith("out of memory: H200 has")
    # A run that should fit gets the first setting that takes a tenth less.
    fits = planned(tiny_run("fits"), "train.micro_batch=4", "data.sequence_length=64", "train.global_batch=4")
    assert memory_of(fits).fits
    smaller = estimate(dataclasses.replace(setup_of(fits), micro_batch=2, accumulates=True)).total
    assert smaller > 0.9 * memory_of(fits).estimate.total  # so small a run is nothing but workspaces
    assert "Lower data.sequence_length" in str(out_of_memory(error, fits))


def test_another_run_is_advised_where_a_key_may_not_change(tiny_run):
    """A CPU too small for float32 parameters: bfloat16 fits, which a run cannot change to."""
    plan = check(RunConfig.from_file(tiny_run().file, ["model.config.vocab_size=50000", "train.micro_batch=1"]))
    setup = setup_of(plan)
    half = estimate(dataclasses.replace(setup, params_bytes=2, recompute=True)).total / USABLE / GIB
    small = dataclasses.replace(plan, hardware=dataclasses.replace(plan.hardware, memory_gib=1.01 * half))
    message = str(out_of_memory(MemoryError(), small))
    assert 'Set model.params_dtype = "bfloat16"' in message
    assert "It is then a new run: set train.output too (model.params_dtype may not change)." in message
    assert not any("train.offload" in option.changes for option in memory_of(small).options)  # the host's is the same memory


def test_a_shorter_sequence_is_advised_where_no_setting_is_enough(tiny_run):
    plan = check(RunConfig.from_file(tiny_run().file, ["train.micro_batch=1"]))
    plan = dataclasses.replace(plan, hardware=dataclasses.replace(plan.hardware, memory_gib=1.0))
    length = plan.config.data.model_copy(update={"sequence_length": 4_000_000})
    plan = dataclasses.replace(plan, config=plan.config.model_copy(update={"data": length}))
    found = memory_of(plan)
    (option,) = found.options
    assert option.changes["data.sequence_length"] in [4_000_000 >> halvings for halvings in range(1, 12)]
    assert option.estimate.total <= USABLE * GIB < found.estimate.total
    twice = dataclasses.replace(
        setup_of(plan), sequence_length=2 * option.changes["data.sequence_length"], recompute=True, micro_batch=1
    )
    assert estimate(twice).total > USABLE * GIB


def test_the_larger_of_two_trainings_counts(tiny_run):
    sizes = [
        "model.source=llama-1b",
        "model.config={}",
        "data.sequence_length=4096",
        "train.micro_batch=8",
        "train.global_batch=8",
        "model.params_dtype=bfloat16",
    ]
    both, fp8, bf16 = (
        memory_of(planned(tiny_run(name), *sizes, *more)).estimate.total
        for name, more in (
            ("a", ["train.compare_bf16=true", "fp8.head=false"]), ("b", ["fp8.head=false"]), ("c", ["fp8.enabled=false"]),
        )
    )  # fmt: skip
    assert both == bf16 > fp8


def test_the_rule_of_columnwise_weights_knows_the_gpu(tiny_run):
    assert setup_of(planned(tiny_run())).memory == 139 * GIB
    assert setup_of(check(RunConfig.from_file(tiny_run("cpu").file))).memory is None


def test_other_errors_are_not_explained(tiny_run):
    plan = check(RunConfig.from_file(tiny_run().file))
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("x"), OSError(28, "No space left")):
        assert out_of_memory(error, plan) is None


def test_a_length_that_does_not_fit_names_the_ranks_that_could_share_it(tiny_run):
    run = tiny_run()
    long = [
        *("model.source=llama-8b", "data.sequence_length=131072", "data.vocab_size=300", "train.global_batch=8"),
        *("train.micro_batch=1", "model.config={}", "model.dtype=bfloat16"),
    ]
    target = Target(world_size=8, gpu=lookup("h200"))
    plan = check(RunConfig.from_file(run.file, long), target=target)
    found = memory_of(plan)
    assert found.fits is False
    shared = next(option for option in found.options if "parallel.context_parallel_degree" in option.changes)
    assert "ranks" not in shared.changes
    text = [f"{key}={value}" for key, value in shared.changes.items()]
    again = memory_of(check(RunConfig.from_file(run.file, [*long, *text]), target=target))
    assert again.fits
    assert again.estimate.total == shared.estimate.total
    for option in found.options:  # every option is a run that is accepted
        ranks = Target(world_size=option.changes.get("ranks", 8), gpu=lookup("h200"))
        changes = [f"{key}={value}" for key, value in option.changes.items() if key != "ranks"]
        assert memory_of(check(RunConfig.from_file(run.file, [*long, *changes]), target=ranks)).fits


def test_under_a_limit_of_the_process_the_degree_that_shares_sequences_is_advised(tiny_run, monkeypatch):
    run = tiny_run()
    long = [
        "data.sequence_length=16384",
        "model.config.max_position_embeddings=16384",
        "train.micro_batch=1",
        "train.recompute=true",
        "train.global_batch=4",
    ]
    plan = check(
        RunConfig.from_file(run.file, [*long, "model.config.attention_dropout=0", "model.config.vocab_size=4096"]),
        target=Target(4, None),
    )
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (300 << 20, resource.RLIM_INFINITY))
    message = str(
        out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), plan)
    )
    assert "the limit of this process (ulimit) has 300.0 MiB" in message
    assert "parallel.context_parallel_degree = 2: " in message
    assert memory_of(plan).of_rank == 300 << 20
