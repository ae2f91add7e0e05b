"""Transformer Engine's names: layers beside octavo.nn's with masks made by hand, recipes, contexts, state dicts."""

import copy
import inspect
import pickle

import pytest
import torch
from test_arguments import CALLS, CONSTRUCTORS

import octavo.nn
from octavo.compat.te import state
from octavo.errors import InputError
from octavo.fp8.recipe import coerce
from octavo.fp8.scaling import state_records
from octavo.nn.attention import merge_qkv
from octavo.nn.mlp import interleave
from octavo.parallel.module_init import OwnInit
from octavo.process import process

QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def twin(layer, own):
    """The layer of octavo.nn with the same parameters."""
    state = {name: tensor for name, tensor in layer.state_dict().items() if not name.endswith("_extra_state")}
    attention = getattr(own, "self_attention", None)
    for kind in ("weight", "bias") if attention else ():
        names = [f"self_attention.layernorm_qkv.{part}_{kind}" for part in ("query", "key", "value")]
        state[f"self_attention.layernorm_qkv.{kind}"] = merge_qkv(*map(state.pop, names), attention.groups)
        fc1 = state[f"layernorm_mlp.fc1_{kind}"]
        state[f"layernorm_mlp.fc1_{kind}"] = interleave(*fc1.chunk(2))
    own.load_state_dict(state)
    return own


def test_defaults_are_transformer_engines(te):
    layer = te.TransformerLayer(32, 64, 4)
    assert layer.hidden_dropout == 0.1
    assert layer.self_attention.core_attention.attention_dropout == 0.1
    assert layer.self_attention.sequence_first
    assert layer.mask_type == "causal"
    assert layer.layernorm_mlp.activation == "gelu_tanh"
    assert layer.layernorm_mlp.layer_norm_bias is not None
    weight = te.Linear(400, 500).weight
    assert weight.std().item() == pytest.approx(0.023, rel=0.02)
    assert not te.Linear(8, 8).bias.any()
    # The third position is sequence_parallel, the tenth is bias.
    assert te.Linear(8, 8, False).bias is not None
    assert te.Linear(8, 8, False, False, None, 1, None, None, None, False).bias is None


@pytest.mark.parametrize("order", ["sbhd", "bshd"])
def test_a_layer_is_that_of_octavo_with_the_sequence_first(te, order):
    layer = te.TransformerLayer(32, 64, 4, 2, attn_input_format=order, normalization="RMSNorm", activation="swiglu", **QUIET)
    own = octavo.nn.TransformerLayer(32, 64, 4, 2, normalization="RMSNorm", activation="swiglu")
    twin(layer, own)
    x = torch.randn(6, 2, 32)
    rotary = te.RotaryPositionEmbedding(8)(6)
    theirs = layer(x if order == "sbhd" else x.transpose(0, 1), rotary_pos_emb=rotary)
    ours = own(x.transpose(0, 1), rotary_pos_emb=rotary)
    torch.testing.assert_close(theirs if order == "bshd" else theirs.transpose(0, 1), ours, rtol=0, atol=0)
    t, d = torch.arange(6.0), torch.arange(0, 8, 2) / 8
    torch.testing.assert_close(rotary[:, 0, 0, :4], t[:, None] / 10000**d)


@pytest.mark.parametrize("layer", CONSTRUCTORS)
def test_arguments_stand_in_their_order_with_their_defaults(te, layer):
    found = {
        name: "cuda" if parameter.default == "default" else parameter.default
        for name, parameter in inspect.signature(getattr(te, layer)).parameters.items()
        if parameter.default is not parameter.empty
    }
    wanted = CONSTRUCTORS[layer]
    assert list(found)[: len(wanted)] == list(wanted)
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("layer", ["MultiheadAttention", "TransformerLayer"])
def test_arguments_of_a_call_stand_in_their_order(te, layer):
    parameters = inspect.signature(getattr(te, layer).forward).parameters.values()
    places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][2:]
    assert places == list(CALLS[layer])[: len(places)]
    assert "rotary_pos_emb" in places


def by_hand(q, k, v, excluded):
    """softmax(q · kᵀ / √D) · v in float64, [B, T, H, D], without the excluded pairs [B or 1, H or 1, T, T]."""
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(excluded, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2).float()


