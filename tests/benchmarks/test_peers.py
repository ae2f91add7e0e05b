"""Which peers stand beside Octavo's entries; Transformer Engine's entries, with a package in its place that has its names."""

import dataclasses
import inspect
import json
import math
import os
import re
import socket
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import command_lines
from benchmarks import peers, run, te_attention
from benchmarks.__main__ import main
from benchmarks.cases import ALL_CASES, CASES, CONTEXT_CASES, LORA_CASES, VISION_CASES
from benchmarks.peers import ENTRIES, PEERS, build_octavo
from benchmarks.run import run_suite
from benchmarks.sharded import SHARDED
from benchmarks.suites import SUITES
from octavo import build
from octavo.errors import InputError, install_extra
from octavo.fp8 import recipe
from octavo.fp8.autocast import fp8_autocast

CPU = torch.device("cpu")
ONE_GPU = SUITES["one-gpu"]
OWN = [name for name in ENTRIES if name.startswith("octavo-")]

# The arguments are those of Transformer Engine 2.20; what computes is Octavo's layer, whose parameters have the same names.
TRANSFORMER_ENGINE = """
import contextlib, os
import torch
from octavo.nn import DotProductAttention as OctavosAttention
from octavo.nn import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from octavo.nn import MultiheadAttention as Attention
from octavo.nn import LayerNorm as Centred
from octavo.nn import RMSNorm as Norm
from octavo.nn import TransformerLayer as Layer

# Whether flash-attn-4 was asked for, by variables that are read at the import.
FLASH = {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": "1", "NVTE_FLASH_ATTN_V3": "0", "NVTE_UNFUSED_ATTN": "0"}
FLASH = all(os.environ[key] == value for key, value in FLASH.items())
assert FLASH or (os.environ["NVTE_FUSED_ATTN"] == "1" and os.environ["NVTE_FLASH_ATTN"] == "0")

class DotProductAttention(OctavosAttention):
    def forward(self, q, k, v, *mask, attn_mask_type=None, **options):
        from packaging.version import Version
        from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends as choice

        flash = FLASH and self.context is None and os.environ.get("WITHOUT_FLASH") is None
        choice |= {"use_flash_attention": flash, "flash_attention_backend": Version("4.0.0b36") if flash else None}
        choice |= {"use_fused_attention": not flash, "fused_attention_backend": 1}
        if not flash:
            return super().forward(q, k, v, *mask, attn_mask_type=attn_mask_type, **options)
        from transformer_engine.pytorch.flash import flash_attn_func

        causal = self.causal if attn_mask_type is None else attn_mask_type == "causal"
        window = (-1 if self.window is None else self.window - 1, 0 if causal else -1)
        return flash_attn_func(q, k, v, softmax_scale=self.softmax_scale, causal=causal, window_size=window).flatten(2)

def with_cores(layer):
    # Attention of its own class, called for short sequences too.
    layer.core_attention.__class__ = DotProductAttention
    layer._is_short = lambda *given: False
    return layer

@contextlib.contextmanager
def autocast(enabled=True, calibrating=False, recipe=None, amax_reduction_group=None):
    from octavo import fp8_autocast
    with fp8_autocast(enabled=enabled, fp8_recipe=recipe, fp8_group=amax_reduction_group):
        yield

def checkpoint(function, *args, use_reentrant=True, **kwargs):
    assert not use_reentrant
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)

from octavo.collectives.tensor import TensorGroup

class PartialNorms(TensorGroup):
    # Gradients of norms are a rank's part, as Transformer Engine's.
    def replicated(self, parameter):
        return parameter

class OfTokensFirst(DotProductAttention):
    def forward(self, *qkv, **options):
        return super().forward(*(x.transpose(0, 1) for x in qkv), **options).transpose(0, 1)

class TokensFirst(torch.nn.Module):
    # Calls attention with tensors whose first dimension is the tokens.
    def __init__(self, core):
        super().__init__()
        self.core = core
        core.__class__ = OfTokensFirst

    def __getattr__(self, name):
        return super().__getattr__(name) if name in ("core", "_modules") else getattr(self.core, name)

    def forward(self, q, k, v, *mask, **options):
        assert not any(x is not None for x in mask)
        return self.core(*(x.transpose(0, 1) for x in (q, k, v)), **options).transpose(0, 1)

def all_tokens(tensor, x_TBD):
    # Of the first dimension.
    return tensor.gathered(x_TBD).reshape(-1, *x_TBD.shape[1:])

UB_OPTIONS = {f"ub_{name}" for name in ("tp_comm_overlap", "overlap_ag", "overlap_rs", "bulk_dgrad", "bulk_wgrad")}
UB = {}

class UserBufferQuantizationMode:
    NONE, FP8 = "none", "fp8"

class module:
    class base:
        UserBufferQuantizationMode = UserBufferQuantizationMode

        def initialize_ub(shape, tp_size, quantization_modes, bootstrap_backend):
            UB.update(shape=shape, modes=quantization_modes)

class TransformerLayer(torch.nn.Module):
    def __init__(
        self, hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups=None, layernorm_epsilon=1e-5,
        hidden_dropout=0.1, attention_dropout=0.1, init_method=None, output_layer_init_method=None, kv_channels=None,
        self_attn_mask_type="causal", params_dtype=None, fuse_qkv_params=False, bias=True, activation="gelu",
        normalization="LayerNorm", device="cuda", attn_input_format="sbhd", window_size=None, parallel_attention_mlp=False,
        set_parallel_mode=False, sequence_parallel=False, tp_group=None, tp_size=1, **buffers,
    ):
        super().__init__()
        assert hidden_dropout == attention_dropout == 0 and fuse_qkv_params
        assert attn_input_format == ("bshd" if tp_group is None else "sbhd")
        assert set_parallel_mode == sequence_parallel == (tp_group is not None)
        assert set(buffers) in (set(), UB_OPTIONS)
        assert not buffers or UB and os.environ["UB_SKIPMC"] == os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        layer = Layer(
            hidden_size, ffn_hidden_size // tp_size, num_attention_heads // tp_size,
            num_gqa_groups and num_gqa_groups // tp_size,
            layernorm_epsilon, kv_channels=kv_channels,
            normalization=normalization, bias=bias, activation=activation, self_attn_mask_type=self_attn_mask_type,
            params_dtype=params_dtype, device=device, window_size=window_size, parallel_attention_mlp=parallel_attention_mlp,
        )
        self.self_attention, self.layernorm_mlp, self.layer = with_cores(layer.self_attention), layer.layernorm_mlp, [layer]
        self.context = None
        self.tensor = None
        if tp_group is not None:
            self.tensor = PartialNorms(tp_group)
            attention = layer.self_attention
            attention.core_attention = TokensFirst(attention.core_attention)
            attention.tensor = attention.layernorm_qkv.tensor = attention.proj.tensor = self.tensor
            layer.layernorm_mlp.tensor = self.tensor
            for name, parameter in layer.named_parameters():
                parameter.sequence_parallel = "layer_norm" in name

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"):
        from octavo.collectives.context import ContextGroup
        assert cp_global_ranks == torch.distributed.get_process_group_ranks(cp_group)
        self.context = self.layer[0].self_attention.core_attention.context = ContextGroup(cp_group, cp_comm_type)

    def forward(self, hidden_states, attention_mask=None, rotary_pos_emb=None):
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb[:, 0].transpose(0, 1)
            if self.context is not None:
                from octavo.kernels.attention.pattern import pattern_of
                attention_mask = pattern_of(None, None, len(hidden_states), angles.shape[1], padded_to=angles.shape[1])
                angles = self.context.split(angles)
            rotary_pos_emb = (angles.cos(), angles.sin())
        if self.tensor is not None:
            whole = all_tokens(self.tensor, hidden_states)
            out = self.layer[0](self.tensor.local(whole.transpose(0, 1).contiguous()), attention_mask, rotary_pos_emb)
            return self.tensor.gathered(out).transpose(0, 1).chunk(self.tensor.size)[self.tensor.rank].contiguous()
        return self.layer[0](hidden_states, attention_mask, rotary_pos_emb)

class MultiheadAttention(torch.nn.Module):
    def __init__(self, hidden_size, num_attention_heads, kv_channels=None, attention_dropout=0.1, **options):
        super().__init__()
        assert attention_dropout == 0 and options["fuse_qkv_params"] and options["qkv_format"] == "bshd"
        layer = Attention(hidden_size, num_attention_heads, kv_channels, attention_dropout=0.0, **options)
        self.layernorm_qkv, self.proj, self.layer = layer.layernorm_qkv, layer.proj, [with_cores(layer)]
        self.core_attention = layer.core_attention

    def forward(self, hidden_states, rotary_pos_emb=None):
        angles = rotary_pos_emb[:, 0].transpose(0, 1)
        return self.layer[0](hidden_states, rotary_pos_emb=(angles.cos(), angles.sin()))

class ops:
    class SwiGLU(torch.nn.Module):
        def forward(self, x):
            gate, up = x.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up

# Rows in the order of experts; the map has (expert, token) of each row, or -1.
def moe_permute(inp, routing_map, num_out_tokens, max_token_num=-1, map_type="mask"):
    assert map_type == "mask" and num_out_tokens == routing_map.sum()
    where = routing_map.t().nonzero()
    return inp[where[:, 1]], where

def moe_permute_and_pad_with_probs(inp, probs, routing_map, tokens_per_expert, align_size):
    assert not probs.requires_grad
    parts, where = [], []
    for expert in range(routing_map.shape[1]):
        tokens = routing_map[:, expert].nonzero()
        filling = -len(tokens) % align_size
        parts += [inp[tokens[:, 0]], inp.new_zeros(filling, inp.shape[1])]
        where += [torch.cat((torch.full_like(tokens, expert), tokens), 1), tokens.new_full((filling, 2), -1)]
    heights = (tokens_per_expert + align_size - 1) // align_size * align_size
    offsets = (heights - tokens_per_expert).cumsum(0)
    return torch.cat(parts), None, torch.cat(where), offsets, heights

def moe_unpermute(inp, row_id_map, merging_probs, restore_shape, map_type="mask", pad_offsets=None):
    assert merging_probs.dtype == torch.float32 and (pad_offsets is None) == bool((row_id_map >= 0).all())
    there = row_id_map[:, 0] >= 0
    expert, token = row_id_map[there].unbind(1)
    weighted = inp[there] * merging_probs[token, expert][:, None]
    return torch.zeros(restore_shape).index_add(0, token, weighted).to(inp.dtype)

class RMSNorm(Norm):
    def __init__(self, normalized_shape, eps=1e-5, device=None, dtype=None):
        super().__init__(normalized_shape, eps, params_dtype=dtype, device=device)

class LayerNorm(Centred):
    def __init__(self, normalized_shape, eps=1e-5, device=None, dtype=None):
        super().__init__(normalized_shape, eps, params_dtype=dtype, device=device)

class RotaryPositionEmbedding(torch.nn.Module):
    def __init__(self, dim, rotary_percent=1.0, rotary_base=10000.0):
        super().__init__()
        dim = int(dim * rotary_percent)
        self.inverse = rotary_base ** -(torch.arange(0, dim, 2).float() / dim)

    def forward(self, max_seq_len):
        return torch.outer(torch.arange(max_seq_len).float(), self.inverse).repeat(1, 2)[:, None, None]
"""
UTILS = """
import torch

class SplitAlongDim:
    @staticmethod
    def apply(x, dim, sizes):
        return torch.split(x, sizes, dim)
"""
# Window bounds as flash-attn-4 reads them: one that is negative beside another hides keys, and two mean all keys.
FLASH_ATTENTION = """
import os
import torch

def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(None, None)):
    left, right = window_size
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    right = 0 if causal else right
    at = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    seen = (at <= (len(at) if left is None else left)) & (at >= (-len(at) if right is None else -right))
    wide = (x.float().transpose(1, 2) for x in (q, k, v))
    q, k, v = (x.repeat_interleave(q.shape[2] // x.shape[1], 1) for x in wide)
    if os.environ.get("WRONG_GRADIENT"):
        q = q.detach() + (q - q.detach()) * 1.5
    logits = (q @ k.mT * (softmax_scale or q.shape[-1] ** -0.5)).masked_fill(~seen, -torch.inf)
    shares = torch.where(seen, logits.softmax(-1), torch.zeros(()))
    return (shares.nan_to_num() @ v).transpose(1, 2).bfloat16()

flash_attn_func.compile_cache = {}
flash_attn_varlen_func = _flash_attn_fwd = _flash_attn_bwd = flash_attn_func
"""
RECIPES = "from octavo.fp8.recipe import CurrentScaling as Float8CurrentScaling, DelayedScaling, Format\n"


