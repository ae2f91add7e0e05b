"""Recomputed blocks give the same bits as blocks that keep their activations, with dropout and in FP8 too."""

import copy
from unittest import mock

import pytest
import torch
from llamas import llama, llama_config, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPTNeoConfig, LlamaForCausalLM

import octavo
from building import built_model
from octavo.build import describe, transform
from octavo.compat.te import recipes as te_recipes
from octavo.errors import InputError
from octavo.fp8.experts import ExpertsGemms
from octavo.fp8.linear import LinearGemms
from octavo.fp8.quantizer import LinearQuantizer
from octavo.fp8.recipe import Operand, coerce
from octavo.fp8.scaling import state_records
from octavo.kernels.attention import pieces
from octavo.nn import mlp
from octavo.parallel import offload

RECIPES = {
    "none": None,
    "delayed": octavo.recipe.DelayedScaling(amax_history_len=3),
    "most-recent": octavo.recipe.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
    "current": octavo.recipe.CurrentScaling(),
    "rowwise": octavo.recipe.RowwiseScaling(),
    "block": octavo.recipe.BlockScaling(),
}


def train(
    recipe, recompute, *, away=False, dropout=0.0, attention=None, dtype=torch.float32, inside=False, micro_batches=1,
    family="llama", chunks=1,
):  # fmt: skip
    """Losses, every gradient of every step, and the FP8 state of a short run; attention: the dropout of its probabilities."""
    hidden = {"hidden_dropout": dropout} if family == "gpt_neox" else {}
    config = llama_config(attention_dropout=dropout if attention is None else attention, model_type=family, **hidden)
    model = built_model(
        config, dtype=dtype, params_dtype=torch.float32, device="cpu", seed=4, recompute=recompute,
        mlp_chunks=chunks, offload=away,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(12)
    seen = []
    for step in range(3):
        for micro in range(micro_batches):
            ids = tokens(2, 19, seed=10 * step + micro)
            first = None if micro_batches == 1 else micro == 0
            with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
                loss = model(input_ids=ids, labels=ids, is_first_microbatch=first).loss
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            seen.append(loss.detach())
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *state_records(model).values(), torch.rand(3)]


def assert_same_bits(one, other):
    assert len(one) == len(other)
    for number, (a, b) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(a, b), f"tensor {number} differs by {(a - b).abs().max()}"


@pytest.mark.long(lambda recipe, family, dropout: (list(RECIPES).index(recipe) % 2 == 0) == (family in ("mistral", "qwen3")))
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("family", "dropout"), [("llama", 0.0), ("llama", 0.1), ("mistral", 0.1), ("gpt_neox", 0.1), ("qwen3", 0.1)]
)
def test_recomputation_changes_no_bit(recipe, family, dropout):
    kept, *again = (
        train(RECIPES[recipe], recompute, dropout=dropout, family=family)
        for recompute in (False, True, "mlp", *([] if dropout else ["selective"]))
    )
    for run in again:
        assert_same_bits(kept, run)


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_selective_recomputation_repeats_the_dropout_of_hidden_states(recipe):
    how = {"dropout": 0.1, "attention": 0.0, "family": "gpt_neox"}
    kept, again = (train(RECIPES[recipe], recompute, **how) for recompute in (False, "selective"))
    assert_same_bits(kept, again)


@pytest.mark.parametrize("packing", ["join", "documents", "window"])
def test_attention_is_never_recomputed_selectively(packing, monkeypatch):
    forwards, found = [], {}
    computed = pieces._forward
    monkeypatch.setattr(pieces, "_forward", lambda *given: forwards.append(1) or computed(*given))
    for recompute in (False, "selective"):
        model = built_model(
            llama_config(model_type="mistral", sliding_window=5 if packing == "window" else None),
            dtype=torch.float32, params_dtype=torch.float32, device="cpu", seed=4, recompute=recompute,
        )  # fmt: skip
        ids = tokens(2, 18)
        positions = torch.arange(9).repeat(2)[None] if packing == "documents" else None
        forwards.clear()
        loss = model(input_ids=ids, labels=ids, position_ids=positions).loss
        before = len(forwards)
        loss.backward(retain_graph=True)
        once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        loss.backward()
        assert len(forwards) == before
        assert before > 0 or not recompute
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, 2 * once[name])
        found[recompute] = once
    for name, gradient in found[False].items():
        torch.testing.assert_close(found["selective"][name], gradient, rtol=1e-5, atol=1e-6)


def test_dropout_is_computed_again_and_so_refused_selectively():
    with pytest.raises(InputError, match=r'"selective" with attention_dropout = 0\.1.*Set train\.recompute = true'):
        built_model(
            llama_config(attention_dropout=0.1), dtype=torch.float32, params_dtype=torch.float32, device="meta", seed=0,
            recompute="selective",
        )  # fmt: skip