def test_masks_exclude(te):
    b, t, h, d = 2, 7, 2, 8
    q, k, v = (torch.randn(b, t, h, d) for _ in range(3))
    core = te.DotProductAttention(h, d, qkv_format="bshd")
    above = torch.ones(t, t, dtype=torch.bool).triu(1)
    arbitrary = torch.rand(b, 1, t, t) < 0.4
    arbitrary.diagonal(dim1=-2, dim2=-1).fill_(False)
    padding = torch.zeros(b, 1, 1, t, dtype=torch.bool)
    padding[1, ..., 5:] = True
    far = torch.ones(t, t, dtype=torch.bool).tril(-3)
    # Each: the call, what it excludes, and the queries whose result has a meaning.
    cases = {
        "causal": (core(q, k, v), above, ...),
        "no mask": (core(q, k, v, attn_mask_type="no_mask"), torch.zeros(t, t, dtype=torch.bool), ...),
        "arbitrary": (core(q, k, v, arbitrary, attn_mask_type="arbitrary"), arbitrary, ...),
        "window": (core(q, k, v, window_size=(2, 0)), above | far, ...),
        "both sides": (core(q, k, v, attn_mask_type="no_mask", window_size=(2, 2)), far | far.T, ...),
        "padding": (core(q, k, v, padding, attn_mask_type="padding")[:, :5], padding, slice(5)),
        "padding_causal": (core(q, k, v, padding, attn_mask_type="padding_causal")[:, :5], padding | above, slice(5)),
        "bottom right": (core(q, k, v, attn_mask_type="causal_bottom_right"), above, ...),
    }
    for name, (found, excluded, rows) in cases.items():
        expected = by_hand(q, k, v, excluded)
        torch.testing.assert_close(
            found, expected if rows is ... else expected[:, rows], msg=lambda text, n=name: f"{n}: {text}"
        )
    assert not core(q, k, v, padding, attn_mask_type="padding")[1, 5:].any()  # as there: padding has the result 0
    first = (x.transpose(0, 1) for x in (q, k, v))  # another order in one call
    found = core(*first, arbitrary, "sbhd", attn_mask_type="arbitrary")
    torch.testing.assert_close(found.transpose(0, 1), by_hand(q, k, v, arbitrary))
    torch.testing.assert_close(core(q, k, v, qkv_format="bshd"), by_hand(q, k, v, above))
    with pytest.warns(UserWarning, match="'causal'"):
        torch.testing.assert_close(core(q, k, v, arbitrary), by_hand(q, k, v, above))
    with pytest.raises(InputError, match="bool tensor, True where nothing is"):
        core(q, k, v, arbitrary.float(), attn_mask_type="arbitrary")
    later = torch.ones(7, 5, dtype=torch.bool).triu(-1)  # the first two queries have no key
    found = core(q, k[:, :5], v[:, :5], attn_mask_type="causal_bottom_right")
    torch.testing.assert_close(found[:, 2:], by_hand(q[:, 2:], k[:, :5], v[:, :5], later[2:]))
    assert not found[:, :2].any()
    nothing = torch.zeros(7, 5, dtype=torch.bool)
    torch.testing.assert_close(core(q, k[:, :5], v[:, :5], attn_mask_type="no_mask"), by_hand(q, k[:, :5], v[:, :5], nothing))
    with pytest.raises(InputError, match="Did you mean 'causal'"):
        core(q, k, v, attn_mask_type="casual")


def test_attention_without_a_norm_and_with(te):
    x = torch.randn(5, 2, 32)
    plain, normed = te.MultiheadAttention(32, 4), te.MultiheadAttention(32, 4, input_layernorm=True)
    assert "layernorm_qkv.layer_norm_weight" not in plain.state_dict()
    state = {name.replace("qkv.", "layernorm_qkv."): tensor for name, tensor in plain.state_dict().items()}
    norm = {"layernorm_qkv.layer_norm_weight": torch.ones(32), "layernorm_qkv.layer_norm_bias": torch.zeros(32)}
    normed.load_state_dict(state | norm)
    plain.eval(), normed.eval()
    torch.testing.assert_close(normed(x), plain(torch.nn.functional.layer_norm(x, (32,))))
    assert isinstance(te.TransformerLayer(32, 64, 4).self_attention, te.MultiheadAttention)