@pytest.fixture
def transformer_engine(tmp_path, monkeypatch):
    """A package of that name for the processes of entries."""
    files = {
        "__init__.py": "",
        "pytorch/__init__.py": TRANSFORMER_ENGINE,
        "pytorch/utils.py": UTILS,
        "pytorch/attention/__init__.py": "",
        "pytorch/attention/dot_product_attention.py": "_attention_backends = {}",
        "pytorch/flash.py": "from flash_attn.cute.interface import flash_attn_func",
        "common/__init__.py": "",
        "common/recipe.py": RECIPES,
        "../flash_attn/cute/__init__.py": "",
        "../flash_attn/cute/interface.py": FLASH_ATTENTION,
    }
    for name, text in files.items():
        path = tmp_path / "site" / "transformer_engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.parametrize("case", ["tiny", "tiny-mixtral"])
def test_transformer_engines_entries_train(tmp_path, transformer_engine, forked_workers, case):
    results = run_suite(
        "one-gpu", cases=[case], entries=["te-bf16", "te-delayed-fp8-head", "te-current"], steps=2, warmup=1,
        output=tmp_path, device="cpu", command="python -m benchmarks",
    )  # fmt: skip
    for figures in results["rows"]:
        assert "error" not in figures, figures
        assert abs(figures["loss"] - math.log(512)) < 0.2
    losses = [figures["loss"] for figures in results["rows"]]
    assert len(set(losses)) == 3  # FP8 by two recipes, one of them with the head too, and none
    assert [figures["head"] for figures in results["rows"]] == ["bf16", "fp8", "bf16"]
    assert results["machine"]["peers"] == {"transformer-engine": None}


