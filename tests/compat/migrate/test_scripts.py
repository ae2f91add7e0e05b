"""Short scripts, read by `octavo migrate` and then run: what it says of each is what happens."""

import importlib

import pytest
import torch

from octavo.compat.migrate.names import LIBRARIES, OTHERS
from octavo.compat.migrate.report import lines, runs_unchanged
from octavo.compat.migrate.script import read

HEAD = (
    "import functools, torch, torch.nn as nn\nimport transformer_engine.pytorch as te\nimport torch.sagemaker as tsm\n"
    "from transformer_engine.common import recipe\nx = torch.randn(4, 2, 16)\nq = torch.randn(4, 2, 2, 8)\n"
)
RUNS = [
    "m = nn.Module()\nsetattr(m, 'l', te.Linear(16, 16))\nm.l(x, is_first_microbatch=True)",
    "m = nn.Module()\nm.add_module('l', te.Linear(16, 16))\nm.l(x)",
    "m = te.Linear(16, 16)\nm.weight.data.zero_(), m.weight.shape[0], m.fp8_meta['recipe'], m.bias.grad",
    "m = te.Linear(16, 16)\nm(torch.ones(4, 16).float())\nm(torch.arange(16).float())\ntorch.randint(9, (3,))",
    (
        "from torch.distributed.fsdp import MixedPrecision, ShardingStrategy\n"
        "MixedPrecision(param_dtype=torch.bfloat16)\nShardingStrategy.FULL_SHARD"
    ),
    (
        "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper\n"
        "offload_wrapper(nn.Linear(2, 2))"
    ),
    (
        "from accelerate import Accelerator, init_empty_weights\n"
        "with init_empty_weights(include_buffers=True):\n    nn.Linear(2, 2)"
    ),
    "a, b = te.Linear(16, 16), te.Linear(16, 16)\na(b(x))",
    "l = te.Linear(16, 16)\nl(x)",
    "l = te.Linear(in_features=16, out_features=16, bias=True)\nl(inp=x)",
    "l = te.LayerNormLinear(16, 16, normalization='RMSNorm')\nl(x)",
    (
        "l = te.TransformerLayer(16, 32, 2, hidden_dropout=0.0, attention_dropout=0.0)\n"
        "l(x, attention_mask=None, self_attn_mask_type='causal')"
    ),
    "l = te.MultiheadAttention(16, 2, attn_mask_type='padding')",
    "l = te.LayerNorm(16)\nl(x)",
    "l = te.RMSNorm(hidden_size=16)\nl(x)",
    (
        "with te.fp8_autocast(enabled=True, "
        "fp8_recipe=recipe.DelayedScaling(fp8_format=recipe.Format.E4M3)):\n    te.Linear(16, 16)(x)"
    ),
    (
        "r = recipe.DelayedScaling(margin=0, interval=1, fp8_format=recipe.Format.HYBRID, "
        "amax_history_len=16, amax_compute_algo='max')\nwith te.fp8_autocast(True, fp8_recipe=r):\n"
        "    te.Linear(16, 16)(x)"
    ),
    (
        "r = recipe.Float8CurrentScaling(use_power_2_scales=True)\nwith te.fp8_autocast(True, fp8_recipe=r):\n"
        "    te.Linear(16, 16)(x)"
    ),
    "with te.fp8_model_init(enabled=True):\n    te.Linear(16, 16)(x)",
    "with te.fp8_model_init(enabled=False, preserve_high_precision_init_val=True):\n    te.Linear(16, 16)(x)",
    "te.checkpoint(te.Linear(16, 16), x, use_reentrant=False)",
    "l = te.Linear(16, 16)\nte.checkpoint(l, x, distribute_saved_activations=False, tp_group=None)",
    (
        "class N(nn.Module):\n\n    def __init__(self):\n        super().__init__()\n"
        "        self.a = te.Linear(16, 16)\n        self.b = te.LayerNormMLP(16, 32)\n\n"
        "    def forward(self, x):\n        return self.b(self.a(x), is_first_microbatch=None)\nN()(x)"
    ),
    "L = functools.partial(te.Linear, 16, bias=False)\nL(16)(x)",
    "L = functools.partial(te.Linear, 16, 16, 16)\nL()(x)",
    "kw = dict(bias=False)\nkw |= {'name': 'q'}\nte.Linear(16, 16, **kw)(x)",
    "getattr(te, 'Linear')(16, 16)(x)",
    "f = te.Linear\nf(16, 16)(x)\nf = nn.Linear\nf(16, 16)(x)",
    "nn.Sequential(te.Linear(16, 16), te.LayerNorm(16))(x)",
    "te.GroupedLinear(2, 16, 16)(torch.randn(4, 16), [2, 2])",
    "te.DotProductAttention(2, 8)(q, q, q, attn_mask_type='no_mask', window_size=(2, 0))",
    "te.Linear(16, 16, parameters_split=('a', 'b'))(x)",
    "te.Linear(16, 16, tp_size=1, tp_group=None, sequence_parallel=True)(x)",
    (
        "te.TransformerLayer(16, 32, 2, tp_size=1, set_parallel_mode=True, fuse_qkv_params=True, "
        "sequence_parallel=False, params_dtype=torch.bfloat16)"
    ),
    (
        "te.TransformerLayer(16, 32, 2, activation='swiglu', normalization='RMSNorm', output_layernorm=True, "
        "apply_residual_connection_post_layernorm=True, parallel_attention_mlp=False, drop_path_rate=0.1)"
    ),
    "te.TransformerLayer(16, 32, 3)",
    "te.LayerNormMLP(16, 32, activation='clamped_swiglu', activation_params={'limit': 1.0})(x)",
    "te.Linear(16, 16, device='meta')",
    "te.Linear(16, 16, init_method=lambda w: None)(x)",
    "from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as G\nG.is_fp8_enabled()",
    "from transformer_engine.pytorch.attention import RotaryPositionEmbedding\nRotaryPositionEmbedding(8)(4)",
    "te.is_fp8_available(return_reason=True)",
    "te.get_default_recipe()",
    "l = te.Linear(16, 16)\nl.set_tensor_parallel_group(None)",
    "te.LayerNormLinear(16, 16, return_layernorm_output=True)(x)",
    "from torch.sagemaker.nn.attn import FlashSelfAttention\nFlashSelfAttention(attention_dropout_prob=0.0)",
    "(tsm.state.cp_size, tsm.state.hybrid_shard_degree)",
    "tsm.is_initialized()",
    "recipe.DelayedScaling(32)",
    "recipe.DelayedScaling(amax_history_len='16')",
    ("with te.autocast(enabled=True, recipe=recipe.DelayedScaling(), amax_reduction_group=None):\n    te.Linear(16, 16)(x)"),
    "te.Linear(16, 16, True)(x)",
    "te.Linear(16, 16, bias=True, return_bias=True)(x)",
    "te.LayerNorm(16, 1e-05, False)(x)",
    "te.LayerNorm(16, eps=1e-05, sm_margin=1)(x)",
    "te.MultiheadAttention(16, 2, return_bias=True)(x)",
    "l = te.TransformerLayer(16, 32, 2, layer_type='decoder')",
    "l = te.MultiheadAttention(16, 2, attention_type='cross')",
    "te.DotProductAttention(2, 8)(q, q, q, core_attention_bias_type='alibi')",
    "te.TransformerLayer(16, 32, 2, fuse_qkv_params=True, qkv_weight_interleaved=False)",
    (
        "from transformer_engine.pytorch.attention import RotaryPositionEmbedding\n"
        "RotaryPositionEmbedding(8, interleaved=True)(4)"
    ),
    "te.MultiheadAttention(16, 2, qkv_format='bshd', qk_norm_type='L2Normalization')",
]
FAILS = [
    "m = nn.Module()\nsetattr(m, 'l', te.Linear(16, 16))\nm.l(x, fp8_grad=True)",
    "m = nn.Module()\nm.add_module('l', te.Linear(16, 16))\nm.l(x, fp8_grad=True)",
    "class N(nn.Module):\n    def __init__(self):\n        super().__init__()\n        setattr(self, 'l', te.Linear(16, 16))\n"
    "    def forward(self, x):\n        return self.l(x, fp8_grad=True)\nN()(x)",
    "te.Linear(16, 16).init_fp8_metadata()",
    "m = te.Linear(16, 16)\nm.get_fp8_weights_scratchpad(True)",
    "from torch.sagemaker.moe.moe_config import MoEConfig\nfrom transformers import MixtralConfig, AutoModelForCausalLM\n"
    "small = MixtralConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,\n"
    "    num_key_value_heads=2, num_local_experts=2)\ntsm.init({'expert_parallel_degree': 1})\n"
    "tsm.transform(AutoModelForCausalLM.from_config(small), config=MoEConfig(global_token_shuffle=True))",
    "with te.fp8_autocast(enabled=True, fp8_recipe=recipe.MXFP8BlockScaling()):\n    te.Linear(16, 16)(x)",
    (
        "r = recipe.Float8CurrentScaling(fp8_gemm_fprop=recipe.MMParams(use_split_accumulator=True))\n"
        "with te.fp8_autocast(True, fp8_recipe=r):\n    te.Linear(16, 16)(x)"
    ),
    "r = recipe.MXFP8BlockScaling()\nwith te.fp8_autocast(enabled=True, fp8_recipe=r):\n    te.Linear(16, 16)(x)",
    "R = recipe\nr = R.NVFP4BlockScaling()\nkw = {'recipe': r}\nwith te.autocast(**kw):\n    te.Linear(16, 16)(x)",
    "from accelerate.utils import TERecipeKwargs\nfrom accelerate.utils.transformer_engine import apply_fp8_autowrap\n"
    "apply_fp8_autowrap(nn.Linear(2, 2), TERecipeKwargs(override_linear_precision=(False, False, True)))",
    "from accelerate.utils import TERecipeKwargs\nfrom accelerate.utils.transformer_engine import apply_fp8_autowrap\n"
    "apply_fp8_autowrap(nn.Linear(2, 2), TERecipeKwargs(fp8_format='E5M2'))",
    "from accelerate.utils import TERecipeKwargs\nfrom accelerate.utils.transformer_engine import apply_fp8_autowrap\n"
    "apply_fp8_autowrap(nn.Linear(2, 2), TERecipeKwargs(amax_history_len=0))(x[..., :2])",
    "from transformer_engine.pytorch.attention import apply_rotary_pos_emb\n"
    "apply_rotary_pos_emb(q, torch.randn(4, 1, 1, 8), tensor_format='bhsd')",
    "from transformer_engine.pytorch.attention import apply_rotary_pos_emb as turn\n"
    "turn(q, torch.randn(4, 1, 1, 8), cp_size=2, cp_rank=2)",
    "te.DotProductAttention(2, 8)(q, q, q, softcap=-1.0)",
    "l = te.MultiheadAttention(16, 2)\nl(x, softcap=-1.0)",
    "te.DotProductAttention(2, 8, softcap=-1.0)",
    "te.TransformerLayer(16, 32, 2, layer_type='decoder', parallel_attention_mlp=True)",
    "te.DotProductAttention(2, 8)(q, q, q, attn_mask_type='padding', cu_seqlens_q=torch.tensor([0, 4, 8]))",
    "te.MultiheadAttention(16, 2)(x, attn_mask_type='padding', cu_seqlens_kv=torch.tensor([0, 4, 8]))",
    "te.DotProductAttention(2, 8)(q, q, q, core_attention_bias_type='alibi', softcap=1.0)",
    "te.DotProductAttention(2, 8)(q, q, q, core_attention_bias_type='post_scale_bias')",
    "te.Linear(16, 16, bias=True, **{'bias': False})",
    "from torch.sagemaker.nn.attn import FlashSelfAttention\nFlashSelfAttention()((q, q, q), layout='b s d h')",
    "from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue as A\na = A()\n"
    "a.maybe_finalize_async_calls(nonsense=1)",
    "from transformer_engine.pytorch.attention import RotaryPositionEmbedding as R\nR(8)(4, nonsense=1)",
    "from accelerate import Accelerator\na = Accelerator(cpu=True)\na.clip_grad_norm_([x], max_nrm=1.0)",
    "te.LayerNormMLP(16, 32, activation='clamped_swiglu', activation_params={'nope': 1})",
    "kw = {k: v for k, v in [('nonsense', 1)]}\nte.Linear(16, 16, **kw)(x)",
    "kw = {'in_features': 16}\nte.Linear(16, 16, **kw)",
    "te.Linear(16, 16, parameters_split=('a', 'b', 'c'))",
    "tsm.init({'hybrid_shard_degree': 2, 'context_parallel_degree': 4})",
    "tsm.init({'random_seed': -1})",
    "from torch.sagemaker.nn.attn import FlashSelfAttention\nFlashSelfAttention(use_alibi=True)",
    "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nFSDP.nothing",
    "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nFSDP(nn.Linear(2, 2), nonsense=1)",
    "from torch.distributed.fsdp import MixedPrecision\nMixedPrecision(nonsense=1)",
    "from torch.distributed.fsdp import ShardingStrategy\nShardingStrategy.NOTHING",
    ("from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper\noffload_wrapper(x, nonsense=1)"),
    "from accelerate import Accelerator\nAccelerator(nonsense=1)",
    "from accelerate.utils import TERecipeKwargs\nTERecipeKwargs(nonsense=1)",
    "import transformer_engine_torch",
    "a, b = te.Linear(16, 16), te.Linear(16, 16)\na(x, nonsense=1)",
    "te.Linear(16, 16, in_features=16)",
    "l = te.Linear(16, 16)\nl(input=x)",
    "l = te.LayerNormLinear(16, 16, normalization='rms')\nl(x)",
    "l = te.TransformerLayer(16, 32, 2)\nl(x, self_attn_mask_type='nothing')",
    "l = te.LayerNorm()",
    (
        "with te.fp8_autocast(enabled=True, "
        "fp8_recipe=recipe.DelayedScaling(fp8_format=recipe.Format.E5M2)):\n    te.Linear(16, 16)(x)"
    ),
    (
        "r = recipe.Float8BlockScaling(fp8_format=recipe.Format.HYBRID)\n"
        "with te.fp8_autocast(True, fp8_recipe=r):\n    te.Linear(16, 16)(x)"
    ),
    "with te.fp8_model_init(enabled=True, preserve_high_precision_init_val=True):\n    te.Linear(16, 16)(x)",
    "te.checkpoint(te.Linear(16, 16), x, nonsense=1)",
    "getattr(te, 'Linear')(16, 16, nonsense=1)(x)",
    "te.GroupedLinear(2, 16, 16)(torch.randn(4, 16))",
    "te.TransformerLayer(16, 32, 2, drop_path_rate=1.5)",
    "te.TransformerLayer(16, 32, 2, num_gqa_groups=3)",
    "te.LayerNormMLP(16, 32, activation='gelu', activation_params={'limit': 1.0})",
    "from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as G\nG.get_nothing()",
    "te.Linear.from_nothing(1)",
    "from torch.sagemaker.moe.moe_config import MoEConfig\nMoEConfig(moe_load_balancing='even')",
    "from torch.sagemaker.moe.moe_config import MoEConfig\nMoEConfig(moe_aux_loss_coeff=-1)",
    "from torch.sagemaker.nn.attn import FlashSelfAttention\nFlashSelfAttention(dropout=0.0)",
    "tsm.state.cfg.nothing",
    "tsm.state.ranker.get_nothing(0)",
    "tsm.init({'tensor_parallel_degree': 2, 'expert_parallel_degree': 3})",
    "tsm.transform(nn.Linear(2, 2), cp_comm_type='ring')",
    "recipe.DelayedScaling(fp8_format='HYBRID')",
    "te.Linear(16)",
    "te.Linear(16, 16, 16, 16, 16, 16, 'a', 'b', 'c', 'd', 'e')",
    "te.MultiheadAttention(16, 2, input_layernorm=True, normalization='BatchNorm')",
]
NOT_RESOLVED = [
    "m = nn.Sequential(te.Linear(16, 16))\nm[0](x, fp8_grad=True)",
    "m = nn.Sequential(te.Linear(16, 16))\nm.get_submodule('0')(x, fp8_grad=True)",
    "m = nn.Sequential(te.Linear(16, 16))\nl = m[0]\nl(x, fp8_grad=True)",
    "m = nn.Sequential(te.Linear(16, 16))\nfor l in m:\n    l(x, fp8_grad=True)",
    "m = nn.Sequential(te.Linear(16, 16))\nfor n, l in m.named_children():\n    l.forward(x, fp8_grad=True)",
    "m = nn.Sequential(te.Linear(16, 16))\nnext(m.children())(x, None, False, True)",
    "m = nn.Sequential(te.Linear(16, 16))\ngetattr(m, '0')(x, fp8_grad=True)",
    "m = nn.Sequential(te.DotProductAttention(2, 8))\nm[0](q)",
    "def f(m=te.Linear(16, 16)):\n    m(x, fp8_grad=True)\nf()",
    "m = nn.Module()\nfor n in ('l',):\n    setattr(m, n, te.Linear(16, 16))\nm.l(x, fp8_grad=True)",
    "m = nn.Module()\nfor n in ('l',):\n    m.add_module(n, te.Linear(16, 16))\nm.l(x, fp8_grad=True)",
    "m = te.MultiheadAttention(16, 2)\nm.qkv.weight",
    "m = te.TransformerLayer(16, 32, 2)\nm.self_attention.qkv.weight",
    "m = te.Linear(16, 16)\nm.fp8_meta['recipe'] = None",
    "m = te.Linear(16, 16)\nm.fp8_meta['nothing']",
    "m = te.Linear(16, 16)\nwith te.fp8_autocast():\n    m(x)\nm.fp8_meta['scaling_fwd'].scale[0] = 2",
    "m = te.Linear(16, 16)\nm.fp8_meta['scaling_fwd'].scale.fill_(2)",
    "m = te.Linear(16, 16)\nm.use_bias = False",
    "m = te.Linear(16, 16)\nm.weight._data",
    "m = te.LayerNormLinear(16, 16)\nm(torch.randn(4, 16, dtype=torch.float64))",
    "m = te.LayerNormLinear(16, 16)\nm(x.to(torch.double))",
    "m = te.Linear(16, 16)\nm(torch.randint(9, (4, 16)))",
    "m = te.Linear(16, 16)\ny = torch.ones(4, 16, dtype=torch.int64)\nm(y)",
    "m = te.Linear(16, 16)\nm(x.long())",
    "m = te.Linear(16, 16)\ny = torch.arange(16) * 2\nm(inp=y)",
]
"""Scripts that a run refuses where reading them does not resolve it."""
UNSEEN = [
    "from torch.sagemaker.moe.moe_config import MoEConfig\nMoEConfig(moe_load_balancing='sinkhorn', global_token_shuffle=True)",
    "l = te.DotProductAttention(2, 8, attn_mask_type='padding')\nl(q, q, q)",
    "l = te.DotProductAttention(2, 8, qkv_format='thd', attn_mask_type='padding')\nl(q[0], q[0], q[0])",
    "l = te.TransformerLayer(16, 32, 2, attn_input_format='thd')\nl(x.flatten(0, 1))",
    "l = te.MultiheadAttention(16, 2, attention_type='cross')\nl(x)",
    "l = te.TransformerLayer(16, 32, 2, layer_type='decoder')\nl(x)",
    "l = te.TransformerLayer(16, 32, 2)\nl(x, encoder_output=x)",
    "l = te.TransformerLayer(16, 32, 2)\nl(x, self_attn_mask_type='arbitrary')",
    "l = te.DotProductAttention(2, 8)\nl.set_context_parallel_group(3)",
    "t = te.CudaRNGStatesTracker()\nt.add('a', 1)\nt.add('a', 2)",
    "with te.fp8_autocast():\n    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as G\n    G.reset()",
    "from octavo.launch import PyTorch\nPyTorch.attach('no-such-job')",
    "from sagemaker.pytorch import PyTorch\nPyTorch.attach('no-such-job')",
    "from torch.sagemaker.grad_norm import clip_grad_norm_\nclip_grad_norm_(nn.Linear(2, 2), max_nrm=1.0)",
    "from torch.sagemaker.nn.attn import FlashSelfAttention\nf = FlashSelfAttention()\nf((q, q, q), attn_mask=x)",
    "r = recipe.DelayedScaling()\nr.margin = 99\nwith te.fp8_autocast(fp8_recipe=r):\n    te.Linear(16, 16)(x)",
    "r = build()\nwith te.fp8_autocast(fp8_recipe=r):\n    te.Linear(16, 16)(x)",
    ("class N(te.Linear):\n\n    def __init__(self, *args, extra=0):\n        super().__init__(*args)\nN(16, 16, extra=1)(x)"),
    ("class N(te.Linear):\n\n    def __init__(self, n, **kw):\n        super().__init__(n, n, **kw)\nN(16, bias=False)(x)"),
    ("class N(te.Linear):\n\n    def __init__(self, n, **kw):\n        super().__init__(n, n, **kw)\nN(16, nonsense=False)(x)"),
    "kw = {k: v for k, v in ask()}\nte.Linear(16, 16, **kw)(x)",
    "mods = [te.Linear(16, 16) for _ in range(2)]\nfor m in mods:\n    m(x)",
    "nn.ModuleDict({'a': te.Linear(16, 16)})['a'](x, nonsense=1)",
    "l = te.Linear(16, 16)\nl.weight.sum()\nl.nothing_here",
]


