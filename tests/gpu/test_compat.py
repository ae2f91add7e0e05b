"""The shim's layers beside Transformer Engine's own on a GPU, and the scripts that name one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.compat.te import attention, layers
from octavo.compat.te.autocast import fp8_autocast
from octavo.compat.te.recipes import DelayedScaling
from octavo.compat.te.rotary import RotaryPositionEmbedding

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SCRIPTS = Path(__file__).parents[1] / "compat" / "scripts"
B, T, H, FFN, HEADS = 2, 128, 256, 512, 4
BF16 = {"params_dtype": torch.bfloat16}
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **BF16}
needs_te = pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine")


def mask(kind):
    """(Transformer Engine's mask for a type, the tokens whose result has a meaning [B, T])."""
    there = torch.ones(B, T, dtype=torch.bool, device="cuda")
    if "padding" in kind:
        there[1, 96:] = False
        return ~there[:, None, None], there
    if kind == "arbitrary":
        excluded = torch.rand(B, 1, T, T, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) < 0.3
        return excluded & ~torch.eye(T, dtype=torch.bool, device="cuda"), there
    return None, there


LAYERS = {
    "Linear": ("Linear", (H, FFN), BF16, {}),
    "Linear without bias": ("Linear", (H, FFN), {"bias": False, **BF16}, {}),
    "LayerNormLinear": ("LayerNormLinear", (H, FFN), BF16, {}),
    "LayerNormMLP": ("LayerNormMLP", (H, FFN), BF16, {}),
    "LayerNormMLP swiglu": ("LayerNormMLP", (H, FFN), {"activation": "swiglu", "normalization": "RMSNorm", **BF16}, {}),
    "LayerNorm": ("LayerNorm", (H,), BF16, {}),
    "RMSNorm": ("RMSNorm", (H,), BF16, {}),
    "MultiheadAttention": ("MultiheadAttention", (H, HEADS), {"attention_dropout": 0.0, **BF16}, {}),
    "MultiheadAttention with norm": (
        "MultiheadAttention", (H, HEADS),
        {"attention_dropout": 0.0, "input_layernorm": True, "num_gqa_groups": 2, **BF16}, {},
    ),
    "TransformerLayer": ("TransformerLayer", (H, FFN, HEADS), QUIET, {}),
    "TransformerLayer batch first": ("TransformerLayer", (H, FFN, HEADS), {"attn_input_format": "bshd", **QUIET}, {}),
    "TransformerLayer Llama": (
        "TransformerLayer", (H, FFN, HEADS, 2),
        {"activation": "swiglu", "normalization": "RMSNorm", "bias": False, "fuse_qkv_params": True, **QUIET}, {"rotary": True},
    ),
    "TransformerLayer window": ("TransformerLayer", (H, FFN, HEADS), {"window_size": (32, 0), **QUIET}, {}),
    "TransformerLayer parallel": ("TransformerLayer", (H, FFN, HEADS), {"parallel_attention_mlp": True, **QUIET}, {}),
    **{
        f"TransformerLayer {kind}": (
            "TransformerLayer", (H, FFN, HEADS), {"self_attn_mask_type": kind, **QUIET}, {"mask": kind},
        )
        for kind in ("no_mask", "padding", "padding_causal", "arbitrary")
    },
}  # fmt: skip


def run(layer, x, there, options, recipe):
    """Result and gradients of a layer, in float32."""
    x = x.clone().requires_grad_()
    with recipe():
        y = layer(x, **options)
    kept = there.t() if y.shape[:2] == (T, B) else there
    (y.float() * kept[..., None]).square().mean().backward()
    grads = {name: p.grad.float() for name, p in layer.named_parameters() if p.grad is not None}
    return y.float() * kept[..., None], x.grad.float(), grads


@needs_te
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", LAYERS)
def test_layers_beside_the_real_ones(case, fp8, monkeypatch):
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    name, args, kwargs, how = LAYERS[case]
    if how.get("mask") == "arbitrary":
        monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")  # neither cuDNN nor flash-attn takes its mask
    torch.manual_seed(0)
    theirs = getattr(te, name)(*args, **kwargs)
    ours = getattr(layers, name, None) or getattr(attention, name)
    ours = ours(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    options = {}
    there = torch.ones(B, T, dtype=torch.bool, device="cuda")
    if "mask" in how:
        options["attention_mask"], there = mask(how["mask"])
    if how.get("rotary"):
        rotary = te.RotaryPositionEmbedding(H // HEADS)(T)
        torch.testing.assert_close(RotaryPositionEmbedding(H // HEADS)(T), rotary)
        options["rotary_pos_emb"] = rotary
    first = kwargs.get("attn_input_format") != "bshd"
    x = torch.randn((T, B, H) if first else (B, T, H), device="cuda", dtype=torch.bfloat16)
    contexts = (
        lambda: te.autocast(enabled=fp8, recipe=recipe.DelayedScaling(amax_history_len=4)),
        lambda: fp8_autocast(fp8, False, DelayedScaling(amax_history_len=4)),
    )
    for _ in range(3 if fp8 else 1):  # with scales of earlier steps
        theirs.zero_grad(), ours.zero_grad()
        y, dx, grads = run(theirs, x, there, options, contexts[0])
        y2, dx2, grads2 = run(ours, x, there, options, contexts[1])
    tolerance = 0.1 if fp8 else 0.02  # of bf16, and of one FP8 step in a chain of products
    assert grads.keys() == grads2.keys()
    for one, two, what in ((y, y2, "output"), (dx, dx2, "input"), *((grads[n], grads2[n], n) for n in grads)):
        # A softmax does not change with a bias of all keys: both gradients are rounding, beside that of the queries' bias.
        size = grads[what.replace("key_bias", "query_bias")] if what.endswith("key_bias") else one
        error = (one - two).norm() / size.norm().clamp(min=1e-12)
        assert error < tolerance, f"{what}: {error:.4f}"


@needs_te
def test_recipes_print_and_compare_as_the_real_ones():
    from transformer_engine.common import recipe as theirs

    from octavo.compat.te import recipes as ours

    for kind in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"):
        assert repr(getattr(ours, kind)()) == repr(getattr(theirs, kind)())
    arguments = {"margin": 1, "amax_history_len": 7, "amax_compute_algo": "most_recent", "reduce_amax": False}
    assert repr(ours.DelayedScaling(**arguments)) == repr(theirs.DelayedScaling(**arguments))


@needs_te
@pytest.mark.parametrize("layer", ["Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"])
def test_arguments_stand_in_the_order_of_the_real_ones(layer):
    import inspect

    import transformer_engine.pytorch as te

    from octavo.compat.te.signatures import SIGNATURES

    real = {n: p for n, p in inspect.signature(getattr(te, layer).__init__).parameters.items() if n != "self"}
    ours = SIGNATURES[layer].parameters
    positional = [n for n, p in real.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    common = [name for name in positional if name in ours]
    assert [name for name in ours if name in positional] == common
    assert not set(positional[:20]) - set(ours)
    for name in common:
        if name != "device":
            assert ours[name].default == real[name].default, name


def script(*command, ranks=None):
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    line = [sys.executable, *launcher, "-m", "octavo.compat", "--replace-installed", *map(str, command)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=500, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_vision_transformer_of_timm_with_blocks_of_transformer_engine_under_ddp():
    pytest.importorskip("timm")
    losses = [float(line.split()[1]) for line in script(SCRIPTS / "vit_timm.py").splitlines() if line.startswith("loss")]
    assert len(losses) == 8
    assert losses[-1] < losses[0]


def test_an_smp_training_on_a_gpu(tmp_path):
    arguments = ("--checkpoint_dir", tmp_path / "ck", "--distributed_backend", "nccl", "--device", "cuda")
    script(SCRIPTS / "smp_train.py", *arguments, "--model_dir", tmp_path / "model", ranks=1)
    assert (tmp_path / "model" / "pytorch_model.bin").is_file()