def rows_of_te(tmp_path, case, entries, suite="one-gpu", **more):
    how = {"steps": 2, "warmup": 1, "output": tmp_path / "results", "device": "cpu", "command": "python -m benchmarks", **more}
    return run_suite(suite, cases=[case], entries=entries, **how)


@pytest.mark.parametrize("case", ["tiny", "tiny-mistral", "tiny-neox"])
def test_its_attention_by_flash_attn_4_is_cudnns_with_and_without_an_fp8_head(
    tmp_path, transformer_engine, forked_workers, monkeypatch, case
):
    """With window bounds of -1 the package sees no key; the entry hands it None, and names the kernel of its steps."""
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")  # the user's, which are not the entries'
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
    heads = ["", *(["-fp8-head"] if case == "tiny" else [])]
    names = [f"te-delayed{kernel}{head}" for head in heads for kernel in ("", "-flash-attention")]
    results = rows_of_te(tmp_path, case, names)
    assert [row.get("error") for row in results["rows"]] == [None] * len(names)
    for cudnn, flash in zip(results["rows"][::2], results["rows"][1::2], strict=True):
        assert cudnn["attention"] == "Transformer Engine, cuDNN (sub-backend 1)"
        assert flash["attention"] == "Transformer Engine, flash-attn 4.0.0b36, window bounds of -1 mended"
        assert flash["head"] == cudnn["head"]
        assert flash["loss"] == pytest.approx(cudnn["loss"], rel=2e-3)
        assert flash["loss_step"] == cudnn["loss_step"]
        for row in (cudnn, flash):
            assert set(row["attention_errors"]) == {"output", "query gradient", "key gradient", "value gradient"}
            assert all(0 < error < 0.02 for error in row["attention_errors"].values())
    assert list(results["machine"]["peers"]) == ["transformer-engine", "flash-attn-4"]


WRONG = """
import pytest, torch
from benchmarks import te_attention
from benchmarks.cases import CASES
from benchmarks.peers import ENTRIES
from octavo.errors import InputError

te_attention._unlimited = lambda bound: bound
with pytest.raises(InputError) as caught:
    ENTRIES["te-delayed-flash-attention"].build(CASES["tiny"], torch.device("cpu"), False)
assert "output 1.0000, query gradient 1.0000, key gradient 1.0000, value gradient 1.0000" in str(caught.value)
assert "where at most 0.02 is rounding. It is not timed." in str(caught.value)
ENTRIES["te-delayed-flash-attention"].build(CASES["tiny-mistral"], torch.device("cpu"), False)  # a window, and no bound of -1
"""


def test_windows_as_transformer_engine_passes_them_are_refused_with_the_relative_errors(tmp_path, transformer_engine):
    process = command_lines.CommandLine(command_lines.python, tmp_path / "wrong", ["-c", WRONG])
    assert process.wait(timeout=300) == 0, process.stderr


@pytest.mark.parametrize("suite", ["one-gpu", "vision"])
def test_a_wrong_query_gradient_alone_is_refused_in_blocks_of_images_too(
    tmp_path, with_torchvision, transformer_engine, monkeypatch, suite
):
    pytest.importorskip("timm", exc_type=ImportError)
    names = ["te-delayed-flash-attention", "te-delayed"]
    (row, _) = rows_of_te(tmp_path, "tiny-vit", names, suite, gpus=1)["rows"]
    assert "error" not in row
    assert row["attention"].startswith("Transformer Engine, flash-attn 4.0.0b36")
    monkeypatch.setenv("WRONG_GRADIENT", "1")
    (row, cudnn) = rows_of_te(tmp_path / "again", "tiny-vit", names, suite, gpus=1)["rows"]
    found = re.search(r"heads of 16, 17 tokens\): relative errors output 0.00\d+, query gradient (0\.\d+), key", row["error"])
    assert 0.45 < float(found[1]) < 0.55
    assert "error" not in cudnn


