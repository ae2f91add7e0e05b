"""Transformer Engine's names, order and defaults: what is accepted, what it does, what is refused."""

# ruff: noqa: C408

import copy
import functools
import inspect

import plain
import pytest
import torch
from torch.nn import functional

import octavo
from octavo.errors import InputError
from octavo.nn.arguments import ACTIVATIONS, ARGUMENTS

# Every optional argument of Transformer Engine 2.20.2 with its default.
CONSTRUCTORS = {
    "Linear": dict(
        sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, get_rng_state_tracker=None,
        rng_tracker_name=None, init_method=None, bias=True, return_bias=False, params_dtype=None, parallel_mode=None,
        parameters_split=None, device="cuda", ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None,
        save_original_input=False, name=None,
    ),
    "GroupedLinear": dict(
        sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1, get_rng_state_tracker=None,
        rng_tracker_name=None, init_method=None, bias=True, return_bias=False, params_dtype=None, parallel_mode=None,
        device="cuda", ub_overlap_rs=False, ub_overlap_ag=False, ub_name=None, delay_wgrad_compute=False,
        save_original_input=False, single_grouped_weight=False, single_grouped_bias=False, name=None,
        use_grouped_tensor=None,
    ),
    "LayerNormLinear": dict(
        eps=1e-05, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None, tp_size=1,
        get_rng_state_tracker=None, init_method=None, bias=True, normalization="LayerNorm", return_bias=False,
        params_dtype=None, parallel_mode=None, return_layernorm_output=False, return_layernorm_output_gathered=False,
        parameters_split=None, zero_centered_gamma=False, device="cuda", ub_overlap_ag=False, ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False, ub_name=None, delay_wgrad_compute=False,
        symmetric_ar_type=None, name=None,
    ),
    "LayerNormMLP": dict(
        eps=1e-05, sequence_parallel=False, return_bias=False, get_rng_state_tracker=None, tp_group=None, tp_size=1,
        init_method=None, bias=True, normalization="LayerNorm", activation="gelu", activation_params=None,
        output_layer_init_method=None, fuse_wgrad_accumulation=False, params_dtype=None,
        return_layernorm_output=False, return_layernorm_output_gathered=False, seq_length=None, micro_batch_size=None,
        set_parallel_mode=False, zero_centered_gamma=False, device="cuda", ub_overlap_ag=False, name=None,
        ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False,
        delay_wgrad_compute=False, symmetric_ar_type=None, checkpoint=False,
    ),
    "LayerNorm": dict(
        normalized_shape=None, eps=1e-05, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False,
        hidden_size=None,
    ),
    "RMSNorm": dict(
        normalized_shape=None, eps=1e-05, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False,
        hidden_size=None,
    ),
    "DotProductAttention": dict(
        num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal", window_size=None,
        bottom_right_diagonal=None, softcap=0.0, sequence_parallel=False, tp_size=1, get_rng_state_tracker=None,
        tp_group=None, layer_number=None, attention_type="self", cp_group=None, cp_global_ranks=None, cp_stream=None,
        cp_comm_type="p2p", softmax_scale=None, softmax_type="vanilla", return_max_logit=False, name=None,
    ),
    "MultiheadAttention": dict(
        kv_channels=None, attention_dropout=0.1, layernorm_epsilon=1e-05, init_method=None,
        output_layer_init_method=None, layer_number=None, attn_mask_type="causal", window_size=None,
        bottom_right_diagonal=None, softcap=0.0, tp_group=None, tp_size=1, num_gqa_groups=None,
        fuse_wgrad_accumulation=False, get_rng_state_tracker=None, sequence_parallel=False, params_dtype=None,
        return_bias=False, return_layernorm_output=False, input_layernorm=False, attention_type="self",
        set_parallel_mode=False, fuse_qkv_params=False, zero_centered_gamma=False, qkv_weight_interleaved=True,
        rotary_pos_interleaved=False, ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False, ub_bulk_wgrad=False, bias=True, normalization="LayerNorm", device="cuda",
        qkv_format="sbhd", name=None, qk_norm_type=None, qk_norm_eps=1e-06, qk_norm_before_rope=False,
        seq_length=None, micro_batch_size=None, softmax_type="vanilla",
    ),
    "TransformerLayer": dict(
        num_gqa_groups=None, layernorm_epsilon=1e-05, hidden_dropout=0.1, attention_dropout=0.1, init_method=None,
        output_layer_init_method=None, layer_number=None, kv_channels=None, self_attn_mask_type="causal",
        window_size=None, bottom_right_diagonal=None, softcap=0.0, enc_dec_attn_mask_type="no_mask",
        enc_dec_bottom_right_diagonal=None, enc_dec_window_size=None, tp_group=None, tp_size=1, params_dtype=None,
        get_rng_state_tracker=None, fuse_wgrad_accumulation=False, seq_length=None, micro_batch_size=None,
        sequence_parallel=False, apply_residual_connection_post_layernorm=False, output_layernorm=False,
        parallel_attention_mlp=False, layer_type="encoder", drop_path_rate=0.0, set_parallel_mode=False,
        fuse_qkv_params=False, rotary_pos_interleaved=False, zero_centered_gamma=False, qkv_weight_interleaved=True,
        ub_tp_comm_overlap=False, ub_overlap_ag=True, ub_overlap_rs=True, ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=True, ub_bulk_wgrad=True, bias=True, activation="gelu", activation_params=None,
        normalization="LayerNorm", device="cuda", attn_input_format="sbhd", name=None, qk_norm_type=None,
        qk_norm_eps=1e-06, qk_norm_before_rope=False, softmax_type="vanilla",
    ),
}  # fmt: skip

