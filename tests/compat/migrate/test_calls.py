"""Calls of layers, recipes and contexts: what `octavo migrate` says of one is what the compatibility layer does."""

import inspect

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from octavo.compat.migrate import limits
from octavo.compat.migrate.names import _FSDP_ARGUMENTS
from octavo.compat.migrate.report import lines, runs_unchanged
from octavo.compat.migrate.script import read
from octavo.compat.migrate.sources import forward_of, signature_of
from octavo.compat.te import attention, layers, recipes
from octavo.errors import InputError
from octavo.fp8.recipe import coerce

HEAD = "import functools\nimport torch.nn as nn\nimport transformer_engine.pytorch as te\nimport torch.sagemaker as tsm\n"
SIZES = {
    "Linear": (16, 16), "LayerNormLinear": (16, 16), "LayerNormMLP": (16, 32), "GroupedLinear": (2, 16, 16), "LayerNorm": (16,),
    "RMSNorm": (16,), "DotProductAttention": (2, 8), "MultiheadAttention": (16, 2), "TransformerLayer": (16, 32, 2),
}  # fmt: skip
OTHERS = {
    "tp_size": 2, "tp_group": 3, "window_size": [1, 2, 3], "parallel_mode": "row", "attention_dropout": 1.0,
    "hidden_dropout": -1.0,
}  # fmt: skip


def _class(layer):
    return getattr(layers, layer, None) or getattr(attention, layer)


def _read(tmp_path, text):
    (tmp_path / "s.py").write_text(f"{HEAD}{text}\n")
    return read(tmp_path / "s.py", [tmp_path / "s.py"])


def _absent(script):
    return [use.name.rpartition(".")[2] for use in script.uses if use.row is None or use.row.status == "absent"]


@pytest.mark.parametrize("layer", SIZES)
def test_values_that_are_refused_are_those_that_the_layer_refuses(layer):
    for name, limit in limits._of_layers()[layer].items():
        if name == "tp_group":
            continue
        value = OTHERS.get(name, True if limit.allows(False) and not limit.allows(True) else "nonsense")
        given = {name: value} | ({"tp_size": 2} if name in limits._TP else {})
        given |= {"fuse_qkv_params": True} if name == "qkv_weight_interleaved" else {}
        given |= {"input_layernorm": True} if (layer, name) == ("MultiheadAttention", "normalization") else {}
        assert [each[0] for each in limits.refused(f"transformer_engine.pytorch.{layer}", given)].count(name) == 1, name
        with pytest.raises((InputError, TypeError, ValueError, NotImplementedError)):
            _class(layer)(*SIZES[layer], **given)
        if name in limits._TP:
            alone = given | {"tp_size": 1, "normalized_shape": 16}
            assert not list(limits.refused(f"transformer_engine.pytorch.{layer}", alone))


@pytest.mark.parametrize("layer", SIZES)
def test_arguments_of_a_call_are_those_of_the_layers_forward(layer):
    found = forward_of(layer)
    module = _class(layer)(*SIZES[layer], **({"device": "cpu"} if layer != "DotProductAttention" else {}))
    x = torch.randn(4, 2, 16)
    inputs = {"DotProductAttention": (torch.randn(4, 2, 2, 8),) * 3, "GroupedLinear": (torch.randn(4, 16), [2, 2])}.get(
        layer, (x,)
    )
    assert found.required == (() if layer == "DotProductAttention" else found.names[: len(inputs)])  # or one joint tensor
    with pytest.raises((InputError, TypeError)):
        module(*inputs, nonsense=1)
    own = {"delta", "rotation", "return_residual"}  # of Octavo's blocks
    for name in set(found.names[len(inputs) :]) - own:
        allowed = {
            "fp8_output": False,
            "fp8_grad": False,
            "checkpoint_core_attention": False,
            "core_attention_bias_type": "no_bias",
        }
        module(*inputs, **{name: allowed.get(name)})
    for name, limit in limits._of_layers().get(f"{layer}.forward", {}).items():
        value = OTHERS.get(name, True if limit.allows(False) and not limit.allows(True) else "nonsense")
        assert not limit.allows(value), name
        with pytest.raises((InputError, TypeError, ValueError)):
            module(*inputs, **{name: value})