def test_an_attention_by_another_kernel_than_the_entrys_is_refused(tmp_path, transformer_engine, forked_workers, monkeypatch):
    monkeypatch.setenv("WITHOUT_FLASH", "1")
    (row,) = rows_of_te(tmp_path, "tiny", ["te-delayed-flash-attention"])["rows"]
    assert "flash-attn-4 was asked for, and Transformer Engine did not call it: Transformer Engine, cuDNN" in row["error"]


@pytest.mark.long
def test_over_two_ranks_its_attention_is_compared_too(tmp_path, transformer_engine, forked_workers):
    """Whole sequences sharded and shared ones; the stand-in shares none by flash-attn-4, and the entry says so."""
    names = ["te-delayed-fp8-head", "te-delayed-flash-attention"]
    head, flash = rows_of_te(tmp_path / "a", "tiny", names, "sharded", gpus=2)["rows"]
    assert (head.get("error"), flash.get("error")) == (None, None)
    assert (head["head"], flash["head"]) == ("fp8", "bf16")
    assert flash["attention"].startswith("Transformer Engine, flash-attn 4.0.0b36")
    names = ["te-delayed-a2a", "te-delayed-flash-attention-a2a"]
    cudnn, flash = rows_of_te(tmp_path / "b", "tiny-cp2", names, "context", gpus=2)["rows"]
    assert max(cudnn["attention_errors"].values()) < 0.02
    assert "flash-attn-4 was asked for, and Transformer Engine did not call it" in flash["error"]


class Joint(torch.nn.Module):
    """Calls attention with the joint product of queries, keys and values, whole: Transformer Engine where heads are alike."""

    def __init__(self, dim):
        super().__init__()
        self.joint, self.attention, self.dim = torch.nn.Linear(8, 3 * 2 * 4), Attends(), dim

    def forward(self, x_BTK):
        shape = (3, 2, 4) if self.dim == -3 else (2, 3, 4)
        joint = self.joint(x_BTK).unflatten(-1, shape)
        return self.attention(None, None, None, qkv_layer=joint, qkv_interleave_dim=self.dim)


class Attends(torch.nn.Module):
    wrong = 1.0

    def forward(self, q, k, v, qkv_layer, qkv_interleave_dim):
        q, k, v = (x.transpose(1, 2) for x in qkv_layer.unbind(qkv_interleave_dim))
        k = self.wrong * k
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dim", [-3, -2])
def test_a_joint_product_is_compared_as_its_parts_are(dim):
    layer, x = Joint(dim), torch.randn(2, 16, 8)
    errors = te_attention.check(layer.attention, lambda: layer(x), causal=True)
    assert list(errors) == ["output", "query gradient", "key gradient", "value gradient"]
    assert max(errors.values()) < 1e-5
    layer.attention.wrong = 1.5
    with pytest.raises(InputError, match="its attention is wrong"):
        te_attention.check(layer.attention, lambda: layer(x), causal=True)


def test_a_layer_that_calls_attention_in_another_way_is_refused():
    attention, linear = torch.nn.Identity(), torch.nn.Linear(4, 4)
    with pytest.raises(InputError, match="its layer shows no q, k, v, out, d_out, dq, dk, dv: this version of Transformer"):
        te_attention.check(attention, lambda: linear(torch.randn(2, 4)), causal=True)


ANOTHER = """
import pytest, torch
from benchmarks.cases import CASES
from benchmarks.peers import ENTRIES
from octavo.errors import InputError

ENTRIES["te-bf16"].build(CASES["tiny"], torch.device("cpu"), False)
with pytest.raises(InputError, match="imported already, under other variables than NVTE_FUSED_ATTN=0 .*in a separate process"):
    ENTRIES["te-delayed-flash-attention"].build(CASES["tiny"], torch.device("cpu"), False)
"""


def test_variables_behind_the_import_are_refused(tmp_path, transformer_engine):
    process = command_lines.CommandLine(command_lines.python, tmp_path / "another", ["-c", ANOTHER])
    assert process.wait(timeout=300) == 0, process.stderr


def test_every_entry_of_transformer_engine_has_its_variables_in_its_process():
    for suite in SUITES.values():
        for name, entry in suite.entries.items():
            flash = "flash-attention" in name
            of_engine = te_attention.FLASH if flash else te_attention.CUDNN
            wanted = of_engine if name.startswith("te-") else {}
            wanted = wanted | (te_attention.USERBUFFERS if "overlap" in name else {})
            assert entry.environment == wanted
            assert ("flash-attn-4" in entry.needs) == flash
    for suite in ("one-gpu", "sharded", "context", "vision"):
        assert "te-delayed-flash-attention" in SUITES[suite].entries


