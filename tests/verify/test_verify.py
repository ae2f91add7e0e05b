"""`octavo verify`: right layouts are equal, faults are found and named, and wrong questions are refused."""

import dataclasses
import json

import pytest
from verified import ALONE, RUN, comparisons, run_of

import ranks
from octavo.build import build_model
from octavo.cli import main
from octavo.collectives.context import cheaper_exchange
from octavo.config.degrees import fit_degrees
from octavo.config.run import RunConfig
from octavo.errors import InputError
from octavo.models.families import spec_of
from octavo.models.sources import load_config
from octavo.plan.run import build_options
from octavo.verify import certificate, small, worker
from octavo.verify.compare import is_record
from octavo.verify.layers import layers_of_each_kind

TENSOR = {"tensor_parallel_degree": 2}
LAYOUTS = [
    ("llama-1b", 2, {}, "plain"),
    ("llama-1b", 2, TENSOR, "fp8"),
    ("mistral-7b", 4, TENSOR | {"context_parallel_degree": 2}, "fp8"),
    ("mixtral-8x7b", 4, TENSOR | {"expert_parallel_degree": 2}, "fp8"),
    ("mixtral-8x7b", 2, {"expert_parallel_degree": 2}, "plain"),
    ("gpt-neox-20b", 2, {"context_parallel_degree": 2}, "fp8"),
]


@pytest.mark.long(lambda source: source != "gpt-neox-20b")
@pytest.mark.parametrize(("source", "world", "degrees", "kind"), LAYOUTS)
def test_a_layout_is_equal_and_continues_in_others(source, world, degrees, kind):
    found = comparisons(run_of(source), world, degrees, kinds=[kind])
    assert {name: each.first for name, each in found.items() if each.first is not None} == {}
    assert sum("continued" in name for name in found) == 2
    kept = {
        "gradient",
        "loss",
        "norm",
        "logits",
        "parameter",
        "exp_avg",
        "exp_avg_sq",
        "step",
        "states",
        *["history"][: kind == "fp8"],
    }
    for name, each in found.items():
        assert each.exact
        assert {one.name.split()[0] for one in each.differences} == kept
        records = 26 * (kind == "fp8") * (2 + ("continued" in name))  # after the first step and the last, and as loaded
        assert sum(is_record(one.name) for one in each.differences) == records
        assert sum(one.name.endswith("as loaded") for one in each.differences) > 30 * ("continued" in name) - 1


@pytest.mark.parametrize("degrees", [{}, {"hybrid_shard_degree": 1}])
@pytest.mark.long
def test_shards_and_replicas_are_compared_with_one_another_in_fp8_and_with_one_rank_by_a_checkpoint(degrees):
    found = comparisons(run_of("llama-1b"), 2, degrees, kinds=["fp8"])
    wanted = ["beside 2 data-parallel ranks", "continued in tensor 2", "continued on one rank"]
    assert list(found) == [f"delayed scaling, {each}" for each in wanted]
    assert [(each.exact, each.first) for each in found.values()] == [(True, None)] * 3


@pytest.mark.long
def test_a_given_exchange_goes_with_its_degree():
    found = comparisons(run_of("llama-1b"), 2, {"context_parallel_degree": 2, "cp_comm_type": "p2p"}, kinds=["plain"])
    assert [each.first for each in found.values()] == [None] * 3


@pytest.mark.parametrize(
    "section", [{"recompute": True}, {"recompute": "selective"}, {"offload": True}, {"mlp_chunks": 2}], ids=str
)
@pytest.mark.long
def test_what_the_run_recomputes_and_offloads_is_equal(section):
    found = comparisons(run_of("llama-1b", train=RUN["train"] | section), 2, TENSOR, kinds=["fp8"])
    assert [each.first for each in found.values()] == [None] * 3


