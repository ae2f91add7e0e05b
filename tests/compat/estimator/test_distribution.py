"""Instance types and `distribution`: ranks of this machine, and contradictions that are refused by both names."""

import pytest

from octavo.compat.sagemaker import distribution
from octavo.compat.sagemaker.distribution import layout_of
from octavo.errors import InputError
from octavo.hardware import INSTANCES, find_instance, installed_gpus, lookup

RANKS = {"torch_distributed": {"enabled": True}}


def smp(**parameters):
    return RANKS | {"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}}


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(2)`: this machine has two H200s, whatever it has."""

    def have(count, name="NVIDIA H200"):
        monkeypatch.setattr(distribution, "installed_gpus", lambda: [name] * count)

    have(0)
    return have


def test_every_type_is_found_with_and_without_ml_and_agrees_with_the_table_of_gpus():
    assert {type_.name for type_ in INSTANCES.values()} == set(INSTANCES)
    for name, instance in INSTANCES.items():
        assert find_instance(name) is find_instance(f"ml.{name}") is find_instance(f"ML.{name}") is instance
        known = lookup(instance.gpu)
        if known is not None:
            assert instance.fp8 == (known.fp8_tflops is not None)
            assert 0 <= instance.memory_gib - known.memory_gib <= 5  # nominal, and as a program sees it
    eight = {name: (one.gpu, one.memory_gib) for name, one in INSTANCES.items() if one.gpus == 8}
    assert eight["p5.48xlarge"] == ("H100 SXM", 80)
    assert eight["p4d.24xlarge"] == ("A100 40GB", 40)
    assert eight["p5en.48xlarge"] == ("H200", 141)
    assert (INSTANCES["g5.12xlarge"].gpus, INSTANCES["g5.16xlarge"].gpus) == (4, 1)


def test_a_type_that_does_not_exist_is_refused_with_the_nearest():
    assert find_instance("ml.m5.xlarge") is None
    assert find_instance("c7g.2xlarge") is None
    with pytest.raises(InputError, match=r"'ml.p5.48xlage'. Did you mean ml.p5.48xlarge\?"):
        find_instance("ml.p5.48xlage")


def test_gpus_are_those_of_nvidia_smi_that_are_visible(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA H200\\nNVIDIA H200\\nNVIDIA A100-SXM4-40GB\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert installed_gpus() == ["NVIDIA H200", "NVIDIA H200", "NVIDIA A100-SXM4-40GB"]
    for visible, found in {
        "2,0": ["NVIDIA A100-SXM4-40GB", "NVIDIA H200"],
        "": [],
        "-1": [],
        "0,-1,1": ["NVIDIA H200"],
        "2,9,0": ["NVIDIA A100-SXM4-40GB"],
    }.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert installed_gpus() == found
    program.write_text("#!/bin/sh\nexit 9\n")
    assert installed_gpus() == []


def test_ranks_are_gpus_of_the_type_as_far_as_there_are_any(gpus):
    layout = layout_of("ml.p5.48xlarge", 1, smp(context_parallel_degree=8, hybrid_shard_degree=8), {})
    assert (layout.ranks, layout.gpus) == (8, 0)
    assert layout.parameters == {"context_parallel_degree": 8, "hybrid_shard_degree": 8}
    assert layout.notes == ["ml.p5.48xlarge has 8 x H100 SXM; this machine has no GPU: 8 ranks on its CPU."]
    gpus(2)
    layout = layout_of("p5.48xlarge", 1, smp(context_parallel_degree=2), {"fp8": 1})
    assert (layout.ranks, layout.gpus) == (2, 2)
    assert layout.notes == ["p5.48xlarge has 8 x H100 SXM; this machine has 2 x NVIDIA H200: 2 ranks."]
    gpus(8)
    layout = layout_of("ml.p5en.48xlarge", 1, RANKS, {})
    assert (layout.ranks, layout.gpus, layout.notes) == (8, 8, [])
    assert layout_of("ml.p5.48xlarge", 1, RANKS, {}).notes == [
        "ml.p5.48xlarge has H100 SXMs; those of this machine are NVIDIA H200."
    ]
    assert layout_of("local_gpu", 1, RANKS, {}).ranks == 8
    layout = layout_of("local", 3, {"pytorchddp": {"enabled": True}}, {})
    assert (layout.ranks, layout.gpus) == (3, 0)
    layout = layout_of("ml.g5.12xlarge", 1, None, {})
    assert (layout.ranks, layout.gpus, layout.parameters) == (None, 4, None)
    assert layout_of("local", 1, {"mpi": {"enabled": False}}, {}).ranks is None
    with pytest.raises(InputError, match='"local_gpu" is this machine, and instance_count = 2'):
        layout_of("local_gpu", 2, RANKS, {})


def test_what_a_script_without_ranks_lacks_is_said(gpus):
    (cpu, once) = layout_of("ml.p5.48xlarge", 2, None, {}).notes
    assert cpu == "ml.p5.48xlarge has 8 x H100 SXM; this machine has no GPU: the script runs on its CPU."
    assert "instance_count = 2" in once
    assert "torch_distributed" in once
    gpus(2)
    assert layout_of("ml.p5.48xlarge", 1, None, {}).notes == [
        "ml.p5.48xlarge has 8 x H100 SXM; this machine has 2 x NVIDIA H200."
    ]
    assert layout_of("ml.p5.4xlarge", 1, None, {}).notes == []


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ("ml.p5.48xlarge", 1, smp(context_parallel_degree=3), {}),
            ["'ml.p5.48xlarge' with 8 GPUs", "context 3 does not divide hybrid_shard 8", "context_parallel_degree to 4"],
        ),
        (
            ("ml.p5.48xlarge", 1, smp(context_parallel_degree=8, hybrid_shard_degree=4), {}),
            ["context 8 does not divide hybrid_shard 4", "context_parallel_degree 8, "],
        ),
        (("ml.p4d.24xlarge", 1, RANKS, {"fp8": 1}), ['["fp8"] = 1', "'ml.p4d.24xlarge'", "A100 40GB, have no FP8"]),
        (("p4de.24xlarge", 1, None, {"fp8": "1"}), ["[\"fp8\"] = '1'", "A100 80GB SXM"]),
        (("ml.p5.48xlarge", 0, RANKS, {}), ["instance_count = 0"]),
        (("ml.p5.48xlarge", 1000, RANKS, {}), ["8000 ranks", "no GPU"]),
        (("local_gpu", 1, RANKS, {}), ["no GPU"]),
        (("local", 1, {"torch_distribution": {}}, {}), ["'torch_distribution'", "Did you mean 'torch_distributed'?"]),
        (("local", 1, {"mpi": {"enabled": True}}, {}), ['"torch_distributed"']),
        (("local", 1, {"torch_distributed": True}, {}), ['{"enabled": True}']),
        (
            (
                "local",
                1,
                RANKS | {"smdistributed": {"dataparallel": {"enabled": True}, "modelparallel": {"enabled": True}}},
                {},
            ),
            ['"modelparallel" and "dataparallel"', 'leave "dataparallel" out'],
        ),
        (("local", 1, {"smdistributed": {"dataparallel": {"enable": True}}}, {}), ["'enable'", "Did you mean 'enabled'?"]),
        (("local", 1, {"smdistributed": {"ddp": {"enabled": True}}}, {}), ["'ddp'", "modelparallel, dataparallel"]),
        (("local", 1, {"smdistributed": {"modelparallel": {"enabled": True}}}, {}), ["without", "torch_distributed"]),
        (("local", 1, smp(partitions=2), {}), ["'partitions' = 2", "SMP v1"]),
        (("local", 1, smp(context_paralel_degree=2), {}), ["Did you mean 'context_parallel_degree'?"]),
        (("local", 1, smp(context_parallel_degree="2"), {}), ["context_parallel_degree", "'2'"]),
        (
            ("local", 6, smp(tensor_parallel_degree=2, expert_parallel_degree=3), {}),
            ["tensor_parallel_degree = 2", "expert_parallel_degree = 3", "Set expert_parallel_degree to 2 or 4"],
        ),
        (("local", 4, smp(tensor_parallel_degree=2, hybrid_shard_degree=4), {}), ["hybrid_shard 4 x tensor 2 = 8"]),
        (("local", 3, smp(tensor_parallel_degree=2), {}), ["tensor 2 does not divide the world of 3"]),
        (("local", 2, smp(expert_parallel_degree=4), {}), ["expert 4 does not divide hybrid_shard 2"]),
        (("local", 1, smp(delayed_parameter_initialization="yes"), {}), ["delayed_parameter_initialization = 'yes'"]),
        (("local", 1, {"torch_distributed": {"enable": True}}, {}), ["'enable'", "Did you mean 'enabled'?"]),
        (("local", 1, RANKS | {"smdistributed": {"modelparallel": {"enabled": True, "params": {}}}}, {}), ["'parameters'?"]),
        (("local", 100_000, RANKS, {}), ["100000 ranks"]),
        (("ml.p4d.24xlarge", 1, RANKS, {"fp8": "YES"}), ["have no FP8"]),
    ],
)
def test_contradictions_are_refused_with_both_names(gpus, arguments, parts):
    with pytest.raises(InputError) as refused:
        layout_of(*arguments)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize("others", [{}, RANKS, {"torch_distributed": {"enabled": False}}])
def test_smddp_starts_the_ranks_of_torch_distributed_and_says_so(gpus, others):
    gpus(8)
    data = {"enabled": True, "custom_mpi_options": "-verbose"}
    layout = layout_of("ml.p5en.48xlarge", 1, others | {"smdistributed": {"dataparallel": data}}, {})
    assert (layout.ranks, layout.gpus, layout.parameters) == (8, 8, None)
    (note,) = layout.notes
    assert 'the backend "smddp" is NCCL, or gloo without GPUs. custom_mpi_options has no effect.' in note
    assert layout_of("local", 1, others | {"smdistributed": {"dataparallel": {"enabled": False}}}, {}).notes == []


def test_degrees_beyond_the_gpus_here_are_refused_with_those_that_fit(gpus):
    gpus(2)
    with pytest.raises(InputError) as refused:
        layout_of("ml.p5.48xlarge", 1, smp(context_parallel_degree=8, hybrid_shard_degree=8), {})
    text = str(refused.value)
    assert "8 GPUs, instance_count = 1, and 2 GPUs on this machine" in text
    assert "Change hybrid_shard_degree to 2, context_parallel_degree to 2." in text
    assert "parallel." not in text