FAMILIES = """
import json, os
import torch
from benchmarks.cases import CASES
from benchmarks.peers import ENTRIES
from octavo.stored_names import stored_name

found = {}
for case in map(CASES.get, ("tiny-neox", "tiny-mistral", "tiny", "tiny-mixtral")):
    ours = ENTRIES["octavo-bf16"].build(case, torch.device("cpu"), False).model
    theirs = ENTRIES["te-bf16"].build(case, torch.device("cpu"), False).model
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        names = {"embedding": "embed_tokens", "head": "lm_head"}
        mixture = {"layer_norm_weight": "norm.weight", "router_weight": "router.weight"}
        for name, value in ours.named_parameters():
            first, _, rest = stored_name(name).partition(".")
            block, moe, part = rest.partition(".layernorm_moe.")
            if ".experts." in name:
                layer = theirs.get_submodule(f"layers.{block}.mixture.{part.split('.')[1].removesuffix('_weight')}")
                for expert, matrix in enumerate(value.chunk(4)):
                    layer.get_parameter(f"weight{expert}").copy_(matrix)
            elif moe:
                theirs.get_parameter(f"layers.{block}.mixture.{mixture[part]}").copy_(value)
            else:
                theirs.get_parameter(f"{names.get(first, first)}.{rest}").copy_(value)
    ids = torch.randint(512, (2, 32))
    ours(input_ids=ids, labels=ids).loss.backward()
    theirs(ids, ids).backward()
    one, other = ours.embedding.weight.grad.float(), theirs.embed_tokens.weight.grad.float()
    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    found[case.name] = [*counts, ((one - other).norm() / one.norm()).item()]
print(json.dumps(found))
"""


def test_transformer_engines_decoder_is_octavos_in_every_family(tmp_path, transformer_engine):
    """Blocks, biases, window and rotation; the stand-in's layers are Octavo's own, by Transformer Engine's names."""
    process = command_lines.CommandLine(command_lines.python, tmp_path / "families", ["-c", FAMILIES])
    assert process.wait(timeout=300) == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert set(found) == {"tiny-neox", "tiny-mistral", "tiny", "tiny-mixtral"}
    for name, (own, theirs, error) in found.items():
        assert own == theirs, name
        assert error < 0.03, name  # of the embedding's gradient in bf16: it has passed through every block


def printed_by_two_ranks(folder, script, *arguments):
    """The JSON that each of two ranks of a script prints last."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    processes = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        given = ["-c", script, *arguments]
        processes.append(command_lines.CommandLine(command_lines.python, folder / rank, given, environment=place))
    codes = [process.wait(timeout=300) for process in processes]
    assert codes == [0, 0], [process.stderr for process in processes]
    return [json.loads(process.stdout.splitlines()[-1]) for process in processes]


SHARES = """
import dataclasses, json, sys
import torch
from benchmarks.cases import CASES, CONTEXT_CASES
from benchmarks.sharded import CONTEXT, SHARDED
from octavo.parallel import world
from octavo.stored_names import stored_name

# One thread: the ranks share the cores.
torch.set_num_threads(1)
cpu, found = torch.device("cpu"), {}
untied = {"tie_word_embeddings": False}
for name in sys.argv[1:]:
    whole = name == "te-bf16"
    case = CASES["tiny"] if whole else CONTEXT_CASES["tiny-cp2"]
    case = dataclasses.replace(case, sizes={**case.sizes, **(untied if name == "p2p" else {})})
    world.init({"context_parallel_degree": case.context})
    ours = CONTEXT["octavo-bf16"].build(case, cpu, False).model
    builder = SHARDED["te-bf16"].build
    theirs = builder(case, cpu, False, **({} if whole else {"strategy": name})).model
    assert theirs.recompute == bool(case.recompute)
    names = {"embedding": "embed_tokens", "head": "lm_head"}
    with torch.no_grad():
        for parameter, value in ours.named_parameters():
            local = value.to_local()
            local.add_(torch.randn_like(local) * 0.2)
            first, _, rest = stored_name(parameter).partition(".")
            theirs.get_parameter(f"{names.get(first, first)}.{rest}").to_local().copy_(local)
    torch.manual_seed(1 + world.state.dp_rank)
    ids = torch.randint(512, (2, 32))
    ours_loss = ours(input_ids=ids, labels=ids).loss
    theirs_loss = theirs(ids, ids)
    ours_loss.backward()
    theirs_loss.backward()
    mean = theirs_loss.detach().clone()
    torch.distributed.all_reduce(mean)
    one, other = (end.weight.grad.to_local() for end in (ours.embedding, theirs.embed_tokens))
    kept = theirs.layers[0].self_attention.layernorm_qkv.weight
    found[name] = [ours_loss.item(), mean.item() / 2, ((one - other).norm() / one.norm()).item(), list(kept.to_local().shape)]
    assert kept.dtype == torch.float32
world.shutdown()
print(json.dumps(found))
"""


@pytest.mark.parametrize("names", [["te-bf16"], ["all_gather", "p2p", "a2a"]], ids=["shards", "context"])
def test_transformer_engines_decoder_over_two_ranks_is_octavos(names, tmp_path, transformer_engine):
    """Shards, parts of the sequences, their positions, targets and exchange, and recomputation."""
    for found in printed_by_two_ranks(tmp_path, SHARES, *names):
        assert list(found) == names
        for name, (ours, theirs, error, shape) in found.items():
            assert theirs == pytest.approx(ours, rel=0.01), name
            assert error < 0.1, name  # of a shard of the embedding's gradient in bf16
            assert shape == [64, 64]  # of 128 rows


TENSOR = """
import dataclasses, json
import torch
from benchmarks.cases import CASES
from benchmarks.sharded import SHARDED
from benchmarks import te_attention
from octavo.nn.mlp import deinterleave, interleave
from octavo.parallel import world

torch.set_num_threads(1)
cpu, case = torch.device("cpu"), CASES["tiny-tp2"]
case = dataclasses.replace(case, sizes={**case.sizes, "num_key_value_heads": 2})
world.init({"tensor_parallel_degree": 2})
rank = world.state.tp_rank
trainer = SHARDED["te-bf16-states"].build(case, cpu, False)
theirs = trainer.model
from benchmarks.te import TeDecoder
torch.manual_seed(3)
whole = TeDecoder(case.spec, case.sequence_length, cpu, compiled=False)

def part(name, x):
    if name.endswith("layernorm_qkv.weight"):
        return x.chunk(2)[rank]
    if name.endswith("fc1_weight"):
        return interleave(*(half.chunk(2)[rank] for half in deinterleave(x)))
    if name.endswith(("proj.weight", "fc2_weight")):
        return x.chunk(2, 1)[rank]
    return x

def local(x):
    return x.to_local() if hasattr(x, "to_local") else x

