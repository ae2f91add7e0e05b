"""Breakdown of a step's time: names of kernels as they are written on a Hopper GPU, and the sums that a row keeps."""

import gzip
import importlib
import io
import json
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

import octavo.kernels
from benchmarks.cases import CASES
from benchmarks.measure import Target, measure_case
from benchmarks.peers import ENTRIES
from benchmarks.profile.breakdown import KINDS, LARGEST, OTHER, KernelTime, exposed_ms, kind_of, record, summarise
from benchmarks.records import render, row
from octavo.hardware import describe_device

NAMES = {
    "nvjet_qqtst_128x256_128x5_2x1_v_bz_coopA_TNT": "fp8 products",
    "nvjet_sm90_rqtst_192x192_128x4_1x2_h_bz_coopB_TNT": "fp8 products",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<f8f8bf16_rowwise>>": "fp8 products",
    "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_cublas": "fp8 products",
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN": "bf16 products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>": "bf16 products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x64x128": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>": "attention",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<bfloat16>>": "optimizer",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<float, float, 2>>": (
        "copies and elementwise"
    ),
    "void transformer_engine::detail::cast_transpose_optimized_kernel<__nv_bfloat16, __nv_fp8_e4m3>": "casts",
    "void transformer_engine::transpose_kernel<8, 8, __nv_fp8_e4m3>": "casts",
    "void transformer_engine::gated_act_kernel<float, silu, __nv_bfloat16, __nv_fp8_e4m3>": "activation",
    "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits<__nv_bfloat16>>": "norms",
    "void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>": "rope",
    "void transformer_engine::delayed_scaling_recipe::kernel_bulk": "scales",
    "triton_red_fused__log_softmax__to_copy_nll_loss_forward_3": "cross entropy",
    "triton_poi_fused_mul_silu_7": "activation",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_4": "norms",
    "triton_poi_fused_add_cat_mul_neg_slice_5": "rope",
    "triton_red_fused_abs_amax_2": "casts",
    "triton_poi_fused_add_0": "copies and elementwise",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>": "copies and elementwise",
    "Memset (Device)": "copies and elementwise",
    "something_else": OTHER,
}
FAMILIES = {
    "activation": "activation", "quantize.cast": "casts", "quantize.cast_scaled": "casts",
    "experts.activation": "activation", "experts.cast": "casts", "experts.permute": "casts", "experts.dispatch": "casts",
    "experts.gemm": "fp8 products", "experts.routes": "copies and elementwise",
    "cross_entropy": "cross entropy", "norm": "norms",
    "norm_rows": "norms",
    "attention.forward": "attention", "attention.backward": "attention", "attention.join": "attention",
    "low_rank": "copies and elementwise", "peers": "communication",
    "embedding.forward": "copies and elementwise", "embedding.backward": "copies and elementwise",
    "cross_entropy_slices": "cross entropy",
    "column_sum": "copies and elementwise", "rope": "rope", "adamw": "optimizer", "scales": "scales",
}  # fmt: skip
"""Of the files of kernels, the kind that theirs are."""


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_told_by_its_name(name):
    assert kind_of(name) == NAMES[name]


def launched():
    """(file, name) of every kernel of Octavo that is launched: the others are functions of those."""
    sources = {}
    for module in pkgutil.walk_packages(octavo.kernels.__path__, "octavo.kernels."):
        path = importlib.import_module(module.name).__file__
        sources[module.name.removeprefix("octavo.kernels.")] = Path(path).read_text(encoding="utf-8")
    for file, source in sources.items():
        for part in source.split("@triton.jit\ndef ")[1:]:
            name = part.split("(")[0]
            if any(re.search(rf"\b{name}\[", other) for other in sources.values()):
                yield file, name


_OF_SEVERAL = {"_scale_of": "scales"} | dict.fromkeys(("_add_copies", "_add_terms"), "copies and elementwise")


def test_octavos_kernels_have_the_kind_of_their_file():
    found = list(launched())
    assert {("quantize.cast", "cast_packed"), ("norm_rows", "norm_rows"), ("attention.forward", "attention_forward")} <= set(
        found
    )
    for file, name in found:
        expected = _OF_SEVERAL.get(name) or FAMILIES[file]
        assert kind_of(name) == expected, (file, name)


def test_sums_are_of_a_step():
    kernels = [KernelTime("nvjet_qqtst_1", 6.0, 4), KernelTime("nvjet_tst_1", 2.0, 2), KernelTime("nvjet_qqtst_2", 3.0, 2)]
    kernels += [KernelTime(f"unknown_{i}", 0.1, 2) for i in range(20)]
    found = summarise(kernels, 2)
    assert found["kernel_ms"] == pytest.approx({"fp8 products": 4.5, "bf16 products": 1.0, OTHER: 1.0})
    assert next(iter(found["kernel_ms"])) == "fp8 products"
    assert len(found["largest_kernels"]) == LARGEST
    assert found["largest_kernels"][0] == {"name": "nvjet_qqtst_1", "kind": "fp8 products", "ms": 3.0, "calls": 2.0}
    assert len({kind for kind, _ in KINDS} | {OTHER}) == 13


def test_communication_that_nothing_hides():
    gather, reduce = "ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"
    calls = [
        (gather, 0.0, 100.0), ("nvjet_qqtst_1", 40.0, 60.0), ("triton_poi_fused_add_0", 50.0, 70.0),  # 30 of 100 are hidden
        (reduce, 90.0, 130.0), ("Memcpy DtoH (Device -> Pinned)", 80.0, 200.0),  # nor does a copy to the host hide
        ("nvjet_tst_1", 300.0, 400.0), (gather, 310.0, 390.0),
    ]  # fmt: skip
    assert exposed_ms(calls) == pytest.approx(0.1)
    assert exposed_ms(reversed(calls)) == pytest.approx(0.1)
    assert exposed_ms([("nvjet_tst_1", 0.0, 9.0)]) == exposed_ms([]) == 0.0


def test_a_profile_is_read():
    x = torch.randn(64, 64)
    found = record(lambda: torch.softmax(x @ x, -1), 2, torch.device("cpu"))
    assert {"aten::mm", "aten::_softmax"} <= {kernel["name"] for kernel in found["largest_kernels"]}
    (product,) = (kernel for kernel in found["largest_kernels"] if kernel["name"] == "aten::mm")
    assert product["calls"] == 1
    assert sum(found["kernel_ms"].values()) > 0


@pytest.mark.long
def test_a_measured_entry_tells_its_breakdown(tmp_path, forked_workers):
    target = Target(describe_device("cpu"), "cpu")
    entries = [ENTRIES["torch-bf16"]]
    case = CASES["tiny"]
    how = {"steps": 2, "warmup": 0, "profiled": 1, "traces": tmp_path, "say": lambda line: None}
    (measured,) = measure_case("one-gpu", case, entries, target=target, **how)
    assert measured.error is None
    trace = json.loads(gzip.decompress((tmp_path / "tiny-torch-bf16.json.gz").read_bytes()))
    assert "aten::mm" in {event.get("name") for event in trace["traceEvents"]}
    figures = row(case, measured, target)
    assert figures["kernel_ms"]
    assert 0 < len(figures["largest_kernels"]) <= LARGEST
    text = io.StringIO()
    machine = {"gpu": None, "cpu": "a CPU", "count": 0, "torch": "2.13"}
    render({"suite": "one-gpu", "machine": machine, "rows": [figures]}, Console(file=text, width=120))
    assert "kernel ms a step" in text.getvalue()
    for kind in figures["kernel_ms"]:
        assert kind in text.getvalue()