CALLS = {
    "GroupedLinear": dict(
        is_first_microbatch=None, out=None, dgrad_out=None,
    ),
    "DotProductAttention": dict(
        query_layer=None, key_layer=None, value_layer=None, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
        cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
        max_seqlen_kv=None, attn_mask_type=None, window_size=None, bottom_right_diagonal=None, softcap=None,
        checkpoint_core_attention=False, core_attention_bias_type="no_bias", core_attention_bias=None,
        alibi_slopes=None, fast_zero_fill=True, inference_params=None, pad_between_seqs=None, fp8_output=False,
        bf16_backward=False, num_splits=1, score_mod=None, score_mod_bprop=None, score_mod_tensors=None,
        score_mod_bprop_tensors=None, qkv_layer=None, kv_layer=None, qkv_interleave_dim=-3,
        thd_attention_policies=None, thd_attention_policy_dispatch="auto",
    ),
    "MultiheadAttention": dict(
        attention_mask=None, encoder_output=None, attn_mask_type=None, window_size=None, bottom_right_diagonal=None,
        is_first_microbatch=None, checkpoint_core_attention=False, inference_params=None, rotary_pos_emb=None,
        core_attention_bias_type="no_bias", core_attention_bias=None, alibi_slopes=None, cu_seqlens_q=None,
        cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
        max_seqlen_kv=None, fast_zero_fill=True, pad_between_seqs=None, thd_attention_policies=None,
        thd_attention_policy_dispatch="auto", softcap=None,
    ),
    "TransformerLayer": dict(
        attention_mask=None, self_attn_mask_type=None, window_size=None, bottom_right_diagonal=None,
        encoder_output=None, enc_dec_attn_mask=None, enc_dec_attn_mask_type=None, enc_dec_window_size=None,
        enc_dec_bottom_right_diagonal=None, is_first_microbatch=None, checkpoint_core_attention=False,
        inference_params=None, rotary_pos_emb=None, core_attention_bias_type="no_bias", core_attention_bias=None,
        alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
        max_seqlen_q=None, max_seqlen_kv=None, fast_zero_fill=True, pad_between_seqs=None,
        thd_attention_policies=None, thd_attention_policy_dispatch="auto", softcap=None,
    ),
}  # fmt: skip

REQUIRED = {
    "Linear": (16, 16),
    "GroupedLinear": (2, 16, 16),
    "LayerNormLinear": (16, 16),
    "LayerNormMLP": (16, 32),
    "LayerNorm": (),
    "RMSNorm": (),
    "DotProductAttention": (4, 4),
    "MultiheadAttention": (16, 4),
    "TransformerLayer": (16, 32, 4),
}
OURS = {"device": "cpu", "input_layernorm": True}
"""What has another default here, for a reason."""