@pytest.mark.long(lambda source: source == "mixtral-8x7b")
@pytest.mark.parametrize("source", ["llama-1b", "mixtral-8x7b"])
def test_scales_of_current_scaling_are_equal(source):
    found = comparisons(run_of(source, fp8={"recipe": "current"}), 2, TENSOR, kinds=["fp8"])
    assert [each.first for each in found.values()] == [None] * 3
    assert [each.exact for each in found.values()] == [True, False, True]
    names = [each.name for each in found["current scaling, beside one rank"].differences]
    assert sum("after the last step" in name for name in names) == 26
    assert sum(name.startswith("scale ") and "before step 1" in name for name in names) >= 16  # of inputs and weights


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "degrees", "recipe"),
    [
        ("mixtral-8x7b", {"expert_parallel_degree": 2}, "delayed"),
        ("llama-1b", {"context_parallel_degree": 2}, "rowwise"),
        ("mixtral-8x7b", TENSOR, "rowwise"),
    ],
)
def test_casts_that_are_others_by_rule_are_bounded(source, degrees, recipe):
    found = comparisons(run_of(source, fp8={"recipe": recipe}), 2, degrees, kinds=["fp8"])
    beside, *continued = found.values()
    assert [each.first for each in found.values()] == [None] * 3
    assert max(each.error for each in beside.differences if each.name.startswith("gradient ")) > certificate.EQUAL.tensor
    assert {each.exact for each in continued} == {recipe == "delayed"}  # their scales are in the checkpoint


ADAPTERS = [
    ("llama-1b", 2, {}, {"rank": 16}, "plain"),
    ("llama-1b", 2, {}, {"rank": 16, "rslora": True}, "fp8"),
    ("llama-8b", 4, {"context_parallel_degree": 2}, {"rank": 2, "targets": ["q_proj"], "save_whole": ["lm_head"]}, "fp8"),
    ("mixtral-8x7b", 2, {"expert_parallel_degree": 2}, {"rank": 4, "targets": ["q_proj", "o_proj"], "dropout": 0.1}, "plain"),
    ("llama-1b", 2, {}, {"rank": 4, "base": "fp8"}, "fp8"),
    ("llama-8b", 4, TENSOR, {"rank": 4, "base": "fp8"}, "fp8"),
]


@pytest.mark.long
@pytest.mark.parametrize(("source", "world", "degrees", "lora", "kind"), ADAPTERS)
def test_adapters_are_compared_and_continue_beside_a_frozen_base(source, world, degrees, lora, kind):
    found = comparisons(run_of(source, lora=lora), world, degrees, kinds=[kind])
    assert {name: each.first for name, each in found.items() if each.first is not None} == {}
    assert len(found) == 3
    for each in found.values():
        names = [one.name.split(",")[0] for one in each.differences]
        trained = {name.split()[1] for name in names if name.startswith("gradient ")}
        assert all(name.endswith((".lora_A", ".lora_B")) or name == "head.weight" for name in trained)
        assert len(trained) >= 2 * 2
        for kind in ("exp_avg", "exp_avg_sq"):
            assert {name.split()[1] for name in names if name.startswith(f"{kind} ")} == trained
        assert {name.split()[1] for name in names if name.startswith("parameter ")} > trained  # and the base
        if lora.get("base") == "fp8":
            assert each.exact  # of the bytes that are stored


def test_a_frozen_weight_that_changes_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match=r"embedding\.weight is frozen, but changed in steps 1 to 3 on rank"):
        comparisons(run_of("llama-1b", lora={"rank": 4}), 2, {}, kinds=["plain"], fault="a frozen weight is trained")


@pytest.mark.long
@pytest.mark.parametrize("assignment", ["sinkhorn", "balanced"])
def test_routers_that_balance_the_tokens_of_their_rank_choose_the_largest_here(assignment):
    found = comparisons(run_of("mixtral-8x7b", moe={"moe_load_balancing": assignment}), 2, {}, kinds=["plain"])
    assert [each.first for each in found.values()] == [None] * 3


