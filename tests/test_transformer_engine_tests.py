"""The conftest by which Transformer Engine's own tests run on a CPU, with a file that imports and calls as they do."""

import shutil
from pathlib import Path

import command_lines

EXAMPLE = Path(__file__).parent.parent / "examples" / "transformer_engine_conftest.py"

UTILS = """
from transformer_engine.pytorch.attention.dot_product_attention.utils import check_set_window_size, get_attention_backend

class ModelConfig:
    def __init__(self, batch_size, max_seqlen_q, num_heads, head_dim_qk, max_seqlen_kv=None, head_dim_v=None):
        self.batch_size, self.max_seqlen_q, self.max_seqlen_kv = batch_size, max_seqlen_q, max_seqlen_kv
        self.num_heads, self.dim, self.head_dim_v = num_heads, head_dim_qk, head_dim_v
        self.windows = [check_set_window_size(kind, (-1, 0)) for kind in ("causal", "no_mask")]

def get_available_attention_backends(config):
    raise AssertionError("stand-ins give the backends")
"""

TESTS = """
import pytest
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch import Linear, DotProductAttention, Float8Quantizer, get_device_compute_capability
from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb
from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.utils import get_cudnn_version, init_method_normal
from utils import ModelConfig, get_available_attention_backends

class Derived(TransformerEngineBaseModule):
    pass

@pytest.mark.skipif(get_cudnn_version() < (9, 0, 0) or get_device_compute_capability() < (9, 0), reason="never")
@pytest.mark.parametrize("dtype", [tex.DType.kFloat8E4M3])
def test_layers(dtype):
    _attention_backends["backend_selection_requires_update"] = True
    assert not isinstance(torch.zeros(1), Float8Quantizer)
    config = ModelConfig(2, 2048, 4, 128, max_seqlen_kv=4096)
    assert (config.max_seqlen_q, config.max_seqlen_kv, config.dim) == (64, 96, 32)
    assert config.windows == [(-1, 0), (-1, -1)]
    assert get_available_attention_backends(config)[0] == [True] * 3
    q = torch.randn(2, config.max_seqlen_q, 4, 32, device="cuda", requires_grad=True)
    DotProductAttention(4, 32, qkv_format="bshd").to(device="cuda")(q, q, q).sum().backward()
    assert q.grad.device.type == "cpu"
    layer = Linear(16, 16, init_method=init_method_normal(0.5), device="cuda").cuda()
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        assert layer(torch.randn(16, 16, device="cuda:0")).dtype == torch.bfloat16
    torch.cuda.synchronize()

def test_an_internal():
    FusedAttnBackend["FP8"].name("x")

def test_a_derived_internal():
    Derived()

def test_a_refused_argument():
    Linear(16, 16, fuse_wgrad_accumulation=True)
"""


def test_files_that_import_internals_run_and_name_what_is_refused(tmp_path):
    shutil.copyfile(EXAMPLE, tmp_path / "conftest.py")
    (tmp_path / "utils.py").write_text(UTILS)
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "test_it.py").write_text(TESTS)
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)]
    process = command_lines.CommandLine(command_lines.python, tmp_path / "process", arguments)
    assert process.wait(120) == 1
    said = process.stdout
    assert "3 failed, 1 passed" in said, said
    assert "3 refused by name" in said
    for reason in (
        "transformer_engine.pytorch.cpp_extensions.fused_attn.FusedAttnBackend.name is an internal of Transformer Engine",
        "Derived is an internal of Transformer Engine",
        "Linear(fuse_wgrad_accumulation=True) is not supported",
    ):
        assert said.count(f"\n{reason}") == 1, said