ORDER = {
    "Linear": ["in_features", "out_features"],
    "GroupedLinear": ["num_gemms", "in_features", "out_features"],
    "LayerNormLinear": ["in_features", "out_features", "eps"],
    "LayerNormMLP": ["hidden_size", "ffn_hidden_size", "eps"],
    "LayerNorm": ["normalized_shape", "eps"],
    "RMSNorm": ["normalized_shape", "eps"],
    "DotProductAttention": [
        "num_attention_heads", "kv_channels", "num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type",
        "window_size",
    ],
    "MultiheadAttention": [
        "hidden_size", "num_attention_heads", "kv_channels", "attention_dropout", "layernorm_epsilon", "init_method",
        "output_layer_init_method", "layer_number", "attn_mask_type",
        "window_size",
    ],
    "TransformerLayer": [
        "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_gqa_groups", "layernorm_epsilon", "hidden_dropout",
        "attention_dropout", "init_method", "output_layer_init_method", "layer_number", "kv_channels", "self_attn_mask_type",
        "window_size",
    ],
}  # fmt: skip
"""Positional arguments, in Transformer Engine's order; Linear's third is `bias`, as PyTorch's."""

WANTED = {
    "sequence_parallel": True, "tp_size": 2, "fuse_wgrad_accumulation": True, "ub_overlap_ag": True, "parallel_mode": "column",
    "parameters_split": ("q", "k"), "delay_wgrad_compute": True, "symmetric_ar_type": "multimem",
    "set_parallel_mode": True, "checkpoint": True,
    "softcap": 30.0, "softmax_type": "learnable", "attention_type": "cross",
    "qkv_weight_interleaved": False,
    "rotary_pos_interleaved": True, "layer_type": "decoder", "ub_tp_comm_overlap": True,
    "return_max_logit": True, "single_grouped_weight": True, "save_original_input": True,
}  # fmt: skip
"""A value of each argument that asks for something that Octavo does not have."""


def make(name, /, **arguments):
    size = {"normalized_shape": 16} if name in ("LayerNorm", "RMSNorm") else {}
    return getattr(octavo.nn, name)(*REQUIRED[name], **size, **arguments)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_every_argument_is_known_at_its_default(name):
    given = CONSTRUCTORS[name] | {key: value for key, value in OURS.items() if key in CONSTRUCTORS[name]}
    given.pop("normalized_shape", None)
    make(name, **given)
    parameters = inspect.signature(getattr(octavo.nn, name).__init__).parameters
    for key in CONSTRUCTORS[name]:
        assert key in parameters or key in ARGUMENTS[name], key
        assert key not in parameters or key not in ARGUMENTS[name], key


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_defaults_are_the_same_but_where_it_is_said(name):
    parameters = inspect.signature(getattr(octavo.nn, name).__init__).parameters
    other = {
        key: parameters[key].default
        for key, default in CONSTRUCTORS[name].items()
        if key in parameters and parameters[key].default != default
    }
    said = {"device": None, "hidden_dropout": 0.0, "attention_dropout": 0.0, "qkv_format": "bshd", "attn_input_format": "bshd"}
    said["input_layernorm"] = True
    assert other.items() <= said.items()


