"""The table of GPUs, and that what is not in it stays unknown."""

from __future__ import annotations

import re

import pytest

from octavo.hardware import GIB, GPUS, PART, describe_device, is_affordable, lookup, supports_fp8, whole_gib


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA B200", "B200"),
        ("h100 sxm", "H100 SXM"),
    ],
)
def test_a_known_gpu_is_found_by_its_names(driver_name, name):
    found = lookup(driver_name)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GH200 480GB",
        "NVIDIA H800",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA L40",
        "Tesla V100-SXM2-16GB",
        "AMD Instinct MI300X",
        "",
    ],
)
def test_an_unknown_gpu_is_unknown(name):
    assert lookup(name) is None


def test_every_row_is_found_by_its_own_short_name_and_patterns_do_not_overlap():
    for gpu in GPUS:
        assert lookup(gpu.name) is gpu
        assert lookup(f"NVIDIA {gpu.name}") is gpu
        others = [other.name for other in GPUS if other is not gpu and re.fullmatch(other.pattern, gpu.name)]
        assert others == []


def test_peaks_are_the_dense_ones():
    h200 = lookup("NVIDIA H200")
    a100 = lookup("NVIDIA A100-SXM4-80GB")
    assert h200 is not None
    assert a100 is not None
    assert (h200.peak("bf16"), h200.peak("fp8")) == (989e12, 1979e12)
    assert (a100.peak("bf16"), a100.peak("fp8")) == (312e12, None)
    for gpu in GPUS:
        assert (gpu.fp8_tflops is not None) == (gpu.capability >= (8, 9))


def test_a_cpu_has_a_name_and_memory_but_no_row_and_no_fp8_units():
    device = describe_device("cpu")
    assert device.kind == "cpu"
    assert device.name
    assert device.memory_gib > 0.1
    assert (device.gpu, device.capability) == (None, None)
    assert not supports_fp8("cpu")


def test_a_gpu_that_is_there_has_the_memory_of_its_row_in_the_table():
    for gpu in GPUS:
        assert whole_gib(gpu.memory_gib + 0.81) == whole_gib(gpu.memory_gib) == gpu.memory_gib * GIB


def test_a_part_of_the_memory_is_affordable():
    assert is_affordable(3 * GIB, 3 * PART * GIB)
    assert not is_affordable(3 * GIB + 1, 3 * PART * GIB)
    assert not is_affordable(0, None)