@pytest.mark.parametrize(
    ("recipe", "values"),
    [
        (
            "DelayedScaling",
            {"amax_compute_algo": "least", "fp8_dpa": True, "fp8_mha": True, "margin": 99, "amax_history_len": 0},
        ),
        ("DelayedScaling", {"backward_override": "x", "override_linear_precision": (False, True, False)}),
        ("Float8CurrentScaling", {"fp8_dpa": True, "backward_override": "high_precision"}),
        (
            "Float8BlockScaling",
            {"x_block_scaling_dim": 2, "w_block_scaling_dim": 1, "grad_block_scaling_dim": 2, "fp8_mha": True},
        ),
        ("Float8BlockScaling", {"use_f32_scales": True}),
    ],
)
def test_values_of_recipes_that_are_refused_are_those_that_an_autocast_refuses(recipe, values):
    for name, value in values.items():
        dotted, shown = f"transformer_engine.common.recipe.{recipe}", list(value) if isinstance(value, tuple) else value
        assert [each[0] for each in limits.refused(dotted, {name: shown})] == [name]
        with pytest.raises((InputError, AssertionError, ValueError)):
            coerce(getattr(recipes, recipe)(**{name: value}))
    for name, default in inspect.signature(getattr(recipes, recipe)).parameters.items():
        if isinstance(default.default, bool | int | str):
            assert not list(limits.refused(f"transformer_engine.common.recipe.{recipe}", {name: default.default})), name


def test_arguments_of_fsdp_are_pytorchs():
    assert list(_FSDP_ARGUMENTS[:-1]) == list(inspect.signature(FullyShardedDataParallel.__init__).parameters)[1:]
    assert signature_of("octavo.compat.te.recipes", "DelayedScaling").required == ()


REFUSED = [
    ("te.Linear(8)", "Linear(…)"),
    ("te.Linear(8, 8, 8, 8, **{'nonsense': 1})", "Linear(nonsense=)"),
    ("te.RMSNorm(8, 1e-5, False, None, True, None, None, 'cpu', 9)", "RMSNorm(…)"),
    ("l = te.Linear(8, 8)\nl(x, nonsense=1)", "forward(nonsense=)"),
    ("l = te.Linear(8, 8)\nl.forward(x, nonsense=1)", "forward(nonsense=)"),
    ("l: nn.Module = te.Linear(8, 8)\nl()", "forward(…)"),
    ("te.Linear(8, 8)(x, fp8_output=True)", "forward(fp8_output=True)"),
    ("l = te.Linear(8, 8).to('cpu')\nl(x, nonsense=1)", "forward(nonsense=)"),
    (
        "class N(nn.Module):\n def __init__(s):\n  s.f = 1\n  self = s\n  self.f = te.Linear(8, 8)\n def forward(self, x):\n"
        "  return self.f(x, None, False, False, 1)",
        "forward(…)",
    ),
    ("def go(m, x):\n return m(x, nonsense=1)\ngo(te.Linear(8, 8), x)", "forward(nonsense=)"),
    ("class A:\n def go(self, m):\n  m(x, nonsense=1)\nA().go(te.Linear(8, 8))", "forward(nonsense=)"),
    ("l = te.Linear(8, 8) if flag() else te.Linear(8, 16)\nl(x, nonsense=1)", "forward(nonsense=)"),
    ("class L(te.Linear):\n pass\nL(8, 8, nonsense=1)", "Linear(nonsense=)"),
    ("class L(te.Linear):\n pass\nl = L(8, 8)\nl(x, nonsense=1)", "forward(nonsense=)"),
    ("class L(te.Linear):\n def __init__(self):\n  super().__init__(8, 8, nonsense=1)", "Linear(nonsense=)"),
    ("class L(te.Linear):\n def __init__(self):\n  te.Linear.__init__(self, 8, 8, nonsense=1)", "Linear(nonsense=)"),
    ("class L(te.Linear):\n def forward(self, x):\n  return super().forward(x, nonsense=1)", "forward(nonsense=)"),
    ("L = functools.partial(te.Linear, bias=False)\nL(8, 8, nonsense=1)", "Linear(nonsense=)"),
    ("functools.partial(te.Linear, nonsense=1)", "Linear(nonsense=)"),
    ("def make(**kw):\n return te.Linear(8, 8, **kw)\nmake(nonsense=1)", "Linear(nonsense=)"),
    ("te.Linear(8, 8, ub_overlap_ag=True)", "Linear(ub_overlap_ag=True)"),
    ("te.LayerNormMLP(8, 8, activation='nothing')", "LayerNormMLP(activation='nothing')"),
    ("te.TransformerLayer(16, 16, 2, tp_size=2)", "TransformerLayer(tp_size=2)"),
    ("tsm.init({'tensor_parallel_degree': 2, 'expert_parallel_degree': 3})", "expert_parallel_degree=3)"),
    ("tsm.init({'tensor_paralel_degree': 1})", "init(config='tensor_paralel_degree')"),
    ("te.Linear.nothing(1)", "nothing"),
    ("from torch.sagemaker import transform\ntransform(m, cp_comm_type='a2a')", "transform(cp_comm_type='a2a')"),
    ("te.fp8_autocast(fp8_recipe='delayed')", "fp8_autocast(fp8_recipe='delayed')"),
]