with torch.no_grad():
    for name, parameter in whole.named_parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
        value = theirs.get_parameter(name)
        held = part(name, parameter) if name.startswith("layers") else parameter.chunk(2)[rank]
        local(value).copy_(held)
torch.manual_seed(1)
ids = torch.randint(512, (2, 32))
wanted, found = whole(ids, ids), theirs(ids, ids)
wanted.backward()
found.backward()
theirs.sum_norms()
errors = {}
for name, parameter in whole.named_parameters():
    gradient = parameter.grad.float()
    gradient = part(name, gradient) if name.startswith("layers") else gradient.chunk(2)[rank]
    errors[name] = ((local(theirs.get_parameter(name).grad).float() - gradient).norm() / gradient.norm()).item()
before = [local(p).clone() for p in theirs.parameters()]
trainer.optimizer.step()
# A norm's weight near 1 stays where it is in bfloat16.
moved = all(not torch.equal(a, local(b)) for a, b in zip(before, theirs.parameters()) if a.dim() == 2)
print(json.dumps([wanted.item(), found.item(), errors, moved, trainer.attention_errors]))
world.shutdown()
"""


def test_transformer_engines_split_decoder_is_the_whole_one(tmp_path, transformer_engine):
    """Parts of matrices and of sequences: loss, gradients of every parameter, attention, and a step."""
    for wanted, found, errors, moved, attention in printed_by_two_ranks(tmp_path, TENSOR):
        assert found == pytest.approx(wanted, rel=2e-3)
        assert {name: error for name, error in errors.items() if not error < 0.08} == {}
        assert moved
        assert max(attention.values()) < 0.02


@pytest.mark.long
def test_entries_of_split_matrices_take_turns(tmp_path, transformer_engine, forked_workers):
    names = ["octavo-delayed-fast-fp8-head-bf16-states", "te-delayed-fp8-head-bf16-states"]
    names += ["te-delayed-fp8-head-overlap-bf16-states"]
    found = rows_of_te(tmp_path, "tiny-tp2", names, "sharded", gpus=2)["rows"]
    assert [row.get("error") for row in found] == [None] * 3
    assert [row["head"] for row in found] == ["fp8"] * 3
    assert all(abs(row["loss"] - math.log(512)) < 0.2 for row in found)
    assert not SHARDED["te-delayed"].trains(CASES["tiny-tp2"])
    assert not SHARDED["te-bf16-states"].trains(CASES["tiny-mixtral-tp2"])
    assert not SHARDED["te-delayed-overlap-bf16-states"].trains(CASES["tiny"])


VISION = """
import os
import torch
from benchmarks.cases import VISION_CASES
from benchmarks import te_attention

te_attention.choose(te_attention.CUDNN)
from benchmarks import te
from octavo.nn import TransformerLayer

cpu, case = torch.device("cpu"), VISION_CASES["tiny-vit"]
parts, block = te.VisionLayer(case, 1e-6, cpu), te.vision_block(case, 1e-6, cpu)
whole = TransformerLayer(
    case.hidden_size, case.intermediate_size, case.heads, layernorm_epsilon=1e-6, self_attn_mask_type="no_mask"
)
for layer in (block, whole):
    layer.load_state_dict(parts.state_dict())
x, grad = torch.randn(2, 2, case.sequence_length, case.hidden_size)
outputs = []
for layer in (parts, block, whole):
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(leaf.bfloat16())
    y.backward(grad.bfloat16())
    assert y.dtype == torch.bfloat16
    outputs.append([y, leaf.grad, *(p.grad for _, p in sorted(layer.named_parameters()))])
for first, second, expected in zip(*outputs, strict=True):
    assert all((found - expected).norm() <= 0.02 * expected.norm() for found in (first, second))
"""


def test_transformer_engines_vision_blocks_are_its_layer(tmp_path, transformer_engine):
    # A process of its own: the package that stands in for Transformer Engine must not stay.
    process = command_lines.CommandLine(command_lines.python, tmp_path / "vision", ["-c", VISION])
    assert process.wait(timeout=300) == 0, process.stderr


STARTS = """
import hashlib, json, sys
import torch
from benchmarks.cases import VISION_CASES
from benchmarks.peers import ENTRIES
from octavo.stored_names import stored_name

NAMES = {
    "self_attention.layernorm_qkv.layer_norm_": "norm1.", "self_attention.layernorm_qkv.": "attn.qkv.",
    "self_attention.proj.": "attn.proj.", "layernorm_mlp.layer_norm_": "norm2.", "layernorm_mlp.fc1_": "mlp.fc1.",
    "layernorm_mlp.fc2_": "mlp.fc2.",
}
case, found = VISION_CASES["tiny-vit"], {}
for name in sys.argv[1:]:
    hashes = found[name] = {}
    for parameter, value in ENTRIES[name].build(case, torch.device("cpu"), False).model.named_parameters():
        value, parameter = value.detach(), stored_name(parameter)
        kind = parameter.rpartition(".")[2].rpartition("_")[2]
        path, _, part = parameter.partition("blocks.")
        index, _, part = part.partition(".")
        for ours, timms in NAMES.items():
            if part.startswith(ours) and part[len(ours):] in ("weight", "bias"):
                parameter = f"blocks.{index}.{timms}{kind}"
                if timms == "attn.qkv.":  # heads x 3 x columns of a head, where timm has 3 x heads
                    value = value.view(case.heads, 3, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
                break
        hashes[parameter] = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
print(json.dumps(found))
"""


def test_every_vision_entry_starts_from_timms_weights(tmp_path, with_torchvision, transformer_engine):
    """Blocks of Octavo's, of Transformer Engine's two kinds and timm's: the same tensors by name, so that losses compare."""
    pytest.importorskip("timm", exc_type=ImportError)
    vision = [name for name, entry in ENTRIES.items() if entry.vision and entry.group != "torchao"]  # whose blocks are timm's
    flash = [name for name in vision if ENTRIES[name].needs]
    found = {}
    for number, names in enumerate(([name for name in vision if name not in flash], flash)):
        process = command_lines.CommandLine(command_lines.python, tmp_path / str(number), ["-c", STARTS, *names])
        assert process.wait(timeout=300) == 0, process.stderr
        found |= json.loads(process.stdout.splitlines()[-1])
    timms = found["torch-bf16"]
    assert len([name for name in timms if name.startswith("blocks.")]) == 24
    assert set(found) == set(vision)
    for name, hashes in found.items():
        assert hashes == timms, name
    assert {"te-delayed-block", "te-delayed-flash-attention", "octavo-delayed"} <= set(found)


def test_both_ways_to_its_vision_block_are_measured_in_one_run(tmp_path, with_torchvision, transformer_engine):
    pytest.importorskip("timm", exc_type=ImportError)
    results = run_suite(
        "vision", entries=["te-delayed-block", "te-delayed"], steps=2, warmup=1, output=tmp_path, device="cpu", gpus=1,
        command="python -m benchmarks vision",
    )  # fmt: skip
    rows = results["rows"]
    assert [(row["entry"], row.get("error")) for row in rows] == [("te-delayed-block", None), ("te-delayed", None)]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=5e-3)


