"""Generated calls, read by `octavo migrate` and then made: what is said to run unchanged runs, what is to change first fails.

Each argument of each layer, call, recipe, context and configuration gets values of every kind, most of them wrong. Calls are
drawn anew in each run; a failure names the call.
"""

import inspect
import random

import pytest
import torch

import octavo
from octavo.compat.migrate.report import lines, runs_unchanged
from octavo.compat.migrate.script import read
from octavo.compat.migrate.sources import forward_of
from octavo.compat.smp.configs import MoEConfig, SmpConfig
from octavo.compat.te import recipes
from octavo.compat.te.signatures import SIGNATURES

HEAD = (
    "import torch, torch.nn as nn\nimport transformer_engine.pytorch as te\nimport torch.sagemaker as tsm\n"
    "from transformer_engine.common import recipe\nfrom torch.sagemaker.moe.moe_config import MoEConfig\n"
    "from transformer_engine.pytorch.attention import RotaryPositionEmbedding, apply_rotary_pos_emb\n"
    "from accelerate.utils import TERecipeKwargs\nfrom accelerate.utils.transformer_engine import apply_fp8_autowrap\n"
    "x = torch.randn(4, 2, 16)\nq = torch.randn(4, 2, 2, 8)\nf = torch.randn(4, 1, 1, 8)\n"
)
SIZES = {
    "Linear": "16, 16", "LayerNormLinear": "16, 16", "LayerNormMLP": "16, 32", "GroupedLinear": "2, 16, 16", "LayerNorm": "16",
    "RMSNorm": "16", "DotProductAttention": "2, 8", "MultiheadAttention": "16, 2", "TransformerLayer": "16, 32, 2",
}  # fmt: skip
INPUTS = {"DotProductAttention": ("q, q, q", 3), "GroupedLinear": ("torch.randn(4, 16), [2, 2]", 2)}
VALUES = (
    "True", "False", "None", "0", "1", "-1", "2", "1.5", "-1.0", "0.5", "'nonsense'", "'causal'", "(1, 2)", "(-1, 0)", "[]",
    "{}", "{'a': 1}", "'cpu'", "'1'", "1e400",
)  # fmt: skip
FORMATS = ("recipe.Format.HYBRID", "recipe.Format.E4M3", "recipe.Format.E5M2")
RECIPES = (
    "recipe.MXFP8BlockScaling()", "recipe.NVFP4BlockScaling()", "recipe.DelayedScaling()", "recipe.DelayedScaling(margin=99)",
)  # fmt: skip
LATER = ("tp_size", "tp_group", "global_token_shuffle", "margin=99")
"""Refused as others than one rank, by `transform`, or by an autocast alone."""
EMPTY = ("{}", "[]", "None")
"""Values that some calls take for False."""


def calls():
    for layer, sizes in SIZES.items():
        names, count = list(SIGNATURES[layer].parameters), len(sizes.split(","))
        inputs, inside = INPUTS.get(layer, ("x", 1))
        for value in VALUES:
            yield from (f"te.{layer}({sizes}, {name}={value})" for name in names[count:])
            for at in range(count):
                yield f"te.{layer}({', '.join(value if n == at else part for n, part in enumerate(sizes.split(', ')))})"
            for name in forward_of(layer).names[inside:]:
                yield f"l = te.{layer}({sizes})\nl({inputs}, {name}={value})"
    for kind in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"):
        for name in inspect.signature(getattr(recipes, kind)).parameters:
            for value in (*VALUES, *FORMATS, "'max'", "(False, False, False)", "(False, False, True)"):
                made = f"r = recipe.{kind}({name}={value})\n"
                yield f"{made}with te.fp8_autocast(fp8_recipe=r):\n    te.Linear(128, 128)(torch.randn(128, 128))"
    for name in ("fp8_format", "amax_history_len", "amax_compute_algo", "margin", "interval", "override_linear_precision"):
        for value in (*VALUES, *FORMATS, "'HYBRID'", "'e4m3'", "'E5M2'", "'MAX'", "'16'", "(False, False, True)"):
            yield f"apply_fp8_autowrap(te.Linear(16, 16), TERecipeKwargs({name}={value}))(x)"
    contexts = {
        "fp8_autocast": "enabled calibrating fp8_recipe fp8_group",
        "autocast": "enabled recipe",
        "onnx_export": "enabled",
    }
    for function, names in {**contexts, "fp8_model_init": "enabled recipe preserve_high_precision_init_val"}.items():
        for name in names.split():
            for value in (*VALUES, *RECIPES):
                yield f"r = {value}\nwith te.{function}({name}=r):\n    te.Linear(16, 16)(x)"
    for name in ("tensor_format", "start_positions", "interleaved", "fused", "cu_seqlens", "cp_size", "cp_rank"):
        yield from (f"apply_rotary_pos_emb(q, f, {name}={value})" for value in (*VALUES, "'bshd'", "'bhsd'", "'thd'"))
    for name in SmpConfig.model_fields:
        yield from (f"tsm.init({{'{name}': {value}}})" for value in VALUES)
    for name in inspect.signature(MoEConfig).parameters:
        yield from (f"MoEConfig({name}={value})" for value in (*VALUES, "'aux_loss'"))


@pytest.mark.filterwarnings("ignore")
def test_what_is_said_of_a_generated_call_is_what_happens(tmp_path, names):
    space = {"__name__": "__main__"}
    exec(HEAD, space)
    seen = dict.fromkeys(("runs", "change", "unseen"), 0)
    for text in random.sample(list(calls()), 400):
        (tmp_path / "s.py").write_text(f"{HEAD}{text}\n")
        script = read(tmp_path / "s.py", [tmp_path / "s.py"])
        whole = any(line.startswith("It runs unchanged") for line in lines(script))
        verdict = "change" if not runs_unchanged(script) else "runs" if whole else "unseen"
        seen[verdict] += 1
        torch.manual_seed(0)
        try:
            exec(text, dict(space))
            fault = None
        except Exception as error:  # each has its own
            fault = f"{type(error).__name__}: {error}"
            if "do not fit 1 rank:" in fault:  # a degree that runs on more ranks, which a launcher starts
                fault = None
        octavo.shutdown()
        assert verdict != "runs" or fault is None, (text, fault)
        spared = any(part in text for part in (*LATER, *EMPTY))
        assert verdict != "change" or fault is not None or spared, (text, "is said to change first, and runs")
    assert min(seen.values()) > 20, seen