@pytest.mark.parametrize(("text", "name"), REFUSED)
def test_a_call_that_fails_is_to_change_first(tmp_path, text, name):
    script = _read(tmp_path, text)
    assert any(each.endswith(name) for each in _absent(script)), (_absent(script), script.notes)
    assert not runs_unchanged(script)
    assert lines(script)[-1].startswith("To change first")


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("class L(te.Linear):\n def __init__(self, **kw):\n  super().__init__(8, 8, **kw)", "arguments of transformer_engine"),
        ("layers = nn.ModuleList([te.Linear(8, 8)])\nlayers[0](x, nonsense=1)", "is put into a list: its calls"),
        ("def make():\n return te.Linear(8, 8)\nmake()(x, nonsense=1)", "is returned: its calls there are not seen"),
        ("g = lambda: te.Linear(8, 8)\ng()(x, no=1)", "is returned: its calls there are not seen"),
        ("d = {}\nd['a'] = te.Linear(8, 8)\nd['a'](x, no=1)", "is put where it has no name"),
        ("l = other() or te.Linear(8, 8)\nl(x, no=1)", "is one of several"),
        ("def f(n):\n return f(n - 1) if n else te.Linear(8, 8)\nf(1)(x, no=1)", "is one of several"),
        ("run(te.Linear(8, 8))", "is given to run: its calls there are not seen"),
        ("l = te.Linear(8, 8)\nl = nn.Linear(8, 8)\nl(x, nonsense=1)", "if transformer_engine.pytorch.Linear.forward is"),
        ("te.Linear(8, 8, tp_group=group())", "the value of tp_group is known only at run time"),
        ("te.Linear(8, 8, fuse_wgrad_accumulation=flag())", "the value of fuse_wgrad_accumulation is known only at run time"),
        ("from torch.sagemaker.moe.moe_config import MoEConfig as C\nC(global_token_shuffle=flag())", "transform refuses"),
        ("tsm.init(config())", "the value of config is known only at run time"),
        ("if flag():\n from torch.nn import Linear\nelse:\n from transformer_engine.pytorch import Linear\nLinear(8, 8, no=1)",
         "if transformer_engine.pytorch.Linear is called here, it fails"),
        ("exec('te.nothing()')", "exec runs text, whose uses are not seen"),
        ("build(te.Linear)", "transformer_engine.pytorch.Linear is given to build"),
    ],
)  # fmt: skip
def test_a_call_that_is_not_seen_whole_is_listed(tmp_path, text, note):
    script = _read(tmp_path, text)
    assert any(note in each for each in script.notes), script.notes
    assert not any(line.startswith("It runs unchanged") for line in lines(script))


@pytest.mark.parametrize(
    "text",
    [
        "l = te.Linear(8, 8, ub_name='x', sequence_parallel=True, parallel_mode='row')\nl(x, is_first_microbatch=True)",
        "m = nn.Sequential(te.Linear(8, 8), nn.ReLU())\nm(x)",
        "from torch.distributed.fsdp import FullyShardedDataParallel as F\nm = te.TransformerLayer(16, 16, 2)\nm = F(m)\n"
        "m(x, attention_mask=None)",
        "class N(nn.Module):\n def __init__(self):\n  self.f = te.Linear(8, 8)\n def forward(self, x):\n  self.f(x)\nN()",
        "from transformer_engine.common.recipe import DelayedScaling, Format\nr = DelayedScaling(fp8_format=Format.HYBRID)\n"
        "with te.fp8_autocast(enabled=True, fp8_recipe=r):\n pass",
        "L = functools.partial(te.Linear, bias=False)\nL(8, 8)",
        "tsm.init({'tensor_parallel_degree': 2, 'hybrid_shard_degree': 8})",
        "tsm.init({'tensor_parallel_degree': degree(), 'hybrid_shard_degree': 8})",
        "ok = False\nif ok:\n te.nothing(1)\nte.Linear(8, 8)",
        "l = te.Linear(8, 8)\nassert isinstance(l, te.Linear)\nprint(l)",
    ],
)
def test_a_call_that_is_seen_whole_runs_unchanged(tmp_path, text):
    script = _read(tmp_path, text)
    assert runs_unchanged(script)
    assert script.notes == []


def test_pytorchs_own_fsdp_keeps_its_arguments(tmp_path):
    text = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nFSDP(m, group, ignored_modules=[a])\n"
    (tmp_path / "s.py").write_text(text)
    assert runs_unchanged(read(tmp_path / "s.py"))
    (tmp_path / "s.py").write_text(f"import torch.sagemaker as tsm\nm = tsm.transform(n)\n{text}")
    assert len(_absent(read(tmp_path / "s.py"))) == 2


def test_methods_of_fsdp_that_a_transformed_model_refuses_are_to_change_first(tmp_path):
    text = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nwith FSDP.summon_full_params(m):\n    pass\n"
    (tmp_path / "s.py").write_text(text)
    assert runs_unchanged(read(tmp_path / "s.py"))
    (tmp_path / "s.py").write_text(f"import torch.sagemaker as tsm\nm = tsm.transform(n)\n{text}")
    assert _absent(read(tmp_path / "s.py")) == ["summon_full_params"]