def compared(monkeypatch, installed, suite=ONE_GPU, entries=None, peers=None):
    said = []
    monkeypatch.setattr(run, "version", lambda package: "1.0" if package in installed else None)
    return [entry.name for entry in run._compared(suite, entries, peers, said.append)], said


def test_peers_that_are_installed_stand_beside_octavo(monkeypatch):
    everything = {"torchao", "transformer-engine", "transformers", "flash-attn-4"}
    assert compared(monkeypatch, everything) == (list(ENTRIES), [])
    flash = ["te-delayed-flash-attention", "te-delayed-flash-attention-fp8-head"]
    names, said = compared(monkeypatch, everything - {"flash-attn-4"})
    assert names == [name for name in ENTRIES if name not in flash]
    assert said == [f"flash-attn-4 is not installed: without {', '.join(flash)}. Install it by {install_extra('flash')}"]
    names, said = compared(monkeypatch, {"transformers"})
    assert names == [*OWN, "torch-bf16", "torch-huggingface-bf16"]
    assert said == [
        f"torchao is not installed: without ao-tensorwise, ao-rowwise. Install it by {install_extra('bench')}",
        "transformer-engine is not installed: without te-bf16, te-delayed, te-delayed-flash-attention, te-delayed-block, "
        "te-delayed-fp8-head, te-delayed-flash-attention-fp8-head, te-current. "
        "Install it by pip install --no-build-isolation 'transformer-engine[pytorch]'",
    ]


def test_peers_are_chosen_by_group(monkeypatch):
    # What is asked for and not installed has a row, which says so.
    te = [name for name in ENTRIES if name.startswith("te-")]
    assert compared(monkeypatch, set(), peers=["te"]) == ([*OWN, *te], [])
    plain = ["torch-bf16", "torch-huggingface-bf16"]
    assert compared(monkeypatch, set(), peers=["torchao", "bf16"])[0] == [*OWN, *plain, "ao-tensorwise", "ao-rowwise"]
    assert compared(monkeypatch, set(), peers=[])[0] == OWN
    assert compared(monkeypatch, set(), entries=["te-bf16", "octavo-bf16"])[0] == ["te-bf16", "octavo-bf16"]
    sharded = SUITES["sharded"]
    without = [name for name in sharded.entries if not name.startswith(("te-", "ao-"))]
    assert compared(monkeypatch, set(), sharded, peers=["bf16"])[0] == without
    theirs = [name for name in sharded.entries if name.startswith("te-")]
    assert compared(monkeypatch, set(), sharded, peers=["bf16", "te"])[0] == [*without, *theirs]
    assert compared(monkeypatch, set(), SUITES["checkpoint"])[0] == ["octavo-delayed"]
    assert set(PEERS) == {"bf16", "torchao", "te"}
    assert all(name in OWN or any(name.startswith(prefix) for prefix in PEERS.values()) for name in ENTRIES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peers": ["tee"]}, "unknown group of peers 'tee'. Did you mean 'te'?"),
        ({"peers": ["te"], "entries": ["te-bf16"]}, "entries te-bf16 are all that is compared: leave --peers out"),
        ({"suite": "context", "peers": ["torchao"]}, "peers = torchao: the suite context has only te"),
        ({"suite": "checkpoint", "peers": ["bf16"]}, "peers = bf16: the suite checkpoint has no peers"),
        ({"suite": "sharded", "cases": ["vit-huge"]}, "unknown case 'vit-huge'"),
        (
            {"breakdown": True},
            "--breakdown reads the kernels of training steps on a GPU: not those of the suite one-gpu on cpu",
        ),
        (
            {"traces": Path("traces")},
            "--traces reads the kernels of training steps on a GPU: not those of the suite one-gpu on cpu",
        ),
        ({"cases": ["tiny-vit"], "entries": ["octavo-delayed-fp8-head"]}, "octavo-delayed-fp8-head: none runs tiny-vit"),
    ],
)
def test_peers_and_cases_that_do_not_fit_are_refused(tmp_path, change, message):
    asked = {"suite": "one-gpu", "cases": ["tiny"], "device": "cpu", **change}
    with pytest.raises(InputError) as caught:
        run_suite(**asked, output=tmp_path / "none", command="python -m benchmarks")
    assert message in str(caught.value)
    assert not (tmp_path / "none").exists()