@pytest.mark.parametrize(
    ("source", "degrees"), [("llama-1b", TENSOR), ("mistral-7b", {}), ("mixtral-8x7b", {"expert_parallel_degree": 2})]
)
@pytest.mark.long(lambda source: source != "llama-1b")
def test_dtypes_that_train_are_within_their_roundings(source, degrees):
    found = comparisons(run_of(source), 2, degrees, kinds=["narrow", "narrow-fp8"])
    assert list(found) == ["bfloat16, without FP8, beside one rank", "bfloat16, delayed scaling, beside one rank"]
    plain, fp8 = ({one.name: one.error for one in each.differences} for each in found.values())
    assert [(each.exact, each.first) for each in found.values()] == [(False, None)] * 2
    assert max(plain.values()) > 1e-3  # of 16 bits
    assert max(fp8.values()) > 2 * max(plain.values()) or source == "mixtral-8x7b"


@pytest.mark.parametrize(
    ("degrees", "world", "then"),
    [
        ({}, 2, "tensor 2"),
        ({"hybrid_shard_degree": 1}, 2, "tensor 2"),
        ({"tensor_parallel_degree": 4}, 8, "hybrid_shard 4, tensor 2"),
        (TENSOR | {"context_parallel_degree": 2, "expert_parallel_degree": 2}, 4, "hybrid_shard 4, context 2"),
        ({"context_parallel_degree": 3}, 3, "hybrid_shard 3"),
        ({"expert_parallel_degree": 2}, 4, "hybrid_shard 4"),
        ({}, 3, "replicate 3"),
    ],
)
def test_a_checkpoint_continues_in_another_layout(degrees, world, then):
    found = certificate.other_layout(fit_degrees(**degrees, world_size=world), spec_of(load_config("llama-1b", {})))
    assert certificate._named(found) == then


@pytest.mark.parametrize("source", ["llama-8b", "mistral-7b", "mixtral-8x7b", "gpt-neox-20b", "llama-70b"])
@pytest.mark.parametrize(
    "degrees", [{}, TENSOR, {"tensor_parallel_degree": 4}, TENSOR | {"context_parallel_degree": 2}], ids=str
)
def test_a_small_model_is_divided_as_the_large_one(source, degrees):
    world = 8
    fitted, config = fit_degrees(**{**ALONE, **degrees}, world_size=world), load_config(source, {})
    spec = spec_of(config)
    found = spec_of(small.small_config(config, spec, fitted, layers_of_each_kind(spec)))
    parts = fitted.tensor * fitted.context
    assert found.heads % parts == 0
    assert (found.kv_heads % fitted.tensor == 0) == (spec.kv_heads % fitted.tensor == 0)
    assert (found.heads > found.kv_heads) == (spec.heads > spec.kv_heads)
    assert found.ffn_size // fitted.tensor % 128 == spec.ffn_size // fitted.tensor % 128
    assert found.vocabulary % (128 * fitted.tensor) == spec.vocabulary % (128 * fitted.tensor)
    assert small.length(fitted) % (2 * parts) == 0
    assert (found.tied, found.parallel, found.qkv_bias, found.family) == (spec.tied, spec.parallel, spec.qkv_bias, spec.family)
    windows = {window for window in found.windows if window is not None}
    assert bool(windows) == any(window is not None for window in spec.windows)
    assert all(window < small.length(fitted) for window in windows)
    assert found.layers <= 4
    assert found.hidden_size <= 512