def _verdict(tmp_path, text):
    (tmp_path / "s.py").write_text(f"{HEAD}{text}\n")
    script = read(tmp_path / "s.py", [tmp_path / "s.py"])
    whole = any(line.startswith("It runs unchanged") for line in lines(script))
    return "change" if not runs_unchanged(script) else "runs" if whole else "unseen"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", RUNS)
def test_what_is_said_to_run_unchanged_runs(tmp_path, names, text):
    torch.manual_seed(0)
    assert _verdict(tmp_path, text) == "runs"
    exec(f"{HEAD}{text}", {"__name__": "__main__"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", FAILS)
def test_what_is_said_to_change_first_fails(tmp_path, names, text):
    assert _verdict(tmp_path, text) == "change"
    with pytest.raises(Exception):  # noqa: B017 - each has its own
        exec(f"{HEAD}{text}", {"__name__": "__main__"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("text", NOT_RESOLVED)
def test_what_is_not_resolved_is_not_said_to_run_unchanged(tmp_path, names, text):
    assert _verdict(tmp_path, text) != "runs"
    with pytest.raises(Exception):  # noqa: B017 - each has its own
        exec(f"{HEAD}{text}", {"__name__": "__main__"})


@pytest.mark.parametrize("text", UNSEEN)
def test_what_cannot_be_told_is_said_to_run_as_far_as_it_is_read(tmp_path, text):
    assert _verdict(tmp_path, text) == "unseen"


def test_names_that_other_packages_have_dropped_are_told(tmp_path):
    (tmp_path / "s.py").write_text(
        "import transformer_engine.pytorch as te\nfrom datasets import load_dataset, load_metric\n"
        "from transformers.models.llama import modeling_llama\ntry:\n    from transformers import AdamW\n"
        "except ImportError:\n    from torch.optim import AdamW\n"
        "te.Linear(16, 16)\nprint(modeling_llama.LlamaSdpaAttention, modeling_llama.LlamaRMSNorm)\n"
    )
    script = read(tmp_path / "s.py")
    gone = {use.name: use.row.status for use in script.uses if use.library == OTHERS}
    assert gone == {
        "datasets.load_metric": "absent",
        "transformers.models.llama.modeling_llama.LlamaSdpaAttention": "absent",
        "transformers.AdamW": "differs",  # by its own except
    }
    assert lines(script)[-1].startswith("To change first: datasets.load_metric (line 2), transformers.models.llama.")


@pytest.mark.parametrize("name", sorted(name for name, library in LIBRARIES.items() if library == OTHERS))
def test_such_names_are_not_in_the_installed_packages(name):
    module, _, last = name.rpartition(".")
    assert not hasattr(importlib.import_module(module), last)


def test_arguments_of_fsdp_have_their_effect_where_nothing_of_smp_is_used(tmp_path):
    text = (
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision\n"
        "model = FSDP(model, auto_wrap_policy=policy, use_orig_params=True, mixed_precision=MixedPrecision())\n"
    )
    (tmp_path / "s.py").write_text(text)
    assert {use.row.status for use in read(tmp_path / "s.py").uses} == {"same"}
    (tmp_path / "s.py").write_text(f"import torch.sagemaker as tsm\n{text}")
    assert {use.row.status for use in read(tmp_path / "s.py").uses} == {"same", "accepted", "differs"}


def test_sagemakers_backend_needs_no_gpu_here(tmp_path):
    start = "import torch.sagemaker as tsm\nimport torch.distributed as dist\ndist.init_process_group('{}')\ntsm.init()\n"
    for backend, count in (("smddp", 0), ("nccl", 1)):
        (tmp_path / "s.py").write_text(start.format(backend))
        assert len(read(tmp_path / "s.py").needs_gpu) == count