@pytest.mark.parametrize("recipe", ["none", "delayed", "block"])
def test_recomputation_changes_no_bit_in_bf16(recipe):
    kept, *again = (train(RECIPES[recipe], r, dropout=0.1, dtype=torch.bfloat16) for r in (False, True, "mlp"))
    for run in again:
        assert_same_bits(kept, run)


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_recomputation_inside_the_autocast_changes_no_bit(recipe):
    assert_same_bits(*(train(RECIPES[recipe], r, dropout=0.1, inside=True) for r in (False, True)))


def test_recomputation_with_kept_weights_changes_no_bit():
    kept, *again = (train(RECIPES["delayed"], r, micro_batches=3) for r in (False, True, "mlp", "selective"))
    for run in again:
        assert_same_bits(kept, run)


def test_dropout_drops_in_training_only():
    assert not torch.equal(train(None, False, dropout=0.1)[0], train(None, False)[0])
    model = built_model(
        llama_config(attention_dropout=0.5), dtype=torch.float32, params_dtype=torch.float32, device="cpu", seed=4
    ).eval()
    ids = tokens(2, 19)
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_recomputed_model_keeps_less_for_backward():
    kept = []
    for recompute in (False, "mlp", True):
        model = built_model(
            llama_config(), dtype=torch.float32, params_dtype=torch.float32, device="cpu", seed=4, recompute=recompute
        )
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            model(input_ids=tokens(8, 64), labels=tokens(8, 64))
        kept.append(sum(sizes))
    config, rows = llama_config(), 8 * 64
    assert kept[0] - kept[1] == config.num_hidden_layers * rows * 2 * config.intermediate_size  # gates and ups
    assert kept[2] < kept[0] / 2


@pytest.mark.parametrize("recompute", [False, True, "mlp", "selective"])
@pytest.mark.parametrize(
    ("recipe", "family"), [("none", "llama"), ("delayed", "llama"), ("rowwise", "llama"), ("delayed", "gpt_neox")]
)
def test_offloading_changes_no_bit_and_keeps_nothing_of_a_block_but_on_the_host(recipe, family, recompute, monkeypatch):
    kept = []

    class Counted(offload._Saved):
        def __init__(self, *args):
            super().__init__(*args)
            kept.append(self.host)

    dropout = 0.0 if recompute == "selective" else 0.1
    plain = train(RECIPES[recipe], recompute, dropout=dropout, family=family)
    monkeypatch.setattr(offload, "_Saved", Counted)
    monkeypatch.setattr(offload, "SMALLEST_BYTES", 0)
    assert_same_bits(plain, train(RECIPES[recipe], recompute, away=True, dropout=dropout, family=family))
    assert len(kept) >= 3
    if recompute == "selective":  # each block's input, attention's result and its log-sum-exp
        assert len(kept) == 3 * 3 * 2
    assert not any(copy.is_pinned() for copy in kept)


def test_a_model_that_keeps_its_own_code_is_not_offloaded_and_keeps_its_mlps_whole():
    neo = GPTNeoConfig(hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]], vocab_size=50)
    with pytest.raises(InputError, match=r"gpt_neo runs its original code.*Use train\.recompute = true"):
        built_model(neo, dtype=torch.float32, params_dtype=torch.float32, device="cpu", seed=0, offload=True)
    with pytest.raises(InputError, match=r"recompute = 'mpl' is not supported: use False, True, \"selective\", or \"mlp\""):
        built_model(llama_config(), dtype=torch.float32, params_dtype=torch.float32, device="cpu", seed=0, recompute="mpl")
    with pytest.raises(
        InputError, match=r'train.recompute = "mlp": gpt_neo runs its original code.*Use train\.recompute = true'
    ):
        built_model(neo, dtype=torch.float32, params_dtype=torch.float32, device="cpu", seed=0, recompute="mlp")


@pytest.mark.parametrize("options", [{"recompute": True}, {"recompute": "mlp"}, {"recompute": True, "offload": True}])
def test_transform_recomputes_and_offloads_as_a_run_does(options):
    ids = tokens(2, 19)
    found = []
    for how in ({}, options):
        model = transform(llama(), dtype=torch.float32, **how)
        with octavo.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
            model(input_ids=ids, labels=ids).loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert_same_bits(*found)


def test_transform_refuses_of_own_code_what_a_run_refuses():
    with pytest.raises(InputError, match=r"Sequential runs its original code and has no gradient_checkpointing_enable\(\)"):
        transform(nn.Sequential(nn.Linear(3, 3)), recompute=True)
    with pytest.raises(InputError, match=r"train.offload = true .*: Sequential runs its original code"):
        transform(nn.Sequential(nn.Linear(3, 3)), offload=True)
    octavo.init({"sm_activation_offloading": True})
    try:
        with pytest.raises(InputError, match=r"train.offload = true .*: Sequential runs its original code"):
            transform(nn.Sequential(nn.Linear(3, 3)))
    finally:
        octavo.shutdown()