@pytest.mark.parametrize("name", ORDER)
def test_positional_arguments_stand_in_transformer_engines_order(name):
    parameters = inspect.signature(getattr(octavo.nn, name).__init__).parameters.values()
    places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    assert places == ORDER[name] + (["bias"] if name == "Linear" else [])


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_what_octavo_lacks_is_refused_and_named(name):
    for argument, value in WANTED.items():
        if argument not in ARGUMENTS[name] or (name, argument) == ("TransformerLayer", "ub_overlap_ag"):
            continue
        with pytest.raises(InputError) as refusal:
            make(name, **{argument: value})
        assert f"{name}({argument}={value!r})" in str(refusal.value)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_name_that_transformer_engine_has_not_either_is_refused(name):
    with pytest.raises(InputError, match=f"unknown argument of {name} 'params_dtyp'.*Did you mean 'params_dtype'|Known: "):
        make(name, params_dtyp=torch.float32)


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_a_call(name):
    layer = make(name, **({"bias": False} if name != "DotProductAttention" else {}))
    inputs = {
        "GroupedLinear": (plain.fresh(5, 16), [2, 3]),
        "DotProductAttention": tuple(plain.fresh(2, 3, 4, 4, seed=i) for i in range(3)),
        "MultiheadAttention": (plain.fresh(2, 3, 16),),
        "TransformerLayer": (plain.fresh(2, 3, 16),),
    }[name]
    given = {key: value for key, value in CALLS[name].items() if not key.endswith("_layer") or key.startswith(("qkv", "kv"))}
    assert torch.equal(layer(*inputs, **given), layer(*inputs))
    wanted = {"GroupedLinear": {"out": torch.empty(5, 16)}}.get(name, {"alibi_slopes": torch.ones(4)})
    with pytest.raises(InputError, match=next(iter(wanted))):
        layer(*inputs, **wanted)


@pytest.mark.parametrize("mask", ["arbitrary", "padding", "padding_causal"])
def test_mask_types_whose_masks_have_the_other_sense_are_refused(mask):
    with pytest.raises(InputError, match="opposite"):
        octavo.nn.TransformerLayer(16, 32, 4, self_attn_mask_type=mask)
    with pytest.raises(InputError, match="opposite"):
        octavo.nn.TransformerLayer(16, 32, 4)(plain.fresh(2, 3, 16), self_attn_mask_type=mask)


def test_a_mask_type_for_one_call():
    causal, full = (
        plain.randomise(octavo.nn.TransformerLayer(16, 32, 4, self_attn_mask_type=t)) for t in ("causal", "no_mask")
    )
    x = plain.fresh(2, 5, 16)
    assert torch.equal(causal(x, self_attn_mask_type="no_mask"), full(x))
    assert torch.equal(full(x, self_attn_mask_type="causal"), causal(x))
    assert not torch.equal(causal(x), full(x))


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("gelu", lambda x: functional.gelu(x, approximate="tanh")),
        ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
        ("gelu_exact", plain.gelu),
        ("srelu", lambda x: x.clamp(min=0) ** 2),
        ("relu2", lambda x: x.clamp(min=0) ** 2),
        ("geglu", None),
        ("geglu_exact", None),
        ("swiglu", None),
    ],
)
def test_activations_have_transformer_engines_names(name, by_hand):
    layer = plain.randomise(octavo.nn.LayerNormMLP(12, 20, activation=name))
    gates = {"geglu": lambda x: functional.gelu(x, approximate="tanh"), "geglu_exact": plain.gelu, "swiglu": plain.silu}

    def wanted(p, x):
        hidden = plain.linear(plain.norm("LayerNorm", x, p["layer_norm_weight"], p["layer_norm_bias"], 1e-5), p["fc1_weight"])
        hidden = hidden + p["fc1_bias"]
        if by_hand is None:
            gate, up = (part.movedim(0, -1) for part in octavo.nn.mlp.deinterleave(hidden.movedim(-1, 0)))
            return plain.linear(gates[name](gate) * up, p["fc2_weight"], p["fc2_bias"])
        return plain.linear(by_hand(hidden), p["fc2_weight"], p["fc2_bias"])

    plain.assert_equals_float64(layer, wanted, plain.fresh(2, 3, 12))


@pytest.mark.parametrize("name", ["elu", "quick_gelu", "sigmoid"])
def test_other_activations_are_refused(name):
    with pytest.raises(InputError, match=f"unknown activation '{name}'"):
        octavo.nn.TransformerLayer(16, 32, 4, activation=name)
    assert name not in ACTIVATIONS


FP8 = [None, octavo.recipe.CurrentScaling()]