@pytest.mark.parametrize(("kv_heads", "by"), [(8, "all_gather"), (32, "a2a")])
def test_an_exchange_by_the_bytes_is_that_of_the_whole_model(kv_heads, by, tmp_path):
    """Of 32 heads over four ranks; the small model has 8 of 4 or 4 key-value heads, which the other one would suit."""
    model = {"source": "llama-8b", "config": {"num_key_value_heads": kv_heads}}
    config = run_of("llama-8b", model=model, parallel={"context_parallel_degree": 4, "cp_comm_type": "auto"})
    spec, degrees = spec_of(load_config("llama-8b", model["config"])), fit_degrees(world_size=4, context_parallel_degree=4)
    assert cheaper_exchange(spec.heads, spec.kv_heads, 4) == by
    found = certificate.tasks(config, degrees, spec, tmp_path)
    assert {task.run["parallel"]["cp_comm_type"] for name, (ranks, task) in found.items() if name.endswith("layout")} == {by}
    for heads, kv_heads in ((12, 2), (28, 4), (8, 4)):  # of an exchange that the small model would not choose
        spec = dataclasses.replace(spec, heads=heads, kv_heads=kv_heads)
        assert small.exchange("auto", spec, degrees, degrees) == cheaper_exchange(heads, kv_heads, 4)
    assert small.exchange("p2p", spec, degrees, degrees) == "p2p"


@pytest.mark.parametrize(("asked", "frees"), [("auto", {0: False, 1: True}), (True, {1: True}), (False, {0: False})])
def test_blocks_are_freed_and_not_where_the_memory_of_a_gpu_decides(asked, frees, tmp_path):
    config = run_of("llama-1b", parallel={"reshard_after_forward": asked})
    spec, degrees = spec_of(load_config("llama-1b", {})), fit_degrees(world_size=2)
    _, task = certificate.tasks(config, degrees, spec, tmp_path, list(frees))["plain layout"]
    assert ranks.run(2, freed, dataclasses.asdict(task)) == [frees, frees]


@pytest.mark.long(lambda seed: seed != 1)
@pytest.mark.parametrize("seed", [1, 2])
def test_parameters_gathered_in_16_bits_are_compared_in_float64(seed):
    config = run_of("llama-1b", parallel={"param_dtype": "bfloat16"})
    found = comparisons(config, 2, {}, seeds=[seed], kinds=("plain",))
    assert {name: each.first for name, each in found.items() if each.first is not None} == {}
    assert len(found) == 3


def freed(task):
    """By seed: are the blocks of the model that a rank trains freed behind their forward?"""
    task = worker.Task(**task)
    config = RunConfig.from_dict(task.run)
    worker.init(config.parallel.model_dump())
    found = {}
    for seed in task.seeds:
        model = worker._Training(task, config, seed).model
        state = model.layers[0]._get_fsdp_state()
        found[seed] = state._fsdp_param_group.post_forward_mesh_info is not None
    worker.shutdown()
    return found


def test_rates_are_such_that_updates_are_compared_and_losses_finite():
    one = fit_degrees(world_size=1)
    for given, wanted in ((1e-12, 1e-5), (3e-4, 3e-4), (1e6, 3e-3)):
        run = small.small_run(run_of("llama-1b", optimizer={"lr": given}), one, 4)
        assert run.optimizer.lr == wanted
        assert run.optimizer.adamw_lr is None
        muon = {"name": "muon", "muon_scale": "original", "lr": 0.02, "adamw_lr": given}
        run = small.small_run(run_of("llama-1b", optimizer=muon), one, 4)
        assert (run.optimizer.lr, run.optimizer.adamw_lr) == (0.02, wanted)


def test_parts_of_a_run_that_are_not_compared_are_named():
    model = {"source": "llama-1b", "load": True, "resize": True, "dtype": "float16"}
    every = run_of("llama-1b", model=model, moe={"moe_load_balancing": "balanced"}, fp8={"schedule": {"first 2": "*"}})
    none = run_of("llama-1b", data=RUN["data"] | {"packing": "join"})
    assert certificate.not_covered(none) == certificate.NOT_COVERED
    for part in ("float16", "fp8.schedule", "model.resize", "moe.moe_load_balancing", "data.packing"):
        assert part in certificate.not_covered(every), part