def test_a_model_that_keeps_its_code_says_why():
    assert describe(transform(llama(model_type="mistral"))).own_code == ""
    kept = transform(llama(model_type="mistral"), blocks="own")
    assert describe(kept).fp8_layers == 14
    assert (type(kept).__name__, describe(kept).own_code) == ("MistralForCausalLM", 'blocks = "own"')
    with pytest.raises(InputError, match=r"unknown blocks 'theirs'"):
        transform(llama(), blocks="theirs")


@pytest.mark.parametrize("head", ["backward", True])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_head_in_fp8_inside_a_checkpoint_has_current_scaling(use_reentrant, head):
    """The scale of a tensor itself repeats in the recomputation."""
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(llama_config())
    found = {}
    for way in ("checkpoint", "current head"):
        model = transform(
            copy.deepcopy(theirs),
            fp8_head=head,
            layers={"head": octavo.recipe.CurrentScaling()} if way != "checkpoint" else None,
        )
        gradients = []
        for step in range(3):
            ids = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(step))
            one = torch.ones(1, requires_grad=True)

            def loss(one, model=model, ids=ids):
                return model(input_ids=ids, labels=ids).loss * one

            with octavo.fp8_autocast(fp8_recipe=octavo.recipe.DelayedScaling(amax_history_len=2)):
                out = checkpoint(loss, one, use_reentrant=use_reentrant) if way == "checkpoint" else loss(one)
            out.backward()
            gradients += [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
        found[way] = gradients
    assert all(torch.equal(*pair) for pair in zip(*found.values(), strict=True))
    assert found["checkpoint"][-1].norm() > 0


def with_first_scale_of_one(recipe):
    """Transformer Engine's rule for a tensor that has not begun, of which Octavo's own casts each chunk by its own amax."""
    if recipe is None or recipe.history is None:
        return recipe
    theirs = te_recipes.DelayedScaling(
        amax_history_len=recipe.amax_history_len, amax_compute_algo=recipe.amax_compute_algo, margin=recipe.margin
    )
    return coerce(theirs)


def train_in_chunks(recipe, recompute, chunks, family="llama"):
    """Losses, gradients and FP8 state of three steps, and the rows of each call of the activation's kernels."""
    rows = []

    def noted(kernel):
        def run(curve, first, *args, **options):
            rows.append(first.shape[0])
            return kernel(curve, first, *args, **options)

        return run

    kernels = {name: noted(getattr(mlp, name)) for name in ("activation", "activation_backward")}
    with mock.patch.multiple(mlp, CHUNK_ROWS=16, **kernels):
        return train(recipe, recompute, family=family, chunks=chunks), rows


@pytest.mark.long(lambda recipe, recompute: recompute and (list(RECIPES).index(recipe) % 2 == 0) == (recompute == "selective"))
@pytest.mark.parametrize("recompute", [False, True, "selective"])
@pytest.mark.parametrize(
    ("recipe", "family"), [*((name, "llama") for name in RECIPES), ("delayed", "gpt_neox"), ("none", "gpt_neox")]
)
def test_mlps_in_chunks(recipe, family, recompute):
    whole, _ = train_in_chunks(with_first_scale_of_one(RECIPES[recipe]), recompute, 1, family)
    parts, rows = train_in_chunks(with_first_scale_of_one(RECIPES[recipe]), recompute, 3, family)
    assert set(rows) == {16, 6}  # 38 tokens
    if recipe in ("current", "rowwise", "block"):  # a part has scales of its own, and three steps add to the difference
        for one, other in zip(whole, parts, strict=True):
            assert (one - other).norm() <= 0.25 * one.norm() + 1e-3
        return
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(other, one, rtol=2e-4, atol=2e-6)


def test_the_result_of_parts_is_no_view():
    """FSDP2 warns of a view, which a write in place would detach from its backward."""
    layer = octavo.nn.LayerNormMLP(32, 64)
    layer.chunks = 2
    with mock.patch.object(mlp, "CHUNK_ROWS", 16):
        assert not layer(torch.ones(2, 16, 32))._is_view()


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_scales_of_chunks_are_those_of_the_whole(recipe):
    """Under block scaling too: a chunk has whole blocks of 128 tokens."""
    found = []
    for chunks in (1, 3):
        torch.manual_seed(0)
        layer = octavo.nn.LayerNormMLP(128, 256, normalization="RMSNorm", activation="swiglu", checkpoint=True)
        layer.chunks = chunks
        x = torch.randn(300, 128, requires_grad=True)
        with octavo.fp8_autocast(fp8_recipe=with_first_scale_of_one(RECIPES[recipe])):
            y = layer(x)
        y.backward(torch.randn(300, 128))
        found.append([y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
    (y, dx, *whole), (y_parts, dx_parts, *parts) = found
    assert torch.equal(y, y_parts)
    assert torch.equal(dx, dx_parts)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_chunks_that_cannot_be():
    for chunks in (0, 1.5, True):
        with pytest.raises(InputError, match=rf"mlp_chunks = {chunks} is not supported: use a whole number from 1"):
            transform(llama(), mlp_chunks=chunks)
    with pytest.raises(InputError, match=r"train.mlp_chunks = 2: Sequential runs its original code.*Use train.mlp_chunks = 1"):
        transform(nn.Sequential(nn.Linear(3, 3)), mlp_chunks=2)


@pytest.mark.parametrize(
    ("family", "chunks", "runs"),
    [("llama", 1, (2, 2, 2, 1)), ("llama", 2, (2, 2, 4, 2)), ("gpt_neox", 1, (2, 1, 2, 1)), ("mixtral", 1, (2, 2, 2, 1))],
)
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise"])
def test_no_product_is_computed_again_that_only_the_stream_takes(recipe, family, chunks, runs, monkeypatch):
    """runs: of the four products of a block, in forward and backward."""
    outputs = []
    for products in (LinearGemms, ExpertsGemms):

        def output(gemms, *operands, computed=products.output):
            outputs.append(gemms.state)
            return computed(gemms, *operands)

        monkeypatch.setattr(products, "output", output)
    found = []
    for recompute in (False, True):
        model = built_model(
            llama_config(model_type=family, **({"num_local_experts": 4} if family == "mixtral" else {})),
            dtype=torch.float32, params_dtype=torch.float32, device="cpu", seed=4, recompute=recompute, mlp_chunks=chunks,
        )  # fmt: skip
        ids = tokens(2, 65)
        for _ in range(3):  # with histories
            model.zero_grad()
            outputs.clear()
            with octavo.fp8_autocast(enabled=recipe is not None, fp8_recipe=RECIPES[recipe]):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters()), *state_records(model).values()])
    assert_same_bits(*found)
    for layer in model.layers:
        attention = layer.self_attention
        last = layer.layernorm_moe.experts if family == "mixtral" else layer.layernorm_mlp
        layers = attention.layernorm_qkv, attention.proj
        states = *(each.fp8_state for each in layers), last.fc1_fp8_state, last.fc2_fp8_state
        expected = (*runs[:2], 6, 2) if chunks > 1 and recipe != "delayed" else runs
        assert tuple(map(outputs.count, states)) == expected
        assert not last.skip_output