def test_the_command_refuses_with_exit_code_2(capsys):
    assert main(["one-gpu", "--cases", "tiny", "--peers", "bf16,tee", "--device", "cpu"]) == 2
    assert "unknown group of peers 'tee'" in capsys.readouterr().err
    assert main(["kernels", "--cases", "cast,swiglu-fp8", "--device", "cpu"]) == 2
    assert "kernels of a GPU" in capsys.readouterr().err
    for option in ("--cases", "--entries"):
        assert main(["one-gpu", option, " ,", "--device", "cpu"]) == 2
        assert f'{option} " ," has no names: give some, separated by commas, or leave it out' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("suite", "option", "value"),
    [
        ("one-gpu", "--steps", "0"),
        ("kernels", "--warmup", "-1"),
        ("checkpoint", "--saves", "0"),
        ("checkpoint", "--restore-gpus", "0"),
    ],
)
def test_the_command_refuses_a_number_too_small(capsys, suite, option, value):
    assert main([suite, "--device", "cpu", option, value]) == 2
    assert option in capsys.readouterr().err


def test_a_workload_whose_model_is_not_installed_is_left_out_or_refused_by_name(monkeypatch):
    monkeypatch.setattr(run, "version", lambda package: None)
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    said = []
    gpu = run.Target(run.describe_device("cpu").__class__("a GPU", None, (9, 0), 140.0, "cuda"), "cuda:0")
    entries = [ENTRIES["octavo-delayed"], ENTRIES["octavo-delayed-fp8-head"]]
    plan = run._plan(ONE_GPU, None, entries, gpu, said.append)
    assert [case.name for case, _ in plan] == ["llama-1b", "llama-8b-8layers", "llama2-7b-8layers"]
    assert said == [f"timm is not installed: without vit-huge. Install it by {install_extra('bench')}"]
    with pytest.raises(InputError, match=r"^vit-huge: timm is not installed\. Install it by pip install 'octavo\[bench\]'"):
        run._plan(ONE_GPU, ["llama-1b", "vit-huge"], entries, gpu, said.append)
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: name)  # in a folder of the path
    ((case, able),) = run._plan(ONE_GPU, ["vit-huge"], entries, gpu, said.append)
    assert (case, able) == (VISION_CASES["vit-huge"], entries[:1])
    assert said[1:] == ["vit-huge: without octavo-delayed-fp8-head"]
    assert set(ALL_CASES) == set(CASES) | set(CONTEXT_CASES) | set(VISION_CASES) | set(LORA_CASES)


def test_the_head_trains_in_fp8_too():
    case = CASES["tiny"]
    entry = ENTRIES["octavo-delayed-fp8-head"]
    assert (entry.layers, entry.head, entry.build.func) == ("fp8", "fp8", build_octavo)
    trainer = entry.build(case, CPU, False)
    ids = torch.randint(case.spec.vocabulary, (case.batch, case.sequence_length))
    losses = [float(trainer.step(ids, ids)) for _ in range(8)]
    assert abs(losses[0] - math.log(case.spec.vocabulary)) < 0.2
    assert losses[-1] < losses[0]


SOURCES = {
    "averaged", "base_recipe", "config", "device", "excluded", "from_rank0", "frozen", "load_from",
    "load_state_dict_from_rank0", "lora", "moe", "objective", "resize",
}  # fmt: skip
"""Arguments that say where a model comes from or what it learns, and no setting of its steps on one GPU."""
RANKS = {"cp_comm_type"}


def names_of(function):
    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("name", "vision"),
    [(name, vision) for name in OWN if name != "octavo-default" for vision in sorted({False, ENTRIES[name].vision})],
)
def test_entries_pass_every_setting_so_that_they_keep_their_meaning_under_other_defaults(monkeypatch, name, vision):
    entry, given, asked = ENTRIES[name], {}, set()
    whole, wrap = build.BuildOptions, build.transform

    def record(function, keep):
        def call(*arguments, **settings):
            given[function.__name__] = settings
            return keep(*arguments, **settings)

        return call

    def model_with_loss(source, *arguments, **settings):
        return torch.nn.Linear(2, 2)

    monkeypatch.setattr(build, "BuildOptions", record(whole, whole))
    monkeypatch.setattr(build, "transform", record(wrap, model_with_loss))
    monkeypatch.setattr(peers, "timm_model", lambda case, device, seed: None)
    monkeypatch.setattr(peers, "fp8_autocast", lambda **settings: asked.update(settings))
    for kind in recipe.RECIPES.values():
        monkeypatch.setitem(peers.RECIPES, kind.name, recording(kind, given))
    trainer = entry.build(VISION_CASES["tiny-vit"] if vision else CASES["tiny"], CPU, False)
    trainer.around()
    function = wrap if vision else whole
    assert names_of(function) - SOURCES - RANKS - {"model", "source", "recipe"} <= given[function.__name__].keys()
    assert asked == names_of(fp8_autocast)
    if entry.layers == "fp8":
        kind, settings = given["recipe"]
        assert settings.keys() == {field.name for field in dataclasses.fields(kind) if field.init}
        fast = {"-fast-input": "input_gradient", "-fast": True}
        wanted = next((value for part, value in fast.items() if part in name), False)
        assert settings.get("fast_accumulation", False) == wanted
    model = given[function.__name__]
    assert model["params_dtype"] == (torch.float32 if vision else torch.bfloat16)
    assert model["fp8_head"] == ("backward" if name.endswith("head-backward") else name.endswith("head"))


def recording(kind, given):
    @dataclasses.dataclass(frozen=True)
    class Recorded(kind):
        def __init__(self, **settings):
            given["recipe"] = kind, settings
            super().__init__(**settings)

    return Recorded


def test_the_default_entry_is_a_transform_with_no_setting_named():
    case, entry = CASES["tiny"], ENTRIES["octavo-default"]
    trainer = entry.build(case, CPU, False, seed=3)
    torch.manual_seed(3)
    model = build.transform(AutoModelForCausalLM.from_config(case.hf_config()).bfloat16().train())
    optimizer = torch.optim.AdamW(model.parameters(), **peers.ADAMW)
    for _ in range(3):
        ids = torch.randint(case.spec.vocabulary, (case.batch, case.sequence_length))
        with fp8_autocast():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(trainer.step(ids, ids)) == float(loss.detach())
    for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert trainer.model.fp8_head == "backward"
    assert (entry.head, entry.head_forward) == ("fp8", "bf16")