def test_noise_of_routers_is_none_by_either_key():
    source, one = {"source": "mixtral-8x7b", "config": {"router_jitter_noise": 0.2}}, fit_degrees(world_size=1)
    for moe, model in (({"router_jitter_noise": 0.1}, "mixtral-8x7b"), ({}, source)):
        config = run_of("mixtral-8x7b", model={"source": model} if isinstance(model, str) else model, moe=moe)
        whole = load_config(config.model.source, config.model.config)
        spec = spec_of(whole)
        few, run = small.small_config(whole, spec, one, layers_of_each_kind(spec)), small.small_run(config, one, 4)
        model = build_model(few, build_options(run, blocks="auto"), device="meta")
        assert model.layers[0].moe.config.jitter == 0.0


def test_degrees_of_the_file_are_lowered_and_those_that_are_given_are_not():
    config = run_of("llama-1b", parallel={"hybrid_shard_degree": 8, "tensor_parallel_degree": 4})
    lowered, said = certificate._lowered(config, 2, ())
    assert (lowered.parallel.hybrid_shard_degree, lowered.parallel.tensor_parallel_degree) == (1, 2)
    assert len(said) == 2
    with pytest.raises(InputError, match="do not fit 2 ranks"):
        certificate.verify(config, 2, overridden=["parallel.tensor_parallel_degree"])


def test_a_model_that_keeps_its_own_code_is_refused():
    with pytest.raises(InputError, match='llama runs its original code: blocks = "own"'):
        certificate.verify(run_of("llama-1b", model={"source": "llama-1b", "blocks": "own"}), 2)


@pytest.mark.parametrize("ranks", [1, 0, -3])
def test_one_rank_is_no_layout(ranks):
    with pytest.raises(InputError, match=f"--ranks {ranks}"):
        certificate.verify(run_of("llama-1b"), ranks)


def test_no_ranks_are_no_layout_of_the_command(tmp_path, capsys):
    run = tmp_path / "run.toml"
    sections = ('[model]\nsource = "llama-1b"', '[data]\nsource = "python:docstrings"\nsequence_length = 64')
    run.write_text("\n".join([*sections, "[train]\nsteps = 3\nglobal_batch = 4\n"]))
    assert main(["verify", str(run), "--ranks", "0", "--output", str(tmp_path / "found.json")]) == InputError.exit_code
    assert "--ranks 0" in capsys.readouterr().err


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(certificate, "SEEDS", [5])
    run = tmp_path / "run.toml"
    sections = ('[model]\nsource = "llama-1b"', '[data]\nsource = "python:docstrings"\nsequence_length = 64')
    run.write_text("\n".join([*sections, "[train]\nsteps = 3\nglobal_batch = 4\n"]))
    output = tmp_path / "found.json"
    assert main(["verify", str(run), "parallel.tensor_parallel_degree=2", "--output", str(output)]) == 0
    assert "equal    delayed scaling, beside one rank" in capsys.readouterr().out
    found = json.loads(output.read_text())
    assert found["verified"]
    wanted = ["beside one rank", "continued in hybrid_shard 2", "continued on one rank"]
    assert [each["beside"] for each in found["comparisons"]] == 2 * wanted + 2 * ["beside one rank"]
    assert [each["precision"] for each in found["comparisons"]][-2:] == ["bfloat16, without FP8", "bfloat16, delayed scaling"]
    errors = found["comparisons"][3]["errors"]
    assert len(errors) > 100
    assert next(iter(errors)).startswith("states after 0 blocks, before step 1")
    parameters = found["comparisons"][3]["parameters"]
    assert {"embedding.weight", "layers.1.ffn.fc2.weight", "layers.0.self_attention.qkv.input"} <= parameters.keys()
    assert max(parameters.values()) == max(
        errors[name] for name in errors if not name.startswith(("states", "logits", "loss", "norm"))
    )
    assert "GPU" in found["not_covered"]