def test_fp8_is_that_of_transformer_engines_recipe(te):
    from transformer_engine.common.recipe import DelayedScaling, Format

    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4, amax_compute_algo="max")
    layer = te.Linear(32, 32)
    own = twin(layer, octavo.nn.Linear(32, 32))
    x = torch.randn(4, 32)
    for _ in range(3):
        with te.fp8_autocast(enabled=1, fp8_recipe=recipe):
            y = layer(x)
        with octavo.fp8_autocast(fp8_recipe=coerce(recipe)):
            z = own(x)
        for out in (y, z):
            out.square().mean().backward()
        assert torch.equal(y, z)
    assert torch.equal(layer.weight.grad, own.weight.grad)
    with te.autocast(enabled=False):
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_recipes_compare_and_print_as_there(te):
    from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Format, MXFP8BlockScaling

    recipe = DelayedScaling(amax_history_len=32, fp8_format=Format.E4M3)
    assert recipe == DelayedScaling(amax_history_len=32, fp8_format=Format.E4M3) != DelayedScaling()
    assert str(recipe) == (
        "recipe_type=DelayedScaling, margin=0, format=E4M3, amax_history_len=32, reduce_amax=True, fp8_dpa=False, "
        "fp8_mha=False, backward_override=None"
    )
    assert pickle.loads(pickle.dumps(recipe)) == recipe  # noqa: S301
    assert recipe.delayed()
    assert Float8BlockScaling().float8_block_scaling()
    assert not coerce(recipe).native
    assert coerce(recipe).fast_accumulation is False
    assert Format.HYBRID.value.max_bwd == 57344
    with (
        pytest.raises(InputError, match=r"MXFP8BlockScaling .* Use Float8BlockScaling"),
        te.autocast(recipe=MXFP8BlockScaling()),
    ):
        pass
    with pytest.raises(InputError, match="fp8_dpa"), te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
        pass


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a model"])
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@pytest.mark.parametrize("recipe", [None, octavo.recipe.DelayedScaling()], ids=["theirs", "ours"])
def test_a_state_dict_keeps_the_fp8_state(te, recipe, trained, inside):
    """Also where weights without scales would begin anew: of a layer that was trained by Octavo's rule."""

    def make():
        torch.manual_seed(0)
        layer = te.TransformerLayer(32, 64, 4, activation="swiglu", **QUIET)
        return torch.nn.Sequential(layer, te.Linear(32, 16, device="cpu")) if inside else layer

    def step(layer, size=1.0):
        with te.fp8_autocast(fp8_recipe=recipe):
            y = layer(torch.linspace(-size, size, 256).view(4, 2, 32))
        y.sum().backward()
        return y

    first = make()
    step(first), step(first)
    second = make()
    if trained:
        step(second, 30.0)
    second.load_state_dict(first.state_dict())
    kept, found = state_records(first), state_records(second)
    assert kept.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in kept.items())
    assert torch.equal(step(first), step(second))


@pytest.mark.parametrize("fused", [False, True], ids=["three", "one"])
def test_transformer_engines_own_state_dicts_load(te, capsys, fused):
    torch.manual_seed(0)
    kinds = {"activation": "swiglu", **QUIET}
    layers = [te.TransformerLayer(32, 64, 4, 2, fuse_qkv_params=one, **kinds) for one in (fused, not fused, fused)]
    theirs = layers[0].state_dict()
    for name in ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp"):
        theirs[f"{name}._extra_state"] = torch.randint(0, 255, (64,), dtype=torch.uint8)
    theirs.pop("_extra_state")
    x = torch.randn(6, 2, 32)
    process.said.clear()
    for layer in layers[1:]:
        layer.load_state_dict(dict(theirs))
        torch.testing.assert_close(layer(x), layers[0](x))
    assert capsys.readouterr().err.count("Transformer Engine's FP8 scales") == 1
    plain = {name: tensor for name, tensor in layers[0].state_dict().items() if not name.endswith("_extra_state")}
    other = te.TransformerLayer(32, 64, 4, 2, fuse_qkv_params=fused, **kinds)
    other.load_state_dict(plain)  # of a script that keeps parameters alone
    assert torch.equal(other(x), layers[0](x))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "DotProductAttention"])
