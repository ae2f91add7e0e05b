"""Octavo's decoder takes the place of a Hugging Face model only where that is what its config builds."""

import copy
import re

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import octavo
from octavo.models.decoder import Decoder

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ROPES = {
    "default": {"rope_theta": 5e5},
    "linear": {"factor": 2.0, "rope_theta": 1e4},
    "llama3": {
        "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
}  # fmt: skip


def llama(cls=LlamaForCausalLM, **changes):
    return cls(LlamaConfig(**SIZES | changes))


def transformed(model):
    return octavo.transform(model, dtype=torch.float32, params_dtype=torch.float32)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}], ids=str)
def test_what_the_config_builds_becomes_the_decoder(changes):
    assert isinstance(transformed(llama(**changes)), Decoder)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_rotary_scaling_in_every_dtype(rope, dtype):
    model = llama(rope_parameters={"rope_type": rope} | ROPES[rope]).to(dtype)
    assert isinstance(transformed(model), Decoder)


def test_loaded_copied_frozen_resized_and_used_models(tmp_path):
    llama().save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    loaded(torch.zeros(1, 4, dtype=torch.long))
    assert isinstance(transformed(copy.deepcopy(loaded)), Decoder)
    assert isinstance(transformed(llama().requires_grad_(False).eval()), Decoder)
    resized = llama()
    resized.resize_token_embeddings(80)
    assert isinstance(transformed(resized), Decoder)


FAMILIES = {
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "phi3": {"pad_token_id": None},
    "mixtral": {"num_local_experts": 4},
    "gpt_neox": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
}


def of_family(family):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **FAMILIES[family]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_config_of_another_family_builds(family, dtype):
    assert isinstance(transformed(copy.deepcopy(of_family(family)).to(dtype)), Decoder)


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_router_logits"])
def test_a_model_that_has_returned_its_inner_states_is_still_the_same(asked):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SIZES, num_local_experts=2))
    model(torch.zeros(1, 4, dtype=torch.int64), **{asked: True})
    assert isinstance(transformed(model), Decoder)


CHANGED_FAMILIES = {
    "serial": ("gpt_neox", lambda m: setattr(m.gpt_neox.layers[1], "use_parallel_residual", False), "use_parallel_residual is"),
    "dropout": ("gpt_neox", lambda m: setattr(m.gpt_neox.layers[0].post_mlp_dropout, "p", 0.5), r"post_mlp_dropout\.p is 0\.5"),
    "norm": (
        "gpt_neox",
        lambda m: setattr(m.gpt_neox.layers[0], "input_layernorm", nn.RMSNorm(32)),
        "input_layernorm is a RMS",
    ),
    "frequencies": (
        "gpt_neox",
        lambda m: setattr(m.gpt_neox.rotary_emb, "inv_freq", torch.ones(4)),
        "has other rotary frequencies",
    ),
    "query norm": ("qwen3", lambda m: setattr(m.model.layers[0].self_attn, "q_norm", nn.Identity()), "q_norm is a Identity"),
    "bias": ("qwen2", lambda m: setattr(m.model.layers[0].self_attn, "o_proj", nn.Linear(32, 32)), "o_proj.bias is an extra"),
}


@pytest.mark.parametrize("name", CHANGED_FAMILIES)
def test_another_family_that_was_changed_keeps_its_code(name):
    family, edit, reason = CHANGED_FAMILIES[name]
    model = of_family(family)
    edit(model)
    out = transformed(model)
    assert not isinstance(out, Decoder)
    assert re.search(reason, str(octavo.describe(out)))


class Adapter(nn.Linear):
    """LoRA as a subclass."""

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = nn.Parameter(base.weight.detach(), requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, base.in_features) / 8)
        self.up = nn.Parameter(torch.randn(base.out_features, 4) / 8)

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


