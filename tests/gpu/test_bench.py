"""Peers on a GPU do the same work as the plain model; profiles and timed kernels have figures."""

import pytest
import torch

from benchmarks import te_attention
from benchmarks.cases import Case, VisionCase
from benchmarks.peers import ENTRIES, build_plain
from benchmarks.profile.breakdown import OTHER, record
from benchmarks.run import run_suite
from benchmarks.te_layers import transformer_engine as their_layers
from benchmarks.worker import labelled_batches
from octavo.bench.kernels import KERNELS, Kernel, measure_kernels
from octavo.bench.layers import LAYERS, OCTAVO, SETTLING, measure_layers
from octavo.models.shapes import SHAPES
from octavo.nn.attention import merge_qkv
from octavo.run.provenance import version

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CUDA = torch.device("cuda")
_SIZES = SHAPES["llama-tiny"] | {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "tie_word_embeddings": False,
}
LLAMA = Case("small", _SIZES, 2, 256)
VIT = VisionCase("small-vit", 320, 2, 4, 1280, 32, 16, 224, 16)  # heads of 80, as vit-huge has


def transformer_engine():
    te_attention.choose(te_attention.CUDNN)
    pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)


@torch.no_grad()
def copy_llama(theirs, plain):
    """The weights of the plain model, as Transformer Engine lays them out."""
    theirs.embed_tokens.weight.copy_(plain.model.embed_tokens.weight)
    theirs.lm_head.weight.copy_(plain.lm_head.weight)
    for layer, block in zip(theirs.layers, plain.model.layers, strict=True):
        attention, mlp = block.self_attn, block.mlp
        qkv = merge_qkv(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, LLAMA.spec.kv_heads)
        layer.self_attention.layernorm_qkv.weight.copy_(qkv)
        layer.self_attention.proj.weight.copy_(attention.o_proj.weight)
        layer.layernorm_mlp.fc1_weight.copy_(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
        layer.layernorm_mlp.fc2_weight.copy_(mlp.down_proj.weight)


def far(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize(("name", "tolerance"), [("te-bf16", 0.03), ("te-delayed", 0.3), ("te-current", 0.15)])
def test_transformer_engines_llama_is_the_plain_one(name, tolerance):
    transformer_engine()
    plain, theirs = build_plain(LLAMA, CUDA, False), ENTRIES[name].build(LLAMA, CUDA, True)
    assert sum(p.numel() for p in theirs.model.parameters()) == sum(p.numel() for p in plain.model.parameters())
    copy_llama(theirs.model, plain.model)
    ids, labels = labelled_batches(LLAMA, CUDA)[0]
    for _ in range(3):  # delayed scales begin at 1, and have seen one step behind the first
        theirs.model.zero_grad()
        with theirs.around():
            loss = theirs.loss(ids, labels)
        loss.backward()
    expected = plain.loss(ids, labels)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
    assert far(theirs.model.embed_tokens.weight.grad, plain.model.model.embed_tokens.weight.grad) < tolerance
    down = (theirs.model.layers[0].layernorm_mlp.fc2_weight, plain.model.model.layers[0].mlp.down_proj.weight)
    assert far(*(weight.grad for weight in down)) < tolerance


@pytest.mark.parametrize(("suite", "case"), [("one-gpu", "llama-1b"), ("vision", "vit-huge-patch16-b64")])
def test_transformer_engine_by_flash_attn_4_is_measured_only_where_it_is_right(tmp_path, suite, case):
    """Its own windows would empty attention; with heads of 80, as the ViT's, the query's gradient is wrong."""
    for package in ("transformer-engine", "flash-attn-4", *(["timm"] if suite == "vision" else [])):
        if version(package) is None:
            pytest.skip(f"needs {package}")
    cudnn, flash = run_suite(
        suite, cases=[case], entries=["te-delayed", "te-delayed-flash-attention"], steps=2, warmup=2, output=tmp_path,
        gpus=1, command="python -m benchmarks",
    )["rows"]  # fmt: skip
    assert "error" not in cudnn, cudnn["error"]
    assert cudnn["attention"].startswith("Transformer Engine, cuDNN")
    assert max(cudnn["attention_errors"].values()) < te_attention.TOLERANCE
    if suite == "vision":
        assert "its attention is wrong" in flash["error"]
        return
    assert "error" not in flash, flash["error"]
    assert flash["attention"].startswith("Transformer Engine, flash-attn 4.")
    assert max(flash["attention_errors"].values()) < te_attention.TOLERANCE
    assert flash["loss"] == pytest.approx(cudnn["loss"], rel=2e-3)


# Transformer Engine would rather be handed the joint product, which costs its backward what the block is there to save.
@pytest.mark.filterwarnings("ignore:Relying on pointer-based detection:DeprecationWarning")
@pytest.mark.parametrize(
    "name",  # flash-attn-4 in Transformer Engine needs a process of its own: the test above
    [name for name, entry in ENTRIES.items() if entry.vision and name != "torch-bf16" and "flash-attention" not in name],
)
def test_vision_entries_begin_with_timms_loss(name):
    pytest.importorskip("timm", exc_type=ImportError)
    if name.startswith("te-"):
        transformer_engine()
    if name.startswith("ao-"):
        pytest.importorskip("torchao", exc_type=ImportError)
    batch = labelled_batches(VIT, CUDA)[0]
    expected = float(ENTRIES["torch-bf16"].build(VIT, CUDA, False).step(*batch))
    trainer = ENTRIES[name].build(VIT, CUDA, True)
    losses = [float(trainer.step(*batch)) for _ in range(4)]
    assert losses[0] == pytest.approx(expected, rel=0.03)
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:Relying on pointer-based detection:DeprecationWarning")
def test_the_split_of_transformer_engines_vision_block_copies_no_gradient():
    pytest.importorskip("timm", exc_type=ImportError)
    transformer_engine()
    trainer = ENTRIES["te-delayed"].build(VIT, CUDA, True)
    batch = labelled_batches(VIT, CUDA)[0]
    trainer.step(*batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        trainer.step(*batch)
    split = [event for event in profiler.events() if event.name == "SplitAlongDimBackward"]
    assert len(split) == VIT.layers
    below = {child.name for event in split for child in descendants(event)}
    assert "aten::set_" in below  # one tensor made of the three's storage
    assert "aten::cat" not in below


def descendants(event):
    return [found for child in event.cpu_children for found in (child, *descendants(child))]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_no_farther_from_float64_than_transformer_engines(name):
    transformer_engine()
    theirs = their_layers(CUDA, print)
    rows = measure_layers([LAYERS[name]], CUDA, [OCTAVO, theirs], seeds=3, settling=SETTLING, say=lambda line: None)
    far = {
        (row["recipe"], row["tensor"]): (row["octavo_error"], row["te_error"])
        for row in rows
        # The same casts in another order of sums move an error by a few percent of itself.
        if row["octavo_error"] is None or row["te_error"] is None or row["octavo_error"] > 1.05 * row["te_error"]
    }
    assert not far


def test_a_profile_tells_kernels_of_a_gpu():
    trainer = build_plain(LLAMA, CUDA, False)
    batch = labelled_batches(LLAMA, CUDA)[0]
    found = record(lambda: trainer.step(*batch), 2, CUDA)
    total = sum(found["kernel_ms"].values())
    assert total > 0
    assert {"bf16 products", "optimizer", "attention"} <= set(found["kernel_ms"])
    assert found["kernel_ms"].get(OTHER, 0.0) < 0.1 * total
    assert all(kernel["calls"] > 0 and not kernel["name"].startswith("Optimizer") for kernel in found["largest_kernels"])


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_timed(name):
    kernel = KERNELS[name]
    small = Kernel(name, kernel.make, kernel.reads, kernel.writes, ((1024, 1536),))
    rows = measure_kernels([small], CUDA, iterations=3, warmup=1, say=lambda line: None)
    assert [row["entry"] for row in rows] == ["torch", "torch", "octavo"]
    assert "error" not in rows[2], rows[2]
    # Beyond a copy from memory, a figure would be the cache's or the clock's fault.
    assert 0 < rows[2]["share_of_copy"] < 1.3
    assert max(row["share_of_copy"] for row in rows[:2]) == 1