@pytest.mark.parametrize("recipe", FP8, ids=["wide", "FP8"])
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention"])
def test_return_bias(name, recipe):
    layer = plain.randomise(make(name))
    other = make(name, return_bias=True)
    other.load_state_dict(layer.state_dict())
    x = plain.fresh(2, 3, 16)
    with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        whole, (y, bias) = layer(x), other(x)
    torch.testing.assert_close(y + bias, whole)
    assert not torch.equal(y, whole)
    assert make(name, return_bias=True, bias=False)(x)[1] is None


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("name", ["LayerNormLinear", "LayerNormMLP"])
def test_return_layernorm_output(name, kind):
    layer = plain.randomise(make(name, normalization=kind))
    other = make(name, normalization=kind, return_layernorm_output=True)
    both = make(name, normalization=kind, return_layernorm_output=True, return_bias=True)
    other.load_state_dict(layer.state_dict())
    both.load_state_dict(layer.state_dict())
    x = plain.fresh(2, 3, 16)
    wanted = plain.norm(kind, x, layer.layer_norm_weight, layer.layer_norm_bias, 1e-5)
    y, normed = other(x)
    torch.testing.assert_close(y, layer(x))
    torch.testing.assert_close(normed, wanted)
    y, bias, normed = both(x)
    torch.testing.assert_close(y + bias, layer(x))
    torch.testing.assert_close(normed, wanted)
    (y.sum() + normed.sum()).backward()
    assert all(p.grad is not None for key, p in both.named_parameters() if key not in ("bias", "fc2_bias"))


def test_init_methods_fill_the_matrices_they_are_for():
    fill = lambda value: lambda weight: torch.nn.init.constant_(weight, value)  # noqa: E731
    layer = octavo.nn.TransformerLayer(16, 32, 4, init_method=fill(2.0), output_layer_init_method=fill(3.0))
    values = {name: p.unique().tolist() for name, p in layer.named_parameters()}
    firsts = ("self_attention.layernorm_qkv.weight", "layernorm_mlp.fc1_weight")
    seconds = ("self_attention.proj.weight", "layernorm_mlp.fc2_weight")
    assert [values[name] for name in (*firsts, *seconds)] == [[2.0], [2.0], [3.0], [3.0]]
    assert all(value == [0.0] for name, value in values.items() if name.endswith("bias"))
    assert all(value == [1.0] for name, value in values.items() if name.endswith("layer_norm_weight"))
    assert octavo.nn.Linear(4, 4, init_method=fill(5.0)).weight.unique().item() == 5


def test_initial_weights_and_dropout_draw_from_a_tracker():
    class Tracker:
        names = ()

        def fork(self, name="model-parallel-rng"):
            self.names += (name,)
            return torch.random.fork_rng()

    tracker = Tracker()
    state = torch.get_rng_state()
    octavo.nn.Linear(4, 4, get_rng_state_tracker=lambda: tracker, rng_tracker_name="expert")
    assert tracker.names == ("expert",)
    layer = octavo.nn.TransformerLayer(16, 32, 4, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    copy.deepcopy(layer)(plain.fresh(2, 3, 16))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(tracker.names) == 5


@pytest.mark.parametrize("name", ["DotProductAttention", "MultiheadAttention", "TransformerLayer"])
@pytest.mark.parametrize("recipe", FP8, ids=["wide", "FP8"])
def test_sequence_first(name, recipe):
    key = "attn_input_format" if name == "TransformerLayer" else "qkv_format"
    first, second = make(name), make(name, **{key: "sbhd"})
    plain.randomise(first)
    second.load_state_dict(first.state_dict())
    shape = (2, 5, 4, 4) if name == "DotProductAttention" else (2, 5, 16)
    inputs = [plain.fresh(*shape, seed=i) for i in range(3 if name == "DotProductAttention" else 1)]
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.transpose(0, 1).clone().requires_grad_() for x in inputs]
    with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        y, other = first(*ours), second(*theirs)
    torch.testing.assert_close(other.transpose(0, 1), y)
    cotangent = plain.fresh(*y.shape, seed=9)
    y.backward(cotangent)
    other.backward(cotangent.transpose(0, 1))
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(two.grad.transpose(0, 1), one.grad)
    with pytest.raises(InputError, match="thd"):
        make(name, **{key: "thd"})