class Halved(LlamaForCausalLM):
    """A subclass with its own forward."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 2
        return output


def change(edit):
    def make():
        model = llama()
        edit(model)
        return model

    return make


def hooked(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)


CHANGED = {
    "subclass": (lambda: llama(Halved), "Halved is not transformers' LlamaForCausalLM"),
    "lm_head.bias": (change(lambda m: setattr(m, "lm_head", nn.Linear(32, 64))), "lm_head.bias is an extra"),
    "tie by hand": (change(lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight)), "lm_head.weight.* tie"),
    "shared layer": (change(lambda m: m.model.layers.__setitem__(1, m.model.layers[0])), r"layers\.1\..* tie"),
    "adapter": (
        change(lambda m: setattr(m.model.layers[0].self_attn, "q_proj", Adapter(m.model.layers[0].self_attn.q_proj))),
        r"layers\.0\.self_attn\.q_proj is a Adapter",
    ),
    "activation": (change(lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.GELU())), "act_fn is a GELU"),
    "scaling": (change(lambda m: setattr(m.model.layers[0].self_attn, "scaling", 0.3)), r"scaling is 0\.3"),
    "epsilon": (change(lambda m: setattr(m.model.norm, "variance_epsilon", 0.1)), r"variance_epsilon is 0\.1"),
    "config": (change(lambda m: setattr(m.config, "rms_norm_eps", 0.1)), r"where its config says 0\.1"),
    "frequencies": (
        change(lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 2)),
        "has other rotary frequencies",
    ),
    "hook": (change(hooked), "has hooks"),
    **{
        method: (change(lambda m, method=method: getattr(m.model.norm, method)(lambda *given: None)), "norm has hooks")
        for method in (
            *("register_state_dict_pre_hook", "register_state_dict_post_hook"),
            *("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
        )
    },
    "checkpointing": (
        change(lambda m: getattr(m, "activation_checkpointing_enable", m.gradient_checkpointing_enable)()),
        "gradient checkpointing is on",
    ),
    "forward": (
        change(lambda m: setattr(m.lm_head, "forward", lambda x: nn.functional.linear(x, m.lm_head.weight) / 2)),
        "lm_head.forward is overridden",
    ),
    "parameter": (change(lambda m: m.model.norm.register_parameter("own", nn.Parameter(torch.ones(1)))), "own is an extra"),
    "max_norm": (change(lambda m: setattr(m.model.embed_tokens, "max_norm", 0.1)), r"max_norm is 0\.1"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_anything_else_keeps_its_code_and_its_numbers(name):
    torch.manual_seed(0)
    make, reason = CHANGED[name]
    model = make().train()
    ids = torch.randint(64, (2, 8))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    want = model(ids).logits.detach()
    out = transformed(model)
    assert not isinstance(out, Decoder)
    assert sum(p.numel() for p in out.parameters() if p.requires_grad) == trainable
    torch.testing.assert_close(out(ids).logits.detach(), want, rtol=1e-5, atol=1e-6)
    assert re.search(reason, str(octavo.describe(out)))


def test_a_loss_of_its_own_is_kept():
    model = llama()
    model.loss_function = lambda **arguments: arguments["logits"].sum() * 0 + 7.0
    out = transformed(model)
    ids = torch.randint(64, (1, 8))
    assert out(input_ids=ids, labels=ids).loss.item() == 7.0


def test_an_attention_of_the_users_own_keeps_the_models_code():
    ALL_ATTENTION_FUNCTIONS.register("of-the-users-own", ALL_ATTENTION_FUNCTIONS["sdpa"])
    config = LlamaConfig(**SIZES)
    config._attn_implementation = "of-the-users-own"
    model = transformed(LlamaForCausalLM(config))
    assert not isinstance(model, Decoder)
    assert "its attention 'of-the-users-own' is not one of transformers'" in octavo.describe(model).own_code
    for name in ("eager", "sdpa"):
        config = LlamaConfig(**SIZES)
        config._attn_implementation = name
        assert isinstance(transformed(LlamaForCausalLM(config)), Decoder)


def test_experts_of_the_users_own_keep_the_models_code():
    ALL_EXPERTS_FUNCTIONS.register("of-the-users-own", ALL_EXPERTS_FUNCTIONS["batched_mm"])
    for name in ("of-the-users-own", *type(ALL_EXPERTS_FUNCTIONS)._global_mapping, "eager"):
        model = of_family("mixtral")
        model.config._experts_implementation = name
        model = transformed(model)
        assert isinstance(model, Decoder) == (name != "of-the-users-own"), name
        if name == "of-the-users-own":
            assert f"experts run by {name!r}" in octavo.describe(model).own_code