def test_layers_without_fp8_state_have_transformer_engines_empty_entry(te, name):
    class Block(torch.nn.Sequential):
        pass

    def build():
        kind = getattr(te, name)
        return Block(te.Linear(8, 8), kind(2, 4) if name == "DotProductAttention" else kind(8))

    torch.manual_seed(0)
    state = build().state_dict()
    assert state["1._extra_state"].numel() == 0
    for given in (state, {key: value for key, value in state.items() if not key.endswith("_extra_state")}):
        block = build()
        block.load_state_dict(given)
        assert torch.equal(block[0].weight, state["0.weight"])


def test_parameters_filled_by_name_as_in_transformer_engines_tutorial_give_hugging_faces_layer(te):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
    config._attn_implementation = "sdpa"
    theirs = LlamaDecoderLayer(config, 0)
    ours = te.TransformerLayer(
        32, 48, 4, 2, layernorm_epsilon=config.rms_norm_eps, bias=False, normalization="RMSNorm", activation="swiglu",
        attn_input_format="bshd", init_method=torch.nn.init.xavier_uniform_, **QUIET,
    )  # fmt: skip
    assert ours.self_attention.layernorm_qkv.key_weight.abs().max() <= (6 / (16 + 32)) ** 0.5  # of each by itself
    attention, mlp = theirs.self_attn, theirs.mlp
    names = {
        "self_attention.layernorm_qkv.layer_norm_weight": theirs.input_layernorm.weight,
        "self_attention.layernorm_qkv.query_weight": attention.q_proj.weight,
        "self_attention.layernorm_qkv.key_weight": attention.k_proj.weight,
        "self_attention.layernorm_qkv.value_weight": attention.v_proj.weight,
        "self_attention.proj.weight": attention.o_proj.weight,
        "layernorm_mlp.layer_norm_weight": theirs.post_attention_layernorm.weight,
        "layernorm_mlp.fc2_weight": mlp.down_proj.weight,
    }
    state = ours.state_dict()
    for name, parameter in names.items():
        state[name].data[:] = parameter.data
    state["layernorm_mlp.fc1_weight"].data[:48] = mlp.gate_proj.weight.data
    state["layernorm_mlp.fc1_weight"].data[48:] = mlp.up_proj.weight.data
    x, dy = torch.randn(2, 6, 32), torch.randn(2, 6, 32)
    angles = te.RotaryPositionEmbedding(8)(6)
    rotary = angles[None, :, 0, 0].cos(), angles[None, :, 0, 0].sin()
    expected = theirs(x, position_embeddings=rotary)
    for layer in (ours, copy.deepcopy(ours)):
        found = layer(x, rotary_pos_emb=angles)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        found.backward(dy)
        theirs.zero_grad()
        theirs(x, position_embeddings=rotary).backward(dy)
        parameters = dict(layer.named_parameters())
        assert parameters.keys() == {*names, "layernorm_mlp.fc1_weight"}
        for name, parameter in names.items():
            torch.testing.assert_close(parameters[name].grad, parameter.grad, rtol=1e-3, atol=1e-4)
        gate_up = torch.cat((mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad))
        torch.testing.assert_close(parameters["layernorm_mlp.fc1_weight"].grad, gate_up, rtol=1e-3, atol=1e-4)


def test_parameters_stand_in_transformer_engines_order(te):
    norms, last = ["q_norm.weight", "k_norm.weight"], ["proj.weight", "proj.bias"]
    parts = [f"{part}_{kind}" for kind in ("weight", "bias") for part in ("query", "key", "value")]
    for arguments, first, expected in (
        ({}, "qkv", parts),
        ({"input_layernorm": True}, "layernorm_qkv", ["layer_norm_weight", "layer_norm_bias", *parts]),
        ({"fuse_qkv_params": True}, "qkv", ["weight", "bias"]),
    ):
        attention = te.MultiheadAttention(32, 4, qk_norm_type="RMSNorm", **arguments)
        names = [name for name, _ in attention.named_parameters()]
        assert names == [*norms, *(f"{first}.{name}" for name in expected), *last]
    layer = te.TransformerLayer(32, 64, 4, qk_norm_type="RMSNorm")
    assert [name.partition(".")[2] for name, _ in layer.named_parameters()][:2] == norms