@pytest.mark.parametrize("recompute", [False, True, "selective"])
def test_a_forward_that_is_computed_again_casts_no_input_for_backward(recompute, monkeypatch):
    columnwise, cast = {}, LinearQuantizer._cast

    def record(quantizer, operand, producer, **how):
        if operand is Operand.INPUT:
            columnwise.setdefault(quantizer.state, []).append(how["columnwise"])
        return cast(quantizer, operand, producer, **how)

    monkeypatch.setattr(LinearQuantizer, "_cast", record)
    model = built_model(
        llama_config(), dtype=torch.float32, params_dtype=torch.float32, device="cpu", seed=4, recompute=recompute
    )
    ids = tokens(2, 19)
    with octavo.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    for layer in model.layers:
        for linear in (layer.self_attention.layernorm_qkv, layer.self_attention.proj):
            assert columnwise[linear.fp8_state] == ([False, True] if recompute else [True])


@pytest.mark.long
@pytest.mark.parametrize("recompute", [True, "mlp"])
def test_compiled_blocks(recompute):
    """As a loop of the caller's may have them: both forwards of a block save the same tensors."""
    ids = tokens(2, 19, seed=3)
    found = []
    for compile in (False, True):
        make = {"dtype": torch.float32, "params_dtype": torch.float32, "device": "cpu", "seed": 4}
        model = built_model(llama_config(), recompute=recompute, **make)
        for block in model.layers if compile else ():
            block.compile(backend="aot_eager")
        losses = []
        for _ in range(2):
            with octavo.fp8_autocast(fp8_recipe=RECIPES["delayed"]):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
        found.append((losses, [p.grad for p in model.parameters()]))
    (eager, grads), (compiled, others) = found
    assert compiled == pytest.approx(eager, rel=1e-5)
    for one, other in zip(grads, others, strict=True):
        torch.testing.assert_close(other, one, rtol=0.02, atol=1e-4 * one.abs().max().item())