def test_parallel_attention_and_mlp_read_the_same_input():
    layer = plain.randomise(octavo.nn.TransformerLayer(16, 32, 4, parallel_attention_mlp=True))
    x = plain.fresh(2, 5, 16)
    torch.testing.assert_close(layer(x), x + layer.self_attention(x) + layer.layernorm_mlp(x))
    delta = plain.fresh(2, 5, 16, seed=3)
    h, rest = layer.forward_residual(x, delta)
    assert rest is None
    torch.testing.assert_close(h, layer(x + delta))
    assert not layer.forward_residual(x.requires_grad_())[0]._is_view()  # FSDP2 warns of views on every step


@pytest.mark.parametrize("asked", ["parallel_attention_mlp", "mlp_bias"])
def test_forms_that_experts_do_not_have_are_refused(asked):
    make = functools.partial(octavo.nn.TransformerLayer, 16, 32, 4, experts=octavo.nn.Experts(4, 2))
    with pytest.raises(InputError, match=f"{asked}=True"):
        make(**{asked: True})
    assert make().layernorm_moe.config.count == 4


@pytest.mark.parametrize("parallel", [False, True])
def test_hidden_dropout_drops_from_what_is_added_and_only_in_training(parallel):
    layer = plain.randomise(octavo.nn.TransformerLayer(64, 32, 4, hidden_dropout=0.25, parallel_attention_mlp=parallel))
    plain_layer = octavo.nn.TransformerLayer(64, 32, 4, parallel_attention_mlp=parallel)
    plain_layer.load_state_dict(layer.state_dict())
    x = plain.fresh(8, 32, 64)
    assert torch.equal(layer.eval()(x), plain_layer(x))
    layer.train()
    with torch.no_grad():
        torch.nn.init.zeros_(layer.self_attention.proj.weight)
        torch.nn.init.zeros_(layer.self_attention.proj.bias)
    plain_layer.load_state_dict(layer.state_dict())
    added, dropped = plain_layer(x) - x, layer(x) - x
    kept = dropped != 0
    assert abs(kept.float().mean() - 0.75) < 0.02
    torch.testing.assert_close(dropped[kept], added[kept] / 0.75, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match=r"hidden_dropout=1\.5"):
        octavo.nn.TransformerLayer(16, 32, 4, hidden_dropout=1.5)


def test_rotary_angles_as_transformer_engine_makes_them():
    layer = plain.randomise(octavo.nn.TransformerLayer(16, 32, 4))
    half = torch.arange(12)[:, None] * 100.0 ** (-torch.arange(0, 4, 2) / 4)
    angles = torch.cat([half, half], -1)[:, None, None]
    x = plain.fresh(2, 9, 16)
    tables = tuple(f(angles[:9, 0, 0])[None].expand(2, 9, 4) for f in (torch.cos, torch.sin))
    want = layer(x, rotary_pos_emb=tables)
    assert torch.equal(layer(x, rotary_pos_emb=angles), want)
    assert torch.equal(layer(x, rotary_pos_emb=(angles, angles)), want)
    few = angles[..., ::2]  # the first two columns of each head rotate
    part = layer(x, rotary_pos_emb=few)
    assert torch.equal(layer(x, rotary_pos_emb=tuple(f(few[:9, 0, 0])[None] for f in (torch.cos, torch.sin))), part)
    assert not torch.equal(layer(x), part)
    assert not torch.equal(part, want)
    assert not torch.equal(layer(x), want)
    wide, odd = tuple(torch.cat([t, t], -1) for t in tables), tuple(t[..., :3] for t in tables)
    sizes = [tuple(torch.ones(size) for _ in "cs") for size in ((1, 1, 4), (2, 8, 4), (3, 9, 4))]
    for wrong in (angles[:5], angles[..., :3], torch.cat([angles, angles], -1), (angles, angles.clone()), wide, odd, *sizes):
        with pytest.raises(InputError, match="rotary_pos_emb"):
            layer(x, rotary_pos_emb=wrong)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_take_both_names_of_the_size(kind):
    make_norm = getattr(octavo.nn, kind)
    for norm in (make_norm(16), make_norm((16,)), make_norm(normalized_shape=[16]), make_norm(hidden_size=16)):
        assert norm.weight.shape == (16,)
    assert make_norm(16, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    for wrong in ((4, 16), None, ()):
        with pytest.raises(InputError, match="dimensions"):
            make_norm(wrong)
