"""`build_model` and the decoder's FP8: initial weights, dtypes, patterns of layers that are left out, compilation."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoConfig

import octavo
from building import built_model
from octavo.build import describe
from octavo.errors import EXIT_INPUT, InputError
from octavo.models.sources import load_config

SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 44, "num_attention_heads": 4}
CONFIG = load_config("llama-tiny", SIZES | {"num_hidden_layers": 3})
NEO = GPTNeoConfig(
    vocab_size=97, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48, attention_types=[[["global", "local"], 1]],
    window_size=4, max_position_embeddings=64, attention_dropout=0.1, resid_dropout=0.1,
)  # fmt: skip
RECIPES = {
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=4),
    "current": octavo.recipe.CurrentScaling(),
    "rowwise": octavo.recipe.RowwiseScaling(),
    "block": octavo.recipe.BlockScaling(),
}


def build(config=CONFIG, **changes):
    make = {"dtype": torch.float32, "params_dtype": torch.float32, "device": "cpu", "seed": 3}
    return built_model(config, **make | changes)


def tokens(seed=1, length=16):
    return torch.randint(97, (2, length), generator=torch.Generator().manual_seed(seed))


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("config", [CONFIG, NEO], ids=["decoder", "own-code"])
def test_the_seed_alone_decides_the_weights(config):
    torch.manual_seed(0)
    first = weights(build(config))
    other = weights(build(config, seed=4))
    torch.manual_seed(999)
    torch.rand(7)
    assert same(weights(build(config)), first)
    matrices = [name for name, tensor in first.items() if tensor.dim() > 1]
    assert matrices
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    for i, name in enumerate(matrices):
        assert not any(torch.equal(first[name], first[later]) for later in matrices[i + 1 :])


def test_layers_start_from_the_same_weights_in_a_deeper_model():
    deeper = weights(build(load_config("llama-tiny", SIZES | {"num_hidden_layers": 5})))
    shallow = weights(build(load_config("llama-tiny", SIZES | {"num_hidden_layers": 2})))
    assert all(torch.equal(tensor, deeper[name]) for name, tensor in shallow.items())


def test_a_model_with_some_of_its_weights_is_refused():
    with octavo.delayed_init():
        model = AutoModelForCausalLM.from_config(CONFIG)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(48))
    with pytest.raises(InputError, match=r"values for some parameters, and none for model\.embed_tokens\.weight"):
        octavo.transform(model)


def test_initial_weights_are_as_the_config_asks():
    config = load_config("llama-tiny", SIZES | {"initializer_range": 0.05, "attention_bias": True, "mlp_bias": True})
    for name, parameter in build(config).named_parameters():
        if parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.1), name
            assert abs(parameter.mean().item()) < 5 * 0.05 / parameter.numel() ** 0.5, name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)), name


@pytest.mark.parametrize("config", [CONFIG, NEO], ids=["decoder", "own-code"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_are_respected(config, dtype, params_dtype):
    if config is NEO and dtype == torch.float32 and params_dtype == torch.bfloat16:
        with pytest.raises(InputError, match="Use params_dtype float32"):
            build(config, dtype=dtype, params_dtype=params_dtype)
        return
    model = build(config, dtype=dtype, params_dtype=params_dtype)
    assert {p.dtype for p in model.parameters()} == {params_dtype}
    assert model.training
    assert model(input_ids=tokens()).logits.dtype == dtype
    with octavo.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {params_dtype}


def test_bf16_parameters_are_the_rounding_of_float32_ones():
    master = weights(build())
    assert same(weights(build(params_dtype=torch.bfloat16)), {name: tensor.bfloat16() for name, tensor in master.items()})


@pytest.mark.parametrize("config", [CONFIG, NEO], ids=["decoder", "own-code"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_meta_device_nothing_is_allocated(config, dtype):
    model = build(config, device="meta", dtype=dtype, load_from="no/such/folder")
    assert all(p.is_meta for p in model.parameters())
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in build(config).named_parameters()]


EVERY = ("self_attention.qkv", "self_attention.proj", "ffn.fc1", "ffn.fc2")
PATTERNS = {
    "layers.1.self_attention.proj": [(1, EVERY[1])],
    "layers.1.ffn": [(1, EVERY[2]), (1, EVERY[3])],
    "layers.1.*": [(1, name) for name in EVERY],
    "layers.2": [(2, name) for name in EVERY],
    "*.fc1": [(n, EVERY[2]) for n in range(3)],
    "layers.[02].self_attention.*": [(n, name) for n in (0, 2) for name in EVERY[:2]],
    "model.layers.0": [(0, name) for name in EVERY],
    "model.layers.*.mlp.down_proj": [(n, EVERY[3]) for n in range(3)],
    "model.layers.2.mlp.up_proj": [(2, EVERY[2])],
    "model.layers.0.self_attn.k_proj": [(0, EVERY[0])],
    "*.o_proj": [(n, EVERY[1]) for n in range(3)],
    "model.layers.1.mlp": [(1, EVERY[2]), (1, EVERY[3])],
    "model.layers.*.self_attn": [(n, name) for n in range(3) for name in EVERY[:2]],
    "*": [(n, name) for n in range(3) for name in EVERY],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_skip_pattern_takes_exactly_those_layers_out_of_fp8(pattern):
    model = build(skip=[pattern])
    wanted = {f"layers.{n}.{name}" for n, name in PATTERNS[pattern]}
    reports = {report.name: report for report in describe(model).layers}
    out = {name for name, report in reports.items() if not report.fp8} - {"embedding", "head"}
    assert out == wanted
    assert all(pattern in reports[name].reason for name in wanted)
    with octavo.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    used = {name for name, entry in octavo.fp8.inspect(model).items() if entry}
    assert used == set(reports) - wanted - {"embedding"} - ({"head"} if pattern == "*" else set())


def test_skipped_layers_compute_the_unquantised_product():
    plain, skipped, part = build(), build(skip=["*"]), build(skip=["layers.0", "layers.1"])
    wanted = plain(input_ids=tokens()).logits
    with octavo.fp8_autocast(fp8_recipe=RECIPES["current"]):
        assert torch.equal(skipped(input_ids=tokens()).logits, wanted)
        found = part(input_ids=tokens()).logits
        every = plain(input_ids=tokens()).logits
    assert 0 < (found - wanted).norm() < (every - wanted).norm()


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("layers.0.self_atention.proj", "layers.0.self_attention.proj"),
        ("layers.9.*", "layers."),
        ("layer.1.ffn.fc2", "layers.1.ffn.fc2"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest(pattern, meant):
    with pytest.raises(InputError) as raised:
        build(skip=["layers.0", pattern])
    assert raised.value.exit_code == EXIT_INPUT
    assert repr(pattern) in str(raised.value)
    assert meant in str(raised.value)


def train(recipe, *, compiled=False, config=CONFIG, steps=4, **options):
    model = build(config, dtype=torch.bfloat16, **options)
    if compiled:
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(8)
    losses = []
    for step in range(steps):
        with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), model


@pytest.mark.long(lambda recipe: recipe in ("current", "rowwise"))
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo itself does both
@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_compiled_blocks_train_as_eager_ones(recipe):
    torch.compiler.reset()
    config = load_config("llama-tiny", SIZES | {"num_hidden_layers": 1})
    eager, model = train(RECIPES.get(recipe), config=config)
    compiled, other = train(RECIPES.get(recipe), config=config, compiled=True)
    torch.testing.assert_close(compiled, eager, rtol=5e-3, atol=0)
    if recipe == "delayed":
        ours, theirs = octavo.fp8.inspect(other), octavo.fp8.inspect(model)
        for name, entry in theirs.items():
            for operand, state in entry.items():
                if (name, operand) == ("head", "grad_output"):  # of a known scale
                    continue
                assert ours[name][operand]["amax_history"].count_nonzero() == state["amax_history"].count_nonzero() == 3
                torch.testing.assert_close(ours[name][operand]["scale"], state["scale"], rtol=0.3, atol=0)


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_a_model_with_its_own_code_recomputes_without_changing_a_bit(recipe):
    (kept, one), (again, other) = (train(RECIPES.get(recipe), config=NEO, recompute=r) for r in (False, True))
    assert torch.equal(kept, again)
    assert same(weights(one), weights(other))


def test_documents_do_not_see_each_other_in_a_model_that_keeps_its_own_code():
    model = build(NEO).eval()
    ids = torch.randint(NEO.vocab_size, (1, 12))
    other = ids.clone()
    other[:, :5] = torch.randint(NEO.vocab_size, (1, 5))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        one, two = (model(input_ids=i, position_ids=positions).logits[:, 5:] for i in (ids, other))
    assert torch.equal(one, two)