def test_the_joint_matrix_of_three_parameters_is_not_there_to_be_written(te):
    attention = te.MultiheadAttention(32, 4)
    attention.apply(lambda module: module.weight.data.zero_() if isinstance(module, torch.nn.Linear) else None)
    assert isinstance(attention.qkv, te.Linear)
    assert attention.qkv.query_weight.any()
    assert "out_features=96" in repr(attention)
    assert not hasattr(attention.qkv, "weight")
    with pytest.raises(AttributeError, match=r"LayerNormLinear.bias is not .* The layer has query_bias, key_bias, value_bias"):
        te.TransformerLayer(32, 64, 4).self_attention.layernorm_qkv.bias.zero_()


def test_parameters_from_the_meta_device_get_initial_values(te):
    layer = te.TransformerLayer(32, 64, 4, device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.data.fill_(7)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, parameter in layer.named_parameters():
        if name.endswith("weight") and "norm_weight" not in name:
            assert parameter.std().item() == pytest.approx(0.023, rel=0.15), name
        else:
            assert (parameter == (1 if name.endswith("weight") else 0)).all(), name


@pytest.mark.parametrize(
    "make",
    [
        lambda te: te.Linear(64, 128, device="meta", params_dtype=torch.bfloat16),
        lambda te: te.Linear(64, 96, device="meta", parameters_split=("a", "b", "c")),
        lambda te: te.LayerNormLinear(64, 96, device="meta", parameters_split={"a": 32, "b": 64}),
        lambda te: te.LayerNormLinear(64, 128, device="meta", zero_centered_gamma=True),
        lambda te: te.LayerNormMLP(64, 128, device="meta", bias=False),
        lambda te: te.GroupedLinear(3, 64, 128, device="meta"),
        lambda te: te.LayerNorm(64, device="meta"),
        lambda te: te.RMSNorm(64, device="meta"),
        lambda te: te.MultiheadAttention(64, 4, device="meta"),
        lambda te: te.MultiheadAttention(64, 4, device="meta", fuse_qkv_params=True, input_layernorm=True),
        lambda te: te.TransformerLayer(64, 128, 4, device="meta"),
        lambda te: te.TransformerLayer(64, 128, 4, device="meta", layer_type="decoder"),
    ],
)
def test_reset_parameters_takes_parameters_from_the_meta_device(te, make):
    layer = make(te)
    dtypes = {name: parameter.dtype for name, parameter in layer.named_parameters()}
    for parameter in layer.parameters():
        assert parameter.is_meta
        parameter.mark, parameter.requires_grad = 3, False
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters(defer_init=True)
    assert all(parameter.is_meta for parameter in layer.parameters())
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    zero_centered = getattr(layer, "zero_centered_gamma", False)
    for name, parameter in layer.named_parameters():
        assert (parameter.device.type, parameter.dtype, parameter.mark) == ("cpu", dtypes[name], 3)
        assert not parameter.requires_grad
        if "bias" in name:
            assert not parameter.any()
        elif "norm_weight" in name or parameter.dim() == 1:
            assert (parameter == (0 if zero_centered else 1)).all(), name
        else:
            assert parameter.float().std().item() == pytest.approx(0.023, rel=0.15), name


def test_deferred_initialisation_plans_on_the_meta_device_and_fills(te, monkeypatch):
    model = torch.nn.Sequential(te.Linear(64, 64, device="meta"), te.LayerNormMLP(64, 64, device="meta"))
    before, names = dict(model.named_parameters()), [name for name, _ in model.named_parameters()]
    asked = []
    monkeypatch.setattr(state, "default_device", lambda: asked.append(1))
    OwnInit(7).check(model, names)
    assert dict(model.named_parameters()) == before
    model.to_empty(device="cpu")
    OwnInit(7).fill(model, names)
    assert not asked
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and "norm" not in name:
            assert parameter.std().item() == pytest.approx(0.023, rel=0.15), name
        else:
            assert (parameter == (1 if name.endswith("weight") else 0)).all(), name


def test_a_joint_matrix_of_other_rows_is_refused_by_name(te):
    state = te.MultiheadAttention(32, 4, fuse_qkv_params=True).state_dict()
    state["qkv.weight"] = torch.randn(94, 32)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*qkv.query_weight.*Unexpected key.*qkv.weight"):
        te.MultiheadAttention(32, 4).load_state_dict(state)


def test_checkpoint_repeats_its_forward(te):
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)

    def grads(run):
        torch.manual_seed(0)
        tracker.set_states({})
        tracker.add("model-parallel-rng", 7)
        layer = te.TransformerLayer(32, 64, 4, get_rng_state_tracker=lambda: tracker)
        x = torch.randn(4, 2, 32, requires_grad=True)
        with te.fp8_autocast():
            y = run(layer, x)
        y.square().sum().backward()
        return y, x.grad, layer.self_attention.proj.weight.grad

    plain = grads(lambda layer, x: layer(x))
    for options in ({}, {"use_reentrant": False}, {"distribute_saved_activations": False, "tp_group": None}):
        again = grads(lambda layer, x, o=options: te.checkpoint(layer, x, get_rng_state_tracker=lambda: tracker, **o))
        assert all(torch.equal(one, two) for one, two in zip(plain, again, strict=True))


def test_what_is_not_here_is_refused_by_name(te):
    with pytest.raises(InputError, match=r"unknown layer_type 'decode'.* Did you mean 'decoder'"):
        te.TransformerLayer(32, 64, 4, layer_type="decode")
    with pytest.raises(InputError, match="tp_size=2"):
        te.Linear(8, 8, tp_size=2)
    assert te.Linear(8, 8, sequence_parallel=True, parallel_mode="column").weight.shape == (8, 8)  # one rank
    with pytest.raises(InputError, match="unknown attn_input_format 'tbhd'"):
        te.TransformerLayer(32, 64, 4, attn_input_format="tbhd")
    for window in (5, (1, 2, 3), (-2, 0), ("1", 0)):
        with pytest.raises(InputError, match=r"window_size=.* give \(left, right\)"):
            te.DotProductAttention(4, 8, window_size=window)
    with pytest.raises(InputError, match=r"preserve_high_precision"), te.fp8_model_init(True, None, True):
        pass
    with te.fp8_model_init(False, preserve_high_precision_init_val=True):
        layer = te.Linear(8, 8)
    layer.set_tensor_parallel_group(None)
    with pytest.raises(AttributeError, match=r"Linear.quantizers is not in .* octavo.fp8.inspect"):
        layer.quantizers  # noqa: B018
    assert not hasattr(layer, "primary_weights_in_fp8")
    with pytest.raises(TypeError, match="out_features"):
        te.Linear(8)
    with pytest.raises(AttributeError, match=r"transformer_engine.pytorch.Float8Tensor is not .* Octavo's parameters stay"):
        te.Float8Tensor  # noqa: B018
    with pytest.raises(ImportError, match="Did you mean Linear"):
        from transformer_engine.pytorch import Linaer  # noqa: F401
    assert not hasattr(te, "Float8Tensor")


def test_classes_are_pickled_by_transformer_engines_names(te):
    from octavo.compat.te import attention, layers

    classes = [layers.Linear, layers.LayerNormLinear, layers.LayerNormMLP, layers.GroupedLinear, layers.LayerNorm]
    classes += [layers.RMSNorm, attention.DotProductAttention, attention.MultiheadAttention, attention.TransformerLayer]
    for kind in classes:
        assert kind.__module__.startswith("transformer_engine.pytorch.")
        assert pickle.loads(pickle.dumps(kind)) is kind  # noqa: S301 - of this process


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_a_norm_under_torchs_autocast_is_in_its_dtype(te, name):
    """Of the rounded input, statistics in float32; PyTorch's own norms, and octavo.nn's, stay in float32."""
    layer = getattr(te, name)(32)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(32))
    x = torch.randn(3, 5, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert getattr(octavo.nn, name)(32)(x).dtype == torch.float32
    assert y.dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [x, *layer.parameters()], dy)
    x64 = x.detach().bfloat16().double().requires_grad_()
    own = [parameter.detach().double().requires_grad_() for parameter in layer.parameters()]
    centred = x64 - x64.mean(-1, keepdim=True) if name == "LayerNorm" else x64
    wanted = centred * (centred.square().mean(-1, keepdim=True) + layer.eps).rsqrt() * own[0] + (own[1] if len(own) > 1 else 0)
    torch.testing.assert_close(y.double(), wanted, rtol=2**-8, atol=1e-6)
    for found, exact in zip(gradients, torch.autograd.grad(wanted, [x64, *own], dy.double()), strict=True):
        assert (found.double() - exact).norm() <= 2**-7 * exact.norm()
